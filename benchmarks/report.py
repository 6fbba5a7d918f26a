"""A page of a recording on disk: time and memory, compared with one verified read.

Each arm is a fresh process, which measures itself; the arms take turns. Files are in the system's
cache, so that reading costs what it costs at most once it waits for no disk.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from scio_recorder import Recorder

READ = "for label in recording:\n    for part in recording.parts(label): pass"
ARMS = {
    "one verified read": READ,
    "to_frame()": "recording.layer_rows()",
    "report(page)": "recording.report(page)",
}
PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from scio_recorder import open_recording
torch.set_num_threads(1)
def most():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
recording, page = open_recording(sys.argv[1]), sys.argv[1] + ".html"
before = most()
start, used = time.perf_counter(), time.process_time()
{what}
spent = time.perf_counter() - start, time.process_time() - used
print(json.dumps([*spent, (most() - before) / 1000]))
"""


def collected(folder: str, gigabytes: float) -> int:
    """Write a recording of images' channels, a ReLU's among them, and return its bytes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).eval()
    rnet = Recorder(net, input_size=(1, 3, 32, 32))
    rnet.record("0", "2")
    num_batches = max(1, round(gigabytes * 1e9 / (64 * 2 * 32**3 * 4)))
    batches = (torch.randn(64, 3, 32, 32) for _ in range(num_batches))
    recording = rnet.collect(batches, store=f"disk:{folder}", progress=False)
    return sum(recording[label].nbytes for label in recording)


def main(gigabytes: float, rounds: int) -> None:
    """Print one table."""
    spent: dict[str, list[list[float]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        num_bytes = collected(f"{folder}/run", gigabytes)
        for _ in range(rounds):
            for name, what in ARMS.items():
                program = [sys.executable, "-c", PROGRAM.format(what=what), f"{folder}/run"]
                result = subprocess.run(program, capture_output=True, text=True, check=True)
                spent[name].append(json.loads(result.stdout))
    print(f"{num_bytes / 1e9:.1f} GB, medians of {rounds} rounds")
    print(f"{'':<20}{'time / read':>12}{'processor / read':>18}{'processor, s/GB':>17}{'MB':>6}")
    base = spent["one verified read"]
    for name, rows in spent.items():
        ratios = [
            statistics.median(row[at] / one[at] for row, one in zip(rows, base, strict=True))
            for at in (0, 1)
        ]
        per_gb = statistics.median(row[1] for row in rows) / num_bytes * 1e9
        most = max(row[2] for row in rows)
        print(f"{name:<20}{ratios[0]:12.1f}{ratios[1]:18.1f}{per_gb:17.2f}{most:6.0f}")


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    main(given[0] if given else 1.0, int(given[1]) if len(given) > 1 else 5)

"""A page of a recording on disk: time and memory, compared with one verified read.

Each arm is a fresh process, which measures itself; the arms take turns. Files are in the system's
cache, so that reading waits for no disk. With ``--cold``, they leave the cache before each arm.
"""

from __future__ import annotations

import argparse
import json
import os
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


def drop(folder: Path) -> None:
    """Let the system forget the files of a folder, which it would otherwise read from memory."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(gigabytes: float, rounds: int, *, is_cold: bool) -> None:
    """Print one table."""
    spent: dict[str, list[list[float]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        num_bytes = collected(f"{folder}/run", gigabytes)
        for _ in range(rounds):
            for name, what in ARMS.items():
                if is_cold:
                    drop(Path(folder, "run"))
                program = [sys.executable, "-c", PROGRAM.format(what=what), f"{folder}/run"]
                result = subprocess.run(program, capture_output=True, text=True, check=True)
                spent[name].append(json.loads(result.stdout))
    where = "from the disk" if is_cold else "from the system's cache"
    print(f"{num_bytes / 1e9:.1f} GB {where}, medians of {rounds} rounds")
    print(f"{'':<20}{'s/GB':>8}{'/ read':>8}{'processor, s/GB':>17}{'/ read':>8}{'MB':>6}")
    base = spent["one verified read"]
    for name, rows in spent.items():
        print(f"{name:<20}", end="")
        for at, width in ((0, 8), (1, 17)):
            per_gb = statistics.median(row[at] for row in rows) / num_bytes * 1e9
            ratio = statistics.median(a[at] / b[at] for a, b in zip(rows, base, strict=True))
            print(f"{per_gb:{width}.2f}{ratio:8.1f}", end="")
        print(f"{max(row[2] for row in rows):6.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gigabytes", type=float, nargs="?", default=1.0)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    main(given.gigabytes, given.rounds, is_cold=given.cold)

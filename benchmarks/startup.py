"""The time of importing the package and of a first recorder, as parts of importing torch.

Each arm is a fresh process, which measures itself; the arms take turns. Run it twice: the first run
of a fresh checkout also compiles the package's files.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

TORCH = "import torch, numpy"
NET = "net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())"
RECORDER = "recorder.Recorder(net, input_size=(1, 3, 8, 8))"
ARMS = {
    "import torch": ("", TORCH),
    "import scio_recorder": (TORCH, "import scio_recorder"),
    "from scio_recorder import Recorder": (TORCH, "from scio_recorder import Recorder"),
    "first Recorder(...)": (f"{TORCH}; import scio_recorder as recorder; {NET}", RECORDER),
    "second Recorder(...)": (
        f"{TORCH}; import scio_recorder as recorder; {NET}; {RECORDER}",
        RECORDER,
    ),
}
BARS = {"import scio_recorder": 0.15, "first Recorder(...)": 0.40}


def seconds(before: str, what: str) -> float:
    """Return the processor time that a statement takes in a fresh process."""
    code = (
        f"import time; {before or 'pass'}; start = time.process_time(); {what}; "
        "print(time.process_time() - start)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return float(result.stdout.split()[-1])


def main(rounds: int) -> None:
    """Print one table."""
    spent: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, (before, what) in ARMS.items():
            spent[name].append(seconds(before, what))
    print(f"{'part of importing torch':<36}{'median':>8}{'lowest':>8}{'highest':>9}{'bar':>7}")
    for name, times in spent.items():
        parts = [time / base for time, base in zip(times, spent["import torch"], strict=True)]
        shown = f"{statistics.median(parts):8.3f}{min(parts):8.3f}{max(parts):9.3f}"
        print(f"{name:<36}{shown}{BARS.get(name, ''):>7}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)

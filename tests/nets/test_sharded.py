"""A net that is sharded is refused before anything runs, and one labelled before works sharded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sharded.py")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_labelled_first_and_sharded_after(kind: str, processes: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, kind, str(rank), str(processes), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, ended
    assert all(output.endswith("done\n") for output, _ in ended)

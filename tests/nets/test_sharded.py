"""Nets that are sharded before they are labelled, or after, work as in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import is_available

SCRIPT = Path(__file__).with_name("sharded.py")

pytestmark = pytest.mark.skipif(not is_available(), reason="needs torch.distributed")


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_sharded(processes: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(processes), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(processes)
    ]
    ended = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, ended
    assert all(output.endswith("done\n") for output, _ in ended)

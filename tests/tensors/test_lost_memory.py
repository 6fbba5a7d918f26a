"""Tensors whose memory is gone are left alone, or an error: they never end the process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each function in a process of its own takes ten minutes.
FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
PROGRAM = Path(__file__).with_name("lost_memory.py")
PLACES = ("parameter", "buffer", "attribute", "container", "input", "output")
# Read from its text: the program runs when it is imported with arguments.
WAYS = next(
    [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    for node in ast.parse(PROGRAM.read_text(encoding="utf-8")).body
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
)


def run(how: str, where: str, way: str, folder: Path) -> None:
    command = [sys.executable, str(PROGRAM), how, where, way, str(folder / "memory")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_freed_memory_in_all_functions(tmp_path: Path) -> None:
    run("freed", "parameter", "all", tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS if FULL else ["all"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", ["freed", "shrunk", "mapped"])
def test_lost_memory(how: str, where: str, way: str, tmp_path: Path) -> None:
    run(how, where, str(way), tmp_path)

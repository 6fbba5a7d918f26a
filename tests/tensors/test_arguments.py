"""Checks of arguments that are numbers, and blocks that nobody closes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from scio_recorder.errors import CollectError
from scio_recorder.tensors.arguments import whole


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3)])
def test_whole_numbers_of_all_kinds(value: object) -> None:
    assert whole("bins", value, 1) == 3


@pytest.mark.parametrize(
    "value", [0, True, None, 3.0, "3", [3], np.arange(3), torch.arange(3), torch.tensor(3.0)]
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(CollectError, match=r"bins=.*: give a whole number from 1 on"):
        whole("bins", value, 1)


LEFT_OPEN = """
import torch
from scio_recorder import Recorder
rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2), verbose=0)
rnet.record("0")
blocks = [rnet.guard(), rnet.guard(operations=True), rnet.watch(), rnet.collecting(progress=False)]
opened = [block.__enter__() for block in blocks]
rnet.net(torch.ones(1, 2))
"""


@pytest.mark.campaign
def test_blocks_that_are_open_at_the_exit_end_in_silence() -> None:
    command = [sys.executable, "-c", LEFT_OPEN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert ended.stderr == ""

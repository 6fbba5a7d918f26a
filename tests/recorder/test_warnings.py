"""Warnings name the line of the caller's that led to them, from whatever depth they come."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare, track
from scio_recorder.recording.recording import Recording
from tests.zoo.base import Net

X = torch.ones(2, 4)
PAIRS = [(X, X)]


class Masked(nn.Module):
    """In training mode, and with a second input that a loader may give."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.body(x)
        return hidden


def overwriting(net: Any, x: Tensor) -> Tensor:
    """Change a view that the first layer returned."""
    hidden: Tensor = net.first(x)
    hidden += 1
    return hidden


def masked() -> Recorder:
    rnet = Recorder(Masked(), input_size=(2, 4))
    rnet.record("body.0")
    return rnet


def attending() -> Recorder:
    net = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    rnet = Recorder(net, input_size=(2, 3, 4))
    rnet.record("0.linear1")
    return rnet


def plain() -> Recorder:
    return Recorder(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), input_size=(2, 4))


def collects(path: Path) -> None:
    masked().collect(PAIRS)  # 2 warnings


def collects_parts(path: Path) -> None:
    masked().collect_parts(lambda part: PAIRS, 2, store=f"disk:{path}")  # 4 warnings


def compares(path: Path) -> None:
    compare(masked(), masked(), PAIRS)  # 1 warning


def compares_with_a_recording(path: Path) -> None:
    rnet = masked()
    rnet.net.eval()
    recording: Recording = rnet.collect([X])
    compare(recording, rnet, PAIRS)  # 1 warning


def calls(path: Path) -> None:
    with torch.no_grad():
        attending()(torch.ones(2, 3, 4))  # 1 warning


def extracts(path: Path) -> None:
    with torch.no_grad():
        attending().extract(torch.ones(2, 3, 4))  # 1 warning


def collects_from_other_kernels(path: Path) -> None:
    attending().collect([torch.ones(2, 3, 4)])  # 1 warning


def watches(path: Path) -> None:
    rnet = attending()
    with torch.no_grad(), rnet.watch():
        rnet.net(torch.ones(2, 3, 4))  # 1 warning


def watches_nothing(path: Path) -> None:
    rnet = plain()
    rnet.record("0")
    with rnet.watch():  # 1 warning
        copy.deepcopy(rnet.net)(X)


def sweeps(path: Path) -> None:
    x = torch.ones(2, 3, 4)
    attending().sweep(x, x * 2, torch.mean)  # 1 warning


def guards_in_another_kernel(path: Path) -> None:
    rnet = attending()
    with torch.no_grad(), rnet.guard():
        rnet.net(torch.ones(2, 3, 4))  # 1 warning


def tracks(path: Path) -> None:
    net = Net(overwriting, first=nn.Flatten(0))
    with track(net):  # 1 warning
        output = net(torch.ones(2, 2, requires_grad=True) * 1)
        output.sum().backward()


def guards(path: Path) -> None:
    rnet = plain()
    with rnet.guard(action="warn"):
        rnet(X * torch.tensor([torch.inf, -torch.inf, 1, 1]))  # 1 warning


def guards_gradients(path: Path) -> None:
    rnet = plain()
    with rnet.guard(action="warn"):
        output = rnet(X)
        (output.sum() * torch.nan).backward()  # 1 warning


@pytest.mark.parametrize(
    "act",
    [
        collects,
        collects_parts,
        compares,
        compares_with_a_recording,
        calls,
        extracts,
        collects_from_other_kernels,
        watches,
        watches_nothing,
        sweeps,
        guards_in_another_kernel,
        tracks,
        guards,
        guards_gradients,
    ],
)
def test_a_warning_names_the_line_that_led_to_it(
    act: Callable[[Path], None], tmp_path: Path
) -> None:
    lines, first = inspect.getsourcelines(act)
    ((place, number),) = [
        (first + at, int(line.partition("# ")[2].split()[0]))
        for at, line in enumerate(lines)
        if " warning" in line
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(tmp_path / "run")
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, place)] * number, [
        str(one.message) for one in caught
    ]


def test_the_warning_of_another_kernel_comes_once() -> None:
    rnet, x = attending(), torch.ones(2, 3, 4)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            rnet(x)
        rnet(x, activation_postproc={"0.linear1": torch.tanh})
        rnet.extract(x)
    (text,) = [str(one.message) for one in caught]
    assert "layer 1-1 0 (TransformerEncoderLayer) runs without torch's fused kernel" in text

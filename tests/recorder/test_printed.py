"""What a recorder prints is torchinfo's table, and a line that says what is recorded."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
import torchinfo
from torch import Tensor, nn
from torch.nn.utils import prune

from scio_recorder import Recorder
from scio_recorder.errors import MutationError
from tests.zoo.base import Net

COLUMNS = ("input_size", "output_size", "num_params", "params_percent")


def test_table_is_torchinfos_and_ends_with_a_line() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())
    rnet = Recorder(net, input_size=(1, 5))
    table = torchinfo.summary(
        net, input_size=(1, 5), col_names=COLUMNS, row_settings=("var_names", "depth"), verbose=0
    )
    # torchinfo prints the name of a member where it means its value.
    table = str(table).replace("(Units.MEGABYTES)", "(M)")
    line = "=" * len(table.splitlines()[0])
    head = f"Recorder instance for the following network\n{table}\nCurrently recording: "
    assert repr(rnet) == f"{head}None\n{line}"
    rnet.record((0, 1), (1, 3))
    assert repr(rnet) == f"{head}0-1, 1-3\n{line}"


class Tied(nn.Module):
    """A head of which all, and one of which a part, is the embedding's; a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.part = nn.Linear(4, 10)
        self.out = nn.Linear(10, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.part.weight = self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.out(self.part(self.inner(self.embed(words)))))
        return out


def test_tied_weights_count_once() -> None:
    net = Tied()
    rnet = Recorder(net, input_data=torch.zeros(2, 3, dtype=torch.long))
    total = sum(parameter.numel() for parameter in net.parameters())
    free = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    text = repr(rnet)
    assert f"\nTotal params: {total}\nTrainable params: {free}\n" in text
    assert f"\nNon-trainable params: {total - free}\n" in text
    assert rnet.summary.total_param_bytes == 4 * total
    figures = {}
    for line in text.split("=\n")[2].splitlines()[:-1]:
        figures[line.split()[0]] = line.split()[-2:]
    assert figures["Tied"] == ["12", f"{12 / total:.2%}"]
    assert figures["├─Linear"] == ["(tied)", "(tied)"]
    shares = [float(share[:-1]) for share in re.findall(r"[-\d.]+%", text)]
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(100, abs=0.05)
    assert "Units" not in text
    assert repr(pickle.loads(pickle.dumps(rnet))) == text
    # Of one layer alone it is still true how many parameters it has.
    assert rnet.architecture["head"].num_params == 40


def test_pruned_weights_are_counted_as_torchinfo_does() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    prune.random_unstructured(net[0], "weight", amount=10)
    rnet = Recorder(net, input_size=(1, 6))
    assert "\nTotal params: 46\n" in repr(rnet)


class Pair(nn.Module):
    """Returns a structure."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x, {"ids": x.long(), "rest": None, "scale": 2}


def test_records_are_printed_as_shapes() -> None:
    rnet = Recorder(nn.Sequential(nn.Linear(4, 3), Pair()), input_size=(1, 4))
    assert repr(rnet.activations).startswith("{} (there is none of any layer yet. Choose layers")
    rnet.record("0", "1", inputs=True, gradients=True)
    out = rnet(torch.ones(2, 4))
    assert repr(rnet.activations).splitlines() == [
        "1-1 0 (Linear)  (2, 3) float32",
        "1-2 1 (Pair)    ((2, 3) float32, {'ids': (2, 3) int64, 'rest': None, 'scale': int})",
    ]
    assert "1-1 0 (Linear)  Inputs(args=((2, 4) float32,), kwargs={})" in repr(rnet.inputs)
    out[0].sum().backward()
    assert "1-1 0 (Linear)  (2, 3) float32" in repr(rnet.gradients)
    inputs = rnet.collect([torch.ones(2, 4)], transform={"1": lambda out, batch: out[0]}).inputs
    assert "<inputs of 1 batch>" in repr(inputs)


def test_many_records_are_printed_in_part() -> None:
    rnet = Recorder(nn.Sequential(*(nn.ReLU() for _ in range(100))), input_size=(1, 2))
    rnet.record("*")
    rnet(torch.ones(1, 2))
    lines = repr(rnet.activations).splitlines()
    assert len(lines) == 61
    assert lines[-1] == "... and 41 more layers"


def test_a_record_that_can_not_be_read_is_printed_with_its_shape() -> None:
    rnet = Recorder(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), input_size=(1, 4))
    rnet.record("0", copy="never")
    rnet(torch.ones(2, 4))
    with pytest.raises(MutationError):
        rnet.activations["0"]
    assert repr(rnet.activations) == "1-1 0 (Linear)  (2, 3) float32"


def test_a_structure_of_many_tensors_is_printed_in_part() -> None:
    rnet = Recorder(Net(lambda _, x: (x,) * 1000), input_size=(1, 2))
    rnet.record("0-1")
    rnet(torch.ones(1, 2))
    shown = repr(rnet.activations)
    assert "((1, 2) float32, (1, 2) float32" in shown
    assert shown.endswith(" ...")
    assert len(shown) < 400

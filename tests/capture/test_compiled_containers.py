"""Layers of a compiled recorder that return containers: a copy of their tensors, or an error."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from scio_recorder import Recorder
from scio_recorder.errors import UnsupportedNetError
from scio_recorder.postprocessors import Replace, Scale
from tests.oracle import tensors
from tests.rotation import one_in

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@dataclass
class Pair:
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    first: Any


@dataclass(slots=True)
class Slotted:
    first: Any


class Named(NamedTuple):
    first: Any


class Plain:
    def __init__(self, first: Any) -> None:
        self.first = first


for kind in (Pair, Frozen):
    torch.export.register_dataclass(kind)

KNOWN: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, 1),
    "named tuple": Named,
    "dict": lambda x: {"a": [x]},
    "dataclass": lambda x: Pair(x, "a word"),
    "frozen": Frozen,
    "nested": lambda x: Pair([Frozen({"a": x})], (Named(Frozen(x)), None)),
    "beside others": lambda x: (Pair(x, torch.float32), x.shape),
}
UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "object": Plain,
    "a dataclass unknown to torch": Slotted,
    "in a dataclass": lambda x: Pair(x, Plain(x)),
}
# Dynamo of older versions can't follow its constructor.
if torch.__version__ >= "2.13":
    UNKNOWN["UserDict"] = lambda x: UserDict(a=x)


class Wrap(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Net(nn.Module):
    """Writes into the tensor that a layer has returned in a container."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 3), Wrap(make)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.wrap(hidden)
        return hidden.zero_() * 1


class Reads(Net):
    """Goes on with the container."""

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x))


def recorder(net: Net) -> Recorder:
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    rnet.record("wrap")
    rnet.compile(fullgraph=True, backend="eager")
    return rnet


def truth(net: Net, x: Tensor) -> Tensor:
    return linear(x, net.linear.weight, net.linear.bias)


@pytest.mark.parametrize(
    ("name", "grad"), one_in(10, itertools.product(KNOWN, (False, True)), first=6)
)
def test_records_are_copies(name: str, grad: bool) -> None:
    make = KNOWN[name]
    net = Net(make)
    rnet, x = recorder(net), torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        assert not rnet(x).any()
        record, expected = rnet.activations["wrap"], truth(net, x)
    found = tensors(record)
    assert type(record) is type(make(x))
    assert found
    for one in found:
        torch.testing.assert_close(one, expected.detach())
    chosen = rnet.collect([x], transform=lambda activation, batch: tensors(activation)[0])
    torch.testing.assert_close(chosen["wrap"], expected.detach())


@pytest.mark.parametrize("name", one_in(10, UNKNOWN))
def test_objects_that_can_not_be_copied_are_refused(name: str) -> None:
    make = UNKNOWN[name]
    rnet = recorder(Net(make))
    with torch.no_grad():
        assert not rnet(torch.randn(2, 4)).any()
    with pytest.raises(UnsupportedNetError, match=r"layer 1-2 wrap .* can't copy"):
        _ = rnet.activations
    with pytest.raises(UnsupportedNetError, match="uncompiled"):
        rnet.collect([torch.randn(2, 4)], transform=lambda activation, batch: batch)


@pytest.mark.parametrize("name", one_in(10, KNOWN, first=1))
def test_postprocessors_reach_all_tensors(name: str) -> None:
    make = KNOWN[name]
    net = Reads(make)
    rnet, x = recorder(net), torch.randn(2, 4)
    with torch.no_grad():
        output = rnet(x, activation_postproc={"wrap": Scale(3.0)})
        for one in tensors(output):
            torch.testing.assert_close(one, 3 * truth(net, x))
        output = rnet(x, activation_postproc={"wrap": Replace(make(torch.ones(2, 3)))})
    assert all(bool((one == 1).all()) for one in tensors(output))


@pytest.mark.campaign
@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_postprocessors_act_uncompiled_on_what_a_compiled_pass_can_not_look_into(
    make: Callable[[Tensor], Any],
) -> None:
    net = Reads(make)
    rnet, x = recorder(net), torch.randn(2, 4)
    postproc = {"wrap": Scale(3.0)}
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported):
        rnet(x, activation_postproc=postproc)
    rnet.compile(backend="eager")
    with torch.no_grad():
        found = tensors(rnet(x, activation_postproc=postproc))
    assert found
    for one in found:
        torch.testing.assert_close(one, 3 * truth(net, x))

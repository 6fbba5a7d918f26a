"""T1 where torch counts no write: to a layer's output by a pointer, and to memory that is freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils import swap_tensors

from scio_recorder.errors import MutationError
from tests.harness import one_process, recorder
from tests.oracle import same_bits
from tests.zoo.base import Net, linear

Write = Callable[[Tensor], object]


def by_pointer(hidden: Tensor) -> None:
    memory = (ctypes.c_float * hidden.numel()).from_address(hidden.data_ptr())
    memory[0] = 7.0


def by_batch_norm(hidden: Tensor) -> None:
    spread, values = torch.ones(12), torch.randn(3, 12)
    functional.batch_norm(values, hidden.detach().view(12), spread, training=True, momentum=0.5)


WRITES: dict[str, Write] = {
    "pointer": by_pointer,
    "numpy": lambda hidden: hidden.detach().numpy().fill(3),
    "dlpack": lambda hidden: torch.from_dlpack(hidden.detach()).mul_(3),
    "data": lambda hidden: hidden.data.mul_(3),
    "memory that is filled": lambda hidden: hidden.untyped_storage().fill_(0),
    "memory that is copied": lambda hidden: hidden.untyped_storage().copy_(
        torch.ones(12).untyped_storage()
    ),
    "other data": lambda hidden: setattr(hidden, "data", torch.full((3, 4), 2.0)),
    "batch norm": by_batch_norm,
    # From here on, not for tensors on a graph.
    "swapped": lambda hidden: swap_tensors(hidden, torch.full((3, 4), 2.0)),  # type: ignore[no-untyped-call]  # torch's own
    "set": lambda hidden: hidden.set_(torch.full((3, 4), 2.0)),  # type: ignore[call-overload]  # of torch
}
FREED: dict[str, Write] = {
    "freed": lambda hidden: hidden.untyped_storage().resize_(0),
    "cut": lambda hidden: hidden.untyped_storage().resize_(8),
}


class Written(nn.Module):
    """Its first layer's output is written to as soon as the second layer has used it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.write, self.is_on = write, True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output: Tensor = self.second(hidden)
        if self.is_on:
            self.write(hidden)
        return output


CASES = [
    (write, grad)
    for grad in (False, True)
    for write in [*WRITES, *FREED]
    if not (grad and write.startswith(("set", "swapped")))
]


@pytest.mark.parametrize(("name", "grad"), CASES)
def test_a_write_that_is_not_counted_changes_no_record(name: str, grad: bool) -> None:
    net = Written((WRITES | FREED)[name])
    rnet = recorder(net, "first", "second", inputs=True)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(3, 4)
            rnet(x)
            truth = functional.linear(x, net.first.weight, net.first.bias)
            assert same_bits(rnet.activations["first"], truth)
            assert same_bits(rnet.inputs["second"].args[0], truth)
            assert rnet.activations["first"].requires_grad == grad


def test_a_layer_that_writes_into_its_input_and_returns_it() -> None:
    kernel = Net(lambda _, x: (by_pointer(x), x)[1])
    net = nn.Sequential(linear(), kernel, linear())
    rnet = recorder(net, "*", inputs=True)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4)
            rnet(x)
            first = functional.linear(x, net[0].weight, net[0].bias)
            second = first.clone()
            second[0, 0] = 7.0
            assert same_bits(rnet.activations["0"], first)
            assert same_bits(rnet.activations["1"], second)
            assert same_bits(rnet.inputs["1"].args[0], first)
            assert same_bits(rnet.inputs["2"].args[0], second)


def test_a_layer_that_gives_nan_is_not_taken_for_one_that_was_written_to() -> None:
    rnet = recorder(Written(by_pointer), "first", "second")
    with torch.no_grad():
        for _ in range(2):
            output = rnet(torch.full((3, 4), float("nan")))
    # Only referred to.
    assert rnet.activations.peek((1, 2)).data_ptr() == output.data_ptr()


@pytest.mark.parametrize("name", FREED)
@pytest.mark.parametrize("settings", [{}, {"copy": "never"}])
def test_memory_that_is_freed_for_the_first_time_is_an_error(
    name: str, settings: dict[str, Any]
) -> None:
    net = Written(FREED[name])
    net.is_on = False
    rnet = recorder(net, "first", "second", inputs=True, **settings)
    with torch.no_grad():
        rnet(torch.randn(3, 4))
        net.is_on = True
        with rnet.watch() as passes:
            net(torch.randn(3, 4))
        for records in (passes[0], rnet.activations):
            with pytest.raises(MutationError, match="freed"):
                records["first"]
        with pytest.raises(MutationError, match="freed"):
            rnet.inputs["second"]
        assert rnet.activations["second"].shape == (3, 4)
        assert repr(rnet.activations)
        if not settings:
            x = torch.randn(3, 4)
            rnet(x)
            truth = functional.linear(x, net.first.weight, net.first.bias)
            assert same_bits(rnet.activations["first"], truth)


def test_memory_that_comes_back_is_not_that_of_the_record() -> None:
    held: list[Tensor] = []
    rnet = recorder(Written(held.append), "first", copy="never")
    with torch.no_grad():
        rnet(torch.randn(3, 4))
    records, memory = rnet.activations, held.pop().untyped_storage()
    memory.resize_(0)
    with pytest.raises(MutationError):
        records["first"]
    memory.resize_(48)
    with pytest.raises(MutationError):
        records["first"]


def test_what_was_read_stays_when_its_memory_is_freed() -> None:
    held: list[Tensor] = []
    net = Written(held.append)
    rnet = recorder(net, "first")
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4)
            rnet(x)
    read = rnet.activations["first"]
    held.pop().untyped_storage().resize_(0)
    truth = functional.linear(x, net.first.weight, net.first.bias)
    assert same_bits(read, truth)
    assert same_bits(rnet.activations["first"], truth)


def block() -> nn.Module:
    weight = nn.Parameter(torch.randn(9, 4))
    positions = Net(lambda net, x: net.weight[: x.shape[1]], weight=weight)
    return Net(lambda net, x: net.layer(x + net.positions(x)), positions=positions, layer=linear())


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_view_of_a_parameter_that_fsdp_frees() -> None:
    net = nn.Sequential(block(), block())
    wanted = [block.positions.weight.detach()[:5].clone() for block in net]
    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
        rnet = recorder(net, "*.positions", input_size=(2, 5, 4))
        for grad in (False, False, False, True, True, True):
            with torch.set_grad_enabled(grad):
                rnet(torch.randn(2, 5, 4))
            records = [rnet.activations[f"{number}.positions"] for number in range(2)]
            assert all(map(torch.equal, records, wanted))

"""What labelling needs: copies go with it, memory that is missing is named, weights are shared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import LabellingError
from scio_recorder.nets.labelling import label
from scio_recorder.nets.labelling.label import label_net, list_operations
from scio_recorder.nets.state import untouched
from tests.zoo.base import Net, linear


def differentiates(net: Any, x: Tensor) -> Tensor:
    y = net.a(x.requires_grad_())
    return torch.autograd.grad(y.sum(), x)[0]


def asks(net: Any, x: Tensor) -> Tensor:
    return net.a(x) * net.a(x).max().item()


def leads_to_itself() -> nn.Module:
    net = Net(lambda net, x: net.held[0].a(x), a=linear())
    net.held = [net]
    return net


def needs_its_hook() -> nn.Module:
    net = Net(lambda net, x: (net.a(x), net.seen.pop())[1], a=linear())
    net.seen = []
    net.a.register_forward_hook(lambda module, args, output: net.seen.append(output))
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(linear(), nn.BatchNorm1d(4)),
    "run twice": lambda: Net(differentiates, a=linear()),
    "asked other answers": lambda: Net(asks, a=linear()),
    "hooked": needs_its_hook,
    "in a loop": leads_to_itself,
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live(kind: type) -> list[Any]:
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


def memory() -> int:
    """Return the bytes that all tensors hold, each memory once."""
    tensors = [tensor for tensor in live(Tensor) if tensor.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", NETS)
def test_copies_go_without_waiting_for_a_garbage_collection(kind: str) -> None:
    net, x = NETS[kind](), torch.randn(2, 4)
    before, num_modules = memory(), len(live(nn.Module))
    _, architecture = label_net(net, input_data=x)
    list_operations(net, architecture, input_data=x)
    assert memory() == before
    # What leads to itself waits, without its memory.
    assert (len(live(nn.Module)) == num_modules) == (kind != "in a loop")


@pytest.mark.parametrize("where", ["copy", "pass"])
def test_memory_that_is_missing_is_counted(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.BatchNorm1d(1024))

    def fails(*call: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    place = untouched.copy if where == "copy" else nn.Linear
    monkeypatch.setattr(place, "deepcopy" if where == "copy" else "forward", fails)
    with pytest.raises(LabellingError, match=r"takes 2 MiB beside it.*Free|free memory") as error:
        label_net(net, input_size=(2, 512))
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    monkeypatch.undo()
    # An allocation that really fails.
    huge = Net(lambda net, x: torch.empty(1 << 60), a=linear())
    with pytest.raises(LabellingError, match="too little memory"):
        label_net(huge, input_size=(2, 4))


def test_writing_to_weights_too_large_to_copy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untouched, "CLONED_BYTES", 16)

    def write(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.a.weight.add_(1)
        return net.a(x)

    with pytest.warns(UserWarning, match=r"stay changed: net\.a\.weight"):
        label_net(Net(write, a=linear()), input_size=(2, 4))


def test_weights_of_more_than_a_gibibyte_count_as_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    buffers = sum(buffer.nbytes for buffer in net.buffers())
    assert label.copied_bytes(net) == buffers + (16 + 3 * 4) * 4
    monkeypatch.setattr(untouched, "CLONED_BYTES", 16)
    assert label.copied_bytes(net) == buffers

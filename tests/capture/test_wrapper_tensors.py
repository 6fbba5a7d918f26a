"""T1 for tensors without memory of their own: what happens to the tensors inside is not counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map

from scio_recorder import Recorder, compare
from scio_recorder.errors import MutationError
from scio_recorder.tensors.digests import WeightDigests
from scio_recorder.tensors.properties import has_memory, inner_tensors, same_bits, version_of
from tests import oracle
from tests.harness import one_process, recorder


class Wrapper(Tensor):
    """A wrapper that does not say what it holds."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]  # of torch

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.held if isinstance(value, Wrapper) else value

        output = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return cls(output) if isinstance(output, Tensor) else output


class Told(Wrapper):
    """A wrapper that says what it holds."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None


def sharded(tensor: Tensor) -> Tensor:
    whole: Tensor = DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()])
    return whole


def masked(tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch
        return masked_tensor(tensor, torch.ones_like(tensor, dtype=torch.bool))


# How to wrap a tensor, and what finds it inside.
WRAPPERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "own": (Wrapper, lambda whole: whole.held),
    "told": (Told, lambda whole: whole.held),
    "nested": (lambda tensor: Told(Wrapper(tensor)), lambda whole: whole.held.held),
    "masked": (masked, lambda whole: whole._masked_data),
    "sharded": (sharded, lambda whole: whole._local_tensor),
    "sharded and nested": (lambda t: sharded(Told(t)), lambda whole: whole._local_tensor.held),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "written": lambda inner: inner.mul_(3),
    "uncounted": lambda inner: inner.data.mul_(3),
    "freed": lambda inner: inner.untyped_storage().resize_(0),
}


pytestmark = pytest.mark.filterwarnings("ignore:.*MaskedTensors.*")


@pytest.fixture(scope="module", autouse=True)
def _distributed() -> Iterator[None]:
    with one_process():
        yield


class Wrapped(nn.Module):
    """Its layer returns a wrapper, and it writes to the tensor inside."""

    class Layer(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self._wrap, _ = WRAPPERS[kind]

        def forward(self, x: Tensor) -> Any:
            return self._wrap(x * 2)

    def __init__(self, kind: str, write: str) -> None:
        super().__init__()
        self.layer, self._kind, self.write = self.Layer(kind), kind, write

    def forward(self, x: Tensor) -> Tensor:
        inner = WRAPPERS[self._kind][1](self.layer(x))
        output = inner + 1
        if self.write:
            with torch.no_grad():
                WRITES[self.write](inner)
        return output


def recorded(kind: str, write: str, **settings: Any) -> tuple[Wrapped, Recorder]:
    net = Wrapped(kind, write)
    rnet = recorder(net, "layer", **settings)
    return net, rnet


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("copy", ["auto", "always"])
def test_records_hold_whatever_happens_inside(kind: str, write: str, copy: str) -> None:
    _, rnet = recorded(kind, write, copy=copy)
    for grad in (False, True):
        for _ in range(3):
            x = torch.randn(3, 4)
            with torch.set_grad_enabled(grad):
                rnet(x)
            read = WRAPPERS[kind][1](rnet.activations["layer"]).detach()
            assert oracle.same_bits(read, x * 2)


@pytest.mark.parametrize("write", ["written", "freed"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_net_that_begins_to_write_inside_is_noticed(kind: str, write: str) -> None:
    net, rnet = recorded(kind, "")
    x = torch.randn(3, 4)
    with torch.no_grad():
        rnet(x)
        net.write = write
        rnet(x)
        with pytest.raises(MutationError):
            rnet.activations["layer"]
        rnet(x)
    assert oracle.same_bits(WRAPPERS[kind][1](rnet.activations["layer"]), x * 2)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_was_read_stays_whatever_happens_inside(kind: str) -> None:
    held: list[Tensor] = []
    _, rnet = recorded(kind, "")
    rnet.net.layer.register_forward_hook(lambda module, args, output: held.append(output))
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4)
            rnet(x)
    read = rnet.activations["layer"]
    WRAPPERS[kind][1](held[-1]).mul_(3)
    assert oracle.same_bits(WRAPPERS[kind][1](read), x * 2)


def test_a_net_whose_layers_become_wrappers_after_its_first_pass() -> None:
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    rnet = recorder(net, "0")
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            rnet(x)
        held: list[Any] = []
        net[0].register_forward_hook(lambda module, args, output: held.append(Told(output * 1)))
        net[0].register_forward_hook(lambda module, args, output: held[-1])
        for number in range(3):
            rnet(x)
            held[-1].held.mul_(5)
            if number:
                assert oracle.same_bits(rnet.activations["0"].held, x)
            else:
                # What became of the tensor inside is not known.
                with pytest.raises(MutationError):
                    rnet.activations["0"]


def test_comparisons_do_not_blame_a_layer_for_what_happens_inside() -> None:
    (_, one), (_, other) = recorded("sharded", "written"), recorded("sharded", "written")
    assert compare(one, other, [torch.randn(3, 4) for _ in range(3)]).first is None


@pytest.mark.parametrize("kind", WRAPPERS)
def test_versions_memory_and_bits_are_those_inside(kind: str) -> None:
    wrap, inside = WRAPPERS[kind]
    whole, equal = wrap(torch.ones(3)), wrap(torch.ones(3))
    assert inner_tensors(whole)[0] is inside(whole)
    before = version_of(whole)
    assert version_of(whole) == before
    assert same_bits(whole, equal)
    with torch.no_grad():
        inside(whole).mul_(2)
    assert version_of(whole) != before
    assert not same_bits(whole, equal)
    inside(whole).untyped_storage().resize_(0)
    assert not has_memory(whole)
    assert not same_bits(whole, equal)


def test_digests_of_weights_see_what_happens_inside() -> None:
    linear, weights = nn.Linear(2, 2), WeightDigests()
    linear.weight = nn.Parameter(Told(torch.ones(2, 2)))
    before = weights.digest(linear)
    linear.weight.held.mul_(2)
    assert weights.digest(linear) != before


def test_traced_tensors_are_no_wrappers() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    rnet = recorder(net, "*", inputs=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for _ in range(2):
            rnet(mode.from_tensor(torch.ones(3, 4)))
            assert rnet.activations["0"].shape == (3, 4)
            assert inner_tensors(rnet.activations["0"])[0] is rnet.activations["0"]


@pytest.mark.parametrize("kind", ["own", "told", "nested"])
def test_a_tensor_inside_that_nothing_counts_is_copied(kind: str) -> None:
    """It was made in inference mode, and the wrapper around it was not."""
    net, rnet = recorded(kind, "")
    make = net.layer._wrap

    def wrap(tensor: Tensor) -> Any:
        with torch.inference_mode():
            inner = tensor.clone()
        return make(inner)

    net.layer._wrap = wrap
    x = torch.randn(3, 4)
    with torch.no_grad():
        for write in ("", "", "uncounted"):
            net.write = write
            rnet(x)
    read = WRAPPERS[kind][1](rnet.activations["layer"])
    assert oracle.same_bits(read, x * 2)

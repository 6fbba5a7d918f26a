"""A module that a network holds under several names is called under those of the labelling."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import FlowError, Recorder
from tests.harness import recorder
from tests.zoo.base import Net as Composed

X = torch.randn(2, 4)


class Owner(nn.Module):
    """Calls a module that others call as well, any number of times."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.times = shared, 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.shared(x)
        return x


class Net(nn.Module):
    """Runs a function of itself and its input, which may change."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.a = self.b = self.c = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.a] * 3)
        self.named = nn.ModuleDict({"first": self.a, "second": self.a})
        self.owners = nn.ModuleList(Owner(self.a) for _ in range(3))
        self.inner = nn.Module()
        self.inner.a = self.inner.b = self.a
        self.order: tuple[Any, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def by_index(net: Any, x: Tensor) -> Tensor:
    for place in net.order:
        x = net.layers[place](x)
    return x


def by_name(net: Any, x: Tensor) -> Tensor:
    for name in net.order:
        x = getattr(net, name)(x)
    return x


def by_owner(net: Any, x: Tensor) -> Tensor:
    for place in net.order:
        x = net.owners[place](x)
    return x


def ordered(run: Callable[[Any, Tensor], Tensor], *order: Any) -> Callable[[Any, Tensor], Tensor]:
    def function(net: Any, x: Tensor) -> Tensor:
        net.order = order
        return run(net, x)

    return function


# How the shared module is called at labelling and later, equally often.
OTHERWISE: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "twice under one name": (lambda n, x: n.b(n.a(x)), lambda n, x: n.a(n.a(x))),
    "in another order": (lambda n, x: n.b(n.a(x)), lambda n, x: n.a(n.b(x))),
    "three names": (lambda n, x: n.c(n.b(n.a(x))), lambda n, x: n.c(n.a(n.a(x)))),
    "once": (lambda n, x: n.a(x), lambda n, x: n.b(x)),
    "by keyword": (lambda n, x: n.b(input=n.a(input=x)), lambda n, x: n.a(input=n.a(input=x))),
    "by star": (lambda n, x: n.b(*(n.a(x),)), lambda n, x: n.a(*(n.a(x),))),
    "in a part": (lambda n, x: n.inner.b(n.inner.a(x)), lambda n, x: n.inner.a(n.inner.a(x))),
    "in a part and outside": (lambda n, x: n.a(n.inner.a(x)), lambda n, x: n.a(n.a(x))),
    "constant index": (lambda n, x: n.layers[1](n.layers[0](x)), lambda n, x: n.a(n.layers[0](x))),
    "index": (ordered(by_index, 0, 1, 2), ordered(by_index, 0, 0, 0)),
    "name": (ordered(by_name, "a", "b"), ordered(by_name, "a", "a")),
    "key": (
        lambda n, x: n.named["second"](n.named["first"](x)),
        lambda n, x: n.named["first"](n.named["first"](x)),
    ),
    "owner": (ordered(by_owner, 0, 1, 2), ordered(by_owner, 0, 1, 1)),
    "owners in another order": (ordered(by_owner, 0, 1, 2), ordered(by_owner, 2, 1, 0)),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_another_name_is_an_error(kind: str) -> None:
    at_labelling, later = OTHERWISE[kind]
    net = Net(at_labelling)
    rnet = recorder(net, nn.Linear, input_size=(2, 4))
    for _ in range(3):
        rnet(X)
    net.run = later
    with pytest.raises(FlowError, match="under several names was called by another one"):
        rnet(X)
    assert len(rnet.activations) == 0
    with pytest.raises(FlowError, match="at labelling"):
        rnet.collect([X], progress=False)
    # The network itself works, and so does the recorder once it is as it was.
    rnet(X, dont_record=True)
    net.run = at_labelling
    rnet(X)
    assert len(rnet.activations) == len(rnet.recording)
    rnet.record("a", calls="any")
    net.run = later
    rnet(X)


def test_an_owner_that_calls_for_another_is_an_error() -> None:
    net = Net(ordered(by_owner, 0, 1))
    rnet = recorder(net, "owners.1.shared", input_size=(2, 4))
    rnet(X)
    net.owners[0].times, net.owners[1].times = 2, 0
    with pytest.raises(FlowError, match=r"'owners\.1\.shared' at labelling, 'owners\.0\.shared'"):
        rnet(X)


# Ways in which names are not seen, but owners are, or nothing changes.
AS_EVER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "variable": lambda n, x: [x := layer(x) for layer in n.layers][-1],
    "checkpoint": lambda n, x: checkpoint(n.b, n.a(x), use_reentrant=False),
    "map": lambda n, x: next(map(n.a, [x])),
    "index": ordered(by_index, 0, 1, 2),
    "negative index": lambda n, x: n.layers[-1](n.layers[len(n.layers) - 1](x)),
    "owners": ordered(by_owner, 2, 1, 0),
    "functional": lambda n, x: n.a(nn.functional.linear(x, n.b.weight, n.b.bias)),
}


@pytest.mark.parametrize("kind", AS_EVER)
def test_what_stays_the_same_is_recorded(kind: str) -> None:
    net = Net(AS_EVER[kind])
    rnet = Recorder(net, input_size=(2, 4))
    rnet.record(nn.Linear, inputs=kind == "index", gradients=kind == "index")
    seen: list[Tensor] = []
    net.a.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    for grad in (False, True, True):
        seen.clear()
        with torch.set_grad_enabled(grad):
            rnet(X)
        order = rnet.architecture.in_order(rnet.recording)
        assert all(torch.equal(rnet.activations[at], x) for at, x in zip(order, seen, strict=True))


def test_an_owner_that_did_not_run_at_labelling_is_another_one() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        return net.optional(x) if net.uses_it else net.shared(x)

    shared = nn.Linear(4, 4)
    net = Composed(forward, shared=shared, optional=Owner(shared), uses_it=False)
    rnet = recorder(net, "shared", input_size=(2, 4))
    rnet(X)
    net.uses_it = True
    with pytest.raises(FlowError, match=r"'shared' at labelling, 'optional\.shared' now"):
        rnet(X)


def test_a_name_that_is_not_shown_is_no_other_name() -> None:
    net = Net(lambda net, x: net.b(net.a(x)))
    rnet = recorder(net, nn.Linear, input_size=(2, 4))
    net.run = lambda net, x: checkpoint(net.b, net.a(x), use_reentrant=False)
    rnet(X)
    net.run = lambda net, x: checkpoint(net.b, net.b(x), use_reentrant=False)
    with pytest.raises(FlowError, match="'a' at labelling, 'b' now"):
        rnet(X)


def by_items(net: Net, x: Tensor) -> Tensor:
    steps = [net.a, net.b]
    result: Tensor = steps[1](steps[0](x))
    return result


def by_functions(net: Net, x: Tensor) -> Tensor:
    result: Tensor = net.get_submodule("b")(net.get_submodule("a")(x))
    return result


@pytest.mark.parametrize("way", [by_items, by_functions])
def test_names_that_the_network_does_not_have_say_nothing(way: Any) -> None:
    net = Net(lambda net, x: net.b(net.a(x)))
    rnet = recorder(net, nn.Linear, input_size=(2, 4))
    net.run = way
    rnet(X)
    assert torch.equal(rnet.activations[rnet.recording[0]], net.a(X))


def test_code_around_calls_is_no_caller() -> None:
    net = Net(lambda net, x: net.b(net.a(x)))
    rnet = recorder(net, nn.Linear, input_size=(2, 4))
    with rnet.saved_tensors("a"), rnet.watch() as passes:
        net(X)
    assert len(passes) == 1
    net.run = lambda net, x: net.a(net.a(x))
    with rnet.saved_tensors("a"), pytest.raises(FlowError, match="'b' at labelling, 'a' now"):
        rnet(X)


def test_a_shared_activation_function_is_recorded() -> None:
    act = nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    rnet = recorder(net, nn.ReLU, input_size=(2, 4))
    rnet(X)
    rnet(X)
    assert torch.equal(rnet.activations[1, 4], net(X))
    assert torch.equal(rnet.activations[1, 2], net[0](X).relu())


def test_variables_of_a_forward_are_not_kept_alive() -> None:
    alive: list[bool] = []

    def run(net: Any, x: Tensor) -> Tensor:
        kept = torch.ones(2)
        seen = weakref.ref(kept)
        for place in (0, 1):
            x = net.layers[place](x)
        del kept
        alive.append(seen() is not None)
        return x

    rnet = recorder(Net(run), nn.Linear, input_size=(2, 4))
    alive.clear()
    rnet(X)
    assert alive == [False]

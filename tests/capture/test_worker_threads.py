"""A network that runs modules in threads of its own: their calls are no calls of the pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import FlowError, Recorder
from tests.harness import in_a_thread
from tests.oracle import same_bits
from tests.zoo.base import Net, linear

POOL = ThreadPoolExecutor(1)


def in_a_pool(module: nn.Module, x: Tensor) -> Tensor:
    return POOL.submit(module, x).result()


def in_a_pool_of_its_own(module: nn.Module, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        return next(iter(pool.map(module, [x])))


def here(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


# As nn.parallel.parallel_apply does, which needs an accelerator.
ELSEWHERE = [in_a_pool, in_a_pool_of_its_own, in_a_thread]
elsewhere = pytest.mark.parametrize("way", ELSEWHERE)
any_calls = pytest.mark.parametrize("calls", ["labelled", "any"])
Way = Callable[[nn.Module, Tensor], Tensor]


def recorder(way: Way, *selectors: str, **options: Any) -> Recorder:
    """Record layers of a net that runs `a` in another thread, if the way does."""
    net = Net(lambda net, x: net.way(net.a, x) + net.b(x), a=linear(), b=linear())
    net.way = way
    rnet = Recorder(net, input_size=(3, 4), verbose=0)
    rnet.record(*selectors, **options)
    return rnet


@elsewhere
@any_calls
def test_an_error_that_says_so(way: Way, calls: str) -> None:
    rnet = recorder(way, "a", "b", calls=calls)
    x = torch.randn(3, 4)
    for use in (
        lambda: rnet(x),
        lambda: rnet(x, activation_postproc={"a": lambda tensor: tensor * 0}, dont_record=True),
        lambda: rnet.collect([x]),
        lambda: rnet.extract(x),
    ):
        with pytest.raises(FlowError, match=r"thread called 1-1 a \(Linear\)"):
            use()
    with pytest.raises(FlowError, match="thread"), rnet.watch():
        rnet.net(x)
    assert not rnet.activations


@elsewhere
@any_calls
def test_other_layers_are_recorded(way: Way, calls: str) -> None:
    rnet = recorder(way, "b", "", calls=calls)
    x = torch.randn(3, 4)
    out = rnet(x)
    whole, part = rnet.activations[""], rnet.activations["b"]
    truth = rnet.net.b.forward(x)
    assert same_bits(part if calls == "labelled" else part[0], truth)
    assert same_bits(whole if calls == "labelled" else whole[0], out)


@any_calls
def test_also_where_only_a_later_pass_uses_threads(calls: str) -> None:
    rnet = recorder(here, "a", "b", calls=calls)
    x = torch.randn(3, 4)
    rnet(x)
    assert rnet.activations
    rnet.net.way = in_a_pool
    with pytest.raises(FlowError, match="another thread called 1-1 a"):
        rnet(x)
    rnet.net.way = here
    rnet(x)
    assert rnet.activations


def test_one_call_here_and_one_there() -> None:
    rnet = recorder(lambda module, x: in_a_pool(module, module(x)), "a", calls="any")
    with pytest.raises(FlowError, match="another thread called 1-1 a"):
        rnet(torch.randn(3, 4))


@any_calls
def test_passes_of_other_threads_are_no_calls_of_this_one(calls: str) -> None:
    """Of this recorder and of another one of the net, and calls of the bare net if counted."""
    rnet = recorder(here, "a", calls=calls)
    other = Recorder(rnet.net, input_size=(3, 4), verbose=0)
    other.record("a", calls=calls)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    runs = [rnet, other, *([rnet.net] if calls == "labelled" else [])]

    def meanwhile(module: nn.Module, given: Tensor) -> Tensor:
        if given is x:
            for run in runs:
                in_a_pool(run, y)  # type: ignore[arg-type]
        return module(given)  # type: ignore[no-any-return]

    rnet.net.way = meanwhile
    for one in (rnet, other):
        one(x)
        found = one.activations["a"]
        assert same_bits(found if calls == "labelled" else found[0], rnet.net.a.forward(x))


@any_calls
def test_layers_of_another_network_are_no_calls_of_this_pass(calls: str) -> None:
    rnet, other = recorder(here, "a", calls=calls), recorder(here, "a", "b", calls=calls)
    x = torch.randn(3, 4)

    def meanwhile(module: nn.Module, given: Tensor) -> Tensor:
        in_a_pool(other.net, given)
        return module(given)  # type: ignore[no-any-return]

    rnet.net.way = meanwhile
    rnet(x)
    found = rnet.activations["a"]
    assert same_bits(found if calls == "labelled" else found[0], rnet.net.a.forward(x))

"""Hooks that are added to a net whose recorder is compiled already: seen, or the record says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from scio_recorder.errors import FlowError, UnsupportedNetError
from tests.rotation import one_in

pytestmark = pytest.mark.usefixtures("fresh_compiler")

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def add_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


def recorder(net: nn.Module | None = None) -> Recorder:
    net = net or nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    rnet = Recorder(net, input_size=(1, 4), verbose=0)
    rnet.record("0")
    return rnet


def compiled_by_method() -> tuple[Recorder, Any]:
    rnet = recorder()
    rnet.compile(backend="eager", fullgraph=True)
    return rnet, rnet


def compiled_by_function() -> tuple[Recorder, Any]:
    rnet = recorder()
    return rnet, torch.compile(rnet, backend="eager", fullgraph=True)


WAYS = (compiled_by_method, compiled_by_function)


def plain(rnet: Recorder) -> Tensor:
    """Return what layer 0 returns without hooks."""
    layer: Any = rnet.net[0]  # type: ignore[index]
    return nn.functional.linear(X, layer.weight, layer.bias)


def test_records_and_collections_see_it() -> None:
    rnet, call = compiled_by_method()
    with torch.no_grad():
        call(X)
        layer: Any = rnet.net[0]  # type: ignore[index]
        handles = [layer.register_forward_hook(add_one, prepend=first) for first in (False, True)]
        out = call(X)
        assert torch.equal(rnet.activations["0"], plain(rnet) + 1 + 1)
        assert torch.equal(out, (plain(rnet) + 1 + 1).relu())
        assert torch.equal(rnet.collect([X])["0"], plain(rnet) + 1 + 1)
        for handle in handles:
            handle.remove()
        call(X)
        assert torch.equal(rnet.activations["0"], plain(rnet))


@pytest.mark.parametrize("make", one_in(2, WAYS))
def test_a_comparison_sees_it(make: Callable[[], tuple[Recorder, Any]]) -> None:
    rnet, call = make()
    with torch.no_grad():
        call(X)
        rnet.net[0].register_forward_hook(add_one)  # type: ignore[index]
        reference = recorder(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        reference.net.load_state_dict(rnet.net.state_dict())
        found = compare(reference, call, [X])
    assert found["0"].max_abs == pytest.approx(1)


@pytest.mark.parametrize("is_before", [False, True])
def test_without_a_place_to_look_before_the_pass_the_record_says_so(is_before: bool) -> None:
    rnet, call = compiled_by_function()
    with torch.no_grad():
        if not is_before:
            call(X)
        rnet.net[0].register_forward_hook(add_one)  # type: ignore[index]
        assert torch.equal(call(X), (plain(rnet) + 1).relu())
        with pytest.raises(UnsupportedNetError, match=r"1-1 0 \(Linear\).*run the pass again"):
            _ = rnet.activations
        for _ in range(2):
            call(X)
            assert torch.equal(rnet.activations["0"], plain(rnet) + 1)


def test_another_recorder_of_the_net_is_nobodys_hook() -> None:
    rnet, call = compiled_by_function()
    other = recorder(rnet.net)
    with torch.no_grad():
        for _ in range(2):
            call(X)
            assert torch.equal(rnet.activations["0"], plain(rnet))
            other(X)
            assert torch.equal(other.activations["0"], plain(rnet))


@pytest.mark.parametrize("make", one_in(2, WAYS))
def test_a_module_that_takes_the_place_of_a_recorded_one(
    make: Callable[[], tuple[Recorder, Any]],
) -> None:
    rnet, call = make()
    with torch.no_grad():
        call(X)
        rnet.net[0] = nn.Linear(4, 4)  # type: ignore[index]
        call(X)
    with pytest.raises(FlowError, match="1 at labelling, 0 now"):
        _ = rnet.activations


def fail(rnet: Recorder) -> None:
    with pytest.raises(RuntimeError):
        rnet.extract(torch.ones(3, 5))
    hooks = rnet.net[0]._forward_hooks.values()  # type: ignore[index]
    assert all(hook is add_one for hook in hooks)


@pytest.mark.parametrize(
    ("make", "is_compiled_before", "calls"),
    one_in(4, itertools.product(WAYS, (False, True), ("any", "labelled"))),
)
def test_hooks_are_back_after_a_pass_that_failed(
    make: Callable[[], tuple[Recorder, Any]], is_compiled_before: bool, calls: Any
) -> None:
    rnet, call = make()
    rnet.record("0", calls=calls)
    with torch.no_grad():
        if is_compiled_before:
            call(X)
        fail(rnet)
        call(X)
        if call is not rnet:
            with pytest.raises(UnsupportedNetError, match=r"hooks away.*run the pass again"):
                _ = rnet.activations
            call(X)
        found = rnet.activations["0"]
        assert torch.equal(found[0] if calls == "any" else found, plain(rnet))


# Torch 2.8 hands only the type of an error on.
REFUSED = r"call record\(\.\.\.\) again|exception \w+\(PostprocessorError\)"


def test_post_processors_act_last_or_not_at_all() -> None:
    """Dynamo hands the error on as one of its own, or, without fullgraph, runs uncompiled."""
    rnet, call = compiled_by_function()
    posts = {"activation_postproc": lambda tensor: tensor * 2}
    with torch.no_grad():
        call(X, **posts)
        rnet.net[0].register_forward_hook(add_one)  # type: ignore[index]
        with pytest.raises(RuntimeError, match=REFUSED):
            call(X, **posts)
        rnet.record("0")
        assert torch.equal(call(X, **posts), ((plain(rnet) + 1) * 2).relu())
        fail(rnet)
        with pytest.raises(RuntimeError, match=REFUSED):
            call(X, **posts)
        rnet.record("0")
        assert torch.equal(call(X, **posts), ((plain(rnet) + 1) * 2).relu())
        rnet.net[0].register_forward_hook(add_one)  # type: ignore[index]
        loose = torch.compile(rnet, backend="eager")
        assert torch.equal(loose(X, **posts), ((plain(rnet) + 1 + 1) * 2).relu())

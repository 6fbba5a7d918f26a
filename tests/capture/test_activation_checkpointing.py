"""T10: regions under activation checkpointing, which run their modules again in backward.

The truth is the same net without the regions, with plain hooks in the place of post-processors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.capture.test_regions import REENTRANT, around, bare, intervene, nested
from tests.harness import recorder
from tests.oracle import differences, freeze, seed_everything
from tests.zoo.base import Net, linear

if TYPE_CHECKING:
    from collections.abc import Callable

SELECTED = ("first", "block.0", "block.1", "block.2", "block", "last")


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def noisy(tensor: Tensor) -> Tensor:
    return tensor * torch.rand_like(tensor)


def build(call: Callable[..., Any]) -> nn.Module:
    """Return a net that uses one block twice, each in a region of its own."""
    torch.manual_seed(7)
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    return Net(
        lambda net, x: net.last(call(net.block, call(net.block, net.first(x)))),
        first=linear(),
        block=block,
        last=linear(),
    )


def plain(post: Any, make: Callable[..., nn.Module] = build, names: Any = SELECTED) -> nn.Module:
    """Return the net without regions, in which a post-processor acts through hooks of torch."""
    net = make(bare)
    return net if post is None else intervene(net, post, *names)


def inputs(count: int) -> list[Tensor]:
    # Reentrant regions need an input with a gradient.
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


def assert_same_gradients(mine: nn.Module, output: Tensor, truth: nn.Module, other: Tensor) -> None:
    for net, out in ((mine, output), (truth, other)):
        net.zero_grad()
        out.square().sum().backward()
    pairs = [[value.grad for value in net.parameters()] for net in (mine, truth)]
    wrong = differences(*map(freeze, pairs))
    assert not wrong, "\n".join(wrong)


@REENTRANT
@pytest.mark.parametrize("make", [build, nested])
@pytest.mark.parametrize("post", [None, scaled(3.0), noisy], ids=["none", "scaled", "noisy"])
def test_gradients_are_those_of_the_net_without_regions(
    make: Callable[..., nn.Module], post: Any, reentrant: bool
) -> None:
    names = SELECTED if make is build else ("first", "inner.block.1", "inner.block")
    rnet, net = recorder(make(around(reentrant)), *names), plain(post, make, names)
    for seed in range(3):
        (x,) = inputs(1)
        seed_everything(seed)
        output = rnet(x, activation_postproc=post)
        seed_everything(seed)
        truth = net(x)
        assert not differences(freeze(output), freeze(truth))
        assert_same_gradients(rnet.net, output, net, truth)


@REENTRANT
def test_nothing_is_recorded_twice(reentrant: bool) -> None:
    rnet = recorder(build(around(reentrant)), *SELECTED)
    (x,) = inputs(1)
    output = rnet(x)
    before = {label: freeze(rnet.activations[label]) for label in rnet.recording}
    records = {label: rnet.activations[label] for label in rnet.recording}
    assert len(before) == 10
    output.sum().backward()
    for label, truth in before.items():
        assert not differences(freeze(rnet.activations[label]), truth)
        assert rnet.activations[label] is records[label]


ORDERS = {"in order": (0, 1, 2), "reversed": (2, 1, 0), "mixed": (1, 0, 2)}


@REENTRANT
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_outstanding_passes_keep_their_own_postprocessors(
    order: tuple[int, ...], reentrant: bool
) -> None:
    rnet = recorder(build(around(reentrant)), *SELECTED)
    rows = list(zip(inputs(3), [scaled(3.0), None, scaled(-0.5)], strict=True))
    outputs = [rnet(x, activation_postproc=post) for x, post in rows]
    for index in order:
        x, post = rows[index]
        net = plain(post)
        assert_same_gradients(rnet.net, outputs[index], net, net(x))


@REENTRANT
def test_outstanding_passes_summed(reentrant: bool) -> None:
    rnet = recorder(build(around(reentrant)), *SELECTED)
    rows = list(zip(inputs(2), [scaled(3.0), scaled(-0.5)], strict=True))
    sum(rnet(x, activation_postproc=post).square().sum() for x, post in rows).backward()
    nets = [plain(post) for _, post in rows]
    for net, (x, _) in zip(nets, rows, strict=True):
        net(x).square().sum().backward()
    for mine, one, other in zip(*(net.parameters() for net in (rnet.net, *nets)), strict=True):
        # Two passes meet in one sum, whose order the engine chooses.
        torch.testing.assert_close(mine.grad, one.grad + other.grad)


@REENTRANT
def test_passes_in_between_do_not_disturb_the_rerun(reentrant: bool) -> None:
    rnet, net = recorder(build(around(reentrant)), *SELECTED), plain(scaled(3.0))
    x, other = inputs(2)
    output = rnet(x, activation_postproc=scaled(3.0))
    with torch.no_grad():
        rnet(other, activation_postproc=scaled(100.0))
    rnet(other, dont_record=True)
    latest = freeze(dict(rnet.activations))
    assert_same_gradients(rnet.net, output, net, net(x))
    assert not differences(freeze(dict(rnet.activations)), latest)


@REENTRANT
def test_each_call_of_a_shared_block_has_its_own_postprocessor(reentrant: bool) -> None:
    rnet = recorder(build(around(reentrant)), "block.1")
    factors = iter([3.0, -2.0])
    net = plain(lambda tensor: tensor * next(factors), names=["block.1"])
    (x,) = inputs(1)
    output = rnet(x, activation_postproc=[scaled(3.0), scaled(-2.0)])
    assert_same_gradients(rnet.net, output, net, net(x))


@REENTRANT
def test_a_recorder_that_is_run_again_itself_keeps_the_records_of_its_pass(
    reentrant: bool,
) -> None:
    rnet = recorder(nn.Sequential(linear(), nn.Tanh()))
    (x,) = inputs(1)
    with rnet.watch() as passes:
        output = checkpoint(rnet, x, use_reentrant=reentrant)
        before = rnet.activations
        output.sum().backward()
    assert len(passes) == 1
    assert rnet.activations is before


def saving(function: Any, *args: Any) -> Any:
    """Run a region whose results are all kept, and given out in their order in the second run."""
    keep_all = partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )
    return checkpoint(function, *args, use_reentrant=False, context_fn=keep_all)


def copying(call: Callable[..., Any]) -> nn.Module:
    """Return the net of `build`, whose block does what recording does as well: it copies."""
    net: Any = build(call)
    net.block[1] = Net(lambda _, x: x.tanh().clone().sin())
    return net  # type: ignore[no-any-return]


@pytest.mark.parametrize("post", [None, scaled(3.0)], ids=["none", "scaled"])
@pytest.mark.parametrize("options", [{}, {"inputs": True, "gradients": True}, {"copy": "always"}])
def test_selective_checkpointing_does_not_count_what_recording_computes(
    options: Any, post: Any
) -> None:
    rnet, net = recorder(copying(saving), *SELECTED), plain(post, copying)
    rnet.record(*SELECTED, "block.0/linear", **options)
    for _ in range(2):
        (x,) = inputs(1)
        posts = None if post is None else dict.fromkeys(SELECTED, post)
        assert_same_gradients(rnet.net, rnet(x, activation_postproc=posts), net, net(x))


def test_selective_checkpointing_does_not_count_what_a_block_computes() -> None:
    rnet, net = recorder(copying(saving), *SELECTED), plain(None, copying)
    weight, logged = torch.randn(4, 4), []
    with (
        rnet.collecting(
            transform=lambda activation, batch: nn.functional.linear(activation, weight, weight[0])
        ),
        rnet.track(stash=lambda event: logged.append(weight.tanh())),
    ):
        for _ in range(2):
            (x,) = inputs(1)
            assert_same_gradients(rnet.net, rnet.net(x), net, net(x))
    assert logged


class Passing(torch.autograd.Function):
    """Runs a pass of its own in the backward pass, for the first time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], object]) -> Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.run()
        return gradient, None


def test_a_pass_that_a_backward_pass_makes_is_recorded() -> None:
    rnet = recorder(nn.Sequential(linear(), nn.Tanh()), "0")
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    rnet(x)
    Passing.apply(x, lambda: rnet(y)).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(rnet.activations["0"], rnet.net[0].forward(y))

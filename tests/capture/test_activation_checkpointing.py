"""T10: regions under activation checkpointing, which run their modules again in backward.

The truth is the same net without the regions, with plain hooks in the place of post-processors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Recorder
from tests.oracle import differences, freeze, seed_everything
from tests.zoo.base import Net, linear
from tests.zoo.gradients import region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
SELECTED = ("first", "block.0", "block.1", "block.2", "block", "last")


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def noisy(tensor: Tensor) -> Tensor:
    return tensor * torch.rand_like(tensor)


def build(around: Callable[..., Tensor]) -> nn.Module:
    """Two uses of one block, and `around` decides how each is called."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = around(net.block, net.first(x))
        return net.last(around(net.block, hidden))

    torch.manual_seed(7)
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    return Net(forward, first=linear(), block=block, last=linear())


def build_nested(around: Callable[..., Tensor]) -> nn.Module:
    def inner(net: Any, x: Tensor) -> Tensor:
        return around(net.block, x) * 2

    torch.manual_seed(7)
    nested = Net(inner, block=nn.Sequential(linear(), nn.Tanh(), linear()))
    return Net(
        lambda net, x: net.last(around(net.nested, net.first(x))),
        first=linear(),
        nested=nested,
        last=linear(),
    )


def recorder(make: Callable[..., nn.Module], reentrant: bool, selected: Sequence[str]) -> Recorder:
    net = make(lambda function, x: region(reentrant, function, x))
    rnet = Recorder(net, input_size=(3, 4), verbose=0)
    rnet.record(*selected)
    return rnet


class Plain:
    """The net without regions; `post` acts at the selected modules through hooks of torch."""

    def __init__(self, make: Callable[..., nn.Module], selected: Sequence[str]) -> None:
        self.net = make(lambda function, x: function(x))
        self.post: Any = None
        for name in selected:
            self.net.get_submodule(name).register_forward_hook(self._hook)

    def _hook(self, _module: nn.Module, _args: Any, output: Tensor) -> Any:
        return None if self.post is None else self.post(output)

    def __call__(self, x: Tensor, post: Any) -> Tensor:
        self.post = post
        return self.net(x)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [value.grad for value in net.parameters()]


def inputs(count: int) -> list[Tensor]:
    # Reentrant regions need an input with a gradient.
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


def assert_equal(mine: Any, truth: Any) -> None:
    wrong = differences(freeze(mine), freeze(truth))
    assert not wrong, "\n".join(wrong)


@REENTRANT
@pytest.mark.parametrize("make", [build, build_nested])
@pytest.mark.parametrize("post", [None, scaled(3.0), noisy], ids=["none", "scaled", "noisy"])
def test_gradients_are_those_of_the_net_without_regions(
    make: Callable[..., nn.Module], post: Any, reentrant: bool
) -> None:
    names = SELECTED if make is build else ("first", "nested.block.1", "nested.block", "last")
    rnet, plain = recorder(make, reentrant, names), Plain(make, names)
    for seed in range(3):
        (x,) = inputs(1)
        seed_everything(seed)
        output = rnet(x, activation_postproc=post)
        seed_everything(seed)
        truth = plain(x, post)
        assert_equal(output, truth)
        for each, net in ((output, rnet.net), (truth, plain.net)):
            net.zero_grad()
            each.square().sum().backward()
        assert_equal(gradients(rnet.net), gradients(plain.net))


@REENTRANT
def test_nothing_is_recorded_twice(reentrant: bool) -> None:
    rnet = recorder(build, reentrant, SELECTED)
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
    rnet, plain = recorder(build, reentrant, SELECTED), Plain(build, SELECTED)
    posts = [scaled(3.0), None, scaled(-0.5)]
    rows = list(zip(inputs(3), posts, strict=True))
    mine = [rnet(x, activation_postproc=post) for x, post in rows]
    truth = [plain(x, post) for x, post in rows]
    for index in order:
        rnet.net.zero_grad()
        plain.net.zero_grad()
        mine[index].square().sum().backward()
        truth[index].square().sum().backward()
        assert_equal(gradients(rnet.net), gradients(plain.net))


@REENTRANT
def test_outstanding_passes_summed(reentrant: bool) -> None:
    rnet, plain = recorder(build, reentrant, SELECTED), Plain(build, SELECTED)
    rows = list(zip(inputs(2), [scaled(3.0), scaled(-0.5)], strict=True))
    mine = sum(rnet(x, activation_postproc=post).square().sum() for x, post in rows)
    truth = sum(plain(x, post).square().sum() for x, post in rows)
    mine.backward()
    truth.backward()
    for one, two in zip(gradients(rnet.net), gradients(plain.net), strict=True):
        # Two passes meet in one sum, whose order the engine chooses.
        torch.testing.assert_close(one, two)


@REENTRANT
def test_passes_in_between_do_not_disturb_the_rerun(reentrant: bool) -> None:
    rnet, plain = recorder(build, reentrant, SELECTED), Plain(build, SELECTED)
    x, other = inputs(2)
    output = rnet(x, activation_postproc=scaled(3.0))
    with torch.no_grad():
        rnet(other, activation_postproc=scaled(100.0))
    rnet(other, dont_record=True)
    latest = freeze(dict(rnet.activations))
    output.square().sum().backward()
    plain(x, scaled(3.0)).square().sum().backward()
    assert_equal(gradients(rnet.net), gradients(plain.net))
    assert not differences(freeze(dict(rnet.activations)), latest)


@REENTRANT
def test_each_call_of_a_shared_block_has_its_own_postprocessor(reentrant: bool) -> None:
    rnet = recorder(build, reentrant, ("block.1",))
    plain = Plain(build, ("block.1",))
    (x,) = inputs(1)
    rnet(x, activation_postproc=[scaled(3.0), scaled(-2.0)]).square().sum().backward()
    factors = iter([3.0, -2.0])
    plain(x, lambda tensor: tensor * next(factors)).square().sum().backward()
    assert_equal(gradients(rnet.net), gradients(plain.net))


@REENTRANT
def test_a_recorder_that_is_run_again_itself_keeps_the_records_of_its_pass(
    reentrant: bool,
) -> None:
    rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), input_size=(1, 2), verbose=0)
    rnet.record("*")
    x = torch.rand(3, 2, requires_grad=True)
    with rnet.watch() as passes:
        output = checkpoint(rnet, x, use_reentrant=reentrant)
        before = rnet.activations
        output.sum().backward()
    assert len(passes) == 1
    assert rnet.activations is before


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
    rnet = Recorder(nn.Sequential(linear(), nn.Tanh()), input_size=(3, 4), verbose=0)
    rnet.record("0")
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    rnet(x)
    Passing.apply(x, lambda: rnet(y)).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(rnet.activations["0"], rnet.net[0].forward(y))

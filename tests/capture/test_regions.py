"""Regions under activation checkpointing, in the hands of users who do odd things.

A region runs again in backward, wherever and whenever that is. The truth is the same net without
regions, with plain hooks in the place of post-processors.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.postprocessors import OnInput
from tests.harness import recorder
from tests.zoo.base import Net, linear
from tests.zoo.gradients import region

if TYPE_CHECKING:
    from collections.abc import Callable

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
DONT_RECORD = pytest.mark.parametrize("dont_record", [False, True], ids=["record", "dont_record"])
SELECTED = ("block.0", "block.1")


def triple(tensor: Tensor) -> Tensor:
    return tensor * 3


def quintuple(tensor: Tensor) -> Tensor:
    return tensor * 5


def around(reentrant: bool) -> Callable[..., Any]:
    return lambda function, x: region(reentrant, function, x)


def bare(function: Any, x: Tensor) -> Any:
    return function(x)


def build(forward: Callable[..., Any], **state: Any) -> nn.Module:
    torch.manual_seed(7)
    net = Net(forward, first=linear(), block=nn.Sequential(linear(), nn.Tanh(), linear()))
    for name, value in state.items():
        setattr(net, name, value)
    return net


def small(call: Callable[..., Any]) -> nn.Module:
    return build(lambda net, x: call(net.block, net.first(x)))


def leaf() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(9)).requires_grad_()


def intervene(net: nn.Module, post: Callable[[Tensor], Tensor], *names: str) -> nn.Module:
    for name in names or SELECTED:
        net.get_submodule(name).register_forward_hook(lambda module, args, output: post(output))
    return net


def gradients(net: nn.Module, output: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    output.square().sum().backward()
    found = {name: value.grad for name, value in net.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found


def elsewhere(function: Callable[[], Any]) -> Any:
    """Run on a thread that has never run anything: autograd's own numbers start there at 0."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def select_another(rnet: Recorder) -> None:
    rnet.record("first")


def leave_the_block(rnet: Recorder) -> None:
    with rnet:
        pass


@REENTRANT
@pytest.mark.parametrize("give_up", [select_another, Recorder.remove, leave_the_block, None])
def test_postprocessors_act_in_the_rerun_after_the_selection_was_given_up(
    give_up: Any, reentrant: bool
) -> None:
    net = small(around(reentrant))
    rnet = recorder(net, *SELECTED)
    output = rnet(leaf(), activation_postproc=triple)
    if give_up is not None:
        give_up(rnet)
    del rnet
    plain = intervene(small(bare), triple)
    torch.testing.assert_close(gradients(net, output), gradients(plain, plain(leaf())))


@REENTRANT
def test_hooks_that_wait_for_a_rerun_leave_with_the_graph(reentrant: bool) -> None:
    net = small(around(reentrant))
    rnet = recorder(net, *SELECTED)
    output = rnet(leaf(), activation_postproc=triple)
    rnet.remove()
    assert any(module._forward_hooks for module in net.modules())
    output.sum().backward()
    del output
    assert not any(module._forward_hooks for module in net.modules())


@REENTRANT
def test_backward_on_another_thread_takes_the_postprocessors_of_its_own_pass(
    reentrant: bool,
) -> None:
    rnet = recorder(small(around(reentrant)), *SELECTED)

    def both() -> tuple[Tensor, Tensor]:
        output = elsewhere(lambda: rnet(leaf(), activation_postproc=triple))
        own = rnet(leaf(), activation_postproc=quintuple)
        return gradients(rnet.net, output), gradients(rnet.net, own)

    truths = []
    for post in (triple, quintuple):
        plain = intervene(small(bare), post)
        truths.append(gradients(plain, plain(leaf())))
    torch.testing.assert_close(elsewhere(both), tuple(truths))


def nested(call: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(7)
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    inner = Net(lambda net, x: call(net.block, x) * 1, block=block)
    return Net(lambda net, x: call(net.inner, net.first(x)), first=linear(), inner=inner)


@REENTRANT
def test_regions_in_a_region_run_again_on_another_thread(reentrant: bool) -> None:
    """As on a GPU, where backward runs on a thread of the engine."""
    names = ("inner.block.0", "inner.block.1")

    def scaled(factor: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor * factor

    def passes() -> dict[str, Tensor]:
        rnet = recorder(nested(around(reentrant)), *names)
        outputs = [rnet(leaf(), activation_postproc=scaled(factor)) for factor in (5, 7, 3)]

        def backward() -> dict[str, Tensor]:
            weight = torch.ones(1, requires_grad=True)
            # This thread has made nodes of its own before.
            assert all((weight * 1).grad_fn is not None for _ in range(3))
            return gradients(rnet.net, outputs[2])

        return elsewhere(backward)

    plain = intervene(nested(bare), triple, *names)
    torch.testing.assert_close(elsewhere(passes), gradients(plain, plain(leaf())))


@REENTRANT
def test_calls_in_a_region_in_a_region_are_told_apart(reentrant: bool) -> None:
    """Regions inside one that runs again are run again themselves, the last one first."""

    def twice(call: Callable[..., Any]) -> nn.Module:
        net = nested(call)
        net.inner.function = lambda inner, x: call(inner.block, call(inner.block, x) * 1) * 1
        return net

    def scaled(factor: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor * factor

    rnet = recorder(twice(around(reentrant)), "inner.block.1")
    output = rnet(leaf(), activation_postproc=[scaled(3), scaled(5)])
    plain = twice(bare)
    factors = iter([3, 5])
    intervene(plain, lambda tensor: tensor * next(factors), "inner.block.1")
    torch.testing.assert_close(gradients(rnet.net, output), gradients(plain, plain(leaf())))


@REENTRANT
@DONT_RECORD
def test_output_that_is_a_view_may_be_changed_before_backward(
    dont_record: bool, reentrant: bool
) -> None:
    def flat(call: Callable[..., Any]) -> nn.Module:
        return build(lambda net, x: call(net.block, net.first(x)).view(12))

    rnet = recorder(flat(around(reentrant)), *SELECTED)
    output = rnet(leaf(), activation_postproc=triple, dont_record=dont_record)
    output *= 2
    plain = intervene(flat(bare), triple)
    torch.testing.assert_close(gradients(rnet.net, output), gradients(plain, plain(leaf()) * 2))


@REENTRANT
@DONT_RECORD
def test_loss_that_the_net_keeps_to_itself(dont_record: bool, reentrant: bool) -> None:
    def keeping(call: Callable[..., Any]) -> nn.Module:
        def forward(net: Any, x: Tensor) -> Tensor:
            net.kept[0] = call(net.block, net.first(x))
            return net.kept[0].detach()

        return build(forward, kept=[None])

    rnet = recorder(keeping(around(reentrant)), *SELECTED)
    rnet(leaf(), activation_postproc=triple, dont_record=dont_record)
    plain = intervene(keeping(bare), triple)
    plain(leaf())
    mine, truth = (gradients(net, net.kept[0]) for net in (rnet.net, plain))
    torch.testing.assert_close(mine, truth)


@REENTRANT
@DONT_RECORD
def test_backpropagation_through_a_state_reaches_the_pass_before(
    dont_record: bool, reentrant: bool
) -> None:
    def recurrent(call: Callable[..., Any]) -> nn.Module:
        def forward(net: Any, x: Tensor) -> Tensor:
            net.state[0] = call(net.block, net.first(x + net.state[0]))
            return net.state[0] * 1

        return build(forward, state=[0])

    rnet = recorder(recurrent(around(reentrant)), *SELECTED)
    rnet.net.state[0] = 0
    rnet(leaf(), activation_postproc=quintuple, dont_record=dont_record)
    output = rnet(leaf(), activation_postproc=triple, dont_record=dont_record)
    plain = recurrent(bare)
    factors = iter([5, 5, 3, 3])
    intervene(plain, lambda tensor: tensor * next(factors))
    plain(leaf())
    torch.testing.assert_close(gradients(rnet.net, output), gradients(plain, plain(leaf())))


@REENTRANT
def test_net_that_enables_gradients_itself(reentrant: bool) -> None:
    def enabling(call: Callable[..., Any]) -> nn.Module:
        def forward(net: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return call(net.block, net.first(x))

        return build(forward)

    rnet = recorder(enabling(around(reentrant)), *SELECTED)
    with torch.no_grad():
        output = rnet(leaf(), activation_postproc=triple)
    plain = intervene(enabling(bare), triple)
    torch.testing.assert_close(gradients(rnet.net, output), gradients(plain, plain(leaf())))


@REENTRANT
def test_net_that_calls_its_own_recorder(reentrant: bool) -> None:
    recorders: list[Recorder] = []

    def forward(net: Any, x: Tensor, again: bool = True) -> Tensor:
        y = region(reentrant, net.block, net.first(x))
        if not (recorders and again):
            return y
        return y + recorders[0](x * 2, again=False, activation_postproc=quintuple)

    rnet = recorder(build(forward), *SELECTED)
    recorders.append(rnet)
    mine = gradients(rnet.net, rnet(leaf(), activation_postproc=triple))
    plain = small(bare)
    factors = iter([3, 3, 5, 5])
    intervene(plain, lambda tensor: tensor * next(factors))
    torch.testing.assert_close(mine, gradients(plain, plain(leaf()) + plain(leaf() * 2)))


@REENTRANT
@pytest.mark.parametrize("inner_reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_selected_one_of_two_calls_is_changed_in_a_region_inside_a_region(
    number: int, inner_reentrant: bool, reentrant: bool
) -> None:
    def outer(net: Any, x: Tensor) -> Any:
        return around(inner_reentrant)(net.twice, x) * 2

    torch.manual_seed(7)
    twice = Net(lambda net, x: net.linear(net.linear(x).tanh()), linear=linear())
    inner = Net(outer, twice=twice)
    net = Net(lambda net, x: around(reentrant)(net.inner, x), inner=inner)
    rnet = Recorder(net, input_size=(3, 4))
    rnet.record(rnet.architecture.labels_of("inner.twice.linear")[number])
    found = gradients(net, rnet(leaf(), activation_postproc=triple))

    first = twice.linear(leaf())
    second = twice.linear((triple(first) if number == 0 else first).tanh())
    truth = gradients(net, (triple(second) if number == 1 else second) * 2)
    torch.testing.assert_close(found, truth)


def recursive(net: Any, x: Tensor, depth: int = 1) -> Tensor:
    y = net.linear(x).tanh()
    return y * net(y, depth - 1) if depth else y


def recursive_by_hand(layer: nn.Linear, x: Tensor, start: int) -> Tensor:
    y = layer(triple(x) if start == 0 else x).tanh()
    return y * layer(triple(y) if start == 1 else y).tanh()


def failing_once(net: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(ZeroDivisionError):
        net.cell(x, 0)
    return net.cell(net.cell(x, 1), 2)


def failing_once_by_hand(layer: nn.Linear, x: Tensor, start: int) -> Tensor:
    y = layer(triple(x) if start == 1 else x).tanh()
    return layer(triple(y) if start == 2 else y).tanh() / 2


def cell() -> nn.Module:
    return Net(lambda net, x, number: net.linear(x).tanh() * (1 / number), linear=linear())


@REENTRANT
@pytest.mark.parametrize(
    ("name", "make", "by_hand"),
    [
        ("block", lambda: Net(recursive, linear=linear()), recursive_by_hand),
        ("block.cell", lambda: Net(failing_once, cell=cell()), failing_once_by_hand),
    ],
    ids=["recursive", "failing"],
)
def test_inputs_are_changed_in_the_calls_that_start_in_the_same_place(
    name: str, make: Any, by_hand: Any, reentrant: bool
) -> None:
    torch.manual_seed(7)
    net = Net(lambda net, x: around(reentrant)(net.block, x), block=make())
    rnet = Recorder(net, input_size=(3, 4))
    rows = [rnet.architecture[label] for label in rnet.architecture.labels_of(name)]
    (layer,) = (module for module in net.modules() if isinstance(module, nn.Linear))
    for row in rows:
        if row.executed:
            rnet.record(row.label)
            found = gradients(net, rnet(leaf(), activation_postproc=OnInput(triple)))
            truth = gradients(net, by_hand(layer, leaf(), row.call))
            torch.testing.assert_close(found, truth)


@REENTRANT
def test_two_backward_passes_through_one_graph_run_a_region_again_each(reentrant: bool) -> None:
    net = small(around(reentrant))
    rnet = recorder(net, "block.0")
    x = leaf()
    hidden = net.block[0].forward(net.first.forward(x)) * 3
    truth = net.block[2].forward(torch.tanh(hidden))
    wanted = gradients(net, truth)
    out = rnet(x, activation_postproc={"block.0": triple})
    for is_last in (False, True):
        net.zero_grad()
        out.square().sum().backward(retain_graph=not is_last)
        found = {name: one.grad for name, one in net.named_parameters()}
        assert all(torch.equal(found[name], one) for name, one in wanted.items()), is_last

"""Who makes a gradient, where calls share tensors, write in place, or are differentiated twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from scio_recorder import Recorder
from scio_recorder.analysis.guarding.guard import Guard
from tests.analysis.guarding.nonfinite import INF, NAN, Do, Residual, linear
from tests.zoo.base import Net

LARGE = 1e25


def recorder(net: nn.Module, x: Tensor) -> Recorder:
    return Recorder(net, input_data=x, force_static_flow=False, verbose=0)


def guarded(net: nn.Module, x: Tensor, received: Tensor | float = 1.0) -> Guard:
    with recorder(net, x).guard(action="record") as guard:
        (net(x) * received).sum().backward()
    return guard


def made_by(guard: Guard) -> tuple[str, str | None] | None:
    origin = guard.origin
    if origin is None:
        return None
    assert origin.direction == "gradient"
    return origin.layer.name, origin.parameter


# -- what the maker is described by ----------------------------------------------------------------


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_a_gradient_of_a_parameter_is_described_as_that_has_it(parameter: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    x = torch.ones(5, 2, 4)
    received = torch.zeros(5, 2, 3)
    if parameter == "weight":
        # In row 2 and column 1, a product overflows.
        received[0, 0, 2], x[0, 0, 1] = 1e30, 1e30
        x[0, 0, 0] = x[0, 0, 2] = x[0, 0, 3] = 0
    else:
        received[:, :, 1] = 1e38
        x *= 1e-10
    guard = guarded(net, x, received)
    origin, gradient = guard.origin, getattr(net[0], parameter).grad
    assert made_by(guard) == ("0", parameter)
    assert origin.num_values == gradient.numel()
    assert origin.index == tuple(gradient.isfinite().logical_not().nonzero()[0].tolist())
    assert gradient[origin.index].isinf()
    assert origin.sample is None


def test_the_gradient_of_an_input_is_described_as_that_is() -> None:
    net = nn.Sequential(nn.Tanh(), nn.Linear(4, 3), nn.GELU())
    with torch.no_grad():
        net[1].weight.mul_(LARGE)
    received = torch.zeros(5, 2, 3)
    received[3, 1] = 1e20
    guard = guarded(net, torch.full((5, 2, 4), 1e-27).requires_grad_(), received)
    assert made_by(guard) == ("1", None)
    assert (guard.origin.index, guard.origin.sample) == ((3, 1, 0), 3)
    assert guard.origin.num_values == 5 * 2 * 4


def test_the_last_of_several_operations_describes_it() -> None:
    norm = nn.RMSNorm(4)
    net, x = nn.Sequential(nn.Linear(4, 4), norm), torch.randn(3, 4)
    with torch.no_grad():
        norm.weight[2] = 1e10
    received = torch.zeros(3, 4)
    received[1, 2] = 1e30
    guard = guarded(net, x, received)
    assert made_by(guard) == ("1", None)
    assert (guard.origin.num_inf, guard.origin.index) == (1, (1, 2))


@pytest.mark.parametrize("depth", [1, 2])
def test_an_operation_ahead_of_an_inner_call_is_that_of_the_call_around(depth: int) -> None:
    after: nn.Module = linear()
    for _ in range(depth - 1):
        after = nn.Sequential(after)
    # The derivative of a root at zero is infinite; only the inner call's nodes lead to it.
    net = nn.Sequential(Net(lambda net, x: net.after(x.sqrt()), after=after))
    assert made_by(guarded(net, torch.zeros(3, 4, requires_grad=True))) == ("0", None)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("takes_leaf", [False, True])
def test_the_gradient_of_a_weight_is_counted_whoever_takes_it(
    sparse: bool, takes_leaf: bool
) -> None:
    net, ids = nn.Sequential(nn.Embedding(5, 4, sparse=sparse)), torch.tensor([[1, 1, 3]])
    weight = net[0].weight
    with recorder(net, ids).guard(action="record") as guard:
        # Both gradients are finite, and their sum is not.
        loss = (net(ids) * torch.tensor([0.0, 0.0, 3e38, 0.0])).sum()
        if takes_leaf:
            loss.backward()
            gradient = weight.grad
        else:
            (gradient,) = torch.autograd.grad(loss, weight)
    assert made_by(guard) == ("0", "weight")
    assert guard.origin.num_inf == int(gradient.to_dense().isinf().sum()) == 1
    assert guard.origin.index == (1, 2)


# -- what a call was given -------------------------------------------------------------------------

LOSSES: list[Callable[[Tensor], Tensor]] = [
    Tensor.sum,
    lambda output: torch.nan_to_num(output).square().mean(),
    lambda output: nn.functional.huber_loss(output, torch.zeros(3, 2)),
]


@pytest.mark.filterwarnings("ignore:the network returned NaNs:UserWarning")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_nan_in_the_batch_is_nobodys_fault(loss: Callable[[Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    x[1, 2] = NAN
    with recorder(net, torch.ones(3, 4)).guard() as guard:
        loss(net(x)).backward()
    assert net[0].weight.grad.isnan().any()
    assert guard.origin is None


def test_who_received_only_what_is_finite_is_named_beside_a_nan_in_the_batch() -> None:
    def branches(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.nan_to_num(net.first(x)) + net.second(y)  # type: ignore[no-any-return]

    second = nn.Sequential(linear(), Do(lambda x: (x * 0).sqrt()))
    net, x = Net(branches, first=linear(), second=second), torch.randn(3, 4)
    rnet = Recorder(net, input_data=[x, x], verbose=0)
    with rnet.guard(action="record") as guard:
        net(x * NAN, x).sum().backward()
    assert made_by(guard) == ("second.1", None)


def test_a_view_that_is_overwritten_has_a_gradient_of_its_own() -> None:
    # The ReLU takes the view that the Linear returned out of the graph.
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 2, 4)
    with (
        pytest.warns(UserWarning, match="the loss made them"),
        recorder(net, x).guard(kinds=("inf",)) as guard,
    ):
        (net(x) * INF).sum().backward()
    assert guard.origin is None
    assert net[0].bias.grad.isinf().any()
    # The Linear is named if it is the maker.
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True))
    with torch.no_grad():
        net[1].weight.mul_(LARGE)
        net[1].bias.fill_(1e30)
    assert made_by(guarded(net, torch.randn(3, 2, 4) * 1e-3, 1e20)) == ("1", None)


def test_who_changes_gradients_between_two_calls_is_seen() -> None:
    def cleans(net: Any, x: Tensor) -> Any:
        output = net.inner(x)
        if output.requires_grad:
            output.register_hook(torch.zeros_like)
        return output

    net = nn.Sequential(Net(cleans, inner=nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4))
    with torch.no_grad():
        net[1].weight.mul_(LARGE)
    guard = guarded(net, torch.randn(3, 4) * 1e-3, 1e20)
    assert net[0].inner[0].weight.grad.isfinite().all()
    assert made_by(guard) == ("1", None)


def test_an_output_that_nobody_differentiates_excuses_its_call() -> None:
    def keeps(net: Any, x: Tensor) -> Tensor:
        """Hold what was made, so that gradients enter the module in its middle."""
        net.middle = x * 2
        return net.middle + 1

    net, x = nn.Sequential(nn.Linear(4, 4), Net(keeps, middle=None)), torch.randn(3, 4)
    with recorder(net, x).guard() as guard:
        net(x)
        (net[1].middle * NAN).sum().backward()
    assert net[0].bias.grad.isnan().all()
    assert guard.origin is None


def test_what_enters_a_call_later_is_no_excuse() -> None:
    def two_outputs(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        second = x * net.second
        return (net.first * 0).sqrt(), second

    parts = {name: nn.Parameter(torch.ones(4)) for name in ("first", "second")}
    net, x = nn.Sequential(Net(two_outputs, **parts)), torch.randn(3, 4)
    with recorder(net, x).guard(action="record") as guard:
        first, second = net(x)
        # Autograd begins with what was made last.
        (first.sum() + (second * NAN).sum()).backward()
    assert made_by(guard) == ("0", "first")


def test_what_is_received_in_a_pass_that_goes_on_excuses_gradients() -> None:
    def differentiates(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            torch.autograd.grad(x.sum(), first.weight, retain_graph=True)
        return x

    first = linear()
    net = nn.Sequential(Do(torch.log), first, Do(differentiates))
    with recorder(net, torch.ones(3, 4)).guard(action="record") as guard:
        net(torch.full((3, 4), -1.0))
    assert (guard.origin.layer.name, guard.origin.direction) == ("0", "forward")


# -- unusual ways through the graph ----------------------------------------------------------------


def overflowing() -> tuple[nn.Sequential, Tensor]:
    """Return a net of which the last module makes infinite gradients, and an input."""
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with torch.no_grad():
        net[2].weight.mul_(LARGE)
    return net, torch.randn(3, 4) * 1e-3


def node_of(output: Tensor, kind: str) -> Any:
    node: Any = output.grad_fn
    while node.name() != kind:
        node = next(one for one, _ in node.next_functions if one is not None and one.next_functions)
    return node


def test_a_gradient_that_goes_to_no_leaf_is_judged() -> None:
    net, x = overflowing()
    with recorder(net, x).guard(action="record") as guard:
        output = net(x)
        edge = GradientEdge(node_of(output, "GeluBackward0"), 0)
        (gradient,) = torch.autograd.grad((output * 1e20).sum(), edge)
    assert not gradient.isfinite().all()
    assert made_by(guard) == ("2", None)


def test_a_call_is_not_blamed_for_what_a_penalty_sends_it() -> None:
    """A second backward pass enters the calls in their middle."""

    def penalised(net: Any, x: Tensor) -> Any:
        output = net.inner(x)
        weight = net.inner[0].weight
        (gradient,) = torch.autograd.grad(output.sum(), weight, create_graph=True)
        return output + (gradient * 0).sqrt().sum()

    inner = nn.Sequential(linear(), nn.GELU(), nn.SiLU())
    guard = guarded(nn.Sequential(Net(penalised, inner=inner)), torch.randn(3, 4))
    # Its own code takes a root at zero.
    assert made_by(guard)[:1] == ("0",)  # type: ignore[index]


def test_a_module_that_differentiates_reaches_the_calls_before_it() -> None:
    def differentiates(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            torch.autograd.grad((x * 1e20).sum(), first.weight, retain_graph=True)
        return x

    first = nn.Linear(4, 4)
    net = nn.Sequential(nn.Tanh(), first, nn.Linear(4, 4), Do(differentiates))
    with torch.no_grad():
        net[2].weight.mul_(LARGE)
    x = torch.full((3, 4), 1e-27)
    with recorder(net, x).guard(action="record") as guard:
        net(x)
    assert made_by(guard) == ("2", None)


def test_a_step_in_which_nothing_is_kept_alive() -> None:
    """A walk over the graph holds none of its nodes, nor what these saved."""
    net, held = nn.Sequential(linear(), Residual(linear())), []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        held.append(weakref.ref(output))

    x = torch.randn(3, 4)
    with recorder(net, x).guard():
        handle = net[0].register_forward_hook(note)
        loss = net(x).sum()
        loss.backward()
        del loss
        gc.collect()
        assert [one() for one in held] == [None]
        handle.remove()

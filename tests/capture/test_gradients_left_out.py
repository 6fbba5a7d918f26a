"""Gradients of layers that return older tensors, beside those of torch's hooks on modules."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import LayerNotFoundError, Recorder
from tests.harness import recorder
from tests.zoo.base import Net

LABEL = "middle"
REASON = r"layer 1-\d middle.*: it returned a tensor that existed before its call.*x\.clone\(\)"


class Beside(nn.Module):
    """A layer in a branch, beside which its input goes on as well."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        before = 100 * hidden
        return before + self.last(self.middle(hidden)).sin() + 10 * hidden


class Kept(nn.Module):
    """Returns what it was given first, in all later calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2 if self.kept is None else self.kept
        return self.kept


def applying(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda _, x: function(x))


# Whether they return a tensor of their own.
KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "identity": (nn.Identity, False),
    "dropout in evaluation mode": (lambda: nn.Dropout().eval(), False),
    "dropout of nothing": (lambda: nn.Dropout(0.0), False),
    "container of an identity": (lambda: nn.Sequential(nn.Identity(), nn.Identity()), False),
    "empty container": (nn.Sequential, False),
    "contiguous": (applying(Tensor.contiguous), False),
    "the same dtype": (applying(Tensor.float), False),
    "already flat": (lambda: nn.Flatten(), False),
    "view": (applying(lambda x: x.view_as(x)), True),
    "slice": (applying(lambda x: x[:]), True),
    "transposed twice": (applying(lambda x: x.t().t()), True),
    "function that changes nothing": (lambda: nn.Hardtanh(-1e9, 1e9), True),
    "copy": (applying(Tensor.clone), True),
    "container that ends in an identity": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity()),
        True,
    ),
    "container that begins with one": (lambda: nn.Sequential(nn.Identity(), nn.Tanh()), True),
}


def by_torch(net: Any, x: Tensor) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    handle = net.middle.register_full_backward_hook(
        lambda module, given, received: found.append(received[0])
    )
    net(x).square().sum().backward()
    handle.remove()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_is_that_of_torchs_hook_or_left_out_with_a_reason(name: str) -> None:
    make, is_own = KINDS[name]
    net, x = Beside(make()), torch.linspace(-1, 1, 12).view(3, 4)
    net.zero_grad()
    net(x).square().sum().backward()
    bare = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
    (wanted,) = by_torch(net, x)
    rnet = recorder(net, LABEL, "first", gradients=True)
    came: list[Any] = []
    rnet.on_gradients(came.append)
    net.zero_grad()
    rnet(x).square().sum().backward()
    assert all(map(torch.equal, bare, [weight.grad for weight in net.parameters()]))
    label = rnet.architecture.labels_of(LABEL)[0]
    assert (LABEL in rnet.gradients) == (label in came[0]) == is_own
    if is_own:
        torch.testing.assert_close(rnet.gradients[LABEL], wanted)
    else:
        with pytest.raises(LayerNotFoundError, match=REASON):
            rnet.gradients[LABEL]
    # The layer that made the tensor has the gradient of all its uses.
    torch.testing.assert_close(rnet.gradients["first"].sum(0), net.first.bias.grad)


def test_a_parameter_and_an_input_are_left_out() -> None:
    net = Net(lambda net, x: net.middle(x) * net.other(x))
    net.middle, net.other = Net(lambda own, _: own.weight), nn.Identity()
    net.middle.weight = nn.Parameter(torch.ones(4))
    rnet = recorder(net, "*", input_size=(1, 4), gradients=True)
    x = torch.ones(1, 4, requires_grad=True)
    rnet(x).sum().backward()
    assert list(rnet.gradients) == [(0, 1)]
    for name in ("middle", "other"):
        with pytest.raises(LayerNotFoundError, match=r"read \.grad of a parameter or an input"):
            rnet.gradients[name]
    assert not net.middle.weight._backward_hooks
    assert not x._backward_hooks


def test_two_calls_that_return_one_tensor() -> None:
    net = Net(lambda net, x: net.middle(x) + 3 * net.middle(x))
    net.middle = Kept()
    rnet = Recorder(net, input_size=(1, 4))
    net.middle.kept = None
    rnet.record("middle", gradients=True, calls="any")
    rnet(torch.ones(1, 4, requires_grad=True)).sum().backward()
    first, second = rnet.gradients["middle"]
    # Both uses are of the tensor that the first call has made.
    assert torch.equal(first, torch.full((1, 4), 4.0))
    assert second is None


def test_the_place_in_a_structure_is_empty() -> None:
    net = Beside(Net(lambda _, x: {"same": x, "new": [x * 2]}))
    net.last = Net(lambda _, given: given["same"] + given["new"][0])
    rnet = recorder(net, LABEL, gradients=True)
    rnet(torch.ones(3, 4)).sum().backward()
    gradient = rnet.gradients[LABEL]
    assert gradient["same"] is None
    hidden = net.first(torch.ones(3, 4))
    torch.testing.assert_close(gradient["new"][0], (3 * hidden).cos())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_region_of_checkpointing(use_reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Tanh())
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=use_reentrant), inner=inner)
    rnet = recorder(net, "inner.*", input_size=(1, 4), gradients=True)
    x = torch.ones(1, 4, requires_grad=True)
    rnet(x).sum().backward()
    assert [rnet.architecture[at].name for at in rnet.gradients] == ["inner.0", "inner.2"]
    torch.testing.assert_close(rnet.gradients["inner.0"][0], inner[0].bias.grad)
    with pytest.raises(LayerNotFoundError, match="existed before its call"):
        rnet.gradients["inner.1"]


def test_calls_that_fail_leave_nothing_behind() -> None:
    def maybe(net: Any, x: Tensor) -> Tensor:
        try:
            return net.middle(x, fails=True)
        except ValueError:
            return net.middle(x.sin())

    def fails(_: Any, x: Tensor, fails: bool = False) -> Tensor:
        if fails:
            raise ValueError
        return x * 2

    net = Net(maybe, middle=Net(fails))
    rnet = Recorder(net, input_size=(1, 4), force_static_flow=False)
    rnet.record("middle", gradients=True)
    x = torch.ones(1, 4, requires_grad=True)
    for _ in range(2):
        rnet(x).sum().backward()
        assert torch.equal(rnet.gradients["middle"], torch.ones(1, 4))


def changed_view(net: Any, x: Tensor) -> Tensor:
    base = x * 1
    view = base[:, :2]
    # Autograd makes the node of the view anew when somebody asks for it.
    base.mul_(2)
    result: Tensor = net.same(view) * 2 + view * 3
    return result


def test_an_input_is_older_whatever_the_number_of_its_node() -> None:
    rnet = Recorder(Net(changed_view, same=nn.Identity()), input_size=(2, 4))
    rnet.record("same", gradients=True)
    rnet(torch.ones(2, 4, requires_grad=True)).sum().backward()
    with pytest.raises(LayerNotFoundError, match="existed before"):
        _ = rnet.gradients["same"]


def test_an_input_that_another_thread_has_made_is_older() -> None:
    net = nn.Sequential(nn.Identity())
    rnet = recorder(net, "0", input_size=(2, 4), gradients=True)
    weight = torch.ones(2, 4, requires_grad=True)
    for _ in range(100):
        hidden = weight * 1

    def step() -> bool:
        (rnet(hidden) * 2 + hidden * 3).sum().backward()
        return "0" in rnet.gradients

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(step).result()


class Shaped(nn.Module):
    """Returns a view of what it receives."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x)


class Overwriting(nn.Module):
    """Overwrites a part of a view by another part, after it was used or before."""

    def __init__(self, view: Callable[[Tensor], Tensor], of_base: bool) -> None:
        super().__init__()
        self.shaped, self.of_base = Shaped(view), of_base

    def forward(self, x: Tensor) -> Tensor:
        base = x * 2
        y = self.shaped(base)
        early = y * 3
        if self.of_base:
            base.mul_(2)
        else:
            y[:, 1] = y[:, 0]
        return early.sum() + (y**2).sum()


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.unflatten(1, (2, 2)),
    lambda x: x.t(),
    lambda x: x[:, :2],
    lambda x: x.view(2, 8),
]


@pytest.mark.parametrize("copies", ["auto", "never", "always"])
@pytest.mark.parametrize("of_base", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_is_overwritten_has_a_whole_gradient_or_none(
    view: Callable[[Tensor], Tensor], of_base: bool, copies: Any
) -> None:
    net, x = Overwriting(view, of_base), torch.randn(4, 4)
    rnet = recorder(net, "shaped", input_size=(4, 4), gradients=True, copy=copies)
    base = (x * 2).requires_grad_()
    y = view(base).detach().requires_grad_()
    after = y.clone() * (2 if of_base else 1)
    if not of_base:
        after[:, 1] = y[:, 0]
    ((y * 3).sum() + (after**2).sum()).backward()
    for _ in range(2):
        rnet(x.requires_grad_()).backward()
        if "shaped" in rnet.gradients:
            torch.testing.assert_close(rnet.gradients["shaped"], y.grad)
        else:
            with pytest.raises(LayerNotFoundError, match="overwrote"):
                rnet.gradients["shaped"]

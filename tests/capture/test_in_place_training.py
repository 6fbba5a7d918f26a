"""Post-processors that work in place while training: right gradients, or a clear error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from scio_recorder import Recorder
from tests.oracle import same_bits
from tests.zoo.base import Net

# Each needs what it returned for its own backward pass.
NEEDING: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "softmax": lambda: nn.Softmax(-1),
    "exp_as_a_view": lambda: Net(lambda _, x: x.exp().view(3, 2).t()),
    "tanh_in_a_tuple": lambda: Net(lambda _, x: (x.tanh(), 1)),
    "last_of_several": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
}


def double(value: Tensor | tuple[Tensor, int]) -> None:
    (value if isinstance(value, Tensor) else value[0]).mul_(2)


def net_with(middle: nn.Module) -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        hidden = net.middle(net.first(x))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return net.last(hidden.reshape(2, 3))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Net(forward, first=nn.Linear(3, 3), middle=middle, last=nn.Linear(3, 2))


def recorder(middle: nn.Module) -> Recorder:
    rnet = Recorder(net_with(middle), input_size=(2, 3), verbose=0)
    rnet.record("middle")
    return rnet


@pytest.mark.parametrize("name", NEEDING)
def test_what_autograd_needs_is_not_overwritten_without_a_word(name: str) -> None:
    rnet = recorder(NEEDING[name]())
    loss = rnet(torch.randn(2, 3), activation_postproc=double).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", NEEDING)
def test_gradients_are_right_where_mutation_is_allowed(name: str) -> None:
    rnet = recorder(NEEDING[name]())
    x = torch.randn(2, 3)
    with allow_mutation_on_saved_tensors():
        for _ in range(2):
            rnet.net.zero_grad()
            rnet(x, activation_postproc=double).sum().backward()
    found = [parameter.grad for parameter in rnet.parameters()]
    rnet.net.zero_grad()
    hidden = rnet.net.middle(rnet.net.first(x))
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    rnet.net.last((hidden * 2).reshape(2, 3)).sum().backward()
    for one, parameter in zip(found, rnet.parameters(), strict=True):
        assert one is not None
        assert same_bits(one, parameter.grad)


def test_what_autograd_does_not_need_may_be_overwritten() -> None:
    rnet = recorder(nn.Linear(3, 3))
    rnet(torch.randn(2, 3), activation_postproc=double).sum().backward()
    assert rnet.net.first.weight.grad is not None
    with torch.no_grad():
        rnet(torch.randn(2, 3), activation_postproc=double)


def test_a_pass_that_is_not_differentiated_is_no_error() -> None:
    rnet = recorder(nn.Sigmoid())
    out = rnet(torch.randn(2, 3), activation_postproc=double)
    torch.autograd.grad(out.sum(), rnet.net.last.weight)

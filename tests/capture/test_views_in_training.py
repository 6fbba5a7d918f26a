"""T1, T2: nets that return views train bit for bit as bare ones, and records stay on the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from tests.rotation import one_in

WIDTH = 8


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x)[0]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors(part)]


def hooked(x: Tensor) -> Tensor:
    view = x.view(-1, WIDTH)
    view.register_hook(lambda gradient: gradient * 2)
    return view


def noted(x: Tensor) -> Tensor:
    view = x.view(-1, WIDTH)
    view.retain_grad()
    return view


def of(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Applies(function))


# Operations differ in whether they keep their result, and in who else holds what a view is of.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: nn.RNN(WIDTH, WIDTH),
    "rnn_batch_first": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH),
    "gru_batch_first": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "attention": lambda: Attention(batch_first=False),
    "attention_batch_first": lambda: Attention(batch_first=True),
    "kept_operand": of(lambda x: (x * x).view(-1, WIDTH)),
    "chunk": of(lambda x: (x * 2).narrow(1, 1, 2)),
    "slice": of(lambda x: x[:, 1:]),
    "every_other": of(lambda x: x[:, ::2]),
    "hooked": of(hooked),
    "noted": of(noted),
    "flattened": lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1))),
}
# Torch itself lets nobody train who overwrites these.
READ_ONLY: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH),
    "lstm_batch_first": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "lstm_both_ways": lambda: nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True, batch_first=True),
    "kept_result": of(lambda x: x.exp().view(-1, WIDTH)),
    "kept_result_transposed": of(lambda x: x.softmax(-1).transpose(0, 1)),
    "kept_view": of(lambda x: (lambda view: (view, view * view))(x.view(-1, WIDTH))),
    "kept_base": of(lambda x: (x.view(-1, WIDTH), x * x)),
    "chunks": of(lambda x: x.sigmoid().chunk(2, 1)),
    "splits_and_base": of(lambda x: (x, *x.split(2, 1))),
    "expanded": of(lambda x: x.mean(0, keepdim=True).expand(4, -1, -1)),
}
# What the net does with what it is given.
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "read": lambda x: x * 2 + x.square(),
    "overwritten": lambda x: x.relu_() * 2 + x,
    "partly_overwritten": lambda x: x[..., 1:].mul_(3).sum() + x.square(),
}
TRAINED = [(layer, "read") for layer in READ_ONLY]
TRAINED += [(layer, use) for layer in LAYERS for use in USES]


class Trained(nn.Module):
    def __init__(self, layer: str, use: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = (LAYERS | READ_ONLY)[layer]()
        self.use = USES[use]

    def forward(self, x: Tensor) -> Tensor:
        found = tensors(self.layer(self.first(x)))
        return torch.stack([self.use(found[0]).sum(), *(part.sum() for part in found)]).sum()


def train(net: nn.Module, called: nn.Module) -> Iterator[list[Tensor]]:
    """Yield the loss, the gradients and the weights of each step."""
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.SGD(net.parameters(), 1e-4, momentum=0.9)
    for _ in range(3):
        x = torch.randn(4, 3, WIDTH, generator=generator, requires_grad=True)
        optimiser.zero_grad()
        loss = called(x)
        loss.backward()
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimiser.step()
        assert x.grad is not None
        yield [loss.detach(), x.grad, *gradients, *(p.detach().clone() for p in net.parameters())]


def recorder(net: nn.Module, **options: Any) -> Recorder:
    rnet = Recorder(net, input_size=(4, 3, WIDTH), verbose=0)
    rnet.record("*", **options)
    return rnet


OPTIONS: dict[str, Any] = {
    "auto": {},
    "gradients": {"gradients": True},
    "always": {"copy": "always"},
}


@pytest.mark.parametrize(
    ("case", "options"), one_in(5, itertools.product(TRAINED, OPTIONS)), ids=str
)
def test_training_is_that_of_the_bare_net(case: tuple[str, str], options: str) -> None:
    layer, use = case
    bare, net = Trained(layer, use), Trained(layer, use)
    rnet = recorder(net, **OPTIONS[options])
    for expected, found in zip(train(bare, bare), train(net, rnet), strict=True):
        assert all(map(torch.equal, found, expected))
        # What was recorded can be read.
        assert len(rnet.activations.values()) == len(rnet.recording)


OVERWRITTEN = ["rnn_batch_first", "flattened", "every_other"]
OVERWRITTEN += ["lstm_batch_first", "kept_result", "kept_result_transposed"]


@pytest.mark.parametrize("how", ["auto", "always"])
@pytest.mark.parametrize("layer", OVERWRITTEN)
def test_records_of_a_view_that_is_overwritten_stay_on_the_graph(layer: str, how: Any) -> None:
    net = Trained(layer, "overwritten")
    rnet = recorder(net, copy=how)
    for _ in range(3):
        x = torch.randn(4, 3, WIDTH)
        expected = tensors(net.layer(net.first(x)))[0]
        loss = rnet(x)
        for name in ("layer", rnet.architecture[rnet.recording[-1]].name):
            record = tensors(rnet.activations[name])[0]
            assert torch.equal(record, expected)
            (gradient,) = torch.autograd.grad(loss, record, retain_graph=True)
            assert torch.equal(gradient, 4.0 * (record > 0))


@pytest.mark.parametrize("layer", ["rnn_batch_first", "flattened", "every_other", "slice"])
def test_what_one_recorder_exchanges_is_no_change_to_another(layer: str) -> None:
    bare, net = Trained(layer, "overwritten"), Trained(layer, "overwritten")
    first, second = recorder(net), recorder(net)
    outer = recorder(first)
    for expected, found in zip(train(bare, bare), train(net, outer), strict=True):
        assert all(map(torch.equal, found, expected))
        second(torch.randn(4, 3, WIDTH))
        for rnet in (first, second, outer):
            assert len(rnet.activations.values()) == len(rnet.recording)


@pytest.mark.parametrize("options", [{}, {"inputs": True}, {"gradients": True}, {"copy": "always"}])
def test_a_view_whose_place_autograd_refuses_to_tell(options: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.same = nn.Linear(WIDTH, WIDTH), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            with torch.no_grad():
                view = hidden.view(-1)
            hidden.mul_(2)
            return hidden.sum() + self.same(view).detach().sum()

    net, x = Net(), torch.randn(2, WIDTH)
    rnet = Recorder(net, input_size=(2, WIDTH), mode="train")
    rnet.record("same", "/detach", **options)
    for _ in range(3):
        rnet(x).backward()
        assert torch.equal(rnet.activations["same"], net.linear(x).view(-1) * 2)

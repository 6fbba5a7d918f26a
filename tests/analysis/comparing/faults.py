"""A residual network with every habit that makes comparing hard, and faults to plant in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Works in place, takes keywords, and adds to what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        inner = self.batch_norm(self.act(self.up(self.norm(x))))
        if shift is not None:
            inner = inner + shift
        x += inner * self.scale
        return x


class Net(nn.Module):
    """Blocks, a shared module that runs twice, and an output of several tensors."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.shared = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.embed(x).clone()
        for number, block in enumerate(self.blocks):
            x = block(x, shift=torch.ones(x.shape[-1]) if number == 1 else None)
        x = self.drop(torch.tanh(self.shared(torch.tanh(self.shared(x)))))
        hidden, _ = self.lstm(x[:, None])
        return {"logits": self.head(hidden[:, 0]), "hidden": (x, None)}


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net().eval()
    for block in net.blocks:
        block.batch_norm.running_mean.normal_()
        block.batch_norm.running_var.uniform_(0.5, 2)
    return net


def batches(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 8, generator=generator) for _ in range(3)]


def _change(function: Callable[[Tensor], Any], tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(function(tensor.clone()))


def _ulp(tensor: Tensor) -> Tensor:
    tensor.view(-1)[2] = torch.nextafter(tensor.view(-1)[2], torch.tensor(9.0))
    return tensor


def _negated(tensor: Tensor) -> Tensor:
    tensor[2] = -tensor[2]
    return tensor


class _Other(Block):
    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        inner = functional.gelu(self.batch_norm(self.act(self.up(self.norm(x)))))
        x += (inner if shift is None else inner + shift) * self.scale
        return x


def _as_other(block: Block) -> None:
    block.__class__ = _Other


# What is changed -> the name of the layer that makes the difference.
FAULTS: dict[str, tuple[str, Callable[[Net], Any]]] = {
    "permuted channels": (
        "blocks.1.up",
        lambda net: _change(lambda w: w[torch.randperm(len(w))], net.blocks[1].up.weight),
    ),
    "sign": ("blocks.2.up", lambda net: _change(_negated, net.blocks[2].up.weight)),
    "one ulp": ("blocks.0.norm", lambda net: _change(_ulp, net.blocks[0].norm.weight)),
    "stale buffer": (
        "blocks.1.batch_norm",
        lambda net: net.blocks[1].batch_norm.running_mean.zero_(),
    ),
    "own buffer": ("blocks.1", lambda net: net.blocks[1].scale.fill_(0.51)),
    "epsilon": ("blocks.2.norm", lambda net: setattr(net.blocks[2].norm, "eps", 1e-6)),
    "transposed": ("blocks.0.up", lambda net: _change(Tensor.t, net.blocks[0].up.weight)),
    "activation": ("blocks.1.act", lambda net: setattr(net.blocks[1], "act", nn.SiLU())),
    "own code": ("blocks.2", lambda net: _as_other(net.blocks[2])),
    "dropout left on": ("drop", lambda net: net.drop.train()),
    "shared": ("shared", lambda net: _change(_ulp, net.shared.weight)),
    "recurrent": ("lstm", lambda net: _change(_negated, net.lstm.weight_ih_l0)),
    "first": ("embed", lambda net: _change(_ulp, net.embed.bias)),
    "last": ("head", lambda net: _change(_ulp, net.head.bias)),
}


def planted(net: Net, fault: str) -> Net:
    """Return a copy of a network with a fault in it."""
    twin = copy.deepcopy(net)
    FAULTS[fault][1](twin)
    return twin

"""Small nets with the structures that ports have, for comparisons by local errors.

Nothing of the package is used here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IDS = torch.arange(24).reshape(3, 8) * 7 % 19
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Causal attention, whose mask may be handed to it."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.heads, self.scaling = heads, (width // heads) ** -0.5

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.parts(x)
        scores = query @ key.mT * self.scaling
        if mask is None:
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(1)
        weights = (scores + mask.to(x.dtype)).softmax(-1)
        mixed: Tensor = self.o_proj((weights @ value).transpose(1, 2).flatten(2))
        return mixed


class FlashAttention(Attention):
    """The same by PyTorch's kernel."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed = functional.scaled_dot_product_attention(
            *self.parts(x), attn_mask=mask, is_causal=mask is None, scale=self.scaling
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class FusedAttention(Attention):
    """One projection in place of three."""

    def __init__(self, original: Attention) -> None:
        super().__init__()
        three = original.q_proj, original.k_proj, original.v_proj
        self.qkv = nn.Linear(16, 48, bias=False)
        self.qkv.weight.data = torch.cat([each.weight.detach() for each in three])
        self.o_proj.load_state_dict(original.o_proj.state_dict())
        del self.q_proj, self.k_proj, self.v_proj

    def parts(self, x: Tensor) -> list[Tensor]:
        return [*map(self.split, self.qkv(x).chunk(3, -1))]


class Block(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = attention()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.drop(self.down(self.act(self.up(x))))


class Transformer(nn.Module):
    def __init__(self, attention: type[Attention] = Attention, *, makes_mask: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.head = nn.Linear(16, 19, bias=False)
        self.makes_mask, self.offset, self.least = makes_mask, 1, 0.0

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x, mask = self.embed(ids), None
        if self.makes_mask:
            shape = ids.shape[1], ids.shape[1]
            least = self.least or torch.finfo(x.dtype).min
            mask = torch.full(shape, least, dtype=x.dtype).triu(self.offset)
        for block in self.blocks:
            x = block(x, mask=mask)
        return {"logits": self.head(x), "hidden": (x, None)}


class Convolutional(nn.Module):
    """Normalises batches, works in place, and calls one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.mix = nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        self.act(x)
        x += self.mix(self.mix(x))
        result: Tensor = self.head(self.drop(self.act(x).mean((2, 3))))
        return result


def transformer(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer().eval()


def convolutional(seed: int = 0) -> Convolutional:
    torch.manual_seed(seed)
    net = Convolutional().eval()
    net.norm.running_mean.normal_()
    net.norm.running_var.uniform_(0.5, 2)
    return net


def with_attention(net: Transformer, kind: type[Attention]) -> Transformer:
    """Return a copy with another kind of attention, and the same weights."""
    other = copy.deepcopy(net)
    for block in other.blocks:
        block.attention.__class__ = kind
    return other


def fused(net: Transformer) -> Transformer:
    other = copy.deepcopy(net)
    for block in other.blocks:
        block.attention = FusedAttention(block.attention)
    return other.eval()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


class Experts(nn.Module):
    """Sends each row to two of four experts, which are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            mixed[rows] += weights[rows, which, None] * expert(x[rows])
        return mixed


class FusedExperts(nn.Module):
    """The same with the weights of all experts in one tensor."""

    def __init__(self, original: Experts) -> None:
        super().__init__()
        self.gate = copy.deepcopy(original.gate)
        for name in ("up", "down"):
            layers = [getattr(expert, name) for expert in original.experts]
            for kind in ("weight", "bias"):
                stacked = torch.stack([getattr(layer, kind).detach() for layer in layers])
                setattr(self, f"{name}_{kind}", nn.Parameter(stacked))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        shares = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, chosen, weights)
        up = torch.einsum("ni,eoi->eno", x, self.up_weight) + self.up_bias[:, None]
        down = torch.einsum("eni,eoi->eno", up.relu(), self.down_weight) + self.down_bias[:, None]
        return (shares.T[..., None] * down).sum(0)

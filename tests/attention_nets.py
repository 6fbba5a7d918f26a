"""Small nets with attention of two heads, whose weights are computed by hand as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEADS, SIZE = 2, 8


class SelfAttention(nn.Module):
    """Causal attention of two heads, by the kernel or step by step."""

    def __init__(self, *, is_eager: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.projection = nn.Linear(SIZE, 3 * SIZE)
        self.is_eager, self.dropout = is_eager, dropout

    def parts(self, x: Tensor) -> list[Tensor]:
        by_head = self.projection(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return [*by_head]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x)
        dropout = self.dropout if self.training else 0.0
        if self.is_eager:
            scores = query @ key.mT / key.shape[-1] ** 0.5 + above(x.shape[1])
            weights = functional.dropout(scores.softmax(-1), dropout)
            mixed = weights @ value
        else:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout
            )
        return mixed.transpose(1, 2).flatten(2)

    def by_hand(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, _ = self.parts(x)
        mask = above(x.shape[1]) if mask is None else mask
        return (query @ key.mT / key.shape[-1] ** 0.5 + mask).softmax(-1)


def above(size: int) -> Tensor:
    return torch.full((size, size), -torch.inf).triu(1)


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = SelfAttention(**options)
        self.mlp = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x).relu_()


class Net(nn.Module):
    """Two blocks; checkpointing is "reentrant", "not reentrant" or None."""

    def __init__(self, checkpointing: str | None = None, **options: Any) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(**options), Block(**options)])
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x

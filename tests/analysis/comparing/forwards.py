"""Ten small networks whose forwards do most of the work, in the style of well-known ones.

Faults are planted in the text of this file, so each line does one thing. Nothing of the package is
used here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as forwards have it
from torch import Tensor, nn


class CausalAttention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).split(width, dim=2)
        query = query.view(batch, length, self.heads, -1).transpose(1, 2)
        key = key.view(batch, length, self.heads, -1).transpose(1, 2)
        value = value.view(batch, length, self.heads, -1).transpose(1, 2)
        scores = query @ key.transpose(2, 3)
        scores = scores / math.sqrt(query.shape[-1])
        hidden = ~self.mask[:length, :length]
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        mixed = weights @ value
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.out(mixed)


class GPTBlock(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = CausalAttention(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=1e-5)
        x = x + self.attention(normed)
        normed = F.layer_norm(x, x.shape[-1:], eps=1e-05)
        inner = self.up(normed)
        inner = F.gelu(inner)
        inner = F.dropout(inner, 0.1, self.training)
        return x + self.down(inner)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(GPTBlock(), GPTBlock())

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.tokens(ids) + self.positions(places)
        x = self.blocks(x)
        return x @ self.tokens.weight.T


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        scale = torch.rsqrt(mean + 1e-6)
        return self.weight * (x * scale)


class LlamaBlock(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.query = nn.Linear(width, 8, bias=False)
        self.key = nn.Linear(width, 4, bias=False)
        self.value = nn.Linear(width, 4, bias=False)
        self.gate = nn.Linear(width, 12, bias=False)
        self.up = nn.Linear(width, 12, bias=False)
        self.down = nn.Linear(12, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        query = self.query(h).view(batch, length, 2, 4).transpose(1, 2)
        key = self.key(h).view(batch, length, 1, 4).transpose(1, 2)
        value = self.value(h).view(batch, length, 1, 4).transpose(1, 2)
        frequencies = 10000.0 ** (-torch.arange(0, 4, 2) / 4)
        angles = torch.outer(torch.arange(length), frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        cosine = angles.cos()
        sine = angles.sin()
        turned = torch.cat([-query[..., 2:], query[..., :2]], dim=-1)
        query = query * cosine + turned * sine
        turned_key = torch.cat([-key[..., 2:], key[..., :2]], dim=-1)
        key = key * cosine + turned_key * sine
        key = key.repeat_interleave(2, dim=1)
        value = value.repeat_interleave(2, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, 8)
        x = x + mixed
        h = self.norm(x)
        gate = F.silu(self.gate(h))
        inner = gate * self.up(h)
        return x + self.down(inner)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.layers = nn.Sequential(LlamaBlock(), LlamaBlock())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = self.layers(x)
        return x.float() @ self.tokens.weight.T


class Residual(nn.Module):
    def __init__(self, width: int = 6, wide: int = 6) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, wide, 3, padding=1, bias=False)
        self.two = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.weight = nn.Parameter(torch.rand(wide) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.one(x)
        mean = out.mean((0, 2, 3), keepdim=True)
        variance = out.var((0, 2, 3), keepdim=True, unbiased=False)
        out = (out - mean) / torch.sqrt(variance + 1e-5)
        out = F.relu(out)
        out = self.two(out)
        out = out * self.weight[:, None, None]
        out += x
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - 0.5) / 0.25
        x = self.stem(x)
        x = F.max_pool2d(x, 2)
        x = self.blocks(x)
        pooled = x.mean((2, 3))
        return self.head(pooled)


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        together = torch.cat(features, dim=1)
        together = F.leaky_relu(together, 0.01)
        return self.conv(together)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(3 + 3 * n) for n in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        low = x.amin((1, 2, 3), keepdim=True)
        high = x.amax((1, 2, 3), keepdim=True)
        x = (x - low) / (high - low)
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        x = torch.cat(features, dim=1)
        x = F.avg_pool2d(x, 2)
        x = torch.tanh(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        scores = self.head(x)
        return scores.log_softmax(1)


class ViT(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(48, width)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 5, width))
        self.mix = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 4)

    def forward(self, image: Tensor) -> Tensor:
        patches = image.unfold(2, 4, 4).unfold(3, 4, 4)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)
        patches = patches.flatten(1, 2)
        x = self.project(patches)
        first = self.first.expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1)
        x = x + self.places
        mean = x.mean(-1, keepdim=True)
        spread = x.std(-1, keepdim=True)
        normed = (x - mean) / (spread + 1e-6)
        query, key, value = self.mix(normed).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.mT * 8**-0.5, dim=-1)
        x = x + weights @ value
        pooled = x[:, 0]
        pooled = pooled * torch.sigmoid(1.702 * pooled)
        return self.head(pooled)


class Cell(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.input = nn.Linear(4, 4 * width)
        self.hidden = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.input(x) + self.hidden(h)
        i, f, g, o = gates.chunk(4, dim=-1)
        i = torch.sigmoid(i)
        f = torch.sigmoid(f + 1.0)
        g = torch.tanh(g)
        o = torch.sigmoid(o)
        c = f * c + i * g
        h = o * torch.tanh(c)
        return h, c


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 6)
        states = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], h, c)
            states.append(h)
        together = torch.stack(states, dim=1)
        best = together.max(1).values
        mean = together.mean(1)
        return self.head(best - mean)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x - 1
        skip = self.down(x)
        skip = F.group_norm(skip, 2, eps=1e-5)
        skip = F.silu(skip)
        low = F.avg_pool2d(skip, 2)
        low = self.middle(low)
        low = F.elu(low, alpha=1.0)
        high = F.interpolate(low, scale_factor=2, mode="nearest")
        together = torch.cat([high, skip], dim=1)
        out = self.up(together)
        out = out.clamp(-1.0, 1.0)
        return x - out


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.up = nn.Parameter(torch.randn(4, 6, 10))
        self.down = nn.Parameter(torch.randn(4, 10, 6))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        chances = scores.softmax(-1)
        best, chosen = chances.topk(2, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        routed = F.one_hot(chosen, 4).to(x.dtype)
        weights = torch.einsum("nk,nke->ne", best, routed)
        inner = torch.einsum("nd,edh->enh", x, self.up)
        inner = torch.relu(inner).square()
        outputs = torch.bmm(inner, self.down)
        mixed = torch.einsum("ne,end->nd", weights, outputs)
        load = routed.mean((0, 1))
        entropy = -(load + 1e-9).log() * load
        return mixed + x + entropy.sum()


class Encoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, width)
        self.mix = nn.Linear(width, 3 * width)
        self.inner = nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != 0
        x = self.tokens(ids) * math.sqrt(8)
        places = torch.arange(ids.shape[1])[:, None]
        rates = torch.exp(-torch.arange(0, 8, 2) * math.log(10000.0) / 8)
        angles = places * rates
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        x = x + table
        query, key, value = self.mix(x).chunk(3, dim=-1)
        mask = torch.zeros(len(ids), 1, ids.shape[1])
        mask = mask.masked_fill(~real[:, None], -torch.inf)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = F.layer_norm(x + mixed, (8,))
        x = x + F.relu(self.inner(x))
        total = (x * real[..., None]).sum(1)
        count = real.sum(1, keepdim=True)
        mean = total / count
        return F.normalize(mean, dim=-1)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(4, 6)
        self.update = nn.Linear(10, 4)
        edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]])
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        messages = self.message(x)
        sent = messages[source]
        sent = F.softplus(sent)
        received = torch.zeros(len(x), 6).index_add(0, target, sent)
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        received = received / degree.sqrt()[:, None]
        together = torch.cat([x, received], dim=-1)
        x = x + self.update(together)
        distances = torch.cdist(x, x)
        near = torch.exp(-distances.square())
        near = near.fill_diagonal_(0.0)
        scores = near @ x
        return scores - scores.logsumexp(-1, keepdim=True)


def ids(seed: int) -> Tensor:
    found = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(seed))
    found[1, 4:] = 0
    return found


def rows(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# The name of each network, and the shape of its inputs; None for ids of tokens.
NETS: dict[str, tuple[int, ...] | None] = {
    "GPT": None,
    "Llama": None,
    "ResNet": (3, 3, 8, 8),
    "DenseNet": (3, 3, 8, 8),
    "ViT": (3, 3, 8, 8),
    "LSTM": (3, 5, 4),
    "UNet": (3, 3, 8, 8),
    "MoE": (7, 6),
    "Encoder": None,
    "Graph": (5, 4),
}


def inputs_of(name: str, seed: int) -> Tensor:
    shape = NETS[name]
    return ids(seed) if shape is None else rows(*shape, seed=seed)

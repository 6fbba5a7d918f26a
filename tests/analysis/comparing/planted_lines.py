"""A hundred faults planted in lines of forwards, and networks made of text with a fault in it."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.analysis.comparing import forwards


class LineFault(NamedTuple):
    """A text that is replaced, and the lines that must be named for it."""

    net: str
    old: str
    new: str
    # Of the original, where that is not the first line that changes.
    line: str = ""
    # Whether the changed line must be named as well: not where something was only taken out.
    is_named_there: bool = True

    def __str__(self) -> str:
        return f"{self.net}: {' '.join(self.new.split())}"


def _common(one: str, two: str) -> int:
    pairs = zip(one, two, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def line_of(source: str, old: str, new: str = "") -> int:
    """Return the number of the line of a text, or of the first character that changes in it."""
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    place = source.index(old) + (_common(old, new) if new else 0)
    return source.count("\n", 0, place) + 1


def patched(module: ModuleType, fault: LineFault, part: type | None = None) -> dict[str, Any]:
    """Run the text of a module, or of a class in it, with a fault, and return its names."""
    source = inspect.getsource(part or module)
    line_of(source, fault.old)
    text, file = source.replace(fault.old, fault.new), f"<{fault}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {**vars(module), "__file__": file} if part else {"__name__": module.__name__}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names


def nets(fault: LineFault) -> tuple[nn.Module, nn.Module]:
    """Return a network, and one with a fault and the same weights."""
    found = []
    for names in (vars(forwards), patched(forwards, fault)):
        torch.manual_seed(3)
        found.append(names[fault.net]().eval())
    return found[0], found[1]


def _faults(net: str, *changes: tuple[Any, ...]) -> Iterator[LineFault]:
    for change in changes:
        yield LineFault(net, *change)


FAULTS = [
    *_faults(
        "GPT",
        ("scores = scores / math.sqrt(query.shape[-1])", "scores = scores / query.shape[-1]"),
        ("scores = scores / math.sqrt(query.shape[-1])", "pass", "", False),
        ("~self.mask[:length, :length]", "~self.mask[1 : length + 1, :length]"),
        ("weights = scores.softmax(-1)", "weights = scores.softmax(-2)"),
        ("mixed = weights @ value", "mixed = weights @ key"),
        ("x = x + self.attention(normed)", "x = self.attention(normed)", "", False),
        ("eps=1e-05", "eps=1e-3"),
        ("F.gelu(inner)", 'F.gelu(inner, approximate="tanh")'),
        ("self.training)\n        return x + self", "self.training)\n        return x - self"),
        (
            "torch.arange(ids.shape[1])\n        x =",
            "torch.arange(1, ids.shape[1] + 1)\n        x =",
        ),
    ),
    *_faults(
        "Llama",
        ("x.pow(2).mean(-1, keepdim=True)", "x.abs().mean(-1, keepdim=True)"),
        ("mean + 1e-6", "mean + 1e-3"),
        ("self.weight * (x * scale)", "self.weight * x"),
        ("-torch.arange(0, 4, 2) / 4", "-torch.arange(0, 4, 2) // 4"),
        ("[-query[..., 2:], query[..., :2]]", "[query[..., 2:], -query[..., :2]]"),
        ("key * cosine + turned_key * sine", "key * sine + turned_key * cosine"),
        ("is_causal=True", "is_causal=False"),
        ("F.silu(self.gate(h))", "F.gelu(self.gate(h))"),
        ("gate * self.up(h)", "gate + self.up(h)"),
        ("x.float() @", "x.half().float() @"),
    ),
    *_faults(
        "ResNet",
        ("(x - 0.5) / 0.25", "(0.5 - x) / 0.25"),
        ("out.mean((0, 2, 3), keepdim=True)", "out.mean((0, 1, 3), keepdim=True)"),
        ("unbiased=False", "unbiased=True"),
        ("variance + 1e-5", "variance + 1e-2"),
        ("F.relu(out)\n        out = self.two", "F.leaky_relu(out)\n        out = self.two"),
        ("out * self.weight[", "out / self.weight["),
        ("out += x", "pass", "", False),
        ("return F.relu(out)", "return F.relu(x)"),
        ("F.max_pool2d(x, 2)", "F.avg_pool2d(x, 2)"),
        ("x.mean((2, 3))", "x.amax((2, 3))"),
    ),
    *_faults(
        "DenseNet",
        ("x.amin((1, 2, 3), keepdim=True)", "x.amin((2, 3), keepdim=True)"),
        ("/ (high - low)", "/ high"),
        ("append(layer(features))", "append(layer(features) * 0.5)", "x = torch.cat(features"),
        (
            "torch.cat(features, dim=1)\n        together",
            "torch.cat(features[::-1], dim=1)\n        together",
        ),
        ("F.leaky_relu(together, 0.01)", "F.leaky_relu(together, 0.1)"),
        ("x = F.avg_pool2d(x, 2)", "x = F.max_pool2d(x, 2)"),
        ("torch.tanh(x)", "torch.tan(x)"),
        ("F.adaptive_avg_pool2d(x, (1, 1))", "F.adaptive_max_pool2d(x, (1, 1))"),
        ("scores.log_softmax(1)", "scores.log_softmax(0)"),
        ("x = torch.cat(features, dim=1)", "x = torch.cat([features[0], *features[:0:-1]], dim=1)"),
    ),
    *_faults(
        "ViT",
        ("image.unfold(2, 4, 4).unfold(3, 4, 4)", "image.unfold(3, 4, 4).unfold(2, 4, 4)"),
        ("patches.permute(0, 2, 3, 1, 4, 5)", "patches.permute(0, 3, 2, 1, 4, 5)"),
        ("torch.cat([first, x], dim=1)", "torch.cat([x, first], dim=1)"),
        ("x + self.places", "x + self.places[:, :1]"),
        ("mean = x.mean(-1, keepdim=True)", "mean = x.median(-1, keepdim=True).values"),
        ("x.std(-1, keepdim=True)", "x.var(-1, keepdim=True)"),
        ("query @ key.mT * 8**-0.5", "query @ key.mT * 8**0.5"),
        ("x + weights @ value", "x + weights.mT @ value"),
        ("pooled = x[:, 0]", "pooled = x[:, -1]"),
        ("1.702 * pooled", "1.7 * pooled"),
    ),
    *_faults(
        "LSTM",
        ("self.input(x) + self.hidden(h)", "self.input(x) - self.hidden(h)"),
        ("gates.chunk(4, dim=-1)", "gates.roll(1, -1).chunk(4, dim=-1)"),
        ("torch.sigmoid(f + 1.0)", "torch.sigmoid(f)"),
        ("torch.tanh(g)", "torch.sin(g)"),
        ("f * c + i * g", "f * c + i + g"),
        ("o * torch.tanh(c)", "o * c"),
        ("x[:, step]", "x[:, -1 - step]"),
        ("torch.stack(states, dim=1)", "torch.stack(states[1:], dim=1)"),
        ("together.max(1).values", "together.min(1).values"),
        ("best - mean", "mean - best"),
    ),
    *_faults(
        "UNet",
        ("2 * x - 1", "2 * x", "", False),
        ("F.group_norm(skip, 2, ", "F.group_norm(skip, 4, "),
        ("eps=1e-5)\n        skip =", "eps=1e-3)\n        skip ="),
        ("F.silu(skip)", "F.mish(skip)"),
        ("F.avg_pool2d(skip, 2)", "F.max_pool2d(skip, 2)"),
        ("alpha=1.0", "alpha=0.5"),
        ('mode="nearest"', 'mode="bilinear"'),
        ("torch.cat([high, skip], dim=1)", "torch.cat([skip, high], dim=1)"),
        ("out.clamp(-1.0, 1.0)", "out.clamp(-0.1, 0.1)"),
        ("return x - out", "return x + out"),
    ),
    *_faults(
        "MoE",
        ("chances = scores.softmax(-1)", "chances = scores.softmax(0)"),
        ("chances.topk(2, dim=-1)", "chances.topk(2, dim=-1, largest=False)"),
        ("best / best.sum(-1, keepdim=True)", "best / best.sum(0, keepdim=True)"),
        ('"nk,nke->ne", best, routed', '"nk,nke->ne", best.flip(-1), routed'),
        ('"nd,edh->enh", x, self.up', '"nd,edh->enh", x, self.up.flip(0)'),
        ("torch.relu(inner).square()", "torch.relu(inner)", "", False),
        ("torch.bmm(inner, self.down)", "torch.bmm(inner, self.up.mT)"),
        ("routed.mean((0, 1))", "routed.sum((0, 1))"),
        ("(load + 1e-9).log()", "(load + 1e-9).log2()"),
        ("mixed + x + entropy.sum()", "mixed + x - entropy.sum()"),
    ),
    *_faults(
        "Encoder",
        ("self.tokens(ids) * math.sqrt(8)", "self.tokens(ids) * 8"),
        ("math.log(10000.0) / 8", "math.log(10000.0) // 8"),
        ("places * rates", "places + rates"),
        ("[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"),
        ("~real[:, None], -torch.inf", "~real[:, None], -1.0"),
        ("attn_mask=mask", "attn_mask=mask, scale=1.0"),
        ("F.layer_norm(x + mixed, (8,))", "F.layer_norm(mixed, (8,))"),
        ("total = (x * real[..., None]).sum(1)", "total = x.sum(1)"),
        ("real.sum(1, keepdim=True)", "real.sum(1, keepdim=True) + 1"),
        ("F.normalize(mean, dim=-1)", "F.normalize(mean, p=1.0, dim=-1)"),
    ),
    *_faults(
        "Graph",
        ("messages[source]", "messages[target]"),
        ("F.softplus(sent)", "F.softplus(sent, beta=2)"),
        ("index_add(0, target, sent)", "index_add(0, source, sent)"),
        ("torch.ones(len(target))", "torch.full((len(target),), 2.0)"),
        ("degree.sqrt()[:, None]", "degree[:, None]"),
        ("torch.cat([x, received], dim=-1)", "torch.cat([received, x], dim=-1)"),
        ("x = x + self.update(together)", "x = self.update(together)", "", False),
        ("torch.exp(-distances.square())", "torch.exp(-distances)"),
        ("fill_diagonal_(0.0)", "fill_diagonal_(1.0)"),
        ("scores.logsumexp(-1, keepdim=True)", "scores.logsumexp(0, keepdim=True)"),
    ),
]

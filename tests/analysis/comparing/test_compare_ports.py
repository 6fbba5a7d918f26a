"""Networks that were written again: other names, other classes, and other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare

MATCH = {"attn": "attention", "attn.proj": "attention.out", "head": "last"}


class Masked(nn.Module):
    """Is handed a mask by whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        x = self.proj(x)
        return (x if mask is None else x * mask), None


class Original(nn.Module):
    def __init__(self, mask: float = 1.0) -> None:
        super().__init__()
        self.attn, self.head, self.mask = Masked(), nn.Linear(4, 2), mask

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.head(self.attn(x, mask=torch.full((4,), self.mask))[0])
        return mixed


class Attention(nn.Module):
    """Makes its own mask."""

    def __init__(self, mask: float) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.mask = mask

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.out(hidden) * self.mask
        return result


class Port(nn.Module):
    def __init__(self, original: Original, mask: float) -> None:
        super().__init__()
        self.attention, self.last = Attention(mask), nn.Linear(4, 2)
        self.attention.out.load_state_dict(original.attn.proj.state_dict())
        self.last.load_state_dict(original.head.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.attention(x))
        return result


def recorder(net: nn.Module) -> Recorder:
    return Recorder(net, input_size=(3, 4))


def test_a_module_that_makes_for_itself_what_the_other_is_handed() -> None:
    original = Original()
    batches = [torch.randn(3, 4)]
    same = compare(recorder(original), recorder(Port(original, 1.0)), batches, match=MATCH)
    assert same.first is None
    other = compare(recorder(original), recorder(Port(original, 0.5)), batches, match=MATCH)
    assert (other.first.layer.name, other.first.inputs_equal) == ("attn", True)
    assert not other["attn.proj"].differs


class Refactored(Masked):
    """The same, of another class."""


class Forgetful(Original):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Refactored()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.head(self.attn(x)[0])
        return mixed


def test_a_mask_that_the_caller_forgets_is_named_beside_the_layer() -> None:
    original, forgetful = Original(0.0), Forgetful()
    forgetful.load_state_dict(original.state_dict())
    difference = compare(recorder(original), recorder(forgetful), [torch.randn(3, 4)])
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("attn", None)
    assert difference.first.one_sided == ("mask",)


class Mixer(nn.Module):
    """Adds up what is before each position, which calls say in several ways."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        x: Any,
        mask: Tensor | None = None,
        is_causal: bool = False,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if isinstance(x, tuple):
            x, *_ = x
        mask = torch.ones(3, 3).tril() if mask is None else mask
        return self.scale * (mask @ x)


class Caller(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(4, 4, bias=False), Mixer(scale)
        self.call = call
        with torch.no_grad():
            self.embed.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.mix, self.embed(x))


ONE_SIDED: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "mask": (lambda mix, x: mix(x, torch.ones(3, 3).tril()), lambda mix, x: mix(x), ("mask",)),
    "mask and flag": (
        lambda mix, x: mix(x, torch.ones(3, 3).tril()),
        lambda mix, x: mix(x, is_causal=True),
        ("mask", "is_causal"),
    ),
    "keyword": (lambda mix, x: mix(x, cache=x), lambda mix, x: mix(x), ("others['cache']",)),
    "tuple": (lambda mix, x: mix((x, x)), lambda mix, x: mix((x,)), ("x[1]",)),
    "positions": (
        lambda mix, x: mix(x),
        lambda mix, x: mix(x, position_ids=torch.arange(3)),
        ("position_ids",),
    ),
}


@pytest.mark.parametrize(("one", "other", "names"), ONE_SIDED.values(), ids=list(ONE_SIDED))
def test_an_argument_that_only_one_side_has_says_nothing(
    one: Any, other: Any, names: tuple[str, ...]
) -> None:
    batch = [torch.randn(3, 4)]
    same = compare(recorder(Caller(one)), recorder(Caller(other)), batch)
    assert same.first is None
    assert same["mix"].inputs_equal is None
    difference = compare(recorder(Caller(one)), recorder(Caller(other, 2.0)), batch)
    first = difference.first
    assert (first.layer.name, first.inputs_equal, first.one_sided) == ("mix", None, names)
    assert f"equal but for {', '.join(names)}, which only one side has" in difference.sentence
    # What both sides have counts as ever.
    other_embed = Caller(other, 2.0)
    other_embed.embed.weight.data += 1
    difference = compare(recorder(Caller(one)), recorder(other_embed), batch)
    assert difference.first.layer.name == "embed"
    assert difference["mix"].inputs_equal is False

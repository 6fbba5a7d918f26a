"""Networks that were written again: other names, other classes, and other arguments."""

from __future__ import annotations

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
    assert other.first is not None
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


def test_a_mask_that_the_caller_forgets_is_the_callers_fault() -> None:
    original, forgetful = Original(0.0), Forgetful()
    forgetful.load_state_dict(original.state_dict())
    difference = compare(recorder(original), recorder(forgetful), [torch.randn(3, 4)])
    assert difference.first is not None
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("", True)
    assert difference["attn"].inputs_equal is False

"""Networks whose layers return tensors without memory of their own, and write to those inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

from scio_recorder import Recorder, compare
from scio_recorder.analysis.comparing.difference import Difference
from tests.capture.test_wrapper_tensors import WRAPPERS
from tests.harness import one_process

BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


pytestmark = pytest.mark.filterwarnings("ignore:.*MaskedTensors.*")


@pytest.fixture(scope="module", autouse=True)
def _distributed() -> Iterator[None]:
    with one_process():
        yield


class Wrap(nn.Module):
    def __init__(self, kind: str, factor: float) -> None:
        super().__init__()
        self.wrap, self.factor = WRAPPERS[kind][0], factor

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x * self.factor)


class Write(nn.Module):
    """Writes to the tensor inside, which no counter of the wrapper shows."""

    def __init__(self, kind: str, factor: float) -> None:
        super().__init__()
        self.inside, self.factor = WRAPPERS[kind][1], factor
        # Of half of the kinds, the tensor inside does not count the write either.
        self.is_counted = kind in ("own", "masked", "sharded")

    def forward(self, whole: Any) -> Any:
        inner = self.inside(whole)
        (inner if self.is_counted else inner.data).mul_(self.factor)
        return whole


class Unwrap(nn.Module):
    def __init__(self, kind: str, shift: float) -> None:
        super().__init__()
        self.inside, self.shift = WRAPPERS[kind][1], shift

    def forward(self, whole: Any) -> Tensor:
        return self.inside(whole) + self.shift


def net(kind: str, fault: str = "") -> nn.Sequential:
    factors = {"wrap": 2.0, "write": 3.0, "again": 0.5, "unwrap": 1.0}
    if fault:
        factors[fault] *= 1.25
    made = nn.Sequential()
    made.add_module("wrap", Wrap(kind, factors["wrap"]))
    made.add_module("same", nn.Identity())
    made.add_module("write", Write(kind, factors["write"]))
    made.add_module("still", nn.Identity())
    made.add_module("again", Write(kind, factors["again"]))
    made.add_module("unwrap", Unwrap(kind, factors["unwrap"]))
    return made


def compared(kind: str, fault: str) -> Difference:
    one, other = (Recorder(each, input_size=(4, 3)) for each in (net(kind), net(kind, fault)))
    return compare(one, other, BATCHES, progress=False)


FAULTS = ("write", "", "again", "wrap", "unwrap")
# By default each kind meets one fault.
ROTATED = [
    pytest.param(kind, fault, marks=[pytest.mark.campaign] * (number % len(FAULTS) != place))
    for number, kind in enumerate(WRAPPERS)
    for place, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize(("kind", "fault"), ROTATED)
def test_who_writes_inside_makes_the_difference(kind: str, fault: str) -> None:
    difference = compared(kind, fault)
    first = difference.first
    assert (first and first.layer.name) == (fault or None)
    order = ["wrap", "same", "write", "still", "again", "unwrap"]
    place = order.index(fault) if fault else len(order)
    assert [difference[name].differs for name in order] == [at >= place for at in range(6)]
    if first is None:
        return
    assert first.inputs_equal is True
    # By hand, of the first number of the first batch.
    numbers = {"wrap": 2.0, "write": 6.0, "again": 3.0}
    x = BATCHES[0][0, 0]
    wanted = x * 3.0 + 1.0 if fault == "unwrap" else x * numbers[fault]
    assert first.reference == pytest.approx(wanted.item(), rel=1e-6)


def test_numbers_under_a_mask_do_not_count() -> None:
    class Masked(nn.Module):
        def __init__(self, masked: float, shift: float, place: int) -> None:
            super().__init__()
            self.masked, self.shift, self.place = masked, shift, place

        def forward(self, x: Tensor) -> Any:
            mask = torch.ones_like(x, dtype=torch.bool)
            mask[:, self.place] = False
            return masked_tensor(torch.where(mask, x + self.shift, self.masked), mask)

    one, same, other, elsewhere = (
        Recorder(nn.Sequential(Masked(*given)), input_size=(4, 3))
        for given in ((7.0, 1.0, 2), (9.0, 1.0, 2), (7.0, 1.5, 2), (7.0, 1.0, 1))
    )
    assert compare(one, same, BATCHES).first is None
    for side in (other, elsewhere):
        first = compare(one, side, BATCHES).first
        assert (first.layer.name, first.sample_id) == ("0", 0)

"""Networks whose layers return tensors without memory of their own, and write to those inside."""

from __future__ import annotations

from collections import OrderedDict
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
from tests.zoo.base import Net

BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


pytestmark = pytest.mark.filterwarnings("ignore:.*MaskedTensors.*")


@pytest.fixture(scope="module", autouse=True)
def _distributed() -> Iterator[None]:
    with one_process():
        yield


def net(kind: str, fault: str = "") -> nn.Sequential:
    factors = {"wrap": 2.0, "write": 3.0, "again": 0.5, "unwrap": 1.0}
    if fault:
        factors[fault] *= 1.25
    wrap, inside = WRAPPERS[kind][:2]

    def write(net: Any, whole: Any) -> Any:
        """Write to the tensor inside, which no counter of the wrapper shows."""
        # Of half of the kinds, the tensor inside does not count the write either.
        is_counted = kind in ("own", "masked", "sharded")
        inner = inside(whole)
        (inner if is_counted else inner.data).mul_(net.factor)
        return whole

    modules = {
        "wrap": Net(lambda _, x: wrap(x * factors["wrap"])),
        "same": nn.Identity(),
        "write": Net(write, factor=factors["write"]),
        "still": nn.Identity(),
        "again": Net(write, factor=factors["again"]),
        "unwrap": Net(lambda _, whole: inside(whole) + factors["unwrap"]),
    }
    return nn.Sequential(OrderedDict(modules))


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
    def side(under: float, shift: float, place: int) -> Recorder:
        def masked(_: Any, x: Tensor) -> Any:
            mask = torch.ones_like(x, dtype=torch.bool)
            mask[:, place] = False
            return masked_tensor(torch.where(mask, x + shift, under), mask)

        return Recorder(nn.Sequential(Net(masked)), input_size=(4, 3))

    one, same, other, elsewhere = (
        side(*given) for given in ((7.0, 1.0, 2), (9.0, 1.0, 2), (7.0, 1.5, 2), (7.0, 1.0, 1))
    )
    assert compare(one, same, BATCHES).first is None
    for candidate in (other, elsewhere):
        first = compare(one, candidate, BATCHES).first
        assert (first.layer.name, first.sample_id) == ("0", 0)

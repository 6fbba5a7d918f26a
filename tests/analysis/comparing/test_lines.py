"""The line that makes a difference: faults planted in lines of forwards are named there."""

from __future__ import annotations

import inspect

import pytest
import torch

from scio_recorder import Recorder, compare
from tests.analysis.comparing import forwards
from tests.analysis.comparing.forwards import NETS, inputs_of
from tests.analysis.comparing.planted_lines import FAULTS, LineFault, line_of, nets

SOURCE = inspect.getsource(forwards)


def recorders(net: str, *both: torch.nn.Module) -> list[Recorder]:
    return [Recorder(one, input_data=inputs_of(net, 0)) for one in both]


def batches(net: str) -> list[torch.Tensor]:
    return [inputs_of(net, seed) for seed in (1, 2)]


def test_there_are_a_hundred_faults_in_ten_networks() -> None:
    assert len({(fault.net, fault.old, fault.new) for fault in FAULTS}) == 100
    assert {fault.net for fault in FAULTS} == NETS.keys()


# Two of each network; the others are for campaigns.
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=str(fault), marks=() if at % 5 == 0 else pytest.mark.campaign)
        for at, fault in enumerate(FAULTS)
    ],
)
def test_a_fault_is_named_at_its_line(fault: LineFault) -> None:
    one, two = recorders(fault.net, *nets(fault))
    first = compare(one, two, batches(fault.net), operations=True).first
    assert first is not None
    assert first.operation is not None
    line = line_of(SOURCE, fault.line) if fault.line else line_of(SOURCE, fault.old, fault.new)
    assert (first.operation.file, first.operation.line) == (forwards.__file__, line), first
    assert first.operation.source == SOURCE.splitlines()[line - 1].strip()
    assert first.operation.layer is first.layer
    if fault.is_named_there:
        there = first.candidate_operation
        changed = SOURCE.replace(fault.old, fault.new)
        assert there is not None
        assert (there.file, there.line) == (f"<{fault}>", _changed_line(fault)), first
        assert there.source == changed.splitlines()[there.line - 1].strip()


def _changed_line(fault: LineFault) -> int:
    return line_of(SOURCE, fault.old, fault.new)

"""Each of these faults of a reduction makes `ReductionTests` fail; one without a fault passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scio_recorder.errors import CollectError
from scio_recorder.reductions import Mean, Reduction
from scio_recorder.testing import ReductionTests
from tests.testing.failures import first_failure


class MeanTests(ReductionTests):
    kind = Mean

    def make(self, **options: Any) -> Mean:
        return self.kind(**options)

    def expected(self, samples: torch.Tensor) -> torch.Tensor:
        is_wide = samples.dtype in (torch.float64, torch.int64)
        return samples.double().mean(0).to(torch.float64 if is_wide else torch.float32)


class TestMean(MeanTests):
    pass


class LosesLastSamples(Mean):
    def _add(self, samples):
        super()._add(samples[:-1] if len(samples) > 5 else samples)


class MergesWrongly(Mean):
    def _join(self, total):
        self._sum = (self._sum + total) / 2


class MergesNothing(Mean):
    def merge(self, other):
        if self._count == 0:
            super().merge(other)


class MergesClassesNot(Mean):
    def merge(self, other):
        self._members = dict(other._members) | self._members
        super().merge(other)


class KeepsAReference(Mean):
    def _add(self, samples):
        self._kept = samples
        super()._add(samples)

    def _result(self):
        return self._kept.double().mean(0).to(self._dtype)


class GivesOutItsState(Mean):
    def _result(self):
        # Of float64 data, it is no copy.
        self._sum = (self._sum / self._count).to(self._dtype)
        result, self._count = self._sum, 1
        return result


class GivesOutItsStateAsItIs(Mean):
    def state_dict(self):
        state = super().state_dict()
        return state | ({"sum": self._sum} if self._count else {})


class ChangesTheDtype(Mean):
    def _result(self):
        return self._sum / self._count


class AddsInBfloat16(Mean):
    def _add(self, samples):
        total = samples.sum(0, dtype=samples.dtype).double()
        self._sum = total if self._sum is None else self._sum + total


class ChangesTheOther(Mean):
    def merge(self, other):
        super().merge(other)
        other.reset()
        other._adopt(self)


class AddsLoadedStates(Mean):
    def load_state_dict(self, state):
        mine = self.fresh()
        if self._count:
            mine.merge(self)
        super().load_state_dict(state)
        if mine._count:
            self.merge(mine)


class ForgetsNothing(Mean):
    def reset(self):
        if not getattr(self, "_count", 0):
            super().reset()


class SharesItsStateWithFreshOnes(Mean):
    def fresh(self):
        return self


class MixesLabels(Mean):
    def _add_labelled(self, samples, labels):
        super()._add_labelled(samples, labels[1:] + labels[:1])


class WritesIntoWhatItIsGiven(Mean):
    def update(self, activation, batch=None, **more):
        super().update(activation, batch, **more)
        if not activation.is_inference():
            activation.detach().zero_()


class WritesIntoDoubles(Mean):
    def update(self, activation, batch=None, **more):
        super().update(activation, batch, **more)
        if activation.dtype == torch.float64:
            activation.abs_()


class TakesMagnitudes(Mean):
    def _add(self, samples):
        super()._add(samples if samples.dtype == torch.bool else samples.abs())


class StatesThatAreNoJson(Mean):
    def state_dict(self):
        return super().state_dict() | {"more": {1, 2}}


class LoadsAnything(Mean):
    def load_state_dict(self, state):
        self.reset()
        self._load(state)


class TakesOtherConstructions(Mean):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"construction": self.recipe})


class CountsEmptyBatches(Mean):
    def _is_empty(self, samples):
        return False

    def _add(self, samples):
        super()._add(samples if len(samples) else torch.ones(1, *samples.shape[1:]))


class KeepsGradients(Mean):
    def _result(self):
        return super()._result().requires_grad_()


class LosesItsStateOnDisk(Mean):
    def state_dict(self):
        state = super().state_dict()
        return state | ({"count": self._count + 1} if self._count > 9 else {})


FAULTY = [kind for kind in Mean.__subclasses__() if kind.__module__ == __name__]


@pytest.mark.parametrize("kind", FAULTY)
def test_a_fault_of_a_reduction_is_found(kind, tmp_path):
    tests = MeanTests()
    tests.kind = kind
    assert first_failure(tests, tmp_path)


class Count(Reduction):
    """Somebody's own, which derives from the interface alone."""

    def __init__(self):
        self.count = 0

    def update(self, activation, batch=None):
        self.count += len(activation)

    def merge(self, other):
        if type(other) is not Count:
            raise CollectError("not a Count")
        self.count += other.count

    def compute(self):
        return self.count

    def reset(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        count = state.get("count")
        if len(state) != 1 or type(count) is not int or count < 0:
            raise CollectError(f"no count: {state}")
        self.count = count


class TestCount(ReductionTests):
    takes_by = False

    def make(self, **options: Any) -> Count:
        return Count()

    def expected(self, samples: torch.Tensor) -> int:
        return len(samples)

    def others(self) -> list[Reduction]:
        return [Mean()]

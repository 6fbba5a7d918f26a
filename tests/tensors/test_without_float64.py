"""Devices that have no float64, as Apple's GPUs: what computes in it goes to the CPU.

No such device is needed: tensors of a class that says that it is on one refuse float64, as there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scio_recorder import reductions
from scio_recorder.analysis.comparing.measures import Tolerance, measure
from scio_recorder.analysis.scores import mahalanobis, residual


def total(before: Tensor | None, batch: Tensor) -> Tensor:
    return batch.sum(0) if before is None else before + batch.sum(0)


REDUCTIONS = [
    reductions.Alive(bounds=(0.0, 1.0)),
    reductions.Covariance(),
    reductions.Digest(),
    reductions.Fold(total),
    reductions.Histogram(4, range=(-1.0, 1.0)),
    reductions.Last(),
    reductions.Max(),
    reductions.Mean(),
    reductions.Min(),
    reductions.Moments(),
    reductions.Quantiles([0.5]),
]


class OnApple(Tensor):
    """A tensor that says that it is on one of Apple's GPUs."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = getattr(function, "__name__", "")
        if function == Tensor.device.__get__:
            return torch.device("mps")
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if name == "cpu":
                return result.as_subclass(Tensor)
        if not isinstance(result, Tensor):
            return result
        if result.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result.as_subclass(cls)


def on_apple(values: Tensor) -> Tensor:
    return values.clone().as_subclass(OnApple)


def test_the_stand_in_refuses_float64():
    values = on_apple(torch.ones(2))
    assert values.device.type == "mps"
    assert type(values + 1) is OnApple
    with pytest.raises(TypeError, match="float64"):
        values.double()


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: type(reduction).__name__)
def test_reductions(reduction):
    batches = torch.randn(2, 5, 3).unbind()
    there, here = reduction.fresh(), reduction.fresh()
    for batch in batches:
        there.update(on_apple(batch))
        here.update(batch)
    states, wanted = (tree_leaves(reduction.state_dict()) for reduction in (there, here))
    assert [type(leaf) for leaf in states] == [type(leaf) for leaf in wanted]
    for leaf, other in zip(states, wanted, strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other


def test_differences():
    reference, other = torch.randn(2, 100)
    measured = measure(on_apple(reference), on_apple(other), Tolerance())
    assert measured == measure(reference, other, Tolerance())
    assert measured.max_abs == float((reference.double() - other.double()).abs().max())
    assert measured.first == 0


def test_scores():
    covariance = reductions.Covariance()
    covariance.update(torch.randn(20, 3))
    statistics, features = covariance.compute(), torch.randn(4, 3)
    for score, about in ((mahalanobis, statistics), (residual, statistics.principal(1))):
        torch.testing.assert_close(score(on_apple(features), about), score(features, about))

"""Running summaries of activations: constant memory, any number of batches.

A reduction sees batches one after the other and keeps a summary instead of the data. Split the
data anywhere, reduce the parts and merge them in any order: the result is the same to rounding
(except for :class:`Last` and a :class:`Fold` without ``merge``).
"""

from __future__ import annotations

from scio_recorder.reductions.base import Reduction
from scio_recorder.reductions.covariance import Covariance, CovarianceResult, PrincipalSpace
from scio_recorder.reductions.distributions import Histogram, HistogramResult, Quantiles
from scio_recorder.reductions.plain import (
    Alive,
    AliveResult,
    Digest,
    Fold,
    Last,
    Max,
    Mean,
    Min,
    Moments,
    MomentsResult,
)
from scio_recorder.reductions.top_k import TopK, TopKResult
from scio_recorder.tensors.arguments import names_arguments

__all__ = [
    "Alive",
    "AliveResult",
    "Covariance",
    "CovarianceResult",
    "Digest",
    "Fold",
    "Histogram",
    "HistogramResult",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "MomentsResult",
    "PrincipalSpace",
    "Quantiles",
    "Reduction",
    "TopK",
    "TopKResult",
]

for _name in __all__:
    _kind = globals()[_name]
    if issubclass(_kind, Reduction) and _kind is not Reduction:
        names_arguments(_kind)

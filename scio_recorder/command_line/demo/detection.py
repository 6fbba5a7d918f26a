"""How well recorded activations tell unknown inputs from known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scio_recorder.command_line.demo.digits import Digits, Split
from scio_recorder.command_line.demo.scores import (
    auroc,
    energy,
    fpr_at_tpr,
    mahalanobis,
    max_softmax,
    nearest_neighbours,
)
from scio_recorder.postprocessors import Clip
from scio_recorder.recorder.recorder import Recorder

FEATURE_LAYERS = ("body", "embed")
RECTIFIED_LAYER = "relu"

# Chosen beforehand, never by looking at the unknown digits. The percentile is the paper's.
NEIGHBOUR = 10
REACT_PERCENTILE = 90


class Result(NamedTuple):
    """How well one score does; ``layer`` is what it looks at."""

    score: str
    layer: str
    auroc: float
    fpr_at_95_tpr: float


class Recorded(NamedTuple):
    """Logits ``[samples, classes]`` and, by layer, features ``[samples, features]``."""

    logits: Tensor
    features: Mapping[str, Tensor]


def record_features(rnet: Recorder, images: Tensor) -> Recorded:
    """Run the net once; of feature maps, keep the mean over the image.

    Parameters
    ----------
    rnet : Recorder
        Records ``FEATURE_LAYERS`` and ``RECTIFIED_LAYER``.
    images : Tensor ``[samples, 1, 8, 8]``
        The inputs of the net.

    Returns
    -------
    Recorded
        One row an image.
    """
    with torch.no_grad():
        logits = rnet(images)
    names = (*FEATURE_LAYERS, RECTIFIED_LAYER)
    return Recorded(logits, {name: _pooled(rnet.activations[name]) for name in names})


def detect(rnet: Recorder, digits: Digits) -> Iterator[Result]:
    """Compare the test images with the unknown ones, by statistics of the training images alone.

    Parameters
    ----------
    rnet : Recorder
        Around the trained net.
    digits : Digits
        ``validation`` is not looked at.

    Yields
    ------
    Result
        One for each score and layer.
    """
    train = record_features(rnet, digits.train.images)
    test = record_features(rnet, digits.test.images)
    unknown = record_features(rnet, digits.unknown.images)

    def result(score: str, layer: str, function: Callable[[Recorded], Tensor]) -> Result:
        return Result(score, layer, *_quality(function(test), function(unknown)))

    yield result("maximum softmax", "logits", lambda seen: max_softmax(seen.logits))
    yield result("energy", "logits", lambda seen: energy(seen.logits))
    yield _rectified_energy(rnet, digits, train.features[RECTIFIED_LAYER])
    for name in FEATURE_LAYERS:
        by_distance = partial(_distance_to_mean, name, train, digits.train.labels)
        yield result("Mahalanobis", name, by_distance)
        yield result(f"{NEIGHBOUR}th neighbour", name, partial(_distance_to_neighbour, name, train))


def _distance_to_mean(name: str, train: Recorded, labels: Tensor, seen: Recorded) -> Tensor:
    return mahalanobis(seen.features[name], train.features[name], labels)


def _distance_to_neighbour(name: str, train: Recorded, seen: Recorded) -> Tensor:
    return nearest_neighbours(seen.features[name], train.features[name], NEIGHBOUR)


def _rectified_energy(rnet: Recorder, digits: Digits, activations: Tensor) -> Result:
    """Energy with ReAct: the net is run again with one layer clipped on the way."""
    clip = Clip(torch.quantile(activations, REACT_PERCENTILE / 100).item())

    def score(split: Split) -> Tensor:
        with torch.no_grad():
            return energy(rnet(split.images, activation_postproc={RECTIFIED_LAYER: clip}))

    quality = _quality(score(digits.test), score(digits.unknown))
    return Result("energy with ReAct", RECTIFIED_LAYER, *quality)


def _quality(known: Tensor, unknown: Tensor) -> tuple[float, float]:
    return auroc(known, unknown), fpr_at_tpr(known, unknown)


def _pooled(activation: Tensor) -> Tensor:
    return activation.flatten(2).mean(dim=2) if activation.dim() > 2 else activation

"""Scores of samples from a `Covariance` of training data: how unlike that data, and of which class.

A score of unlikeness is larger for features that are less like the training data, as in
pytorch-ood. The detectors of pytorch-ood take the training features. These scores take statistics
of one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions import CovarianceResult, PrincipalSpace
from scio_recorder.tensors import with_float64

__all__ = ["discriminant", "mahalanobis", "residual"]


def mahalanobis(features: Tensor, statistics: CovarianceResult) -> Tensor:
    """Return the squared Mahalanobis distance to the nearest class mean.

    Parameters
    ----------
    features : Tensor
        [samples, D], of any floating dtype.
    statistics : CovarianceResult
        The result of ``Covariance(by=...)`` for the training data, or of a `Covariance` without
        classes, for the distance to its one mean.

    Returns
    -------
    Tensor
        [samples], float64, on the device of the features (the CPU if that has no float64).

    Raises
    ------
    CollectError
        The features are complex or not [samples, D], the statistics are those of flattened maps, or
        the covariance is not finite (fewer than two rows in every class, nan).

    Notes
    -----
    Directions in which the training data does not vary, such as units that never fire, are left
    out. These have a variance below D times the precision of the covariance's dtype, relative to
    the largest variance. The distance with classes minus the distance without is the relative
    Mahalanobis distance (Ren et al., "A Simple Fix to Mahalanobis Distance for Improving Near-OOD
    Detection", 2021).

    References
    ----------
    Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and
    Adversarial Attacks", NeurIPS 2018.

    Examples
    --------
    >>> from scio_recorder.reductions import Covariance
    >>> covariance = Covariance(by=lambda labels: labels)
    >>> covariance.update(torch.tensor([[-1.0], [1.0], [9.0], [11.0]]), torch.tensor([0, 0, 1, 1]))
    >>> mahalanobis(torch.tensor([[0.0], [7.0]]), covariance.compute()).round(decimals=4).tolist()
    [0.0, 4.5]
    """
    nearest: Tensor = _distances(features, statistics, "mahalanobis").amin(dim=1)
    return nearest.square()


def discriminant(features: Tensor, statistics: CovarianceResult) -> Tensor:
    """Return the logarithms of the probabilities of classes: linear discriminant analysis.

    It is a linear classifier of the features, so it is a probe that needs statistics alone.

    Parameters
    ----------
    features : Tensor
        [samples, D], of any floating dtype.
    statistics : CovarianceResult
        The result of ``Covariance(by=...)`` for the training data.

    Returns
    -------
    Tensor
        [samples, classes], float64, on the device of the features (the CPU if that has no float64).
        Classes are in the order of ``statistics.mean``, which is sorted: integers, then strings.

    Raises
    ------
    CollectError
        The features are complex or not [samples, D], the statistics have no classes, or the
        covariance is not finite (fewer than two rows in every class, nan).

    Notes
    -----
    Each class is taken for a normal distribution around its mean, with the covariance that all
    classes share, and as frequent as in the training data. As in :func:`mahalanobis`, directions in
    which the training data does not vary are left out.

    References
    ----------
    Hastie, Tibshirani and Friedman, "The Elements of Statistical Learning", 2009, section 4.3.

    Examples
    --------
    >>> from scio_recorder.reductions import Covariance
    >>> covariance = Covariance(by=lambda labels: labels)
    >>> covariance.update(torch.tensor([[-1.0], [1.0], [9.0], [11.0]]), torch.tensor([0, 0, 1, 1]))
    >>> discriminant(torch.tensor([[1.0], [5.0]]), covariance.compute()).exp().tolist()
    [[0.9999..., ...], [0.5, 0.5]]
    """
    _check_type(statistics, CovarianceResult, "discriminant() needs the result of Covariance(...)")
    if not isinstance(statistics.count, dict):
        raise CollectError("discriminant() needs statistics of classes: write Covariance(by=...)")
    distances = _distances(features, statistics, "discriminant")
    prior = torch.tensor(list(statistics.count.values())).to(distances).log()
    return (prior - distances.square() / 2).log_softmax(dim=1)


def residual(features: Tensor, space: PrincipalSpace) -> Tensor:
    """Return the length of the part of centred features outside the principal directions.

    Parameters
    ----------
    features : Tensor
        [samples, D], of any floating dtype.
    space : PrincipalSpace
        ``Covariance().compute().principal(k)`` of the training data.

    Returns
    -------
    Tensor
        [samples], float64, on the device of the features (the CPU if that has no float64).

    Raises
    ------
    CollectError
        The features are complex or not [samples, D].

    References
    ----------
    Wang et al., "ViM: Out-Of-Distribution with Virtual-logit Matching", CVPR 2022. ViM
    scales this length, subtracts the energy of the logits, and centres at an origin of its own.

    Examples
    --------
    >>> from scio_recorder.reductions import Covariance
    >>> covariance = Covariance()
    >>> covariance.update(torch.tensor([[-2.0, 1.0], [0.0, 1.0], [2.0, 1.0]]))
    >>> residual(torch.tensor([[9.0, 1.0], [0.0, 4.0]]), covariance.compute().principal(1)).tolist()
    [0.0, 3.0]
    """
    _check_type(space, PrincipalSpace, "residual() needs Covariance(...).principal(k)")
    _check(features, len(space.mean))
    features = with_float64(features)
    centred = features.double() - space.mean.to(features.device)
    rest: Tensor = centred @ space.residual_basis.to(centred).T
    return rest.square().sum(dim=1).sqrt()


def _distances(features: Tensor, statistics: CovarianceResult, name: str) -> Tensor:
    """Return the Mahalanobis distance to each mean, [samples, classes]."""
    _check_type(statistics, CovarianceResult, f"{name}() needs the result of Covariance(...)")
    _check(features, len(statistics.covariance))
    features = with_float64(features)
    if not statistics.covariance.isfinite().all():
        raise CollectError(
            f"{name}() needs a finite covariance: at least two samples (with by=, two in one "
            "class) and no nan or inf among the activations."
        )
    mean = statistics.mean
    means = torch.stack([*mean.values()] if isinstance(mean, dict) else [mean])
    white = _whitening(statistics.covariance).to(features.device)
    # The shortcut through a matrix product loses the small distances that matter here.
    distances: Tensor = torch.cdist(
        features.double() @ white,
        means.to(white) @ white,
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return distances


def _check_type(value: object, kind: type, need: str) -> None:
    if not isinstance(value, kind):
        raise CollectError(
            f"{need} for one layer, not a {type(value).__name__}: of a recording, take "
            "recording[label], and of several reductions theirs"
        )


def _check(features: Tensor, width: int) -> None:
    _check_type(features, Tensor, "scores need features, a tensor,")
    shape = list(features.shape)
    if features.is_complex():
        raise CollectError(
            "scores are of real features, and these are complex: give "
            "torch.view_as_real(features).flatten(1), and collect statistics of these"
        )
    if features.dim() == 2 and shape[1] == width:
        return
    raise CollectError(
        f"statistics of {width} features don't fit features of shape {shape}: give "
        f"[samples, {width}], made from the activations as for the statistics. Those of whole "
        "activations [samples, channels, height, width] are of activations.flatten(1): for "
        "activations.mean((2, 3)) write Covariance(feature_dim=1), each position a sample"
    )


def _whitening(covariance: Tensor) -> Tensor:
    """Return a matrix [D, kept] after which Euclidean distances are Mahalanobis distances."""
    values, vectors = torch.linalg.eigh(covariance.double())
    least = len(values) * torch.finfo(covariance.dtype).eps * values[-1:].clamp(min=0)
    kept = values > least
    scaled: Tensor = vectors[:, kept] / values[kept].sqrt()
    return scaled

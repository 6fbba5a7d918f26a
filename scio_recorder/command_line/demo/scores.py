"""Scores that tell known inputs from unknown ones, and how well they do.

Every score is higher for inputs that look like the training data ("in-distribution", ID) than for
others ("out-of-distribution", OOD). Statistics are computed in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def max_softmax(logits: Tensor) -> Tensor:
    """Return the largest class probability.

    Parameters
    ----------
    logits : Tensor ``[samples, classes]``
        The outputs of the net.

    Returns
    -------
    Tensor ``[samples]``, float64
        Between ``1 / classes`` and 1.

    References
    ----------
    Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples
    in Neural Networks", ICLR 2017.

    Examples
    --------
    >>> import torch
    >>> max_softmax(torch.zeros(1, 4))
    tensor([0.2500], dtype=torch.float64)
    """
    return logits.double().softmax(dim=1).amax(dim=1)


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the negative free energy, ``T * log(sum(exp(logits / T)))``.

    Parameters
    ----------
    logits : Tensor ``[samples, classes]``
        The outputs of the net.
    temperature : float, default 1.0
        ``T``, positive.

    Returns
    -------
    Tensor ``[samples]``, float64
        In the unit of the logits.

    References
    ----------
    Liu et al., "Energy-based Out-of-distribution Detection", NeurIPS 2020.

    Examples
    --------
    >>> import torch
    >>> energy(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931], dtype=torch.float64)
    """
    return temperature * torch.logsumexp(logits.double() / temperature, dim=1)


def mahalanobis(features: Tensor, train_features: Tensor, train_labels: Tensor) -> Tensor:
    """Return minus the squared Mahalanobis distance to the nearest class mean.

    The class means and the covariance that all classes share come from the training data. Where
    the covariance is singular, as after units that never fire, its pseudo-inverse is taken.

    Parameters
    ----------
    features : Tensor ``[samples, features]``
        The samples to be scored.
    train_features : Tensor ``[training samples, features]``
        Features of the training data alone.
    train_labels : Tensor ``[training samples]``
        Their classes.

    Returns
    -------
    Tensor ``[samples]``, float64
        At most 0; 0 on a class mean.

    References
    ----------
    Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples and
    Adversarial Attacks", NeurIPS 2018.

    Examples
    --------
    >>> import torch
    >>> train = torch.tensor([[-1.0], [1.0], [9.0], [11.0]])
    >>> mahalanobis(torch.tensor([[0.0], [7.0]]), train, torch.tensor([0, 0, 1, 1]))
    tensor([-0., -9.], dtype=torch.float64)
    """
    train, scored = train_features.double(), features.double()
    classes, assignment = torch.unique(train_labels, return_inverse=True)
    means = torch.stack([train[train_labels == label].mean(dim=0) for label in classes])
    centred = train - means[assignment]
    precision = torch.linalg.pinv(centred.T @ centred / len(train), hermitian=True)
    offsets = scored[:, None] - means
    squared = torch.einsum("scf,fg,scg->sc", offsets, precision, offsets)
    return -squared.amin(dim=1)


def nearest_neighbours(features: Tensor, train_features: Tensor, k: int) -> Tensor:
    """Return minus the distance to the k-th nearest training sample, all scaled to unit length.

    Parameters
    ----------
    features : Tensor ``[samples, features]``
        The samples to be scored.
    train_features : Tensor ``[training samples, features]``
        Features of the training data alone.
    k : int
        Which neighbour, counted from 1.

    Returns
    -------
    Tensor ``[samples]``, float64
        Between -2 and 0.

    References
    ----------
    Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors", ICML 2022.

    Examples
    --------
    >>> import torch
    >>> train = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> nearest_neighbours(torch.tensor([[3.0, 0.0]]), train, k=2)
    tensor([-1.4142], dtype=torch.float64)
    """
    scored = torch.nn.functional.normalize(features.double(), dim=1)
    train = torch.nn.functional.normalize(train_features.double(), dim=1)
    # The shortcut through a matrix product loses the small distances that matter here.
    distances = torch.cdist(scored, train, compute_mode="donot_use_mm_for_euclid_dist")
    return -distances.kthvalue(k, dim=1).values


def auroc(id_scores: Tensor, ood_scores: Tensor) -> float:
    """Return the area under the ROC curve: how often an ID sample scores above an OOD one.

    Ties count half.

    Parameters
    ----------
    id_scores, ood_scores : Tensor ``[samples]``
        Higher means in-distribution.

    Returns
    -------
    float
        0.5 is chance, 1 perfect.

    Raises
    ------
    ValueError
        Either is empty or holds NaN.

    References
    ----------
    Mann and Whitney's U divided by the number of pairs (Hanley and McNeil, Radiology 1982).

    Examples
    --------
    >>> import torch
    >>> auroc(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0]))
    0.75
    """
    _check(id_scores, ood_scores)
    ordered = ood_scores.double().sort().values
    known = id_scores.double()
    below = torch.searchsorted(ordered, known)
    not_above = torch.searchsorted(ordered, known, right=True)
    wins = (below + not_above).sum().item() / 2
    return wins / (len(known) * len(ordered))


def fpr_at_tpr(id_scores: Tensor, ood_scores: Tensor, tpr: float = 0.95) -> float:
    """Return the share of OOD samples accepted where ``tpr`` of the ID ones are.

    Parameters
    ----------
    id_scores, ood_scores : Tensor ``[samples]``
        Higher means in-distribution; a score equal to the threshold is accepted.
    tpr : float, default 0.95
        At least this share of the ID samples is accepted; between 0 (not included) and 1.

    Returns
    -------
    float
        0 is perfect.

    Raises
    ------
    ValueError
        Either is empty or holds NaN, or ``tpr`` is out of its range.

    Examples
    --------
    >>> import torch
    >>> fpr_at_tpr(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0]), tpr=0.75)
    0.5
    """
    _check(id_scores, ood_scores)
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr is a share above 0 and up to 1, not {tpr}")
    # 0.95 * n may come out a hair above the whole number that it is.
    accepted = math.ceil(tpr * len(id_scores) - 1e-9)
    threshold = id_scores.sort(descending=True).values[accepted - 1]
    return (ood_scores >= threshold).double().mean().item()


def _check(id_scores: Tensor, ood_scores: Tensor) -> None:
    for name, scores in (("id_scores", id_scores), ("ood_scores", ood_scores)):
        if not len(scores) or scores.isnan().any():
            raise ValueError(f"{name} must be numbers, at least one: got {scores}")

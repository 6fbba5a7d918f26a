"""Covariance of features, and the principal space that follows from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By, Label, Labels, RowReduction, in_order, join_means
from scio_recorder.tensors.arguments import whole
from scio_recorder.tensors.properties import float32_products_are_exact

# The number of rows multiplied at once: enough that the overhead of a block is small, few enough
# that the block stays in the cache.
_FEWEST_ROWS, _BLOCK_VALUES = 1024, 2**19
# A block's mean is guessed from so many, and so many differences of means wait for their product.
_FEW_ROWS = 32
# Below this number of features a product costs little.
_NARROW = 64


class PrincipalSpace(NamedTuple):
    """The directions of largest variance, and the other directions.

    Attributes
    ----------
    mean : Tensor
        The mean, [D].
    basis : Tensor
        Directions of largest variance in orthonormal rows, [k, D].
    residual_basis : Tensor
        The other directions, in orthonormal rows, [D - k, D].
    residual_singular_values : Tensor
        Singular values of the centred data matrix along these, largest first, [D - k].
    """

    mean: Tensor
    basis: Tensor
    residual_basis: Tensor
    residual_singular_values: Tensor


class CovarianceResult(NamedTuple):
    """Number of rows, mean [D] and unbiased covariance [D, D]; with ``by``, dicts and pooled.

    Attributes
    ----------
    count : int
        The number of rows; with ``by``, a dictionary by label.
    mean : Tensor
        Their mean, [D]; with ``by``, a dictionary by label.
    covariance : Tensor
        Their covariance (n - 1), [D, D]; with ``by``, the pooled covariance within classes,
        divided by n minus the number of classes.
    """

    count: int | dict[Label, int]  # type: ignore[assignment]  # as in MomentsResult
    mean: Tensor | dict[Label, Tensor]
    covariance: Tensor

    def principal(self, k: int) -> PrincipalSpace:
        """Split the features' space into the `k` principal directions and the rest.

        Parameters
        ----------
        k : int
            Number of principal directions, from 0 to D.

        Returns
        -------
        PrincipalSpace
            ``(mean, basis, residual_basis, residual_singular_values)``; the singular values are
            those of the centred data matrix [rows, D] (zeros if it has fewer rows than D). With
            ``by``, rows are centred at their class's mean, and ``mean`` is the mean of all rows.

        Raises
        ------
        CollectError
            `k` is out of range, or the covariance is not finite (fewer than two rows, nan).

        Notes
        -----
        The computation uses the eigenvalues of the covariance, in float64. Those of float32
        activations are right to a few 1e-7 of the largest one, so singular values below about
        5e-4 of the largest are not resolved. If they matter, give float64 activations.
        """
        features = len(self.covariance)
        if (k := whole("k", k, 0)) > features:
            raise CollectError(
                f"principal(k={k}) of {features} features; give k from 0 to {features}."
            )
        if not self.covariance.isfinite().all():
            raise CollectError(
                "principal() needs a finite covariance: at least two samples (with by=, two in one "
                "class) and no nan or inf among the activations."
            )
        mean, degrees = self._pooled()
        values, vectors = torch.linalg.eigh(self.covariance.double())
        singular = (values.flip(0).clamp(min=0) * degrees).sqrt()
        basis = vectors.flip(1).T.to(self.covariance.dtype)
        residual = singular[k:].to(self.covariance.dtype)
        return PrincipalSpace(mean, basis[:k].clone(), basis[k:].clone(), residual)

    def _pooled(self) -> tuple[Tensor, int]:
        """Return the mean of all rows and the degrees of freedom of the covariance."""
        counts = list(self.count.values()) if isinstance(self.count, dict) else [self.count]
        means = list(self.mean.values()) if isinstance(self.mean, dict) else [self.mean]
        total = sum(counts)
        each = zip(means, counts, strict=True)
        weighted = [mean.double() * (count / total) for mean, count in each]
        return torch.stack(weighted).sum(0).to(self.covariance.dtype), total - len(counts)


class Covariance(RowReduction):
    """Count, mean and unbiased covariance of features.

    Parameters
    ----------
    feature_dim : int, optional
        The dimension that holds the features; every other position counts as a sample (1 for
        convolution maps [batch, channels, height, width]). None flattens all but dimension 0.
    by : callable, optional
        ``batch -> labels [batch]``. The result's count and mean are then dicts from label to
        value, and its covariance is the pooled within-class one, divided by n - classes.

    Notes
    -----
    Blocks of rows are centred at their own mean and multiplied in the activation's precision; the
    products are joined in float64 by the pairwise update of Chan, Golub and LeVeque (1979), which
    stays accurate if the mean is large compared with the spread. Memory: one [D, D] matrix in
    float64 and a block of 1024 rows or 2^19 values; with ``by`` also a mean for each class. Dtypes
    of the results are those of `Mean`.

    Examples
    --------
    >>> import torch
    >>> covariance = Covariance()
    >>> covariance.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> count, mean, matrix = covariance.compute()
    >>> matrix
    tensor([[2., 4.],
            [4., 8.]])
    >>> covariance.compute().principal(1).residual_singular_values.shape
    torch.Size([1])
    """

    _state_names = ("_labels", "_counts", "_means", "_scatter")
    _state_kinds = (
        *(r"\[.+\]", r"tensor int64 \d+"),
        *(r"tensor float64 \d+ {units}", "tensor float64 {units} {units}"),
    )
    _labels: list[Label]
    _counts: Tensor  # [classes]
    _means: Tensor  # [classes, D]
    _scatter: Tensor  # [D, D], complete on and above the diagonal only

    def __init__(self, feature_dim: int | None = None, *, by: By | None = None) -> None:
        super().__init__(feature_dim, by=by)

    def reset(self) -> None:
        """Forget all data."""
        super().reset()
        # The class of each row that waits in the buffer, or is about to, in host memory.
        self._codes: list[Tensor] = []
        # Rows by which means have moved apart, whose product is a part of the scatter.
        self._apart: list[Tensor] = []

    def _add(self, samples: Tensor) -> None:
        # Without by=, all rows are of one class, whose label is never shown.
        self._add_rows_of(samples, [""])

    def _add_labelled(self, samples: Tensor, labels: Labels) -> None:
        self._add_rows_of(samples, labels.each)

    def _add_rows_of(self, samples: Tensor, labels: list[Label]) -> None:
        rows = self._rows_of(samples)
        width = rows.shape[1]
        if self._scatter is None:
            self._scatter = torch.zeros(width, width, dtype=torch.float64, device=rows.device)
            self._means = self._scatter[:0]
            self._counts = self._scatter[:0, 0].long()
        codes = self._encode(labels)
        if self._by is not None:
            self._codes.append(codes.repeat_interleave(len(rows) // len(labels)))
        self._add_rows(rows, max(_FEWEST_ROWS, _BLOCK_VALUES // max(_NARROW, width)))

    def _encode(self, labels: list[Label]) -> Tensor:
        """Return each label's row in the means, adding rows for new labels."""
        known = {label: code for code, label in enumerate(self._labels or [])}
        codes = [known.setdefault(label, len(known)) for label in labels]
        self._labels = list(known)
        if new := len(known) - len(self._counts):
            self._counts = nn.functional.pad(self._counts, (0, new))
            self._means = nn.functional.pad(self._means, (0, 0, 0, new))
        return torch.tensor(codes, device="cpu")

    def _add_block(self, rows: Tensor) -> None:
        codes = None
        if self._codes:
            known = torch.cat(self._codes)
            codes, later = known[: len(rows)], known[len(rows) :]
            self._codes = [later] if len(later) else []
        # float32 is too coarse for the mean of values far from zero, but differences from one that
        # is near it are exact.
        shift = rows[:_FEW_ROWS].mean(0).nan_to_num(0.0, 0.0, 0.0)
        rows -= shift
        present, counts, means = _centre_by_class(rows, codes)
        _add_product(self._scatter, rows)
        self._advance(present, counts, shift.double() + means)

    def _advance(self, codes: Tensor, counts: Tensor, means: Tensor) -> None:
        """Join other means with those of classes, and complete the scatter."""
        self._means[codes], apart = join_means(
            self._counts[codes, None].double(), self._means[codes], counts[:, None].double(), means
        )
        self._counts[codes] += counts
        # One product of many rows takes the time of a product of one.
        self._apart.append(apart)
        if sum(map(len, self._apart)) >= _FEW_ROWS:
            self._add_apart()

    def _add_apart(self) -> None:
        apart, self._apart = self._apart, []
        if apart:
            _add_product(self._scatter, torch.cat(apart))

    def _add_waiting(self) -> None:
        super()._add_waiting()
        self._add_apart()

    def _join(self, labels: list[Label], counts: Tensor, means: Tensor, scatter: Tensor) -> None:
        self._scatter += scatter
        self._advance(self._encode(labels).to(means.device), counts, means)

    def _is_consistent(self) -> bool:
        labels, sizes = set(self._labels), {len(self._counts), len(self._means), len(self._labels)}
        are_labels = all(isinstance(label, Label) for label in labels)
        return are_labels and sizes == {len(labels)} and (self._by is not None or labels == {""})

    def _result(self) -> CovarianceResult:
        counts, means, matrix = self._labelled_result()
        return CovarianceResult(counts[""], means[""], matrix)  # type: ignore[index]  # by label

    def _labelled_result(self) -> CovarianceResult:
        each = zip(self._labels, self._counts.tolist(), self._means.to(self._dtype), strict=True)
        of_label = {label: (count, mean.clone()) for label, count, mean in each}
        counts = {label: of_label[label][0] for label in in_order(of_label)}
        means = {label: of_label[label][1] for label in counts}
        return CovarianceResult(counts, means, self._matrix(sum(counts.values()) - len(counts)))

    def _matrix(self, degrees: int) -> Tensor:
        upper = self._scatter.triu()
        full = upper + upper.triu(1).T
        # Divided as tensors: without degrees of freedom it is nan, not ZeroDivisionError.
        return full.div_(torch.full_like(full[:1, :1], degrees)).to(self._dtype)


def _centre_by_class(rows: Tensor, codes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract from each of `rows` [n, D], in place, the mean of the rows with the same code [n].

    Returns the codes that occur [c], how often [c], and their means [c, D]. Without codes, all
    rows have the code 0.
    """
    if codes is None:
        means = rows.mean(0, keepdim=True)
        rows -= means
        only = torch.zeros(1, dtype=torch.int64, device=rows.device)
        return only, only + len(rows), means
    parts = torch.unique(codes, return_inverse=True, return_counts=True)
    # Counted in host memory, an accelerator is not waited for; all goes there in one copy.
    sent = torch.cat(parts).to(rows.device, non_blocking=True)
    present, index, counts = torch.split(sent, [*map(len, parts)])
    # It adds one row after the other, which float32 is too coarse for.
    sums = rows.new_zeros(len(present), rows.shape[1], dtype=torch.float64)
    means = sums.index_add_(0, index, rows.double()) / counts.unsqueeze(1)
    rows -= means.to(rows.dtype)[index]
    return present, counts, means


def _add_product(total: Tensor, rows: Tensor) -> None:
    """Add ``rows.T @ rows`` to `total` [D, D], in place; complete only from the diagonal up.

    Working strip by strip leaves out most of the redundant half, which pays for the float64 sum.
    """
    width = rows.shape[1]
    # With few features the product is a small part of the work: float64 costs little there, and
    # tolerates single values that dwarf all others.
    if width < _NARROW or not float32_products_are_exact(rows.device):
        rows = rows.double()
    # Narrow strips save the most; an accelerator needs wide ones to be fully used.
    strip = max(16, min(128, width // 4)) if rows.device.type == "cpu" else 1024
    # The last strip takes the rest: products of a few columns are slower and less precise.
    for start in range(0, max(1, width - strip + 1), strip):
        end = width if width - start < 2 * strip else start + strip
        product = rows[:, start:end].T @ rows[:, start:]
        total[start:end, start:].add_(product)

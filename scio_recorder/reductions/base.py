"""The interface of a reduction, its precision, and the labels of classes."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, raised_by
from scio_recorder.layer import counted

_T = TypeVar("_T")
Label: TypeAlias = int | float | str
By: TypeAlias = Callable[[Any], Any]

# float32 represents every value of these types; float64 represents, at least nearly, those of wider
# ones.
_FITS_FLOAT32 = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
}


class Reduction(abc.ABC):
    """A running summary of batches; derive from it to write your own.

    One object summarises one layer. ``collect`` makes the others with `fresh`. Keep no reference
    to the arguments of `update`: the network may overwrite them.

    Examples
    --------
    >>> import torch
    >>> class Count(Reduction):
    ...     def __init__(self): self.count = 0
    ...     def update(self, activation, batch=None): self.count += len(activation)
    ...     def merge(self, other): self.count += other.count
    ...     def compute(self): return self.count
    ...     def reset(self): self.count = 0
    ...     def state_dict(self): return {"count": self.count}
    ...     def load_state_dict(self, state): self.count = state["count"]
    >>> count = Count()
    >>> count.update(torch.zeros(5, 2))
    >>> count.compute()
    5
    """

    @abc.abstractmethod
    def update(self, activation: Tensor, batch: Any = None) -> None:
        """Add an activation [batch, ...] and the loader's batch that it came from.

        Parameters
        ----------
        activation : torch.Tensor
            The samples of one batch along dimension 0.
        batch : any, optional
            The loader's batch, which holds the labels for ``by``.

        Raises
        ------
        CollectError
            The samples can't be reduced, or don't fit the earlier ones.
        """

    @abc.abstractmethod
    def merge(self, other: Self) -> None:
        """Add, in place, the data of another reduction of the same construction.

        Parameters
        ----------
        other : Reduction
            Of the same class, made with the same arguments; it does not change.

        Raises
        ------
        CollectError
            It was made with other arguments, or has samples of another shape.
        """

    @abc.abstractmethod
    def compute(self) -> Any:
        """Return the result for all data so far."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all data."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state: only tensors, numbers, strings, lists and dicts with string keys."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of a reduction of the same construction.

        Parameters
        ----------
        state : dict
            The result of its `state_dict`; the state of another construction is an error.
        """

    @property
    def reads_batch(self) -> bool:
        """Whether `update` looks at the loader's batch; your own reduction may."""
        return True

    @property
    def keeps_rows(self) -> bool:
        """Whether the result has an entry for each row, so that what is known of rows is kept."""
        return False

    def overall(self, result: Any) -> dict[str, float]:
        """Return statistics of all values together, for tables and pages.

        Parameters
        ----------
        result : any
            The result of `compute`.

        Returns
        -------
        dict
            Some of "mean", "std", "low" and "high"; none by default.
        """
        return {}

    @property
    def why_not_merged(self) -> str | None:
        """Why reductions of different data can't be merged; None if they can."""
        return None

    def fresh(self) -> Self:
        """Return an empty reduction of the same construction."""
        twin = copy.deepcopy(self)
        twin.reset()
        return twin


# The reductions of a layer: one, or a list of them.
Reductions: TypeAlias = Reduction | list[Reduction]


def several(given: _T | list[_T]) -> list[_T]:
    """Return the reductions of a layer, or what there is of each of them, as a list."""
    return given if isinstance(given, list) else [given]


def of_each(function: Callable[[Reduction], Any], given: Reductions) -> Any:
    """Return the result of a function of a reduction; of a list of them, a list of results."""
    return list(map(function, given)) if isinstance(given, list) else function(given)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of results and of differences."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return torch.float32 if dtype in _FITS_FLOAT32 else torch.float64


def as_floats(values: Tensor) -> Tensor:
    """Return real values in a floating-point type that represents them, at least nearly."""
    return values.to(working_dtype(values.dtype))


def portions(samples: Tensor) -> Iterator[Tensor]:
    """Cut samples [batch, ...] so that temporaries stay small beside a large batch."""
    per_sample = max(1, samples[0].numel())
    return iter(torch.split(samples, max(64, 2**20 // per_sample)))


def join_means(count: Any, mean: Any, other_count: Any, other_mean: Any) -> tuple[Any, Any]:
    """Return the mean of two groups together, and a measure of their distance.

    The square of that distance, and the sums of squares about the mean of each group, add up to
    the sum of squares about the common mean (Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979). Nothing waits for a device.

    Parameters
    ----------
    count, other_count : number or Tensor
        Sizes of the groups, tensors as floats. Both may be 0 if the means are finite.
    mean, other_mean : number or Tensor
        Their means.

    Examples
    --------
    >>> join_means(1, 0.0, 1, 2.0)
    (1.0, 1.4142135623730951)
    """
    total = count + other_count
    total = total + (total == 0)
    share = other_count / total
    # A weighted mean and not "mean + delta * share": an infinite mean stays infinite.
    joined = mean * (count / total) + other_mean * share
    return joined, (other_mean - mean) * (count * share) ** 0.5


def float32_products_are_exact(device: torch.device) -> bool:
    """Return whether matrix products of float32 tensors keep float32's precision here.

    Users may allow TensorFloat32 or bfloat16 inside products. That is fine for a network, but
    ruins a covariance.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return precision in ("none", "ieee")


@contextlib.contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """Compute as if the caller had set no mode.

    State made under ``inference_mode`` could never be updated outside it, and autocast would
    multiply matrices in half precision.
    """
    with contextlib.ExitStack() as stack:
        # Every layer of every batch passes here, usually with no mode set.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def labels_of(by: By, batch: object, count: int, to_rows: By | None = None) -> list[Label]:
    """Return the labels of a batch of `count` samples, converted to Python values.

    If the labels that ``by`` returned are not those of the samples, ``to_rows`` converts them.
    """
    if batch is None:
        raise CollectError(
            "A reduction with by= needs the batch to read labels from; write update(activation, "
            "batch)."
        )
    try:
        given = by(batch)
    except Exception as error:
        raise raised_by("by=", error) from error
    # Tensors and NumPy arrays convert as a whole much faster than element by element.
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise CollectError(
            f"by= returned {type(given).__name__}, which is not a sequence of labels; return one "
            f"label for each of {counted(count, 'sample')}."
        )
    values = values if to_rows is None else to_rows(values)
    labels = [_plain(value) for value in values]
    if len(labels) != count:
        raise CollectError(
            f"by= returned {counted(len(labels), 'label')} for an activation of "
            f"{counted(count, 'sample')}; "
            "return one label for each sample (dimension 0)."
        )
    return labels


def _plain(value: Any) -> Label:
    item = value.item() if hasattr(value, "item") else value
    for kind in (bool, int, float, str):
        # Subclasses (numpy.str_, IntEnum) become the plain type; nan can't be a key, since it is
        # unequal to itself.
        if isinstance(item, kind) and item == item:
            return kind(item)
    raise CollectError(
        f"by= returned the label {value!r}; labels must be numbers (not nan) or strings, "
        "one for each sample."
    )


def in_order(labels: Iterable[Label]) -> list[Label]:
    """Sort labels, numbers before strings: independent of the order in which they were seen."""
    return sorted(labels, key=lambda label: (isinstance(label, str), label))

"""What a reduction is, in which modes and precision it computes, and the labels of classes."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from scio_recorder.errors import CollectError

Label: TypeAlias = int | float | str
By: TypeAlias = Callable[[Any], Any]

# float32 represents every value of these types; of anything wider float64 does, or nearly.
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
    to what `update` is given: the network may overwrite it.

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
        """Take in an activation [batch, ...] and the loader's batch that it came from.

        Parameters
        ----------
        activation : torch.Tensor
            The samples of one batch along dimension 0.
        batch : any, optional
            What the loader gave, with labels for ``by`` among it.

        Raises
        ------
        CollectError
            The samples can't be reduced, or are not like those before.
        """

    @abc.abstractmethod
    def merge(self, other: Self) -> None:
        """Take in, in place, what another reduction of the same construction has seen.

        Parameters
        ----------
        other : Reduction
            Of the same class, made with the same arguments; it stays as it is.

        Raises
        ------
        CollectError
            It is of another construction, or saw samples of another shape.
        """

    @abc.abstractmethod
    def compute(self) -> Any:
        """Return the result for all that was seen so far."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all that was seen."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state: only tensors, numbers, strings, lists and dicts with string keys."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that a reduction of the same construction returned.

        Parameters
        ----------
        state : dict
            What its `state_dict` returned; another construction's is an error.
        """

    @property
    def reads_batch(self) -> bool:
        """Whether `update` looks at the loader's batch; one of your own may."""
        return True

    def overall(self, result: Any) -> dict[str, float]:
        """Say what a result tells of all values together, for tables and pages.

        Parameters
        ----------
        result : any
            What `compute` returned.

        Returns
        -------
        dict
            Some of "mean", "std", "low" and "high"; none by default.
        """
        return {}

    @property
    def why_not_merged(self) -> str | None:
        """Why those that saw different data can't be merged, None where they can."""
        return None

    def fresh(self) -> Self:
        """Return a reduction of the same construction that has seen nothing."""
        twin = copy.deepcopy(self)
        twin.reset()
        return twin


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that results have and differences are taken in."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return torch.float32 if dtype in _FITS_FLOAT32 else torch.float64


def portions(samples: Tensor) -> Iterator[Tensor]:
    """Cut samples [batch, ...] so that temporaries stay small beside a large batch."""
    per_sample = max(1, samples[0].numel())
    return iter(torch.split(samples, max(64, 2**20 // per_sample)))


def join_means(count: Any, mean: Any, other_count: Any, other_mean: Any) -> tuple[Any, Any]:
    """Return the mean of two groups together, and by how much they lie apart.

    The square of the latter, and the squares about the mean of each group, add up to the squares
    about the common mean (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979). Nothing waits for a device.

    Parameters
    ----------
    count, other_count : number or Tensor
        Sizes of the groups, tensors as floats. Both may be 0, where the means are finite.
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
    """Tell whether matrix products of float32 tensors keep float32's precision here.

    Users may allow TensorFloat32 or bfloat16 inside products, which is fine for a network
    and ruins a covariance.
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
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def labels_of(by: By, batch: object, count: int, to_rows: By | None = None) -> list[Label]:
    """Return the labels of a batch of `count` samples, converted to Python values.

    ``to_rows`` makes labels of the samples of what ``by`` returned, where these are not the same.
    """
    if batch is None:
        raise CollectError(
            "A reduction with by= needs the batch to read labels from; write update(activation, "
            "batch)."
        )
    given = by(batch)
    # Tensors and NumPy arrays convert as a whole much faster than element by element.
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise CollectError(
            f"by= returned {type(given).__name__}, which is not a sequence of labels; return one "
            f"label for each of the {count} samples."
        )
    values = values if to_rows is None else to_rows(values)
    labels = [_plain(value) for value in values]
    if len(labels) != count:
        raise CollectError(
            f"by= returned {len(labels)} labels for an activation of {count} samples; "
            "return one label for each sample (dimension 0)."
        )
    return labels


def _plain(value: Any) -> Label:
    item = value.item() if hasattr(value, "item") else value
    for kind in (bool, int, float, str):
        # Subclasses (numpy.str_, IntEnum) become the plain type; nan, unequal to itself, no key.
        if isinstance(item, kind) and item == item:
            return kind(item)
    raise CollectError(
        f"by= returned the label {value!r}; labels must be numbers (not nan) or strings, "
        "one for each sample."
    )


def in_order(labels: Iterable[Label]) -> list[Label]:
    """Sort labels, numbers before strings: independent of the order in which they were seen."""
    return sorted(labels, key=lambda label: (isinstance(label, str), label))

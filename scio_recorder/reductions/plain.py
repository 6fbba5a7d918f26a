"""Plain reductions: statistics of positions and units, the last batch, digests, your functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import (
    By,
    RowReduction,
    SampleReduction,
    cannot_go_on,
    join_means,
    num_true,
    portions,
)
from scio_recorder.tensors.arguments import takes
from scio_recorder.tensors.digests import sample_digests
from scio_recorder.tensors.properties import dtype_name

# The mean of so many samples is near that of all.
_FEW = 8


def _ends(values: Tensor, of: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the smallest or the largest values over dimension 0."""
    try:
        return of(values, 0)
    except NotImplementedError as error:
        # There is little that torch computes in its smallest and its unsigned dtypes.
        raise CollectError(
            f"torch compares no values of dtype {dtype_name(values.dtype)}: convert them with "
            "transform=, for example by activation.float()."
        ) from error


class _Extremum(SampleReduction):
    _state_names = ("_value",)
    _state_kinds = ("tensor (?!complex)[^ ]+{sample}",)
    _value: Tensor
    # Over the samples of a batch, and of two values.
    _over_samples: Callable[[Tensor, int], Tensor]
    _of_two: Callable[[Tensor, Tensor], Tensor]
    _word: str

    def _add(self, samples: Tensor) -> None:
        self._take(_ends(samples, self._over_samples))

    def _join(self, value: Tensor) -> None:
        self._value = self._of_two(self._value, value)

    def _result(self) -> Tensor:
        return self._value.clone()

    def overall(self, result: Any) -> dict[str, float]:
        """Return the smallest or the largest of all values."""
        if not isinstance(result, Tensor) or not result.numel():
            return {}
        return {self._word: float(self._over_samples(result.double().flatten(), 0))}


class Min(_Extremum):
    """Smallest value at each position, over the samples; NaN if any value is NaN.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The result has the activation's dtype and its shape without dimension 0.

    Examples
    --------
    >>> import torch
    >>> smallest = Min()
    >>> smallest.update(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
    >>> smallest.compute()
    tensor([1., 2.])
    """

    _over_samples = staticmethod(torch.amin)
    _of_two = staticmethod(torch.minimum)
    _word = "low"


class Max(_Extremum):
    """Largest value at each position, over the samples; NaN if any value is NaN.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The result has the activation's dtype and its shape without dimension 0.

    Examples
    --------
    >>> import torch
    >>> largest = Max(by=lambda batch: batch[1])
    >>> activation = torch.tensor([[1.0, 5.0], [3.0, 2.0]])
    >>> largest.update(activation, (activation, ["cat", "dog"]))
    >>> largest.compute()
    {'cat': tensor([1., 5.]), 'dog': tensor([3., 2.])}
    """

    _over_samples = staticmethod(torch.amax)
    _of_two = staticmethod(torch.maximum)
    _word = "high"


class Mean(SampleReduction):
    """Mean at each position, over the samples; NaN if any value is NaN.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The sum is kept in float64 (complex128 for complex activations). The result has the
    activation's shape without dimension 0; it is float64 for float64 and for integers of 32 and
    64 bits, float32 for other real types.

    Examples
    --------
    >>> import torch
    >>> mean = Mean()
    >>> mean.update(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
    >>> mean.update(torch.tensor([[2.0, 2.0]]))
    >>> mean.compute()
    tensor([2., 3.])
    """

    _state_names = ("_sum",)
    _state_kinds = ("tensor (float64|complex128){sample}",)
    _takes_complex = True
    _sum: Tensor

    def _add(self, samples: Tensor) -> None:
        wide = torch.complex128 if samples.is_complex() else torch.float64
        for portion in portions(samples):
            self._take(portion.sum(0, dtype=wide))

    def _join(self, total: Tensor) -> None:
        self._sum = self._sum + total

    def _result(self) -> Tensor:
        return (self._sum / self._count).to(self._dtype)

    def overall(self, result: Any) -> dict[str, float]:
        """Return the mean of all values; none for complex values, whose magnitudes it doesn't show.

        Parameters
        ----------
        result : any
            The result of `compute`.

        Returns
        -------
        dict
            Empty if there is nothing to say, as with ``by``.
        """
        has_mean = isinstance(result, Tensor) and result.numel() and not result.is_complex()
        return {"mean": float(result.double().mean())} if has_mean else {}


class MomentsResult(NamedTuple):
    """Number of samples, mean and unbiased variance at each position.

    Attributes
    ----------
    count : int
        The number of samples.
    mean : Tensor
        Their mean, in the shape of a sample.
    variance : Tensor
        Their variance (n - 1), in the shape of a sample; NaN for a single sample.
    """

    count: int  # type: ignore[assignment]  # this name is worth more than tuple.count
    mean: Tensor
    variance: Tensor


class Moments(SampleReduction):
    """Count, mean and unbiased variance (n - 1) at each position, over the samples.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The computation is in float64, with differences from the mean of the first samples. What is
    merged is joined by the pairwise update of Chan, Golub and LeVeque (1979). Dtypes of the results
    are those of `Mean`.
    NaN and infinity give what ``torch.mean`` and ``torch.var`` give. The variance of a single
    sample is NaN.

    Examples
    --------
    >>> import torch
    >>> moments = Moments()
    >>> moments.update(torch.tensor([[1.0], [2.0], [6.0]]))
    >>> count, mean, variance = moments.compute()
    >>> count, mean.item(), variance.item()
    (3, 3.0, 7.0)
    """

    _state_names = ("_seen", "_mean", "_squares")
    _state_kinds = ("whole", "tensor float64{sample}", "tensor float64{sample}")
    _seen: int
    _mean: Tensor
    _squares: Tensor

    def reset(self) -> None:
        """Forget all that was seen."""
        super().reset()
        # Of the samples since the state was last read: their number, and sums of their differences
        # from `_shift` and of the squares of these.
        self._waiting: tuple[int, Tensor, Tensor] | None = None

    def _add(self, samples: Tensor) -> None:
        for portion in portions(samples):
            apart = portion.to(torch.float64, copy=True)
            if self._mean is None:
                few = apart[:_FEW].mean(0).nan_to_num(0.0, 0.0, 0.0)
                self._seen, self._mean, self._squares = 0, few, torch.zeros_like(few)
            if self._waiting is None:
                self._shift = self._mean.nan_to_num(0.0, 0.0, 0.0)
            sums, squares = apart.sub_(self._shift).sum(0), apart.mul_(apart).sum(0)
            count, *earlier = self._waiting or (0,)
            if earlier:
                sums, squares = earlier[0].add_(sums), earlier[1].add_(squares)
            self._waiting = count + len(portion), sums, squares

    def _add_waiting(self) -> None:
        # What the squares lose by a shift far from the mean is small beside them: the samples of
        # which it is the mean are as far from those that follow.
        if self._waiting is not None:
            count, sums, squares = self._waiting
            self._waiting, self._seen = None, self._seen + count
            apart = sums / self._seen
            self._mean = self._mean + apart
            self._squares = self._squares + squares - apart * sums

    def _join(self, count: int, mean: Tensor, squares: Tensor) -> None:
        self._mean, apart = join_means(self._seen, self._mean, count, mean)
        self._squares = self._squares + squares + apart.square()
        self._seen += count

    def _result(self) -> MomentsResult:
        # Divided as tensors: one sample gives nan, not ZeroDivisionError.
        variance = self._squares / torch.full_like(self._squares, self._seen - 1)
        return MomentsResult(
            self._seen, self._mean.to(self._dtype, copy=True), variance.to(self._dtype)
        )

    def overall(self, result: Any) -> dict[str, float]:
        """Join the moments of all positions, which have equally many samples each.

        Parameters
        ----------
        result : any
            The result of `compute`.

        Returns
        -------
        dict
            Empty if there is nothing to say, as with ``by``.
        """
        if not isinstance(result, MomentsResult) or not result.mean.numel():
            return {}
        mean, variance = result.mean.double(), result.variance.double()
        values = result.count * mean.numel()
        within = variance.sum() * (result.count - 1) if result.count > 1 else 0.0
        squares = within + result.count * (mean - mean.mean()).square().sum()
        std = math.sqrt(float(squares) / (values - 1)) if values > 1 else math.nan
        return {"mean": float(mean.mean()), "std": std}


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "dict": dict}


class Last(SampleReduction):
    """The activation of the last batch that had samples.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to the samples of that
        label in the last batch that had some.

    Notes
    -----
    Any dtype works. After merging, the other reduction's last batch counts as the last.

    Examples
    --------
    >>> import torch
    >>> last = Last()
    >>> last.update(torch.tensor([[1.0], [2.0]]))
    >>> last.update(torch.tensor([[3.0]]))
    >>> last.compute()
    tensor([[3.]])
    """

    _state_names = ("_value",)
    _state_kinds = ("tensor .*",)
    _takes_complex = True
    _takes_any_shape = True
    _value: Tensor

    def _add(self, samples: Tensor) -> None:
        self._value = samples.clone()

    def _join(self, value: Tensor) -> None:
        self._value = value

    def _result(self) -> Tensor:
        return self._value.clone()


class Digest(SampleReduction):
    """Eight bytes for each sample, XXH3 of its bytes: a whole run to compare with, bit for bit.

    :func:`scio_recorder.compare` takes a recording of digests for either side, even one that was
    made on another machine or with another version of torch.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to the digests of the
        samples of that label. `compare` does not take such digests.

    Notes
    -----
    The dtype and shape of a sample are digested with its bytes, which are those of a contiguous
    array. All NaNs count as the same, and -0.0 differs from 0.0. With ``rows=`` each row
    has its digest.

    Any dtype and shape works. The result is in the order of the samples: merging appends the
    digests of the other reduction. It lies on the device of the samples, whose bytes are digested
    in host memory, while the device goes on: those of a batch when the next one comes.

    Examples
    --------
    >>> digest = Digest()
    >>> digest.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> digest.update(torch.tensor([[1.0, 2.0]]))
    >>> first, second, third = digest.compute()
    >>> bool(first == third), bool(first == second)
    (True, False)
    """

    _state_names = ("_digests",)
    _state_kinds = (r"\[tensor -?int64 {count}\]",)
    _takes_complex = True
    _takes_any_shape = True
    _digests: list[Tensor]  # on the device of the samples

    def reset(self) -> None:
        """Forget all that was seen."""
        super().reset()
        # Samples on their way to pinned memory, whose copy has ended with the event, and whence.
        self._copied: tuple[Tensor, torch.cuda.Event, torch.device] | None = None

    @property
    def keeps_rows(self) -> bool:
        """Whether each row has its digest in order: not if they are kept by label."""
        return self._by is None

    def _add(self, samples: Tensor) -> None:
        self._add_copied()
        device = samples.device
        if device.type == "cuda":
            host = torch.empty(samples.shape, dtype=samples.dtype, device="cpu", pin_memory=True)
            host.copy_(samples, non_blocking=True)
            self._copied = host, torch.cuda.current_stream(device).record_event(), device
        else:
            self._take([sample_digests(samples).to(device)])

    def _add_copied(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            host, event, device = copied
            event.synchronize()
            self._take([sample_digests(host).to(device, non_blocking=True)])

    def _device(self) -> torch.device | None:
        return self._digests[0].device if self._digests else None

    def _add_waiting(self) -> None:
        self._add_copied()
        if self._digests:
            self._digests = [torch.cat(self._digests)]

    def _join(self, digests: list[Tensor]) -> None:
        self._digests += digests

    def _result(self) -> Tensor:
        return self._digests[0].clone()


class Fold(SampleReduction):
    """A summary made by your own function.

    Parameters
    ----------
    fn : callable
        ``fn(accumulator, activation) -> accumulator``; the accumulator is None for the first batch.
        It receives a copy of the activation, which it may keep or change.
    merge : callable, optional
        ``merge(accumulator, other_accumulator) -> accumulator``. Without it two folds can't be
        merged.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to accumulator.

    Notes
    -----
    The state can be stored if the accumulator consists of tensors, numbers, strings, None, and
    lists, tuples and dicts of these.

    Examples
    --------
    >>> import torch
    >>> def count_positive(accumulator, activation):
    ...     return (accumulator or 0) + int((activation > 0).sum())
    >>> positive = Fold(count_positive, merge=lambda one, two: one + two)
    >>> positive.update(torch.tensor([[1.0, -1.0], [2.0, 3.0]]))
    >>> positive.compute()
    3
    """

    _state_names = ("_accumulator",)
    _state_kinds = (".*",)
    _takes_complex = True
    _takes_any_shape = True
    _accumulator: Any

    def __init__(
        self,
        fn: Callable[[Any, Tensor], Any],
        merge: Callable[[Any, Any], Any] | None = None,
        *,
        by: By | None = None,
    ) -> None:
        if not takes(fn, 2):
            raise CollectError(f"Fold(fn={fn!r}): give a function (accumulator, activation)")
        self._fn = fn
        self._merge = merge
        self._options = {"fn": fn, "merge": merge}
        super().__init__(by=by)

    def _add(self, samples: Tensor) -> None:
        self._accumulator = self._fn(self._accumulator, samples.clone())

    @property
    def why_not_merged(self) -> str | None:
        """Why folds of different data can't be merged; None if they can."""
        if self._merge is not None:
            return None
        return (
            f"{self!r} can't be merged: construct it as Fold(fn, merge=function), where "
            "function(accumulator, other_accumulator) returns the joined accumulator."
        )

    def _join(self, accumulator: Any) -> None:
        if self._merge is None:
            raise CollectError(self.why_not_merged)
        self._accumulator = self._merge(self._accumulator, accumulator)

    def _result(self) -> Any:
        return copy.deepcopy(self._accumulator)

    @classmethod
    def from_recipe(cls, **options: Any) -> Self:
        """Return a fold that can read a state, but can't add data."""
        return super().from_recipe(fn=cannot_go_on, **options)

    def _state(self) -> dict[str, Any]:
        return {"_accumulator": _encode(self._accumulator)}

    def _set_state(self, state: dict[str, Any]) -> None:
        self._accumulator = _decode(state["_accumulator"])

    def _device(self) -> torch.device | None:
        return None  # the function decides the device of an accumulator


def _encode(value: Any) -> Any:
    """Write an accumulator with tensors, numbers, strings, lists and str-keyed dicts only."""
    if isinstance(value, Tensor | bool | int | float | str):
        return value
    kind = type(value).__name__
    if value is None or type(value) in _CONTAINERS.values():
        items = () if value is None else value.items() if isinstance(value, dict) else value
        return {"type": kind, "items": [_encode(item) for item in items]}
    raise CollectError(
        f"The accumulator of a Fold holds {kind}, which can't be stored; build it from tensors, "
        "numbers, strings, None, lists, tuples and dicts."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = [_decode(item) for item in value["items"]]
    return None if value["type"] == "NoneType" else _CONTAINERS[value["type"]](items)


# -- which units are active, dead or saturated -----------------------------------------------------

# A value is saturated if it lies within this share of the range from a bound, and a unit if this
# share of its values is.
SATURATION_WIDTH = 0.01
SATURATION_SHARE = 0.95
Bounds = tuple[float | None, float | None]


class AliveResult(NamedTuple):
    """Statistics of each unit over all data.

    Attributes
    ----------
    count : int
        The number of values of each unit.
    active : Tensor
        The share of values above zero, [units], float64.
    dead : Tensor
        Whether all values were equal, usually zero, [units], bool. False after one value.
    at_bound : Tensor or None
        The share of values at a bound, [units], float64. None without ``bounds``.
    max_abs : Tensor
        The largest absolute value, [units].
    """

    count: int  # type: ignore[assignment]  # this name is worth more than tuple.count
    active: Tensor
    dead: Tensor
    at_bound: Tensor | None
    max_abs: Tensor

    @property
    def saturated(self) -> Tensor | None:
        """Whether at least 95 % of the values were at a bound, [units]; None without ``bounds``."""
        return None if self.at_bound is None else self.at_bound >= SATURATION_SHARE


class Alive(RowReduction):
    """How often each unit is active, and whether it is dead or saturated.

    A unit of a ReLU that is zero for every sample of a dataset no longer learns. A unit of a
    sigmoid at a bound hardly learns, since the slope vanishes there.

    Parameters
    ----------
    feature_dim : int, optional
        The dimension that holds the units: 1 for the channels of images, -1 for the features of
        tokens. Every other position is a value of a unit. None: all but dimension 0 are units.
    bounds : (float or None, float or None), optional
        The bounds of the activation function, such as (-1, 1) for tanh, or (None, 6) for ReLU6. A
        value is at a bound if its distance is at most 1 % of the range between them.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    NaNs are neither active nor at a bound. A unit with one is not dead, and its largest absolute
    value is NaN.

    Examples
    --------
    >>> import torch
    >>> alive = Alive()
    >>> alive.update(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]]))
    >>> count, active, dead, _, max_abs = alive.compute()
    >>> count, active.tolist(), dead.tolist(), max_abs.tolist()
    (3, [0.0, 0.666...], [True, False], [0.0, 3.0])
    """

    _state_names = ("_rows", "_active", "_at_bound", "_low", "_high")
    _state_kinds = ("whole", *["tensor int64 {units}"] * 2, *["tensor float.. {units}"] * 2)
    _rows: int
    _active: Tensor
    _at_bound: Tensor
    _low: Tensor
    _high: Tensor

    def __init__(
        self, feature_dim: int | None = None, bounds: Bounds | None = None, *, by: By | None = None
    ) -> None:
        self._bounds = None if bounds is None else _checked(bounds)
        super().__init__(feature_dim, by=by, bounds=self._bounds and list(self._bounds))

    def _add(self, samples: Tensor) -> None:
        # Units stay in their dimension: moving it to the end would copy everything.
        dim = self._feature_dim
        values = samples.reshape(len(samples), -1) if dim is None else samples.movedim(dim, 1)
        values = values.unsqueeze(-1).flatten(2)  # [batch, units, positions]
        rows = len(values) * values.shape[2]
        # After reducing the first dimension little is left; reducing both at once is slow if there
        # are few positions. Booleans have a smallest value, but no absolute values.
        low = _ends(values, torch.amin).amin(-1).to(self._dtype)
        high = values.amax(0).amax(-1).to(self._dtype)
        is_active = torch.gt(values, 0, out=torch.empty_like(values, dtype=torch.float32))
        active = num_true(is_active, 0).sum(-1)
        at_bound = torch.zeros_like(active)
        if self._bounds is not None:
            at_bound = _is_at_bound(values, self._bounds).sum(0).sum(-1)
        self._take(rows, active, at_bound, low, high)

    def _join(self, rows: int, active: Tensor, at_bound: Tensor, low: Tensor, high: Tensor) -> None:
        self._rows += rows
        self._active = self._active + active
        self._at_bound = self._at_bound + at_bound
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)

    def _result(self) -> AliveResult:
        return AliveResult(
            self._rows,
            self._active.double() / self._rows,
            # A comparison with NaN is false.
            (self._low == self._high) & self._low.isfinite() & (self._rows > 1),
            None if self._bounds is None else self._at_bound.double() / self._rows,
            torch.maximum(self._low.abs(), self._high.abs()),
        )


def unit_dimension(type_name: str, ndim: int) -> int:
    """Return the dimension of [samples, ...] along which the units of a layer lie.

    Channels come first in images and after one-dimensional convolutions. Features come last in
    sequences, and if a module works on the last dimension. 0: each sample is one value.

    Parameters
    ----------
    type_name : str
        Name of the module's class.
    ndim : int
        The number of dimensions of its activations.
    """
    # The LayerNorm2d of many vision models takes [samples, channels, height, width].
    if type_name.endswith(("1d", "2d", "3d")):
        return min(1, ndim - 1)
    if type_name.startswith(("Linear", "LayerNorm", "RMSNorm", "Embedding")):
        return ndim - 1
    return 2 if ndim == 3 else min(1, ndim - 1)


def _is_at_bound(values: Tensor, bounds: Bounds) -> Tensor:
    """Return whether values lie at a bound; a missing bound counts as zero for the range."""
    low, high = bounds
    width = SATURATION_WIDTH * ((high or 0.0) - (low or 0.0))
    if values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize:
        # A comparison with a number rounds the number to the dtype of the values.
        values = values.float()
    at_bound = torch.zeros_like(values, dtype=torch.bool)
    if low is not None:
        at_bound |= values <= low + width
    if high is not None:
        at_bound |= values >= high - width
    return at_bound


def _checked(bounds: Bounds) -> Bounds:
    try:
        low, high = (None if bound is None else float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low = high = None
    is_range = low is not None and high is not None and low < high
    if not is_range and (low is None) == (high is None):
        raise CollectError(
            f"Alive(bounds={bounds!r}): give two numbers (low, high), low < high, one of which may "
            "be None, such as (-1, 1) for tanh."
        )
    return low, high

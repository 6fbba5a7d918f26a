"""The interface of a reduction, and the base classes of those over samples and over rows."""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError, raise_of_caller
from scio_recorder.layer import RowIdx, counted, text_of
from scio_recorder.tensors.arguments import whole
from scio_recorder.tensors.copies import gathered
from scio_recorder.tensors.properties import (
    DTYPES,
    dtype_name,
    has_samples,
    undisturbed,
    with_float64,
    without_lazy_sign,
)
from scio_recorder.tensors.structures import map_tensors

_T = TypeVar("_T")
Label: TypeAlias = int | float | str
By: TypeAlias = Callable[[Any], Any]
# Reads one label for each sample of a batch: (function of the batch, its name) -> labels.
Read: TypeAlias = Callable[[By, str], "Labels"]


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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text += ": its result, which recording[label] is too, is that of .compute()"
                with contextlib.suppress(AttributeError, NameError):
                    kind = inspect.signature(self._result, eval_str=True).return_annotation
                    text += f", which has {', '.join(kind.__match_args__)}"
            raise AttributeError(text, name=name, obj=self)

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


def several(items: _T | list[_T]) -> list[_T]:
    """Return the reductions of a layer, or what there is of each of them, as a list."""
    return items if isinstance(items, list) else [items]


def of_each(function: Callable[[Reduction], Any], items: Reductions) -> Any:
    """Return the result of a function of a reduction; of a list of them, a list of results."""
    return list(map(function, items)) if isinstance(items, list) else function(items)


def states_of(reductions: Mapping[RowIdx, Reductions]) -> dict[str, Any]:
    """Return the states of the reductions of each layer, by its label as text."""
    each_state = methodcaller("state_dict")
    return {text_of(label): of_each(each_state, each) for label, each in reductions.items()}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of results and of differences."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    # float32 represents every value of these; float64 those of others, at least nearly.
    is_narrow = dtype.itemsize < 4 or dtype == torch.float32
    return torch.float32 if is_narrow else torch.float64


def as_floats(values: Tensor) -> Tensor:
    """Return real values in a floating-point type that represents them, at least nearly."""
    return values.to(working_dtype(values.dtype))


def num_true(flags: Tensor, dim: int | None = None) -> Tensor:
    """Return how many of the zeros and ones [...] in a float32 tensor are one, as integers.

    A sum of floats takes a fraction of the time that a sum of booleans takes, and counts exactly up
    to 2^24; in float64 it needs a copy of all.
    """
    dtype = None if flags.numel() <= 2**24 else torch.float64
    return flags.sum(dim, dtype=dtype).long()


def portions(samples: Tensor) -> Iterator[Tensor]:
    """Cut samples [batch, ...] so that temporaries stay small beside a large batch."""
    per_sample = max(1, math.prod(samples.shape[1:]))
    values = 2**20 if samples.device.type == "cpu" else 2**23
    return iter(torch.split(samples, max(64, values // per_sample)))


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


class Labels:
    """The labels of a batch's samples, which the layers of the batch share.

    Parameters
    ----------
    by : callable
        A function of the batch.
    batch : any
        The batch.
    count : int
        The number of samples, for messages.
    to_rows : callable, optional
        Converts what it returned to the labels of the samples, if these are something else.
    name : str, default "by="
        The argument that gave the function, for messages.

    Examples
    --------
    >>> labels = Labels(lambda batch: batch, ["a", "b", "a"], 3)
    >>> labels.places(torch.device("cpu"))
    {'a': tensor([0, 2]), 'b': tensor([1])}
    """

    def __init__(
        self, by: By, batch: object, count: int, to_rows: By | None = None, name: str = "by="
    ) -> None:
        self._name = name
        if batch is None:
            raise CollectError(
                f"A reduction with {name} needs the batch to read labels from; write "
                "update(activation, batch)."
            )
        try:
            result = by(batch)
        except Exception as error:
            raise_of_caller(name, error)
        # Tensors and NumPy arrays convert as a whole much faster than element by element.
        values = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise CollectError(
                f"{name} returned {type(result).__name__}, which is not a sequence of labels; "
                f"return one label for each of {counted(count, 'sample')}."
            )
        values = values if to_rows is None else to_rows(values)
        # Converted to plain values.
        self.each = [self._plain(value) for value in values]
        self._places: dict[torch.device, dict[Label, Tensor]] = {}
        self._numbers: dict[torch.device, Tensor] = {}

    def check(self, count: int) -> None:
        """Refuse another number of samples."""
        if len(self.each) != count:
            raise CollectError(
                f"{self._name} returned {counted(len(self.each), 'label')} for an activation of "
                f"{counted(count, 'sample')}; return one label for each sample (dimension 0)."
            )

    def places(self, device: torch.device) -> dict[Label, Tensor]:
        """Return where the samples of each label are, as indices on a device."""
        if device not in self._places:
            places: dict[Label, list[int]] = {}
            for place, label in enumerate(self.each):
                places.setdefault(label, []).append(place)
            # An accelerator is waited for once.
            order = torch.tensor([*itertools.chain(*places.values())], device=device)
            parts = torch.split(order, [len(each) for each in places.values()])
            self._places[device] = dict(zip(places, parts, strict=True))
        return self._places[device]

    def numbers(self, device: torch.device) -> Tensor:
        """Return labels that are whole numbers, [batch], int64, on a device."""
        if device not in self._numbers:
            others = [
                label for label in self.each if type(label) is not int or label.bit_length() > 63
            ]
            if others:
                raise CollectError(
                    f"{self._name} returned {others[0]!r}; give whole numbers, such as the place "
                    "of each sample in the dataset."
                )
            self._numbers[device] = torch.tensor(self.each, dtype=torch.int64, device=device)
        return self._numbers[device]

    def _plain(self, value: Any) -> Label:
        item = value.item() if hasattr(value, "item") else value
        for kind in (bool, int, float, str):
            # Subclasses (numpy.str_, IntEnum) become the plain type; nan can't be a key, since it
            # is unequal to itself.
            if isinstance(item, kind) and item == item:
                return kind(item)
        raise CollectError(
            f"{self._name} returned the label {value!r}; labels must be numbers (not nan) or "
            "strings, one for each sample."
        )


def in_order(labels: Iterable[Label]) -> list[Label]:
    """Sort labels, numbers before strings: independent of the order in which they were seen."""
    return sorted(labels, key=lambda label: (isinstance(label, str), label))


def described(value: Any) -> str:
    """Describe a part of a state, for the patterns that parts of each kind must match.

    Examples
    --------
    >>> described([3, torch.ones(3, 2), torch.tensor([-1]), None, "a"])
    '[whole, tensor float32 3 2, tensor -int64 1, , str]'
    """
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, Tensor):
        sign = "-" if value.dtype == torch.int64 and bool((value < 0).any()) else ""
        return " ".join(["tensor", sign + dtype_name(value.dtype), *map(str, value.shape)])
    if type(value) is int and 0 <= value < 2**63:
        return "whole"
    if type(value) is float and math.isfinite(value):
        return "finite"
    return "" if value is None else type(value).__name__


class SampleReduction(Reduction):
    """A reduction over the samples of dimension 0, class by class with ``by``.

    Subclasses set `_options`, name the attributes that make up their state, say what these are like
    in `_state_kinds`, and write `_add`, `_join` and `_result`; everything else is here. Such an
    attribute is None until the first samples, and with ``by`` (then each class has a member of its
    own). Its annotation leaves None out, since `_result` is only called after samples.
    """

    # Arguments of the constructor besides ``by``: functions, and plain values that can be stored.
    # Merged reductions must agree in them.
    _options: Mapping[str, Any] = MappingProxyType({})

    _state_names: ClassVar[tuple[str, ...]]
    # What `described` must say of each, as a pattern in which "{sample}" stands for the shape of a
    # sample, and "{units}" for the number of its features or positions.
    _state_kinds: tuple[str, ...]
    _takes_complex: ClassVar[bool] = False
    # Whether samples of any shape may follow each other, since they are not combined.
    _takes_any_shape: ClassVar[bool] = False
    _count: int
    _shape: tuple[int, ...] | None
    _dtype: torch.dtype
    _members: dict[Label, Self]

    def __init__(self, *, by: By | None = None) -> None:
        if by is not None and not callable(by):
            raise CollectError(
                f"by= is a {type(by).__name__}: give a function of the batch that returns one "
                "label for each sample, such as by=lambda batch: batch[1]."
            )
        self._by = by
        self.reset()

    # Methods that a subclass writes.

    @abc.abstractmethod
    def _add(self, samples: Tensor) -> None:
        """Add samples [batch, ...], at least one."""

    @abc.abstractmethod
    def _join(self, *state: Any) -> None:
        """Add the state of other samples, in the order of `_state_names`; there were some here."""

    @abc.abstractmethod
    def _result(self) -> Any:
        """Return the result, which must not alias the state."""

    def _read(self, read: Read, device: torch.device) -> None:
        """Read what `_add` needs of the batch besides the activation."""

    def _add_waiting(self) -> None:
        """Add buffered data to the state; called before the state is read."""

    def _take(self, *state: Any) -> None:
        """Add the state of other samples, which may be the first ones."""
        if getattr(self, self._state_names[0]) is None:
            self._set_state(dict(zip(self._state_names, state, strict=True)))
        else:
            self._join(*state)

    def _is_empty(self, samples: Tensor) -> bool:
        """Whether there is nothing to add."""
        return len(samples) == 0

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        """Return the part of the shape that must be the same in every batch."""
        return () if self._takes_any_shape else tuple(samples.shape[1:])

    # Methods that a user calls.

    def update(
        self,
        activation: Tensor,
        batch: Any = None,
        *,
        to_rows: By | None = None,
        known: dict[int, Labels] | None = None,
    ) -> None:
        """Add an activation [batch, ...] and, for ``by``, the batch that it came from.

        Parameters
        ----------
        activation : torch.Tensor
            The samples of one batch along dimension 0.
        batch : any, optional
            The loader's batch, which holds the labels for ``by``.
        to_rows : callable, optional
            Converts the labels of ``by`` to one label for each entry of dimension 0.
        known : dict, optional
            The labels of this batch, by the id of the function that gave them, which are added.
        """
        self._check(activation)
        with undisturbed(activation.device.type):
            samples = with_float64(without_lazy_sign(gathered(activation))).detach()
            known = {} if known is None else known

            def read(function: By, name: str) -> Labels:
                if id(function) not in known:
                    known[id(function)] = Labels(function, batch, len(samples), to_rows, name)
                known[id(function)].check(len(samples))
                return known[id(function)]

            self._read(read, samples.device)
            self._add_samples(samples, None if self._by is None else read(self._by, "by="))

    def merge(self, other: Self) -> None:
        """Add, in place, the data of another reduction of the same construction."""
        if type(other) is not type(self) or other.recipe != self.recipe:
            raise CollectError(
                f"Can't merge {other!r} into {self!r}; construct both with the same arguments."
            )
        if other._count == 0:
            return
        with self._undisturbed():
            self._add_waiting()
            if self._count == 0:
                self._adopt(other)
                return
            theirs = self.fresh()
            theirs._adopt(other)
            self._check_mergeable(theirs)
            if (device := self._device()) is not None:
                theirs._place(device)
            for label, member in theirs._members.items():
                self._member(label).merge(member)
            if not theirs._members:
                self._join(*(getattr(theirs, name) for name in self._state_names))
            self._dtype = torch.promote_types(self._dtype, theirs._dtype)
            self._count += theirs._count

    def compute(self) -> Any:
        """Return the result for all samples, at least one; with ``by``, by label."""
        if self._count == 0:
            raise CollectError(
                f"{self!r} has seen no samples yet; call update() before compute(), or give "
                "collect(...) batches that hold samples"
            )
        with self._undisturbed():
            self._add_waiting()
            return self._result() if self._by is None else self._labelled_result()

    def reset(self) -> None:
        """Forget all that was seen."""
        self._count = 0
        self._shape = None
        self._dtype = None  # type: ignore[assignment]  # as the state of subclasses
        self._members = {}
        for name in self._state_names:
            setattr(self, name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state: tensors, numbers, strings, lists and dicts of these."""
        with self._undisturbed():
            self._add_waiting()
        state: dict[str, Any] = {"construction": self.recipe, "count": self._count}
        if not self._count:
            return state
        state |= {"shape": list(self._shape or ()), "dtype": dtype_name(self._dtype)}
        for name, value in self._state().items():
            if value is not None:
                state[name.removeprefix("_")] = map_tensors(_snapshot, value)
        if self._members:
            state["classes"] = [
                {"label": label, "state": member.state_dict()}
                for label, member in self._members.items()
            ]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of a reduction of the same construction."""
        try:
            if state["construction"] != self.recipe:
                raise CollectError(
                    f"A state of {state['construction']} can't be loaded into {self!r}, which is "
                    f"{self.recipe}; construct the reduction with the arguments that it had when "
                    "the state was written."
                )
            with undisturbed("cpu"):
                self._load(state)
            if (part := self._wrong_part()) is not None:
                raise ValueError(f"its {part} can't be that of any data")
        except CollectError:
            raise
        # Whoever wrote the state may have put anything in any place.
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            self.reset()
            raise RecordingError(f"the state of {self!r} is damaged: {error!r:.200}") from error

    @property
    def recipe(self) -> dict[str, Any]:
        """The kind and arguments from which an equal one can be made, except for functions."""
        recipe = {"kind": type(self).__name__, "by_class": self._by is not None, **self._options}
        return {key: x for key, x in recipe.items() if not (x is None or callable(x))}

    @classmethod
    def from_recipe(cls, *, by_class: bool, **options: Any) -> Self:
        """Return a reduction that can read a state: that of the recipe, but without functions."""
        return cls(by=cannot_go_on if by_class else None, **options)

    def fresh(self) -> Self:
        """Return an empty reduction of the same construction."""
        # A shallow copy shares the user's functions and copies no class's state; reset() then
        # binds new state and changes none in place.
        twin = copy.copy(self)
        twin.reset()
        return twin

    def __repr__(self) -> str:
        options = {**self._options, "by": self._by}.items()
        said = ", ".join(f"{name}={value!r}" for name, value in options if value is not None)
        return f"{type(self).__name__}({said})"

    # Shared private methods.

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._state_names}

    def _set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _load(self, state: dict[str, Any]) -> None:
        self.reset()
        self._count = state["count"]
        if not self._count:
            return
        self._shape, self._dtype = tuple(state["shape"]), DTYPES[state["dtype"]]
        names = [name for name in self._state_names if name.removeprefix("_") in state]
        self._set_state({n: map_tensors(_snapshot, state[n.removeprefix("_")]) for n in names})
        for member in state.get("classes", []):
            if not isinstance(member["label"], Label):
                raise TypeError(f"{member['label']!r} is no label")
            self._member(member["label"]).load_state_dict(member["state"])

    def _wrong_part(self) -> str | None:
        """Name a part of the state that no data give; None if there is none."""
        dtype, shape, members = self._dtype, self._shape or (), self._members.values()
        if not re.fullmatch(r"\[whole(, whole)*\]", described([self._count, *shape])):
            return "count or shape"
        if not self._count:
            return None
        if dtype != working_dtype(dtype) or dtype.is_complex > self._takes_complex:
            return "dtype"
        if members and (self._by is None or sum(part._count for part in members) != self._count):
            return "classes"
        sample = "".join(f" {size}" for size in shape)
        for (name, value), kind in zip(self._state().items(), self._state_kinds, strict=True):
            wanted = kind.format(sample=sample, units=math.prod(shape), count=self._count)
            if not (members and value is None) and not re.fullmatch(wanted, described(value)):
                return name.removeprefix("_")
        return None if members or self._is_consistent() else "state"

    def _is_consistent(self) -> bool:
        """Whether the parts of a state, each of its kind, can be together."""
        return True

    def _check(self, activation: object) -> None:
        if not isinstance(activation, Tensor):
            fault = f"{type(activation).__name__}; choose a tensor"
        elif not has_samples(activation):
            fault = "a nested, sparse, quantised or masked tensor; make it a plain one"
        elif activation.ndim == 0:
            fault = "a tensor without dimensions; give it one value for each sample"
        elif activation.is_complex() and not self._takes_complex:
            fault = "complex values; use torch.view_as_real(activation) or activation.abs()"
        else:
            return
        raise CollectError(
            f"{self!r} reduces samples along dimension 0, but was given {fault} with transform=."
        )

    def _accept(self, samples: Tensor) -> None:
        self._agree(self._sample_shape(samples))
        dtype = working_dtype(samples.dtype)
        if dtype != self._dtype:
            self._dtype = torch.promote_types(self._dtype or dtype, dtype)
        if self._device() not in (None, samples.device):
            self._place(samples.device)

    def _refuse_nan(self, what: str) -> NoReturn:
        raise CollectError(
            f"{self!r} was given {what}; replace or drop them with transform=, for example "
            "torch.nan_to_num."
        )

    def _agree(self, shape: tuple[int, ...] | None) -> None:
        if self._shape is not None and shape != self._shape:
            raise CollectError(
                f"{self!r} was given samples of shape {shape} after samples of shape "
                f"{self._shape}; bring them to one shape with transform=."
            )
        self._shape = shape

    def _check_mergeable(self, other: Self) -> None:
        self._agree(other._shape)

    def _member(self, label: Label) -> Self:
        if label not in self._members:
            member = self.fresh()
            member._by = None
            self._members[label] = member
        return self._members[label]

    def _add_samples(self, samples: Tensor, labels: Labels | None = None) -> None:
        if self._is_empty(samples):
            return
        self._accept(samples)
        if labels is None:
            self._add(samples)
        else:
            self._add_labelled(samples, labels)
        self._count += len(samples)

    def _add_labelled(self, samples: Tensor, labels: Labels) -> None:
        for label, places in labels.places(samples.device).items():
            self._member(label).update(samples[places])

    def _labelled_result(self) -> Any:
        return {label: self._members[label].compute() for label in in_order(self._members)}

    def _adopt(self, other: Self) -> None:
        """Adopt a copy of another reduction's state, on its device."""
        other._add_waiting()
        for name in ("_count", "_shape", "_dtype", *self._state_names):
            setattr(self, name, copy.deepcopy(getattr(other, name)))
        for label, member in other._members.items():
            self._member(label)._adopt(member)

    def _device(self) -> torch.device | None:
        state = self._state().values()
        return next((value.device for value in state if isinstance(value, Tensor)), None)

    def _undisturbed(self) -> contextlib.AbstractContextManager[None]:
        device = self._device()
        return undisturbed("cpu" if device is None else device.type)

    def _place(self, device: torch.device) -> None:
        self._add_waiting()
        self._set_state(map_tensors(lambda tensor: tensor.to(device), self._state()))


def cannot_go_on(*arguments: Any) -> Any:
    """Refuse more batches, since the user's own functions are missing."""
    raise CollectError("a reduction that was read from disk can't take in more batches")


def _snapshot(tensor: Tensor) -> Tensor:
    # Contiguous, for file formats that keep no strides.
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class RowReduction(SampleReduction):
    """A reduction over rows of features, which gathers them into blocks.

    Parameters
    ----------
    feature_dim : int or None
        The dimension that holds the features; every other position is a row. None flattens all but
        dimension 0.
    by : callable, optional
        ``batch -> labels [batch]``.
    **options
        The other arguments.
    """

    def __init__(self, feature_dim: int | None, *, by: By | None = None, **options: Any) -> None:
        if feature_dim is not None:
            # No tensor has more than 64 dimensions.
            feature_dim = whole("feature_dim", feature_dim, -64)
        self._feature_dim = feature_dim
        self._options = {"feature_dim": feature_dim, **options}
        super().__init__(by=by)

    def reset(self) -> None:
        """Forget all that was seen."""
        super().reset()
        self._buffer: Tensor | None = None
        self._used = 0

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        shape, dim = samples.shape, self._feature_dim
        if dim is None:
            return tuple(shape[1:])
        if dim not in (*range(1, len(shape)), *range(1 - len(shape), 0)):
            raise CollectError(
                f"feature_dim={dim} is not a dimension of features in an activation of shape "
                f"{tuple(shape)}; dimension 0 holds the samples, so choose one from 1 to "
                f"{len(shape) - 1}, or feature_dim=None to flatten all of them."
            )
        return (shape[dim],)

    def _accept(self, samples: Tensor) -> None:
        if not samples.numel():
            raise CollectError(
                f"{self!r} was given samples of shape {tuple(samples.shape[1:])}, which hold no "
                "values: leave the layer out"
            )
        super()._accept(samples)

    def _is_empty(self, samples: Tensor) -> bool:
        # Samples may have no positions.
        is_flat = self._feature_dim is None or 0 in self._sample_shape(samples)
        return len(samples) == 0 or not (is_flat or samples.numel())

    def _rows_of(self, samples: Tensor) -> Tensor:
        """Return samples as [rows, features], with a copy only if necessary."""
        if self._feature_dim is None:
            return samples.reshape(len(samples), -1)
        moved = samples.movedim(self._feature_dim, -1)
        return moved.reshape(-1, moved.shape[-1])

    def _add_block(self, rows: Tensor) -> None:
        """Add a full block of rows [n, features], which may be changed."""
        raise NotImplementedError

    def _add_rest(self, rows: Tensor) -> None:
        """Add the rows of a block that is not full; as a full one by default."""
        self._add_block(rows)

    def _add_rows(self, rows: Tensor, block: int) -> None:
        """Gather rows [n, features] into blocks of so many."""
        wanted = self._dtype, rows.device
        if self._buffer is None or (self._buffer.dtype, self._buffer.device) != wanted:
            self._add_waiting()
            shape = block, rows.shape[1]
            self._buffer = torch.empty(shape, dtype=self._dtype, device=rows.device)
        while len(rows):
            place = self._buffer[self._used : self._used + len(rows)]
            place.copy_(rows[: len(place)])
            rows = rows[len(place) :]
            self._used += len(place)
            if self._used == block:
                self._used = 0
                self._add_block(self._buffer)

    def _add_waiting(self) -> None:
        """Add the rows that wait in the buffer to the state."""
        used, self._used = self._used, 0
        if self._buffer is not None and used:
            self._add_rest(self._buffer[:used])

"""The rows of a recording: those of one batch, and the base class of tokens and nodes."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scio_recorder.errors import CollectError, RecorderError, raise_of_caller
from scio_recorder.layer import Layer, TensorSpec, counted
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.properties import is_dense

# A key or attribute of the batch, an argument of forward, or a function of the batch.
Name: TypeAlias = str | Callable[[Any], Any]
Fields: TypeAlias = Sequence[str] | Mapping[str, Name]
Dims: TypeAlias = tuple[str, ...]

# Columns that are made here, or for passes that continue earlier samples.
_OWN = ("sample", "position", "step")


@dataclass(eq=False)
class BatchRows:
    """The lines of layers' outputs for one batch that are kept, and what each of them is.

    Parameters
    ----------
    dims : tuple of str
        The meanings of a layer's leading dimensions, such as ``("batch", "positions")``.
    shape : tuple of int
        Their lengths.
    num_samples : int
        The number of samples in the batch.
    index : torch.Tensor or None
        The kept lines as flat indices into the leading dimensions, int64 [rows], in the order in
        which they are kept. None if all are kept in their order.
    columns : mapping
        Names -> [rows], the facts about each row: "sample" (counted from 0 in the batch),
        "position" and so on. Empty if a row is a sample.
    lengths : torch.Tensor
        The number of real lines of each sample, kept or not.
    labelled : tuple of int or None
        The lengths of the leading dimensions at labelling, if known.
    other_half : str, optional
        The half of the net, "encoder" or "decoder", that may have as many lines of its own.
    has_others : bool
        Whether the net also receives something with positions of its own, such as an image.

    Attributes
    ----------
    num_rows : int
        The number of kept rows.
    are_samples, are_whole_batch : bool
        Whether each row is a sample, and whether besides none is left out.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    num_samples: int
    index: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Tensor = field(default_factory=partial(torch.empty, 0))
    labelled: tuple[int, ...] | None = None
    other_half: str | None = None
    has_others: bool = False

    def __post_init__(self) -> None:
        self.num_rows = math.prod(self.shape) if self.index is None else len(self.index)
        self.are_samples = not self.columns
        self.are_whole_batch = self.index is None and self.are_samples

    def of_some(self, first: int, stop: int) -> BatchRows:
        """Return the rows of samples ``first`` to ``stop``; the others still count."""
        samples = self.columns.get("sample")
        if samples is not None:
            # Rows are in the order of their samples.
            first, stop = (int((samples < sample).sum()) for sample in (first, stop))
        lines = torch.arange(math.prod(self.shape), device="cpu")
        index = (lines if self.index is None else self.index)[first:stop]
        columns = {name: column[first:stop] for name, column in self.columns.items()}
        return replace(self, index=index, columns=columns)

    def misfit(
        self, layer: Layer, values: Tensor, *, is_transformed: bool, is_known: bool = False
    ) -> str:
        """Say that leading dimensions of a layer's values are not those of the batch, if so.

        Parameters
        ----------
        layer : Layer
            The layer.
        values : torch.Tensor
            Its output, or the result of a transform.
        is_transformed : bool
            Whether it is the result of a transform, whose author knows the shape.
        is_known : bool, default False
            Whether an earlier batch, of other lengths, has left no doubt.
        """
        shape = tuple(values.shape)
        fits = shape[: len(self.shape)] == self.shape
        doubt = self._doubt(layer, shape, is_known=is_known)
        if fits and (is_transformed or not doubt):
            return ""
        source = "the transform of layer" if is_transformed else "layer"
        gave = f"{source} {layer} gave a tensor of shape {shape}{doubt}"
        if self.are_samples:
            return (
                f"{gave} for a batch of {counted(self.num_samples, 'sample')}, as its first "
                "input or sample_ids= says, and dimension 0 must count them, as in "
                f"{(self.num_samples, *shape[1:])}"
            )
        wanted = ", ".join([*map(str, self.shape), "..."])
        return f"{gave}, but rows= needs [{', '.join(self.dims)}, ...], here ({wanted})"

    def _doubt(self, layer: Layer, shape: tuple[int, ...], *, is_known: bool) -> str:
        """Return why lengths that fit may fit by chance, as words behind them; empty if they don't.

        Labelling shows what dimensions mean, unless lengths were the same by chance there too.
        """
        spec, labelled, number = layer.output_spec, self.labelled, len(self.shape)
        if number == 2 and shape[2:] == (self.shape[1],) * 2:
            return ", which looks like an attention map [batch, heads, positions, positions]"
        if shape[:number] != self.shape:
            return ""
        if self.other_half in layer.name.split("."):
            return (
                f", and belongs to the {self.other_half}, which has as many positions as mask=, "
                "but different ones (record it with the mask of its half)"
            )
        if not isinstance(spec, TensorSpec):
            return ""
        was = spec.shape
        if labelled is not None and was[:number] != labelled:
            return f" (at labelling {was}, for {labelled}), which fits by chance"
        if not is_known and self._is_doubtful(was):
            return (
                f", as at labelling ({was}), where other dimensions have these lengths too, so "
                "that they may fit by chance (label the net with inputs of other lengths)"
            )
        return ""

    def _is_doubtful(self, was: tuple[int, ...]) -> bool:
        """Whether lengths, as at labelling, don't distinguish positions from other dimensions.

        A layer may return ``[positions, batch, ...]``, ``[batch, heads, positions, ...]``,
        ``[batch, queries, ...]`` or ``[batch, features]``; an image may have as many patches as a
        text has tokens, and an encoder as many positions as a decoder.
        """
        labelled = self.labelled or self.shape
        if len(self.shape) < 2 or self.shape[1] < 2 or was[:2] != labelled:
            return False
        are_squares = self.shape[0] == self.shape[1] and labelled[0] == labelled[1]
        has_same = labelled[1] in was[2:] or was == self.shape
        others = self.has_others or self.other_half or has_same
        return are_squares or (bool(others) and self.shape[1] == labelled[1])

    def choose(self, values: Tensor) -> Tensor:
        """Return the rows, [rows, ...], of a layer's values."""
        lines = values.flatten(0, len(self.shape) - 1)
        return lines if self.index is None else lines.index_select(0, self._index_beside(lines))

    def choose_into(self, place: Tensor, values: Tensor) -> None:
        """Write the rows of a layer's values to their place, if possible without another copy.

        Parameters
        ----------
        place : torch.Tensor
            The target, [rows, ...], on any device and of any dtype.
        values : torch.Tensor
            The layer's values.
        """
        if self.are_whole_batch:
            place.copy_(values, True)  # does not wait for a GPU
        elif self.index is None or (place.dtype, place.device) != (values.dtype, values.device):
            place.copy_(self.choose(values), True)
        else:
            lines = values.flatten(0, len(self.shape) - 1)
            torch.index_select(lines, 0, self._index_beside(lines), out=place)

    def labels(self, labels: Any) -> list[Any]:
        """Return the label of each row, from those of a batch.

        Parameters
        ----------
        labels : tensor, array or sequence
            One for each entry of all leading dimensions, of the first of them, or for each sample.

        Returns
        -------
        list
            One a row.

        Raises
        ------
        CollectError
            Their number is none of these.
        """
        values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        lengths = {len(value) for value in values if isinstance(value, list | tuple)}
        shape = (len(values), *lengths)
        if shape == self.shape and lengths:
            of_lines = list(chain.from_iterable(values))
        elif shape == self.shape[:1]:
            of_lines = [value for value in values for _ in range(math.prod(self.shape[1:]))]
        elif shape == (self.num_samples,):
            return [values[sample] for sample in self.columns["sample"].tolist()]
        else:
            raise CollectError(
                f"by= or ids= returned labels of shape {shape} for a batch of {self.num_samples} "
                f"samples: return {self.shape[0]} labels, one for each line, or labels of shape "
                f"{self.shape}"
            )
        return of_lines if self.index is None else [of_lines[line] for line in self.index.tolist()]

    def _index_beside(self, lines: Tensor) -> Tensor:
        """Return the index on the device of a layer, where those of the next layers find it."""
        assert self.index is not None
        self.index = self.index.to(lines.device, non_blocking=True)
        return self.index


@dataclass(frozen=True)
class Source:
    """The place where the names in ``rows=`` are looked up.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    batch : any
        The loader's batch.
    inputs : Inputs
        The network's inputs for it.
    number : int
        The number of the batch, for messages.
    layer : Layer
        The first of the layers that are read, for messages.
    labelled : any
        Shapes of the network's inputs at labelling, as in `Layer.input_shape`.
    has : dict, optional
        Whether earlier batches had the optional entries, by name. None if each may differ.
    is_part : bool, default False
        Whether other batches may have more rows of the same samples.
    """

    net: nn.Module
    batch: Any
    inputs: Inputs
    number: int
    layer: Layer
    labelled: Any = None
    has: dict[str, bool] | None = None
    is_part: bool = False

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the network's forward, by name."""
        return self.inputs.named(self.net)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments, and the first tensor of each tuple."""
        first = {
            name: value[0] if isinstance(value, tuple) and value else value
            for name, value in self.arguments.items()
        }
        return {name: value for name, value in first.items() if isinstance(value, Tensor)}

    @cached_property
    def mask_on_host(self) -> NDArray[Any] | None:
        """The mask [batch, positions]; that of an accelerator, which is waited for, only once."""
        mask = self.find("attention_mask")
        is_mask = isinstance(mask, Tensor) and is_dense(mask) and mask.ndim == 2
        if not is_mask or mask.is_complex() or (mask.device.type != "cpu" and self.number):
            return None
        array: NDArray[Any] = mask.detach().cpu().double().numpy()
        return array

    @cached_property
    def labelled_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of tensor arguments at labelling, as far as they are known."""
        shapes = self.labelled
        if not isinstance(shapes, Mapping):
            # The shapes of positional arguments in order, or the shape of the only one.
            several = shapes if isinstance(shapes, tuple) else ()
            alone = is_shape(several)
            shapes = dict(zip(self.arguments, [several] if alone else several, strict=False))
        return {name: shapes[name] for name in self.tensors if is_shape(shapes.get(name))}

    def number_at_labelling(self, number: int) -> tuple[int] | None:
        """Return the number of samples at labelling, if an argument that counts them shows it.

        Parameters
        ----------
        number : int
            The number of samples in this batch.
        """
        for name, before in self.labelled_shapes.items():
            value = self.tensors[name]
            if before and len(before) == value.ndim and len(value) == number:
                return (before[0],)
        return None

    def labelled_as(self, name: str, number: int) -> tuple[int, ...] | None:
        """Return an argument's leading dimensions at labelling, if known.

        Parameters
        ----------
        name : str
            The argument.
        number : int
            The number of dimensions.
        """
        shape = self.labelled_shapes.get(name)
        if shape is None or len(shape) != self.tensors[name].ndim:
            return None
        return shape[:number] if shape[number:] == self.tensors[name].shape[number:] else None

    def find(self, name: str) -> Any:
        """Return an entry or attribute of the batch, or an argument of forward; None if missing."""
        entry, argument = self.entry(name), self.arguments.get(name)
        if isinstance(entry, Tensor) and isinstance(argument, Tensor):
            # The batch may be cut on its way to the net, as texts that are too long are.
            is_cut = entry.ndim == argument.ndim and entry.shape != argument.shape
            return argument if is_cut else entry
        return argument if entry is None else entry

    def entry(self, name: str) -> Any:
        """Return an entry or attribute of the batch alone; None if missing."""
        if isinstance(self.batch, Mapping) and name in self.batch:
            return self.batch[name]
        # Arrays and tuples have attributes that are no entries of a batch.
        is_array = _attribute(self.batch, "__array__") is not None
        value = None if is_array else _attribute(self.batch, name)
        return None if callable(value) else value

    def find_in_all(self, name: str) -> Any:
        """Return the result of `find`; refuse an entry that only some of the batches have."""
        value = self.find(name)
        is_there = value is not None
        if self.has is not None and self.has.setdefault(name, is_there) != is_there:
            has, before = ("has", "lack") if is_there else ("lacks", "have")
            raise CollectError(
                f"batch {self.number} {has} {name!r}, which earlier batches {before}: give it "
                "with each batch, or give a function of the batch that says what is real"
            )
        return value

    def read(self, what: str, name: Name) -> Tensor:
        """Return the value of a name or a function of the batch, on the host.

        Parameters
        ----------
        what : str
            Its purpose, for messages.
        name : str or callable
            The name or function.
        """
        if not isinstance(name, str):
            try:
                value = name(self.batch)
            except Exception as error:
                raise_of_caller(f"batch {self.number}: {what} of rows=", error)
        elif (value := self.find(name)) is None:
            raise CollectError(
                f"rows= has {what}={name!r}, but batch {self.number} has no such key, attribute or "
                "argument of forward: give a name that each batch has, or a function of the batch"
            )
        return self.tensor(what, value)

    def tensor(self, what: str, value: Any) -> Tensor:
        """Return a value as a tensor on the host."""
        try:
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            tensor = None
        if tensor is None or not is_dense(tensor):
            # Lists of several lengths can't be made a mask, and the net would refuse the others.
            raise CollectError(
                advice_on_lists(self.arguments)
                or f"{what} of rows= is a {type(value).__name__} in batch {self.number}: give a "
                "dense tensor, or a function that returns one"
            )
        return tensor.detach().cpu()

    def check_shape(self, what: str, value: Tensor, dims: Dims, shape: tuple[int, ...]) -> Tensor:
        """Return a value that has one entry for each line of the batch; refuse another one."""
        if tuple(value.shape) != shape:
            raise CollectError(
                f"{what} of rows= has shape {tuple(value.shape)} in batch {self.number}, whose "
                f"[{', '.join(dims)}] is {shape}: give a tensor of that shape"
            )
        return value

    def numbers(self, what: str, name: Name) -> Tensor:
        """Return integers, such as the graph of each node; refuse others."""
        numbers = self.read(what, name)
        if numbers.is_floating_point() or numbers.is_complex():
            raise CollectError(
                f"{what} of rows= is {numbers.dtype} in batch {self.number}: give integers"
            )
        return numbers.long()

    def truth(self, what: str, mask: Tensor, dims: Dims, shape: tuple[int, ...]) -> Tensor:
        """Return a mask as bool, and refuse one of another shape or meaning."""
        self.check_shape(what, mask, dims, shape)
        if mask.dtype == torch.bool:
            return mask
        # Not all dtypes can be compared.
        numbers = mask if mask.is_complex() else mask.double()
        if numbers.is_complex() or not bool((numbers >= 0).all()):
            raise CollectError(
                f"{what} of rows= has negative values or NaN in batch {self.number}, as one added "
                f"to attention scores: give True for real rows, as in {what}=lambda batch: ... >= 0"
            )
        return numbers != 0


class Rows(abc.ABC):
    """The kind of a recording's rows: see :class:`Tokens` and :class:`Nodes`."""

    fields: Fields | None
    where: Name | None

    @staticmethod
    def or_none(rows: Any, error: type[RecorderError]) -> Rows | None:
        """Return the argument ``rows`` of a function; raise if it is something else."""
        if rows is None or isinstance(rows, Rows):
            return rows
        hint = f": write rows={rows.__name__}()" if isinstance(rows, type) else ""
        raise error(
            f"rows={rows!r}{hint}; give scio_recorder.Tokens(...), scio_recorder.Nodes(...) or None"
        )

    @abc.abstractmethod
    def of(self, source: Source) -> BatchRows:
        """Return the rows of a batch.

        Parameters
        ----------
        source : Source
            The batch and the network's inputs.

        Returns
        -------
        BatchRows
            The kept lines, and the facts about them.

        Raises
        ------
        CollectError
            The batch lacks a needed entry, or has something else under its name.
        """

    def all_real(self, source: Source, rows: BatchRows) -> BatchRows:
        """Return all real lines of a batch, whatever ``where`` says, given its rows."""
        if self.where is None:
            return rows
        others = copy.copy(self)
        others.where = None
        return others.of(source)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments as JSON, in which all functions look alike."""
        fields = None if self.fields is None else [list(map(_text, p)) for p in self._pairs()]
        arguments = {name: _text(value) for name, value in vars(self).items() if name != "fields"}
        return {"kind": type(self).__name__, **arguments, "fields": fields}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({arguments})"

    def __post_init__(self) -> None:
        """Refuse arguments that are neither names nor functions."""
        if isinstance(self.fields, str) or not isinstance(self.fields or (), Sequence | Mapping):
            raise CollectError(
                f'fields={self.fields!r}: give a sequence of names such as ("input_ids",), or a '
                "mapping from names to names or functions of the batch"
            )
        arguments = {name: value for name, value in vars(self).items() if name != "fields"}
        fields = {f"fields: {name!r}": value for name, value in self._pairs()}
        for what, value in {**arguments, **fields}.items():
            is_missing = value is None and what in arguments
            if not (is_missing or isinstance(value, str) or callable(value)):
                raise CollectError(
                    f'{what}={value!r:.99}: give a name in the batch, such as "attention_mask", '
                    "or a function of the batch, lambda batch: ..."
                )
        for name, _ in self._pairs():
            if not isinstance(name, str) or name in ("", ".", "..", *_OWN) or "\0" in name:
                raise CollectError(
                    f"fields has {name!r}, which can't be a name, or is a column that rows always "
                    "have: rename it"
                )

    def _pairs(self) -> list[tuple[str, Name]]:
        fields = self.fields or ()
        if isinstance(fields, Mapping):
            return list(fields.items())
        return [(name, name) for name in fields]

    def _rows(
        self,
        source: Source,
        dims: tuple[str, ...],
        shape: tuple[int, ...],
        owners: Tensor,
        num_samples: int,
        fields: Sequence[tuple[str, Name]],
    ) -> BatchRows:
        """Return the rows of a batch, given the sample of each line, or -1 for padding."""
        index = (owners >= 0).nonzero().squeeze(1)
        sample = owners[index]
        lengths = torch.bincount(sample, minlength=num_samples)
        if not (source.is_part or bool(lengths.all())):
            raise CollectError(
                f"sample {int((lengths == 0).nonzero()[0])} of batch {source.number} is empty: "
                f"none of its {dims[-1]} is real; leave such samples out of the batches"
            )
        if bool((sample.diff() < 0).any()):
            order = sample.argsort(stable=True)
            index, sample = index[order], sample[order]
        position = torch.arange(len(sample), device="cpu") - (lengths.cumsum(0) - lengths)[sample]
        if self.where is not None:
            kept = source.truth("where", source.read("where", self.where), dims, shape)
            is_kept = kept.flatten()[index]
            index, sample, position = index[is_kept], sample[is_kept], position[is_kept]
        columns = {"sample": sample, "position": position}
        for name, source_name in fields:
            what = f"the field {name!r}"
            value = source.check_shape(what, source.read(what, source_name), dims, shape)
            columns[name] = value.flatten()[index]
        is_all = len(index) == owners.numel() and bool((index.diff() == 1).all())
        return BatchRows(dims, shape, num_samples, None if is_all else index, columns, lengths)


def is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether a layer's output was one tensor at labelling, whose shape this is."""
    return isinstance(value, tuple) and {*map(type, value)} <= {int}


def _attribute(batch: Any, name: str) -> Any:
    try:
        return getattr(batch, name, None)
    except LookupError:
        # A mapping may have its keys as attributes too.
        return None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else "function"


_OF_DATASETS = 'write DataLoader(dataset.with_format("torch"), batch_size=32)'


def advice_on_lists(named: Mapping[str, Any]) -> str:
    """Return a sentence on the first input that should be a tensor; empty if there is none.

    Parameters
    ----------
    named : mapping
        The inputs by name.

    Examples
    --------
    >>> advice_on_lists({"scale": 2})
    ''
    >>> advice_on_lists({"input_ids": [[1, 2]]}).partition(":")[0]
    'input_ids is a list, not a tensor'
    """
    for name, value in named.items():
        if isinstance(value, list) and _is_of_numbers(value):
            return (
                f'{name} is a list, not a tensor: tokenize with return_tensors="pt" (and padding='
                f"True), or write torch.tensor(...); of Hugging Face datasets, {_OF_DATASETS}"
            )
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return (
                f"{name} is a list of {len(value)} tensors, as a DataLoader makes of lists of "
                f"numbers: of Hugging Face datasets, {_OF_DATASETS}"
            )
        if isinstance(value, np.ndarray):
            return (
                f"{name} is a NumPy array, not a tensor: write to_inputs=lambda batch: {{**batch, "
                f'"{name}": torch.from_numpy(batch["{name}"])}}'
            )
    return ""


def _is_of_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)

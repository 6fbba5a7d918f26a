"""Rows that are not samples: the base class of tokens and nodes."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.errors import CollectError, RecorderError, raised_by
from scio_recorder.recording.batch_rows import BatchRows
from scio_recorder.recording.feed import advice_on_lists
from scio_recorder.tensors.copies import is_dense

# A key or attribute of the batch, an argument of forward, or a function of the batch.
Name: TypeAlias = str | Callable[[Any], Any]
Fields: TypeAlias = Sequence[str] | Mapping[str, Name]

# Columns that are made here, or for passes that continue earlier samples.
_OWN = ("sample", "position", "step")


@dataclass(frozen=True)
class Source:
    """The place where the names in ``rows=`` are looked up.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    batch : any
        The loader's batch.
    arguments : mapping
        The arguments of the network's forward for it, by name.
    number : int
        The number of the batch, for messages.
    layer : str
        The first recorded layer, for messages.
    labelled : any
        Shapes of the network's inputs at labelling, as in `Layer.input_shape`.
    has : dict, optional
        Whether earlier batches had the optional entries, by name. None if each may differ.
    is_part : bool, default False
        Whether other batches may have more rows of the same samples.
    """

    net: nn.Module
    batch: Any
    arguments: Mapping[str, Any]
    number: int
    layer: str
    labelled: Any = None
    has: dict[str, bool] | None = None
    is_part: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments, and the first tensor of each tuple."""
        first = {
            name: value[0] if isinstance(value, tuple) and value else value
            for name, value in self.arguments.items()
        }
        return {name: value for name, value in first.items() if isinstance(value, Tensor)}

    def labelled_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that an argument had at labelling, if known."""
        shapes = self.labelled
        if not isinstance(shapes, Mapping):
            # The shapes of positional arguments in order, or the shape of the only one.
            several = shapes if isinstance(shapes, tuple) else ()
            alone = all(isinstance(length, int) for length in several)
            shapes = dict(zip(self.arguments, [several] if alone else several, strict=False))
        shape = shapes.get(name)
        is_shape = isinstance(shape, tuple) and all(isinstance(length, int) for length in shape)
        return shape if is_shape else None

    def labelled_as(self, name: str, number: int) -> tuple[int, ...] | None:
        """Return an argument's leading dimensions at labelling, if known.

        Parameters
        ----------
        name : str
            The argument.
        number : int
            The number of dimensions.
        """
        given, shape = self.tensors.get(name), self.labelled_shape(name)
        if shape is None or given is None or len(shape) != given.ndim:
            return None
        return shape[:number] if shape[number:] == tuple(given.shape[number:]) else None

    def find(self, name: str) -> Any:
        """Return an entry or attribute of the batch, or an argument of forward; None if missing."""
        found, given = self.entry(name), self.arguments.get(name)
        if isinstance(found, Tensor) and isinstance(given, Tensor):
            # The batch may be cut on its way to the net, as texts that are too long are.
            return given if found.ndim == given.ndim and found.shape != given.shape else found
        return given if found is None else found

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

    def read(self, what: str, given: Name) -> Tensor:
        """Return the value of a name or a function of the batch, on the host.

        Parameters
        ----------
        what : str
            Its purpose, for messages.
        given : str or callable
            The name or function.
        """
        if not isinstance(given, str):
            try:
                value = given(self.batch)
            except Exception as error:
                raise raised_by(f"batch {self.number}: {what} of rows=", error) from error
        elif (value := self.find(given)) is None:
            raise CollectError(
                f"rows= has {what}={given!r}, but batch {self.number} has no such key or "
                "attribute, and forward gets no such argument: give a name that each batch has, "
                "or a function of the batch"
            )
        return self.tensor(what, value)

    def tensor(self, what: str, value: Any) -> Tensor:
        """Return a value as a tensor on the host."""
        try:
            found = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            found = None
        if found is None or not is_dense(found):
            # Lists of several lengths can't be made a mask, and the net would refuse the others.
            raise CollectError(
                advice_on_lists(self.arguments)
                or f"{what} of rows= is a {type(value).__name__} in batch {self.number}: give a "
                "dense tensor, or a function that returns one"
            )
        return found.detach().cpu()

    def truth(self, what: str, given: Tensor, dims: tuple[str, ...], shape: tuple[int, ...]) -> Any:
        """Return a mask as bool, and refuse one of another shape or meaning."""
        if tuple(given.shape) != shape:
            raise CollectError(
                f"{what} of rows= has shape {tuple(given.shape)} in batch {self.number}, whose "
                f"[{', '.join(dims)}] is {shape}: give a bool tensor of that shape"
            )
        if given.dtype == torch.bool:
            return given
        # Not all dtypes can be compared.
        numbers = given if given.is_complex() else given.double()
        if numbers.is_complex() or not bool((numbers >= 0).all()):
            raise CollectError(
                f"{what} of rows= has negative values or NaN in batch {self.number}, like a mask "
                f"that is added to attention scores: give True for real rows, as in {what}=lambda "
                "batch: ... >= 0"
            )
        return numbers != 0


class Rows(abc.ABC):
    """The kind of a recording's rows: see :class:`Tokens` and :class:`Nodes`."""

    fields: Fields | None
    where: Name | None

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

    def all_real(self, source: Source, found: BatchRows) -> BatchRows:
        """Return all real lines of a batch, whatever ``where`` says, given its rows."""
        if self.where is None:
            return found
        others = copy.copy(self)
        others.where = None
        return others.of(source)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments as JSON, in which all functions look alike."""
        fields = None if self.fields is None else [list(map(_text, p)) for p in self._pairs()]
        own = {name: _text(value) for name, value in vars(self).items() if name != "fields"}
        return {"kind": type(self).__name__, **own, "fields": fields}

    def __repr__(self) -> str:
        given = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({given})"

    def __post_init__(self) -> None:
        """Refuse arguments that are neither names nor functions."""
        for what, value in vars(self).items():
            if what != "fields" and not (
                value is None or isinstance(value, str) or callable(value)
            ):
                raise CollectError(f"{what}={value!r}: give a name, or a function of the batch")
        if self.fields is None:
            return
        if isinstance(self.fields, str) or not isinstance(self.fields, Sequence | Mapping):
            raise CollectError(
                f'fields={self.fields!r}: give a sequence of names such as ("input_ids",), or a '
                "mapping from names to names or functions of the batch"
            )
        for name, value in self._pairs():
            if not isinstance(name, str) or not (isinstance(value, str) or callable(value)):
                raise CollectError(
                    f"fields has {name!r}: {value!r}, which is neither a name nor a function"
                )
            if name in ("", ".", "..") or "\0" in name:
                raise CollectError(
                    f"fields has {name!r}, which can't be a name: choose another one"
                )
            if name in _OWN:
                raise CollectError(
                    f"fields has {name!r}, a column that rows always have: rename it"
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
        for name, given in fields:
            value = source.read(f"the field {name!r}", given)
            if tuple(value.shape) != shape:
                raise CollectError(
                    f"the field {name!r} has shape {tuple(value.shape)} in batch {source.number}, "
                    f"whose [{', '.join(dims)}] is {shape}: give one entry for each row"
                )
            columns[name] = value.flatten()[index]
        is_all = len(index) == owners.numel() and bool((index.diff() == 1).all())
        return BatchRows(dims, shape, num_samples, None if is_all else index, columns, lengths)


def rows_or_none(rows: Any, error: type[RecorderError]) -> Rows | None:
    """Return the argument ``rows`` of a function; raise if it is something else."""
    if rows is None or isinstance(rows, Rows):
        return rows
    hint = f": write rows={rows.__name__}()" if isinstance(rows, type) else ""
    raise error(
        f"rows={rows!r}{hint}; give scio_recorder.Tokens(...), scio_recorder.Nodes(...) or None"
    )


def _attribute(batch: Any, name: str) -> Any:
    try:
        return getattr(batch, name, None)
    except LookupError:
        # A mapping may have its keys as attributes too.
        return None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else "function"

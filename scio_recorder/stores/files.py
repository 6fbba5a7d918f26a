"""Recordings in folders and buckets: the disk format, with errors and tensors of this package.

The format imports nothing else of this package and has errors of its own. What it raises becomes a
`RecordingError` or `CollectError` here and nowhere else, so other modules take everything that can
fail from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import pairwise
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from scio_recorder.errors import (
    CollectError,
    CollectWarning,
    RecorderError,
    RecordingError,
    needing,
    warn,
)
from scio_recorder.stores.disk_format import description, medium, reader, writer
from scio_recorder.stores.disk_format.description import (
    MAX_RANKS,
    SAMPLE,
    brief,
    differences,
    first_of,
    for_others,
    is_url,
    manifest_name,
    row_column,
)
from scio_recorder.stores.disk_format.medium import ContentError, FormatError, Medium, for_each
from scio_recorder.stores.disk_format.reader import RowReader, Run
from scio_recorder.stores.disk_format.tensor_file import (
    BLOCK_BYTES,
    TensorInfo,
    as_read,
    dump,
    empty_bytes,
    expect,
    parse,
)
from scio_recorder.stores.disk_format.writer import WriteRight
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import map_tensors

__all__ = [
    "MAX_RANKS",
    "SAMPLE",
    "EmptyPartError",
    "Medium",
    "RowReader",
    "RunReader",
    "TensorInfo",
    "WriteRight",
    "accessing",
    "as_read",
    "bytes_of_row",
    "check_empty",
    "check_settings",
    "complete_ranks",
    "dump",
    "expect",
    "for_others",
    "holds_recording",
    "is_url",
    "manifest_name",
    "medium_at",
    "parse",
    "read_description",
    "refuse_repeated_ids",
    "row_column",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PROPERTIES = (
    *("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "is_mps", "is_nested", "is_quantized"),
    *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
# Answered by the specification alone, without reading.
_ABOUT_IT = {
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.size,
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
}
# Functions whose names end as if they wrote numbers.
_NO_WRITES = {Tensor.requires_grad_, Tensor.share_memory_}
_INDICES = (torch.int8, torch.int16, torch.int32, torch.int64)
_SPAN_BYTES = 16 << 20
# Devices that copy from pinned memory while the host works.
_COPY_ALONE = ("cuda",)


class EmptyPartError(CollectError):
    """A part has no samples, and there is no recording yet to which it could belong."""


def _translated(error: Exception) -> RecorderError:
    """Return the error of this package for one of the format."""
    if isinstance(error, FormatError):
        recording_error = RecordingError(*error.args)
        recording_error.errno = error.errno
        return recording_error
    return CollectError(*error.args)


def translating(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function of the format that raises errors of this package."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (FormatError, ContentError) as error:
            raise _translated(error).with_traceback(error.__traceback__) from error.__cause__
        except ModuleNotFoundError as error:
            with needing("cloud", "a recording in a bucket"):
                raise error from None

    return call


def _with_translated(*names: str) -> Callable[[type[_R]], type[_R]]:
    """Let these methods of a class raise errors of this package."""

    def change(cls: type[_R]) -> type[_R]:
        for name in names:
            method: Any = getattr(cls, name)
            raising = translating(method)
            setattr(cls, name, staticmethod(raising) if isinstance(method, MethodType) else raising)
        return cls

    return change


check_empty = translating(description.check_empty)
complete_ranks = translating(description.complete_ranks)
holds_recording = translating(description.holds_recording)
medium_at = translating(description.medium_at)
place_of = translating(description.place_of)
read_description = translating(description.read_description)
scan = translating(reader.scan)


@_with_translated("__init__", "read_into", "read_state")
class RunReader(reader.RunReader):
    """Reads a recording; see the class of the format."""


@_with_translated("create", "resume", "append", "finish", "check_usable")
class RunWriter(writer.RunWriter):
    """Writes a recording; see the class of the format."""


@contextmanager
def accessing(path: str, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise an `OSError` of the block as a `RecordingError` with the same ``errno``."""
    try:
        yield
    except RecordingError:
        raise
    except FormatError as error:
        raise _translated(error) from error.__cause__
    except kinds as error:
        raise _translated(medium.explained(path, error)) from error


# Raises what a damaged or hostile file causes in the block as a `RecordingError`.
parsing = partial(accessing, kinds=medium.DAMAGE)


def bytes_of_row(samples: Tensor) -> int:
    """Return the number of bytes of one row of a layer."""
    return samples.dtype.itemsize * samples.shape[1:].numel()


class DiskTensor(Tensor):
    """The rows of one layer of a recording on disk: a tensor [rows, ...] on the CPU.

    Indexing the first dimension reads the requested rows; every other operation reads all rows.
    Results are ordinary tensors in memory. The tensor is read-only. With ``to("cuda")``, rows go to
    the GPU in parts, each while the next one is read and checked.

    Parameters
    ----------
    reader : RowReader
        Reads the files of the recording.
    layer : str
        The name in it of the layer, or of a column of rows.
    """

    reader: RowReader
    layer: str

    @staticmethod
    def __new__(cls, reader: RowReader, layer: str) -> DiskTensor:
        """Make a tensor without memory."""
        spec = reader.table[layer]
        shape = (reader.num_rows, *spec.shape)
        # One that is made in inference mode could not be used outside of it.
        with torch.inference_mode(False):
            made: DiskTensor = private.make_wrapper(cls, shape, spec.dtype)
        made.reader = reader
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Read the data that an operation needs, and hand it ordinary tensors."""
        if func in _ABOUT_IT:
            return private.run_without_overrides(func, args, kwargs or {})
        if func is Tensor.__getitem__ and isinstance(args[0], DiskTensor):
            return args[0]._item(args[1])
        if _writes(func, args, kwargs or {}):
            raise TypeError("a recording on disk is read-only: write to x[:] instead")
        if func in (Tensor.to, Tensor.cuda) and isinstance(args[0], DiskTensor):
            empty = torch.empty((0, *args[0].shape[1:]), dtype=args[0].dtype, device="cpu")
            target = func(empty, *args[1:], **(kwargs or {}))
            if target.device.type in _COPY_ALONE:
                args = args[0]._moved(target), *args[1:]
        args, kwargs = map_tensors(_loaded, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch wants a class method here
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Serve operations that come from C++ without passing `__torch_function__`."""
        args, kwargs = map_tensors(_loaded, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DiskTensor, (self.reader, self.layer)

    def __deepcopy__(self, memo: Any) -> DiskTensor:
        return DiskTensor(self.reader, self.layer)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves its own untyped
        return f"<samples on disk, {list(self.shape)}, {self.dtype}, in {self.reader.path}>"

    def _item(self, index: Any) -> Any:
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(first, slice) and (first.step is None or first.step > 0):
            start, stop, step = first.indices(len(self))
            return self._read(start, max(start, stop))[(slice(None, None, step), *rest)]
        if isinstance(first, int) and not isinstance(first, bool):
            if not -len(self) <= first < len(self):
                raise IndexError(f"row {first} of {len(self)}")
            position = first % len(self)
            return self._read(position, position + 1)[(0, *rest)]
        if not rest and isinstance(first, Tensor | list | range):
            return self._indexed(first)
        return self._read(0, len(self))[index]

    def __getitems__(self, index: Sequence[int]) -> list[Tensor]:
        """Return samples as a list: a data loader requests the samples of a batch together."""
        return list(self[list(index)].unbind())

    def _indexed(self, index: Any) -> Tensor:
        index = torch.as_tensor(index, device="cpu")
        if index.dtype == torch.bool and index.shape == self.shape[:1]:
            index = index.nonzero().squeeze(1)
        if index.ndim == 1 and not len(index):
            return self._read(0, 0)
        if index.ndim != 1 or index.dtype not in _INDICES:
            return self._read(0, len(self))[index]
        low, high = int(index.min()), int(index.max())
        if low < -len(self) or high >= len(self):
            raise IndexError(f"row {low if low < 0 else high} of {len(self)}")
        return self._gathered(index.long() % len(self))

    def _gathered(self, positions: Tensor) -> Tensor:
        """Return samples in any order; those in one block are read together."""
        rows, order = positions.sort()
        row_bytes = bytes_of_row(self)
        # Two samples of one block are never farther apart than this.
        apart = rows.diff() > BLOCK_BYTES // max(1, row_bytes)
        # The bytes that are read at a time, whatever the number of samples.
        apart |= (rows // max(1, _SPAN_BYTES // max(1, row_bytes))).diff() > 0
        edges = [0, *(apart.nonzero().squeeze(1) + 1).tolist(), len(rows)]
        # Not every dtype can be gathered, but bytes can.
        out = empty_bytes(len(rows) * row_bytes).view(len(rows), row_bytes)

        def gather(span: tuple[int, int]) -> None:
            begin, end = span
            first = int(rows[begin])
            count = int(rows[end - 1]) + 1 - first
            part = empty_bytes(count * row_bytes)
            self.reader.read_into(part.numpy(), self.layer, first)
            out[order[begin:end]] = part.view(count, row_bytes)[rows[begin:end] - first]

        for_each(gather, list(pairwise(edges)), self.reader.num_readers)
        return out.view(-1).view(self.dtype).view(len(rows), *self.shape[1:])

    def _read(self, start: int, stop: int) -> Tensor:
        return self.reader.read(self.layer, start, stop)

    def _moved(self, target: Tensor) -> Tensor:
        """Return all rows in the dtype and on the GPU of another tensor.

        They go through two buffers, so that one is filled while the other is copied.
        """
        out = target.new_empty(self.shape)
        row_bytes, reader = bytes_of_row(self), self.reader
        most_bytes = max(_SPAN_BYTES, reader.span_bytes * reader.num_readers)
        step = max(1, most_bytes // max(1, row_bytes))
        buffers = [_pinned_bytes(min(step, len(self)) * row_bytes) for _ in range(2)]
        copies: deque[Any] = deque()
        for number, start in enumerate(range(0, len(self), step)):
            place = out[start : start + step]
            part = buffers[number % 2][: len(place) * row_bytes]
            if len(copies) == len(buffers):
                copies.popleft().synchronize()
            reader.read_into(part.numpy(), self.layer, start)
            copies.append(_begin_copy(place, part.view(self.dtype).view(place.shape)))
        # The rows are complete for every stream, as after any `to`.
        for copy in copies:
            copy.synchronize()
        return out


def _pinned_bytes(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _begin_copy(place: Tensor, part: Tensor) -> Any:
    """Begin to copy to a GPU, and return the event that the copy has ended."""
    place.copy_(part, non_blocking=True)
    return torch.cuda.current_stream(place.device).record_event()


def _writes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function by its name writes to rows on disk: it would write to a copy."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__") and func not in _NO_WRITES
    written = args[0] if args and (is_in_place or func is Tensor.__setitem__) else kwargs.get("out")
    return isinstance(written, DiskTensor)


def _loaded(value: Tensor) -> Tensor:
    return value._read(0, len(value)) if isinstance(value, DiskTensor) else value


def check_settings(path: str, stored: dict[str, Any], requested: dict[str, Any]) -> None:
    """Refuse to continue or to join a recording with other settings."""
    there, here = _briefly(stored), _briefly(requested)
    if there["architecture"] != here["architecture"]:
        raise RecordingError(
            f"{path} was recorded from another network: give that one, or choose another folder"
        )
    made_with, makes_with = (settings.pop("made_with", None) for settings in (there, here))
    # Digests tell nothing to a reader.
    known, weights = (settings.pop("weights", None) for settings in (there, here))
    about_weights = "the weights are others" if known else "save() wrote it, and knew no weights"
    differing = [about_weights] * (known != weights) + differences(there, here)
    if differing:
        way = ""
        if stored.get("world_size") != requested.get("world_size"):
            way = "; collect_parts goes on with any number of processes"
        elif stored.get("process") != requested.get("process"):
            way = "; for processes that share a dataset, give a DistributedSampler or sample_ids="
        raise RecordingError(
            f"{path} was recorded with other settings: {first_of(differing)}. Give the same "
            f"network and settings, or choose another folder{way}"
        )
    if made_with and makes_with:
        _warn_of_versions(path, made_with, makes_with)


def _warn_of_versions(path: str, stored: dict[str, Any], requested: dict[str, Any]) -> None:
    """Warn if a recording goes on with another torch, or another package of the net."""
    packages = dict.fromkeys(("torch", str(requested.get("net")).partition(".")[0]))
    names = [name for name in packages if stored.get(name) != requested.get(name)]
    if names:
        texts = [
            ", ".join(f"{name} {brief(versions.get(name))}" for name in names)
            for versions in (stored, requested)
        ]
        warn(
            f"{path} was begun with {texts[0]}, and goes on with {texts[1]}, which may compute "
            "other numbers: go on with those that it was begun with, or choose another folder",
            CollectWarning,
        )


def _briefly(header: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must agree, with the fingerprint in place of the architecture."""
    architecture = header.get("architecture")
    fingerprint = architecture.get("fingerprint") if isinstance(architecture, dict) else None
    return {**header, "architecture": fingerprint}


def refuse_repeated_ids(path: str, run: Run) -> None:
    """Raise `CollectError` if two samples have the same id."""
    repeated = run.sample_ids().repeated()
    if repeated is not None:
        chunks = [chunk for chunk in run.all_chunks if repeated in chunk.ids]
        raise CollectError(
            f"{path}: two samples have the id {repeated!r}, in part {chunks[0].rank} and part "
            f"{chunks[-1].rank}: each needs an id of its own. The data on disk stays and can be "
            "read; collect again into another folder, with other sample_ids, or with parts that "
            "have no sample twice, as by a sampler that repeats none (drop_last=True)"
        )

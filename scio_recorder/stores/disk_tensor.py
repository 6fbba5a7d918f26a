"""Samples on disk that are read when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import map_tensors

_PROPERTIES = (
    *("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "is_mps", "is_nested", "is_quantized"),
    *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
# Answered from the specification alone: nothing is read.
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


class DiskTensor(Tensor):
    """The samples of one layer of a recording on disk: a tensor [samples, ...] on the CPU.

    Indexing the first dimension reads what is asked for; every other operation reads all of it.
    Results are ordinary tensors in memory. It can't be written to.

    Parameters
    ----------
    reader : RunReader
        The open recording.
    layer : str
        The layer's name in it.
    """

    _reader: RunReader
    _layer: str

    @staticmethod
    def __new__(cls, reader: RunReader, layer: str) -> DiskTensor:
        """Make a tensor without memory."""
        spec = reader.layers[layer]
        shape = (reader.num_samples, *spec.shape)
        made: DiskTensor = private.make_wrapper(cls, shape, spec.dtype)
        made._reader = reader
        made._layer = layer
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Read what an operation needs, and hand it ordinary tensors."""
        if func in _ABOUT_IT:
            return private.run_without_overrides(func, args, kwargs or {})
        if func is Tensor.__getitem__ and isinstance(args[0], DiskTensor):
            return args[0]._item(args[1])
        if func is Tensor.__setitem__ and isinstance(args[0], DiskTensor):
            raise TypeError("a recording on disk is read-only: write to x[:] instead")
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
        return DiskTensor, (self._reader, self._layer)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<samples on disk, {list(self.shape)}, {self.dtype}, in {self._reader.path}>"

    def _item(self, index: Any) -> Any:
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(first, slice) and (first.step is None or first.step > 0):
            start, stop, step = first.indices(len(self))
            return self._read(start, max(start, stop))[(slice(None, None, step), *rest)]
        if isinstance(first, int) and not isinstance(first, bool):
            position = range(len(self))[first]
            return self._read(position, position + 1)[(0, *rest)]
        if not rest and isinstance(first, Tensor | list | range):
            return self._rows(first)
        return self._read(0, len(self))[index]

    def _rows(self, index: Any) -> Any:
        index = torch.as_tensor(index).cpu()
        if index.dtype == torch.bool or index.ndim != 1 or not len(index):
            return self._read(0, len(self))[index]
        positions = [range(len(self))[int(i)] for i in index]
        low, high = min(positions), max(positions) + 1
        # Rows lie apart on disk: few of them are fetched alone, many with what is between.
        if high - low > 4 * len(positions):
            return torch.cat([self._read(i, i + 1) for i in positions])
        return self._read(low, high)[torch.tensor(positions) - low]

    def _read(self, start: int, stop: int) -> Tensor:
        return self._reader.read(self._layer, start, stop)


def _loaded(value: Tensor) -> Tensor:
    return value._read(0, len(value)) if isinstance(value, DiskTensor) else value

"""Calls of modules that can be run again: what they received, in which state, and what came out."""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.tensors.copies import is_plain
from scio_recorder.tensors.digests import content_key
from scio_recorder.tensors.structures import Rebuild, flatten

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx, Layer
    from scio_recorder.nets.architecture import Architecture


# Beyond this, what lies between the elements of a view is not allocated to get its strides back.
MAX_EXTENT_BYTES = 1 << 32
MAX_ELEMENTS = 1 << 48


class KeptTensor:
    """A plain tensor in no more host memory than it needs, which comes back with its strides.

    Strides decide which kernel runs, and so the last bits of what it returns.

    Parameters
    ----------
    dense : torch.Tensor
        The elements, contiguous; dimensions that are expanded have one.
    shape, strides : sequence of int
        Of the tensor that comes back.

    Examples
    --------
    >>> x = torch.arange(6.0).view(2, 3)[:, :1].expand(2, 4)
    >>> kept = Pool().keep(x)
    >>> kept.dense.shape, kept.restored().stride(), torch.equal(kept.restored(), x)
    (torch.Size([2, 1]), (3, 0), True)
    """

    __slots__ = ("dense", "shape", "strides")

    def __init__(self, dense: Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.dense = dense
        self.shape = tuple(shape)
        self.strides = tuple(strides)

    @classmethod
    def checked(cls, dense: Tensor, shape: Any, strides: Any) -> KeptTensor:
        """Return a tensor of which nothing is known to fit.

        Parameters
        ----------
        dense : torch.Tensor
            Its elements.
        shape, strides : Any
            Maybe what the constructor takes.

        Raises
        ------
        ValueError, TypeError
            They don't fit.
        """
        rows = list(zip(dense.shape, shape, strides, strict=True))
        for size, wanted, step in rows:
            is_whole = type(wanted) is int and type(step) is int and 0 <= step <= MAX_EXTENT_BYTES
            if not is_whole or not (wanted == size or (size == 1 and step == 0)):
                raise ValueError(f"a tensor {list(dense.shape)} with {shape} and {strides}")
        if math.prod(shape) > MAX_ELEMENTS or not _is_regular(dense.shape, strides, dense.itemsize):
            raise ValueError(f"strides {strides} for a tensor {list(shape)}")
        return cls(dense, shape, strides)

    def restored(self) -> Tensor:
        """Return the tensor in memory of its own."""
        dense = self.dense
        memory = torch.empty_strided(
            dense.shape, self.strides, dtype=dense.dtype, device=dense.device
        )
        return memory.copy_(self.dense).as_strided(self.shape, self.strides)


class Pool:
    """Copies tensors to host memory, those of the same content once.

    Inputs come again and again: masks, position embeddings, what two modules both receive. A copy
    is known here for as long as somebody holds it.

    Examples
    --------
    >>> pool = Pool()
    >>> first, second = pool.copy(torch.ones(3)), pool.copy(torch.ones(3))
    >>> first is second
    True
    """

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in host memory; not to be written to."""
        # Tensors made in inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            there = tensor.detach().cpu().contiguous()
            key = content_key(there)
            known = self._known.get(key)
            if known is None:
                is_own = there.data_ptr() != tensor.data_ptr() and not there.is_inference()
                known = self._known[key] = there if is_own else there.clone()
        return known

    def keep(self, tensor: Tensor) -> KeptTensor | Tensor:
        """Return what gives the tensor back; one that is not plain is cloned as it is."""
        if not is_plain(tensor):
            detached = tensor.detach()
            is_here = detached.device.type in ("cpu", "meta")
            return detached.clone() if is_here else detached.cpu()
        tensor = tensor.detach()
        index = [slice(0, 1) if step == 0 else slice(None) for step in tensor.stride()]
        small = tensor[tuple(index)]
        if not _is_regular(small.shape, small.stride(), small.itemsize):
            tensor = small = tensor.contiguous()
        return KeptTensor(self.copy(small), tensor.shape, tensor.stride())


@dataclass
class KeptCall:
    """One call of a recorded module.

    Parameters
    ----------
    leaves : sequence of KeptTensor or torch.Tensor
        The distinct tensors among what forward received.
    rebuild : callable
        Gives ``(args, kwargs)``, with what takes the place of the leaves.
    moment : Moment
        The state in which the module ran.
    weights : str
        The digest of the module's parameters, see `digest_of`.
    output : str
        The digest of what it returned.
    """

    leaves: Sequence[KeptTensor | Tensor]
    rebuild: Rebuild
    moment: Moment
    weights: str
    output: str = ""

    @property
    def inputs(self) -> Inputs:
        """What forward received, in memory of its own, on the CPU."""
        again = [
            leaf.restored() if isinstance(leaf, KeptTensor) else leaf.clone()
            for leaf in self.leaves
        ]
        return Inputs(*self.rebuild(again))

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that this takes."""
        own = [leaf.dense if isinstance(leaf, KeptTensor) else leaf for leaf in self.leaves]
        return own + self.moment.tensors

    # Functions can't be pickled; structures can, with empty tensors in the places of the leaves.

    def __getstate__(self) -> dict[str, Any]:
        structure = self.rebuild([torch.empty(0) for _ in self.leaves])
        return {**self.__dict__, "rebuild": structure}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rebuild = flatten(state["rebuild"])[1]


@dataclass
class KeptBatch:
    """The recorded calls of one batch of so many samples."""

    rows: int
    calls: Mapping[DepthIdx, KeptCall]


class Batches(Protocol):
    """The recorded calls of all batches, in memory or not."""

    @property
    def labels(self) -> Sequence[DepthIdx]:
        """The layers whose calls are kept."""

    @property
    def rows(self) -> Sequence[int]:
        """How many samples each batch has."""

    @property
    def num_bytes(self) -> int:
        """What all calls take together."""

    def call(self, number: int, label: DepthIdx) -> KeptCall:
        """Return the call of a layer in a batch."""


@dataclass
class MemoryBatches:
    """Batches in host memory."""

    batches: Sequence[KeptBatch] = field(default_factory=list)

    @property
    def labels(self) -> Sequence[DepthIdx]:
        """The layers whose calls are kept."""
        return tuple(self.batches[0].calls) if self.batches else ()

    @property
    def rows(self) -> Sequence[int]:
        """How many samples each batch has."""
        return [batch.rows for batch in self.batches]

    @property
    def num_bytes(self) -> int:
        """What all calls take together, each piece of memory counted once."""
        own = {
            id(tensor): tensor.nbytes
            for batch in self.batches
            for call in batch.calls.values()
            for tensor in call.tensors
        }
        return sum(own.values())

    def call(self, number: int, label: DepthIdx) -> KeptCall:
        """Return the call of a layer in a batch."""
        return self.batches[number].calls[label]


def _is_regular(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether no two elements share memory, and they don't lie too far apart."""
    extent = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and step < extent:
            return False
        extent += max(0, size - 1) * step
    return extent * itemsize <= MAX_EXTENT_BYTES


def enclosing_layers(architecture: Architecture, target: DepthIdx) -> list[DepthIdx]:
    """Return the calls inside which a layer ran, the nearest first.

    Parameters
    ----------
    architecture : Architecture
        The layers.
    target : (int, int)
        The layer.

    Returns
    -------
    list of (int, int)
        Without the layer itself.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.Sequential(nn.ReLU())), input_size=(1, 2))
    >>> enclosing_layers(architecture, (2, 1))
    [(1, 1), (0, 1)]
    """
    # Rows stand in the order in which calls started.
    rows = list(architecture.values())
    own = next(at for at, row in enumerate(rows) if row.label == target)
    ended = rows[own].completion
    return [row.label for row in rows[own::-1] if _ended_later(row, ended)]


def _ended_later(row: Layer, completion: int | None) -> bool:
    return row.completion is not None and completion is not None and row.completion > completion

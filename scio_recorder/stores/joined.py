"""Putting layers together, on reading, whose shards several processes have written.

NOTE [Shards of activations]

Under tensor parallelism all processes see the same samples, and each has a shard of some layers.
Each writes its values as a rank of the recording, with the ids of the same samples. The kept
architecture says which layers are shards, and along which dimension. So the rows of such a layer
are those of all ranks side by side, in the order of ranks. The rows of other layers are those of
the first rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from scio_recorder.errors import CollectError
from scio_recorder.layer import DepthIdx, Layer, TensorSpec
from scio_recorder.nets.architecture import Architecture
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.row_reader import RowReader


def check_shards(architecture: Architecture, settings: dict[str, Any], store: Any) -> None:
    """Refuse to write shards that could not be put together again.

    Call it before all passes, and once the first pass has shown which layers are shards. The first
    chunk would be too late: processes write it at different times, so one would leave others in a
    pass.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    settings : dict
        The settings of the recording.
    store : Disk
        Knows the rank that writes, and the number of ranks.

    Raises
    ------
    CollectError
        A layer is a shard, and the arrangement of the ranks' shards can't be known. Or no layer is
        a shard, and several ranks would write the same rows.
    """
    if not store.is_shared:
        return
    check_copies(architecture, settings["layers"], store)
    layers = [architecture[name] for name in settings["layers"]]
    place = None if store.is_part else (store.rank, store.world_size)
    for layer in layers:
        shard, name = layer.shard, str(layer.label)
        if shard is None:
            continue
        changed = name in settings["transforms"] or name in settings["reductions"]
        problem = None
        if shard.dim is None:
            problem = "such shards can't be put together: record the layer that makes it"
        elif shard.dim == 0:
            problem = "dimension 0 counts samples: collect it in each process by itself"
        elif (shard.index, shard.count) != place:
            problem = (
                f"this process writes part {store.rank} of {store.world_size}: write as many parts "
                "as there are shards, each with its index as rank="
            )
        elif changed or settings["inputs"]:
            problem = "transform=, reduce= and inputs=True work on shards alone: leave them out"
        if problem is not None:
            raise CollectError(f"layer {layer} returns {shard}, and {problem}")


def check_copies(architecture: Architecture, layers: Iterable[DepthIdx | str], store: Any) -> None:
    """Refuse to write the same rows in several ranks: all of them have all of these layers.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    layers : iterable
        The recorded layers.
    store : Disk
        Knows the number of ranks.

    Raises
    ------
    CollectError
        As many ranks write as there are processes, and some of these see the same samples.
    """
    count = architecture.num_sharing
    if not store.is_shared or any(architecture[layer].shard for layer in layers):
        return
    if count > 1 and store.world_size * count > torch.distributed.get_world_size():
        raise CollectError(
            f"{count} processes of this net see the same samples and have all of these layers, so "
            f"that there would be {count} of each row: let one of them write, as in "
            'store=Disk(path) if rank == 0 else "host"'
        )


class JoinedReader(RowReader):
    """Reads the ranks of a recording side by side; see the NOTE.

    Parameters
    ----------
    whole : RunReader
        All ranks, one after the other.
    axes : dict of str to int
        For each sharded layer, the sharded dimension of a row, counted from the last.

    Raises
    ------
    ValueError
        Ranks have different samples, or rows without such a dimension.
    """

    def __init__(self, whole: RunReader, axes: dict[str, int]) -> None:
        self._axes = axes
        self._parts = [RunReader(whole.path, rank=rank) for rank in range(whole.world_size)]
        # An interrupted recording has the rows that all ranks have.
        shortest = min(self._parts, key=lambda part: (part.num_samples, part.num_rows))
        ids = list(shortest.sample_ids)
        if any(list(part.sample_ids[: len(ids)]) != ids for part in self._parts):
            raise ValueError("its ranks hold shards of layers, but have different samples")
        self.path, self.header, self.rows = whole.path, whole.header, whole.rows
        self.complete, self.sample_ids = whole.complete, shortest.sample_ids
        self.starts = shortest.starts
        self.layers = {name: self._joined(name, spec) for name, spec in whole.layers.items()}
        self.table = {**whole.table, **self.layers}

    def _joined(self, name: str, spec: TensorSpec) -> TensorSpec:
        if name not in self._axes:
            return spec
        shape, axis = list(spec.shape), self._axes[name]
        if -axis > len(shape):
            raise ValueError(f"layer {name} has no dimension {axis}, along which it is sharded")
        shape[axis] *= len(self._parts)
        return TensorSpec(tuple(shape), spec.dtype)

    def _fill(self, out: NDArray[numpy.uint8], number: int, name: str, start: int) -> None:
        spec, start = self._spec(name), start + self.starts[number]
        if name not in self._axes:
            self._parts[0].read_into(out, name, start)
            return
        stop = start + len(out) // max(1, spec.nbytes)
        # Not every dtype can be concatenated, but bytes can.
        shards = [part.read(name, start, stop).view(torch.uint8) for part in self._parts]
        out[:] = torch.cat(shards, self._axes[name]).view(-1).numpy()

    def distrust(self) -> None:
        """Forget which blocks were verified: each is verified again at its next read."""
        for part in self._parts:
            part.distrust()

    def fingerprint(self) -> str:
        """Return a digest that distinguishes this recording, at its present length, from others."""
        return "".join(part.fingerprint() for part in self._parts)


def joined(reader: RunReader, architecture: Architecture) -> RunReader | JoinedReader:
    """Return a reader that puts a recording's shards together, and remove their marks."""
    if reader.rank is not None or reader.world_size == 1:
        # A process by itself keeps what it has, which may be a shard of any kind.
        return reader
    rows = [architecture[name] for name in reader.layers]
    axes = {str(row.label): _axis(row) for row in rows if row.shard is not None}
    if not axes:
        return reader
    for row in rows:
        if row.shard is not None and row.shard.count != reader.world_size:
            raise ValueError(f"layer {row} has {row.shard.count} shards, not {reader.world_size}")
    made = JoinedReader(reader, axes)
    architecture.mark(dict.fromkeys((row.label for row in rows), None))
    return made


def _axis(layer: Layer) -> int:
    dim, shape = layer.shard and layer.shard.dim, layer.output_shape
    if not dim or not isinstance(shape, tuple) or dim >= len(shape):
        raise ValueError(f"layer {layer} is sharded along a dimension that it does not have")
    return dim - len(shape)

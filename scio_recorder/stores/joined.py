"""Layers of which each process has written a shard, put together when they are read.

NOTE [Shards of activations]

Under tensor parallelism all processes see the same samples, and of some layers each has a shard.
Each writes what it has as a rank of the recording, with the ids of the same samples. The
architecture that is kept says which layers are shards, and along which dimension. So the rows of
such a layer are those of all ranks side by side, in the order of ranks, and of other layers those
of the first rank.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from scio_recorder.errors import CollectError
from scio_recorder.layer import Layer, TensorSpec
from scio_recorder.nets.architecture import Architecture
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.row_reader import RowReader


def check_shards(architecture: Architecture, settings: dict[str, Any], store: Any) -> None:
    """Refuse to write shards that could not be put together again.

    To be asked ahead of all passes, and once the first has shown which layers are shards: not with
    the first chunk, for which each process has its own time, and would leave others in a pass.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    settings : dict
        What the recording is made with.
    store : Disk
        Says which of how many ranks writes.

    Raises
    ------
    CollectError
        A layer is a shard, and it can't be known how the ranks' shards lie beside each other. Or
        none is, and several ranks would write the same rows.
    """
    _check_copies(architecture, settings, store)
    layers = [architecture[name] for name in settings["layers"]] if store.is_shared else []
    place = None if store.lease is not None else (store.rank, store.world_size)
    for layer in layers:
        shard, name = layer.shard, str(layer.label)
        if shard is None:
            continue
        changed = name in settings["transforms"] or name in settings["reductions"]
        problem = None
        if shard.dim is None:
            problem = "it can't be known along which dimension: record the layer that makes it"
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


def _check_copies(architecture: Architecture, settings: dict[str, Any], store: Any) -> None:
    count = architecture.num_sharing
    if not store.is_shared or any(architecture[name].shard for name in settings["layers"]):
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
        Of each layer that is sharded, the dimension of a row, counted from the last.

    Raises
    ------
    ValueError
        Ranks have other samples, or rows without such a dimension.
    """

    def __init__(self, whole: RunReader, axes: dict[str, int]) -> None:
        self._axes = axes
        self._parts = [RunReader(whole.path, rank=rank) for rank in range(whole.world_size)]
        # An interrupted recording has as much as all ranks have.
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
        # Not every dtype can be concatenated; bytes can.
        shards = [part.read(name, start, stop).view(torch.uint8) for part in self._parts]
        out[:] = torch.cat(shards, self._axes[name]).view(-1).numpy()

    def distrust(self) -> None:
        """Verify all blocks again when they are read next."""
        for part in self._parts:
            part.distrust()

    def fingerprint(self) -> str:
        """Return what tells this recording, as long as it is now, from every other."""
        return "".join(part.fingerprint() for part in self._parts)


def joined(reader: RunReader, architecture: Architecture) -> RunReader | JoinedReader:
    """Return what reads a recording with its shards put together, and mark them no more."""
    rows = [architecture[name] for name in reader.layers]
    axes = {str(row.label): _axis(row) for row in rows if row.shard is not None}
    if reader.rank is not None or reader.world_size == 1 or not axes:
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

"""Tools for tensors and the structures that hold them, and checks of plain arguments."""

from __future__ import annotations

from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import (
    ProcessRank,
    booleans,
    floating_or_none,
    names_arguments,
    this_process,
    usable_device,
    whole,
)
from scio_recorder.tensors.arithmetic import one_thread, undisturbed, with_float64
from scio_recorder.tensors.copies import (
    Copies,
    StridedCopy,
    gathered,
    is_out_of_memory,
    to_array,
    twin,
)
from scio_recorder.tensors.properties import (
    DTYPES,
    Version,
    dtype_name,
    has_memory,
    inner_tensors,
    is_dense,
    is_plain,
    memories_of,
    same_bits,
    version_counter,
    version_of,
)
from scio_recorder.tensors.structures import (
    Apart,
    flatten,
    fold,
    is_container,
    map_tensors,
    taken_apart,
    tensors,
)

__all__ = [
    "DTYPES",
    "Apart",
    "Copies",
    "ProcessRank",
    "StridedCopy",
    "Version",
    "booleans",
    "dtype_name",
    "flatten",
    "floating_or_none",
    "fold",
    "gathered",
    "has_memory",
    "inner_tensors",
    "is_container",
    "is_dense",
    "is_out_of_memory",
    "is_plain",
    "map_tensors",
    "memories_of",
    "names_arguments",
    "one_thread",
    "private",
    "same_bits",
    "taken_apart",
    "tensors",
    "this_process",
    "to_array",
    "twin",
    "undisturbed",
    "usable_device",
    "version_counter",
    "version_of",
    "whole",
    "with_float64",
]

"""What rooms above the core, and other packages, build on: passes, hooks, runs without a trace.

A name here may change between minor versions, with a line in the changelog. The reference says what
each is for. The core imports nothing from here.
"""

from __future__ import annotations

from scio_recorder.capture.around import CallWrapper
from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.gradients import LEFT_OUT, CallStart, CallStarts
from scio_recorder.capture.hooks import CallHook, CallHooks
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import caught_as, needing, raised_by, warn
from scio_recorder.layer import counted, few
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.offers import nearest
from scio_recorder.nets.records import Inputs, LayerMapping
from scio_recorder.nets.refusals import check_supported
from scio_recorder.nets.selection import select_layers
from scio_recorder.nets.sharded import InStep, needs_fsdp
from scio_recorder.nets.state.moment import preserved_rng, random_state, restore_random
from scio_recorder.nets.state.untouched import untouched
from scio_recorder.postprocessors.assigning import Assigned, Postprocessor, Postprocessors, assign
from scio_recorder.recording.collection import Collection
from scio_recorder.recording.feed import ChosenSamples, Feed, Share
from scio_recorder.recording.options import CollectOptions, LayerOptions
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.recording import opened
from scio_recorder.reductions.base import several
from scio_recorder.stores.disk import EmptyPartError
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import (
    ProcessRank,
    floating_or_none,
    this_process,
    usable_device,
    whole,
)
from scio_recorder.tensors.copies import StridedCopy
from scio_recorder.tensors.digests import WeightDigests, digest_of
from scio_recorder.tensors.properties import is_plain, same_bits, version_counter, version_of
from scio_recorder.tensors.structures import flatten, map_tensors, tensors

__all__ = [
    "LEFT_OUT",
    "Advance",
    "Assigned",
    "CallHook",
    "CallHooks",
    "CallStart",
    "CallStarts",
    "CallWrapper",
    "Capture",
    "ChosenSamples",
    "CollectOptions",
    "Collection",
    "EmptyPartError",
    "Feed",
    "InStep",
    "Inputs",
    "LayerMapping",
    "LayerOptions",
    "Postprocessor",
    "Postprocessors",
    "ProcessRank",
    "Readable",
    "Share",
    "StridedCopy",
    "WeightDigests",
    "assign",
    "caught_as",
    "check_supported",
    "counted",
    "digest_of",
    "few",
    "flatten",
    "floating_or_none",
    "is_plain",
    "is_rerun",
    "map_tensors",
    "nearest",
    "needing",
    "needs_fsdp",
    "opened",
    "preserved_rng",
    "private",
    "progress_bar",
    "raised_by",
    "random_state",
    "restore_random",
    "same_bits",
    "select_layers",
    "several",
    "takes_hooks",
    "tensors",
    "this_process",
    "untouched",
    "usable_device",
    "version_counter",
    "version_of",
    "warn",
    "whole",
]

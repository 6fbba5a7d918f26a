"""What rooms above the core, and other packages, build on: passes, hooks, runs without a trace.

A name here may change between minor versions, with a line in the changelog. The reference says what
each is for. The core imports nothing from here.
"""

from __future__ import annotations

from scio_recorder import interpreter
from scio_recorder.capture.around import CallHook, CallHooks, CallWrapper, Uncopied
from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.engine import Capture, refuse_transforms, warn_of_other_kernels
from scio_recorder.capture.gradients import CallStart, CallStarts, Returned
from scio_recorder.capture.own_code import ObservingMode, OwnCodeHook, RunningCode, run_in_mode
from scio_recorder.capture.program import RecordOptions
from scio_recorder.errors import caught_as, needing, raise_of_caller, warn
from scio_recorder.nets.architecture import nearest
from scio_recorder.nets.attention import AttentionReader
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs, LayerMapping, shown_shapes
from scio_recorder.nets.refusals import check_supported, refuse_unkeepable, runs_without_gradients
from scio_recorder.nets.selection import choose_modules, select_layers
from scio_recorder.nets.sharded import InStep, is_sharded, needs_fsdp
from scio_recorder.nets.state.moment import Moment, random_state, restore_random
from scio_recorder.nets.state.untouched import NetState, reached, run_copy, untouched
from scio_recorder.postprocessors.assigning import Assigned, Postprocessors, assign
from scio_recorder.postprocessors.values import describe
from scio_recorder.recording.collection import Collection, what_is_durable
from scio_recorder.recording.feed import Advice, ChosenSamples, Feed, Share, raise_for_batch
from scio_recorder.recording.loader import rows_of
from scio_recorder.recording.options import (
    CollectOptions,
    LayerOptions,
    PartKeywords,
    in_words,
    made_with,
    shows,
)
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.recording import opened
from scio_recorder.recording.rows import BatchRows, Rows, Source
from scio_recorder.recording.statistics import RunningStatistics
from scio_recorder.reductions.base import several
from scio_recorder.tensors.digests import WeightDigests, digest_of, plain_parts

__all__ = [
    "Advice",
    "Assigned",
    "AttentionReader",
    "BatchRows",
    "CallHook",
    "CallHooks",
    "CallStart",
    "CallStarts",
    "CallWrapper",
    "Capture",
    "ChosenSamples",
    "CollectOptions",
    "Collection",
    "Feed",
    "InStep",
    "Inputs",
    "LayerMapping",
    "LayerOptions",
    "Moment",
    "NetState",
    "ObservingMode",
    "OwnCodeHook",
    "PartKeywords",
    "Postprocessors",
    "Readable",
    "RecordOptions",
    "Returned",
    "Rows",
    "RunningCode",
    "RunningStatistics",
    "Share",
    "Source",
    "Uncopied",
    "WeightDigests",
    "assign",
    "caught_as",
    "check_supported",
    "choose_modules",
    "describe",
    "digest_of",
    "in_words",
    "interpreter",
    "is_rerun",
    "is_sharded",
    "made_with",
    "nearest",
    "needing",
    "needs_fsdp",
    "opened",
    "plain_parts",
    "raise_for_batch",
    "raise_of_caller",
    "random_state",
    "reached",
    "refuse_transforms",
    "refuse_unkeepable",
    "restore_random",
    "rows_of",
    "run_copy",
    "run_in_mode",
    "runs_without_gradients",
    "select_layers",
    "several",
    "shown_shapes",
    "shows",
    "takes_hooks",
    "untouched",
    "warn",
    "warn_of_other_kernels",
    "what_is_durable",
]

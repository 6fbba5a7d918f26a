"""The command ``compare``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from rich.console import Console
from torch import nn

from scio_recorder.analysis.comparing.compare import compare as compare_runs
from scio_recorder.command_line.command_objects import (
    UsageError,
    made,
    net_of,
    recording_at,
    rows_of,
)
from scio_recorder.command_line.command_output import DIFFERENT, print_line
from scio_recorder.nets.records import Inputs
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.recording import open_recording
from scio_recorder.recording.feed import Feed
from scio_recorder.stores.disk_format.description import is_url
from scio_recorder.tensors.structures import map_tensors, tensors


def compare(parsed: Namespace, console: Console) -> int:
    """Find the layers in which two runs differ, and the one that makes the difference."""
    given = [parsed.reference, parsed.candidate]
    match = dict(_pair(text) for text in parsed.match)
    rows = rows_of(parsed.rows)
    _refuse_mixtures(parsed, given)
    inputs, batches = _first_inputs(parsed.data)
    runs = [_run(target, parsed, inputs) for target in given]
    if parsed.layers is not None:
        runs[0].record(*parsed.layers)
    difference = compare_runs(
        runs[0],
        runs[1],
        batches,
        match or None,
        parsed.rtol,
        parsed.atol,
        max_batches=parsed.max_batches,
        to_inputs=_to_inputs_of(runs, inputs),
        rows=rows,
        operations=parsed.operations,
    )
    page = None if parsed.report is None else difference.report(parsed.report)
    if console.is_terminal:
        console.print(difference)
    else:
        print_line(console, str(difference))
    if page is not None:
        print_line(console, f"wrote {page}")
    return 0 if difference.first is None else DIFFERENT


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise UsageError(f"--match {text!r}: write it like 'layers.*=h.*'")
    return name, other


def _is_net(target: str) -> bool:
    return ":" in target and not is_url(target) and not os.path.exists(target)


def _refuse_mixtures(parsed: Namespace, given: Sequence[str]) -> None:
    nets = [target for target in given if _is_net(target)]
    if nets and parsed.data is None:
        raise UsageError(f"{nets[0]} needs batches to run on: name them with --data MODULE:NAME")
    if not nets and parsed.data is not None:
        raise UsageError("--data is for nets, and these are recordings: leave it out")
    if parsed.layers is not None and not _is_net(parsed.reference):
        raise UsageError("--layers is for a reference that is a net: leave it out")


def _first_inputs(target: str | None) -> tuple[Inputs | None, Any]:
    """Return the nets' inputs for the first batch, and all batches including the first."""
    if target is None:
        return None, None
    batches = made(target)
    feed, iterator = Feed(batches), iter(batches)
    first = next(iterator, None)
    if first is None:
        raise UsageError("--data gives no batches")
    return feed.inputs(first), chain([first], iterator) if iterator is batches else batches


def _run(target: str, parsed: Namespace, inputs: Inputs | None) -> Any:
    """Return a recorder of a net, or a recording."""
    if inputs is None or not _is_net(target):
        return open_recording(recording_at(target, other="; a net is MODULE:NAME"))
    net = net_of(target, is_eval=not parsed.train)
    args, kwargs = _fitted(inputs, _dtype_of(net))
    return Recorder(net, input_data=kwargs or args, force_static_flow=not parsed.allow_dynamic_flow)


def _dtype_of(run: Any) -> torch.dtype | None:
    """Return the dtype of the floating-point parameters of a net or a recorder, if it has any."""
    parameters = run.parameters() if isinstance(run, nn.Module) else ()
    return next((one.dtype for one in parameters if one.is_floating_point()), None)


def _fitted(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Return inputs whose floating-point tensors have a net's dtype."""
    if dtype is None:
        return inputs
    fitted: Inputs = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    return fitted


def _to_inputs_of(runs: Sequence[Any], inputs: Inputs | None) -> list[Callable[[Any], Any]] | None:
    """Return a function of the batch for each run's inputs, if the dtypes differ."""
    given = {one.dtype for one in tensors(inputs) if one.is_floating_point()}
    dtypes = [_dtype_of(run) for run in runs]
    if not given or given >= {*dtypes} - {None}:
        return None
    feed = Feed([])

    def given_to(dtype: torch.dtype | None, batch: Any) -> Any:
        return tuple(_fitted(feed.inputs(batch), dtype))

    return [partial(given_to, dtype) for dtype in dtypes]

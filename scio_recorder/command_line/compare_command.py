"""The command ``compare`` and its arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import nn

from scio_recorder.command_line.command_arguments import (
    FailureError,
    UsageError,
    add_flow,
    add_run,
    made,
    net_of,
    one_line,
    recording_at,
    rows_of,
)
from scio_recorder.command_line.command_output import DIFFERENT, WRONG_USE, print_line
from scio_recorder.errors import RecorderError
from scio_recorder.stores.disk_format.medium import is_url
from scio_recorder.tensors.structures import map_tensors, tensors

if TYPE_CHECKING:
    from scio_recorder.nets.records import Inputs

_NOTHING = object()


def add_compare(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    # A caller that asks whether runs differ must not mistake an error for an answer.
    command.set_defaults(failed=WRONG_USE)
    add, what = command.add_argument, "the folder of a recording, or MODULE:NAME of a net"
    add("reference", metavar="REFERENCE", help=what)
    add("candidate", metavar="CANDIDATE", help=what)
    add("--floor", metavar="RUN", help="a third run, whose differences from REFERENCE are noise")
    what = "the batches, if nets run: an iterable, or a function that makes one"
    add("--data", metavar="MODULE:NAME", help=what)
    what = "the layers to compare, if REFERENCE is a net, as for collect; by default all"
    add("--layers", nargs="+", metavar="LAYER", help=what)
    what = "names or globs of the reference and their names in the candidate"
    add("--match", nargs="+", action="extend", default=[], metavar="NAME=NAME", help=what)
    add("--rtol", type=float, default=0.0, help="relative tolerance (0: bit for bit)")
    add("--atol", type=float, default=0.0, help="absolute tolerance (0: bit for bit)")
    add("--report", metavar="FILE", help="write a page that shows the differences")
    add_run(command)
    add_flow(command)


def compare(parsed: argparse.Namespace, console: Console) -> int:
    """Find the layers in which two runs differ, and the one that makes the difference.

    Runs are recordings, or nets that run over --data. The exit status is 0 if nothing differs, 1
    if something does, and 2 for any error.
    """
    # Imported here so that --help and wrong use answer at once.
    from scio_recorder.analysis.comparing.compare import compare as compare_runs

    given = [parsed.reference, parsed.candidate, *filter(None, [parsed.floor])]
    match = dict(_pair(text) for text in parsed.match)
    rows = None if parsed.rows is None else rows_of(parsed.rows)
    _refuse_mixtures(parsed, given)
    try:
        inputs, batches = _first_inputs(None if parsed.data is None else made(parsed.data))
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
            floor=runs[2] if parsed.floor is not None else None,
            max_batches=parsed.max_batches,
            to_inputs=_to_inputs_of(runs, inputs),
            rows=rows,
        )
        page = None if parsed.report is None else difference.report(parsed.report)
    except (RecorderError, UsageError, OSError):
        raise
    except (Exception, SystemExit) as error:
        raise FailureError(one_line(error)) from error
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


def _refuse_mixtures(parsed: argparse.Namespace, given: Sequence[str]) -> None:
    nets = [target for target in given if _is_net(target)]
    if nets and parsed.data is None:
        raise UsageError(f"{nets[0]} needs batches to run on: name them with --data MODULE:NAME")
    if not nets and parsed.data is not None:
        raise UsageError("--data is for nets, and these are recordings: leave it out")
    if parsed.layers is not None and not _is_net(parsed.reference):
        raise UsageError("--layers is for a reference that is a net: leave it out")


def _first_inputs(batches: Any) -> tuple[Inputs | None, Any]:
    """Return the nets' inputs for the first batch, and all batches including the first."""
    if batches is None:
        return None, None
    from scio_recorder.recording.feed import Feed

    feed = Feed(batches)
    iterator = iter(batches)
    first = next(iterator, _NOTHING)
    if first is _NOTHING:
        raise UsageError("--data gives no batches")
    return feed.inputs(first), chain([first], iterator) if iterator is batches else batches


def _run(target: str, parsed: argparse.Namespace, inputs: Inputs | None) -> Any:
    """Return a recorder of a net, or a recording."""
    from scio_recorder.recorder.recorder import Recorder
    from scio_recorder.recording import open_recording

    if inputs is None or not _is_net(target):
        return open_recording(recording_at(target, other="; a net is MODULE:NAME"))
    net = net_of(target, is_eval=not parsed.train)
    args, kwargs = _in_dtype_of(net, inputs)
    return Recorder(net, input_data=kwargs or args, force_static_flow=not parsed.allow_dynamic_flow)


def _in_dtype_of(net: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs whose floating-point tensors have the dtype of the net's parameters."""
    found = (one.dtype for one in net.parameters() if one.is_floating_point())
    dtype = next(found, None)
    others = {one.dtype for one in tensors(inputs) if one.is_floating_point()} - {dtype}
    if dtype is None or not others:
        return inputs
    fitted: Inputs = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    return fitted


def _to_inputs_of(runs: Sequence[Any], inputs: Inputs | None) -> list[Callable[[Any], Any]] | None:
    """Return a function of the batch for each run's inputs, if the dtypes differ."""
    from scio_recorder.recording.feed import Feed

    nets = [getattr(run, "net", None) for run in runs]
    if inputs is None or all(net is None or _in_dtype_of(net, inputs) is inputs for net in nets):
        return None
    feed = Feed([])

    def given_to(net: nn.Module | None, batch: Any) -> Any:
        found = feed.inputs(batch)
        return tuple(found if net is None else _in_dtype_of(net, found))

    return [partial(given_to, net) for net in nets]

"""The command line over the library, ``scio-recorder COMMAND``."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import getdoc
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from scio_recorder.command_line.command_arguments import (
    BrokenOffError,
    FailureError,
    UsageError,
    add_flow,
    add_run,
    dtype_of,
    load,
    made,
    net_of,
    one_line,
    recording_at,
    rows_of,
    size,
    whole_from,
)
from scio_recorder.command_line.command_output import (
    FAILED,
    INTERRUPTED,
    TERMINATED,
    WIDTH,
    WIDTH_OF_FIGURES,
    WRONG_USE,
    command_message,
    command_warnings,
    layer_table,
    plain,
    print_line,
)
from scio_recorder.command_line.compare_command import add_compare, compare
from scio_recorder.display.progress import lines_every, progress_bar
from scio_recorder.errors import RecorderError, RecordingError
from scio_recorder.layer import counted
from scio_recorder.stores.disk_format.medium import is_url

# Seconds between progress lines if there is no terminal.
SECONDS = 10.0


def run(parsed: argparse.Namespace) -> int:
    """Run a command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # If the lines of a table can't be encoded, its text should still be printed.
        sys.stdout.reconfigure(errors="replace")
    # As ``python -m`` does: what is named may lie there, and may import more from there.
    sys.path.insert(0, os.getcwd())
    try:
        with lines_every(SECONDS), command_warnings():
            status: int | None = parsed.run(parsed, Console())
        sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        text, status, is_broken_off = "interrupted", INTERRUPTED, True
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        text, status, is_broken_off = "terminated", TERMINATED, True
    except (UsageError, FailureError, RecorderError, OSError) as error:
        if parsed.traceback:
            traceback.print_exc()
        notes = (note.removesuffix(".") for note in getattr(error, "__notes__", ()))
        text = f"error: {'. '.join([command_message(str(error)), *notes])}"
        status = parsed.failed if isinstance(error, FailureError | OSError) else WRONG_USE
        is_broken_off = isinstance(error, BrokenOffError)
    # Outside of the exception, which holds the net: an error while looking for the recording would
    # hold both until the interpreter exits.
    text += _way_on(parsed) if is_broken_off else ""
    print(f"scio-recorder: {text}", file=sys.stderr)
    _drop_output()
    return status


def _way_on(parsed: argparse.Namespace) -> str:
    """Say how to continue with what a collection has on disk, if there is anything."""
    from scio_recorder.recording.resuming import what_is_durable

    if parsed.run is not collect:
        return ""
    text = what_is_durable(parsed.out, parsed.parts)
    return f"; {command_message(text)}" if text else ""


def _drop_output() -> None:
    """Keep Python from trying again at exit to write output that could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parsed_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments, or exit the program if they can't be parsed."""
    # Without a word, the commands are listed.
    words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    parser = argparse.ArgumentParser(
        prog="scio-recorder",
        description="Record and change what happens inside a PyTorch network.",
    )
    with suppress(PackageNotFoundError):
        parser.add_argument("--version", action="version", version=version("scio-recorder"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_net(_command(commands, summary))
    _add_collect(_command(commands, collect))
    for run in (status, inspect, verify, report):
        command = _command(commands, run)
        what = "the recording: a folder, or a URL such as s3://bucket/run"
        command.add_argument("path", metavar="PATH", help=what)
    command.add_argument("--output", metavar="FILE", help="the page to write (PATH.html)")
    command.add_argument("--title", help="its heading; by default the type of the net")
    add_compare(_command(commands, compare))
    command = _command(commands, demo)
    add = command.add_argument
    add("--seed", type=whole_from(0), default=0, help="decides everything random (0)")
    add("--epochs", type=whole_from(1), default=15, help="length of the training (15)")
    return parser.parse_args(words)


def _command(commands: Any, run: Callable[..., int | None]) -> argparse.ArgumentParser:
    """Add a command that has a function's name and is described by its docstring."""
    # Python's option -OO removes docstrings.
    text = getdoc(run) or run.__name__
    short = text.partition("\n")[0].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(
        run.__name__, help=f"{short[0].lower()}{short[1:]}", description=text
    )
    parser.set_defaults(run=run, failed=FAILED)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def _add_net(command: argparse.ArgumentParser) -> None:
    command.add_argument("net", metavar="MODULE:NAME", help="the net, such as mynets:build")
    given = command.add_mutually_exclusive_group(required=True)
    what = "shape of an input, batch first, such as 1,3,32,32; once for each input"
    given.add_argument("--input-size", type=size, action="append", metavar="N,C,...", help=what)
    what = "the input itself: a tensor, a tuple, a dict of keywords, or a function that makes it"
    given.add_argument("--input-data", metavar="MODULE:NAME", help=what)
    what = "dtype of the inputs of --input-size, such as int64; once for all or once for each"
    command.add_argument("--dtype", type=dtype_of, action="append", help=what)
    add_flow(command)


def _add_collect(command: argparse.ArgumentParser) -> None:
    _add_net(command)
    add_run(command)
    add, number = command.add_argument, whole_from(1)
    what = "the batches: an iterable such as a DataLoader, or a function that makes one"
    add("--data", metavar="MODULE:NAME", required=True, help=what)
    what = "fill the folder together with others that run this command; --data is then a function "
    add("--parts", type=number, metavar="N", help=f"{what}of the part, from 0 to N - 1")
    what = "labels such as 1-3, qualified names, or globs over names such as 'layer4.*'"
    add("--layers", nargs="+", required=True, metavar="LAYER", help=what)
    what = "the folder to write, or a place in a bucket such as s3://bucket/run"
    add("--out", "--store", dest="out", required=True, metavar="PATH", help=what)
    add("--every", type=number, metavar="N", default=1, help="take every n-th batch (1)")
    add("--keep-dtype", type=dtype_of, metavar="DTYPE", help="kept dtype, such as bfloat16")
    add("--resume", action="store_true", help="continue an interrupted recording")


def summary(parsed: argparse.Namespace, console: Console) -> None:
    """Print the labelled architecture of a net.

    MODULE is imported, from the current folder if it is there; NAME is a net, or a class or
    function that makes one when called without arguments.
    """
    console.width = max(console.width, WIDTH)
    console.print(_recorder(parsed))


def _recorder(parsed: argparse.Namespace, *, is_eval: bool = False) -> Any:
    # Imported here so that --help and wrong use answer at once.
    from scio_recorder.recorder.recorder import Recorder

    if parsed.input_data is not None and parsed.dtype:
        raise UsageError(
            "--dtype goes with --input-size; the data of --input-data has its own dtype"
        )
    net = net_of(parsed.net, is_eval=is_eval)
    return Recorder(net, force_static_flow=not parsed.allow_dynamic_flow, **_inputs(parsed))


def collect(parsed: argparse.Namespace, console: Console) -> None:
    """Record layers of a net over a dataset, and write them to a folder.

    --resume continues an interrupted recording. With --parts any number of these commands, on any
    machines that see the folder, share the work, and continue what others have left.
    """
    from scio_recorder.workers.parts import terminable

    rnet = _recorder(parsed, is_eval=not parsed.train)
    rnet.record(*parsed.layers)
    options: dict[str, Any] = {
        "store": f"disk:{parsed.out}",
        "rows": None if parsed.rows is None else rows_of(parsed.rows),
        "every": parsed.every,
        "max_batches": parsed.max_batches,
        "dtype": parsed.keep_dtype,
    }
    if parsed.parts is None:
        run = partial(rnet.collect, made(parsed.data), resume=parsed.resume, **options)
    else:
        run = partial(rnet.collect_parts, load(parsed.data), parsed.parts, **options)
    try:
        with terminable():
            recording = run()
    except RecordingError as error:
        # Either the disk failed, or the folder is another recording's.
        is_failure = isinstance(error.__cause__, OSError)
        raise (FailureError if is_failure else UsageError)(str(error)) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            raise
        if not isinstance(error, RecorderError):
            raise BrokenOffError(one_line(error)) from error
        if error.__cause__ is None:
            raise
        # The loader or the net has failed.
        raise BrokenOffError(" ".join(str(error).splitlines())) from error
    console.print(_title(recording))
    console.print(recording)


def status(parsed: argparse.Namespace, console: Console) -> None:
    """Show the progress of a recording that processes fill in parts.

    The rate is the one that the processes report. The time left is an estimate for as many
    processes as there are now.
    """
    from scio_recorder.stores.disk_format.description import medium_at
    from scio_recorder.workers.parts import progress_of

    with closing(medium_at(recording_at(parsed.path))) as medium:
        found = progress_of(medium)
    table = Table("part", "held by", "process", "since", "", box=None)
    for one in found.holders:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since))
        state = "gone, to be taken over" if one.is_gone else ""
        table.add_row(str(one.part), plain(one.host), str(one.pid), since, state)
    left = found.seconds_left
    text = f"{found.num_done:,} of {found.num_parts:,} parts are complete"
    if found.num_done < found.num_parts:
        held = len(found.holders)
        text += f", {held:,} are held; "
        # Processes report their rate with each part that they end.
        rate = found.samples_per_second
        text += f"{rate:,.0f} samples/s, " if rate or not held else "rate and "
        text += "time left unknown" if left is None else f"{timedelta(seconds=round(left))} left"
    print_line(console, text)
    if found.holders:
        console.print(table)


def inspect(parsed: argparse.Namespace, console: Console) -> None:
    """Show what a recording on disk holds."""
    from scio_recorder.recording import open_recording

    recording = open_recording(recording_at(parsed.path))
    console.width = max(console.width, WIDTH_OF_FIGURES)
    console.print(layer_table(recording, _title(recording)))


def verify(parsed: argparse.Namespace, console: Console) -> None:
    """Read a whole recording, compare its checksums, and look for ids that are there twice."""
    from scio_recorder.recording.recording import opened
    from scio_recorder.stores.disk_format.reader import RunReader

    reports = []
    with (
        RunReader(recording_at(parsed.path)) as reader,
        progress_bar("verifying files", None) as advance,
    ):
        for one in reader.verify():
            reports.append(one)
            advance(0, one.num_bytes)
        damaged = [one.problem for one in reports if one.problem is not None]
        if damaged:
            raise FailureError("; ".join(damaged))
        # Until shards are put together, each of them has the ids of all processes.
        is_of_a_net = "architecture" in reader.header
        repeated = opened(reader, {}).sample_ids.repeated() if is_of_a_net else None
    if repeated is not None:
        raise FailureError(f"every checksum is right, but two samples have the id {repeated!r}")
    num_bytes = sum(one.num_bytes for one in reports)
    state = "complete" if reader.complete else "interrupted: collect --resume goes on"
    text = f"{counted(len(reports), 'file')}, {decimal(num_bytes)}: all checksums match; {state}"
    print_line(console, text)


def report(parsed: argparse.Namespace, console: Console) -> None:
    """Write an HTML page that shows a recording.

    The page is one file: statistics, histograms, dead and saturated units, the architecture.
    """
    from scio_recorder.recording import open_recording

    path = recording_at(parsed.path)
    # Beside the folder, which holds only the recording; for a bucket, in the current folder.
    beside = os.path.basename(path.rstrip("/")) if is_url(path) else os.path.normpath(path)
    page = open_recording(path).report(parsed.output or f"{beside}.html", title=parsed.title)
    print_line(console, f"wrote {page}")


def _title(recording: Any) -> str:
    state = "complete" if recording.complete else "interrupted"
    rows = f", {counted(recording.num_rows, 'row')}" if recording.has_rows else ""
    rows += f" ({', '.join(recording.rows)})" if recording.rows else ""
    return f"{recording.path}: {counted(recording.num_samples, 'sample')}{rows}, {state}"


def demo(parsed: argparse.Namespace, console: Console) -> None:
    """Train a small net on handwritten digits and detect unknown ones.

    The net is trained on the digits 0 to 6. Scores that look inside it should notice the digits 7
    to 9. The demo needs scikit-learn, but no internet connection.
    """
    from scio_recorder.command_line.demo import run_demo

    run_demo(console, seed=parsed.seed, epochs=parsed.epochs)


def _inputs(parsed: argparse.Namespace) -> dict[str, Any]:
    if parsed.input_data is not None:
        return {"input_data": made(parsed.input_data)}
    sizes, dtypes = parsed.input_size, parsed.dtype or [torch.float32]
    if len(dtypes) not in (1, len(sizes)):
        raise UsageError(f"{len(dtypes)} --dtype for {len(sizes)} --input-size: give one or each")
    return {"input_size": sizes, "dtypes": dtypes * (len(sizes) // len(dtypes))}

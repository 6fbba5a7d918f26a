"""The commands, as functions of their parsed arguments, and how they end."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal

from scio_recorder.command_line.command_objects import (
    UsageError,
    dtype_of,
    load,
    made,
    net_of,
    one_line,
    recording_at,
    rows_of,
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
    in_one_line,
    layer_table,
    print_line,
)
from scio_recorder.command_line.compare_command import compare
from scio_recorder.display.outline import Listing
from scio_recorder.display.progress import lines_every, progress_bar
from scio_recorder.errors import CollectError, RecorderError, RecordingError
from scio_recorder.layer import counted
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.recording import open_recording
from scio_recorder.recording.collection import what_is_durable
from scio_recorder.recording.recording import opened
from scio_recorder.stores.disk_format.description import is_url, medium_at
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.workers.parts import progress_of, terminable

# Seconds between progress lines if there is no terminal.
SECONDS = 10.0


def run(parsed: Namespace) -> int:
    """Run a command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # If the lines of a table can't be encoded, its text should still be printed.
        sys.stdout.reconfigure(errors="replace")
    # As ``python -m`` does: what is named may lie there, and may import more from there.
    sys.path.insert(0, os.getcwd())
    try:
        with lines_every(SECONDS), command_warnings():
            status: int | None = _COMMANDS[parsed.command](parsed, Console())
        sys.stdout.flush()
        return status or 0
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if parsed.traceback:
            traceback.print_exc()
        text, status = _outcome(parsed, error)
    # Outside of the exception, which holds the net: an error while looking for the recording would
    # hold both until the interpreter exits.
    if parsed.command == "collect" and status != WRONG_USE:
        durable = what_is_durable(parsed.out, parsed.parts)
        text += f"; {command_message(durable)}" if durable else ""
    print(f"scio-recorder: {text}", file=sys.stderr)
    _drop_output()
    return status


def _outcome(parsed: Namespace, error: BaseException) -> tuple[str, int]:
    """Return what is printed about an error, and the exit status."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, SystemExit) and error.code == TERMINATED:
        return "terminated", TERMINATED
    # A caller that asks whether runs differ must not mistake a failure for an answer.
    failed = WRONG_USE if parsed.command == "compare" else FAILED
    if not isinstance(error, UsageError | RecorderError | OSError):
        return f"error: {one_line(error)}", failed
    notes = (note.removesuffix(".") for note in getattr(error, "__notes__", ()))
    text = ". ".join([command_message(in_one_line(str(error))), *notes])
    if parsed.command == "compare":
        # Nets are labelled with the first batch.
        text = text.replace("--input-data", "--data")
    return f"error: {text}", failed if _is_failure(parsed, error) else WRONG_USE


def _is_failure(parsed: Namespace, error: Exception) -> bool:
    """Whether a command was right, and the loader, the net, the disk or its data were not."""
    if isinstance(error, RecordingError):
        # Without a fault of the system, the folder is another recording's.
        return parsed.command != "collect" or isinstance(error.__cause__, OSError)
    if isinstance(error, CollectError):
        return error.__cause__ is not None
    return not isinstance(error, UsageError | RecorderError)


def _drop_output() -> None:
    """Keep Python from trying again at exit to write output that could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summary(parsed: Namespace, console: Console) -> None:
    """Print the labelled architecture of a net, or the operations inside its layers."""
    console.width = max(console.width, WIDTH)
    rnet = _recorder(parsed)
    console.print(rnet if parsed.operations is None else rnet.operations(*parsed.operations))


def _recorder(parsed: Namespace, *, is_eval: bool = False) -> Recorder:
    if parsed.input_data is not None and parsed.dtype:
        raise UsageError(
            "--dtype goes with --input-size; the data of --input-data has its own dtype"
        )
    net = net_of(parsed.net, is_eval=is_eval)
    return Recorder(net, force_static_flow=not parsed.allow_dynamic_flow, **_inputs(parsed))


def _inputs(parsed: Namespace) -> dict[str, Any]:
    if parsed.input_data is not None:
        return {"input_data": made(parsed.input_data)}
    sizes, dtypes = parsed.input_size, [*map(dtype_of, parsed.dtype)] or [torch.float32]
    if len(dtypes) not in (1, len(sizes)):
        raise UsageError(f"{len(dtypes)} --dtype for {len(sizes)} --input-size: give one or each")
    of_all = dtypes * (len(sizes) // len(dtypes))
    return {"input_size": sizes if len(sizes) > 1 else sizes[0], "dtypes": of_all}


def collect(parsed: Namespace, console: Console) -> None:
    """Record layers of a net over a dataset, and write them to a folder."""
    if not parsed.out or os.path.isfile(parsed.out):
        raise UsageError(f"--out {parsed.out!r}: name a folder, or a URL such as s3://bucket/run")
    options: dict[str, Any] = {
        "store": f"disk:{parsed.out}",
        "rows": rows_of(parsed.rows),
        "every": parsed.every,
        "max_batches": parsed.max_batches,
        "dtype": parsed.keep_dtype and dtype_of(parsed.keep_dtype),
    }
    rnet = _recorder(parsed, is_eval=not parsed.train)
    rnet.record(*parsed.layers)
    data = made(parsed.data) if parsed.parts is None else load(parsed.data)
    with terminable():
        if parsed.parts is None:
            recording = rnet.collect(data, resume=parsed.resume, **options)
        else:
            recording = rnet.collect_parts(data, parsed.parts, **options)
    console.print(_title(recording))
    console.print(recording)


def status(parsed: Namespace, console: Console) -> None:
    """Show the progress of a recording that processes fill in parts."""
    with closing(medium_at(recording_at(parsed.path))) as medium:
        found = progress_of(medium)
    text, holders = f"{found.num_done:,} of {found.num_parts:,} parts are complete", found.holders
    if found.num_done < found.num_parts:
        text += f", {len(holders):,} are held"
    rows = []
    for one in holders:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since))
        state = "gone, to be taken over" if one.is_gone else ""
        rows.append([str(one.part), one.host, str(one.pid), since, state])
    console.width = max(console.width, WIDTH)
    console.print(Listing(text, ("part", "held by", "process", "since", ""), (), rows))


def inspect(parsed: Namespace, console: Console) -> None:
    """Show what a recording on disk holds."""
    recording = open_recording(recording_at(parsed.path))
    console.width = max(console.width, WIDTH_OF_FIGURES)
    console.print(layer_table(recording, _title(recording)))


def verify(parsed: Namespace, console: Console) -> None:
    """Read a whole recording, compare its checksums, and look for ids that are there twice."""
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
            raise RecordingError("; ".join(damaged))
        # Until shards are put together, each of them has the ids of all processes.
        is_of_a_net = "architecture" in reader.header
        repeated = opened(reader, {}).sample_ids.repeated() if is_of_a_net else None
    if repeated is not None:
        raise RecordingError(f"every checksum is right, but two samples have the id {repeated!r}")
    num_bytes = sum(one.num_bytes for one in reports)
    state = "complete" if reader.complete else "interrupted: collect --resume goes on"
    text = f"{counted(len(reports), 'file')}, {decimal(num_bytes)}: all checksums match; {state}"
    print_line(console, text)


def report(parsed: Namespace, console: Console) -> None:
    """Write an HTML page that shows a recording."""
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


def demo(parsed: Namespace, console: Console) -> None:
    """Train a small net on handwritten digits and detect unknown ones."""
    from scio_recorder.command_line.demo import run_demo

    folder = Path(parsed.out or tempfile.mkdtemp(prefix="scio-recorder-demo-"))
    run_demo(console, seed=parsed.seed, epochs=parsed.epochs, folder=folder)


_COMMANDS = {
    one.__name__: one for one in (summary, collect, status, inspect, verify, report, compare, demo)
}

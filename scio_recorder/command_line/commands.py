"""The commands, as functions of their parsed arguments."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from torch import nn

from scio_recorder import Recorder, open_recording
from scio_recorder.analysis.comparing.compare import compare as compare_runs
from scio_recorder.command_line.command_words import (
    DIFFERENT,
    UsageError,
    dtype_of,
    load,
    made,
    net_of,
    print_line,
    recording_at,
    rows_of,
)
from scio_recorder.display.outline import Listing, full_name
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import RecordingError
from scio_recorder.layer import counted
from scio_recorder.lowlevel import Feed, Inputs, in_words
from scio_recorder.stores.files import RunReader, is_url, medium_at
from scio_recorder.tensors import map_tensors, tensors
from scio_recorder.workers.parts import progress_of, terminable

# The least columns of characters that tables are given, and those of figures.
WIDTH, WIDTH_OF_FIGURES = 100, 120
_FAULTS = ("nan", "inf")
_FIGURES = ("bytes", "mean", "std", "min", "max", "zeros", *_FAULTS)


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
    sizes, dtypes = parsed.input_size, [*map(dtype_of, parsed.dtype)]
    if len(dtypes) not in (0, 1, len(sizes)):
        raise UsageError(f"{len(dtypes)} --dtype for {len(sizes)} --input-size: give one or each")
    of_all = dtypes * len(sizes) if len(dtypes) == 1 else dtypes
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
        progress = progress_of(medium)
    text = f"{progress.num_done:,} of {progress.num_parts:,} parts are complete"
    holders = progress.holders
    if progress.num_done < progress.num_parts:
        text += f", {len(holders):,} are held"
    rows = []
    for holder in holders:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        state = "gone, to be taken over" if holder.is_gone else ""
        rows.append([str(holder.part), holder.host, str(holder.pid), since, state])
    console.width = max(console.width, WIDTH)
    console.print(Listing(text, ("part", "held by", "process", "since", ""), (), rows))


def inspect(parsed: Namespace, console: Console) -> None:
    """Show what a recording on disk holds."""
    recording = open_recording(recording_at(parsed.path))
    console.width = max(console.width, WIDTH_OF_FIGURES)
    console.print(_layer_table(recording, _title(recording)))


def _layer_table(recording: Any, title: str) -> Listing:
    """Return the table of a recording's layers, in the order of execution."""
    rows = recording.layer_rows()
    figures = [
        name for name in _FIGURES if name not in _FAULTS or any(row.get(name) for row in rows)
    ]
    lines = []
    for row in rows:
        name = full_name(recording.architecture[row["label"]])
        # Reduced layers have no samples to describe.
        shape = str(list(row["shape"])) if "shape" in row else "reduced"
        texts = [row["label"], name, row["type"], shape, row.get("dtype", "")]
        lines.append([*texts, *(_figure(name, row.get(name)) for name in figures)])
    made = in_words(recording.made_with)
    notes = [f"Made with {made}."] * bool(made)
    names = ("label", "name", "type", "shape", "dtype")
    return Listing(title, names, figures, lines, notes=notes)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return decimal(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def verify(parsed: Namespace, console: Console) -> None:
    """Read a whole recording, compare its checksums, and look for ids that are there twice."""
    reports = []
    with (
        RunReader(recording_at(parsed.path)) as reader,
        progress_bar("verifying files", None) as advance,
    ):
        for report in reader.verify():
            reports.append(report)
            advance(0, report.num_bytes)
        damaged = [report.problem for report in reports if report.problem is not None]
        if damaged:
            raise RecordingError("; ".join(damaged))
        repeated = reader.sample_ids.repeated()
    if repeated is not None:
        raise RecordingError(f"every checksum is right, but two samples have the id {repeated!r}")
    num_bytes = sum(report.num_bytes for report in reports)
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


def compare(parsed: Namespace, console: Console) -> int:
    """Find the layers in which two runs differ, and the one that makes the difference."""
    targets = [parsed.reference, parsed.candidate]
    match = dict(_pair(text) for text in parsed.match)
    rows = rows_of(parsed.rows)
    _refuse_mixtures(parsed, targets)
    inputs, batches = _first_inputs(parsed.data)
    runs = [_run(target, parsed, inputs) for target in targets]
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
        local=parsed.local,
    )
    page = None if parsed.report is None else difference.report(parsed.report)
    if console.is_terminal:
        console.print(difference)
    else:
        print_line(console, str(difference))
    if page is not None:
        print_line(console, f"wrote {page}")
    is_equal = not difference.faults if parsed.local else difference.first is None
    return 0 if is_equal else DIFFERENT


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise UsageError(f"--match {text!r}: write it like 'layers.*=h.*'")
    return name, other


def _is_net(target: str) -> bool:
    return ":" in target and not is_url(target) and not os.path.exists(target)


def _refuse_mixtures(parsed: Namespace, targets: Sequence[str]) -> None:
    nets = [target for target in targets if _is_net(target)]
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
    return next((weight.dtype for weight in parameters if weight.is_floating_point()), None)


def _fitted(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Return inputs whose floating-point tensors have a net's dtype."""
    if dtype is None:
        return inputs
    fitted: Inputs = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    return fitted


def _to_inputs_of(runs: Sequence[Any], inputs: Inputs | None) -> list[Callable[[Any], Any]] | None:
    """Return a function of the batch for each run's inputs, if the dtypes differ."""
    dtypes_of_inputs = {x.dtype for x in tensors(inputs) if x.is_floating_point()}
    dtypes = [_dtype_of(run) for run in runs]
    if not dtypes_of_inputs or dtypes_of_inputs >= {*dtypes} - {None}:
        return None
    feed = Feed([])

    def inputs_in(dtype: torch.dtype | None, batch: Any) -> Any:
        return tuple(_fitted(feed.inputs(batch), dtype))

    return [partial(inputs_in, dtype) for dtype in dtypes]


def demo(parsed: Namespace, console: Console) -> None:
    """Train a small net on handwritten digits and detect unknown ones."""
    from scio_recorder.command_line.demo import run_demo

    folder = Path(parsed.out or tempfile.mkdtemp(prefix="scio-recorder-demo-"))
    run_demo(console, seed=parsed.seed, epochs=parsed.epochs, folder=folder)

"""Reading a recording in random order, compared with one sequential verified read.

Run ``python benchmarks/loader.py PATH [--rounds 10] [--mebibytes 512] [--features 1024]``; PATH is
a folder on the disk to be measured. Files are in the system's cache, as newly written ones are.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import threading
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved, timed
from torch import nn

from scio_recorder import Recorder, Recording, open_recording
from scio_recorder.stores import Disk

BATCH_SIZE = 1024
INDEXED = 512


def collect(path: Path, mebibytes: int, features: int) -> None:
    rnet = Recorder(nn.Identity(), input_size=(1, features))
    rnet.record("0-1")
    rows = (4 << 20) // (4 * features)
    batches = (torch.randn(rows, features) for _ in range(mebibytes // 4))
    rnet.collect(batches, store=Disk(path))


def read_whole(path: Path) -> None:
    """Read all in order, into new memory."""
    _ = open_recording(path)["0-1"][:]


def read_parts(path: Path) -> None:
    """Read all in order, in parts so small that they stay in the processor's cache."""
    for part in open_recording(path).parts("0-1"):
        del part


def read_into(path: Path, memory: torch.Tensor) -> None:
    """Read all in order, as fast as possible: into the same memory, which was touched before."""
    samples = open_recording(path)["0-1"]
    out, row_bytes = memory.numpy(), samples.nbytes // len(samples)
    rows = len(out) // row_bytes
    for start in range(0, len(samples), rows):
        count = min(rows, len(samples) - start)
        samples.reader.read_into(out[: count * row_bytes], samples.layer, start)


def read_batches(path: Path, buffer_bytes: int, shuffle: bool) -> None:
    recording = open_recording(path)
    for batch in recording.loader(
        "0-1", batch_size=BATCH_SIZE, shuffle=shuffle, buffer_bytes=buffer_bytes
    ):
        del batch


def read_by_index(path: Path, together: int) -> float:
    """Return the seconds for a row by random indices, in a recording that was just opened."""
    samples = open_recording(path)["0-1"]
    chosen = random.sample(range(len(samples)), INDEXED)

    def read() -> None:
        for start in range(0, INDEXED, together):
            some = chosen[start : start + together]
            _ = samples[some[0]] if together == 1 else samples[some]

    return timed(read) / INDEXED


def resident_beside_buffer(path: Path, buffer_bytes: int) -> float:
    """Return (the highest resident memory - that before) / buffer."""
    process, peak, done = psutil.Process(), 0, threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    read_batches(path, buffer_bytes, shuffle=True)
    done.set()
    watcher.join()
    return (peak - before) / buffer_bytes


def mixing(recording: Recording, buffer_bytes: int) -> tuple[float, float]:
    """Return how far neighbours lie apart in the recording, and rows from where they were.

    Both beside a permutation of all rows, of which they are a third of the number of rows.
    """
    loader = recording.loader(
        "0-1", batch_size=BATCH_SIZE, shuffle=True, buffer_bytes=buffer_bytes, with_rows=True
    )
    rows = torch.cat([known["sample"] for _, known in loader]).double()
    third = len(rows) / 3
    neighbours = rows.diff().abs().mean().item()
    places = (rows - torch.arange(len(rows))).abs().mean().item()
    return neighbours / third, places / third


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--features", type=int, default=1024)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    folder = parsed.path / "scio-recorder-benchmark"
    folder.mkdir()
    run, buffer_bytes = folder / "run", (parsed.mebibytes << 20) // 4
    table = Table(title=f"loader, {parsed.rounds} rounds, torch {torch.__version__}")
    for heading in ("ours", "beside", "ratio", "quartiles", "bar"):
        table.add_column(heading)

    def add(ours: str, beside: str, ratios: list[float], bar: str) -> None:
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(ours, beside, f"{middle:.3g}", f"{low:.3g} to {high:.3g}", bar)

    try:
        collect(run, parsed.mebibytes, parsed.features)
        resident = resident_beside_buffer(run, buffer_bytes)
        used = torch.ones(64 << 20, dtype=torch.uint8)
        arms = {
            "shuffled": lambda: read_batches(run, buffer_bytes, shuffle=True),
            "all in order, verified": lambda: read_whole(run),
            "by loader(shuffle=False)": lambda: read_batches(run, buffer_bytes, shuffle=False),
            "by parts(), memory in cache": lambda: read_parts(run),
            "into 64 MiB used before": lambda: read_into(run, used),
        }
        spent = interleaved(arms, parsed.rounds)
        for arm in list(arms)[1:]:
            pairs = zip(spent[arm], spent["shuffled"], strict=True)
            bar = ">= 0.5" if arm == "all in order, verified" else ""
            add("shuffled, rate", arm, [a / b for a, b in pairs], bar)
        rows = len(open_recording(run)["0-1"])
        for together in (1, 64):
            by_index = [read_by_index(run, together) for _ in range(max(2, parsed.rounds // 2))]
            ratios = [row * rows / seconds for row in by_index for seconds in spent["shuffled"]]
            add("shuffled, rate", f"by index, {together} at a time", ratios, "")
        add("resident memory", "buffer", [resident] * 2, "<= 1.1")
        neighbours, places = mixing(open_recording(run), buffer_bytes)
        add("distance of neighbours", "full permutation", [neighbours] * 2, "")
        add("distance from its place", "full permutation", [places] * 2, "")
    finally:
        shutil.rmtree(folder)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

"""The cost of parts, beyond their data.

Run ``python benchmarks/parts.py PATH [--rounds 15] [--opened 100000]``; PATH is a folder on the
disk to be measured. Three things are measured: the rate of two processes that fill one recording in
parts, beside two that fill one each with `collect`, interleaved; the extra cost of a part of one
small batch over the same batch in one part; and the time to open a recording of many tiny parts,
before and after they are put together, in seconds of the processor. Their files are written without
waiting for the disk. Write ``--rounds 0`` to measure the last alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scio_recorder import Recorder, open_recording
from scio_recorder.layer import TensorSpec
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import folder as folders
from scio_recorder.stores.disk_format.description import (
    DESCRIPTION_NAME,
    chunk_name,
    manifest_name,
)
from scio_recorder.stores.disk_format.folder import Folder
from scio_recorder.stores.disk_format.reader import scan
from scio_recorder.stores.disk_format.tensor_file import file_writer
from scio_recorder.workers.parts import progress_of

LAYERS, FEATURES, ROWS, NUM_BATCHES = 24, 256, 32, 200
NUM_PROCESSES, PARTS_OF_EACH = 2, 2
CHUNK_BYTES = 16 << 20


def recorder() -> Recorder:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)])
    rnet = Recorder(net, input_size=(ROWS, FEATURES), verbose=0)
    rnet.record(*(str(i) for i in range(LAYERS)))
    return rnet


def work(rank: int, orders: Any, barrier: Any) -> None:
    """Fill the folder of each order, in parts or alone."""
    rnet = recorder()
    data = [torch.randn(ROWS, FEATURES) for _ in range(NUM_BATCHES)]
    share = NUM_BATCHES // PARTS_OF_EACH
    num_parts = NUM_PROCESSES * PARTS_OF_EACH
    for path, in_parts in iter(orders.get, None):
        barrier.wait()
        if in_parts:
            store = Disk(path, CHUNK_BYTES)
            rnet.collect_parts(lambda part: data[:share], num_parts, store=store, progress=False)
        else:
            rnet.collect(data, store=Disk(f"{path}-{rank}", CHUNK_BYTES), progress=False)
        barrier.wait()


def rate_of_two(folder: Path, rounds: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(NUM_PROCESSES + 1, timeout=120)
    queues = [context.Queue() for _ in range(NUM_PROCESSES)]
    for rank, queue in enumerate(queues):
        context.Process(target=work, args=(rank, queue, barrier), daemon=True).start()
    ratios = []
    # The first round warms up.
    for number in range(rounds + 1):
        spent = {}
        for in_parts in random.sample([True, False], 2):
            for queue in queues:
                queue.put((str(folder / f"{number}-{in_parts}"), in_parts))
            barrier.wait()
            start = time.perf_counter()
            barrier.wait()
            spent[in_parts] = time.perf_counter() - start
        for done in folder.iterdir():
            shutil.rmtree(done)
        ratios.append(spent[False] / spent[True])
    for queue in queues:
        queue.put(None)
    return ratios[1:]


def cost_of_a_part(folder: Path, rounds: int) -> list[float]:
    """Return seconds a part: 16 parts of one batch, less one part of 16 batches."""
    rnet, batch, number = recorder(), torch.randn(ROWS, FEATURES), 16
    costs = []
    for attempt in range(rounds + 1):
        spent = {}
        for parts in random.sample([1, number], 2):
            path = folder / f"{attempt}-{parts}"
            batches = [batch] * (number // parts)
            start = time.perf_counter()
            rnet.collect_parts(
                lambda part, batches=batches: batches, parts, store=f"disk:{path}", progress=False
            )
            spent[parts] = time.perf_counter() - start
            shutil.rmtree(path)
        costs.append((spent[number] - spent[1]) / (number - 1))
    return costs[1:]


def time_to_open(folder: Path, number: int) -> dict[str, float]:
    """Return seconds of the processor to open many parts."""
    folders.fsync = lambda descriptor: os.fstat(descriptor) and None
    path = str(folder / "many")
    rnet = recorder()
    rnet.record("0")
    rnet.collect_parts(
        lambda part: [torch.zeros(1, FEATURES)], 1, store=f"disk:{folder}/one", progress=False
    )
    run = scan(Folder(f"{folder}/one"))
    description = replace(
        run.description, world_size=number, layers={"1-1": TensorSpec((2,), torch.float32)}
    )
    Path(path).mkdir()
    many, rows = Folder(path), {"1-1": torch.ones(1, 2)}
    many.put(DESCRIPTION_NAME, "parts", file_writer({}, description.to_json()))
    for part in range(number):
        said = {**run.chunks[0][0].said, "ids": {"start": part * 10**12, "count": 1}}
        content = {**description.place(part, 0, 0), **said}
        known = many.put(chunk_name(part, 0), "parts", file_writer(rows, content))
        listed = {**description.manifest(part, 1, [known]), "commits": [said]}
        many.put(manifest_name(part), "parts", file_writer({}, listed))
    found = {}
    for name, work in {
        f"s to open {number:,} parts": lambda: open_recording(path),
        "s to say how many are complete": lambda: progress_of(many),
    }.items():
        # The processor's time: other work does not count.
        start = time.process_time()
        work()
        found[name] = time.process_time() - start
    recording = open_recording(path)
    assert recording.complete
    assert recording["1-1"][-1].tolist() == [1, 1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--opened", type=int, default=100_000)
    parsed = parser.parse_args()
    folder = parsed.path / "scio-recorder-benchmark"
    folder.mkdir()
    table = Table(title=f"parts, {parsed.rounds} rounds, torch {torch.__version__}")
    for heading in ("what", "median", "quartiles", "bar"):
        table.add_column(heading)
    try:
        if parsed.rounds:
            rates = statistics.quantiles(rate_of_two(folder, parsed.rounds), n=4)
            quartiles = f"{rates[0]:.2f} to {rates[2]:.2f}"
            table.add_row("2 in parts, beside 2 alone", f"{rates[1]:.2f}", quartiles, ">= 0.9")
            costs = statistics.quantiles(cost_of_a_part(folder, parsed.rounds), n=4)
            quartiles = f"{1e3 * costs[0]:.1f} to {1e3 * costs[2]:.1f}"
            table.add_row("ms for a part", f"{1e3 * costs[1]:.1f}", quartiles, "<= 50")
        if parsed.opened:
            for what, figure in time_to_open(folder, parsed.opened).items():
                table.add_row(what, f"{figure:.2g}", "", "")
    finally:
        shutil.rmtree(folder)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

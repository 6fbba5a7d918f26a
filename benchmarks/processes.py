"""Two processes that fill one recording, beside two that fill one each.

Run ``python benchmarks/processes.py PATH [--rounds 30]``; PATH is a folder on the disk to be
measured. Each process has one torch thread, a net of 24 times Linear(256, 256) of which every layer
is kept, and 100 batches of 32: 75 MiB. The processes live through all rounds, and start together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scio_recorder import Recorder
from scio_recorder.stores import Disk

LAYERS, FEATURES, ROWS, NUM_BATCHES = 24, 256, 32, 100
CHUNK_BYTES = 16 << 20
NUM_PROCESSES = 2


def work(rank: int, orders: Any, barrier: Any) -> None:
    """Collect into the folder of each order, alone or as one of several."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)])
    rnet = Recorder(net, input_size=(ROWS, FEATURES), verbose=0)
    rnet.record(*(str(i) for i in range(LAYERS)))
    first = rank * NUM_BATCHES * ROWS
    data = [
        (torch.randn(ROWS, FEATURES), range(start, start + ROWS))
        for start in range(first, first + NUM_BATCHES * ROWS, ROWS)
    ]
    for path, is_shared in iter(orders.get, None):
        store = (
            Disk(path, CHUNK_BYTES, rank=rank, world_size=NUM_PROCESSES)
            if is_shared
            else Disk(f"{path}-{rank}", CHUNK_BYTES)
        )
        barrier.wait()
        rnet.collect(data, store=store, sample_ids=lambda batch: batch[1], progress=False)
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parsed = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(NUM_PROCESSES + 1, timeout=120)
    queues = [context.Queue() for _ in range(NUM_PROCESSES)]
    workers = [
        context.Process(target=work, args=(rank, queue, barrier), daemon=True)
        for rank, queue in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    folder = parsed.path / "scio-recorder-benchmark"
    folder.mkdir()
    try:
        ratios = []
        # The first round warms up.
        for number in range(parsed.rounds + 1):
            spent = {}
            for is_shared in random.sample([True, False], 2):
                for queue in queues:
                    queue.put((str(folder / f"{number}-{is_shared}"), is_shared))
                barrier.wait()
                start = time.perf_counter()
                barrier.wait()
                spent[is_shared] = time.perf_counter() - start
            for done in folder.iterdir():
                shutil.rmtree(done)
            ratios.append(spent[False] / spent[True])
    finally:
        shutil.rmtree(folder)
    for queue in queues:
        queue.put(None)
    low, middle, high = statistics.quantiles(ratios[1:], n=4)
    table = Table(title=f"processes, {parsed.rounds} rounds, torch {torch.__version__}")
    for heading in ("ours", "beside", "ratio", "quartiles", "bar"):
        table.add_column(heading)
    beside = f"{NUM_PROCESSES} into one each, rate"
    quartiles = f"{low:.2f} to {high:.2f}"
    table.add_row(
        f"{NUM_PROCESSES} into one recording", beside, f"{middle:.2f}", quartiles, ">= 0.9"
    )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

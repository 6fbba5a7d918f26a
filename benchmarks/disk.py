"""Collecting into a folder, compared with writing and syncing the same bytes in the same chunks.

Run ``python benchmarks/disk.py PATH [--rounds 10]``; PATH is a folder on the disk to be measured.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from timing import timed
from torch import nn

from scio_recorder import Recorder, open_recording
from scio_recorder.stores import Disk

ROWS, FEATURES, NUM_BATCHES = 4096, 1024, 32
CHUNK_BYTES = 64 << 20
BATCH_BYTES = ROWS * FEATURES * 4


def collect(path: Path, batch: torch.Tensor) -> None:
    rnet = Recorder(nn.Identity(), input_size=(1, FEATURES))
    rnet.record("0-1")
    rnet.collect([batch] * NUM_BATCHES, store=Disk(path, chunk_bytes=CHUNK_BYTES))


def write(path: Path, batch: torch.Tensor) -> None:
    path.mkdir()
    content = np.concatenate([batch.numpy()] * (CHUNK_BYTES // BATCH_BYTES)).data.cast("B")
    for number in range(NUM_BATCHES * BATCH_BYTES // CHUNK_BYTES):
        descriptor = os.open(path / str(number), os.O_WRONLY | os.O_CREAT)
        done = 0
        while done < len(content):
            done += os.write(descriptor, content[done:])
        os.fsync(descriptor)
        os.close(descriptor)


def reading(folder: Path, batch: torch.Tensor, rounds: int) -> list[float]:
    """Return time(a batch read, its checksums compared) / time(the same through numpy.memmap).

    Both make an array of 16 MiB from a file that is in the system's cache, and both were opened
    just before, outside of the timing: the mapping is new, so that its pages are found for the
    first time, and so is the recording, so that the chunk's file is opened and its header and 16
    blocks are checked inside it.
    """
    plain = folder / "plain"
    np.concatenate([batch.numpy()] * 8).tofile(plain)
    collect(folder / "run", batch)
    os.sync()

    def mapped(first: int) -> float:
        values = np.memmap(plain, np.float32, "r", shape=(8 * ROWS, FEATURES))
        return timed(lambda: np.array(values[first : first + ROWS]))

    def recorded(first: int) -> float:
        samples = open_recording(folder / "run")["0-1"]
        return timed(lambda: samples[first : first + ROWS])

    ratios = []
    for number in range(rounds):
        spent = {}
        arms = [mapped, recorded]
        random.shuffle(arms)
        for arm in arms:
            spent[arm] = arm(number % 7 * ROWS)
        ratios.append(spent[recorded] / spent[mapped])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randn(ROWS, FEATURES)
    folder = parsed.path / "scio-recorder-benchmark"
    folder.mkdir()
    try:
        rates = []
        for number in range(parsed.rounds):
            arms = [("collect", collect), ("write", write)]
            random.shuffle(arms)
            spent = {}
            for name, arm in arms:
                spent[name] = timed(partial(arm, folder / f"{name}-{number}", batch))
                shutil.rmtree(folder / f"{name}-{number}")
            rates.append(spent["write"] / spent["collect"])
        rows = [
            ("collect, durable", "write and fsync, rate", rates, ">= 0.85"),
            (
                "read a batch, verified",
                "numpy.memmap, time",
                reading(folder, batch, 10 * parsed.rounds),
                "<= 1.5",
            ),
        ]
    finally:
        shutil.rmtree(folder)
    table = Table(title=f"disk, {parsed.rounds} rounds, torch {torch.__version__}")
    for heading in ("ours", "beside", "ratio", "quartiles", "bar"):
        table.add_column(heading)
    for ours, beside, ratios, bar in rows:
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(ours, beside, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", bar)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

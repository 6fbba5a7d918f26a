"""The time of recomputing beside a whole pass or dataset, and the memory that it saves.

Run ``python benchmarks/recompute.py [--rounds 30]``. Arms are interleaved in random order in one
process; the table shows the median of the ratios of each round, and their quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import timed
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scio_recorder import Recorder, Recording
from scio_recorder.stores import Host

Arm = Callable[[], object]
BLOCKS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(block() for _ in range(BLOCKS))).eval()
    x = torch.randn(8, 64, 128)
    rnet = Recorder(net, input_data=x[:1], verbose=0)
    table = Table(title=f"recompute, one thread, {rounds} rounds, torch {torch.__version__}")
    for heading in ("what", "beside", "ratio", "quartiles"):
        table.add_column(heading)
    rows = [*time_rows(rnet, x, rounds), *dataset_rows(rnet, max(3, rounds // 5))]
    for row in [*rows, *byte_rows(rnet, x)]:
        table.add_row(*row)
    Console(width=120).print(table)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


def time_rows(rnet: Recorder, x: Tensor, rounds: int) -> list[tuple[str, ...]]:
    blocks = [str(index) for index in range(BLOCKS)]

    def recorded(**options: Any) -> None:
        with torch.no_grad():
            rnet(x)

    rnet.record(*blocks, inputs=True)
    recorded()
    everything = tuple(f"{index}.2" for index in blocks)
    arms: dict[str, Arm] = {
        "bare": lambda: bare(rnet.net, x),
        "record 12 blocks with inputs": recorded,
        "recompute 1 of 48 inner layers": lambda: rnet.recompute("6.2"),
        "recompute 12 of 48 inner layers": lambda: rnet.recompute(*everything),
    }
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for _ in range(rounds):
        for name in random.sample(list(arms), len(arms)):
            spent[name].append(timed(arms[name]))
    return [(name, "bare pass", *ratio(spent[name], spent["bare"])) for name in list(arms)[1:]]


def dataset_rows(rnet: Recorder, rounds: int) -> list[tuple[str, ...]]:
    """Compare a dataset with every layer kept and one with only blocks kept."""
    loader = [torch.randn(8, 64, 128) for _ in range(16)]
    blocks = [str(index) for index in range(BLOCKS)]
    stores = {"all": Host(), "blocks": Host()}

    def passes() -> None:
        with torch.no_grad():
            for batch in loader:
                rnet.net(batch)

    def collected(what: str) -> Recording:
        rnet.record(*(["*.*"] if what == "all" else blocks), inputs=what == "blocks")
        return rnet.collect(loader, store=stores[what], progress=False)

    kept = collected("blocks")
    arms: dict[str, Arm] = {
        "bare": passes,
        "collect 48 inner layers": lambda: collected("all"),
        "collect 12 blocks with inputs": lambda: collected("blocks"),
        "recompute 12 of 48 inner layers": lambda: kept.recompute(rnet, "*.2"),
    }
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name in random.sample(list(arms), len(arms)):
            spent[name].append(timed(arms[name]))
    rows = [(name, "bare passes", *ratio(spent[name], spent["bare"])) for name in list(arms)[1:]]
    inputs = held_bytes(kept) / held_bytes(collected("all"))
    rows.append(("bytes of 12 blocks with inputs", "48 inner layers", f"{inputs:.2f}", ""))
    return rows


def held_bytes(recording: Recording) -> int:
    samples = sum(recording[label].nbytes for label in recording.stored)
    return int(samples + recording.calls.num_bytes)


def bare(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def ratio(ours: list[float], bare: list[float]) -> tuple[str, str]:
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def byte_rows(rnet: Recorder, x: Tensor) -> list[tuple[str, ...]]:
    rnet.remove()
    plain = saved_bytes(rnet, x, torch.enable_grad())
    rows = []
    for title, selectors in [("all layers", ["*"]), ("the GELUs", [nn.GELU])]:
        shrunk = saved_bytes(rnet, x, rnet.saved_tensors(*selectors, dtype=torch.bfloat16))
        rows.append((f"bytes saved in bfloat16: {title}", "as saved", f"{shrunk / plain:.2f}", ""))
    return rows


def saved_bytes(rnet: Recorder, x: Tensor, block: AbstractContextManager[Any]) -> int:
    """Count the bytes kept for backward besides parameters, each piece of memory once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in rnet.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), block:
        output = rnet.net(x)
    assert output.requires_grad
    own = {key: tensor for key, tensor in kept.items() if key not in parameters}
    return sum(tensor.untyped_storage().nbytes() for tensor in own.values())


if __name__ == "__main__":
    main()

"""The event log, compared with bare training steps and with the peer that it follows.

Run ``python benchmarks/tracking.py [--rounds 30]``. Arms are interleaved in random order in one
process; the table shows the median of the ratios of each round, and their quartiles. The arm "by
hand" clones every output and every gradient in hooks and does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from scio_recorder import track

Arm = Callable[[nn.Module], AbstractContextManager[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(title=f"event log, one thread, {rounds} rounds, torch {torch.__version__}")
    for heading in ("net", "arm", "time / bare step", "quartiles", "time / by hand"):
        table.add_column(heading)
    nets = {
        "100 x Linear(16, 16), batch 4": (stack(100, 16), torch.randn(4, 16, requires_grad=True)),
        "24 x Linear(256, 256), batch 64": (
            stack(24, 256),
            torch.randn(64, 256, requires_grad=True),
        ),
    }
    for title, (net, x) in nets.items():
        for row in rows(net, x, rounds):
            table.add_row(title, *row)
    Console(width=120).print(table)


def stack(count: int, width: int) -> nn.Module:
    pairs = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*pairs)


def rows(net: nn.Module, x: Tensor, rounds: int) -> list[tuple[str, ...]]:
    chosen = arms()
    spent: dict[str, list[float]] = {name: [] for name in chosen}
    for arm in chosen.values():
        timed(net, x, arm)
    for _ in range(rounds):
        for name in random.sample(list(chosen), len(chosen)):
            spent[name].append(timed(net, x, chosen[name]))
    found = []
    for name in list(chosen)[1:]:
        ratios = [one / bare for one, bare in zip(spent[name], spent["bare"], strict=True)]
        hand = [one / other for one, other in zip(spent[name], spent["by hand"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        beside = f"{statistics.median(hand):.2f}"
        found.append((name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", beside))
    if "tensor_tracker" not in chosen:
        found.append(("tensor_tracker", "not installed", "", ""))
    return found


def arms() -> dict[str, Arm]:
    chosen: dict[str, Arm] = {
        "bare": lambda net: nullcontext(),
        "by hand": cloned_by_hand,
        "track": track,
        "track, grad=False": lambda net: track(net, grad=False),
    }
    with suppress(ImportError):
        chosen["tensor_tracker"] = importlib.import_module("tensor_tracker").track
    return chosen


@contextmanager
def cloned_by_hand(net: nn.Module) -> Any:
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        kept.append(output.detach().clone())
        output.register_hook(lambda gradient: kept.append(gradient.detach().clone()))

    handles = [module.register_forward_hook(keep) for module in net.modules()]
    yield kept
    for handle in handles:
        handle.remove()


def timed(net: nn.Module, x: Tensor, arm: Arm) -> float:
    net.zero_grad()
    with arm(net):
        start = time.perf_counter()
        net(x).sum().backward()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()

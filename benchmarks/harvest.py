"""A whole dataset into one array for each layer: time and memory, beside hooks and a peer.

Run ``python benchmarks/harvest.py [--rounds 10]``. Every arm of a round runs in a process of its
own, in random order, so that no arm finds memory that another one has touched. Bare forwards and
arms that use memory again run several times there, and the shortest time counts. With ``--used``,
only the two arms that use memory again run, in one process: times of processes differ by more than
those of the two arms.

The net is 48 times Linear(256, 256) with ReLUs between, 95 layers, 200 batches of 32, one torch
thread: 594 MiB.

The peer is ActivationScope (``pip install activationscope --no-build-isolation``), whose hooks are
in C++ and keep a list of batches for each layer. The arms with hooks do the same by hand.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module, metadata, util

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.stores import Host

NUM_BATCHES, ROWS, FEATURES = 200, 32, 256
_REPEATS = 5


def make_net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(48):
        layers += [nn.Linear(FEATURES, FEATURES), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NET = make_net()
DATA = [torch.randn(ROWS, FEATURES) for _ in range(NUM_BATCHES)]
RNET = Recorder(NET, input_size=(ROWS, FEATURES))
NUM_BYTES = len(NET) * NUM_BATCHES * ROWS * FEATURES * 4


@torch.no_grad()
def bare() -> None:
    for batch in DATA:
        NET(batch)


def hooked(keep: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found: list[list[Tensor]] = [[] for _ in NET]
    handles = [
        module.register_forward_hook(
            lambda module, args, output, own=own: own.append(keep(output))  # type: ignore[misc]
        )
        for module, own in zip(NET, found, strict=True)
    ]
    bare()
    for handle in handles:
        handle.remove()
    joined = []
    for own in found:
        joined.append(torch.cat(own))
        own.clear()
    return joined


def peer(mode: str) -> list[Tensor]:
    scope = import_module("activationscope")
    options = {"storage": scope.StoragePolicy.CPU, "capture_mode": getattr(scope.CaptureMode, mode)}
    with scope.ActivationScope(**options).track(NET) as tracker:
        bare()
        return [torch.cat(own) for own in tracker.activations.values()]


def collected(**options: object) -> object:
    RNET.record(*(str(i) for i in range(len(NET))))
    batches = iter(DATA) if options.pop("generator", False) else DATA
    recording = RNET.collect(batches, **options)  # type: ignore[arg-type]
    RNET.remove()
    return recording


ARRAYS: list[Tensor] = []


def into_arrays() -> list[Tensor]:
    """Copy into arrays that were touched by the call before, by the shortest hooks there are."""
    if not ARRAYS:
        ARRAYS.extend(torch.zeros(NUM_BATCHES * ROWS, FEATURES) for _ in NET)
    start = 0

    def keep(array: Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            array[start : start + ROWS].copy_(output)

        return hook

    handles = [
        module.register_forward_hook(keep(array)) for module, array in zip(NET, ARRAYS, strict=True)
    ]
    with torch.no_grad():
        for batch in DATA:
            NET(batch)
            start += ROWS
    for handle in handles:
        handle.remove()
    return ARRAYS


HOST = Host()
ARMS: dict[str, Callable[[], object]] = {
    "bare forwards": bare,
    "hooks, clone, then cat": lambda: hooked(lambda output: output.detach().clone()),
    "hooks, detach, then cat": lambda: hooked(Tensor.detach),
    "ActivationScope, snapshot, then cat": lambda: peer("SNAPSHOT"),
    "ActivationScope, reference, then cat": lambda: peer("REFERENCE"),
    "collect": lambda: collected(store="host"),
    "collect, length unknown": lambda: collected(store="host", generator=True),
    "hooks, copy into used arrays": into_arrays,
    "collect into a used Host": lambda: collected(store=HOST),
}


# The arm that ratios refer to.
PEERS = ("bare forwards", "hooks, clone, then cat", "hooks, copy into used arrays")
# The name of the peer, in the title and in the look-up.
PEER = "activationscope"


def installed() -> list[str]:
    """Return the arms that can run here."""
    is_there = util.find_spec(PEER) is not None
    return [name for name in ARMS if is_there or PEER not in name.lower()]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_one(name: str) -> None:
    torch.set_num_threads(1)
    bare()
    # A first collect imports modules, which takes 0.03 s.
    RNET.record("0")
    RNET.collect(DATA[:1], store="host")
    RNET.remove()
    before = peak_bytes()
    spent, result = [], None
    # Memory that is used again can be used many times: the shortest of several is taken there, in
    # which nothing else has run. The first of them is the one that touches it.
    for _ in range(1 + _REPEATS if "used" in name or name == "bare forwards" else 1):
        del result
        start = time.perf_counter()
        result = ARMS[name]()
        spent.append(time.perf_counter() - start)
    print(min(spent[1:] or spent), (peak_bytes() - before) / NUM_BYTES, flush=True)
    # Freeing the collected memory is not measured.
    os._exit(0 if result is not None or name == "bare forwards" else 1)


def compare_used(rounds: int) -> None:
    """Print the ratio of the two arms that use memory again, run in turn in one process."""
    torch.set_num_threads(1)
    names = PEERS[-1], "collect into a used Host"
    times: dict[str, list[float]] = {name: [] for name in names}
    # The first round touches the memory.
    for number in range(rounds + 1):
        for name in random.sample(names, 2):
            start = time.perf_counter()
            result = ARMS[name]()
            spent = time.perf_counter() - start
            # A host's memory is used again only once nobody holds its recording.
            del result
            if number:
                times[name].append(spent)
    by_hand, own = times.values()
    median, quartiles = ratio(own, by_hand)
    sums, minima = sum(own) / sum(by_hand), min(own) / min(by_hand)
    print(
        f"{' / '.join(names[::-1])}, {rounds} rounds: {median} "
        f"({quartiles}), of the sums {sums:.2f}, of the minima {minima:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--used", action="store_true", help="only compare arms of used memory")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.arm:
        run_one(parsed.arm)
        return
    if parsed.used:
        compare_used(parsed.rounds)
        return
    arms = installed()
    times: dict[str, list[float]] = {name: [] for name in arms}
    memory: dict[str, float] = {}
    for _ in range(parsed.rounds):
        for name in random.sample(arms, len(arms)):
            command = [sys.executable, __file__, "--arm", name]
            spent, peak = subprocess.check_output(command, text=True).split()
            times[name].append(float(spent))
            memory[name] = max(memory.get(name, 0.0), float(peak))
    show(times, memory, parsed.rounds)


def show(times: dict[str, list[float]], memory: dict[str, float], rounds: int) -> None:
    title = f"dataset into memory, one thread, {rounds} rounds, torch {torch.__version__}"
    table = Table(title=title)
    for heading in (
        "arm",
        "/ bare",
        "quartiles",
        "/ hooks, clone, cat",
        "quartiles",
        "/ used arrays",
        "quartiles",
        "peak / data",
    ):
        table.add_column(heading)
    for name, own in times.items():
        cells = [cell for peer in PEERS for cell in ratio(own, times[peer])]
        table.add_row(name, *cells, f"{memory[name]:.2f}")
    Console(width=130).print(table)
    absent = util.find_spec(PEER) is None
    print(f"{PEER} {'is not installed' if absent else metadata.version(PEER)}")


def ratio(own: list[float], peer: list[float]) -> tuple[str, str]:
    ratios = [one / other for one, other in zip(own, peer, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


if __name__ == "__main__":
    main()

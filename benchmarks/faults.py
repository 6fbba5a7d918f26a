"""Naming the module that is at fault, and its line, although everything rounds differently.

Run ``python benchmarks/faults.py``, or with ``--small`` for a minute. Faults of 20 kinds are
planted into ports of ten small networks with random weights (`ports.py`). A port computes in
another precision than its reference, or with other kernels. Clean ports have no fault. Five ways
are asked which module is at fault:

- "local errors": ``compare(..., local=True)``, by its first fault, or among its first three.
- "first difference": ``compare(...).first``, as it is without tolerances.
- "bit for bit": hooks by hand, and the first module whose output has other bits.
- "DebugMode": hashes of all operations by torch's ``DebugMode``, and the module around the first
  that differs. It refuses ports that call other operations.
- "tolerance": hooks by hand, and the first module whose relative error is larger than a multiple
  of that of the reference's own copy in the port's dtype. The multiple is the one that names most
  faults, and at most one clean port in a hundred, of other networks and other kinds.

A fault that changes no bit of the port's output is "silent", and counts neither way. A line is
right if it is one that first gives a wrong value.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from ports import (
    NETWORKS,
    PAIRS,
    Batch,
    Pair,
    cast,
    faults_of,
    network,
    port_of,
    reference_of,
)
from torch import Tensor, nn

from scio_recorder import Recorder, compare

FACTORS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 1e3, 1e4, 1e5)


class Task(NamedTuple):
    """A port to be judged, with the index of its fault among those of its network."""

    network: str
    seed: int
    pair: Pair
    fault: int | None = None


@dataclass
class Answer:
    """The modules that are named, most certain first, and the line of the first."""

    modules: list[str] = field(default_factory=list)
    line: tuple[str, int] | None = None
    refused: bool = False


@dataclass
class Outcome:
    task: Task
    kind: str = ""
    module: str = ""
    lines: frozenset[tuple[str, int]] = frozenset()
    is_silent: bool = False
    answers: dict[str, Answer] = field(default_factory=dict)
    # The modules whose error is larger than that of all before them, as a multiple of rounding.
    errors: list[tuple[str, float]] = field(default_factory=list)

    def is_right(self, way: str, among: int = 1) -> bool:
        return self.module in self.answers[way].modules[:among]

    def has_line(self, way: str) -> bool:
        return self.is_right(way) and self.answers[way].line in self.lines


def tasks(num_faults: int, num_seeds: int) -> list[Task]:
    """Return as many faults of each kind, from all networks in turn, and clean ports."""
    chance = random.Random(0)
    places: dict[str, dict[str, list[int]]] = {}
    for name in NETWORKS:
        for index, fault in enumerate(faults_of(network(name, 0)[0])):
            places.setdefault(fault.kind, {}).setdefault(name, []).append(index)
    chosen: list[Task] = []
    for kind in sorted(places):
        names = list(places[kind])
        chance.shuffle(names)
        drawn: dict[Task, None] = {}
        while len(drawn) < num_faults // len(places):
            name = names[len(drawn) % len(names)]
            place = chance.choice(places[kind][name])
            drawn[Task(name, chance.randrange(4), chance.choice(PAIRS), place)] = None
        chosen += drawn
    clean = [Task(name, n, pair) for n in range(num_seeds) for name in NETWORKS for pair in PAIRS]
    return chosen + clean


@torch.no_grad()
def judged(task: Task) -> Outcome:
    """Plant a fault, and ask who is at fault."""
    warnings.simplefilter("ignore")
    net, batch = network(task.network, task.seed)
    outcome, fault = Outcome(task), None
    if task.fault is not None:
        fault = faults_of(net)[task.fault]
        outcome.kind, outcome.module, outcome.lines = fault.kind, fault.module, fault.lines
    port = port_of(net, task.pair, fault)
    outcome.is_silent = fault is not None and is_silent(port, net, batch, task.pair)
    if not outcome.is_silent:
        reference = reference_of(net, task.pair)
        outcome.answers = with_library(reference, port, batch, task.pair)
        by_hand(outcome, reference, port, batch)
        outcome.answers["DebugMode"] = with_debug_mode(reference, port, batch, task.pair)
    return outcome


def is_silent(port: nn.Module, net: nn.Module, batch: Batch, pair: Pair) -> bool:
    inputs = cast(batch, pair.candidate)
    outputs = [tensors_in(x(**inputs)) for x in (port, port_of(net, pair))]
    return all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


def with_library(
    reference: nn.Module, port: nn.Module, batch: Batch, pair: Pair
) -> dict[str, Answer]:
    inputs = [partial(cast, dtype=dtype) for dtype in (pair.reference, pair.candidate)]
    sides = [
        Recorder(net, input_data=make(batch))
        for net, make in zip((reference, port), inputs, strict=True)
    ]
    difference = compare(
        *sides, [batch], to_inputs=inputs, operations=True, local=True, progress=False
    )
    first, faults = difference.first, difference.faults
    return {
        "local errors": Answer(
            [x.layer.name for x in faults], _line(faults[0].operation) if faults else None
        ),
        "first difference": Answer(
            [first.layer.name] if first else [], _line(first.operation) if first else None
        ),
    }


def _line(operation: Any) -> tuple[str, int] | None:
    return None if operation is None else (operation.file, operation.line)


def by_hand(outcome: Outcome, reference: nn.Module, port: nn.Module, batch: Batch) -> None:
    pair = outcome.task.pair
    copied = copy.deepcopy(reference).to(pair.candidate)
    right = outputs_of(reference, cast(batch, pair.reference))
    theirs, copies = (outputs_of(net, cast(batch, pair.candidate)) for net in (port, copied))
    shared = [key for key in right if key in theirs and theirs[key].shape == right[key].shape]
    differing = (key[0] for key in shared if not torch.equal(theirs[key], right[key]))
    outcome.answers["bit for bit"] = Answer([*differing][:1])
    largest = 0.0
    for key in shared:
        rounding = error(copies[key], right[key]) + torch.finfo(pair.candidate).eps
        ratio = error(theirs[key], right[key]) / rounding
        if not ratio <= largest:
            largest = ratio
            outcome.errors.append((key[0], ratio))


def with_debug_mode(reference: nn.Module, port: nn.Module, batch: Batch, pair: Pair) -> Answer:
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        return Answer()
    logs: list[list[Any]] = []
    for net, dtype in ((reference, pair.reference), (port, pair.candidate)):
        with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
            net(**cast(batch, dtype))
        logs.append(mode.logs)
    try:
        DebugMode.check_hash_mismatches(*logs)
    except ValueError:
        return Answer(refused=True)
    names: dict[int, str] = {}
    for own, other in zip(*logs, strict=True):
        if hasattr(own, "tag"):
            names[own.call_depth] = own.tag.partition(".")[2]
        elif (own.log or {}).get("hash") != (other.log or {}).get("hash"):
            return Answer([names.get(own.call_depth - 1, "")])
    return Answer()


def outputs_of(net: nn.Module, inputs: Batch) -> dict[tuple[str, int], Tensor]:
    """Return the first tensor of each call of a module, in float64, in the order of returning."""
    calls, outputs = Counter[str](), dict[tuple[str, int], Tensor]()

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        found = [x for x in tensors_in(output) if x.is_floating_point()]
        if found:
            outputs[name, calls[name]] = found[0].double()
        calls[name] += 1

    handles = [
        module.register_forward_hook(partial(keep, name)) for name, module in net.named_modules()
    ]
    net(**inputs)
    for handle in handles:
        handle.remove()
    return outputs


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, dict | list | tuple)
    return [x for item in items for x in tensors_in(item)] if is_container else []


def error(value: Tensor, right: Tensor) -> float:
    return float((value - right).norm() / (right.norm() + 1e-30))


def with_tolerance(outcomes: Sequence[Outcome]) -> None:
    """Add what a tolerance names, which is fixed where neither network nor kind is the same."""
    kinds = sorted({x.kind for x in outcomes if x.kind})
    for networks in (NETWORKS[::2], NETWORKS[1::2]):
        for half in (kinds[::2], kinds[1::2]):
            factor = fitted(
                x for x in outcomes if x.task.network not in networks and x.kind not in half
            )
            for x in outcomes:
                if x.task.network in networks and (x.kind in half or not x.kind):
                    x.answers["tolerance"] = Answer(exceeding(x, factor))


def exceeding(outcome: Outcome, factor: float) -> list[str]:
    return [name for name, ratio in outcome.errors if not ratio <= factor][:1]


def fitted(outcomes: Iterable[Outcome]) -> float:
    """Return the factor that names most faults, and hardly a clean port."""
    outcomes = [x for x in outcomes if not x.is_silent]
    clean = [x for x in outcomes if not x.kind]
    faulty = [x for x in outcomes if x.kind]

    def names(factor: float) -> int:
        return sum(exceeding(x, factor) == [x.module] for x in faulty)

    def names_clean(factor: float) -> int:
        return sum(bool(exceeding(x, factor)) for x in clean)

    quiet = [factor for factor in FACTORS if names_clean(factor) <= len(clean) / 100]
    return max(quiet, key=names, default=FACTORS[-1])


WAYS = ("local errors", "first difference", "bit for bit", "DebugMode", "tolerance")


def print_tables(outcomes: Sequence[Outcome]) -> None:
    faulty, clean = [x for x in outcomes if x.kind], [x for x in outcomes if not x.kind]
    heard = [x for x in faulty if not x.is_silent]
    print(f"{len(faulty)} faults, {len(faulty) - len(heard)} silent; {len(clean)} clean ports.\n")
    by: dict[str, Callable[[Outcome], str]] = {
        "kind": lambda x: x.kind,
        "network": lambda x: x.task.network,
        "dtypes": lambda x: x.task.pair.title,
    }
    for heading, key in by.items():
        print(f"| {heading} | faults | local errors | among three | its line |", end=" ")
        print(" | ".join((*WAYS[1:2], "its line", *WAYS[2:])), "|")
        print("| --- " * 10 + "|")
        for group in sorted({key(x) for x in heard}):
            print_row(group, [x for x in heard if key(x) == group])
        print_row("all", heard)
        print()
    named = {way: sum(bool(x.answers[way].modules) for x in clean) for way in WAYS}
    print("Clean ports named:", ", ".join(f"{way} {number}" for way, number in named.items()))
    refused = sum(x.answers["DebugMode"].refused for x in [*heard, *clean])
    print(f"DebugMode refused {refused} of {len(heard) + len(clean)} ports.")


def print_row(group: str, outcomes: Sequence[Outcome]) -> None:
    counts = [
        sum(x.is_right("local errors") for x in outcomes),
        sum(x.is_right("local errors", among=3) for x in outcomes),
        sum(x.has_line("local errors") for x in outcomes),
        sum(x.is_right("first difference") for x in outcomes),
        sum(x.has_line("first difference") for x in outcomes),
        *(sum(x.is_right(way) for x in outcomes) for way in WAYS[2:]),
    ]
    shares = [f"{100 * count / max(len(outcomes), 1):.0f} %" for count in counts]
    print("|", " | ".join([group, str(len(outcomes)), *shares]), "|")


def print_misses(outcomes: Iterable[Outcome]) -> None:
    """Print the faults that are not named first, and the clean ports that are named."""
    for x in outcomes:
        if x.is_silent:
            continue
        answer = x.answers["local errors"]
        if not x.has_line("local errors") if x.kind else answer.modules:
            line = answer.line and (answer.line[0].rpartition("/")[2], answer.line[1])
            own = sorted({(file.rpartition("/")[2], n) for file, n in x.lines})[:3]
            print(*x.task[:2], x.task.pair.title, x.task.fault, x.kind or "clean", end=": ")
            print(repr(x.module), own, "named", answer.modules[:3], line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--clean", type=int, default=4, help="seeds of clean ports")
    parser.add_argument("--small", action="store_true", help="40 faults and 50 clean ports")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--misses", action="store_true", help="print each fault that is not named")
    options = parser.parse_args()
    began = time.perf_counter()
    todo = tasks(40, 1) if options.small else tasks(options.faults, options.clean)
    limits = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(options.workers, get_context("spawn"), **limits) as pool:
        outcomes = list(pool.map(judged, todo, chunksize=4))
    with_tolerance(outcomes)
    print_tables(outcomes)
    if options.misses:
        print_misses(outcomes)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

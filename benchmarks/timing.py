"""Timing arms side by side, for the benchmarks in this folder."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


def timed(arm: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call."""
    start = clock()
    arm()
    return clock() - start


def interleaved(
    arms: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each arm in each round."""
    for arm in arms.values():
        arm()
    spent: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            spent[name].append(timed(arms[name], clock))
    return spent

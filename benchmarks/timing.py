"""Timing arms side by side, for the benchmarks in this folder."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


def interleaved(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each arm in each round."""
    for arm in arms.values():
        arm()
    spent: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            start = time.perf_counter()
            arms[name]()
            spent[name].append(time.perf_counter() - start)
    return spent

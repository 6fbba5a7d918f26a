"""Data cut anywhere, reduced part by part, merged in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from scio_recorder.reductions import Reduction


class Plan(NamedTuple):
    """Where to cut, which reduction sees which part, and which pairs to merge."""

    cuts: list[int]
    owners: list[int]
    merges: list[tuple[int, int]]


@st.composite
def plans(draw: st.DrawFn, count: int) -> Plan:
    """Cut `count` samples into up to nine batches, seen by up to four reductions."""
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=8)))
    workers = draw(st.integers(1, 4))
    owner = st.integers(0, workers - 1)
    owners = draw(st.lists(owner, min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    pair = st.tuples(st.integers(0, 99), st.integers(0, 99))
    merges = draw(st.lists(pair, min_size=workers - 1, max_size=workers - 1))
    return Plan(cuts, owners, merges)


def reduce_in_parts(
    make: Callable[[], Reduction],
    data: Tensor,
    plan: Plan,
    labels: list[object] | None = None,
) -> Reduction:
    """Reduce `data` by the plan; with labels, each batch is (its data, its labels)."""
    workers = [make() for _ in range(len(plan.merges) + 1)]
    edges = [0, *plan.cuts, len(data)]
    for start, end, owner in zip(edges, edges[1:], plan.owners, strict=False):
        part = data[start:end]
        workers[owner].update(part, None if labels is None else (part, labels[start:end]))
    for first, second in plan.merges:
        other = workers.pop(second % len(workers))
        workers[first % len(workers)].merge(other)
    return workers[0]


def offset_normal(*shape: int, ratio: float = 1e4) -> Tensor:
    """Return float32 normal values whose mean is `ratio` times their standard deviation."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator) + ratio

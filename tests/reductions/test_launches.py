"""What a GPU would have to do and to wait for, counted on the CPU, where the same code runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2Model

from scio_recorder import Recorder, Tokens
from scio_recorder.reductions import (
    Alive,
    Covariance,
    Digest,
    Fold,
    Histogram,
    Last,
    Max,
    Mean,
    Min,
    Moments,
    Quantiles,
    Reduction,
    TopK,
)
from tests.recording.nets import recorder_of

# They return a value to Python.
WAITS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
# They compute nothing: they make views, ask for memory or call other operations.
WITHOUT_WORK = """
    alias as_strided as_strided_ detach detach_ expand flatten movedim narrow numpy_T permute
    reshape resolve_conj resolve_neg select slice split split_with_sizes squeeze t transpose
    unsqueeze view empty empty_like empty_strided new_empty new_ones ones zeros zeros_like
    _to_copy clone contiguous item lift_fresh result_type promote_types resize_ to argsort
"""
IDLE = {*WITHOUT_WORK.split()}


def ids(batch: Any) -> range:
    return range(len(batch))


BUDGETS: list[tuple[Callable[[], Reduction], int]] = [
    (Mean, 4),
    (Moments, 10),
    (Covariance, 12),
    (partial(Histogram, 32, (-4.0, 4.0)), 14),
    (partial(TopK, 9, ids), 50),
    (partial(TopK, 9, ids, -1), 50),
]


def operations(run: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    # A list of events with their parents, as `events()` returns it, takes twenty times as long.
    assert profiler.profiler is not None
    names = [event.name() for event in profiler.profiler.kineto_results.events()]
    return Counter(name[6:] for name in names if name.startswith("aten::"))


def counts(seen: Counter[str]) -> tuple[int, int]:
    """Return the numbers of launches, and of waits."""
    launches = sum(times for name, times in seen.items() if name not in WAITS | IDLE)
    return launches, sum(seen[name] for name in WAITS)


def test_what_waits_is_counted() -> None:
    x = torch.ones(3)
    for wait in (x[0].item, lambda: bool(x[0] > 0), lambda: x.equal(x), lambda: x[x > 0]):
        assert counts(operations(wait))[1] > 0
    assert counts(operations(lambda: x.add(x)[1:].mul(x[0]))) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "budget"), BUDGETS)
def test_launches_for_each_batch(
    make: Callable[[], Reduction], budget: int, dtype: torch.dtype
) -> None:
    reduction, batches = make(), [torch.randn(512, 64).to(dtype) for _ in range(17)]
    assert counts(operations(partial(reduction.update, batches[0], batches[0])))[1] == 0
    # So many that a block of a covariance is full.
    others = batches[1:]
    launches, waits = counts(operations(lambda: [*map(reduction.update, others, others)]))
    assert launches <= 16 * budget
    assert waits == 0


def by(batch: Any) -> Tensor:
    return torch.arange(len(batch)) % 3


OTHERS: dict[str, Callable[[], Reduction]] = {
    "Min": Min,
    "Max": Max,
    "Last": Last,
    "Alive": Alive,
    "Alive at bounds": lambda: Alive(-1, bounds=(-1, 1)),
    "Digest": Digest,
    "Fold": lambda: Fold(lambda sums, values: values.sum(0) + (0 if sums is None else sums)),
    "Quantiles": lambda: Quantiles([0.1, 0.5]),
    "Quantiles of features": lambda: Quantiles([0.5], -1),
    "Moments by class": lambda: Moments(by=by),
    "Covariance by class": lambda: Covariance(by=by),
    "Top k by class": lambda: TopK(9, ids, by=by),
    "Histogram by class": lambda: Histogram(9, (-4.0, 4.0), by=by),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_nothing_waits(make: Callable[[], Reduction], dtype: torch.dtype) -> None:
    reduction, batches = make(), [torch.randn(512, 64).to(dtype) for _ in range(9)]
    updates = operations(lambda: [reduction.update(batch, batch) for batch in batches])
    assert counts(updates)[1] == 0


class Transfers(TorchFunctionMode):
    """Counts what would go to a GPU."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is Tensor.to and "non_blocking" in (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_classes_of_a_block_are_sent_once() -> None:
    covariance, batch = Covariance(by=by), torch.randn(512, 1024)
    with Transfers() as transfers:
        # A block has 1024 rows.
        for _ in range(6):
            covariance.update(batch, batch)
    assert transfers.number == 3


def test_a_range_is_asked_for_once() -> None:
    histogram, batch = Histogram(8), torch.randn(512, 64)
    histogram.update(batch)
    assert counts(operations(lambda: [histogram.update(batch) for _ in range(3)]))[1] == 0


LAYERS = 12


def tiny_gpt() -> tuple[Recorder, Tensor]:
    config = GPT2Config(
        n_layer=LAYERS, n_embd=16, n_head=2, vocab_size=50, n_positions=16, use_cache=False
    )
    ids = torch.randint(0, 50, (2, 8))
    rnet = recorder_of(GPT2Model(config).eval(), re.compile(r"^h\.\d+$"), input_data=ids, verbose=0)
    return rnet, ids


def test_launches_of_collect() -> None:
    rnet, ids = tiny_gpt()
    with torch.no_grad():
        bare = operations(lambda: rnet.net(ids))
    for make, budget in BUDGETS:
        collect = partial(rnet.collect, reduce=make(), store=None, progress=False)
        seen = operations(partial(collect, [ids] * 2))
        # Of the second batch, beside the net's own.
        seen.subtract(operations(partial(collect, [ids])))
        seen.subtract(bare)
        launches, waits = counts(seen)
        assert 0 < launches <= LAYERS * budget
        assert waits == 0


def test_labels_are_asked_for_once_a_batch() -> None:
    rnet, ids = tiny_gpt()
    asked: list[Any] = []

    def labels(batch: Any) -> Tensor:
        asked.append(batch)
        return torch.tensor([0, 1])

    reduce = [Mean(by=labels), Covariance(-1, by=labels)]
    for rows in (None, Tokens()):
        del asked[:]
        recording = rnet.collect(
            [ids, ids + 0], reduce=reduce, rows=rows, store=None, progress=False
        )
        assert len(asked) == 2
        assert list(recording["h.3"][0]) == [0, 1]

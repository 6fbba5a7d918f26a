"""Reductions, compared with one plain torch operation over the same data: time and error.

Run ``python benchmarks/reductions.py [--rounds 30]``. Arms are interleaved in random order in one
process; the table shows the median of the ratios of each round, and their quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from timing import timed
from torch import Tensor

from scio_recorder import reductions

Arm = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(title=f"reductions, one thread, {rounds} rounds, torch {torch.__version__}")
    for heading in ("reduction", "batches", "beside", "ratio", "quartiles", "bar", "error"):
        table.add_column(heading)
    of_moments, of_covariances = moments_rows(rounds), covariance_rows(rounds)
    of_values = [*histogram_rows(rounds), *quantile_rows(rounds), *top_rows(rounds)]
    for row in [*of_moments, *of_covariances, *of_values]:
        table.add_row(*row)
    Console(width=130).print(table)


def ratios(ours: Arm, plain: Arm, rounds: int) -> tuple[str, str]:
    """Return the median of time(ours) / time(plain) and its quartiles."""
    arms = [("ours", ours), ("plain", plain)]
    for _, arm in arms:
        arm()
    seen = []
    for _ in range(rounds):
        random.shuffle(arms)
        spent = {name: timed(arm) for name, arm in arms}
        seen.append(spent["ours"] / spent["plain"])
    low, middle, high = statistics.quantiles(seen, n=4)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def offset_batches(shape: tuple[int, ...], count: int) -> list[Tensor]:
    """Return normal batches whose mean is 1e4 times their standard deviation."""
    return [torch.randn(shape) + 1e4 for _ in range(count)]


def reduced(
    make: Callable[[], reductions.Reduction], batches: list[Tensor]
) -> reductions.Reduction:
    reduction = make()
    for batch in batches:
        reduction.update(batch)
    return reduction


def describe(batches: list[Tensor]) -> str:
    return f"{len(batches)} x {list(batches[0].shape)}"


def worst(result: Tensor, exact: Tensor, scale: Tensor) -> str:
    return f"{((result.double() - exact).abs() / scale).max().item():.1e}"


def moments_rows(rounds: int) -> list[tuple[str, ...]]:
    rows = []
    for shape, count in [((256, 1024), 8), ((64, 64, 16, 16), 2), ((32, 1024), 16)]:
        batches = offset_batches(shape, count)
        together = torch.cat(batches)
        exact = torch.var_mean(together.double(), 0)
        for name, make in [("Mean", reductions.Mean), ("Moments", reductions.Moments)]:
            ratio = ratios(
                lambda make=make, batches=batches: reduced(make, batches).compute(),
                lambda together=together: torch.var_mean(together, 0),
                rounds,
            )
            result = reduced(make, batches).compute()
            error = (
                worst(result.variance, exact[0], exact[0])
                if name == "Moments"
                else worst(result, exact[1], exact[1])
            )
            rows.append((name, describe(batches), "torch.var_mean", *ratio, "1.30", error))
    return rows


def covariance_rows(rounds: int) -> list[tuple[str, ...]]:
    rows = []
    shapes = [
        ((256, 1024), 8),
        ((256, 512), 16),
        ((1024, 256), 16),
        ((2048, 128), 16),
        ((4096, 64), 16),
    ]
    for shape, count in shapes:
        batches = offset_batches(shape, count)
        total = torch.zeros(shape[1], shape[1])
        ratio = ratios(
            lambda batches=batches: reduced(reductions.Covariance, batches).compute(),
            lambda total=total, batches=batches: [total.addmm_(b.T, b) for b in batches],
            rounds,
        )
        exact = torch.cov(torch.cat(batches).double().T)
        deviations = exact.diag().sqrt()
        result = reduced(reductions.Covariance, batches).compute().covariance
        error = worst(result, exact, deviations.unsqueeze(1) * deviations)
        rows.append(("Covariance", describe(batches), "addmm_", *ratio, "1.15", error))
    return rows


def histogram_rows(rounds: int) -> list[tuple[str, ...]]:
    rows = []
    for shape, count in [((512, 64), 16), ((256, 1024), 8)]:
        batches = [torch.randn(shape) for _ in range(count)]

        def make() -> reductions.Histogram:
            return reductions.Histogram(50, (-4.0, 4.0))

        ratio = ratios(
            lambda batches=batches: reduced(make, batches).compute(),
            lambda batches=batches: [torch.histc(b, 50, -4.0, 4.0) for b in batches],
            rounds,
        )
        result = reduced(make, batches).compute()
        values = torch.cat(batches).double()
        exact = torch.histogram(values.flatten(), result.edges).hist
        error = f"{int((result.counts - exact).abs().sum())} values"
        rows.append(("Histogram", describe(batches), "torch.histc", *ratio, "1.50", error))
    return rows


def quantile_rows(rounds: int) -> list[tuple[str, ...]]:
    rows = []
    q = [0.01, 0.25, 0.5, 0.75, 0.99]
    for feature_dim, shape, count in [(None, (256, 1024), 4), (1, (256, 64, 8, 8), 2)]:
        batches = [torch.randn(shape) for _ in range(count)]
        together = torch.cat(batches)
        rows_of = together.flatten() if feature_dim is None else together.movedim(1, 0).flatten(1)

        def make(feature_dim: int | None = feature_dim) -> reductions.Quantiles:
            return reductions.Quantiles(q, feature_dim)

        ratio = ratios(
            lambda make=make, batches=batches: reduced(make, batches).compute(),
            lambda rows_of=rows_of: torch.sort(rows_of),
            rounds,
        )
        error = f"{rank_error(reduced(make, batches).compute(), rows_of, q):.2%} in rank"
        label = f"Quantiles({feature_dim})"
        rows.append((label, describe(batches), "torch.sort", *ratio, "1.00", error))
    return rows


def top_rows(rounds: int) -> list[tuple[str, ...]]:
    rows = []
    for feature_dim, shape, count in [(None, (256, 1024), 8), (1, (64, 64, 16, 16), 4)]:
        batches = [torch.randn(shape) for _ in range(count)]
        together = torch.cat(batches)
        rows_of = together.T if feature_dim is None else together.movedim(1, 0).flatten(1)
        ids = torch.arange(len(together)).split(shape[0])

        def run(
            feature_dim: int | None = feature_dim,
            batches: list[Tensor] = batches,
            ids: tuple[Tensor, ...] = ids,
        ) -> reductions.TopKResult:
            reduction = reductions.TopK(10, lambda batch: batch, feature_dim)
            for batch, batch_ids in zip(batches, ids, strict=True):
                reduction.update(batch, batch_ids)
            return reduction.compute()

        ratio = ratios(run, lambda rows_of=rows_of: rows_of.topk(10), rounds)
        error = f"{int((run().values != rows_of.topk(10).values).sum())} values"
        label = f"TopK({feature_dim})"
        rows.append((label, describe(batches), "torch.topk", *ratio, "-", error))
    return rows


def rank_error(result: Tensor, rows: Tensor, q: list[float]) -> float:
    ordered = rows.reshape(-1, rows.shape[-1]).sort(dim=1).values
    found = torch.searchsorted(ordered, result.reshape(len(q), -1).T.contiguous())
    return (found / ordered.shape[1] - torch.tensor(q)).abs().max().item()


if __name__ == "__main__":
    main()

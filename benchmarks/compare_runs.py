"""Comparing two networks layer by layer, beside two bare passes of them.

Run ``python benchmarks/compare_runs.py [--rounds 10]``. All layers are compared, with random
weights, one torch thread and two batches. "equal": the candidate is a copy. "differing": the first
weight has another sign, so that nearly all numbers differ. "digests": the reference is collected as
digests, and the candidate compared with that. Processor time counts, since other programs make the
arms wait.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, ResNetConfig, ResNetModel

from scio_recorder import Recorder, compare
from scio_recorder.layer import TensorSpec
from scio_recorder.reductions import Digest


def convolutional() -> tuple[nn.Module, list[Tensor], Callable[[nn.Module], Tensor]]:
    sizes: dict[str, Any] = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    net = ResNetModel(ResNetConfig(layer_type="basic", **sizes))
    return net, [torch.randn(8, 3, 128, 128) for _ in range(2)], lambda net: next(net.parameters())


def transformer() -> tuple[nn.Module, list[Tensor], Callable[[nn.Module], Tensor]]:
    net = GPT2Model(GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=1000, use_cache=False))
    return (
        net,
        [torch.randint(1000, (8, 128)) for _ in range(2)],
        lambda net: next(net.parameters()),
    )


def arms_of(
    net: Any, batches: list[Tensor], weight: Callable[[nn.Module], Tensor]
) -> dict[str, Callable[[], object]]:
    net = net.eval()
    copied, other = copy.deepcopy(net), copy.deepcopy(net)
    with torch.no_grad():
        weight(other).neg_()
    one, same, differing = (Recorder(each, input_data=batches[0]) for each in (net, copied, other))

    @torch.no_grad()
    def bare() -> None:
        for batch in batches:
            net(batch)
            other(batch)

    def digests() -> object:
        # Embeddings of positions have no row for each sample.
        size = len(batches[0])
        one.record(
            lambda row: isinstance(row.output_spec, TensorSpec) and row.output_spec.shape[0] == size
        )
        recording = one.collect(batches, reduce=Digest(), store=None, progress=False)
        one.record()
        return compare(recording, same, batches, progress=False)

    return {
        "two bare passes": bare,
        "equal": lambda: compare(one, same, batches, progress=False),
        "differing": lambda: compare(one, differing, batches, progress=False),
        "digests": digests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(title=f"comparing / two bare passes; {rounds} rounds")
    for heading in ("network", "arm", "of the minima", "median", "quartiles", "bar"):
        table.add_column(heading)
    for name, make in {"ResNet-18": convolutional, "GPT-2, small": transformer}.items():
        arms = arms_of(*make())
        spent = interleaved(arms, rounds, clock=time.thread_time)
        for arm in list(arms)[1:]:
            shares = [a / b for a, b in zip(spent[arm], spent["two bare passes"], strict=True)]
            low, middle, high = statistics.quantiles(shares, n=4)
            least = min(spent[arm]) / min(spent["two bare passes"])
            bar = "1.25" if arm == "digests" else "2.5"
            table.add_row(
                name, arm, f"{least:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", bar
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""A sweep over the blocks of a transformer, compared with the loop by hand.

Run ``python benchmarks/sweep.py [--rounds 15]``. Networks have random weights; one torch thread. By
hand means a hook on each block, and a run from start to end for each. All arms run in turn and in
random order, and their processor time counts, since other programs make them wait. A check before
ensures that the sweep gives the same numbers, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from scio_recorder import Recorder

BARS = {"sweep": 1.05, "estimate": 4.0}


def gpt2() -> tuple[nn.Module, str, Tensor, Tensor]:
    sizes = {"vocab_size": 1000, "n_embd": 256, "n_layer": 12, "n_head": 8}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    clean, corrupted = torch.randint(1000, (2, 4, 64))
    return GPT2LMHeadModel(config).eval(), "transformer.h.", clean, corrupted


def vit() -> tuple[nn.Module, str, Tensor, Tensor]:
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768
    )
    clean, corrupted = torch.randn(2, 1, 3, 224, 224)
    net = ViTForImageClassification(config).eval()
    return (
        net,
        next(name for name, _ in net.named_modules() if name.endswith(".0"))[:-1],
        clean,
        corrupted,
    )


def metric(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits.flatten(0, -2)[-1, 1]


def by_hand(net: nn.Module, blocks: list[nn.Module], clean: Tensor, corrupted: Tensor) -> Tensor:
    """Patch one block after the other by a plain loop."""
    kept: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, _args: Any, output: Any) -> None:
        kept[module] = output

    def patch(module: nn.Module, _args: Any, output: Any) -> Any:
        return kept[module]

    with torch.no_grad():
        handles = [block.register_forward_hook(keep) for block in blocks]
        found = [float(metric(net(clean)))]
        for handle in handles:
            handle.remove()
        found.append(float(metric(net(corrupted))))
        for block in blocks:
            handle = block.register_forward_hook(patch)
            found.append(float(metric(net(corrupted))))
            handle.remove()
    return torch.tensor(found, dtype=torch.float64)


def arms_of(make: Callable[[], tuple[nn.Module, str, Tensor, Tensor]]) -> dict[str, Any]:
    net, prefix, clean, corrupted = make()
    names = [f"{prefix}{number}" for number in range(12)]
    rnet = Recorder(net, input_data=clean, verbose=0)
    rnet.record(*names)
    blocks = [net.get_submodule(name) for name in names]

    def bare() -> Any:
        with torch.no_grad():
            return metric(net(corrupted))

    def sweep() -> Tensor:
        effects = rnet.sweep(clean, corrupted, metric)
        return torch.cat([torch.tensor([effects.clean, effects.corrupted]), effects.values])

    def estimate() -> Any:
        return rnet.sweep(clean, corrupted, metric, estimate=True)

    def hand() -> Tensor:
        return by_hand(net, blocks, clean, corrupted)

    if not torch.equal(torch.cat([hand()[2:]]), sweep()[2:]):
        raise SystemExit("the sweep gives other numbers than the loop by hand")
    return {"by hand": hand, "sweep": sweep, "estimate": estimate, "one pass": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(title=f"patching 12 blocks; {rounds} rounds")
    for heading in ("network", "arm", "beside", "of the minima", "median", "quartiles", "bar"):
        table.add_column(heading)
    for make in (gpt2, vit):
        spent = interleaved(arms_of(make), rounds, clock=time.thread_time)
        for arm, beside in (("sweep", "by hand"), ("estimate", "one pass")):
            shares = [a / b for a, b in zip(spent[arm], spent[beside], strict=True)]
            low, middle, high = statistics.quantiles(shares, n=4)
            least = min(spent[arm]) / min(spent[beside])
            row = f"{least:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", str(BARS[arm])
            table.add_row(make.__name__, arm, beside, *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

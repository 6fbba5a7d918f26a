"""What it costs to record operations inside forwards.

Run ``python benchmarks/operations.py [--rounds 9]``. GPT-2 (the published size, without its head,
2 x 128 tokens) and ResNet-50 (two images) have random weights. Arms are interleaved in random order
in one process, and figures are medians of the ratios of each round. The last table takes 300 tiny
operations of one module: the time that an arm adds to a bare pass over what a function mode adds
that only calls, of the minima. TorchLens, nnsight and TransformerLens run where they are installed;
the last has its own base, GPT-2 with its head and eager attention, which it needs.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, ResNetConfig, ResNetModel

from scio_recorder import Layer, Recorder
from scio_recorder.layer import TensorSpec
from scio_recorder.reductions import Moments

OPERATIONS = 300


class Keeping(TorchFunctionMode):
    """Keeps every output alive, or only calls."""

    def __init__(self, kept: list[Any] | None = None) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.kept is not None:
            self.kept.append(output)
        return output


class Tiny(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(OPERATIONS):
            x = x + 1
        return x


def under_mode(net: nn.Module, x: Tensor, keeps: bool) -> Callable[[], object]:
    def run() -> object:
        with Keeping([] if keeps else None):
            return net(x)

    return run


def recorded(net: nn.Module, x: Tensor, *selectors: Any, **options: Any) -> Callable[[], object]:
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*selectors, **options)
    rnet(x)
    return lambda: rnet(x)


def weighed(net: nn.Module, x: Tensor) -> Callable[[], object]:
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record("h.?.attn", attention=True)

    def run() -> object:
        rnet(x)
        return [attention.weights() for attention in rnet.attention.values()]

    return run


def reduced(net: nn.Module, x: Tensor, *, operations: bool) -> Callable[[], object]:
    """Reduce what has a row for each sample."""
    rnet = Recorder(net, input_data=x, verbose=0)
    rows = rnet.operations() if operations else rnet.architecture
    rnet.record(*(at for at, row in rows.items() if at != (0, 1) and is_of_batch(row, len(x))))
    return lambda: rnet.collect([x], store=None, reduce=Moments(), progress=False)


def is_of_batch(row: Layer, length: int) -> bool:
    spec = row.output_spec
    return isinstance(spec, TensorSpec) and spec.shape[:1] == (length,) and row.executed


def gpt2() -> tuple[nn.Module, Tensor]:
    return GPT2Model(GPT2Config(use_cache=False)).eval(), torch.randint(0, 50257, (2, 128))


def resnet50() -> tuple[nn.Module, Tensor]:
    return ResNetModel(ResNetConfig()).eval(), torch.randn(2, 3, 224, 224)


def torchlens(ids: Tensor) -> dict[str, Callable[[], object]]:
    import torchlens as peer

    net = gpt2()[0]
    return {"TorchLens, every operation": lambda: peer.trace(net, (ids,))}


def nnsight(ids: Tensor) -> dict[str, Callable[[], object]]:
    import nnsight as peer

    net = peer.NNsight(gpt2()[0])

    def run() -> object:
        with net.trace(ids):
            found = peer.save([])
            for block in range(10):
                interface = net.h[block].attn.source.attention_interface_1.source
                kernel = interface.torch_nn_functional_scaled_dot_product_attention_0
                found.extend([kernel.inputs, kernel.output])
        return found

    return {"nnsight, attention of ten, with inputs": run}


def transformer_lens(ids: Tensor) -> dict[str, Callable[[], object]]:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    nets = [GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager"))] * 2
    bare, whole = (copy.deepcopy(net).eval() for net in nets)
    peer = build_bridge_from_module(whole, "GPT2LMHeadModel", hf_config=whole.config)
    hooks = [f"blocks.{block}.attn.hook_pattern" for block in range(10)]
    return {
        "eager, with its head": lambda: bare(ids),
        "TransformerLens, weights of ten": lambda: peer.run_with_cache(ids, names_filter=hooks),
    }


PEERS = {"torchlens": torchlens, "nnsight": nnsight, "transformer_lens": transformer_lens}


def net_table(rounds: int) -> Table:
    table = Table(title=f"whole networks, {rounds} rounds")
    for heading in ("arm", "median / of", "quartiles", "bar"):
        table.add_column(heading)
    transformer, ids = gpt2()
    attention = [f"h.{number}.attn/scaled_dot_product_attention" for number in range(10)]
    arms = {
        "bare": lambda: transformer(ids),
        "mode by hand": under_mode(transformer, ids, keeps=True),
        "one operation": recorded(gpt2()[0], ids, "h.3/add:1"),
        "attention of ten, with inputs": recorded(gpt2()[0], ids, *attention, inputs=True),
        "weights of ten": weighed(gpt2()[0], ids),
        "every operation": recorded(gpt2()[0], ids, "*/*"),
        "every operation, Moments": reduced(gpt2()[0], ids, operations=True),
        "every module, Moments": reduced(gpt2()[0], ids, operations=False),
    }
    for package, add in PEERS.items():
        if importlib.util.find_spec(package) is not None:
            arms |= add(ids)
    bars = {
        "TransformerLens, weights of ten": ("eager, with its head", ""),
        "one operation": ("bare", "1.02"),
        "attention of ten, with inputs": ("bare", "1.05"),
        "every operation": ("mode by hand", "1.15"),
    }
    add_rows(table, "GPT-2", interleaved(arms, rounds), bars)
    images, x = resnet50()
    arms = {
        "bare": lambda: images(x),
        "mode by hand": under_mode(images, x, keeps=True),
        "every operation": recorded(resnet50()[0], x, "*/*"),
    }
    add_rows(table, "ResNet-50", interleaved(arms, rounds), bars)
    return table


def add_rows(
    table: Table, net: str, spent: dict[str, list[float]], bars: dict[str, tuple[str, str]]
) -> None:
    for name, times in spent.items():
        base, bar = bars.get(name, ("bare", ""))
        shares = [mine / other for mine, other in zip(times, spent[base], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        if name != "bare":
            row = f"{net}: {name}", f"{middle:.3f} / {base}", f"{low:.3f} to {high:.3f}", bar
            table.add_row(*row)


def tiny_table(rounds: int) -> Table:
    net, x = Tiny().eval(), torch.zeros(4)
    arms = {
        "bare": lambda: net(x),
        "mode that only calls": under_mode(net, x, keeps=False),
        "every operation recorded": recorded(Tiny().eval(), x, "/add"),
        "with inputs": recorded(Tiny().eval(), x, "/add", inputs=True),
        "another operation recorded": recorded(Tiny().eval(), x, "*"),
    }
    spent = {name: min(times) for name, times in interleaved(arms, rounds).items()}
    unit = spent["mode that only calls"] - spent["bare"]
    table = Table(title=f"added by {OPERATIONS} tiny operations, {rounds} rounds")
    for heading in ("arm", "microseconds each", "in modes that only call", "bar"):
        table.add_column(heading)
    for name, time in spent.items():
        added = time - spent["bare"]
        bar = "2.00" if name == "every operation recorded" else ""
        table.add_row(name, f"{1e6 * added / OPERATIONS:.2f}", f"{added / unit:.2f}", bar)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]  # there is one
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    console = Console()
    with torch.no_grad():
        console.print(tiny_table(30 * rounds), net_table(rounds))


if __name__ == "__main__":
    main()

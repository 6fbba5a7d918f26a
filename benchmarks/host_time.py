"""The time of Python, which is what a GPU waits for; it shows where tensors are tiny.

Run ``python benchmarks/host_time.py [--rounds 200]``. GPT-2 of 12 blocks, 16 wide, has one row of 8
tokens and no cache. Each arm runs a network of its own in one thread; arms are interleaved in
random order in one process, and figures are medians of the ratios of each round.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable

import torch
from operations import Keeping
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from scio_recorder import Recorder

BARS = {
    "all layers recorded": 1.35,
    "one operation": 1.10,
    "attention of ten": 1.40,
    "guard": 2.0,
}
# Over a function mode by hand that keeps every output.
EVERY_OPERATION_BAR = 1.5


def network() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=12,
        n_embd=16,
        n_head=2,
        n_positions=16,
        vocab_size=100,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2Model(config).eval()


def hooked(ids: Tensor, hook: Callable[..., None]) -> Callable[[], object]:
    net = network()
    for module in net.modules():
        module.register_forward_hook(hook)
    return lambda: net(ids)


def keeping(ids: Tensor) -> Callable[[], object]:
    kept: dict[nn.Module, object] = {}

    def hook(module: nn.Module, args: object, output: object) -> None:
        kept[module] = output

    return hooked(ids, hook)


def recorded(ids: Tensor, *selectors: object, **options: object) -> Callable[[], object]:
    rnet = Recorder(network(), input_data=ids, verbose=0)
    rows = selectors or tuple(at for at, row in rnet.architecture.items() if row.executed)
    rnet.record(*rows, **options)  # type: ignore[arg-type]  # selectors and options of any kind
    rnet(ids)
    return lambda: rnet(ids)


def under_mode(ids: Tensor) -> Callable[[], object]:
    net = network()

    def run() -> object:
        with Keeping([]):
            return net(ids)

    return run


def guarded(ids: Tensor) -> Callable[[], object]:
    rnet = Recorder(network(), input_data=ids, verbose=0)
    guard = rnet.guard()
    guard.__enter__()

    def run() -> object:
        # A guard that nobody holds ends.
        assert guard is not None
        return rnet.net(ids)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    net, ids = network(), torch.arange(8)[None]
    arms = {
        "bare": lambda: net(ids),
        "hooks that do nothing": hooked(ids, lambda module, args, output: None),
        "hooks that keep outputs": keeping(ids),
        "all layers recorded": recorded(ids),
        "one operation": recorded(ids, "h.3/add:1"),
        "attention of ten": recorded(ids, re.compile(r"h\.\d\.attn$"), attention=True),
        "mode by hand that keeps all": under_mode(ids),
        "every operation": recorded(ids, "*/*"),
        "guard": guarded(ids),
    }
    spent = interleaved(arms, rounds)
    bare = statistics.median(spent["bare"])
    title = f"over the bare pass of {bare * 1e3:.2f} ms, {rounds} rounds, torch {torch.__version__}"
    table = Table(title=title)
    for heading in ("arm", "median", "quartiles", "bar"):
        table.add_column(heading)
    for name, times in spent.items():
        base, bar = ("bare", BARS.get(name))
        if name == "every operation":
            base, bar = "mode by hand that keeps all", EVERY_OPERATION_BAR
        shares = [own / other for own, other in zip(times, spent[base], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        over = "" if base == "bare" else f" of {base}"
        row = f"{middle:.2f}{over}", f"{low:.2f} to {high:.2f}", f"{bar:.2f}" if bar else ""
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

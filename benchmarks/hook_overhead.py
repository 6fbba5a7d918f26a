"""The time that recording adds to a forward pass, in units of that of a do-nothing forward hook.

Run ``python benchmarks/hook_overhead.py [--rounds 300]``. The network is 300 modules that return
their input, so that nothing but hooks takes time. Arms are interleaved in random order in one
process; the first figure is the minimum over the rounds, the usual choice for such short loops, the
others the median and the quartiles of the ratios of each round.

A second table compares right records on a residual network with in-place operations with the bare
forward pass, all layers recorded.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn

from scio_recorder import Recorder

MODULES = 300


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Residual(nn.Module):
    """The basic block of a ResNet, in place as usual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu2(out)


def identity_net() -> nn.Sequential:
    # Users set a network's mode, after which Python stores the module's attributes differently, and
    # every call pays for that.
    return nn.Sequential(*[Same() for _ in range(MODULES)]).eval()


def recorder(net: nn.Module, *selectors: object, x: Tensor) -> Recorder:
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*selectors)
    for _ in range(3):
        rnet(x)
    return rnet


def do_nothing(module: nn.Module, args: object, output: object) -> None:
    pass


def hooked_net() -> nn.Sequential:
    net = identity_net()
    for module in net:
        module.register_forward_hook(do_nothing)
    return net


def torchextractor_net() -> nn.Module | None:
    if importlib.util.find_spec("torchextractor") is None:
        return None
    import torchextractor

    net = identity_net()
    extractor: nn.Module = torchextractor.Extractor(net, [str(i) for i in range(MODULES)])
    return extractor


def row(name: str, added: list[float], unit: list[float], least: float, bar: str) -> list[str]:
    shares = [a / u for a, u in zip(added, unit, strict=True) if u > 0]
    low, middle, high = statistics.quantiles(shares, n=4)
    return [name, f"{least:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", bar]


def hook_table(rounds: int) -> Table:
    x = torch.zeros(1)
    bare, hooked = identity_net(), hooked_net()
    every = recorder(identity_net(), Same, x=x)
    single = recorder(identity_net(), "150", x=x)
    extractor = torchextractor_net()
    arms: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(x),
        "do-nothing hook on each": lambda: hooked(x),
        "recorder, every layer": lambda: every(x),
        "recorder, one layer": lambda: single(x),
    }
    if extractor is not None:
        arms["torchextractor"] = lambda: extractor(x)
    spent = interleaved(arms, rounds)
    base = spent.pop("bare")
    unit = [b - a for a, b in zip(base, spent["do-nothing hook on each"], strict=True)]
    least = min(spent["do-nothing hook on each"]) - min(base)
    table = Table(title=f"added per module, in hooks; {MODULES} modules, {rounds} rounds")
    for heading in ("arm", "of the minima", "median", "quartiles", "bar"):
        table.add_column(heading)
    bars = {"recorder, every layer": "1.40", "recorder, one layer": "0.05"}
    for name, times in spent.items():
        added = [b - a for a, b in zip(base, times, strict=True)]
        share = (min(times) - min(base)) / least
        table.add_row(*row(name, added, unit, share, bars.get(name, "")))
    if extractor is None:
        table.caption = "torchextractor is not installed"
    return table


def residual_net() -> nn.Sequential:
    blocks = [Residual(64) for _ in range(8)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks).eval()


def holding(net: nn.Module, x: Tensor) -> Callable[[], None]:
    """Run a net and hold the output, with its graph, until the next run, as a recorder does."""
    held: list[Tensor] = []

    def arm() -> None:
        held.clear()
        held.append(net(x))

    return arm


def residual_table(rounds: int) -> Table:
    x = torch.randn(8, 3, 32, 32)
    table = Table(title=f"8 residual blocks, every layer recorded; {rounds} rounds")
    for heading in ("mode", "time / bare, of the minima", "median", "quartiles", "bar"):
        table.add_column(heading)
    for name, context in (("no_grad", torch.no_grad), ("grad", torch.enable_grad)):
        with context():
            rnet = recorder(residual_net(), "*", x=x)
            arms = {"bare": holding(residual_net(), x), "ours": holding(rnet, x)}
            spent = interleaved(arms, rounds)
        least = min(spent["ours"]) / min(spent["bare"])
        table.add_row(*row(name, spent["ours"], spent["bare"], least, "1.05"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        first = hook_table(rounds)
    console = Console(width=110)
    console.print(first)
    console.print(residual_table(max(30, rounds // 10)))


if __name__ == "__main__":
    main()

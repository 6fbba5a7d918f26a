"""A compiled recorder, compared with a compiled network that returns the same tensors.

Run ``python benchmarks/compiled.py [--rounds 100]``; ``torch.compile`` needs a C++ compiler. Both
arms are compiled with ``fullgraph=True``, so that a graph break would be an error, and run in turn,
in random order. The other network is written by hand: its forward returns every activation beside
the output, which is the least effort to get them. In a second table, the recorder collects batches
into memory that was used before, and the other arm copies there by hand.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.stores import Host

# The batches of one collection: its fixed cost should not count for much.
_MOST_BYTES = 400_000_000


class Returning(nn.Module):
    """Returns the output and what each layer returned."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        activations = []
        for layer in self.net:
            x = layer(x)
            # The layer after this one may overwrite it.
            activations.append(x.clone())
        return x, activations


def linears() -> tuple[nn.Sequential, Tensor]:
    layers = [part for _ in range(12) for part in (nn.Linear(256, 256), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers).eval(), torch.randn(64, 256)


def convolutions() -> tuple[nn.Sequential, Tensor]:
    layers = [
        part
        for _ in range(6)
        for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    ]
    return nn.Sequential(*layers).eval(), torch.randn(8, 16, 32, 32)


def measure(net: nn.Sequential, x: Tensor, rounds: int) -> tuple[float, list[float]]:
    """Return ours over the other, of the minima and of each round, having compared the values."""
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*(str(i) for i in range(len(net))))
    torch._dynamo.reset()
    ours = torch.compile(rnet, fullgraph=True)
    other = torch.compile(Returning(net), fullgraph=True)
    arms = {"ours": lambda: ours(x), "other": lambda: other(x)}
    for _ in range(5):
        ours(x)
        expected = other(x)[1]
    for i, tensor in enumerate(expected):
        torch.testing.assert_close(rnet.activations[str(i)], tensor)
    spent = interleaved(arms, rounds)
    shares = [a / b for a, b in zip(spent["ours"], spent["other"], strict=True)]
    # Now, and not when it is collected as garbage, perhaps while the net is compiled again.
    rnet.remove()
    return min(spent["ours"]) / min(spent["other"]), shares


def measure_collecting(net: nn.Sequential, x: Tensor, rounds: int) -> tuple[float, list[float]]:
    """Return ours over the other for a dataset, having compared what is kept."""
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*(str(i) for i in range(len(net))))
    torch._dynamo.reset()
    rnet.compile(fullgraph=True)
    other = torch.compile(Returning(net), fullgraph=True)
    returned = other(x)[1]
    number = min(100, _MOST_BYTES // sum(tensor.nbytes for tensor in returned))
    batches = [x + at for at in range(number)]
    kept = [tensor.new_empty(number * len(x), *tensor.shape[1:]) for tensor in returned]
    host = Host()

    def collect() -> None:
        rnet.collect(batches, store=host, progress=False)

    def by_hand() -> None:
        for at, batch in enumerate(batches):
            for place, tensor in zip(kept, other(batch)[1], strict=True):
                place[at * len(x) : (at + 1) * len(x)].copy_(tensor)

    by_hand()
    recording = rnet.collect(batches, progress=False)
    for i, tensor in enumerate(kept):
        torch.testing.assert_close(recording[str(i)], tensor)
    spent = interleaved({"ours": collect, "other": by_hand}, rounds)
    shares = [a / b for a, b in zip(spent["ours"], spent["other"], strict=True)]
    # Now, and not when it is collected as garbage, perhaps while the net is compiled again.
    rnet.remove()
    return min(spent["ours"]) / min(spent["other"]), shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nets = {"12 x Linear, ReLU": linears(), "6 x Conv2d, BatchNorm2d, ReLU": convolutions()}
    for what, measured in (("", measure), (", collected", measure_collecting)):
        title = f"compiled recorder / compiled net that returns the same{what}; {rounds} rounds"
        table = Table(title=title)
        for heading in ("net", "of the minima", "median", "quartiles", "bar"):
            table.add_column(heading)
        with torch.no_grad():
            for name, (net, x) in nets.items():
                least, shares = measured(net, x, rounds)
                low, middle, high = statistics.quantiles(shares, n=4)
                figures = [f"{least:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", "1.10"]
                table.add_row(name, *figures)
        Console(width=110).print(table)


if __name__ == "__main__":
    main()

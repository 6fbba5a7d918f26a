"""Tokens into memory, compared with as many bytes of samples of one shape.

Run ``python benchmarks/rows.py [--rounds 20]``. Both arms of a pair run the same net on the same
padded batches, and keep as many bytes: the one chooses the real tokens of texts of different
lengths, the other takes the first positions of all by a slice. The net is an embedding and 24
layers of 256 features on 16 texts of at most 128 tokens; one torch thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from timing import interleaved
from torch import Tensor, nn

from scio_recorder import Recorder, Recording, Tokens
from scio_recorder.stores import Host

TEXTS, POSITIONS, FEATURES, BATCHES, SHARE = 16, 128, 256, 12, 0.75
KEPT = int(POSITIONS * SHARE)


def make_net() -> nn.Module:
    layers: list[nn.Module] = [nn.Embedding(1000, FEATURES)]
    for _ in range(12):
        layers += [nn.Linear(FEATURES, FEATURES), nn.ReLU()]
    return nn.Sequential(*layers).eval()


def masks(*, left: bool) -> list[Tensor]:
    """Return masks of texts of different lengths, of `KEPT` tokens on average."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(BATCHES):
        change = torch.randint(0, POSITIONS - KEPT + 1, (TEXTS // 2,), generator=generator)
        lengths = torch.cat([KEPT + change, KEPT - change])[:, None]
        places = torch.arange(POSITIONS)
        found.append(places >= POSITIONS - lengths if left else places < lengths)
    return found


IDS = [torch.randint(1000, (TEXTS, POSITIONS)) for _ in range(BATCHES)]
SIDES = {side: masks(left=side == "left") for side in ("right", "left")}
RNET = Recorder(make_net(), input_data=IDS[0])
RNET.record(*(str(i) for i in range(25)))
STORE = Host()


def by_tokens(side: str) -> Recording:
    batches = list(zip(IDS, SIDES[side], strict=True))
    rows = Tokens(mask=lambda batch: batch[1], fields={"id": lambda batch: batch[0]})
    return RNET.collect(batches, rows=rows, to_inputs=lambda batch: batch[0], store=STORE)


def by_slice() -> Recording:
    return RNET.collect(IDS, transform=lambda activation, batch: activation[:, :KEPT], store=STORE)


def whole_tokens() -> Recording:
    return RNET.collect(IDS, rows=Tokens(), store=STORE)


def whole_samples() -> Recording:
    return RNET.collect(IDS, store=STORE)


ARMS: dict[str, Callable[[], object]] = {
    "tokens, padded on the right": lambda: by_tokens("right").num_rows,
    "tokens, padded on the left": lambda: by_tokens("left").num_rows,
    "samples, sliced": lambda: by_slice().num_samples,
    "tokens, no padding": lambda: whole_tokens().num_rows,
    "samples": lambda: whole_samples().num_samples,
}
PAIRS = {
    "tokens, padded on the right": "samples, sliced",
    "tokens, padded on the left": "samples, sliced",
    "tokens, no padding": "samples",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    assert by_tokens("right").num_rows == TEXTS * KEPT * BATCHES
    spent = interleaved(ARMS, rounds)
    for name, peer in PAIRS.items():
        ratios = [one / other for one, other in zip(spent[name], spent[peer], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name} / {peer}: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()

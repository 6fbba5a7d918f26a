"""Padded batches, small nets that read them, and the tables of tokens that plain hooks give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Recorder

VOCABULARY = 50


def padded(
    *lengths: int, positions: int = 0, side: str = "right", seed: int = 0
) -> dict[str, Tensor]:
    """Return texts of these lengths, padded on one side to a common length."""
    size = positions or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(lengths), size), generator=generator)
    places = torch.arange(size)
    mask = torch.stack(
        [places < length if side == "right" else places >= size - length for length in lengths]
    )
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def batches(*lengths: Sequence[int], side: str = "right") -> list[dict[str, Tensor]]:
    """Return a batch for each sequence of lengths, whose common lengths differ."""
    return [padded(*each, side=side, seed=seed) for seed, each in enumerate(lengths)]


class Reader(nn.Module):
    """A net that reads ids and a mask: features, a mean over what is real, and attention maps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.score = nn.Flatten(1)
        self.pool = nn.Linear(6, 4)
        self.maps = nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.maps(torch.stack([x @ x.mT] * 3, 1))
        x = self.act(self.mix(x) + x.cumsum(1))
        self.score(x[..., :1])
        out: Tensor = self.pool((x * real[..., None]).sum(1))
        return out


def reader(*selectors: Any, **options: Any) -> Recorder:
    torch.manual_seed(3)
    rnet = Recorder(Reader().eval(), input_data=torch.ones(2, 9, dtype=torch.long))
    rnet.record(*(selectors or ("embed", "mix", "act")), **options)
    return rnet


@contextmanager
def plain_hooks(net: nn.Module, *names: str) -> Iterator[dict[str, list[Tensor]]]:
    """Clone what the named modules return in each call, by plain hooks."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [
        net.get_submodule(name).register_forward_hook(
            lambda module, args, output, own=own: own.append(output.detach().clone())
        )
        for name, own in found.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def seen(
    net: nn.Module, names: Sequence[str], run: Callable[[], object]
) -> dict[str, list[Tensor]]:
    """Return what modules return while something runs."""
    with torch.no_grad(), plain_hooks(net, *names) as found:
        run()
    return found


def run_all(net: nn.Module, data: Sequence[dict[str, Tensor]]) -> Callable[[], object]:
    return lambda: [net(**batch) for batch in data]


def tokens(values: Sequence[Tensor], data: Sequence[dict[str, Tensor]]) -> Tensor:
    """Put the real positions of a layer one below the other, sample by sample."""
    return torch.cat(
        [
            line[real.bool()]
            for activation, batch in zip(values, data, strict=True)
            for line, real in zip(activation, batch["attention_mask"], strict=True)
        ]
    )


def columns(data: Sequence[dict[str, Tensor]]) -> dict[str, list[int]]:
    """Return what is known of each token, counted by hand."""
    found: dict[str, list[int]] = {"sample": [], "position": [], "input_ids": []}
    number = 0
    for batch in data:
        pairs = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
        for ids, real in pairs:
            kept = [one for one, is_real in zip(ids, real, strict=True) if is_real]
            found["sample"] += [number] * len(kept)
            found["position"] += range(len(kept))
            found["input_ids"] += kept
            number += 1
    return found


def assert_rows(recording: Any, wanted: dict[str, list[int]]) -> None:
    assert list(recording.rows) == list(wanted)
    for name, values in wanted.items():
        assert recording.rows[name][:].tolist() == values, name
    assert recording.num_rows == len(next(iter(wanted.values())))


def assert_tokens(
    recording: Any, net: nn.Module, data: Sequence[dict[str, Tensor]], *names: str
) -> None:
    """Compare layers and columns with what plain hooks see at real positions."""
    for name, values in seen(net, names, run_all(net, data)).items():
        assert torch.equal(recording[name][:], tokens(values, data)), name
    assert_rows(recording, columns(data))

"""Nets and batches for collecting, and what each layer returns, by hooks of our own."""

from __future__ import annotations

import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder


class Residual(nn.Module):
    """In-place operations on what inner layers returned, and on what it returns itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        out = self.second(self.act(kept))
        out += kept
        return self.act(out)


class Pair(nn.Module):
    """Returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.inner(x * 2), {"half": x / 2}


class Positions(nn.Module):
    """A layer whose dimension 0 does not count samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(3)).sum(0)


def plain_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), Residual(), nn.Linear(6, 3), nn.Sigmoid()
    ).eval()


def recorder(*selectors: Any, net: nn.Module | None = None, **options: Any) -> Recorder:
    rnet = Recorder(plain_net() if net is None else net, input_size=(2, 4))
    rnet.record(*(selectors or ("*",)), **options)
    return rnet


def batches(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator) for size in sizes]


def expected(rnet: Recorder, data: list[Tensor]) -> dict[tuple[int, int], Tensor]:
    """Return all that the layers return, cloned at the moment, by plain hooks on a bare net."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    calls: dict[nn.Module, int] = {}
    handles = []

    def clone(module: nn.Module, args: Any, output: Tensor) -> None:
        label = rnet.architecture.calls(module)[calls.get(module, 0)]
        calls[module] = calls.get(module, 0) + 1
        found.setdefault(tuple(label), []).append(output.clone())

    for module in {row.module for row in rnet.architecture.values()}:
        handles.append(module.register_forward_hook(clone))
    with torch.no_grad():
        for batch in data:
            calls.clear()
            rnet.net(batch)
    for handle in handles:
        handle.remove()
    # In the order in which calls return.
    return {label: torch.cat(kept) for label, kept in found.items() if label in rnet.recording}


def assert_same(recording: Any, wanted: dict[tuple[int, int], Tensor]) -> None:
    assert list(recording) == list(wanted)
    for label, tensor in wanted.items():
        assert recording[label].dtype == tensor.dtype
        assert torch.equal(recording[label], tensor), label


class LoaderMemory:
    """What loaders hold of recordings on disk, and the most that they held, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        monkeypatch.setattr("scio_recorder.recording.loader.empty_bytes", self._memory)

    def _memory(self, num_bytes: int) -> Tensor:
        self._change(num_bytes)
        held = numpy.empty(max(1, num_bytes), numpy.uint8)
        weakref.finalize(held, self._change, -num_bytes)
        return torch.from_numpy(held)[:num_bytes]

    def _change(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)

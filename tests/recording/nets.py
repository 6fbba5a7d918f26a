"""Nets and batches for collecting, and what layers and operations return, by means of our own."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder import Recorder
from scio_recorder.reductions import Reduction
from tests.operation_oracle import is_operation, short_name


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
    rnet.record(*(selectors or (("*", "2/add_") if net is None else ("*",))), **options)
    return rnet


def recorder_of(net: nn.Module, *selectors: Any, **labelled: Any) -> Recorder:
    """Label a net with given inputs, and record what is selected."""
    rnet = Recorder(net, **labelled)
    rnet.record(*selectors)
    return rnet


def seeded(*selectors: Any, **options: Any) -> Recorder:
    """Make the same recorder in each process."""
    torch.manual_seed(0)
    return recorder(*selectors, **options)


def failing_after(
    data: Sequence[Any], number: int, error: type[BaseException] = InterruptedError
) -> Iterator[Any]:
    """Yield so many batches, as a loader that fails then."""
    yield from data[:number]
    raise error


def interrupt(rnet: Recorder, data: Sequence[Any], store: Any, number: int, **options: Any) -> None:
    """Collect until the loader fails after so many batches."""
    with pytest.raises(InterruptedError):
        rnet.collect(failing_after(data, number), store=store, **options)


def batches(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator) for size in sizes]


def named_batches(number: int, sizes: Sequence[int]) -> list[tuple[Tensor, list[str]]]:
    """Return batches of a process or a part, with names of its own for all samples."""
    names = iter(f"{number}-{i}" for i in range(sum(sizes)))
    return [(batch, [next(names) for _ in batch]) for batch in batches(*sizes, seed=number)]


class Sizes(Reduction):
    """A reduction of a user's own, with the interface alone: how many samples each batch has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def update(self, activation: Tensor, batch: Any = None) -> None:
        self.sizes.append(len(activation))

    def merge(self, other: Sizes) -> None:
        self.sizes += other.sizes

    def compute(self) -> list[int]:
        return self.sizes

    def reset(self) -> None:
        self.sizes = []

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sizes = state["sizes"]


class Watch(TorchFunctionMode):
    """Clones all that layers and the functions in their own code return, by hooks on a bare net.

    Calls of a module don't lie inside each other.
    """

    def __init__(self, rnet: Recorder) -> None:
        super().__init__()
        self._labels = rnet.architecture.calls
        # By label, in the order in which calls return.
        self.found: dict[tuple[Any, ...], list[Tensor]] = {}
        self._calls: Counter[Any] = Counter()
        self._open: list[nn.Module] = []
        modules = {row.module for row in rnet.architecture.values()}
        self._handles = [module.register_forward_pre_hook(self._start) for module in modules]
        self._handles += [module.register_forward_hook(self._end) for module in modules]

    def _start(self, module: nn.Module, args: Any) -> None:
        self._open.append(module)

    def _end(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._note(self._label(self._open.pop()), output)
        self._calls[module] += 1

    def _label(self, module: nn.Module) -> tuple[int, int]:
        return self._labels(module)[self._calls[module]]

    def _note(self, label: tuple[Any, ...], output: Any) -> None:
        with torch._C.DisableTorchFunction():
            self.found.setdefault(tuple(label), []).append(output.clone())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._open and is_operation(output):
            own = *self._label(self._open[-1]), short_name(func)
            self._note((*own, self._calls[own]), output)
            self._calls[own] += 1
        return output

    def next_pass(self) -> None:
        self._calls.clear()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()


def expected(rnet: Recorder, data: list[Tensor]) -> dict[tuple[Any, ...], Tensor]:
    """Return all that the recorded layers and operations return, in that order."""
    with torch.no_grad(), Watch(rnet) as watch:
        for batch in data:
            watch.next_pass()
            rnet.net(batch)
    kept = watch.found.items()
    return {label: torch.cat(parts) for label, parts in kept if label in rnet.recording}


def assert_same(recording: Any, wanted: dict[tuple[Any, ...], Tensor]) -> None:
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

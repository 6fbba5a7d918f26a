"""Memory that a CUDA graph writes again, captures, and streams, with stand-ins for the GPU."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from scio_recorder import Recorder, UnsupportedNetError
from scio_recorder.tensors import private
from tests.capture.test_compile import DYNAMO_READS_GRAD
from tests.rotation import one_in


class Graph:
    """A backend whose results lie in the same memory in every run, as those of a CUDA graph."""

    def __init__(self, first_reused: int = 0) -> None:
        self.first_reused = first_reused
        self.num_runs = 0
        self.memory: list[Tensor] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            results = graph.forward(*args)
            self.num_runs += 1
            if self.num_runs <= self.first_reused:
                return results
            self.memory = self.memory or [torch.empty_like(result) for result in results]
            for memory, result in zip(self.memory, results, strict=True):
                # No version counts.
                memory.data.copy_(result)
            aliases = [torch.empty(0).set_(memory.data) for memory in self.memory]
            return type(results)(aliases)

        return run

    def overwrite(self) -> None:
        for memory in self.memory:
            memory.data.fill_(torch.nan)


def recorder() -> Recorder:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).eval()
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    rnet.record("*")
    return rnet


def expected(rnet: Recorder, x: Tensor) -> dict[str, Tensor]:
    first = rnet.net[0].forward(x)
    return {"0": first, "1": first.relu(), "2": rnet.net[2].forward(first.relu())}


def compiled(rnet: Recorder, way: str, backend: Any) -> Callable[[Tensor], Any]:
    if way == "function":
        return torch.compile(rnet, backend=backend, fullgraph=True)
    rnet.compile(backend=backend, fullgraph=True)
    return rnet


@DYNAMO_READS_GRAD
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("way", "first_reused"),
    one_in(3, [(way, first) for way in ("rnet.compile", "function") for first in (0, 2)]),
)
@torch.no_grad()
def test_records_outlast_later_runs_of_a_graph(way: str, first_reused: int) -> None:
    rnet = recorder()
    graph = Graph(first_reused)
    call = compiled(rnet, way, graph)
    kept = []
    for _ in range(6):
        x = torch.randn(2, 4)
        call(x)
        records = rnet.activations
        kept.append((records, records["0"], expected(rnet, x)))
    graph.overwrite()
    assert graph.memory
    for records, read, truth in kept:
        assert torch.equal(read, truth["0"])
        for name, value in truth.items():
            assert torch.equal(records[name], value)


class SaysSo(Graph):
    """Tells its options, as torch's own backend does."""

    def get_compiler_config(self) -> dict[str, bool]:
        return {"triton.cudagraphs": True}


@DYNAMO_READS_GRAD
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["rnet.compile", "function"])
@torch.no_grad()
def test_another_graph_may_run_before_records_are_read(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "_is_in_use", lambda: True)
    monkeypatch.setattr(private, "current_streams", lambda: ())
    rnet, graph = recorder(), SaysSo()
    # ``torch.compile`` asks only its own backend for options.
    optimize: Any = torch._dynamo.optimize(graph)
    call = optimize(rnet) if way == "function" else compiled(rnet, way, graph)
    for _ in range(6):
        x = torch.randn(2, 4)
        call(x)
        graph.overwrite()
        for name, value in expected(rnet, x).items():
            assert torch.equal(rnet.activations[name], value)
    assert graph.num_runs == 6


@DYNAMO_READS_GRAD
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_one_graph_from_which_nothing_can_be_copied_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "_is_in_use", lambda: True)
    optimize: Any = torch._dynamo.optimize(SaysSo(), nopython=True)
    call = optimize(recorder())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'write rnet\.compile\(mode="reduce'):
        call(torch.ones(2, 4))


def test_torch_tells_which_modes_make_cuda_graphs() -> None:
    for mode, makes_graphs in (("default", False), ("reduce-overhead", True)):
        call: Any = torch.compile(nn.Identity(), mode=mode)
        assert call.get_compiler_config()["triton.cudagraphs"] == makes_graphs


@DYNAMO_READS_GRAD
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", [Graph(), "eager"], ids=["graph", "no graph"])
@torch.no_grad()
def test_only_what_a_graph_writes_is_copied_twice(backend: Any) -> None:
    rnet = recorder()
    rnet.compile(backend=backend, fullgraph=True)
    for _ in range(5):
        rnet(torch.ones(2, 4))
    with profile() as calls:
        rnet(torch.ones(2, 4))
    num_copies = sum(event.name == "aten::clone" for event in calls.events())
    # Each of the layers, and the network itself.
    assert num_copies == 4 * (1 if backend == "eager" else 2)


@DYNAMO_READS_GRAD
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_nothing_of_a_compiled_pass_is_held_once_another_pass_begins() -> None:
    rnet = recorder()
    returned: list[weakref.ref[Tensor]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            results = graph.forward(*args)
            returned.extend(map(weakref.ref, results))
            return results

        return run

    rnet.compile(backend=backend, fullgraph=True)
    rnet(torch.ones(2, 4))
    assert any(tensor() is not None for tensor in returned)
    rnet.extract(torch.ones(2, 4))
    # What dynamo made holds itself.
    gc.collect()
    assert all(tensor() is None for tensor in returned)


def test_a_capture_is_refused_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rnet = recorder()
    asked: list[None] = []

    def is_capturing() -> bool:
        asked.append(None)
        return True

    monkeypatch.setattr(private, "is_capturing", is_capturing)
    with pytest.raises(UnsupportedNetError, match=r'rnet\.compile\(mode="reduce-overhead"\)'):
        rnet(torch.ones(2, 4))
    assert len(asked) == 1
    rnet.net(torch.ones(2, 4))
    rnet.record()
    rnet(torch.ones(2, 4))
    assert len(asked) == 1


class Late(nn.Module):
    """Returns memory whose numbers come only when somebody waits for them."""

    pending: list[Callable[[], Any]]

    def forward(self, x: Tensor) -> Tensor:
        output = torch.full_like(x, torch.nan)
        self.pending.append(lambda: output.data.copy_(x * 2))
        return output


class Streams:
    """Stands for the streams of two GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pending: list[Callable[[], Any]]) -> None:
        self.current, self.pending, self.ran_on = (0, 0), pending, [(0, 0)][:0]
        monkeypatch.setattr(private, "current_streams", lambda: self.current)
        monkeypatch.setattr(private, "run_on_streams", self.run_on)

    def run_on(self, streams: tuple[int, int], function: Callable[[], Any]) -> Any:
        self.ran_on.append(streams)
        while self.pending:
            self.pending.pop()()
        return function()


@pytest.mark.parametrize("what", ["activations", "inputs"])
def test_reading_waits_for_the_streams_of_the_pass(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late()
    late.pending = []
    rnet = Recorder(nn.Sequential(late, nn.Identity()), input_size=(1, 2), verbose=0)
    rnet.record("*", inputs=True, copy="never")
    late.pending.clear()
    streams, x = Streams(monkeypatch, late.pending), torch.randn(1, 2)
    streams.current = (0, 7)
    output = rnet(x)
    streams.current = (0, 0)
    held = getattr(rnet, what)
    assert output.isnan().all()
    value = held["1"] if what == "activations" else held["1"].args[0]
    assert torch.equal(value, x * 2)
    assert streams.ran_on == [(0, 7)]
    streams.current = (0, 7)
    assert held["1"] is not None
    assert len(streams.ran_on) == 1
    assert pickle.loads(pickle.dumps(held)).streams == ()


def test_gradients_are_read_behind_the_streams_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rnet = recorder()
    rnet.record("2", gradients=True)
    streams = Streams(monkeypatch, [])
    streams.current = (3, 0)
    rnet(torch.ones(2, 4)).sum().backward()
    streams.current = (0, 0)
    assert torch.equal(rnet.gradients["2"], torch.ones(2, 2))
    assert streams.ran_on == [(3, 0)]

"""Collecting with a compiled recorder: what the compiled net returns, and without a graph break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, reductions
from scio_recorder.errors import CollectError, UnsupportedNetError
from tests.capture.test_compile import DYNAMO_READS_GRAD

pytestmark = DYNAMO_READS_GRAD


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).eval()


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4), torch.randn(3, 4), torch.randn(2, 4)]


def recorder(**options: Any) -> Recorder:
    torch._dynamo.reset()
    rnet = Recorder(net(), input_size=(2, 4), verbose=0)
    rnet.record("0", "1", "2", **options)
    return rnet


def test_a_compiled_recorder_collects_what_the_compiled_net_returns() -> None:
    rnet = recorder()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    rnet.compile(backend=backend, fullgraph=True)
    recording = rnet.collect(
        batches(),
        transform={"1": lambda activation, batch: activation + batch},
        reduce={"2": reductions.Mean()},
        activation_postproc={"0": lambda x: x * 2},
    )
    assert graphs
    bare, x = net(), torch.cat(batches())
    # The bits of a product may depend on the size of its batch.
    first = torch.cat([bare[0](batch) for batch in batches()])
    assert torch.equal(recording["0"], first)
    assert torch.equal(recording["1"], torch.relu(first * 2) + x)
    torch.testing.assert_close(recording["2"], bare[2](torch.relu(first * 2)).mean(0))
    assert len(rnet.activations) == 0


def test_what_needs_hooks_is_refused() -> None:
    for options, given in (({"inputs": True}, {}), ({}, {"stop_early": True})):
        rnet = recorder(**options)
        rnet.compile(backend="eager")
        with pytest.raises(CollectError, match=r"compiled, and (record|stop_early)"):
            rnet.collect(batches(), **given)


def test_a_call_that_runs_uncompiled_is_an_error() -> None:
    rnet = recorder()
    rnet.compile(backend="eager")
    vars(rnet)["_compiled_call_impl"] = rnet._call_impl
    with pytest.raises(UnsupportedNetError, match="fullgraph=True"):
        rnet.collect(batches())


@pytest.mark.campaign
@pytest.mark.parametrize("is_first_outside", [True, False])
def test_a_block_does_not_lose_compiled_passes_without_a_word(is_first_outside: bool) -> None:
    rnet = recorder()
    compiled = torch.compile(rnet, backend="eager", fullgraph=True)
    x = torch.ones(2, 4)
    with torch.no_grad():
        if is_first_outside:
            compiled(x)
        held: list[Any] = []

        def run(block: Any) -> None:
            with block as passes:
                held.append(passes)
                rnet.net(x)
                compiled(x)
                rnet.net(x)

        for block in (rnet.watch(), rnet.collecting()):
            with pytest.raises(UnsupportedNetError, match="compiled recorder"):
                run(block)
        assert len(held[0]) == 2
        assert held[1].recording.num_samples == 4
        with rnet.watch() as passes:
            rnet.net(x)
        assert len(passes) == 1
        compiled(x)
        assert torch.equal(rnet.activations["0"], passes[0]["0"])

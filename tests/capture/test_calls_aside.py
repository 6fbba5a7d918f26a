"""Functions of users that call the network's own modules, which are no layers then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Nodes, Recorder
from scio_recorder.postprocessors import OnInput
from scio_recorder.reductions import Mean
from tests.harness import recorder
from tests.zoo.base import Net, linear

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def made(**options: Any) -> tuple[nn.Sequential, Recorder]:
    net = nn.Sequential(linear(), nn.ReLU(), linear())
    rnet = recorder(net, "*", **options)
    return net, rnet


def others(net: nn.Sequential) -> dict[str, Callable[[Tensor], Any]]:
    """Return functions that run modules of the net, or all of it, and hand on double the value."""
    other = recorder(net, "1")
    return {
        "a module": lambda x: net[2](x) * 0 + x * 2,
        "the net": lambda x: net(x + 1) * 0 + x * 2,
        "another recorder": lambda x: other(x + 1) * 0 + x * 2,
    }


WAYS = ("a module", "the net", "another recorder")


@pytest.mark.parametrize("copy", ["auto", "always"])
@pytest.mark.parametrize("calls", ["labelled", "any"])
@pytest.mark.parametrize("way", WAYS)
def test_postprocessors(way: str, calls: str, copy: str) -> None:
    net, rnet = made(calls=calls, copy=copy)
    function = others(net)[way]
    for _ in range(3):
        x = torch.randn(3, 4)
        output = rnet(x, activation_postproc={"0": function})
        first = net[0].forward(x)
        truth = {"0": first, "1": (2 * first).relu(), "2": net[2].forward((2 * first).relu())}
        torch.testing.assert_close(output, truth["2"])
        for name, expected in truth.items():
            record = rnet.activations[name]
            if calls == "any":
                assert len(record) == 1
                (record,) = record
            torch.testing.assert_close(record, expected)


@pytest.mark.parametrize("calls", ["labelled", "any"])
@pytest.mark.parametrize("way", WAYS)
def test_postprocessors_of_operations(way: str, calls: str) -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(torch.tanh(super().forward(torch.sin(x))), 1)

    net = Own(linear(), nn.ReLU(), linear())
    rnet = recorder(net, "*/*", calls=calls)
    for x in torch.randn(3, 3, 4):
        output = rnet(
            x, activation_postproc={"/sin": others(net)[way], "0/linear": others(net)[way]}
        )
        inner = net[2].forward((net[0].forward(x.sin() * 2) * 2).relu())
        torch.testing.assert_close(output, inner.tanh() + 1)
        calls_of_tanh = rnet.activations["/tanh"]
        torch.testing.assert_close(
            calls_of_tanh[0] if calls == "any" else calls_of_tanh, inner.tanh()
        )


def test_inputs_and_gradients() -> None:
    net, rnet = made(inputs=True, gradients=True)
    x = torch.randn(3, 4)
    rnet(x, activation_postproc={"2": OnInput(lambda y: net[0](y))}).sum().backward()
    hidden = net[0].forward(x).relu().detach()
    torch.testing.assert_close(rnet.activations["2"], net[2].forward(net[0].forward(hidden)))
    torch.testing.assert_close(rnet.gradients["2"], torch.ones(3, 4))
    assert set(rnet.gradients) == set(rnet.activations) == set(rnet.inputs)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_regions_that_run_again(is_reentrant: bool) -> None:
    body = nn.Sequential(linear(), nn.ReLU(), linear())
    net = Net(lambda net, x: checkpoint(net.body, x, use_reentrant=is_reentrant), body=body)
    net.double()
    rnet = recorder(net, "body.*")
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rnet(x, activation_postproc={"body.0": net.body[2]}).square().sum().backward()
    weights = list(net.parameters())
    found = [x.grad, *(weight.grad for weight in weights)]
    first, relu, last = net.body
    truth = last(relu(last(first(x)))).square().sum()
    for one, expected in zip(found, torch.autograd.grad(truth, [x, *weights]), strict=True):
        torch.testing.assert_close(one, expected)


def test_compiled_passes() -> None:
    net, rnet = made()
    rnet.compile(fullgraph=True, backend="eager")
    x = torch.randn(3, 4)
    with torch.no_grad():
        output = rnet(x, activation_postproc={"0": others(net)["a module"]})
        first = net[0].forward(x)
        torch.testing.assert_close(rnet.activations["0"], first)
        torch.testing.assert_close(rnet.activations["2"], net[2].forward((2 * first).relu()))
        torch.testing.assert_close(output, rnet.activations["2"])


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("way", ["a module", "another recorder"])
def test_transforms(way: str, watched: bool) -> None:
    net, rnet = made()
    function = others(net)[way]
    batches = list(torch.randn(3, 3, 4))
    transform = {"0": lambda activation, batch: function(activation)}
    if watched:
        with rnet.collecting(transform=transform) as collection, torch.no_grad():
            for batch in batches:
                net(batch)
        recording = collection.recording
    else:
        recording = rnet.collect(batches, transform=transform)
    with torch.no_grad():
        first = torch.cat([net[0].forward(batch) for batch in batches])
    torch.testing.assert_close(recording["0"], 2 * first)
    torch.testing.assert_close(recording["2"], net[2].forward(first.relu()).detach())


@pytest.mark.parametrize("is_block", [False, True])
def test_predicted_classes_of_a_reduction(is_block: bool) -> None:
    net, rnet = made()
    data = [torch.randn(6, 4) for _ in range(3)]
    mean = Mean(by=lambda batch: net(batch["input"] if is_block else batch).argmax(1))
    with torch.no_grad():
        if is_block:
            with rnet.collecting(store=None, reduce=mean) as collection:
                for x in data:
                    net(x)
            found = collection.recording["0"]
        else:
            found = rnet.collect(data, store=None, reduce=mean, progress=False)["0"]
        x = torch.cat(data)
        classes, first = net(x).argmax(1), net[0](x)
    assert {*found} == {*classes.tolist()}
    for label, value in found.items():
        torch.testing.assert_close(value, first[classes == label].mean(0))


def test_facts_about_rows_of_a_block() -> None:
    net, rnet = made()
    rnet.record("0")
    rows = Nodes(sample=None, fields={"class": lambda batch: net(batch["input"]).argmax(1)})
    x = torch.randn(6, 4)
    with rnet.collecting(rows=rows) as collection:
        net(x)
    assert collection.recording.num_rows == 6
    assert torch.equal(collection.recording.rows["class"], net(x).argmax(1))


def test_a_postprocessor_that_fails_leaves_the_recorder_as_it_was() -> None:
    net, rnet = made()

    def fail(x: Tensor) -> Tensor:
        net(x)
        raise KeyError("none")

    for _ in range(2):
        with pytest.raises(KeyError):
            rnet(torch.randn(3, 4), activation_postproc={"0": fail})
        x = torch.randn(3, 4)
        rnet(x)
        torch.testing.assert_close(rnet.activations["0"], net[0].forward(x))
        assert len(rnet.activations) == 4

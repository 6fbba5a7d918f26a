"""`record(..., calls="any")`: a name stands for all calls of its module in a pass."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import (
    CollectError,
    FlowError,
    LayerNotFoundError,
    RecomputeError,
    Recorder,
    SelectorTypeError,
    UnsupportedNetError,
)
from tests.zoo.base import Net, linear

WIDTH = 4


class Experts(nn.Module):
    """Sends each row to one of its experts: how many of them run depends on the data."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.ReLU(inplace=inplace)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        rows = [self.act(self.experts[at](row)) for at, row in zip(chosen, x, strict=True)]
        return self.head(torch.stack(rows))


def by_hand(net: Experts, x: Tensor, chosen: list[int]) -> dict[str, list[Tensor]]:
    """Compose what every module returns, call by call."""
    values: dict[str, list[Tensor]] = {f"experts.{at}": [] for at in range(3)}
    values["act"] = []
    for at, row in zip(chosen, x, strict=True):
        linear = nn.functional.linear(row, net.experts[at].weight, net.experts[at].bias)
        values[f"experts.{at}"].append(linear.clone())
        values["act"].append(linear.clamp(min=0))
    values["head"] = [
        nn.functional.linear(torch.stack(values["act"]), net.head.weight, net.head.bias)
    ]
    return values


def recorder(net: Experts, *selectors: Any, **options: Any) -> Recorder:
    labelled = {"x": torch.ones(4, WIDTH), "chosen": [0, 1, 2, 0]}
    rnet = Recorder(net, input_data=labelled, force_static_flow=False)
    rnet.record(*selectors, calls="any", **options)
    return rnet


ROUTES = [[0, 0], [1, 2, 1], [2], [0, 1, 2, 0, 1], [1, 1]]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", [{}, {"copy": "always"}, {"inputs": True}, {"offload": True}])
@pytest.mark.parametrize("grad", [False, True])
def test_every_call_is_there_in_order(inplace, options, grad):
    net = Experts(inplace)
    rnet = recorder(net, "experts.*", "act", "head", **options)
    for route in ROUTES:
        x = torch.randn(len(route), WIDTH)
        with torch.set_grad_enabled(grad):
            out = rnet(x, route)
            expected = by_hand(net, x, route)
        assert torch.equal(out, expected["head"][0])
        for name, calls in expected.items():
            found = rnet.activations[name]
            assert isinstance(found, tuple)
            assert len(found) == len(calls)
            assert all(map(torch.equal, found, calls))


def test_inputs_are_tuples_too():
    net = Experts()
    rnet = recorder(net, "experts.*", inputs=True)
    for route in ROUTES:
        x = torch.randn(len(route), WIDTH)
        rnet(x, route)
        for at in range(3):
            rows = [row for to, row in zip(route, x, strict=True) if to == at]
            inputs = rnet.inputs[f"experts.{at}"]
            assert len(inputs) == len(rows)
            assert all(
                torch.equal(each.args[0], row) for each, row in zip(inputs, rows, strict=True)
            )


def test_each_call_is_on_the_graph():
    net = Experts(inplace=True)
    rnet = recorder(net, "experts.1")
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        out = rnet(x, [1, 0, 1])
        found = torch.autograd.grad(out.sum(), rnet.activations["experts.1"])
        # Through the ReLU, where it is open, each row gets the column sums of the head.
        for gradient, row in zip(found, (x[0], x[2]), strict=True):
            is_open = (net.experts[1](row) > 0).float()
            assert torch.allclose(gradient, is_open * net.head.weight.sum(0), atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_tuples_too(inplace):
    net = Experts(inplace)
    rnet = recorder(net, "experts.*", "act", gradients=True)
    told: list[Any] = []
    rnet.on_gradients(lambda gradients: told.append(gradients))
    for route in ROUTES:
        x = torch.randn(len(route), WIDTH)
        rnet(x, route)[0, 0].backward()
        # Nothing but the first row has a gradient of other than zeros.
        weight = net.head.weight[0]
        is_open = (net.experts[route[0]](x[0]) > 0).float()
        expected: dict[str, list[Tensor]] = {name: [] for name in by_hand(net, x, route)}
        for row, at in enumerate(route):
            expected["act"].append(weight * (row == 0))
            expected[f"experts.{at}"].append(is_open * weight * (row == 0))
        for name in ("act", "experts.0", "experts.1", "experts.2"):
            # No call, no gradient.
            assert (name in rnet.gradients) == bool(expected[name])
            pairs = zip(rnet.gradients.get(name, ()), expected[name], strict=True)
            assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
        assert list(told[-1]) == list(rnet.gradients)
        for label, calls in told[-1].items():
            assert all(map(torch.equal, calls, rnet.gradients[label]))


def test_gradients_of_calls_that_got_none():
    net = Experts()
    rnet = recorder(net, "experts.*", gradients="accumulate")
    out = rnet(torch.randn(3, WIDTH), [0, 1, 0])
    first, second = rnet.activations["experts.0"]
    for _ in range(2):
        (3 * second).sum().backward(retain_graph=True)
    assert "experts.1" not in rnet.gradients
    one, other = rnet.gradients["experts.0"]
    assert one is None
    assert torch.equal(other, torch.full((WIDTH,), 6.0))
    (first.sum() + out.sum() * 0).backward()
    one, other = rnet.gradients["experts.0"]
    assert torch.equal(one, torch.ones(WIDTH))
    assert torch.equal(other, torch.full((WIDTH,), 6.0))
    assert torch.equal(rnet.gradients["experts.1"][0], torch.zeros(WIDTH))


def test_labelled_calls_still_raise():
    rnet = recorder(Experts(), "act")
    rnet(torch.ones(3, WIDTH), [0, 1, 2])
    assert len(rnet.activations["act"]) == 3
    rnet.record("act")
    with pytest.raises(FlowError, match=r"record\(\.\.\., calls=\"any\"\)"):
        rnet(torch.ones(3, WIDTH), [0, 1, 2])


def test_what_can_be_chosen():
    rnet = recorder(Experts(), "*")
    names = [rnet.architecture[label].name for label in rnet.recording]
    assert sorted(names) == ["", "act", "experts.0", "experts.1", "experts.2", "head"]
    first, second, *_ = rnet.architecture.labels_of("act")
    rnet.record(first, calls="any")
    assert rnet.recording == (first,)
    for selector in (second, f"{second[0]}-{second[1]}"):
        with pytest.raises(LayerNotFoundError, match="further call"):
            rnet.record(selector, calls="any")
    with pytest.raises(LayerNotFoundError, match="did not run"):
        rnet.record("experts", calls="any")
    with pytest.raises(SelectorTypeError, match="calls="):
        rnet.record("act", calls="all")  # type: ignore[arg-type]
    assert rnet.recording == (first,)


def test_modules_that_did_not_run_are_named():
    nested = Net(lambda net, x, chosen: net.inner(x, chosen), inner=Experts())
    data = {"x": torch.ones(2, WIDTH), "chosen": [1, 1]}
    rnet = Recorder(nested, input_data=data, force_static_flow=False)
    left_out = r"^inner\.experts\.0, inner\.experts\.2 did not run at labelling.*input_data="
    for selector in ("inner.experts.*", nn.Linear, re.compile("experts"), "*"):
        with pytest.warns(UserWarning, match=left_out):
            rnet.record(selector, calls="any")
        assert "inner.experts.1" in {rnet.architecture[label].name for label in rnet.recording}
    for selector in ("inner.experts.0", "inner.experts.[02]", rnet.net.inner.experts[0]):
        with pytest.raises(LayerNotFoundError, match=r"did not run at labelling.*input_data="):
            rnet.record(selector, calls="any")
    rnet.record("inner.experts.1", "inner.head", calls="any")


def test_post_processors_act_on_every_call():
    net = Experts()
    rnet = recorder(net, "experts.*", "act")
    x = torch.randn(4, WIDTH)
    route = [1, 0, 1, 2]

    def expected(shift: float) -> Tensor:
        rows = [net.experts[at](row) + shift * (at == 1) for at, row in zip(route, x, strict=True)]
        return net.head(torch.stack([row.clamp(min=0) for row in rows]))

    for shift in (1.0, -2.0):
        out = rnet(x, route, activation_postproc={"experts.1": lambda y, by=shift: y + by})
        assert torch.equal(out, expected(shift))
        assert torch.equal(rnet.activations["experts.1"][1], net.experts[1](x[2]))


def repeating(**options: Any) -> Recorder:
    """Record the calls of a cell in a region that may run again."""

    def forward(net: Any, x: Tensor, times: int, reentrant: bool | None) -> Any:
        def steps(x: Tensor) -> Tensor:
            for _ in range(times):
                x = net.cell(x).tanh()
            return x

        return steps(x) if reentrant is None else checkpoint(steps, x, use_reentrant=reentrant)

    data = (torch.ones(2, WIDTH), 1, None)
    rnet = Recorder(Net(forward, cell=linear()), input_data=data, force_static_flow=False)
    rnet.record("cell", calls="any", **options)
    return rnet


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_calls_are_changed_again(reentrant):
    rnet = repeating()
    net = rnet.net
    x = torch.randn(2, WIDTH, requires_grad=True)
    found = []
    for mode in (None, reentrant):
        out = rnet(x, 3, mode, activation_postproc=lambda y: y * 0.5)
        assert len(rnet.activations["cell"]) == 3
        found.append(
            torch.autograd.grad(out.sum(), [x, *net.parameters()]) if mode is None else None
        )
        if mode is not None:
            x.grad = None
            net.zero_grad()
            out.sum().backward()
            found[-1] = (x.grad, *(p.grad for p in net.parameters()))
        assert len(rnet.activations["cell"]) == 3
    assert all(map(torch.equal, found[0], found[1]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_checkpointed_calls(reentrant):
    rnet = repeating(gradients=True)
    net = rnet.net
    x = torch.randn(2, WIDTH, requires_grad=True)
    for times in (3, 1, 4):
        y, calls = x, []
        for _ in range(times):
            calls.append(net.cell(y))
            y = calls[-1].tanh()
        expected = torch.autograd.grad(y[0].sum(), calls)
        rnet(x, times, reentrant)[0].sum().backward()
        assert all(map(torch.equal, rnet.gradients["cell"], expected))
        assert len(rnet.gradients["cell"]) == times


def test_compiled():
    rnet = repeating()
    net = rnet.net
    compiled = torch.compile(rnet, fullgraph=True, backend="eager")
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for times in (2, 3):
            y, expected = x, []
            for _ in range(times):
                expected.append(net.cell(y))
                y = expected[-1].tanh()
            compiled(x, times, None)
            assert all(map(torch.equal, rnet.activations["cell"], expected))
            assert len(rnet.activations["cell"]) == times


def test_extract_runs_all():
    rnet = recorder(Experts(), "act")
    assert len(rnet.extract(torch.ones(3, WIDTH), [0, 1, 2])["act"]) == 3


def test_collect_takes_a_transform_of_the_tuple():
    net = Experts(inplace=True)
    rnet = recorder(net, "act", "experts.0")
    data = [{"x": torch.randn(len(route), WIDTH), "chosen": route} for route in ROUTES]
    with pytest.raises(CollectError, match="transform"):
        rnet.collect(data, progress=False)
    rnet.record("act", calls="any")
    recording = rnet.collect(
        data, transform=lambda calls, batch: torch.stack(calls), progress=False
    )
    with torch.no_grad():
        expected = [torch.stack(by_hand(net, **batch)["act"]) for batch in data]  # type: ignore[arg-type]
    assert torch.equal(recording["act"], torch.cat(expected))
    rnet.record("act", inputs=True, calls="any")
    with pytest.raises(CollectError, match="inputs"):
        rnet.collect(data, transform=lambda calls, batch: torch.stack(calls), progress=False)


def test_recompute_needs_labelled_calls():
    rnet = recorder(Experts(), "", inputs=True)
    rnet(torch.ones(2, WIDTH), [0, 1])
    with pytest.raises(RecomputeError, match="calls"):
        rnet.recompute("act")


@pytest.mark.parametrize("is_first", [True, False])
def test_operations_inside_a_transform_are_no_calls(is_first: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = x if is_first else x * 3
        y = torch.func.vmap(lambda row: row.tanh() * 2)(y)
        return y * 5 if is_first else y

    x = torch.randn(2, WIDTH)
    rnet = Recorder(Net(forward), input_size=(2, WIDTH))
    rnet.record("/mul", calls="any", inputs=True)
    for _ in range(3):
        rnet(x)
        (record,) = rnet.activations["/mul"]
        assert torch.equal(record, x.tanh() * 2 * 5 if is_first else x * 3)


def test_if_one_of_the_calls_is_overwritten_all_are_copied() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        first = net.layer(x)
        second = net.layer(first + 1)
        first.detach().zero_()
        return second

    net = Net(forward, layer=linear())
    rnet = Recorder(net, input_size=(3, WIDTH))
    rnet.record("layer", calls="any")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, WIDTH)
            rnet(x)
            first = nn.functional.linear(x, net.layer.weight, net.layer.bias)
            second = nn.functional.linear(first + 1, net.layer.weight, net.layer.bias)
            assert list(map(torch.equal, rnet.activations["layer"], (first, second))) == [True] * 2


@pytest.mark.parametrize("calls", ["labelled", "any"])
def test_a_layer_inside_a_transform_can_not_be_recorded(calls: Any) -> None:
    net = Net(lambda net, x: torch.vmap(net.inner)(x), inner=linear())
    rnet = Recorder(net, input_size=(3, WIDTH))
    rnet.record("inner", calls=calls)
    for _ in range(2):
        with pytest.raises(UnsupportedNetError, match=r"1-1 inner .* torch.func.*a layer around"):
            rnet(torch.randn(3, WIDTH))
    rnet.record("", calls=calls)
    rnet(torch.randn(3, WIDTH))
    assert len(rnet.activations) == 1

"""The list of operations, and the selectors, keys and errors of operations."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import (
    FlowError,
    LabellingError,
    LayerNotFoundError,
    Operation,
    OperationIdx,
    Recorder,
    SelectorTypeError,
)
from scio_recorder.nets.operations import function_name
from tests.harness import recorder
from tests.operation_oracle import Operations, short_name
from tests.oracle import same_bits
from tests.zoo.base import Net as Composed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.linear(x) + 1)
        return helper(hidden) + x


def helper(x: Tensor) -> Tensor:
    return torch.flatten(x, 1).softmax(dim=-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.T.mean(dim=0) / 2


NAMES = [
    "blocks.0.linear/linear:0",
    "blocks.0/add:0",
    "blocks.0.act/gelu:0",
    "blocks.0/flatten:0",
    "blocks.0/softmax:0",
    "blocks.0/add:1",
]
NAMES += [name.replace(".0", ".1", 1) for name in NAMES]
NAMES += ["/T:0", "/mean:0", "/div:0"]


def wrap(net: nn.Module | None = None, **options: Any) -> Recorder:
    return Recorder(net or Net(), input_size=(3, 4), verbose=0, **options)


def chosen(rnet: Recorder, *selectors: Any, **options: Any) -> list[str]:
    rnet.record(*selectors, **options)
    return [rnet.operations()[at].name for at in rnet.recording if len(at) == 4]


def test_operations_stand_in_the_order_in_which_they_return() -> None:
    rnet = wrap()
    operations = rnet.operations()
    assert [row.name for row in operations.values()] == NAMES
    with Operations(rnet.net) as truth, torch.no_grad():
        rnet.net(torch.randn(3, 4))
    assert [f"{key.name}/{key.function}:{key.number}" for key in truth.calls] == NAMES
    shapes = [tuple(called.output.value.shape) for called in truth.calls.values()]
    assert [row.output_shape for row in operations.values()] == shapes
    label, row = next(iter(operations.items()))
    assert isinstance(row, Operation)
    assert (label, str(label)) == (row.label, "3-1/linear:0")
    assert (row.function, row.index, row.layer.name) == ("linear", 0, "blocks.0.linear")
    assert row.layer is rnet.architecture["blocks.0.linear"]


def test_a_line_is_that_of_the_innermost_frame_outside_of_torch() -> None:
    operations = {row.name: row for row in wrap().operations().values()}
    for name, function, source in [
        ("blocks.1/add:0", Block.forward, "hidden = self.act(self.linear(x) + 1)"),
        ("blocks.1/softmax:0", helper, "return torch.flatten(x, 1).softmax(dim=-1)"),
        ("/div:0", Net.forward, "return x.T.mean(dim=0) / 2"),
        ("blocks.0.linear/linear:0", nn.Linear.forward, None),
    ]:
        row = operations[name]
        lines, first = inspect.getsourcelines(function)
        assert Path(row.file) == Path(inspect.getfile(function))
        assert lines[row.line - first].strip() == row.source
        assert source in (row.source, None)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("blocks.1/add:1", ["blocks.1/add:1"]),
        ("2-2/add:1", ["blocks.1/add:1"]),
        ("blocks.1/add", ["blocks.1/add:0", "blocks.1/add:1"]),
        ("blocks.*/soft*", ["blocks.0/softmax:0", "blocks.1/softmax:0"]),
        ("*/add:1", ["blocks.0/add:1", "blocks.1/add:1"]),
        ("*/*", sorted(NAMES)),
        ("/div", ["/div:0"]),
        ("0-1/div", ["/div:0"]),
        ("0-1/*:0", ["/T:0", "/div:0", "/mean:0"]),
        (OperationIdx(0, 1, "div", 0), ["/div:0"]),
        ((2, 2, "add", 1), ["blocks.1/add:1"]),
    ],
)
def test_selectors_of_every_form(selector: Any, expected: list[str]) -> None:
    rnet = wrap()
    assert sorted(chosen(rnet, selector)) == expected
    assert rnet.recording == tuple(sorted(rnet.recording))
    rows = rnet.operations(selector)
    assert sorted(row.name for row in rows.values()) == expected


def test_selectors_mix_and_those_without_a_slash_choose_layers() -> None:
    rnet = wrap()
    rnet.record("blocks.0/add:1", nn.GELU, "blocks.1", re.compile("linear$"), (0, 1), "/T")
    assert [row for row in rnet.recording if len(row) == 4] == [
        (0, 1, "T", 0),
        (2, 1, "add", 1),
    ]
    layers = {rnet.architecture[row].name for row in rnet.recording if len(row) == 2}
    acts, linears = {"blocks.0.act", "blocks.1.act"}, {"blocks.0.linear", "blocks.1.linear"}
    assert layers == {"", "blocks.1", *acts, *linears}
    rnet.record("*", re.compile(""), lambda layer: True)
    assert all(len(row) == 2 for row in rnet.recording)
    assert set(rnet.recorded_modules) == set(rnet.recording)
    rows = rnet.operations("blocks.1", nn.GELU)
    assert {row.layer.name for row in rows.values()} == {"blocks.1", "blocks.0.act", "blocks.1.act"}


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("blocks.0/ad", "'blocks.0/ad'.*'add'"),
        ("blocks.0/add:2", "there are 'add:0', 'add:1'$"),
        ("block/add", "no module has the qualified name 'block'; the closest name"),
        ("9-9/add", "9-9"),
        ((2, 2, "sub", 0), "2-2/sub:0"),
        (OperationIdx(7, 2, "add", 0), "7-2"),
        ("blocks/add", "its own code calls none"),
        ("/", "'/'"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error(selector: Any, message: str) -> None:
    rnet = wrap()
    rnet.record("blocks.0/add:1", "blocks.1")
    before = rnet.recording
    with pytest.raises(LayerNotFoundError, match=message):
        rnet.record("blocks.1", selector)
    with pytest.raises(LayerNotFoundError, match=message):
        rnet.operations(selector)
    assert rnet.recording == before


def test_a_module_whose_name_has_a_slash_comes_first() -> None:
    net = nn.Sequential()
    net.add_module("a/relu", nn.ReLU())
    net.add_module("a", nn.ReLU())
    rnet = wrap(net)
    rnet.record("a/relu")
    assert [rnet.architecture[at].name for at in rnet.recording] == ["a/relu"]
    assert chosen(rnet, "a/relu:0") == ["a/relu:0"]
    assert chosen(rnet, "a/relu/relu") == ["a/relu/relu:0"]


def test_keys_of_records() -> None:
    rnet, x = wrap(), torch.randn(3, 4)
    rnet.record("*/*")
    rnet(x)
    hidden = rnet.net.blocks[0].linear(x) + 1
    keys = ["blocks.0/add:0", "2-1/add:0", (2, 1, "add", 0), OperationIdx(2, 1, "add", 0)]
    for key in keys:
        assert same_bits(rnet.activations[key], hidden)
        assert key in rnet.activations
    assert same_bits(rnet.activations["blocks.0.act/gelu"], nn.functional.gelu(hidden))
    with pytest.raises(LayerNotFoundError, match=r"ambiguous.*2-1/add:0, 2-1/add:1"):
        rnet.activations["blocks.0/add"]
    assert "blocks.0/add" not in rnet.activations
    rnet.record("blocks.0/add:1", "blocks.0/flatten")
    rnet(x)
    assert rnet.activations["blocks.0/add"] is rnet.activations["blocks.0/add:1"]
    with pytest.raises(LayerNotFoundError, match="no operation is '/T'"):
        rnet.activations["/T"]
    assert [*rnet.activations] == [(2, 1, "flatten", 0), (2, 1, "add", 1)]


def test_what_belongs_to_layers_only_says_so() -> None:
    rnet = wrap()
    rnet.record("blocks.0/add:1", "blocks.0", inputs=True)
    rnet(torch.randn(3, 4))
    assert list(rnet.recorded_modules) == [(2, 1)]
    with pytest.raises(LayerNotFoundError):
        rnet.recompute("blocks.0/add:1")
    with pytest.raises((LayerNotFoundError, SelectorTypeError)), rnet.saved_tensors("blocks.0/add"):
        pass


def test_any_number_of_calls() -> None:
    def loop(_: Any, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = x.sin() * 2
        return x

    rnet = recorder(Composed(loop), "/sin", input_data=torch.ones(2), calls="any")
    assert rnet.recording == ((0, 1, "sin", 0),)
    x = torch.randn(2)
    for steps in (3, 0, 1):
        rnet(x, steps)
        expected, y = [], x
        for _ in range(steps):
            expected.append(y.sin())
            y = y.sin() * 2
        records = rnet.activations["/sin"]
        assert isinstance(records, tuple)
        assert len(records) == steps
        assert all(map(same_bits, records, expected))
    for selector in ("/sin:0", "/sin:1", "*/sin:0", OperationIdx(0, 1, "sin", 1)):
        with pytest.raises(LayerNotFoundError, match='with calls="any" all calls are one entry'):
            rnet.record(selector, calls="any")
    rnet.record("/sin")
    with pytest.raises(FlowError, match=r"0-1/sin:0.*: 2 at labelling, 3 now"):
        rnet(x, 3)


def test_modules_that_did_not_run_are_left_out_with_a_warning() -> None:
    experts = nn.ModuleList(Block() for _ in range(3))
    net = Composed(lambda net, x, chosen=0: net.experts[chosen](x), experts=experts)
    rnet = Recorder(net, input_data=torch.ones(3, 4), verbose=0)
    with pytest.warns(UserWarning, match=r"experts\.1, experts\.2 .*did not run at labelling"):
        rnet.record("experts.?/softmax", calls="any")
    x = torch.randn(3, 4)
    rnet(x, 1)
    assert rnet.activations["experts.0/softmax"] == ()
    rnet(x)
    block = rnet.net.experts[0]
    [record] = rnet.activations["experts.0/softmax"]
    assert same_bits(record, helper(block.act(block.linear(x) + 1)))


def test_calls_that_are_shared_out_otherwise_are_an_error() -> None:
    def part(_: Any, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = x.sin()
        return x

    def forward(net: Any, x: Tensor, first: int = 2) -> Any:
        return net.part(net.part(x, first), 5 - first)

    rnet = recorder(Composed(forward, part=Composed(part)), "part/sin", input_data=torch.ones(2))
    assert len(rnet.recording) == 5
    rnet(torch.ones(2))
    with pytest.raises(FlowError, match=r"1-1/sin:0 .*: 2 at labelling, 3 now"):
        rnet(torch.ones(2), 3)
    with pytest.raises(FlowError, match=r"part/sin:0.*5 at labelling, 4 now|sin"):
        rnet(torch.ones(2), 6)


def test_what_runs_in_a_transform_is_listed_and_not_recorded() -> None:
    mapped = Composed(lambda _, x: torch.vmap(lambda row: row.sin())(x).cos())
    rnet = Recorder(mapped, input_data=torch.randn(2, 3), verbose=0)
    assert [row.function for row in rnet.operations().values()] == ["sin", "cos"]
    with pytest.raises(LayerNotFoundError, match=r"torch.func transform"):
        rnet.record("/sin")
    rnet.record("*/*")
    assert rnet.recording == ((0, 1, "cos", 0),)
    x = torch.randn(2, 3)
    rnet(x)
    assert same_bits(rnet.activations["/cos"], x.sin().cos())


def test_a_net_that_is_another_one_now_lists_nothing() -> None:
    rnet = wrap()
    rnet.net.blocks.append(Block())
    with pytest.raises(LabellingError, match="construct the Recorder again"):
        rnet.operations()


def test_names_are_those_of_torch() -> None:
    x = torch.ones(2, 2)
    functions = [
        (torch.Tensor.add_, "add_"),
        (torch.Tensor.__getitem__, "getitem"),
        (torch.Tensor.T.__get__, "T"),
        (torch.ops.aten.add.Tensor, "add"),
        (torch.ops.aten.relu.default, "relu"),
        (torch.nn.functional.softmax, "softmax"),
        (x.__class__.matmul, "matmul"),
    ]
    for function, name in functions:
        assert function_name(function) == name
        assert short_name(function) == name


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16, torch.float16, "meta"])
@pytest.mark.parametrize(
    "given",
    [
        {"input_size": (1, 4)},
        {"input_data": torch.ones(1, 4)},
        {"input_data": {"x": torch.ones(1, 4), "rows": torch.zeros(1, dtype=torch.int64)}},
    ],
    ids=["size", "tensor", "names"],
)
def test_operations_are_listed_for_the_network_as_it_is_now(to: Any, given: Any) -> None:
    def forward(net: Any, x: Tensor, rows: Tensor | None = None) -> Any:
        x = net.inner(x).sin()
        return x if rows is None else x[rows]

    net = Composed(forward, inner=nn.Linear(4, 4))
    rnet = Recorder(net, **given)
    net.to(to)
    weight = net.inner.weight
    x = torch.ones(3, 4, dtype=weight.dtype, device=weight.device)
    rnet.record("/sin")
    rnet(x)
    record = rnet.activations["/sin"]
    assert (record.dtype, record.device) == (weight.dtype, weight.device)
    if not record.is_meta:
        assert torch.equal(record, net.inner(x).sin())

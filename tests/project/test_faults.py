"""The benchmark of planted faults: each is where it is said to be, and answers are counted."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import linecache
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).parents[2]
Call = tuple[str, tuple[Any, ...], dict[str, Any], Any]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def cloned(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


def calls_of(net: nn.Module, inputs: dict[str, Tensor]) -> list[Call]:
    """What each call of a module receives and returns."""
    calls: list[Call] = []
    received: list[Any] = []
    for name, module in net.named_modules():
        module.register_forward_pre_hook(
            lambda module, args, kwargs: received.append(cloned((args, kwargs))), with_kwargs=True
        )
        module.register_forward_hook(
            lambda module, args, output, name=name: calls.append(
                (name, *received.pop(), cloned(output))
            )
        )
    net(**inputs)
    return calls


def is_wrong(output: Any, right: Any) -> bool:
    pairs = zip(tree_leaves(output), tree_leaves(right), strict=True)
    tensors = [(x, y) for x, y in pairs if isinstance(x, Tensor) and x.is_floating_point()]
    return any(float((x - y).norm()) > 1e-9 * float(y.norm()) for x, y in tensors)


def culprits(calls: list[Call], port: nn.Module) -> set[str]:
    """The innermost modules that return something wrong for the right inputs, in float64."""
    wrong = {
        name
        for name, args, kwargs, output in calls
        if is_wrong(port.get_submodule(name)(*cloned(args), **cloned(kwargs)), output)
    }
    return {x for x in wrong if not any(y.startswith(f"{x}." if x else "") for y in wrong - {x})}


@torch.no_grad()
def misplaced(ports: ModuleType, name: str, faults: list[Any]) -> list[str]:
    """The faults that are not where they are said to be, unless they change nothing."""
    net, batch = ports.network(name, 0)
    double = ports.PAIRS[-1]
    inputs = ports.cast(batch, torch.float64)
    calls = calls_of(copy.deepcopy(net).double(), inputs)
    wrong = []
    for fault in faults:
        port = ports.port_of(net, double, fault)
        if culprits(calls, port) != {fault.module} and is_wrong(port(**inputs), calls[-1][3]):
            wrong.append(f"{fault.kind} in {fault.module}: {culprits(calls, port)}")
    return wrong


@pytest.mark.parametrize("kind", ["mask off by one", "softcap", "running statistics"])
def test_a_fault_is_where_it_is_said_to_be(
    benchmark: Callable[[str], ModuleType], kind: str
) -> None:
    ports = benchmark("ports")
    name = "Llama" if kind == "mask off by one" else "Hybrid"
    faults = [x for x in ports.faults_of(ports.network(name, 0)[0]) if x.kind == kind]
    assert not misplaced(ports, name, faults[:1])
    assert misplaced(ports, name, [dataclasses.replace(faults[0], module="elsewhere")])


def test_each_kind_can_be_planted_in_several_networks(
    benchmark: Callable[[str], ModuleType],
) -> None:
    ports = benchmark("ports")
    kinds = Counter(
        kind
        for name in ports.NETWORKS
        for kind in {fault.kind for fault in ports.faults_of(ports.network(name, 0)[0])}
    )
    assert len(kinds) == 20
    assert min(kinds.values()) >= 2


@pytest.mark.campaign
@pytest.mark.parametrize("index", range(10))
def test_each_fault_is_where_it_is_said_to_be(
    benchmark: Callable[[str], ModuleType], index: int
) -> None:
    ports = benchmark("ports")
    faults = ports.faults_of(ports.network(ports.NETWORKS[index], 0)[0])
    assert not misplaced(ports, ports.NETWORKS[index], faults)


def test_lines_are_those_of_the_fault(benchmark: Callable[[str], ModuleType]) -> None:
    ports = benchmark("ports")

    def lines(network: str, kind: str, module: str) -> list[str]:
        faults = ports.faults_of(ports.network(network, 0)[0])
        fault = next(x for x in faults if (x.kind, x.module) == (kind, module))
        return [linecache.getline(*line).strip() for line in sorted(fault.lines)]

    added = ["hidden_states = residual + hidden_states"]
    assert lines("Hybrid", "residual missing", "blocks.1") == added
    assert lines("Llama", "norm order", "layers.1") == added
    scaled = ["attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling"]
    assert lines("Llama", "attention scale", "layers.0.self_attn") == scaled
    capped = ["scores = torch.tanh(scores / self.softcap) * self.softcap"]
    assert lines("Hybrid", "softcap", "blocks.0.attention") == capped
    linear = "return F.linear(input, self.weight, self.bias)"
    assert linear in lines("BERT", "transposed", "pooler.dense")


# A language model of experts, one of convolutions, and our own, with all kinds of layers.
QUICK = (4, 8, 9)


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, marks=[pytest.mark.campaign] * (i not in QUICK)) for i in range(10)],
)
def test_a_clean_port_computes_the_same_but_for_rounding(
    benchmark: Callable[[str], ModuleType], index: int
) -> None:
    ports = benchmark("ports")
    net, batch = ports.network(ports.NETWORKS[index], 0)

    def result(port: nn.Module, dtype: torch.dtype) -> Tensor:
        outputs: list[Any] = tree_leaves(port(**ports.cast(batch, dtype)))
        return outputs[0].double()

    differ = set()
    with torch.no_grad():
        right = result(net, torch.float32)
        for pair in ports.PAIRS:
            output = result(ports.port_of(net, pair), pair.candidate)
            bound = 4 * torch.finfo(pair.candidate).eps + 1e-5
            assert (output - right).norm() < bound * right.norm()
            cast = result(copy.deepcopy(net).to(pair.candidate), pair.candidate)
            if not torch.equal(output, cast):
                differ.add(pair.has_other_kernels)
    assert differ == {True}


def test_a_tolerance_is_fixed_on_other_networks_and_kinds(
    benchmark: Callable[[str], ModuleType],
) -> None:
    ports, faults = benchmark("ports"), benchmark("faults")

    def outcome(network: str, kind: str, fault: float, noise: float) -> Any:
        task = faults.Task(network, 0, ports.PAIRS[0], 0 if kind else None)
        errors = [("noise", noise), ("fault", fault)]
        return faults.Outcome(task, kind, "fault" if kind else "", errors=errors)

    first, second = ports.NETWORKS[:2]
    # Its own factor would name each fault; the other half's is 10 times as large, or as small.
    outcomes = [
        outcome(first, "a", 40.0, 10.0),
        outcome(first, "", 1.0, 10.0),
        outcome(second, "b", 4.0, 1.0),
        outcome(second, "", 0.5, 1.0),
    ]
    faults.with_tolerance(outcomes)
    named = [x.answers["tolerance"].modules for x in outcomes]
    assert named == [["noise"], ["noise"], [], []]


@pytest.mark.campaign
def test_ports_are_judged_and_counted(
    benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    ports, faults = benchmark("ports"), benchmark("faults")
    planted = ports.faults_of(ports.network("Hybrid", 0)[0])
    places = [
        next(at for at, x in enumerate(planted) if (x.kind, x.module) == place)
        for place in (
            ("attention scale", "blocks.1.attention"),
            ("weight by 1 %", "blocks.0.mlp.0"),
        )
    ]
    tasks = [faults.Task("Hybrid", 0, ports.PAIRS[0], at) for at in (*places, None)]
    outcomes = [faults.judged(task) for task in tasks]
    faults.with_tolerance(outcomes)
    for outcome, module in zip(outcomes, ("blocks.1.attention", "blocks.0.mlp.0"), strict=False):
        assert outcome.answers["local errors"].modules == [module]
        assert outcome.has_line("local errors")
        # The first layer rounds, and so its bits differ.
        assert outcome.answers["bit for bit"].modules == ["stem.0.conv"]
    assert not outcomes[-1].answers["local errors"].modules
    faults.print_tables(outcomes)
    printed = capsys.readouterr().out
    assert "2 faults, 0 silent; 1 clean ports" in printed
    assert "| Hybrid | 2 | 100 % | 100 % | 100 % | 0 % | 0 % | 0 % | 0 % |" in printed
    assert "Clean ports named: local errors 0, first difference 1, bit for bit 1" in printed


def test_a_fault_that_changes_no_bit_counts_neither_way(
    benchmark: Callable[[str], ModuleType],
) -> None:
    ports, faults = benchmark("ports"), benchmark("faults")
    planted = ports.faults_of(ports.network("ResNet", 0)[0])
    # There is no activation behind this norm that could change places with it.
    place = next(
        at
        for at, x in enumerate(planted)
        if x.kind == "norm order" and x.module.endswith("layers.0.layer.1")
    )
    assert faults.judged(faults.Task("ResNet", 0, ports.PAIRS[0], place)).is_silent

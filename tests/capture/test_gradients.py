"""Nodes and gradients of recorded layers against those composed by hand."""

from __future__ import annotations

import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import LayerNotFoundError, Recorder, SelectorTypeError
from tests.harness import executed, make_recorder, prepare, recorder
from tests.oracle import differences, freeze, same_bits, scalar_loss
from tests.rotation import one_in
from tests.zoo import CASES, Case
from tests.zoo.base import Net
from tests.zoo.graphs import Mark, marked_graphs

DIFFERENTIABLE = [case for case in CASES if case.backward and case.train and case.static_flow]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def recorded(net: nn.Module, *selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(net, input_data=torch.ones(2, 3, dtype=torch.float64), verbose=0)
    rnet.record(*selectors, gradients=True, **options)
    return rnet


def test_nodes_are_those_behind_the_activations() -> None:
    rnet = recorded(mlp(), "*")
    rnet(torch.ones(2, 3, dtype=torch.float64))
    nodes = rnet.grad_nodes
    assert sorted(nodes) == [(0, 1), (1, 1), (1, 2), (1, 3)]
    for label, node in nodes.items():
        assert node is rnet.activations[label].grad_fn
    assert [nodes[key].name() for key in ("0", "1-2")] == ["AddmmBackward0", "TanhBackward0"]


def test_nodes_have_the_structure_of_the_output_and_leaves_accumulate() -> None:
    leaf = torch.ones(3, requires_grad=True, dtype=torch.float64)
    inner = Net(lambda _, x: {"sine": x.sin(), "plain": (torch.ones(2), leaf)})
    off = Net(lambda _, x: x.detach())
    rnet = recorded(
        Net(lambda net, x: net.off(net.inner(x * leaf)["sine"]), inner=inner, off=off), "*"
    )
    rnet(torch.ones(2, 3, dtype=torch.float64))
    nodes = rnet.grad_nodes["inner"]
    assert nodes["sine"].name() == "SinBackward0"
    assert nodes["plain"][0] is None
    assert nodes["plain"][1].variable is leaf
    assert "off" not in rnet.grad_nodes
    with pytest.raises(LayerNotFoundError, match="no autograd node of layer 1-2 off"):
        rnet.grad_nodes["off"]


def test_without_gradients_there_are_no_nodes() -> None:
    rnet = recorded(mlp(), "*")
    with torch.no_grad():
        rnet(torch.ones(2, 3, dtype=torch.float64))
    assert not rnet.grad_nodes


@pytest.mark.parametrize("case", one_in(6, DIFFERENTIABLE, first=3), ids=repr)
def test_handed_over_once_with_what_is_recorded(case: Case) -> None:
    net = case.fresh().train()
    rnet = make_recorder(net, case, training=True)
    rnet.record(*executed(rnet), gradients=True)
    seen: list[Any] = []
    args, kwargs = prepare(case.inputs(1), case.input_gradients, [])
    output = rnet(*args, **kwargs)
    handle = rnet.on_gradients(lambda gradients: seen.append((gradients, freeze(gradients))))
    loss = scalar_loss(output)
    if not loss.requires_grad:
        return
    loss.backward()
    handle.remove()
    gradients = dict(rnet.gradients)
    assert len(seen) == bool(gradients)
    if gradients:
        assert list(seen[0][0]) == list(gradients)
        assert not differences(seen[0][1], freeze(gradients))


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_under_checkpointing_are_handed_over_together(reentrant: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x.sum()

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(3))
    rnet = recorded(Net(forward, blocks=blocks), nn.Tanh)
    seen: list[Any] = []
    rnet.on_gradients(seen.append)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    rnet(x).backward()
    assert [sorted(rnet.architecture[label].name for label in one) for one in seen] == [
        ["blocks.0.1", "blocks.1.1", "blocks.2.1"]
    ]
    hidden = x
    outputs = []
    for block in blocks:
        hidden = block(hidden)
        outputs.append(hidden)
    wanted = torch.autograd.grad(hidden.sum(), outputs)
    for gradient, other in zip(seen[0].values(), wanted, strict=True):
        assert same_bits(gradient, other)


def test_every_pass_and_every_backward_counts() -> None:
    net = mlp()
    rnet = recorded(net, "0")
    seen: list[Any] = []
    handle = rnet.on_gradients(seen.append)
    first, second = (rnet(torch.full((1, 3), value).double()) for value in (1.0, 2.0))
    # Two passes in one backward pass, of which one is not the latest.
    (first.sum() + 3 * second.sum()).backward(retain_graph=True)
    assert len(seen) == 2
    one, other = sorted(
        (one["0" if "0" in one else (1, 1)] for one in seen), key=lambda t: float(t.norm())
    )
    assert one.shape == other.shape
    second.sum().backward()
    assert len(seen) == 3
    assert torch.allclose(seen[2][1, 1] * 3, rnet.gradients["0"] * 3)
    rnet.record("2", gradients=True)
    rnet(torch.ones(1, 3).double()).sum().backward()
    assert list(seen[3]) == [(1, 3)]
    handle.remove()
    rnet(torch.ones(1, 3).double()).sum().backward()
    assert len(seen) == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gradients_of_nested_tensors() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([x[:1] * 2, x[1:]], layout=torch.jagged)

    x = torch.randn(3, 4, requires_grad=True)
    rnet = recorder(nn.Sequential(Net(forward)), "0", input_data=x, gradients=True)
    (rnet(x).values() * torch.tensor([[5.0], [6.0], [7.0]])).sum().backward()
    expected = torch.tensor([[5.0], [6.0], [7.0]]).expand(3, 4)
    assert torch.equal(rnet.gradients["0"].values(), expected)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([[10.0], [6.0], [7.0]]).expand(3, 4))


def test_layers_without_a_gradient_are_absent() -> None:
    net = Net(lambda net, x: (net.used(x), net.unused(x)), used=mlp(), unused=mlp())
    rnet = recorded(net, "used", "unused")
    seen: list[Any] = []
    rnet.on_gradients(seen.append)
    rnet(torch.ones(2, 3).double())[0].sum().backward()
    assert list(seen[0]) == list(rnet.gradients) == [(1, 1)]
    with pytest.raises(LayerNotFoundError, match="no gradient of layer 1-2 unused"):
        rnet.gradients["unused"]


def test_structures_of_gradients_have_none_where_there_is_none() -> None:
    net = Net(
        lambda net, x: net.inner(x)["left"],
        inner=Net(lambda _, x: {"left": x * 2, "right": (x.sin(), 3)}),
    )
    rnet = recorded(net, "inner")
    seen: list[Any] = []
    rnet.on_gradients(seen.append)
    rnet(torch.ones(2, 3, dtype=torch.float64, requires_grad=True)).sum().backward()
    (gradients,) = seen
    assert gradients[1, 1]["right"] == (None, 3)
    assert torch.equal(gradients[1, 1]["left"], torch.ones(2, 3).double())


def test_gradients_pile_up_when_asked() -> None:
    net, x = mlp(), torch.randn(2, 3, dtype=torch.float64)
    rnet = recorded(net, "1")
    rnet.record("1", gradients="accumulate")
    out = rnet(x)
    loss = out.sum()
    hidden = rnet.activations["1"]
    (wanted,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    for count in (2, 3):
        loss.backward(retain_graph=True)
        # autograd.grad above went through the pass as well.
        assert torch.equal(rnet.gradients["1"], count * wanted)
    rnet(x).sum().backward()
    assert torch.equal(rnet.gradients["1"], wanted)
    rnet.record("1", gradients=True)
    loss = rnet(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(rnet.gradients["1"], wanted)


def test_backward_twice_and_never() -> None:
    rnet = recorded(mlp(), "*")
    loss = rnet(torch.ones(2, 3).double()).sum()
    with pytest.raises(LayerNotFoundError, match=r"no gradient of layer 1-1 0.*call loss.backward"):
        rnet.gradients["0"]
    loss.backward()
    before = freeze(rnet.gradients["2"])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    # The second backward pass replaces the first, and came no further.
    assert list(rnet.gradients) == [(1, 3), (0, 1)]
    assert not differences(freeze(rnet.gradients["2"]), before)


def test_what_can_not_be_handed_over_is_an_error() -> None:
    rnet = recorder(mlp(), "*", input_data=torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(SelectorTypeError, match=r"record\(..., gradients=True\) first"):
        rnet.on_gradients(print)
    rnet.record("*", gradients=True)
    with pytest.raises(SelectorTypeError, match="on_gradients"):
        rnet.on_gradients(None)  # type: ignore[arg-type]
    with pytest.raises(SelectorTypeError, match='"accumulate"'):
        rnet.record("*", gradients="sum")  # type: ignore[arg-type]


def test_an_error_of_the_users_function_reaches_the_user() -> None:
    rnet = recorded(mlp(), "*")
    rnet.on_gradients(lambda gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rnet(torch.ones(2, 3).double()).sum().backward()
    assert len(rnet.gradients) == 4


@pytest.mark.parametrize("end", one_in(2, ["done", "with_graph", "failed", "never"], first=1))
def test_no_graph_is_kept(end: str) -> None:
    net = Net(
        lambda net, x: net.last(Mark.apply(net.first(x))),
        first=mlp(),
        last=nn.Linear(2, 2).double(),
    )
    rnet = recorded(net, "*")
    # The function leads back to the recorder, and from there to the graph.
    rnet.on_gradients(partial(operator.is_, rnet))
    x = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(3):
        loss = rnet(x).square().sum()
        if end == "failed":
            rnet.activations["first"].register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward(create_graph=True)
        elif end == "with_graph":
            torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        elif end == "done":
            loss.backward()
    net.zero_grad()
    del loss
    # The latest record is part of a graph.
    assert marked_graphs() == 1
    with torch.no_grad():
        rnet(x)
    assert marked_graphs() == 0
    loss = rnet(x).sum()
    del rnet, loss
    assert marked_graphs() == 0


def test_what_a_recorded_net_returns_is_saved_without_a_warning(tmp_path: Path) -> None:
    rnet = recorded(mlp(), "*")
    output = rnet(torch.ones(2, 3, dtype=torch.float64))
    torch.save([output, rnet.activations["0"]], tmp_path / "output.pt")
    saved, record = torch.load(tmp_path / "output.pt")
    assert torch.equal(saved, output)
    assert torch.equal(record, rnet.net[0](torch.ones(2, 3, dtype=torch.float64)))

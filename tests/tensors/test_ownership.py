"""Copies that stand where their tensor stands on the graph, and who else holds a tensor."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder.tensors.ownership import HeldTensor, exchange, own_copy
from tests.harness import recorder
from tests.zoo.base import Net


class Marked(Tensor):
    """A subclass with an attribute of its own."""

    mark: str


def on_graph(start: Tensor) -> Tensor:
    return start.requires_grad_() * 2


KINDS: dict[str, Any] = {
    "plain": lambda: on_graph(torch.ones(3)),
    "view": lambda: on_graph(torch.ones(2, 3)).t(),
    "one_of_several": lambda: on_graph(torch.ones(2, 3)).unbind(0)[1],
    "expanded": lambda: on_graph(torch.ones(1)).expand(3),
    "saved_result": lambda: on_graph(torch.ones(3)).exp(),
    "complex": lambda: on_graph(torch.ones(3, dtype=torch.complex64)).conj(),
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "empty": lambda: on_graph(torch.ones(0)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_a_copy_as_they_reach_the_tensor(kind: str, mode: Any) -> None:
    tensor = KINDS[kind]()
    loss = (tensor * 3).abs().sum()
    with mode():
        copy = own_copy(tensor)
    assert (
        copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or kind == "empty"
    )
    (expected,) = torch.autograd.grad(loss, tensor, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, copy, retain_graph=True)
    assert torch.equal(gradient, expected)
    assert torch.equal(copy, tensor)
    with torch.no_grad():
        copy.add_(1)
    loss.backward()  # Nothing that the graph needs was changed.


def test_a_leafs_copy_made_before_the_loss_gets_its_gradient() -> None:
    leaf = torch.ones(3, requires_grad=True)
    copy = own_copy(leaf)
    (gradient,) = torch.autograd.grad((leaf * 3).sum(), copy)
    assert gradient.tolist() == [3, 3, 3]


def test_a_subclass_stays_one() -> None:
    tensor = on_graph(torch.ones(3)).as_subclass(Marked)
    tensor.mark = "here"
    copy = own_copy(tensor)
    assert type(copy) is Marked
    assert copy.mark == "here"
    assert copy.grad_fn is tensor.grad_fn


@pytest.mark.parametrize("is_grad_enabled", [False, True])
def test_a_copy_of_what_autograd_cannot_save_lies_behind_it_on_the_graph(
    is_grad_enabled: bool,
) -> None:
    leaf = torch.ones(3, requires_grad=True)
    tensor = leaf * 2
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        torch.set_grad_enabled(is_grad_enabled),
    ):
        copy = own_copy(tensor)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.autograd.grad(copy.square().sum(), leaf)[0].tolist() == [8, 8, 8]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_loss_on_a_nested_record_reaches_the_network(layout: torch.layout) -> None:
    nest = Net(lambda _, x: torch.nested.as_nested_tensor([x, x[:1]], layout=layout))
    net = nn.Sequential(nn.Linear(4, 3), nest)
    rnet = recorder(net, "1", input_size=(2, 4))
    for _ in range(3):
        x = torch.randn(2, 4)
        rnet(x)
        loss = torch.stack([part.square().sum() for part in rnet.activations["1"].unbind()]).sum()
        (gradient,) = torch.autograd.grad(loss, net[0].weight)
        hidden = net[0].forward(x)
        expected = hidden.square().sum() + hidden[:1].square().sum()
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, net[0].weight)[0])


def fresh() -> Tensor:
    return torch.ones(2, 3) * 2


ALONE: dict[str, Any] = {
    "fresh": fresh,
    "view_of_fresh": lambda: fresh().t(),
    "part_of_fresh": lambda: fresh()[:1],
    "on_the_graph": lambda: on_graph(torch.ones(2, 3)),
    "view_on_the_graph": lambda: on_graph(torch.ones(2, 3)).view(6),
}
HOLDERS: dict[str, Any] = {
    "another_name": lambda tensor: tensor,
    "a_view": lambda tensor: tensor[:1],
    "its_data": lambda tensor: tensor.detach(),
    "its_storage": lambda tensor: tensor.untyped_storage(),
    "an_array": lambda tensor: tensor.detach().numpy(),
    "its_base": lambda tensor: tensor._base if tensor._base is not None else tensor,
}


@pytest.mark.parametrize("make", ALONE)
def test_what_nothing_else_holds_is_handed_out_itself(make: str) -> None:
    held = HeldTensor(ALONE[make]())
    place = held.peek().data_ptr()
    assert held.read().data_ptr() == place
    assert held.read() is held.read()


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("make", ALONE)
def test_what_something_else_holds_is_copied(make: str, hold: str) -> None:
    held = HeldTensor(ALONE[make]())
    other = HOLDERS[hold](held.tensor)
    place = held.peek().data_ptr()
    assert held.read().data_ptr() != place
    assert held.read() is held.read()
    assert held.is_intact
    del other


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.ones(3)),
        lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
        lambda: torch.ones(3).share_memory_(),
    ],
)
def test_memory_that_torch_does_not_own_alone_is_copied(make: Any) -> None:
    held = HeldTensor(make())
    place = held.peek().data_ptr()
    assert held.read().data_ptr() != place


VIEWS: dict[str, Any] = {
    "reshaped": lambda x: x.view(-1),
    "transposed": lambda x: x.t(),
    "every_other_column": lambda x: x[:, ::2],
    "written_before": lambda x: x.add_(1)[1:],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_an_exchanged_view_keeps_its_place_and_its_holders_go_on_with_a_copy(kind: str) -> None:
    view = VIEWS[kind](on_graph(torch.ones(2, 4)))
    holder = {"list": [view]}
    node, strides, version = view.grad_fn, view.stride(), view._version
    kept = exchange(view)
    assert kept is not None
    assert kept.grad_fn is node
    assert (view.stride(), torch.equal(view, kept)) == (strides, True)
    assert view._version >= version
    expected = kept.detach().clone()
    out = holder["list"][0].mul_(3).sum()
    assert torch.equal(kept, expected)
    (gradient,) = torch.autograd.grad(out, kept)
    assert torch.equal(gradient, torch.full_like(gradient, 3))


def also_held(what: str) -> tuple[Tensor, object]:
    """Return a view, and what holds something that an exchange would take from it."""
    hidden = on_graph(torch.ones(2, 4))
    view = hidden.view(8)
    if what == "leaf":
        return (leaf := torch.ones(2, 4, requires_grad=True)).view(8), leaf
    held = {
        "base": lambda: hidden,
        "another_view": lambda: hidden[0],
        "memory": lambda: hidden.untyped_storage(),
        "graph": lambda: view * view,
        "weakly": lambda: weakref.ref(view),
        "gradient": view.retain_grad,
        "hook": lambda: view.register_hook(lambda gradient: gradient * 2),
        "attribute": lambda: setattr(view, "mark", 1),
    }[what]()
    return view, held


@pytest.mark.parametrize(
    "what",
    ["leaf", "base", "another_view", "memory", "graph", "weakly", "gradient", "hook", "attribute"],
)
def test_what_something_else_holds_is_not_exchanged(what: str) -> None:
    view, held = also_held(what)
    assert exchange(view) is None
    del held


def test_what_is_no_view_is_not_exchanged() -> None:
    assert exchange(on_graph(torch.ones(2))) is None
    assert exchange(on_graph(torch.ones(1)).expand(2)) is None

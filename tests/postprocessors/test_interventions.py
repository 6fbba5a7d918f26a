"""Post-processors, extract, recorded inputs and gradients, against nets composed by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors import OnInput
from scio_recorder.postprocessors.assigning import assign_by_key
from tests.harness import recorder
from tests.oracle import same_bits
from tests.zoo.base import Net, linear


def three_layers() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def negate(tensor: Tensor) -> Tensor:
    return -tensor


def by_hand(net: nn.Sequential, x: Tensor, *changes: Any) -> Tensor:
    for layer, change in zip(net, changes, strict=True):
        x = layer.forward(x)
        x = x if change is None else change(x)
    return x


def test_one_callable_acts_on_every_recorded_layer() -> None:
    net = three_layers()
    rnet = recorder(net, "0", "2")
    x = torch.randn(3, 4)
    assert same_bits(rnet(x, activation_postproc=double), by_hand(net, x, double, None, double))
    assert same_bits(rnet.activations["0"], net[0].forward(x))


def test_every_call_of_a_repeated_module_has_its_own_postprocessor() -> None:
    net = Net(lambda net, x: net.step(net.step(x)), step=linear())
    rnet = recorder(net, "step")
    x = torch.randn(3, 4)
    output = rnet(x, activation_postproc=[double, negate])
    assert same_bits(output, -net.step.forward(net.step.forward(x) * 2))


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_list_of_another_length_is_refused(number: int) -> None:
    rnet, x = recorder(three_layers(), "0", "2"), torch.randn(3, 4)
    wrong: Any = [double] * number
    refused = pytest.raises(PostprocessorError, match=rf"{number} post-processors for 2")
    with refused:
        rnet(x, activation_postproc=wrong)
    with refused, rnet.watch(activation_postproc=tuple(wrong)):
        rnet.net(x)
    with refused:
        rnet.collect([x], activation_postproc=wrong)
    assert len(rnet.activations) == 0


@pytest.mark.parametrize("key", ["2", "2-3", (1, 3)])
def test_mapping_acts_on_the_layers_that_it_selects(key: Any) -> None:
    net = three_layers()
    rnet = recorder(net, "0", "2")
    key = str(rnet.architecture["2"].label) if key == "2-3" else key
    x = torch.randn(3, 4)
    output = rnet(x, activation_postproc={key: negate})
    assert same_bits(output, by_hand(net, x, None, None, negate))


def test_two_entries_for_one_layer_are_refused_in_compiled_passes_too() -> None:
    rnet = recorder(three_layers(), "0")
    two = {"0": double, (1, 1): negate}
    with pytest.raises(PostprocessorError, match="two entries of activation_postproc"):
        rnet(torch.randn(3, 4), activation_postproc=two)
    # What a pass that is being compiled does with a mapping.
    with pytest.raises(PostprocessorError, match=r"two entries .* layer 1-1"):
        assign_by_key({"0": ((1, 1),), (1, 1): ((1, 1),)}, two)


def test_none_from_a_postprocessor_changes_nothing() -> None:
    net = three_layers()
    rnet = recorder(net, "0", "2")
    x = torch.randn(3, 4)
    seen: list[Tensor] = []
    assert same_bits(rnet(x, activation_postproc=seen.append), by_hand(net, x, None, None, None))
    assert len(seen) == 2


def test_postprocessor_is_given_the_structure_that_the_module_returns() -> None:
    inner = Net(lambda _, x: {"a": x, "b": [x * 2, None]})
    net = Net(lambda net, x: net.inner(x)["a"] + net.inner(x)["b"][0], inner=inner)
    rnet = recorder(net, "inner")
    x = torch.randn(3, 4)
    seen: list[Any] = []

    def change(value: Any) -> Any:
        seen.append(type(value))
        return {"a": value["a"] + 1, "b": [value["b"][0] + 10, None]}

    torch.testing.assert_close(rnet(x, activation_postproc=change), (x + 1) + (x * 2 + 10))
    assert seen == [dict, dict]


def test_dont_record_still_intervenes() -> None:
    net = three_layers()
    rnet = recorder(net, "0")
    x = torch.randn(3, 4)
    output = rnet(x, activation_postproc=double, dont_record=True)
    assert same_bits(output, by_hand(net, x, double, None, None))
    assert len(rnet.activations) == 0


def test_gradients_flow_through_a_postprocessor() -> None:
    net = three_layers()
    rnet = recorder(net, "0", "1")
    x = torch.randn(3, 4)
    rnet(x, activation_postproc=double).sum().backward()
    mine = [value.grad.clone() for value in net.parameters() if value.grad is not None]
    net.zero_grad()
    by_hand(net, x, double, double, None).sum().backward()
    theirs = [value.grad for value in net.parameters() if value.grad is not None]
    assert len(mine) == len(theirs) == 4
    assert all(
        same_bits(gradient, expected) for gradient, expected in zip(mine, theirs, strict=True)
    )


class Counts(nn.Module):
    """Counts how often it runs."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_extract_runs_no_further_than_the_last_selected_layer() -> None:
    before, after = Counts(), Counts()
    net = nn.Sequential(linear(), before, nn.Sequential(nn.Tanh(), linear(), after), linear())
    rnet = recorder(net, "0", "2.0")
    before.calls = after.calls = 0
    for count in range(1, 4):
        x = torch.randn(3, 4)
        with torch.no_grad():
            extracted = rnet.extract(x)
        assert (before.calls, after.calls) == (count, 0)
        assert same_bits(extracted["2.0"], torch.tanh(net[0].forward(x)))
        assert same_bits(extracted["0"], net[0].forward(x))
        assert same_bits(rnet.activations["2.0"], extracted["2.0"])
    rnet(torch.randn(3, 4))
    assert (before.calls, after.calls) == (4, 1)


def test_extract_waits_for_an_enclosing_layer_and_for_every_call() -> None:
    counter = Counts()
    step = nn.Sequential(linear(), nn.Tanh())
    net = Net(lambda net, x: net.after(net.step(net.step(x))), step=step, after=counter)
    rnet = recorder(net, "step", "step.0")
    counter.calls = 0
    x = torch.randn(3, 4)
    extracted = rnet.extract(x)
    once = torch.tanh(step[0].forward(x))
    last = rnet.architecture.labels_of("step")[1]
    assert same_bits(extracted[last], torch.tanh(step[0].forward(once)))
    assert len(extracted) == 4
    assert counter.calls == 0


def test_extract_keeps_the_graph_and_an_error_of_the_net() -> None:
    net = three_layers()
    rnet = recorder(net, "0")
    x = torch.randn(3, 4)
    rnet.extract(x)["0"].sum().backward()
    torch.testing.assert_close(net[0].weight.grad, x.sum(0).expand(4, 4))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        rnet.extract(torch.randn(3, 9))
    assert len(rnet.activations) == 0


def test_new_backward_replaces_the_gradients_of_the_last_one() -> None:
    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return net.left(x), net.right(x)

    rnet = recorder(Net(forward, left=linear(), right=linear()), "left", "right", gradients=True)
    left, right = rnet(torch.randn(3, 4))
    (left.sum() + right.sum()).backward(retain_graph=True)
    assert len(rnet.gradients) == 2
    (right.sum() * 5).backward()
    assert set(rnet.gradients) == {rnet.architecture["right"].label}
    torch.testing.assert_close(rnet.gradients["right"], torch.full((3, 4), 5.0))


@pytest.mark.parametrize("posts", [{"1": torch.neg}, {"1": 5}, 5])
def test_what_can_never_act_is_refused_also_where_nothing_is_recorded(posts):
    rnet, x = Recorder(three_layers(), input_size=(3, 4), verbose=0), torch.ones(3, 4)
    with pytest.raises(PostprocessorError):
        rnet(x, activation_postproc=posts)
    rnet.record("1")
    rnet.remove()
    with pytest.raises(PostprocessorError):
        rnet(x, activation_postproc=posts)


def halve(tensor: Tensor) -> Tensor:
    return tensor[:, :2]


@pytest.mark.parametrize("post", [halve, OnInput(halve)])
def test_a_net_that_fails_after_a_changed_shape_names_the_post_processor(post: Any) -> None:
    net = three_layers()
    rnet = recorder(net, "1")
    x = torch.ones(3, 4)
    with pytest.raises(RuntimeError) as by_hand:
        net[2].forward(halve(net[0].forward(x)))
    for run in (rnet, rnet.extract, lambda x, **post: rnet.collect([x], **post)):
        rnet.record("1", "2")
        with pytest.raises(RuntimeError, match=re.escape(str(by_hand.value))) as caught:
            run(x, activation_postproc={"1": post})
        (note,) = caught.value.__notes__
        for word in ("halve", "1-2 1 (Tanh)", "(3, 4) to (3, 2)"):
            assert word in note
        assert "to_inputs" not in str(caught.value)
    # The net's own failures, and other layers, have nothing to do with it.
    with pytest.raises(RuntimeError) as caught:
        rnet(torch.ones(3, 5), activation_postproc={"1": post})
    (note,) = caught.value.__notes__
    assert "halve" not in note


def test_a_list_is_in_the_order_in_which_layers_return() -> None:
    """An inner layer returns before those around it, whose labels come first."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    rnet = recorder(net, "", "0", "0.0")
    x = torch.randn(3, 4)
    posts = [lambda output: output * 2, lambda output: output * 3, lambda output: output * 5]
    hidden = net[0][0].forward(x)
    assert torch.equal(rnet(x, activation_postproc=posts), torch.tanh(hidden * 2 * 3) * 5)
    assert torch.equal(rnet.activations["0"], hidden * 2)

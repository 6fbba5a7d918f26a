"""What is written wrongly most often is answered with what to write instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import (
    LabellingError,
    LayerNotFoundError,
    PostprocessorError,
    Recorder,
    compare,
)
from scio_recorder.errors import RecorderError, SelectorTypeError
from scio_recorder.postprocessors import OnInput
from tests.zoo.base import Net

X = torch.ones(2, 3, 8, 8)


def make_net() -> Net:
    parts = {"conv1": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "fc": nn.Linear(4, 2)}
    return Net(lambda net, x, **others: net.fc(net.norm(net.conv1(x)).mean((2, 3))), **parts)


@pytest.fixture
def rnet() -> Recorder:
    rnet = Recorder(make_net().eval(), input_size=(1, 3, 8, 8))
    rnet.record("conv1", "fc")
    return rnet


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"input_size": "1,3,8,8"}, "write input_size=(1, 3, 32, 32)"),
        ({"input_size": X}, "write input_data=, with what was given, or input_size=(2, 3, 8, 8)"),
        ({"input_size": X.numpy()}, "or input_size=(2, 3, 8, 8)"),
        ({"input_size": 4}, "write input_size=(1, 4)"),
        ({"input_size": (3, 8, 8)}, "one sample of shape (3, 8, 8), write input_size=(1, 3, 8, 8)"),
        ({"input_data": X.numpy()}, "convert them by torch.from_numpy(x)"),
        ({"input_data": (X.numpy(),)}, "input_data=((2, 3, 8, 8),) failed"),
        ({"input_data": {"x": X.numpy()}}, "convert them by torch.from_numpy(x)"),
        ({"input_data": X, "input_size": (1, 3, 8, 8)}, "either input_size= or input_data="),
        ({"input_size": (1, 3, 8, 8), "mode": "evaluate"}, 'write "eval" or "train"'),
        ({"input_size": (1, 3, 8, 8), "col_names": ["sizes"]}, "'sizes' is not a valid"),
    ],
)
def test_inputs_for_labelling(given: dict[str, Any], says: str) -> None:
    with pytest.raises(LabellingError) as caught:
        Recorder(make_net(), **given)
    assert says in str(caught.value)
    # The numbers of an input are never shown.
    assert "1., 1.," not in str(caught.value)


@pytest.mark.parametrize("size", [(2, 5, 8, 8), [(2, 5)], ((1, 5), (1, 5), (1, 5))])
def test_one_sample_is_not_guessed_at_other_sizes(size: Any) -> None:
    with pytest.raises(LabellingError) as caught:
        Recorder(make_net(), input_size=size)
    assert "one sample" not in str(caught.value)


@pytest.mark.parametrize("batch", [(X, torch.zeros(2)), [X, torch.zeros(2)]])
def test_a_batch_in_place_of_its_inputs(rnet: Recorder, batch: Any) -> None:
    with pytest.raises(TypeError) as caught:
        rnet(batch)
    assert "write rnet(batch[0])" in caught.value.__notes__[-1]
    assert rnet.collect([batch], progress=False).num_samples == 2
    rnet.remove()
    with pytest.raises(TypeError) as caught:
        rnet(batch)
    assert "write rnet(batch[0])" in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda rnet, made: rnet.activations.conv1, "write ['conv1'] in place of .conv1"),
        (lambda rnet, made: rnet.activations.cnv1, "the closest name is 'conv1'"),
        (
            lambda rnet, made: made.activations,
            'so write recording[label], such as recording["1-1"]',
        ),
        (lambda rnet, made: made.reprot, "the closest name is 'report'"),
        (lambda rnet, made: rnet.report, "a recording has: write rnet.collect(batches).report"),
        (lambda rnet, made: rnet.colect, "the closest names are 'collect'"),
        (lambda rnet, made: rnet.conv1, "write rnet.net.conv1"),
        (lambda rnet, made: rnet.run_with_cache, ": write rnet.record(...), then rnet(x), and"),
        (lambda rnet, made: rnet.activations.inputs, "passes.inputs[-1]"),
        (lambda rnet, made: rnet.activations.attention, "passes.attention[-1]"),
        (lambda rnet, made: made._reprot, "_reprot"),
        (lambda rnet, made: rnet.wxyz, "'Recorder' object has no attribute 'wxyz'"),
    ],
)
def test_attributes_that_are_elsewhere(
    rnet: Recorder, read: Callable[[Recorder, Any], Any], says: str
) -> None:
    recording = rnet.collect([X], progress=False)
    with pytest.raises(AttributeError, match=re.escape(says)):
        read(rnet, recording)


@pytest.mark.parametrize("read", ["activations", "inputs", "gradients", "attention"])
@pytest.mark.parametrize("where", ["after", "before", "hook", "watch"])
def test_records_of_a_pass_that_still_runs(read: str, where: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x, seen = torch.ones(1, 2), []
    rnet = Recorder(net, input_data=x)
    rnet.record("*", inputs=True, gradients=True)
    rnet(x)

    def look(*call: Any) -> None:
        with pytest.raises(LayerNotFoundError, match=f"still running, and leaves no {read[:5]}"):
            getattr(rnet, read)
        seen.append(read)

    posts = None if where == "hook" else {"1": OnInput(look) if where == "before" else look}
    hook = net[0].register_forward_hook(look) if where == "hook" else None
    if where == "watch":
        with rnet.watch(activation_postproc=posts) as passes:
            net(x)
        assert passes.inputs[-1]["1"].args[0].equal(net[0](x))
    else:
        rnet(x, activation_postproc=posts)
    assert seen == [read]
    if hook is not None:
        hook.remove()
    assert rnet.activations["1"].equal(net(x))


def test_records_of_a_pass_inside_one_that_still_runs() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x, read = torch.ones(1, 2), []
    rnet = Recorder(net, input_data=x)
    rnet.record("0")

    def run_another(output: Tensor) -> None:
        rnet(2 * x)
        read.append(rnet.activations["0"])

    rnet(x, activation_postproc=run_another)
    assert read[0].equal(net[0](2 * x))
    assert rnet.activations["0"].equal(net[0](x))


def test_a_number_in_place_of_a_name() -> None:
    net = nn.Sequential(nn.ReLU())
    rnet = Recorder(net, input_size=(1, 2))
    with pytest.raises(LayerNotFoundError, match=r'0 names no layer: .* here "0"$'):
        rnet.activations[0]  # type: ignore[index]  # on purpose
    with pytest.raises(LayerNotFoundError, match=r"or a qualified name$"):
        rnet.activations[1]  # type: ignore[index]  # on purpose


def test_a_module_is_a_key_where_it_has_one_layer(rnet: Recorder) -> None:
    net: Any = rnet.net
    rnet(X)
    assert torch.equal(rnet.activations[net.fc], rnet.activations["fc"])
    assert net.fc in rnet.activations
    assert net.norm not in rnet.activations
    assert rnet.architecture[net.norm].name == "norm"
    with pytest.raises(LayerNotFoundError, match="ReLU that was given is no module"):
        rnet.activations[nn.ReLU()]
    shared = nn.ReLU()
    twice = Recorder(nn.Sequential(shared, shared), input_size=(1, 2))
    twice.record((1, 2))
    twice(torch.ones(1, 2))
    assert torch.equal(twice.activations[shared], torch.ones(1, 2))
    twice.record("0")
    twice(torch.ones(1, 2))
    with pytest.raises(LayerNotFoundError, match="ambiguous, since it stands for 2 calls"):
        twice.activations[shared]


def test_records_of_a_forgotten_choice_say_so() -> None:
    rnet = Recorder(make_net(), input_size=(1, 3, 8, 8))
    rnet(X)
    assert repr(rnet.activations).startswith(
        "{} (there is none of any layer yet. Choose layers, as by rnet.record(*rnet.recording, "
        '"1-3"), then run the net with rnet(x). '
    )
    assert 'record(*rnet.recording, "1-3", inputs=True)' in repr(rnet.inputs)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"postproc": torch.relu}, "write activation_postproc="),
        ({"activation_postprocs": torch.relu}, "write activation_postproc="),
        ({"activation_postproc": lambda module, args, output: output}, "one argument, lambda out"),
        ({"activation_postproc": lambda output: output.mean()}, "shape () where the layer returns"),
        ({"activation_postproc": lambda output: 1.0}, "returned a float where the layer returns"),
    ],
)
def test_post_processors(rnet: Recorder, given: dict[str, Any], says: str) -> None:
    with pytest.raises(PostprocessorError, match=re.escape(says)) as caught:
        rnet(X, **given)
    assert isinstance(caught.value, RecorderError)


@pytest.mark.parametrize("given", [{"inputs": "fc"}, {"offload": 1}, {"gradients": "fc"}])
def test_what_only_attention_takes_is_no_value_of_other_options(
    rnet: Recorder, given: dict[str, Any]
) -> None:
    rnet.record("conv1")
    with pytest.raises(SelectorTypeError, match="write True"):
        rnet.record("*", **given)
    assert rnet.recording == ((1, 1),)


def test_a_keyword_of_the_network_itself_is_its_own() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, postprocess: bool = False) -> Tensor:
            return -x if postprocess else x

    rnet = Recorder(Own(), input_size=(1, 2))
    assert rnet(torch.ones(1, 2), postprocess=True).tolist() == [[-1, -1]]


@pytest.mark.parametrize("columns", [60, 400])
def test_a_recorder_is_printed_as_wide_as_the_terminal(
    rnet: Recorder, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(rnet) == repr(rnet)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = str(rnet).splitlines()
    assert (str(rnet) == repr(rnet)) == (columns == 400)
    assert max(map(len, lines)) <= columns
    assert any("conv1" in line for line in lines)


def test_arrays_go_to_networks_that_take_them() -> None:
    net = Net(lambda _, x: torch.from_numpy(x))
    assert Recorder(net, input_data=np.ones((1, 2))).architecture[0, 1].executed


class Forces(nn.Module):
    """Differentiates in its forward, as networks of physics do: an energy, and its slope."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.features, self.head, self.how = nn.Linear(3, 8), nn.Linear(8, 1), how

    def energy(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(x))).sum()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        if self.how == "backward":
            self.energy(x).backward(inputs=[x])
            return -x.grad  # type: ignore[operator]  # it is there
        if self.how == "func":
            slope: Tensor = torch.func.grad(self.energy)(x.detach())
            return -slope
        with torch.set_grad_enabled(self.how == "enabled" or torch.is_grad_enabled()):
            return -torch.autograd.grad(self.energy(x), x)[0]


@pytest.mark.parametrize("how", ["grad", "backward", "enabled", "func"])
def test_networks_that_differentiate_in_their_forward(how: str) -> None:
    torch.manual_seed(0)
    net, x = Forces(how).eval(), torch.randn(4, 3)
    rnet = Recorder(net, input_data=x)
    rnet.record("")
    # By hand: the slope of the energy.
    inner = torch.tanh(net.features(x))
    expected = (-((1 - inner**2) * net.head.weight) @ net.features.weight).detach()
    calls: list[Callable[[], Any]] = [
        lambda: rnet.collect([x], progress=False),
        lambda: rnet.sweep(x, x + 1, lambda output: output.detach().mean()),
        lambda: compare(rnet, rnet, [x]),
    ]
    if how in ("enabled", "func"):
        torch.testing.assert_close(calls[0]()[""], expected)
        assert calls[1]().clean == pytest.approx(expected.mean().item(), rel=1e-5)
        return
    for call in calls:
        with pytest.raises(RecorderError, match=r"without gradients .* rnet\.collecting") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
    with rnet.collecting() as collection:
        net(x)
    torch.testing.assert_close(collection.recording[""], expected)

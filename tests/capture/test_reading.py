"""T1 after the pass: what was read stays as it was read, whoever writes to the memory later."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

from scio_recorder import MutationError, Recorder
from tests import zoo
from tests.capture.test_watch_libraries import llama, past
from tests.harness import (
    MODES,
    Mode,
    executed,
    in_a_thread,
    make_recorder,
    recorder,
    run_pass,
)
from tests.oracle import same_bits
from tests.oracle import tensors as tensors_in
from tests.rotation import one_in
from tests.zoo.base import Case, Net, linear

COPIES = ("auto", "always", "never")


class Reader:
    """Keeps what was read beside copies of its bits, to compare at the end."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def read(self, value: Any) -> Any:
        own = [tensor.detach() for tensor in tensors_in(value)]
        self.pairs += [(tensor, tensor.clone()) for tensor in own]
        return value

    def read_all(self, rnet: Recorder) -> None:
        for records in (rnet.activations, rnet.inputs):
            for label in records:
                # Where the pass itself has lost a record, reading it raises in every pass.
                with contextlib.suppress(MutationError):
                    self.read(records[label])

    def check(self) -> None:
        assert self.pairs
        assert all(same_bits(now, then) for now, then in self.pairs)


def add_to_state(net: Any, x: Tensor) -> Tensor:
    net.state += net.inner(x)
    return net.state  # type: ignore[no-any-return]


def add_to_detached_state(net: Any, x: Tensor) -> Tensor:
    net.state = net.state.detach()
    return add_to_state(net, x)


class Counter(nn.Module):
    """Returns a running state that is no buffer."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.inner = linear()
        self.state = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


STATES: dict[str, Callable[[], nn.Module]] = {
    "attribute": lambda: Counter(add_to_detached_state),
    "buffer": lambda: Net(add_to_detached_state, inner=linear(), state=torch.zeros(3, 4)),
    "module_inside": lambda: nn.Sequential(Counter(add_to_detached_state), nn.Tanh()),
    "view_of_it": lambda: nn.Sequential(Counter(add_to_detached_state), nn.Flatten(0)),
    "in_a_tuple": lambda: nn.Sequential(
        Net(lambda net, x: (net.inner(x), x), inner=Counter(add_to_detached_state)),
        Net(lambda _, pair: pair[0] * 2),
    ),
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_running_state(name: str, grad: bool, copy: str) -> None:
    rnet = recorder(STATES[name](), copy=copy, inputs=True)
    reader = Reader()
    for _ in range(4):
        with torch.set_grad_enabled(grad):
            rnet(torch.randn(3, 4))
        reader.read_all(rnet)
    reader.check()


def test_running_state_counts_as_by_hand() -> None:
    def count(net: Any, x: Tensor) -> Tensor:
        net.state += x
        return net.state  # type: ignore[no-any-return]

    rnet = recorder(Counter(count), "")
    read = []
    with torch.no_grad():
        for _ in range(4):
            rnet(torch.ones(3, 4))
            read.append(rnet.activations[""])
    assert [float(tensor[0, 0]) for tensor in read] == [1, 2, 3, 4]


@pytest.mark.parametrize("inference", [False, True])
def test_static_cache(inference: bool) -> None:
    net, ids = llama().model, torch.tensor([[1, 2]])
    cache = StaticCache(config=net.config, max_cache_len=8)
    rnet = Recorder(
        net,
        input_data={"input_ids": ids, **past(cache)},
        force_static_flow=False,
        verbose=0,
    )
    rnet.record("", "layers.*", inputs=True)
    reader, mode = Reader(), torch.inference_mode if inference else torch.no_grad
    for step in range(4):
        with mode():
            rnet(input_ids=ids[:, :1], **past(cache), cache_position=torch.tensor([step]))
        reader.read_all(rnet)
    reader.check()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("first", [nn.Flatten, nn.Identity, lambda: nn.Unflatten(1, (2, 2))])
def test_input_buffer_that_is_filled_again(
    first: Callable[[], nn.Module], grad: bool, copy: str
) -> None:
    net = nn.Sequential(first(), nn.Flatten(), linear())
    rnet, reader, buffer = recorder(net, inputs=True, copy=copy), Reader(), torch.empty(3, 4)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            rnet(buffer.copy_(torch.randn(3, 4)))
            reader.read_all(rnet)
    reader.check()


def test_input_that_numpy_writes_to() -> None:
    rnet, reader, array = (
        recorder(nn.Sequential(nn.Identity(), linear()), inputs=True),
        Reader(),
        np.zeros((3, 4), np.float32),
    )
    for _ in range(4):
        array += 1
        rnet(torch.from_numpy(array))
        reader.read_all(rnet)
    reader.check()


def step_by_hand(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": step_by_hand,
    "foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
}
OF_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda weight: weight,
    "slice": lambda weight: weight[:3],
    "view": lambda weight: weight.t(),
    "detached": lambda weight: weight.detach(),
}


@pytest.mark.parametrize(
    ("part", "name", "copy", "reads_late"),
    one_in(5, itertools.product(OF_PARAMETERS, OPTIMISERS, COPIES, (False, True))),
)
def test_optimiser_steps(part: str, name: str, copy: str, reads_late: bool) -> None:
    of_weight = Net(
        lambda net, _: OF_PARAMETERS[part](net.weight), weight=nn.Parameter(torch.randn(4, 4))
    )
    net = Net(
        lambda net, x: (net.last(x) @ net.inner(x)[:3].reshape(-1, 3)[:4]).sum(),
        inner=of_weight,
        last=linear(),
    )
    rnet, reader = recorder(net, "inner", copy=copy), Reader()
    optimiser = OPTIMISERS[name](net.parameters())
    for at in range(4):
        optimiser.zero_grad()
        truth = OF_PARAMETERS[part](of_weight.weight).detach().clone()
        loss = rnet(torch.randn(3, 4))
        loss.backward()
        if not reads_late:
            assert same_bits(reader.read(rnet.activations["inner"]).detach(), truth)
        optimiser.step()
        # Fused optimisers write without a new version, which only copies stand.
        if reads_late and copy != "never":
            with contextlib.suppress(MutationError):
                assert same_bits(reader.read(rnet.activations["inner"]).detach(), truth), at
    if not reads_late:
        reader.check()


@pytest.mark.parametrize("part", OF_PARAMETERS)
def test_a_step_that_is_not_counted_comes_before_the_first_reading(part: str) -> None:
    of_weight = Net(
        lambda net, _: OF_PARAMETERS[part](net.weight), weight=nn.Parameter(torch.randn(4, 4))
    )
    net = Net(
        lambda net, x: (net.last(x).sum() * net.inner(x)).sum(), inner=of_weight, last=linear()
    )
    rnet, optimiser = recorder(net, "inner"), torch.optim.Adam(net.parameters(), fused=True)
    for at in range(3):
        truth = OF_PARAMETERS[part](of_weight.weight).detach().clone()
        rnet(torch.randn(3, 4)).backward()
        optimiser.step()
        assert same_bits(rnet.activations["inner"].detach(), truth), at


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("part", OF_PARAMETERS)
def test_parameters_read_without_gradients(part: str, copy: str, mode: Any) -> None:
    net = Net(lambda net, _: OF_PARAMETERS[part](net.weight), weight=nn.Parameter(torch.ones(4, 4)))
    rnet, reader = recorder(Net(lambda net, x: net.inner(x) * 1, inner=net), copy=copy), Reader()
    for at in range(4):
        with mode():
            rnet(torch.randn(3, 4))
        read = reader.read(rnet.activations["inner"])
        assert (read == 1 + at).all()
        with torch.no_grad():
            net.weight += 1
    reader.check()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_caller_that_changes_what_it_got(mode: Any, copy: str) -> None:
    net = Net(
        lambda net, x: (net.last(net.first(x)), {"hidden": [net.first(x)]}),
        first=linear(),
        last=linear(),
    )
    rnet = recorder(
        Net(lambda net, x: net.inner(x), inner=net), "", "inner", "inner.last", copy=copy
    )
    for _ in range(3):
        reader = Reader()
        with mode():
            output, hidden = rnet(torch.randn(3, 4))
            reader.read_all(rnet)
        with torch.inference_mode(output.is_inference()), torch.no_grad():
            output.mul_(0)
            hidden["hidden"][0].add_(1)
        reader.check()


@pytest.mark.parametrize("settings", [{"offload": True}, {"gradients": True}, {"inputs": True}])
def test_settings(settings: dict[str, Any]) -> None:
    rnet, reader = recorder(Counter(add_to_detached_state), **settings), Reader()
    for _ in range(4):
        rnet(torch.randn(3, 4), activation_postproc=lambda tensor: tensor * 2).sum().backward()
        reader.read_all(rnet)
        for label in rnet.gradients:
            reader.read(rnet.gradients[label])
    reader.check()


def test_gradient_that_is_summed_up_later() -> None:
    """Autograd may make a gradient the ``grad`` of a leaf, and add the next one in place."""
    weight = nn.Parameter(torch.ones(3, 4))
    inner = Net(lambda net, _: net.weight + 0, weight=weight)
    net = Net(lambda net, x: net.inner(x) * x, inner=inner)
    rnet, reader = recorder(net, "inner", gradients=True), Reader()
    for _ in range(3):
        rnet(torch.ones(3, 4)).sum().backward()
        reader.read(rnet.gradients["inner"])
    assert float(weight.grad[0, 0]) == 3  # type: ignore[index]
    reader.check()


def test_extract_nested_recorders_and_threads() -> None:
    net = Counter(add_to_detached_state)
    outer, inner, reader = recorder(net, ""), recorder(net, "", "inner"), Reader()

    def work() -> None:
        outer.extract(torch.randn(3, 4))
        reader.read_all(outer)

    for _ in range(3):
        reader.read(dict(outer.extract(torch.randn(3, 4)).items()))
        reader.read(list(inner.extract(torch.randn(3, 4)).values()))
        in_a_thread(work)
    reader.check()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("change", ["none", "relu", "add"])
def test_gradient_at_a_record_whose_memory_others_hold(change: str, copy: str) -> None:
    """By hand: the caller holds the output; its record is read and still upstream of a loss."""
    net = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
    rnet = recorder(net, "0", "2", "", copy=copy)
    for _ in range(3):
        output = rnet(torch.randn(3, 4))
        records = [rnet.activations[key] for key in ("2", "")]
        loss = {"none": lambda t: t * 3, "relu": torch.relu_, "add": lambda t: t.add_(1)}[change](
            output
        )
        expected = {"none": 3.0, "relu": (records[0] > 0).float(), "add": 1.0}[change]
        for record in records:
            (gradient,) = torch.autograd.grad(loss.sum(), record, retain_graph=True)
            assert same_bits(gradient, torch.ones(3, 4) * expected)


def test_gradient_at_a_leaf_that_a_layer_returns() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    rnet = recorder(nn.Sequential(nn.Identity(), linear()), "0")
    for _ in range(3):
        output = rnet(x)
        record = rnet.activations["0"]
        (expected,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        (gradient,) = torch.autograd.grad(output.sum(), record)
        assert same_bits(gradient, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_reading_copies_nothing_that_nobody_else_holds(grad: bool) -> None:
    pointers: dict[str, int] = {}
    net = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear()), nn.Unflatten(1, (2, 2)))
    net.append(nn.Flatten())
    names = ("0", "2", "2.0")
    for name in names:
        net.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: pointers.update({name: output.data_ptr()})
        )
    rnet = recorder(net[:3], *(names if not grad else names[:1]), inputs=not grad)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            rnet(torch.randn(3, 4))
    for name in names[:1]:
        assert rnet.activations[name].data_ptr() == pointers[name]
    if not grad:
        assert rnet.activations["2"] is rnet.activations["2.0"]
        assert rnet.inputs["2"].args[0] is rnet.inputs["2.0"].args[0]


def test_reading_again_gives_the_same_object() -> None:
    rnet = recorder(Net(lambda net, x: {"a": net.inner(x), "b": [x]}, inner=linear()))
    for _ in range(3):
        output = rnet(torch.randn(3, 4))
        for label in rnet.activations:
            assert rnet.activations[label] is rnet.activations[label]
        assert rnet.activations[""]["a"] is rnet.activations["inner"]
        assert rnet.activations[""]["a"] is not output["a"]


def _rotating() -> Iterator[Any]:
    """Yield every case of the zoo in one of its modes, so that each mode meets many nets."""
    for index, case in enumerate(case for case in zoo.CASES if case.static_flow):
        allowed = [mode for mode in MODES if mode.allows(case)]
        marks = [] if index % 5 == 0 else [pytest.mark.campaign]
        yield pytest.param(case, allowed[index % len(allowed)], id=case.name, marks=marks)


@pytest.mark.filterwarnings("ignore:layer .* runs without torch's fused kernel")
@pytest.mark.parametrize(("case", "mode"), list(_rotating()))
def test_zoo(case: Case, mode: Mode) -> None:
    net = case.fresh().train(mode.training)
    rnet = make_recorder(net, case, training=mode.training)
    rnet.record(*executed(rnet), inputs=True)
    reader = Reader()
    for seed in range(3):
        outcome = run_pass(rnet, case, mode, seed)
        reader.read_all(rnet)
        if mode.builds_graph:
            outcome.gradients(net)
            reader.read_all(rnet)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.data.add_(0.01)
    reader.check()


class Linked:
    """An object that knows what holds it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.child: Any = None
        self.parent: Any = None


def linked(net: Any, x: Tensor) -> Linked:
    parent = Linked(net.inner(x))
    parent.child = Linked(x)
    parent.child.parent = parent
    return parent


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", [False, True])
def test_records_are_no_objects_of_the_network_behind_a_back_reference(
    grad: bool, copy: str
) -> None:
    rnet = recorder(Net(linked, inner=linear()), copy=copy)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            output = rnet(torch.randn(3, 4))
            record, truth = rnet.activations[""], output.value.detach().clone()
            assert record is not output
            assert record.child.parent is record
            with torch.no_grad():
                output.value.add_(1)
            output.child.parent.value = None
            assert same_bits(record.child.parent.value.detach(), truth)


def test_inputs_that_refer_to_themselves_are_recomputed() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        given = Linked(x)
        given.child = given
        return net.block(given)  # type: ignore[no-any-return]

    block = Net(lambda net, given: net.last(given.child.value), last=linear())
    rnet = recorder(Net(forward, block=block), "block", inputs=True)
    for _ in range(2):
        rnet(torch.randn(3, 4))
        assert same_bits(
            rnet.recompute("block.last")["block.last"], rnet.activations["block"].detach()
        )


@pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_and_files_of_records_hold_what_the_records_held(again: Any) -> None:
    rnet = recorder(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "*", copy="never")
    with torch.no_grad():
        output = rnet(torch.randn(3, 4))
        twin = again(rnet.activations)
        assert same_bits(twin["0"], rnet.activations["0"])
        assert same_bits(twin["1"], output)
        output.add_(1)
        lost = again(rnet.activations)
    with pytest.raises(MutationError):
        lost["1"]
    assert same_bits(lost["0"], twin["0"])


def structure(net: Any, x: Tensor) -> Any:
    return {"twice": x * 2, "both": (x, [x + 1])}


def hand_on(net: Any, x: Tensor) -> Any:
    return net.layer(x)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_and_files_of_records_hold_structures_and_inputs(again: Any) -> None:
    rnet = recorder(Net(hand_on, layer=Net(structure)), "layer", inputs=True)
    x = torch.randn(3, 4)
    with torch.no_grad(), rnet.watch() as passes:
        rnet.net(x)
    for records in (again(rnet.activations), again(passes)[0]):
        assert same_bits(records["layer"]["both"][1][0], x + 1)
    for inputs in (again(rnet.inputs), again(passes.inputs)[0]):
        assert same_bits(inputs["layer"].args[0], x)

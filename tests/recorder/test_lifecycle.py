"""T6 and T7: what construction, exceptions, copies and the end of a recorder leave behind."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import comm, replicate
from torch.nn.utils.rnn import pack_sequence

from scio_recorder import Recorder, UnsupportedNetError
from scio_recorder.errors import LabellingError, LayerNotFoundError, MissingInputError
from scio_recorder.postprocessors import Ablate, At, Heads
from scio_recorder.reductions import Covariance, Moments
from tests.harness import hook_state, trace
from tests.oracle import differences, freeze, same_bits
from tests.rotation import one_in
from tests.zoo.base import linear


def small_net() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.BatchNorm1d(4))


def recorder(net: nn.Module, *selectors: Any, **settings: Any) -> Recorder:
    rnet = Recorder(net, input_size=(3, 4), verbose=0)
    rnet.record(*selectors, **settings)
    return rnet


def live_tensors() -> int:
    gc.collect()
    # `type` and not `isinstance`, which would wake lazy proxies that other libraries leave about.
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("training", [False, True])
def test_construction_leaves_no_trace(mode: str, training: bool) -> None:
    net = nn.Sequential(small_net(), nn.Dropout(0.5), nn.GRU(4, 4), nn.Identity())
    net.train(training)
    net[0][3].train(not training)
    net[0][0].requires_grad_(False)
    net[0][2].weight.grad = torch.ones(4, 4)
    net[0].register_forward_hook(lambda *_: None)
    before = trace(net)
    Recorder(net, input_size=(3, 4), mode=mode, verbose=0)
    assert not differences(trace(net), before)


def test_hooks_of_the_user_do_not_run_at_construction() -> None:
    net, seen = small_net(), []
    net[0].register_forward_hook(lambda *_: seen.append("forward"))
    net[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    Recorder(net, input_size=(3, 4), verbose=0)
    assert seen == []


def test_construction_keeps_grad_mode_autocast_and_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        net = small_net()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            Recorder(net, input_data=torch.randn(3, 4), verbose=0)
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_failed_construction_leaves_no_trace() -> None:
    net = small_net()
    before = trace(net)
    for wrong in ({"input_size": (3, 9)}, {"input_data": object()}, {}):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            Recorder(net, verbose=0, **wrong)
        assert not differences(trace(net), before)


def test_removing_and_recording_nothing_leave_no_hooks() -> None:
    net = small_net()
    net[0].register_forward_hook(lambda *_: None)
    before = hook_state(net)
    rnet = recorder(net, "*", inputs=True, gradients=True)
    rnet(torch.randn(3, 4)).sum().backward()
    assert hook_state(net) != before
    for _ in range(2):
        rnet.remove()
        assert hook_state(net) == before
    rnet = recorder(net, "0", "2")
    rnet(torch.randn(3, 4))
    rnet.record()
    assert hook_state(net) == before
    assert rnet.recording == ()
    rnet(torch.randn(3, 4))
    assert len(rnet.activations) == 0


def test_context_manager_removes_its_hooks() -> None:
    net = small_net()
    before = hook_state(net)
    with recorder(net, "0") as rnet:
        rnet(torch.randn(3, 4))
    assert hook_state(net) == before
    with pytest.raises(ArithmeticError), recorder(net, "0"):
        raise ArithmeticError
    assert hook_state(net) == before


def test_deleting_the_recorder_removes_its_hooks_and_frees_the_net() -> None:
    net = small_net()
    before = hook_state(net)
    rnet = recorder(net, "0", "2", gradients=True)
    output = rnet(torch.randn(3, 4))
    gone = weakref.ref(rnet)
    del rnet
    gc.collect()
    assert gone() is None
    assert hook_state(net) == before
    output.sum().backward()
    net_gone = weakref.ref(net)
    del net
    gc.collect()
    assert net_gone() is None


class Fails(nn.Module):
    """Raises what it is told to."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x * 2


ERRORS = [ArithmeticError, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.parametrize(
    ("error", "selected"), one_in(3, itertools.product(ERRORS, [("0",), ("0", "1", "2", "")]))
)
def test_exception_midway_leaves_nothing(
    error: type[BaseException], selected: tuple[str, ...]
) -> None:
    net = nn.Sequential(linear(), Fails(), linear())
    rnet = recorder(net, *selected, inputs=True, gradients=True)
    rnet(torch.randn(3, 4))
    x = torch.randn(3, 4)
    rnet.record(*selected, inputs=True, gradients=True)
    before = live_tensors()
    for _ in range(3):
        net[1].error = error()
        with pytest.raises(error):
            rnet(x)
        net[1].error = None
        assert len(rnet.activations) == 0
        assert len(rnet.inputs) == 0
    assert live_tensors() <= before
    for _ in range(3):
        output = rnet(x)
        assert same_bits(rnet.activations["0"], net[0].forward(x))
        assert same_bits(output, net[2].forward(net[0].forward(x) * 2))


def test_exception_leaves_no_hooks_and_no_half_record() -> None:
    net = nn.Sequential(linear(), nn.Tanh(), Fails(), linear())
    before = hook_state(net)
    rnet = recorder(net, "0", "1", "3")
    kept: list[weakref.ref[Tensor]] = []
    handle = net[0].register_forward_hook(lambda _m, _a, output: kept.append(weakref.ref(output)))
    net[2].error = KeyboardInterrupt()
    # The traceback, which an interactive session keeps, must not keep records alive.
    with torch.no_grad(), pytest.raises(KeyboardInterrupt) as caught:
        rnet(torch.randn(3, 4))
    assert caught.tb is not None
    handle.remove()
    gc.collect()
    assert [reference() for reference in kept] == [None]
    assert hook_state(net) == before
    net[2].error = None
    x = torch.randn(3, 4)
    rnet(x)
    assert same_bits(rnet.activations["1"], torch.tanh(net[0].forward(x)))


def test_a_pass_that_fails_or_records_nothing_leaves_no_records_of_the_one_before() -> None:
    rnet = recorder(small_net(), "0", inputs=True, gradients=True)
    x = torch.randn(3, 4)

    def fails() -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            rnet(torch.randn(3, 5))

    for follow in (fails, lambda: rnet(x, activation_postproc=torch.neg, dont_record=True)):
        rnet(x).sum().backward()
        assert all(map(len, (rnet.activations, rnet.inputs, rnet.gradients)))
        follow()
        assert not any(map(len, (rnet.activations, rnet.inputs, rnet.gradients)))


def test_exception_in_a_hook_of_the_user_leaves_nothing() -> None:
    net = small_net()
    rnet = recorder(net, "0", "1", "2")

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = net[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        rnet(torch.randn(3, 4))
    assert len(rnet.activations) == 0
    handle.remove()
    x = torch.randn(3, 4)
    rnet(x)
    assert same_bits(rnet.activations["0"], net[0].forward(x))


def test_record_shows_what_hooks_of_the_user_made_of_an_output() -> None:
    net = small_net()
    net[0].register_forward_hook(lambda _module, _args, output: output * 3)
    rnet = recorder(net, "0")
    x = torch.randn(3, 4)
    rnet(x)
    assert same_bits(rnet.activations["0"], net[0].forward(x) * 3)


def test_deep_copy_of_a_recorder_is_independent() -> None:
    net = small_net()
    rnet = recorder(net, "0", "2")
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    rnet(x)
    twin = copy.deepcopy(rnet)
    assert twin.net is not net
    assert twin.recording == rnet.recording
    with torch.no_grad():
        twin.net[0].weight.add_(1)
    twin(other)
    assert same_bits(rnet.activations["0"], net[0].forward(x))
    assert same_bits(twin.activations["0"], twin.net[0].forward(other))
    assert not same_bits(twin.net[0].weight, net[0].weight)
    assert twin.architecture["0"].module is twin.net[0]
    twin.remove()
    rnet(other)
    assert same_bits(rnet.activations["0"], net[0].forward(other))


def test_deep_copy_of_the_wrapped_net_is_free_of_the_recorder() -> None:
    net = small_net()
    rnet = recorder(net, "0")
    x = torch.randn(3, 4)
    rnet(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin[0].weight.zero_()
    twin(torch.randn(3, 4))
    assert same_bits(rnet.activations["0"], net[0].forward(x))
    fresh = recorder(twin, "0")
    fresh(x)
    assert same_bits(fresh.activations["0"], twin[0].forward(x))
    gone = weakref.ref(rnet)
    del rnet
    gc.collect()
    assert gone() is None
    assert isinstance(twin(x), Tensor)


def test_pickled_recorder_records_again() -> None:
    rnet = recorder(small_net(), "0", "2", inputs=True)
    rnet(torch.randn(3, 4))
    twin = pickle.loads(pickle.dumps(rnet))
    x = torch.randn(3, 4)
    twin(x)
    assert twin.recording == rnet.recording
    assert twin.architecture.fingerprint == rnet.architecture.fingerprint
    assert same_bits(twin.activations["0"], rnet.net[0].forward(x))
    assert same_bits(twin.inputs["0"].args[0], x)


def test_recorder_that_an_earlier_version_has_pickled() -> None:
    rnet = Recorder(nn.Linear(2, 3), input_size=(1, 2))
    rnet.record("0-1")
    state = rnet.__getstate__()
    for name in ("_operations", "_labelling", "_gradient_hooks"):
        del state[name]
    twin = Recorder.__new__(Recorder)
    twin.__setstate__(state)
    output = twin(torch.ones(1, 2))
    assert torch.equal(output, rnet.net(torch.ones(1, 2)))
    assert torch.equal(twin.activations["0-1"], output)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda rnet: pickle.loads(pickle.dumps(rnet))])
def test_recorder_of_packed_sequences_can_be_copied(again: Any) -> None:
    packed = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    rnet = Recorder(nn.Sequential(nn.GRU(4, 5)), input_data=[packed])
    rnet.record("0")
    output, hidden = rnet.net[0](packed)
    assert rnet.architecture["0"].input_shape == ((5, 4), (3,), None, None)
    twin = again(rnet)
    twin(packed)
    assert same_bits(twin.activations["0"][0].data, output.data)
    assert same_bits(twin.activations["0"][1], hidden)


def test_data_parallel_makes_no_replicas_of_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    rnet = recorder(nn.Sequential(nn.ReLU()), "0")
    # Builds for GPUs, such as that of torch 2.8, ask for one even where there is nothing to copy.
    monkeypatch.setattr(comm, "broadcast_coalesced", lambda tensors, devices: [[]])
    with pytest.raises(UnsupportedNetError, match="DistributedDataParallel"):
        replicate(rnet, [0])


def test_wrapped_net_can_be_pickled_and_saved() -> None:
    net = small_net()
    rnet = recorder(net, "0")
    rnet(torch.randn(3, 4))
    twin = pickle.loads(pickle.dumps(net))
    x = torch.randn(3, 4)
    assert same_bits(twin.eval()(x), net.eval()(x))
    assert list(net.state_dict()) == list(small_net().state_dict())


def test_moving_and_switching_the_recorder_reaches_the_net() -> None:
    net = small_net()
    rnet = recorder(net, "0")
    assert rnet.eval() is rnet
    assert not any(module.training for module in net.modules())
    rnet.double()
    x = torch.randn(3, 4, dtype=torch.float64)
    rnet(x)
    assert rnet.activations["0"].dtype == torch.float64
    assert same_bits(rnet.activations["0"], net[0].forward(x))


def test_what_is_not_there_yet_says_how_to_get_it() -> None:
    rnet = Recorder(nn.Sequential(nn.Linear(2, 2)), input_size=(1, 2))
    rnet.record("0")
    for what, words in (
        ("activations", ["which chose 1-1", "rnet(x)"]),
        ("inputs", ["inputs=True", "rnet(x)"]),
        ("gradients", ["gradients=True", "rnet(x)", "backward()"]),
    ):
        with pytest.raises(LayerNotFoundError) as caught:
            getattr(rnet, what)["0"]
        assert all(word in str(caught.value) for word in words)


def test_a_recorder_of_a_recorder_records_what_the_net_returns() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    inner = Recorder(net, input_size=(1, 5))
    outer = Recorder(inner, input_size=(1, 5))
    inner.record("0", "2")
    outer.record("_net.0", "_net.1", gradients=True)
    x = torch.randn(2, 5)
    first = net[0].forward(x)
    changed = torch.relu(first * 2)
    for _ in range(3):
        output = outer(x, activation_postproc={"_net.0": lambda tensor: tensor * 2})
        assert same_bits(output, net[2].forward(changed))
        assert same_bits(outer.activations["_net.0"], first)
        assert same_bits(outer.activations["_net.1"], changed)
        # The inner one sees what the module's caller gets.
        assert same_bits(inner.activations["0"], first * 2)
        assert same_bits(inner.activations["2"], output)
        output.sum().backward()
        expected = net[2].weight.sum(0) * (changed > 0) * 2
        assert torch.equal(outer.gradients["_net.0"], expected)


@pytest.mark.parametrize(
    ("second", "written"),
    [((1, 2), "input_size=(1, 2)"), (torch.ones(1, 2), "input_data=x")],
)
def test_an_input_given_by_position_is_refused_with_its_keyword(second: Any, written: str) -> None:
    wrong: Any = Recorder
    with pytest.raises(MissingInputError) as caught:
        wrong(nn.ReLU(), second)
    assert isinstance(caught.value, TypeError)
    assert f"Recorder(net, {written})" in str(caught.value)
    parameters = list(inspect.signature(Recorder).parameters.values())
    assert [one.kind.name for one in parameters] == [
        "POSITIONAL_ONLY",
        "KEYWORD_ONLY",
        "VAR_KEYWORD",
    ]


@pytest.mark.parametrize(
    ("device", "written"),
    [("gpu", '"cuda"' if torch.cuda.is_available() else '"cpu"'), ("nothing", '"cpu"')],
)
def test_a_device_that_is_none_is_refused_with_one_that_is(device: str, written: str) -> None:
    with pytest.raises(LabellingError, match=written):
        Recorder(nn.ReLU(), input_size=(1, 2), device=device)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])


def make_recorder() -> Recorder:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    rnet = Recorder(net, input_data=X, verbose=0)
    rnet.record("0", "1")
    return rnet


def collected(rnet: Recorder, **options: Any) -> Any:
    return rnet.collect([X[:4], X[4:]], progress=False, **options)


def covariance(rnet: Recorder, folder: Path) -> Any:
    reduce = [Covariance(), Moments()]
    recording = rnet.collect([X], store=None, reduce=reduce, progress=False)
    return [tuple(result) for result in recording["0"]]


def covariance_by_class(rnet: Recorder, folder: Path) -> Any:
    reduce = Covariance(by=lambda batch: CLASSES)
    return rnet.collect([X], store=None, reduce=reduce, progress=False)["0"].covariance


def page(rnet: Recorder, folder: Path) -> Any:
    written = collected(rnet, store="host").report(folder / "page.html")
    return len(written.read_text(encoding="utf-8"))


def nothing_of_each_sample(rnet: Recorder, folder: Path) -> Any:
    return collected(rnet, store="host", transform=lambda value, batch: value[:, :0])["0"]


def shuffled(rnet: Recorder, folder: Path) -> Any:
    loader = collected(rnet, store="host").loader("0", batch_size=4, shuffle=True)
    return [*loader, loader.state_dict()]


def effects(rnet: Recorder, folder: Path) -> Any:
    return rnet.sweep(X, X + 1, lambda output: output.sum()).values


def estimated_effects(rnet: Recorder, folder: Path) -> Any:
    return rnet.sweep(X, X + 1, lambda output: output.sum(), estimate=True).values


def places(rnet: Recorder, folder: Path) -> Any:
    chosen = {"0": At((..., [0, 2]), Ablate()), "1": Heads(2, [1], Ablate())}
    return rnet(X, activation_postproc=chosen)


USES = (covariance, covariance_by_class, page, nothing_of_each_sample, shuffled, effects)


@pytest.mark.parametrize("use", [*USES, estimated_effects, places])
def test_results_do_not_depend_on_the_default_device(
    use: Callable[[Recorder, Path], Any], tmp_path: Path
) -> None:
    rnet = make_recorder()
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    truth = use(rnet, folders[0])
    # Whatever is made there by mistake has no values, and can't be computed with.
    with torch.device("meta"):
        found = use(rnet, folders[1])
    assert differences(freeze(found), freeze(truth)) == []
    assert not isinstance(found, Tensor) or found.device.type == "cpu"

"""What a collected recording recomputes, against copies that other hooks took at collection."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import (
    LayerNotFoundError,
    RecomputeError,
    Recorder,
    Recording,
    SelectorTypeError,
    open_recording,
)
from scio_recorder.errors import ArgumentError
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.recompute.recomputing import _inputs_again
from scio_recorder.reductions import Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.kept_inputs import KeptCall
from tests.harness import trace
from tests.oracle import Watch, differences, same_bits
from tests.recording.nets import batches
from tests.zoo.base import Net

# These nets have to run in training mode: dropout and running statistics are what is tested.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the net is in training mode:scio_recorder.errors.CollectWarning"
)

SIZES = (4, 3, 4)


def in_turn(net: Any, x: Tensor) -> Any:
    """Use statistics that change from batch to batch, random numbers, and in-place operations."""
    x += 1
    return net.act(net.drop(net.norm(net.linear(x - net.norm.running_mean))))


def block() -> Net:
    parts = {"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
    return Net(in_turn, **parts, drop=nn.Dropout(0.5), act=nn.ReLU(inplace=True))


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), block(), block())


def recorder(*selectors: Any, net: nn.Module | None = None, **options: Any) -> Recorder:
    torch.manual_seed(3)
    rnet = Recorder(blocks() if net is None else net, input_size=(2, 4), verbose=0)
    rnet.record(*selectors, inputs=True, **options)
    return rnet


def truth(watch: Watch, name: str) -> Tensor:
    return torch.cat([watch.calls[name, number].value for number in range(len(SIZES))])


STORES = ["host", "disk", "chunks", "saved", "saved from disk"]
# By default most tests take the first one, which copies nothing, and the last, which copies most.
BY_DEFAULT = [
    pytest.param(store, marks=[pytest.mark.campaign] * (store not in (STORES[0], STORES[-1])))
    for store in STORES
]


@pytest.fixture(params=BY_DEFAULT)
def gather(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Recording]:
    """Collect, in memory or on disk, and maybe read what was saved."""

    def collected(rnet: Recorder, data: Any, **options: Any) -> Recording:
        runs = len(list(tmp_path.iterdir()))
        path = tmp_path / f"run-{runs}"
        where: Any = {"disk": f"disk:{path}", "saved from disk": f"disk:{path}"}
        where["chunks"] = Disk(path, chunk_bytes=1)
        recording = rnet.collect(data, store=where.get(request.param, "host"), **options)
        if request.param == "disk":
            return open_recording(path, verify=True)
        if "saved" in request.param:
            recording.save(tmp_path / f"run-{runs}-saved")
            return open_recording(tmp_path / f"run-{runs}-saved", verify=True)
        return recording

    return collected


Gather = Callable[..., Recording]
INNER = [f"{block}.{name}" for block in (1, 2) for name in ("linear", "norm", "drop", "act")]


@pytest.mark.parametrize("gather", STORES, indirect=True)
@pytest.mark.parametrize("training", [True, False])
def test_every_layer_inside_bit_for_bit(gather: Gather, training: bool) -> None:
    rnet = recorder("1", "2")
    rnet.net.train(training)
    with Watch(rnet.net) as watch:
        recording = gather(rnet, batches(*SIZES))
    rnet.net.eval()
    rnet.remove()
    torch.rand(100)
    before = trace(rnet.net)
    found = recording.recompute(rnet, *INNER, "1")
    assert not differences(trace(rnet.net), before)
    assert len(found) == 9
    for name in (*INNER, "1"):
        assert same_bits(found[name], truth(watch, name)), name
        assert not found[name].requires_grad


def test_another_net_of_the_same_weights(gather: Gather) -> None:
    rnet = recorder("1")
    with Watch(rnet.net) as watch:
        recording = gather(rnet, batches(*SIZES))
    other = Recorder(blocks(), input_size=(2, 4))
    other.net.load_state_dict(rnet.net.state_dict())
    other.net[1].norm.running_mean.zero_()
    found = recording.recompute(other, "1.drop")
    assert same_bits(found["1.drop"], truth(watch, "1.drop"))
    assert int(other.net[1].norm.running_mean.abs().sum()) == 0


def test_what_is_kept_may_be_changed_rounded_or_reduced(gather: Gather) -> None:
    for options in (
        {"transform": lambda activation, batch: activation[:, :1]},
        {"dtype": torch.bfloat16},
        {"reduce": Mean()},
    ):
        rnet = recorder("1")
        with Watch(rnet.net) as watch:
            recording = gather(rnet, batches(*SIZES), **options)
        found = recording.recompute(rnet, "1", "1.norm")
        assert same_bits(found["1"], truth(watch, "1"))
        assert same_bits(found["1.norm"], truth(watch, "1.norm"))


def test_a_recording_may_be_pickled_and_copied(gather: Gather) -> None:
    rnet = recorder("1")
    with Watch(rnet.net) as watch:
        recording = gather(rnet, batches(*SIZES))
    for again in (pickle.loads(pickle.dumps(recording)), copy.deepcopy(recording)):
        for (args, kwargs), (wanted, _) in zip(
            again.inputs["1"], recording.inputs["1"], strict=True
        ):
            assert torch.equal(args[0], wanted[0])
            assert kwargs == {}
        assert same_bits(again.recompute(rnet, "1.drop")["1.drop"], truth(watch, "1.drop"))


MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_then_and_a_default_device_does_not_matter(
    gather: Gather, mode: str
) -> None:
    rnet = recorder("1")
    rnet.net.train(mode != "inference mode")
    with Watch(rnet.net) as watch, MODES[mode]():
        recording = gather(rnet, batches(*SIZES))
    with torch.device("meta"):
        given = recording.inputs["1"][0].args[0]
        found = recording.recompute(rnet, "1.linear", "1.drop")
    assert not given.is_meta
    assert not given.is_inference()
    assert (found["1.linear"].dtype == torch.bfloat16) == (mode == "autocast")
    for name in ("1.linear", "1.drop"):
        assert same_bits(found[name], truth(watch, name))
        assert not found[name].is_inference()


def test_a_recording_that_is_complete_is_given_back_with_inputs(tmp_path: Path) -> None:
    rnet, store = recorder("1"), f"disk:{tmp_path / 'run'}"
    rnet.net.eval()
    with Watch(rnet.net) as watch:
        rnet.collect(batches(*SIZES), store=store)
    recording = rnet.collect(batches(*SIZES), store=store, resume=True)
    assert same_bits(recording.recompute(rnet, "1.norm")["1.norm"], truth(watch, "1.norm"))


def test_hooks_on_inputs_act_once_also_where_modules_are_nested() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net = nn.Sequential(nn.Sequential(inner, nn.Linear(4, 4), nn.ReLU()))
    inner.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    net[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    rnet = recorder("0", "0.0", net=net)
    with Watch(net) as watch:
        recording = rnet.collect(batches(*SIZES))
    before = trace(net)
    found = recording.recompute(rnet, "0.0.0", "0.1")
    assert not differences(trace(net), before)
    for name in ("0.0.0", "0.1"):
        assert same_bits(found[name], truth(watch, name))


def test_a_buffer_that_is_replaced_and_grows(gather: Gather) -> None:
    def memory(net: Any, x: Tensor) -> Tensor:
        out: Tensor = net.act(x + net.seen.sum(0))
        net.seen = torch.cat([net.seen, x[:1]])
        return out

    rnet = recorder("0", net=nn.Sequential(Net(memory, seen=torch.zeros(1, 4), act=nn.Identity())))
    with Watch(rnet.net) as watch:
        recording = gather(rnet, batches(*SIZES))
    seen = rnet.net[0].seen
    assert same_bits(recording.recompute(rnet, "0.act")["0.act"], truth(watch, "0.act"))
    assert rnet.net[0].seen is seen
    assert len(seen) == 1 + len(SIZES)


@pytest.mark.parametrize("gather", STORES, indirect=True)
def test_strides_of_inputs_and_what_two_modules_share(gather: Gather) -> None:
    received = []

    def inner(net: Any, x: Tensor, shift: Tensor, *, scale: int) -> Tensor:
        received.append((x, shift))
        return net.act(x @ net.weight.weight * scale + shift)  # type: ignore[no-any-return]

    def forward(net: Any, x: Tensor) -> Tensor:
        shift = x[:, :1].expand(-1, 4)
        wide = torch.cat([x, x], 1)
        return net.one(wide[:, ::2], shift, scale=2) + net.two(wide[:, 1::2], shift, scale=3)

    parts = {
        name: Net(inner, act=nn.Tanh(), weight=nn.Linear(4, 4, bias=False))
        for name in ("one", "two")
    }
    net = Net(forward, **parts)
    rnet = recorder("one", "two", net=net)
    received.clear()
    with Watch(net) as watch:
        recording = gather(rnet, batches(*SIZES))
    for number in range(len(SIZES)):
        for name, (x, shift) in zip(("one", "two"), received[2 * number :], strict=False):
            (again, again_shift), kwargs = recording.inputs[name][number]
            assert torch.equal(again, x)
            assert torch.equal(again_shift, shift)
            assert again.stride() == x.stride()
            assert again_shift.stride() == shift.stride()
            assert kwargs == {"scale": 2 if name == "one" else 3}
    for name in ("one.act", "two.act"):
        assert same_bits(recording.recompute(rnet, name)[name], truth(watch, name))
    # Of what is expanded, one column is kept, and that once for both; and once the states of
    # generators: torch's, and the words of NumPy's and Python's.
    if recording.path is None:
        columns = sum(SIZES) * 4 * (4 + 4 + 1)
        states = len(torch.get_rng_state()) + 4 * (624 + 625)
        assert recording.calls._kept.num_bytes == columns + states


def test_what_was_read_may_be_changed(gather: Gather) -> None:
    rnet = recorder("1")
    recording = gather(rnet, batches(*SIZES))
    first = recording.inputs["1"][0]
    first.args[0].zero_()
    assert recording.inputs["1"][0].args[0].abs().sum() > 0
    assert len(recording.inputs["1"]) == len(recording.inputs["1"][:]) == len(SIZES)
    assert recording.recompute(rnet, "1.act")


def test_changed_weights_are_an_error() -> None:
    rnet = recorder("1")
    recording = rnet.collect(batches(*SIZES))
    rnet.net[1].linear.weight.data += 1
    with pytest.raises(RecomputeError, match="weights have changed"):
        recording.recompute(rnet, "1.norm")
    rnet.net[1].linear.weight.data -= 1
    rnet.net.to("meta")
    with pytest.raises(RecomputeError, match=r"on another device.*were on cpu, now on meta"):
        recording.recompute(rnet, "1.norm")


def test_changed_weights_that_do_not_show_in_the_output_are_an_error(gather: Gather) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    nn.init.constant_(net[0][0].bias, -1000.0)
    rnet = recorder("0", net=net)
    recording = gather(rnet, batches(*SIZES))
    nn.init.constant_(net[0][0].bias, -2000.0)
    for recompute in (
        recording.recompute,
        lambda *given: next(recording.recompute_batches(*given)),
    ):
        with pytest.raises(RecomputeError, match="weights have changed since the collection"):
            recompute(rnet, "0.0")
    nn.init.constant_(net[0][0].bias, -1000.0)
    assert recording.recompute(rnet, "0.0")["0.0"].max() < -900


def test_inputs_of_another_number_than_their_state_says_are_an_error() -> None:
    given = Inputs((torch.ones(1, 2),), {})
    moment = Moment.of(nn.Linear(2, 2), given)
    again = _inputs_again(KeptCall(given, moment))
    assert same_bits(again.args[0], given.args[0])
    more = Inputs((*given.args, torch.ones(1)), {})
    with pytest.raises(RecomputeError, match="inputs have changed"):
        _inputs_again(KeptCall(more, moment))


def test_what_was_not_recorded_and_another_architecture_are_an_error() -> None:
    rnet = recorder("1")
    recording = rnet.collect(batches(*SIZES))
    other = recorder(net=blocks()[:2])
    with pytest.raises(RecomputeError, match="another architecture"):
        recording.recompute(other, "1.norm")
    with pytest.raises(RecomputeError, match=r'no inputs of layer.*record\("2", inputs=True\)'):
        recording.recompute(rnet, "2.norm")
    with pytest.raises(LookupError, match="no inputs of layer 0-1"):
        recording.recompute(rnet, "")
    with pytest.raises(LayerNotFoundError):
        recording.recompute(rnet, "nothing")
    with pytest.raises(SelectorTypeError, match="no layers are named"):
        recording.recompute(rnet)
    with pytest.raises(ArgumentError, match=r"recompute\(rnet, "):
        recording.recompute("1.norm")  # type: ignore[arg-type]
    rnet.record("1")
    with pytest.raises(RecomputeError, match="no inputs of layer"):
        rnet.collect(batches(*SIZES)).recompute(rnet, "1.norm")


def test_samples_of_different_shapes_are_an_error() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    rnet = recorder("0", net=net)
    data = [torch.randn(2, 3, 4), torch.randn(2, 5, 4)]
    recording = rnet.collect(data, store=None, reduce=Mean(), transform=lambda x, _: x.sum(1))
    with pytest.raises(
        RecomputeError, match=r"\(2, 5, 4\) for a batch of 2.*\(2, 3, 4\).*recompute_batches"
    ):
        recording.recompute(rnet, "0.0")
    again = list(recording.recompute_batches(rnet, "0.0", "0.1"))
    assert len(again) == 2
    for found, batch in zip(again, data, strict=True):
        assert torch.equal(found["0.0"], net[0][0](batch))
        assert torch.equal(found["0.1"], net[0](batch))


def test_between_batches_the_net_is_as_it_was(gather: Gather) -> None:
    rnet = recorder("1", "2")
    with Watch(rnet.net) as watch:
        recording = gather(rnet, batches(*SIZES))
    rnet.net.eval()
    torch.manual_seed(0)
    before = trace(rnet.net)
    found = recording.recompute_batches(rnet, "1.drop", "2.norm")
    for number, batch in enumerate(found):
        for name in ("1.drop", "2.norm"):
            assert same_bits(batch[name], watch.calls[name, number].value)
        assert not differences(trace(rnet.net), before)
    assert number == len(SIZES) - 1
    with pytest.raises(RecomputeError, match="no inputs of layer"):
        recording.recompute_batches(rnet, "0")


def test_structures_are_put_together_leaf_by_leaf(gather: Gather) -> None:
    def inner(net: Any, x: Tensor) -> dict[str, Any]:
        return {"both": (net.act(x), x + 1)}

    net = Net(lambda net, x: net.inner(x)["both"][0], inner=Net(inner, act=nn.Tanh()))
    rnet = recorder("", net=net)
    data = batches(*SIZES)
    found = gather(rnet, data).recompute(rnet, "inner")["inner"]
    whole = torch.cat(data)
    assert torch.equal(found["both"][0], whole.tanh())
    assert torch.equal(found["both"][1], whole + 1)


def test_a_failure_in_the_second_run_changes_nothing() -> None:
    rnet = recorder("1")
    rnet.net.train()
    recording = rnet.collect(batches(*SIZES))
    rnet.net.eval()
    rnet.net[1].act.forward = lambda x: 1 / 0
    before = trace(rnet.net)
    with pytest.raises(RecomputeError, match="failed when it was run again: ZeroDivisionError"):
        recording.recompute(rnet, "1.norm")
    assert not differences(trace(rnet.net), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("store", ["host", "device", "disk"])
def test_a_dataset_that_a_gpu_has_run(store: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    net = nn.Sequential(inner, nn.Linear(16, 2)).cuda().train()
    rnet = Recorder(net, input_size=(2, 16), verbose=0)
    rnet.record("0", inputs=True)
    data = [torch.randn(rows, 16, device="cuda") for rows in (8, 8, 3)]
    path = tmp_path / "run"
    with Watch(net) as watch:
        recording = rnet.collect(data, store=f"disk:{path}" if store == "disk" else store)
    if store == "disk":
        recording = open_recording(path, verify=True)
    state = torch.cuda.get_rng_state()
    found = recording.recompute(rnet, "0.0", "0.1", "0.2")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for name in ("0.0", "0.1", "0.2"):
        wanted = torch.cat([watch.calls[name, number].value for number in range(3)])
        assert found[name].device.type == "cpu"
        assert same_bits(found[name], wanted.cpu())
    assert recording.inputs["0"][2].args[0].device.type == "cpu"
    net.cpu()
    with pytest.raises(RecomputeError, match=r"were on cuda:0, now on cpu"):
        recording.recompute(rnet, "0.1")

"""Collecting passes that others run: `collecting` against plain hooks on the bare network."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Recorder, open_recording, reductions
from scio_recorder.errors import (
    CollectError,
    FlowError,
    RecordingError,
    SelectorTypeError,
    UnsupportedNetError,
)
from scio_recorder.stores import StoreWriter
from tests.harness import run_in_threads
from tests.recording.nets import recorder_of
from tests.recording.tables import plain_hooks


class Net(nn.Module):
    """Works in place, and takes further arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.fails = False

    def forward(self, x: Tensor, scale: float = 1.0, **others: Any) -> Tensor:
        hidden = self.act(self.first(x))
        if self.fails:
            raise KeyError("the net fails")
        return self.drop(self.second(hidden)).add_(x) * scale


def recorder(net: nn.Module, *names: str, **options: Any) -> Recorder:
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    rnet.record(*(names or ("first", "second")), **options)
    return rnet


def batches(number: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2 + at % 2, 4) for at in range(number)]


def train(net: nn.Module, number: int = 4) -> list[Tensor]:
    """Train as others do, and return all that came of it."""
    torch.manual_seed(3)
    data = batches(number)
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    found = []
    for x in data:
        optimizer.zero_grad()
        output = net(x, scale=2.0)
        output.square().sum().backward()
        gradients = (parameter.grad for parameter in net.parameters())
        found += [output.detach(), *(each.clone() for each in gradients if each is not None)]
        optimizer.step()
    return [*found, *(p.detach().clone() for p in net.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("options", [{}, {"inputs": True}, {"gradients": True}])
def test_training_by_others_is_collected_and_goes_on_as_without_a_block(options: Any) -> None:
    net = Net().train()
    twin = copy.deepcopy(net)
    rnet = recorder(net, **options)
    before = dict(vars(net))
    reduce = {"second": reductions.Mean()}
    with plain_hooks(net, "first", "second") as seen, rnet.collecting(reduce=reduce) as collection:
        mine = train(net)
    assert vars(net) == before
    assert all(map(torch.equal, mine, train(twin)))
    recording = collection.recording
    assert torch.equal(recording["first"], torch.cat(seen["first"]))
    assert not recording["first"].requires_grad
    torch.testing.assert_close(recording["second"], torch.cat(seen["second"]).mean(0))
    assert list(recording.sample_ids) == list(range(10))
    assert recording.complete


def test_gradients_are_listened_to_as_without_a_block() -> None:
    net = Net().train()
    twin = copy.deepcopy(net)
    found: list[list[dict[Any, Tensor]]] = [[], []]
    for each, own in zip((net, twin), found, strict=True):
        rnet = recorder(each, gradients=True)
        rnet.on_gradients(own.append)
        with rnet.collecting() if each is net else rnet.watch():
            train(each)
    assert len(found[0]) == 4
    for mine, theirs in zip(*found, strict=True):
        assert mine.keys() == theirs.keys() == {(1, 1), (1, 3)}
        assert all(torch.equal(mine[label], theirs[label]) for label in mine)


def test_passes_leave_no_activations_and_nothing_of_their_graph() -> None:
    net = Net()
    rnet = recorder(net)
    with rnet.collecting() as collection:
        made: list[weakref.ref[Tensor]] = []
        keep = net.second.register_forward_hook(lambda m, a, out: made.append(weakref.ref(out)))
        output = net(torch.ones(2, 4))
        keep.remove()
        with pytest.raises(LookupError):
            _ = rnet.activations["first"]
        del output
        gc.collect()
        assert made[0]() is None
    assert collection.recording.num_samples == 2
    with pytest.raises(LookupError):
        _ = rnet.activations["first"]


def test_a_batch_is_the_mapping_of_the_arguments_by_name() -> None:
    net, batch = Net(), {}

    def transform(activation: Tensor, given: dict[str, Any]) -> Tensor:
        assert not torch.is_grad_enabled()
        batch.update(given)
        return activation + given["scale"]

    rnet = recorder(net, "first", "second")
    with rnet.collecting(
        transform={"first": transform},
        reduce={"second": reductions.Mean(by=lambda batch: batch["kind"])},
        sample_ids=lambda batch: [f"{batch['name']}{at}" for at in range(len(batch["x"]))],
    ) as collection, plain_hooks(net, "first", "second") as seen:  # fmt: skip
        net(torch.ones(2, 4), 3.0, kind=[0, 1], name="a")
        net(x=torch.zeros(1, 4), scale=2.0, kind=[1], name="b")
    recording = collection.recording
    assert list(batch) == ["x", "scale", "kind", "name"]
    assert torch.equal(recording["first"][:2], seen["first"][0] + 3.0)
    assert torch.equal(recording["first"][2:], seen["first"][1] + 2.0)
    assert torch.equal(recording["second"][0], seen["second"][0][0])
    assert list(recording.sample_ids) == ["a0", "a1", "b0"]


def test_a_pass_that_fails_counts_for_nothing() -> None:
    net = Net().eval()
    rnet = recorder(net)
    x, other = torch.ones(2, 4), torch.zeros(2, 4)
    with plain_hooks(net, "first", "second") as seen, rnet.collecting(
        reduce={"first": [reductions.Mean(), reductions.Covariance()]},
        sample_ids=lambda batch: batch["ids"],
    ) as collection:  # fmt: skip
        net(x, ids=[5, 4])
        for ids in ([7, 8], [9, 2]):
            net.fails = True
            with pytest.raises(KeyError, match="the net fails"):
                net(other, ids=ids)
            net.fails = False
            seen["first"].pop()
            with pytest.raises(CollectError, match="id 4"):
                net(other, ids=[3, 4])
            net(other, ids=ids)
    recording = collection.recording
    truth = reductions.Covariance()
    for part in seen["first"]:
        truth.update(part)
    assert torch.equal(recording["first"][1].covariance, truth.compute().covariance)
    assert torch.equal(recording["second"], torch.cat(seen["second"]))
    assert list(recording.sample_ids) == [5, 4, 7, 8, 9, 2]


def test_ids_that_are_refused_can_come_again_and_those_before_stay_taken() -> None:
    net, ids = Net().eval(), iter([[0, 1], [1, 2], [2, 0], [1, 2], [2, 3]])
    rnet = recorder(net)
    with rnet.collecting(sample_ids=lambda batch: next(ids)) as collection:
        net(torch.ones(2, 4))
        for repeated in (1, 0, 1):
            with pytest.raises(CollectError, match=f"the id {repeated}, which an earlier sample"):
                net(torch.ones(2, 4))
        net(torch.ones(2, 4))
    assert list(collection.recording.sample_ids) == [0, 1, 2, 3]


def test_reductions_that_refuse_a_pass_keep_those_before() -> None:
    net = Net().eval()
    rnet = recorder(net, "first")
    with rnet.collecting(reduce=reductions.Mean(by=lambda batch: batch["kind"])) as collection:
        net(torch.ones(2, 4), kind=[0, 0])
        with pytest.raises(CollectError, match="1 label for"):
            net(torch.zeros(2, 4), kind=[0])
        net(torch.ones(2, 4), kind=[1, 1])
    means = collection.recording["first"]
    assert torch.equal(means[0], means[1])


class Breaking(reductions.Mean):
    """Fails in the middle of the second pass, after another layer was reduced."""

    updates = 0

    def update(self, activation: Tensor, batch: Any = None, **options: Any) -> None:
        Breaking.updates += 1
        if Breaking.updates == 4:
            raise KeyError("their reduction fails")
        super().update(activation, batch, **options)


def test_a_reduction_that_holds_a_part_of_a_pass_is_not_handed_out(tmp_path: Path) -> None:
    net = Net().eval()
    rnet = recorder(net)

    def run() -> None:
        with rnet.collecting(reduce=Breaking(), store=f"disk:{tmp_path}/run") as collection:
            held.append(collection)
            net(torch.ones(2, 4))
            with pytest.raises(KeyError, match="their reduction"):
                net(torch.ones(2, 4))
            with pytest.raises(CollectError, match="holds a part of that pass"):
                net(torch.ones(2, 4))

    held: list[Any] = []
    with pytest.raises(CollectError, match="holds a part of that pass"):
        run()
    with pytest.raises(CollectError, match="holds a part of that pass"):
        _ = held[0].recording
    assert not [*(tmp_path / "run").glob("chunk-*")]


def test_a_pass_that_was_reduced_and_could_not_be_committed_is_part_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net().eval()
    rnet = recorder(net)
    commit, numbers = StoreWriter.commit, itertools.count()

    def commit_but_one(writer: StoreWriter, *given: Any, **options: Any) -> None:
        if next(numbers) == 1:
            raise RecordingError("the disk is full")
        commit(writer, *given, **options)

    def run() -> None:
        with rnet.collecting(reduce=reductions.Mean(), store=None):
            net(torch.ones(2, 4))
            with pytest.raises(RecordingError, match="full"):
                net(torch.zeros(2, 4))
            net(torch.ones(2, 4))

    monkeypatch.setattr(StoreWriter, "commit", commit_but_one)
    with pytest.raises(CollectError, match="holds a part of that pass"):
        run()


class Stop(BaseException):
    """What ends a block from outside, as Ctrl-C does."""


def interrupted(block: Any, run: Callable[[], Any], error: type[BaseException] = Stop) -> Any:
    """Let a block end by an exception after something has run in it, and return what it yields."""

    def inside() -> None:
        with block as collection:
            held.append(collection)
            run()
            raise error

    held: list[Any] = []
    with pytest.raises(error):
        inside()
    return held[0]


@pytest.mark.parametrize("error", [KeyError, Stop])
def test_an_exception_in_the_block_loses_nothing_that_ended_before(error: Any) -> None:
    net = Net()
    rnet = recorder(net)
    data = [torch.ones(2, 4), torch.zeros(1, 4)]
    collection = interrupted(rnet.collecting(), lambda: list(map(net, data)), error)
    assert collection.recording["first"].shape == (3, 4)
    assert not collection.recording.complete
    assert not vars(net).get("_compiled_call_impl")
    net(torch.ones(2, 4))
    rnet(torch.ones(2, 4))
    assert torch.equal(rnet.activations["first"], collection.recording["first"][:2])


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_what_a_disk_holds_is_passed_over_when_the_passes_come_again(
    stop_after: int, tmp_path: Path
) -> None:
    net = Net().eval()
    rnet = recorder(net)
    store, reduce = f"disk:{tmp_path}/run", {"second": reductions.Moments()}

    def run(number: int) -> list[Tensor]:
        return [net(x) for x in batches(number)]

    block = rnet.collecting(store=store, reduce=reduce)
    half = interrupted(block, lambda: run(stop_after)).recording
    assert not half.complete
    assert half.num_samples == sum(map(len, batches(stop_after)))
    block = rnet.collecting(store=store, reduce=reduce, resume=True)
    with plain_hooks(net, "first") as seen, block as collection:
        outputs = run(4)
    assert all(map(torch.equal, outputs, run(4)))
    with rnet.collecting(reduce=reduce) as fresh:
        run(4)
    for recording in (collection.recording, open_recording(f"{tmp_path}/run")):
        assert recording.complete
        assert torch.equal(recording["first"], torch.cat(seen["first"]))
        assert torch.equal(recording["second"].mean, fresh.recording["second"].mean)
        assert list(recording.sample_ids) == list(range(10))
    with rnet.collecting(store=store, reduce=reduce, resume=True) as collection:
        run(2)
    assert collection.recording.num_samples == 10


def test_fewer_passes_than_are_durable_are_an_error(tmp_path: Path) -> None:
    net = Net().eval()
    rnet = recorder(net)
    store = f"disk:{tmp_path}/run"
    interrupted(rnet.collecting(store=store), lambda: net(torch.ones(5, 4)))
    block = rnet.collecting(store=store, resume=True)
    with pytest.raises(CollectError, match="5 samples already, and 0"), block:
        pass
    assert open_recording(f"{tmp_path}/run").num_samples == 5


def test_nothing_ended_before_the_exception(tmp_path: Path) -> None:
    rnet = recorder(Net())
    for store in ("host", f"disk:{tmp_path}/run"):
        collection = interrupted(rnet.collecting(store=store), lambda: None)
        with pytest.raises(CollectError, match="no pass that counts"):
            _ = collection.recording
    with rnet.collecting(store=store, resume=True) as collection:
        rnet.net(torch.ones(1, 4))
    assert collection.recording.num_samples == 1


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_a_pass_once(is_inside: bool, reentrant: bool) -> None:
    net = Net().train()
    outer = nn.Sequential(net)
    if is_inside:
        inner, net = net, outer
        net.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)
        rnet = recorder(net, "0.first")
        call: Callable[[Tensor], Tensor] = net
    else:
        rnet = recorder(net, "first")
        call = lambda x: checkpoint(net, x, use_reentrant=reentrant)  # noqa: E731
    name = "0.first" if is_inside else "first"
    post = {name: lambda x: x * 2}
    with rnet.collecting(activation_postproc=post) as collection:
        for x in batches():
            x.requires_grad_()
            call(x).sum().backward()
    assert collection.recording.num_samples == 10
    by_hand = torch.cat([net.get_submodule(name)(x) for x in batches()])
    assert torch.equal(collection.recording[name], by_hand)


@pytest.mark.parametrize("is_outer", [True, False])
def test_watching_and_collecting_nest_either_way(is_outer: bool) -> None:
    net = Net().eval()
    rnet = recorder(net)
    with contextlib.ExitStack() as blocks:
        enter = blocks.enter_context
        if is_outer:
            collection = enter(rnet.collecting())
            passes = enter(rnet.watch(activation_postproc={"second": lambda x: x * 0}))
        else:
            passes = enter(rnet.watch())
            collection = enter(rnet.collecting(activation_postproc={"second": lambda x: x * 0}))
        with plain_hooks(net, "first") as seen:
            outputs = [net(x) for x in batches()]
    assert all(map(torch.equal, outputs, batches()))
    assert torch.equal(collection.recording["first"], torch.cat(seen["first"]))
    assert torch.equal(passes.cat("first"), torch.cat(seen["first"]))
    assert torch.equal(passes.cat("second"), collection.recording["second"])


def test_two_recorders_collect_from_one_network() -> None:
    net = Net().eval()
    one, other = recorder(net, "first"), recorder(net, "second")
    with one.collecting() as first, plain_hooks(net, "first", "second") as seen:
        net(torch.ones(2, 4))
        with other.collecting() as second:
            net(torch.zeros(2, 4))
    assert torch.equal(first.recording["first"], torch.cat(seen["first"]))
    assert torch.equal(second.recording["second"], seen["second"][1])


def test_threads_take_turns() -> None:
    net = Net().eval()
    rnet = recorder(net)
    inputs = [torch.full((2, 4), float(number)) for number in range(8)]
    with rnet.collecting() as collection:
        run_in_threads(net, inputs)
    recording = collection.recording
    parts = recording["first"].split(2), recording["second"].split(2)
    found = {one[0, 0].item(): (one, other) for one, other in zip(*parts, strict=True)}
    assert len(found) == len(inputs)
    for x in inputs:
        first = net.first(x)
        one, other = found[first[0, 0].item()]
        assert torch.equal(one, first)
        assert torch.equal(other, net.second(torch.relu(first)))


def test_calls_of_the_recorder_count_and_those_that_record_nothing_do_not() -> None:
    net = Net().eval()
    rnet = recorder(net)
    with rnet.collecting() as collection:
        rnet(torch.ones(2, 4))
        rnet(torch.ones(2, 4), dont_record=True)
        net(torch.zeros(1, 4))
    net(torch.ones(2, 4))
    expected = net.first(torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4]))
    torch.testing.assert_close(collection.recording["first"], expected)


def test_every_nth_pass_up_to_so_many() -> None:
    net = Net().eval()
    rnet = recorder(net)
    with rnet.collecting(every=2, max_batches=2) as collection:
        for x in batches(6):
            net(x)
    data = batches(6)
    expected = torch.cat([net.first(data[0]), net.first(data[2])])
    assert torch.equal(collection.recording["first"], expected)
    assert list(collection.recording.sample_ids) == [0, 1, 5, 6]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_modes_of_the_caller(mode: Any) -> None:
    net = Net().eval()
    rnet = recorder(net)
    reduce = {"second": reductions.Covariance()}
    with rnet.collecting(reduce=reduce, dtype=torch.bfloat16) as collection:
        with mode():
            for x in batches(2):
                net(x)
        for x in batches():
            net(x)
    recording = collection.recording
    expected = torch.cat([net.first(x) for x in batches(2) + batches()]).to(torch.bfloat16)
    assert torch.equal(recording["first"], expected)
    assert recording["second"].covariance.isfinite().all()
    assert recording["first"].add_(1).shape == (15, 4)


def test_calls_that_are_not_counted() -> None:
    net = Net()
    rnet = recorder(net, "first", calls="any")
    with rnet.collecting(transform=lambda calls, batch: calls[0]) as collection:
        output = net(torch.ones(2, 4))
    output.sum().backward()
    assert torch.equal(collection.recording["first"], net.first(torch.ones(2, 4)))
    with pytest.raises(CollectError, match=r'tuple of what its calls returned, since calls="any"'):
        rnet.eval().collect([torch.ones(2, 4)], progress=False)


def test_every_check_is_made() -> None:
    net = Net()
    rnet = recorder(net)
    with rnet.collecting() as collection:
        net(torch.ones(2, 4))
        net.second, second = nn.Identity(), net.second
        with pytest.raises(FlowError, match="second"):
            net(torch.ones(2, 4))
        net.second = second
        with pytest.raises(CollectError, match=r"\(3, 4\)"):
            net(torch.ones(2, 3, 4))
        net(torch.ones(2, 4))
    assert collection.recording.num_samples == 4


def test_what_cannot_be_collected_is_refused() -> None:
    net = Net()
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    with pytest.raises(CollectError, match=r"record\(\.\.\.\)"), rnet.collecting():
        pass
    rnet.record("first")
    with pytest.raises(CollectError, match="not called"), rnet.collecting() as collection:
        pass
    with rnet.collecting() as collection:
        with pytest.raises(CollectError, match="after it"):
            _ = collection.recording
        with pytest.raises(CollectError, match="another Recorder"), rnet.collecting():
            pass
        with pytest.raises(SelectorTypeError, match="leave the block"):
            rnet.record("second")
        net(torch.ones(2, 4))
        assert rnet.recording == ((1, 1),)
    assert collection.recording.num_samples == 2
    net.compile(backend="eager")
    with pytest.raises(UnsupportedNetError, match="compiled"), rnet.collecting():
        pass


def test_a_recorder_that_is_copied_in_the_block_is_in_none() -> None:
    net = Net()
    rnet = recorder(net)
    with rnet.collecting() as collection:
        twin = copy.deepcopy(rnet)
        twin(torch.ones(2, 4))
        assert twin.activations["first"].shape == (2, 4)
        twin.record("second")
        net(torch.ones(1, 4))
    assert collection.recording.num_samples == 1


def test_printing_a_recording_names_layers_and_says_what_is_kept(tmp_path):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    rnet = recorder_of(net, "0", "1", input_size=(1, 4))
    data = [torch.randn(3, 4), torch.randn(2, 4)]
    options = {"reduce": {"1": [reductions.Mean(), reductions.Max()]}, "dtype": torch.bfloat16}
    rnet.collect(data, store=f"disk:{tmp_path}/run", **options)
    for recording in (rnet.collect(data, **options), open_recording(tmp_path / "run")):
        title, *lines = str(recording).splitlines()
        where = f", in {tmp_path}/run" if recording.path else ""
        assert title == f"Recording of 5 samples{where}"
        assert [line.split() for line in lines] == [
            ["Label", "Name", "Type", "Kept"],
            ["1-1", "0", "Linear", "[5,", "8]", "bfloat16"],
            ["1-2", "1", "ReLU", "Mean(),", "Max()"],
        ]

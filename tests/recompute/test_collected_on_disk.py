"""Inputs beside samples in a folder: resumed, interrupted, refused, read lazily, and hostile."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

from scio_recorder import CollectError, RecomputeError, Recorder, RecordingError, open_recording
from scio_recorder.reductions import Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format.reader import KeptBatches
from scio_recorder.stores.files import RunReader, RunWriter, holds_recording
from scio_recorder.stores.kept_inputs import decode, encode
from tests.recording.nets import batches, recorder
from tests.stores.disk_format.by_the_book import read_kept
from tests.stores.disk_format.runs import calls_of, intercepted
from tests.zoo.base import Net

SIZES = (4, 3, 4, 2)


def assert_whole(path: Path, rnet: Recorder, data: list[Tensor]) -> None:
    with torch.no_grad():
        received = [rnet.net[:2](batch) for batch in data]
    recording = open_recording(path, verify=True)
    assert recording.complete
    assert recording.calls.rows == [len(batch) for batch in data]
    for (args, kwargs), wanted in zip(recording.inputs["2"], received, strict=True):
        assert torch.equal(args[0], wanted)
        assert kwargs == {}
    first = recording.recompute(rnet, "2.first")["2.first"]
    with torch.no_grad():
        assert torch.equal(first, torch.cat([rnet.net[2].first(x) for x in received]))


def interrupted(data: list[Tensor], count: int, error: type[BaseException]) -> Any:
    yield from data[:count]
    raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_resume_goes_on_with_the_next_batch(tmp_path: Path, error: type[BaseException]) -> None:
    rnet, data = recorder("2", inputs=True), batches(*SIZES)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    for count in range(len(data)):
        with pytest.raises(error):
            rnet.collect(interrupted(data, count, error), store=store, resume=True)
        if count:
            found = open_recording(tmp_path / "run")
            assert len(found.inputs["2"]) == count
            assert found.num_samples == sum(found.calls.rows) == sum(SIZES[:count])
    rnet.collect(data, store=store, resume=True)
    assert_whole(tmp_path / "run", rnet, data)


def test_resume_in_other_batches_has_to_begin_where_one_ended(tmp_path: Path) -> None:
    rnet, data = recorder("2", inputs=True), batches(*SIZES)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    with pytest.raises(RuntimeError):
        rnet.collect(interrupted(data, 2, RuntimeError), store=store)
    whole = torch.cat(data)
    with pytest.raises(CollectError, match=r"first 1 of 6 samples.*inputs.*whole batches"):
        rnet.collect(whole.split(6), store=store, resume=True)
    rest = [whole[:7], *data[2:]]
    rnet.collect(rest, store=store, resume=True)
    assert_whole(tmp_path / "run", rnet, data)


@pytest.mark.parametrize("inputs", [True, False])
def test_resume_with_and_without_inputs_does_not_mix(tmp_path: Path, inputs: bool) -> None:
    rnet, data = recorder("2", inputs=inputs), batches(*SIZES)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    with pytest.raises(RuntimeError):
        rnet.collect(interrupted(data, 2, RuntimeError), store=store)
    rnet.record("2", inputs=not inputs)
    with pytest.raises(RecordingError, match=r"inputs is \w+ there and \w+ here"):
        rnet.collect(data, store=store, resume=True)


def test_a_batch_that_fails_leaves_neither_samples_nor_inputs(tmp_path: Path) -> None:
    rnet, data = recorder("0", "2", inputs=True), batches(*SIZES)
    fails = [False]

    def fail(module: nn.Module, args: Any) -> None:
        if fails[0]:
            raise ValueError("the third batch")

    rnet.net[3].register_forward_pre_hook(fail)

    def loader() -> Any:
        for number, batch in enumerate(data):
            fails[0] = number == 2
            yield batch

    with pytest.raises(ValueError, match="the third batch"):
        rnet.collect(loader(), store=f"disk:{tmp_path / 'run'}")
    found = open_recording(tmp_path / "run", verify=True)
    assert found.num_samples == sum(found.calls.rows) == sum(SIZES[:2])
    assert not found.complete


def test_with_reductions_and_no_samples(tmp_path: Path) -> None:
    rnet, data = recorder("2", inputs=True), batches(*SIZES)
    rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=100), reduce=Mean())
    assert len(list((tmp_path / "run").glob("*.safetensors"))) > 2
    assert_whole(tmp_path / "run", rnet, data)


def test_what_can_not_be_kept_is_refused_by_layer_and_type(tmp_path: Path) -> None:
    class Cache:
        def __init__(self) -> None:
            self.tensors: list[Tensor] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.inner(x, net.given())  # type: ignore[no-any-return]

    def endless() -> list[Any]:
        holder: list[Any] = [torch.ones(1)]
        holder.append(holder)
        return holder

    cases: list[tuple[Any, str]] = [
        (Cache, "Cache, .*Call the net without it .a cache, by use_cache=False"),
        (functools.partial(torch.eye, 2, layout=torch.strided), ""),
        (lambda: torch.eye(2).to_sparse(), "Tensor that is not a plain array"),
        (lambda: {"deep": [(1, 2 + 3j)]}, "builtins.complex, .*without it"),
        (endless, "builtins.list, .*without it"),
        (lambda: torch.return_types.max((torch.ones(1), torch.ones(1))), "torch.return_types.max"),
    ]
    for number, (given, message) in enumerate(cases):
        net = Net(forward, inner=Net(lambda net, x, given: x + 1))
        net.given = given
        rnet = Recorder(net, input_size=(2, 4), verbose=0)
        rnet.record("inner", inputs=True)
        store = f"disk:{tmp_path / str(number)}"
        if message:
            with pytest.raises(CollectError, match=f"layer 1-1 inner .* received a .*{message}"):
                rnet.collect(batches(2), store=store)
            assert not (tmp_path / str(number)).exists()
            assert rnet.collect(batches(2)).inputs["inner"][0].args[1] is not None
        else:
            rnet.collect(batches(2), store=store)


def test_what_two_batches_of_a_chunk_share_is_there_once(tmp_path: Path) -> None:
    def masked(net: Any, x: Tensor) -> Tensor:
        return net.inner(x, torch.ones(4, 50_000))  # type: ignore[no-any-return]

    net = Net(masked, inner=Net(lambda net, x, mask: x * mask[:, 0]))
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    rnet.record("inner", inputs=True)
    rnet.collect(batches(*SIZES), store=f"disk:{tmp_path / 'run'}")
    recording = open_recording(tmp_path / "run")
    sizes = [chunk.stat().st_size for chunk in (tmp_path / "run").glob("chunk-*")]
    assert 800_000 < sum(sizes) < 900_000
    for args, _ in recording.inputs["inner"]:
        assert torch.equal(args[1], torch.ones(4, 50_000))


def test_one_batch_is_read_at_a_time(tmp_path: Path) -> None:
    rnet, data = recorder("2", inputs=True), batches(*SIZES)
    rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=1))
    file = tmp_path / "run" / "chunk-00000-00000002.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    recording = open_recording(tmp_path / "run")
    for number in (0, 1, 3):
        assert recording.inputs["2"][number]
    with pytest.raises(RecordingError, match="do not match their checksum"):
        recording.inputs["2"][2]
    with pytest.raises(RecordingError, match="damaged"):
        recording.recompute(rnet, "2.first")
    with pytest.raises(RecordingError, match="damaged"):
        open_recording(tmp_path / "run", verify=True)


def by_the_book(node: Any, tensors: list[Tensor]) -> Any:
    """Read a node as `docs/disk-format.md` says."""
    if isinstance(node, list):
        return [by_the_book(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tuple":
        return tuple(by_the_book(value, tensors))
    if kind == "dict":
        return {by_the_book(key, tensors): by_the_book(item, tensors) for key, item in value}
    plain = {"tensor": tensors.__getitem__, "float": float}
    plain |= {"dtype": lambda name: getattr(torch, name), "device": torch.device}
    return {**plain, "size": torch.Size}[kind](value)


def strided(tensor: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    memory = torch.empty(10_000, dtype=tensor.dtype)
    narrow = [size if step else 1 for size, step in zip(shape, strides, strict=True)]
    memory.as_strided(narrow, strides).copy_(tensor)
    return memory.as_strided(shape, strides)


def digest(*tensors: Tensor) -> str:
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.filterwarnings("ignore:the net is in training mode")
def test_another_program_reads_the_inputs(tmp_path: Path) -> None:
    extra = {"scale": float("-inf"), "kind": torch.bfloat16, "where": torch.device("cpu")}
    extra |= {"sizes": torch.Size([2, 3]), "many": [None, True, 2**70, "é", {1: (0.5,)}]}

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.inner(x.t(), x[:, :1].expand(-1, 5), **extra)  # type: ignore[no-any-return]

    inner = Net(lambda net, x, y, **extra: net.norm(x.t()), norm=nn.BatchNorm1d(4))
    rnet = Recorder(Net(forward, inner=inner).train(), input_size=(2, 4), verbose=0)
    rnet.record("inner", inputs=True)
    data = batches(4, 3)
    recording = rnet.collect(data, store=f"disk:{tmp_path / 'run'}")
    mean = torch.zeros(4)
    for number, (rows, value, tensors) in enumerate(read_kept(tmp_path / "run")):
        assert rows == len(data[number])
        call = value["1-1"]
        leaves = [strided(tensors[at], *form) for at, *form in call["leaves"]]
        found = by_the_book(call["call"], leaves)
        args, moment = found["args"], found["moment"]
        assert found["kwargs"] == extra
        x = data[number]
        for given, wanted in zip(args, (x.t(), x[:, :1].expand(-1, 5)), strict=True):
            assert torch.equal(given, wanted)
            assert given.stride() == wanted.stride()
        assert set(map(len, call["leaves"])) == {3}
        assert call["output"] == digest(recording["inner"][4 * number : 4 * number + rows])
        assert call["weights"] == digest(inner.norm.weight, inner.norm.bias)
        assert moment["training"] == [True, True]
        assert [moment["grad"], moment["inference"]] == [False, False]
        assert moment["homes"] == ["cpu"]
        # Composed by hand, so equal to rounding only.
        torch.testing.assert_close(moment["buffers"][0], mean)
        mean = 0.9 * mean + 0.1 * x.mean(0)
        assert moment["random"]["cpu"].shape == torch.get_rng_state().shape


def changed(call: Any, *path: Any, to: Any) -> Any:
    call = copy.deepcopy(call)
    inner = call
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return call


# Of the dict that is a call: args, kwargs and moment, as pairs.
ENTRIES = ("call", "dict")

HOSTILE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no leaves": (("leaves",), None),
    "a tensor that is not there": (("leaves", 0, 0), 99),
    "a tensor by name": (("leaves", 0, 0), "batch-0"),
    "a tensor from the end": (("leaves", 0, 0), -1),
    "a giant shape": (("leaves", 0), [0, [1 << 62, 6], [0, 1]]),
    "fewer rows": (("leaves", 0, 1), [2, 6]),
    "more rows, side by side": (("leaves", 0), [0, [6, 6], [6, 1]]),
    "giant strides": (("leaves", 0, 2), [1 << 40, 1]),
    "strides that overlap": (("leaves", 0, 2), [1, 1]),
    "negative strides": (("leaves", 0, 2), [-6, 1]),
    "strides of text": (("leaves", 0, 2), ["6", "1"]),
    "too few strides": (("leaves", 0, 2), [6]),
    "a call of a class": (("call",), {"os.system": ["true"]}),
    "two kinds at once": (("call",), {"tuple": [], "list": []}),
    "no call": (("call",), 3),
    "something else in a call": ((*ENTRIES, 0, 0), "more"),
    "args that are no tuple": ((*ENTRIES, 0, 1), [1]),
    "kwargs that are no dict": ((*ENTRIES, 1, 1), []),
    "a leaf that is not there": ((*ENTRIES, 0, 1), {"tuple": [{"tensor": 99}]}),
    "a leaf by name": ((*ENTRIES, 0, 1), {"tuple": [{"tensor": "batch-0"}]}),
    "keys that can't be": ((*ENTRIES, 1, 1), {"dict": [[[], 1]]}),
    "an unknown dtype": ((*ENTRIES, 0, 1), {"tuple": [{"dtype": "load"}]}),
    "an unknown device": ((*ENTRIES, 0, 1), {"tuple": [{"device": "x"}]}),
    "a number that is none": ((*ENTRIES, 0, 1), {"tuple": [{"float": "1"}]}),
    "no moment": ((*ENTRIES, 2, 1), None),
    "an empty moment": ((*ENTRIES, 2, 1), {"dict": []}),
    "no weights": (("weights",), None),
    "no digest": (("output",), 5),
}


def hostile(path: Path, call: Any, spoil: Any = None) -> Recorder:
    """Write a recording of one batch whose value is of somebody's making, all checksums right."""
    rnet, data = recorder("2", inputs=True), batches(3)
    recording = rnet.collect(data, store=f"disk:{path}-plain")
    with RunReader(f"{path}-plain") as reader:
        value, tensor = reader.kept.read(0)
        tensors = [tensor(number) for number in range(4)]
        if spoil is not None:
            leaves = value["1-3"]["leaves"]
            tree = decode(value["1-3"]["call"], lambda at: tensors[leaves[at][0]])
            spoil(tree["moment"]["random"])
            found: list[Tensor] = []
            node = encode(tree, lambda leaf: found.append(leaf) or len(found) - 1)
            tensors += found
            leaves[:] = [[4 + at, list(t.shape), list(t.stride())] for at, t in enumerate(found)]
            value["1-3"]["call"] = node
        architecture = recording.architecture.to_dict()
        header = {"architecture": architecture, "layers": ["1-3"], "inputs": True}
        kept = KeptBatches([3], [call(value)], tensors)
        with RunWriter.create(path, layers=reader.layers, header=header) as writer:
            writer.append({"1-3": reader.read("1-3", 0, 3)}, range(3), kept=kept)
            writer.finish()
    return rnet


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_calls_are_refused(tmp_path: Path, name: str) -> None:
    where, what = HOSTILE[name]
    hostile(tmp_path / "run", lambda value: {"1-3": changed(value["1-3"], *where, to=what)})
    recording = open_recording(tmp_path / "run", verify=True)
    with pytest.raises(RecordingError, match="damaged"):
        recording.inputs["2"][0]


@pytest.mark.parametrize("value", [None, [], {}, {"1-3": None}, {"9-9": {}}])
def test_hostile_batches_are_refused(tmp_path: Path, value: Any) -> None:
    hostile(tmp_path / "run", lambda _: value)
    with pytest.raises(RecordingError, match="damaged"):
        open_recording(tmp_path / "run").inputs["2"][0]


def test_states_of_generators_out_of_bounds_are_refused(tmp_path: Path) -> None:
    # NumPy would read past the end of its words.
    def far(state: Any) -> None:
        state["numpy"]["state"]["pos"] = 10**6

    def before(state: Any) -> None:
        state["numpy"]["state"]["pos"] = -1

    def short(state: Any) -> None:
        state["numpy"]["state"]["key"] = state["numpy"]["state"]["key"][:10]

    def none(state: Any) -> None:
        state["cpu"] = 3

    def short_words(state: Any) -> None:
        state["python"][1] = state["python"][1][:10]

    for number, spoil in enumerate((far, before, short, none, short_words)):
        rnet = hostile(tmp_path / str(number), lambda value: value, spoil=spoil)
        states = torch.get_rng_state(), np.random.get_state()[1:3], random.getstate()
        with pytest.raises(RecomputeError, match="failed when it was run again"):
            open_recording(tmp_path / str(number)).recompute(rnet, "2.first")
        assert torch.equal(torch.get_rng_state(), states[0])
        np.testing.assert_equal(np.random.get_state()[1:3], states[1])
        assert random.getstate() == states[2]
    rnet = hostile(tmp_path / "right", lambda value: value, spoil=lambda state: None)
    assert open_recording(tmp_path / "right").recompute(rnet, "2.first")


@pytest.mark.campaign
def test_after_any_fault_samples_and_inputs_agree_and_can_be_resumed(tmp_path: Path) -> None:
    rnet, data = recorder("2", inputs=True), batches(2, 1, 2)

    def collect(path: Path) -> None:
        rnet.collect(data, store=Disk(path, chunk_bytes=1), resume=True)

    # Every fourth system call; the disk format's own tests take each.
    for stop in range(0, len(calls_of(lambda: collect(tmp_path / "whole"))), 4):
        path = tmp_path / str(stop)

        def act(number: int, name: str, go_on: Any, arguments: Any, stop: int = stop) -> Any:
            if number == stop:
                raise OSError(5, "a fault")
            return go_on()

        with contextlib.suppress(OSError), intercepted(act):
            collect(path)
        if holds_recording(path):
            found = open_recording(path, verify=True)
            assert found.num_samples == sum(found.calls.rows)
            if found.num_samples:
                assert len(found.inputs["2"]) == len(found.calls.rows)
        if not path.exists() or not list(path.iterdir()) or holds_recording(path):
            collect(path)
            assert_whole(path, rnet, data)

"""What can't be collected is an error that names the place, and leaves nothing behind."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from scio_recorder import CollectError, Recorder, RecordingError, Tokens, open_recording
from scio_recorder.errors import LayerNotFoundError
from scio_recorder.reductions import Covariance, Mean
from scio_recorder.stores import Disk, Host
from scio_recorder.stores.disk_format import folder as system
from tests.recording.nets import (
    Positions,
    assert_same,
    batches,
    expected,
    failing_after,
    plain_net,
    recorder,
    recorder_of,
)
from tests.zoo.structures import Columns

SAMPLES = TensorDataset(torch.ones(6, 4))


def test_nothing_selected():
    rnet = Recorder(plain_net(), input_size=(1, 4))
    with pytest.raises(CollectError, match=r"record\(\.\.\.\)"):
        rnet.collect(batches(2))


@pytest.mark.parametrize("empty", [[], iter(()), {}])
def test_empty_iterable(empty, tmp_path):
    with pytest.raises(CollectError, match="empty"):
        recorder("0").collect(empty)
    with pytest.raises(CollectError, match="empty"):
        recorder("0").collect(empty, store=f"disk:{tmp_path}/run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("batch", ["text", 3, None, (), [], ("text", 1), (None,), {1: 2}])
def test_batch_not_understood(batch):
    with pytest.raises(CollectError, match="to_inputs"):
        recorder("0").collect([batch])


@pytest.mark.parametrize(
    ("data", "options", "match"),
    [
        (torch.ones(3, 4), {}, "split"),
        ({"input": torch.ones(3, 4)}, {}, r"batches is a mapping.*batches=\[x\]"),
        (
            {"input": torch.ones(3, 4)},
            {"to_inputs": lambda batch: batch["input"]},
            r"batches is a mapping.*batches=\[x\]",
        ),
        (SAMPLES, {}, "batches is a TensorDataset.*DataLoad"),
        (Subset(SAMPLES, range(2)), {}, "batches is a Subset.*DataLoad"),
        (3, {}, "iterated"),
        (None, {}, "iterated"),
    ],
)
def test_what_is_no_dataset(data, options, match):
    with pytest.raises(CollectError, match=match):
        recorder("0").collect(data, **options)


def test_a_mapping_of_keys_to_something_else_is_a_dataset():
    x = torch.ones(3, 4)
    data = {"a": "first", "b": "second"}
    recording = recorder("0").collect(data, to_inputs=lambda key: x * len(data[key]))
    assert recording.num_samples == 6


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x, "label")])
def test_the_advice_for_arrays_works(pack):
    x = torch.rand(3, 4)
    rnet = recorder("0")
    expected = rnet.net[0].forward(x).detach()
    with pytest.raises(CollectError, match="single array") as whole:
        rnet.collect(x.numpy())
    written = str(whole.value).partition("write batches=")[2].partition(" for one")[0]
    assert torch.equal(rnet.collect(eval(written, {"x": x.numpy(), "torch": torch}))["0"], expected)
    with pytest.raises(
        CollectError, match=r"batch 0 is a (ndarray|tuple that begins with a ndarray): "
    ) as one:
        rnet.collect([pack(x.numpy())])
    written = eval(str(one.value).partition("write to_inputs=")[2])
    assert torch.equal(rnet.collect([pack(x.numpy())], to_inputs=written)["0"], expected)


def test_a_used_iterator():
    used = iter(batches(2))
    recorder("0").collect(used)
    with pytest.raises(CollectError, match=r"batches is empty.*an iterator can be used only once"):
        recorder("0").collect(used)
    with pytest.raises(CollectError, match=r"no batch to run the net on$"):
        recorder("0").collect([])


def test_the_advice_for_a_net_that_takes_a_whole_tuple_works():
    class Masked(nn.Module):
        def forward(self, x, mask, scale=1.0, **options):
            return x * mask * scale

    x = torch.ones(2, 3)
    rnet = recorder_of(Masked(), "0-1", input_data=[x, x])
    written = "to_inputs=tuple if the net takes all of them"
    with pytest.raises(CollectError, match=re.escape(written)) as caught:
        rnet.collect([(x, torch.zeros(3), 1)])
    assert "Only the first element" in str(caught.value)
    recording = rnet.collect([(x, torch.zeros(3), 1)], to_inputs=tuple)
    assert not recording["0-1"].any()
    # No element of the batch can help.
    for given, options in (([(x,)], {}), ([(x, x)], {"to_inputs": lambda batch: batch[0]})):
        with pytest.raises(CollectError, match=r"or to_inputs=lambda batch: \.\.\. with"):
            rnet.collect(given, **options)


def test_the_advice_for_a_mapping_that_yields_rows_works():
    class Named(nn.Module):
        def forward(self, x):
            return Columns({"hidden": x * 2})

    x = torch.rand(3, 4)
    rnet = recorder_of(Named(), "0-1", input_data=x)
    with pytest.raises(CollectError, match=r"returned a Columns, not a tensor") as caught:
        rnet.collect([x])
    written = eval(str(caught.value).partition("such as transform=")[2])
    assert torch.equal(rnet.collect([x], transform=written)["0-1"], x * 2)


def test_inputs_that_a_recording_lacks():
    with pytest.raises(LayerNotFoundError, match=r"inputs=True\) before rnet.collect"):
        recorder("0").collect(batches(2)).inputs["0"]


@pytest.mark.parametrize("rows", [None, Tokens()])
@pytest.mark.parametrize("names", [["input_ids"], ["input_ids", "attention_mask"]])
def test_lists_of_numbers_are_no_tensors(rows, names):
    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Embedding(5, 2)

        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids)

    ids = torch.tensor([[1, 2], [3, 4]])
    rnet = recorder_of(Texts(), "inner", input_data={"input_ids": ids})
    for given in (ids.tolist(), [[1, 2], [3]]):
        batch = dict.fromkeys(names, given)
        with pytest.raises(CollectError, match=r"input_ids is a list, not a tensor.*return_tens"):
            rnet.collect([batch], rows=rows)


def test_ragged_samples_name_layer_shapes_and_transform(tmp_path):
    rnet = recorder_of(nn.Sequential(nn.Conv1d(1, 2, 3)), "0", input_size=(1, 1, 8))
    data = [torch.randn(2, 1, 8), torch.randn(2, 1, 9)]
    for store in ("host", f"disk:{tmp_path}/run"):
        with pytest.raises(CollectError) as caught:
            rnet.collect(data, store=store)
        for part in ("1-1 0", "(2, 6)", "(2, 7)", "transform", "rows=Tokens()"):
            assert part in str(caught.value)
    pooled = rnet.collect(data, transform=lambda activation, batch: activation.mean(-1))
    assert pooled["0"].shape == (4, 2)


def test_dimension_0_must_count_samples():
    rnet = recorder_of(Positions(), "table", input_size=(2, 6))
    with pytest.raises(CollectError) as caught:
        rnet.collect([torch.ones(2, 6)])
    for part in ("table", "(3, 6)", "2 samples", "transform"):
        assert part in str(caught.value)
    # A transform says that it is meant.
    as_it_is = {"transform": lambda activation, batch: activation, "reduce": Mean()}
    assert rnet.collect([torch.ones(2, 6)], **as_it_is)["table"].shape == (6,)


class Turned(nn.Module):
    """Has positions in dimension 0, and samples in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("reduce", [None, Mean()])
def test_dimension_0_that_counts_something_else_at_labelling_is_refused(reduce):
    rnet = recorder_of(Turned(), "block", input_size=(1, 5, 3))
    batch = torch.randn(5, 5, 3)
    with pytest.raises(CollectError, match=r"at labelling \(5, 1, 2\)(.|\n)*transform="):
        rnet.collect([batch], reduce=reduce)
    rnet.record("0-1")
    kept = rnet.collect([batch], reduce=reduce)["0-1"]
    expected = rnet.net(batch).detach()
    torch.testing.assert_close(kept, expected if reduce is None else expected.mean(0))


class Structures(nn.Module):
    """Gives layers whose dimension 0 is directions, heads times batch, positions or graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, bidirectional=True, batch_first=True)
        self.state, self.maps, self.lines = nn.Identity(), nn.Identity(), nn.Identity()
        self.pooled = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (state, _) = self.lstm(x)
        self.state(state)
        heads = out.unflatten(2, (2, 4)).transpose(1, 2).flatten(0, 1)
        self.maps(heads @ heads.mT)
        self.lines(out.flatten(0, 1))
        self.pooled(out.mean((0, 1), keepdim=True).expand(4, 1, -1))
        return out


@pytest.mark.parametrize("how", ["a list", "ids", "keywords", "inputs", "passes", "reduced"])
def test_dimension_0_that_fits_by_chance_is_refused_however_it_comes(how):
    rnet = Recorder(Structures().eval(), input_size=(1, 2, 3))
    # Two directions, and two heads of one sample; two positions of one; four of anything.
    for name, size in (("state", 2), ("maps", 4), ("lines", 4), ("pooled", 4)):
        rnet.record(name, inputs=how == "inputs")
        batch = torch.randn(size, {"maps": 2, "lines": 1}.get(name, 2), 3)
        options = {}
        if how == "ids":
            options = {"sample_ids": lambda batch: [f"s{number}" for number in range(len(batch))]}
        if how == "reduced":
            options = {"reduce": Mean(), "store": None}
        given = [{"x": batch}] if how == "keywords" else [batch]

        def run(given: list[object] = given, options: dict[str, object] = options) -> None:
            if how == "passes":
                with rnet.collecting():
                    rnet.net(*given)
            else:
                rnet.collect(given, **options)

        with pytest.raises(CollectError, match=rf"{name}\b(.|\n)*transform="):
            run()


def test_dimension_0_counts_samples_by_chance_at_first():
    # Labelled with as many samples as the table has rows, so nothing is known.
    rnet = recorder_of(Positions(), "table", input_size=(3, 6))
    with pytest.raises(CollectError, match=r"shape \(3, 6\) for a batch of 2 sample"):
        rnet.collect([torch.ones(3, 6), torch.ones(3, 6), torch.ones(2, 6)])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"max_batches": 0}, "max_batches=0"),
        ({"dtype": torch.int8}, "dtype"),
        ({"dtype": "float16"}, "dtype"),
        ({"reduce": Mean}, r"Mean\(\)"),
        ({"reduce": []}, "reduction"),
        ({"reduce": {"1": Mean()}}, "names no recorded layer"),
        ({"reduce": {"0": Mean(), "1-1": Mean()}}, "two entries"),
        ({"transform": {"0": 3}}, "callable"),
        ({"transform": lambda activation, batch: None}, "NoneType"),
        ({"store": None}, "store=None"),
        (
            {"store": "runs"},
            r"^store='runs' names no store: write store=.disk:runs. for a folder\. A store is",
        ),
        (
            {"store": "f1"},
            r"^store='f1' names no store: write store=.disk:f1. for a folder\. A store",
        ),
        ({"store": "hots"}, "the closest name is 'host'. A store is"),
        ({"store": "dsk:runs"}, "the closest name is 'disk'. A store is"),
        ({"resume": True}, "disk:PATH"),
        ({"to_inputs": lambda batch: 3}, "to_inputs"),
        ({"sample_ids": lambda batch: "ab"}, "sample_ids"),
        ({"sample_ids": [1, 2]}, "sample_ids must be a function that is called with a batch alone"),
        ({"to_inputs": "x"}, "called with a batch alone: write to_inputs=lambda batch: ..."),
        ({"to_inputs": lambda x, y: x}, "to_inputs must be a function that is called with a batch"),
        ({"transform": lambda activation: activation}, r"callable, transform\(activation, batch\)"),
        ({"sample_ids": lambda batch: [1]}, r"a batch of 1 sample, .*let sample_ids= give one id"),
        ({"sample_ids": lambda batch: [1.5, 2.5]}, "integers"),
        ({"sample_ids": lambda batch: [1, "a"]}, "integers"),
        ({"sample_ids": lambda batch: [7, 7]}, "batch 0 has the id 7"),
        ({"to_inputs": lambda batch: ((batch,), {1: batch})}, "keyword"),
    ],
)
def test_options_that_can_not_be_followed(options, match):
    with pytest.raises(CollectError, match=match):
        recorder("0").collect(batches(2), **options)


def test_ids_of_two_kinds():
    ids = iter([[1, 2], ["a"]])
    with pytest.raises(CollectError, match="mixed"):
        recorder("0").collect(batches(2, 1), sample_ids=lambda batch: next(ids))


def test_inputs_without_a_tensor():
    class Constant(nn.Module):
        def forward(self, size):
            return torch.ones(size, 2)

    rnet = recorder_of(Constant(), "0-1", input_data=[3])
    with pytest.raises(CollectError, match="sample_ids"):
        rnet.collect([3], to_inputs=lambda batch: (batch,))
    made = rnet.collect([3], to_inputs=lambda n: (n,), sample_ids=range)
    assert made["0-1"].shape == (3, 2)


class FailsLate(nn.Module):
    """Fails in its ``fail_at``-th pass, behind a layer that has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.fail_at = self.passes = 0

    def forward(self, x):
        out = self.layer(x)
        self.passes += 1
        if self.passes == self.fail_at:
            raise RuntimeError("boom")
        return out


@pytest.mark.parametrize("reduce", [None, {"0-1": Mean()}, {"layer": [Mean(), Covariance()]}])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_nothing_of_a_failed_batch_counts(chunk_bytes, reduce, tmp_path):
    net = FailsLate()
    rnet = recorder_of(net, "layer", "0-1", input_size=(1, 4))
    data, options = batches(3, 3, 3, 3), {"reduce": reduce, "dtype": torch.bfloat16}
    store = Disk(tmp_path / "run", chunk_bytes=chunk_bytes)
    net.passes, net.fail_at = 0, 3
    with pytest.raises(RuntimeError, match="boom"):
        rnet.collect(data, store=store, **options)
    if chunk_bytes == 1 or reduce is None or "0-1" in reduce:
        # Durable before it failed, or saved afterwards where reductions had seen no part of it:
        # the net itself had not returned.
        found = open_recording(tmp_path / "run")
        assert not found.complete
        assert found.num_samples == 6
    else:
        assert not (tmp_path / "run").exists()
    net.fail_at = 0
    resumed = rnet.collect(data, store=store, resume=True, **options)
    clean = rnet.collect(data, **options)
    assert resumed.complete
    assert resumed.relative_errors == clean.relative_errors
    assert all(0 < error < 0.01 for error in clean.relative_errors.values())
    assert resumed.stored == clean.stored
    assert all(torch.equal(resumed[label][:], clean[label]) for label in clean.stored)
    if reduce is not None and "layer" in reduce:
        assert torch.equal(resumed["layer"][0], clean["layer"][0])
        # A commit joins the rows seen so far, so that sums are taken in another order.
        torch.testing.assert_close(resumed["layer"][1], clean["layer"][1])
        assert resumed["layer"][1].count == 12
    elif reduce is not None:
        assert torch.equal(resumed["0-1"], clean["0-1"])


def test_a_host_is_used_again_after_a_loader_has_raised():
    rnet, data, host = recorder("0", "3"), batches(3, 2, 4), Host()
    with pytest.raises(ConnectionError):
        rnet.collect(failing_after(data, 2, ConnectionError), store=host)
    assert_same(rnet.collect(data, store=host), expected(rnet, data))


def test_a_full_disk(tmp_path, monkeypatch):
    rnet, data = recorder("0", "3"), batches(8, 8, 8, 8)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    write, written = system.write, []

    def full(descriptor, content, *rest):
        written.append(len(content))
        if len(written) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(system, "write", full)
        with pytest.raises(RecordingError, match="No space left") as caught:
            rnet.collect(data, store=store)
    assert caught.value.errno == errno.ENOSPC
    durable = open_recording(tmp_path / "run").num_samples
    assert 0 < durable < 32
    says = f"{durable} samples are durable, resume=True goes on after them"
    assert says in caught.value.__notes__
    # A refusal says itself what to write.
    with pytest.raises(RecordingError, match="resume it with resume=True") as refused:
        rnet.collect(data, store=store)
    assert not hasattr(refused.value, "__notes__")
    resumed = rnet.collect(data, store=store, resume=True)
    assert_same(resumed, expected(rnet, data))


STRUCTURES = {
    "dict": (lambda x: {"one": x}, "activation['one']"),
    "tuple": (lambda x: (x,), "activation[0]"),
    "object": (lambda x: SimpleNamespace(size=3, one=x), "activation.one"),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_advice_for_what_is_no_tensor_works(kind):
    make, taken = STRUCTURES[kind]

    class Structured(nn.Module):
        def forward(self, x):
            return make(x)

    rnet = recorder_of(nn.Sequential(Structured()), "0", input_size=(1, 2))
    x = torch.randn(3, 2)
    with pytest.raises(CollectError, match=re.escape(taken)) as error:
        rnet.collect([x], progress=False)
    advice = re.search(r"transform=(\{.*\})", str(error.value))
    assert advice is not None
    recording = rnet.collect([x], transform=eval(advice[1]), progress=False)
    assert torch.equal(recording["0"], x)


def test_inputs_that_are_no_tensors_are_converted() -> None:
    numbers = [{"input": [1.0, 2.0, 3.0, 4.0]}, {"input": [5.0, 6.0, 7.0, 8.0]}]
    with pytest.raises(CollectError, match=r"input is a list of 4 tensors.*with_format") as caught:
        recorder("0").collect(torch.utils.data.DataLoader(numbers, batch_size=2))
    assert "write DataLoader(dataset.with_format(" in str(caught.value)
    with pytest.raises(CollectError, match=r"input is a list, not a tensor.*with_format"):
        recorder("0").collect(numbers)
    batch = {"input": np.ones((2, 4), np.float32)}
    with pytest.raises(CollectError, match="input is a NumPy array, not a tensor") as refused:
        recorder("0").collect([batch])
    to_inputs = eval(str(refused.value).partition("to_inputs=")[2])
    assert recorder("0").collect([batch], to_inputs=to_inputs).num_samples == 2


def test_a_home_is_not_made_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordingError, match=r"write os\.path\.expanduser\('~/run'\)$"):
        recorder("0").collect(batches(2), store="disk:~/run")
    assert list(tmp_path.iterdir()) == []

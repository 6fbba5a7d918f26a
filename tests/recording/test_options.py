"""Reductions, transforms, thinning, ids, inputs of the net and rounding."""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from scio_recorder import CollectError, LayerNotFoundError, Recorder, open_recording
from scio_recorder.reductions import Fold, Max, Mean
from tests.recording.nets import Pair, Sizes, assert_same, batches, expected, recorder, recorder_of


def labelled(data):
    """Pairs of inputs and labels, by the sign of the first value."""
    return [(x, (x[:, 0] > 0).long()) for x in data]


@pytest.mark.parametrize("store", ["host", "disk", None])
def test_reductions_equal_those_of_all_samples(store, tmp_path):
    rnet, data = recorder(), batches(4, 3, 1)
    wanted = expected(rnet, data)
    given = f"disk:{tmp_path}/run" if store == "disk" else store
    mean, most = Mean(), Max()
    number = Fold(lambda number, x: (number or 0) + len(x), merge=lambda a, b: a + b)
    reduce = {key: [mean, most, number] for key in (("*", "*/*") if store is None else ("0",))}
    recording = rnet.collect(data, store=given, reduce=reduce)
    for opened in [recording] + ([open_recording(recording.path)] if store == "disk" else []):
        assert sorted(opened) == list(rnet.recording)
        found_mean, found_max, found_number = opened["0"]
        assert found_number == 8
        # The mean is summed in float64, in another order than torch's.
        torch.testing.assert_close(found_mean, wanted[1, 1].double().mean(0).float())
        assert torch.equal(found_max, wanted[1, 1].amax(0))
        if store is not None:
            assert sorted(opened.stored) == [k for k in rnet.recording if k != (1, 1)]
            assert torch.equal(opened["1"], wanted[1, 2])
    # What was given is a pattern, and has seen nothing.
    with pytest.raises(CollectError):
        mean.compute()


def test_a_reduction_of_the_users_own_is_kept_from_those_who_can_not_have_it(tmp_path):
    rnet, data = recorder("0", "3"), batches(3, 2)
    path = f"disk:{tmp_path}/run"
    assert rnet.collect(data, store=path, reduce={"0": Sizes()})["0"] == [3, 2]
    opened = open_recording(tmp_path / "run")
    assert torch.equal(opened["3"][:], expected(rnet, data)[1, 4])
    with pytest.raises(OSError, match="Sizes"):
        opened["0"]
    assert rnet.collect(data, store=path, reduce={"0": Sizes()}, resume=True)["0"] == [3, 2]


def test_reductions_see_activations_before_they_are_overwritten():
    rnet, data = recorder("0"), batches(4, 3)
    wanted = expected(rnet, data)[1, 1]
    assert (wanted < 0).any()
    smallest = rnet.collect(data, reduce=Fold(lambda a, x: min(a or 0, x.min().item())))["0"]
    assert smallest == wanted.min().item()


def test_transforms_feed_stores_and_reductions():
    rnet, data = recorder("0", "2", "3"), labelled(batches(4, 3))
    wanted = expected(rnet, [x for x, _ in data])
    signs = torch.cat([y for _, y in data])
    recording = rnet.collect(
        data,
        transform={
            "0": lambda activation, batch: activation[:, :2] * batch[1][:, None],
            "2": lambda activation, batch: activation.sum(1),
        },
        reduce={"2": Max()},
    )
    assert torch.equal(recording["0"], wanted[1, 1][:, :2] * signs[:, None])
    # Sums over a batch and over all samples go through the same kernel, row by row.
    assert torch.equal(recording["2"], wanted[1, 3].sum(1).amax())
    assert torch.equal(recording["3"], wanted[1, 4])


def test_a_transform_makes_a_tensor_of_a_structure():
    rnet = recorder_of(Pair(), "0-1", input_size=(2, 4))
    data = batches(3, 2)
    with pytest.raises(CollectError, match=r"0-1.*tuple.*transform"):
        rnet.collect(data)
    recording = rnet.collect(data, transform=lambda activation, batch: activation[1]["half"])
    assert torch.equal(recording["0-1"], torch.cat(data) / 2)


def test_transform_does_not_touch_the_pass():
    rnet, data = recorder("0", "3"), batches(3)
    with pytest.raises(CollectError, match=r"1-1.*in place"):
        rnet.collect(data, transform={"0": lambda activation, batch: activation.zero_()})


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("every", "max_batches", "taken"),
    [(1, None, range(7)), (3, None, [0, 3, 6]), (3, 2, [0, 3]), (1, 3, range(3)), (9, 1, [0])],
)
def test_thinning(every, max_batches, taken, known):
    sizes = (2, 3, 1, 4, 2, 2, 3)
    rnet, data = recorder("0", "3"), batches(*sizes)
    pulled = []

    def loader():
        for number, batch in enumerate(data):
            pulled.append(number)
            yield batch

    recording = rnet.collect(data if known else loader(), every=every, max_batches=max_batches)
    assert_same(recording, expected(rnet, [data[i] for i in taken]))
    starts = np.cumsum((0, *sizes))
    ids = [int(i) for batch in taken for i in range(starts[batch], starts[batch + 1])]
    assert recording.sample_ids == ids
    if not known and max_batches is not None:
        assert pulled == list(range(list(taken)[-1] + 1))


Sample = namedtuple("Sample", "x y")


@pytest.mark.parametrize(
    ("wrap", "to_inputs"),
    [
        (lambda x: x, None),
        (lambda x: (x, "label"), None),
        (lambda x: [x, 1], None),
        (lambda x: Sample(x, None), None),
        (lambda x: {"input": x}, None),
        (lambda x: ({"input": x}, "label"), None),
        (lambda x: {"images": x}, lambda batch: batch["images"]),
        (lambda x: {"images": x}, lambda batch: (batch["images"],)),
        (lambda x: {"images": x}, lambda batch: {"input": batch["images"]}),
        (lambda x: ["label", x], lambda batch: batch[1]),
    ],
)
def test_forms_of_batches(wrap, to_inputs):
    rnet, data = recorder("0", "3"), batches(3, 2)
    recording = rnet.collect([wrap(x) for x in data], to_inputs=to_inputs)
    assert_same(recording, expected(rnet, data))


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda rows: [f"a{i}" for i in rows], ["a10", "a11", "a12", "a20", "a21"]),
        (lambda rows: torch.tensor(rows), [10, 11, 12, 20, 21]),
        (lambda rows: np.array(rows), [10, 11, 12, 20, 21]),
        (lambda rows: np.array([str(i) for i in rows]), ["10", "11", "12", "20", "21"]),
    ],
)
def test_sample_ids(make, wanted, tmp_path):
    rnet, data = recorder("0"), batches(3, 2)
    pairs = [(data[0], make([10, 11, 12])), (data[1], make([20, 21]))]
    for store in ("host", f"disk:{tmp_path}/run"):
        recording = rnet.collect(pairs, sample_ids=lambda batch: batch[1], store=store)
        assert recording.sample_ids == wanted
        assert recording.sample_ids[3] == wanted[3]
        assert type(recording.sample_ids[3]) is type(wanted[3])


def test_rounding_is_measured(tmp_path):
    rnet, data = recorder("0", "3"), batches(40, 3)
    wanted = expected(rnet, data)
    for store in ("host", f"disk:{tmp_path}/run"):
        recording = rnet.collect(data, dtype=torch.bfloat16, store=store)
        assert_same(recording, {k: v.bfloat16() for k, v in wanted.items()})
        for label, exact in wanted.items():
            lost = (exact.double() - exact.bfloat16().double()).norm() / exact.double().norm()
            assert recording.relative_errors[label] == pytest.approx(lost.item(), rel=1e-12)
        assert recording.to_numpy()[1, 1].dtype == np.float32
    assert open_recording(tmp_path / "run").relative_errors == recording.relative_errors
    assert len(rnet.collect(data, dtype=torch.float64).relative_errors) == 0


def test_rounding_is_measured_over_what_is_finite(tmp_path):
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, 4))
    values = torch.tensor([[1.1, 2.3, math.nan, 3.0], [math.inf, -math.inf, 0.7, 1e-3]])
    finite = values[values.isfinite()].double()
    lost = (finite - finite.half().double()).norm() / finite.norm()
    recording = rnet.collect([values, values], dtype=torch.float16, store=f"disk:{tmp_path}/run")
    assert recording.relative_errors["0-1"] == pytest.approx(lost.item(), rel=1e-12)
    # What became infinite is lost whole.
    large = torch.tensor([[3e5, 4e5, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    recording = rnet.collect([large], dtype=torch.float16)
    wanted = (25e10 / (25e10 + 5)) ** 0.5
    assert recording.relative_errors["0-1"] == pytest.approx(wanted, rel=1e-12)
    assert recording["0-1"].isinf().sum() == 2


def test_only_floating_point_is_rounded():
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, 2))
    data = [torch.tensor([[1, 2**40]])]
    recording = rnet.collect(data, dtype=torch.float16)
    assert_same(recording, {(0, 1): data[0]})
    assert len(recording.relative_errors) == 0


def test_frame_and_numpy():
    rnet, data = recorder("0", "2"), batches(30, 11)
    recording = rnet.collect(data, reduce={"2": Mean()})
    values = expected(rnet, data)[1, 1].double().numpy()
    frame = recording.to_frame()
    assert list(frame.index) == ["1-1", "1-3"]
    row = frame.loc["1-1"]
    assert (row["name"], row["type"], row["samples"], row["shape"]) == ("0", "Linear", 41, (6,))
    assert row["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert row["std"] == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert (row["min"], row["max"], row["nan"]) == (values.min(), values.max(), 0)
    assert (row["dtype"], row["bytes"], row["zeros"], row["inf"]) == ("float32", 41 * 24, 0, 0)
    assert np.isnan(frame.loc["1-3", "mean"])
    assert list(recording.to_numpy()) == [(1, 1)]
    assert recording.to_numpy()[1, 1].base is not None


def test_a_recording_of_summaries_has_no_store():
    rnet = recorder("0")
    assert rnet.collect(batches(3), store=None, reduce=Mean()).store is None
    rnet = Recorder(nn.Identity(), input_size=(1, 4), device="meta")
    rnet.record("0-1", inputs=True)
    recording = rnet.collect([torch.ones(2, 4, device="meta")], store="device")
    assert recording.store == "device"
    assert recording.inputs["0-1"][0].args[0].is_meta


@pytest.mark.parametrize("store", ["host", "disk"])
def test_zeros_nans_and_infinities_are_kept_and_counted(store, tmp_path):
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, 4))
    nan, inf = float("nan"), float("inf")
    data = [torch.tensor([[0.0, nan, 2.0, -0.0]]), torch.tensor([[nan, nan, inf, 0.0]])]
    recording = rnet.collect(data, store=f"disk:{tmp_path}/run" if store == "disk" else store)
    assert torch.equal(recording["0-1"][:].view(torch.int32), torch.cat(data).view(torch.int32))
    assert recording.num_nans("0-1") == 3
    row = recording.to_frame().loc["0-1"]
    assert (row["zeros"], row["nan"], row["inf"]) == (3 / 8, 3, 1)
    assert (row["mean"], row["min"], row["max"]) == (inf, 0, inf)


@pytest.mark.parametrize("complete", [True, False])
def test_saved_and_opened_again(complete, tmp_path):
    rnet, data = recorder(), batches(4, 3)
    recording = rnet.collect(data, reduce={"0": [Mean()]}, dtype=torch.float16)
    recording.complete = complete
    recording.save(tmp_path / "run")
    opened = open_recording(tmp_path / "run", verify=True)
    assert opened.complete is complete
    assert opened.sample_ids == recording.sample_ids
    assert torch.equal(opened["0"][0], recording["0"][0])
    assert all(torch.equal(opened[k][:], recording[k]) for k in recording.stored)
    assert list(opened.relative_errors) == list(recording.relative_errors)
    opened.save(tmp_path / "again")
    assert torch.equal(open_recording(tmp_path / "again")["3"][:], recording["3"])
    with pytest.raises(OSError, match="already holds"):
        recording.save(tmp_path / "run")


def test_keys_of_a_recording():
    rnet, data = recorder("0", "2.act"), batches(2)
    recording = rnet.collect(data)
    assert recording["0"] is recording["1-1"] is recording[1, 1]
    assert "1-4" not in recording
    with pytest.raises(LayerNotFoundError, match="1-4"):
        recording["1-4"]
    with pytest.raises(LayerNotFoundError, match="ambiguous"):
        recording["2.act"]

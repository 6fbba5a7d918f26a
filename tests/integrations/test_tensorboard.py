"""What add_activations writes, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from scio_recorder import Recorder
from scio_recorder.errors import ArgumentError, LayerNotFoundError
from scio_recorder.integrations.tensorboard import add_activations
from scio_recorder.reductions import Mean
from tests.integrations.trainings import by_hand
from tests.zoo.base import Net


def make_net() -> Net:
    """Return an in-place operation, a module called twice, a layer that returns a structure."""
    parts = {"stem": nn.Linear(4, 6), "act": nn.ReLU(inplace=True)}
    lstm = nn.LSTM(6, 5, batch_first=True)
    return Net(lambda net, x: net.act(net.lstm(net.act(net.stem(x)))[0]), **parts, lstm=lstm)


def written(folder: Path) -> EventAccumulator:
    # Without size guidance the reader samples what it returns.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def write(folder: Path, activations: Any, **options: Any) -> EventAccumulator:
    with SummaryWriter(str(folder)) as writer:
        add_activations(writer, activations, **options)
    return written(folder)


def assert_statistics(events: EventAccumulator, tag: str, name: str, values: Tensor) -> None:
    for statistic, expected in by_hand(values).items():
        (event,) = events.Scalars(f"{tag}_{statistic}/{name}")
        # Scalars are float32 in the file.
        assert event.value == pytest.approx(expected, rel=1e-5, abs=1e-7), statistic


@pytest.fixture
def rnet() -> Recorder:
    rnet = Recorder(make_net(), input_size=(2, 3, 4))
    rnet.record("stem", "act", "lstm", gradients=True)
    rnet(torch.randn(8, 3, 4)).square().sum().backward()
    return rnet


def test_statistics_are_those_by_hand(rnet: Recorder, tmp_path: Path) -> None:
    events = write(tmp_path, rnet.activations, global_step=7)
    with torch.no_grad():
        net = rnet.net
        assert_statistics(events, "activations", "stem", rnet.activations["stem"])
        assert rnet.activations["stem"].min() < 0, "the record is before the in-place operation"
        assert_statistics(events, "activations", "act_1-4", rnet.activations["1-4"])
        out, (hidden, cell) = net.lstm(rnet.activations["1-2"])
    structure = torch.cat([out.flatten(), hidden.flatten(), cell.flatten()])
    assert_statistics(events, "activations", "lstm", structure)
    assert {event.step for event in events.Scalars("activations_mean/stem")} == {7}
    names = {tag.partition("/")[2] for tag in events.Tags()["scalars"]}
    assert names == {"stem", "act_1-2", "lstm", "act_1-4"}


def test_gradients_under_their_own_tag(rnet: Recorder, tmp_path: Path) -> None:
    events = write(tmp_path, rnet.gradients, tag="gradients", histograms=False)
    assert_statistics(events, "gradients", "stem", rnet.gradients["stem"])
    assert not events.Tags()["histograms"]


def test_histograms_are_those_of_the_writer(rnet: Recorder, tmp_path: Path) -> None:
    values = rnet.activations["stem"].detach()
    with SummaryWriter(str(tmp_path)) as writer:
        add_activations(writer, rnet.activations)
        writer.add_histogram("expected", values)
    events = written(tmp_path)
    (ours,), (its) = events.Histograms("activations/stem"), events.Histograms("expected")
    ours, its = ours.histogram_value, its[0].histogram_value
    assert ours.bucket == its.bucket
    assert ours.bucket_limit == its.bucket_limit
    assert (ours.min, ours.max, ours.num) == (its.min, its.max, its.num)
    assert (ours.sum, ours.sum_squares) == pytest.approx((its.sum, its.sum_squares), rel=1e-12)


def write_values(folder: Path, values: Tensor) -> EventAccumulator:
    """Write what a layer returned as it is."""
    rnet = Recorder(nn.Sequential(nn.Identity()), input_size=(1, 4))
    rnet.record("0")
    rnet(values)
    return write(folder, rnet.activations)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_counted_and_left_out(bad: float, tmp_path: Path) -> None:
    events = write_values(tmp_path / "some", torch.tensor([[0.0, 1.0, bad, 3.0]]))
    assert_statistics(events, "activations", "0", torch.tensor([0.0, 1.0, bad, 3.0]))
    (event,) = events.Histograms("activations/0")
    assert event.histogram_value.num == 3
    assert event.histogram_value.max == 3.0
    events = write_values(tmp_path / "all", torch.full((1, 4), bad))
    assert events.Scalars("activations_nonfinite/0")[0].value == 4
    assert set(events.Tags()["scalars"]) == {"activations_nonfinite/0", "activations_zeros/0"}
    assert not events.Tags()["histograms"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[0.0, 1.0, -3.0, 2.5]]).to(dtype)
    real = values.abs() if dtype.is_complex else values.double()
    assert_statistics(write_values(tmp_path, values), "activations", "0", real)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_layers_of_recordings_that_have_samples_are_written(store: str, tmp_path: Path) -> None:
    rnet = Recorder(nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True)), input_size=(1, 4))
    rnet.record("0", "1")
    loader = [torch.randn(9, 4) + 3 for _ in range(7)]
    where = f"disk:{tmp_path / 'run'}" if store == "disk" else store
    recording = rnet.collect(loader, store=where, reduce={"1": Mean()})
    events = write(tmp_path, recording)
    with torch.no_grad():
        expected = torch.cat([rnet.net[0](batch) for batch in loader])
    assert_statistics(events, "activations", "0", expected)
    assert events.Histograms("activations/0")[0].histogram_value.num == expected.numel()
    assert not any(tag.endswith("/1") for tag in events.Tags()["scalars"])


def test_nothing_to_write_is_an_error(tmp_path: Path) -> None:
    rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
    rnet.record("0")
    with (
        SummaryWriter(str(tmp_path)) as writer,
        pytest.raises(LayerNotFoundError, match="a pass"),
    ):
        add_activations(writer, rnet.activations)


@pytest.mark.parametrize("other", [{}, {"0": torch.zeros(2)}, None])
def test_other_mappings_are_an_error_that_says_what_to_give(other: Any, tmp_path: Path) -> None:
    told = pytest.raises(ArgumentError, match=rf"{type(other).__name__}.*rnet\.activations")
    with SummaryWriter(str(tmp_path)) as writer, told:
        add_activations(writer, other)


def test_statistics_that_do_not_exist(rnet: Recorder, tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    with writer, pytest.raises(ArgumentError, match=r"'median'.*'zeros'"):
        add_activations(writer, rnet.activations, statistics=["median"])
    events = write(tmp_path, rnet.activations, statistics=())
    assert not events.Tags()["scalars"]
    assert "activations/stem" in events.Tags()["histograms"]


def test_the_record_stays_as_it_is(rnet: Recorder, tmp_path: Path) -> None:
    before = rnet.activations["stem"].clone()
    write(tmp_path, rnet.activations)
    assert torch.equal(rnet.activations["stem"], before)
    assert rnet.activations["stem"].requires_grad


def test_operations_have_their_own_names(tmp_path):
    rnet = Recorder(make_net().eval(), input_size=(2, 3, 4))
    rnet.record("stem/linear", "act/relu")
    x = torch.randn(2, 3, 4)
    rnet(x)
    events = write(tmp_path, rnet.activations)
    tags = {tag for tag in events.Tags()["scalars"] if tag.endswith("stem/linear:0")}
    (mean,) = [tag for tag in tags if "mean" in tag]
    (found,) = events.Scalars(mean)
    assert found.value == pytest.approx(rnet.net.stem(x).double().mean().item(), rel=1e-6)
    # The module is called twice, so labels distinguish its operations.
    assert any(tag.endswith("act/relu:0_1-2/relu:0") for tag in events.Tags()["scalars"])

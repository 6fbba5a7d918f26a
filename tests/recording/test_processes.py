"""Several processes fill one recording, each with samples of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.reductions import Fold, Histogram, Last, Moments, Quantiles
from scio_recorder.stores import Disk
from tests.recording.nets import assert_same, expected, failing_after, named_batches, seeded

WORLD_SIZE = 3
# Of unequal size, and more in some processes than in others.
SIZES = ((3, 2), (4, 1, 2), (5,))


def data_of(rank: int) -> list[tuple[torch.Tensor, list[str]]]:
    return named_batches(rank, SIZES[rank])


def fill(path: Path, rank: int, rnet: Any = None, data: Any = None, **keywords: Any) -> Any:
    store = Disk(path, chunk_bytes=200, rank=rank, world_size=WORLD_SIZE)
    rnet = seeded() if rnet is None else rnet
    data = data_of(rank) if data is None else data
    return rnet.collect(data, store=store, sample_ids=lambda batch: batch[1], **keywords)


def check(path: Path, ranks: Any = range(WORLD_SIZE), *, is_complete: bool = True) -> None:
    recording = open_recording(path, verify=True)
    assert recording.complete == is_complete
    data = [pair for rank in ranks for pair in data_of(rank)]
    assert list(recording.sample_ids) == [name for _, names in data for name in names]
    assert_same(recording, expected(seeded(), [batch for batch, _ in data]))


def test_any_order_and_what_is_there_meanwhile(tmp_path):
    fill(tmp_path, 2)
    check(tmp_path, [2], is_complete=False)
    fill(tmp_path, 0)
    check(tmp_path, [0, 2], is_complete=False)
    fill(tmp_path, 1)
    check(tmp_path)
    for rank in range(WORLD_SIZE):
        again = fill(tmp_path, rank, resume=True)
        assert again.num_samples == sum(SIZES[rank])
        with pytest.raises(RecordingError, match="already holds"):
            fill(tmp_path, rank)


@pytest.mark.parametrize("others_first", [True, False])
def test_one_process_is_resumed(tmp_path, others_first):
    if others_first:
        fill(tmp_path, 0)
        fill(tmp_path, 2)
    with pytest.raises(InterruptedError):
        fill(tmp_path, 1, data=failing_after(data_of(1), 2))
    if not others_first:
        # Those that have not begun yet need no leave to begin.
        fill(tmp_path, 0)
        fill(tmp_path, 2, resume=True)
    with pytest.raises(RecordingError, match="already holds"):
        fill(tmp_path, 1)
    fill(tmp_path, 1, resume=True)
    check(tmp_path)


def test_what_does_not_fit(tmp_path):
    fill(tmp_path, 0)
    other = seeded()
    with torch.no_grad():
        other.net[0].weight.add_(1)
    with pytest.raises(RecordingError, match="weights"):
        fill(tmp_path, 1, other)
    with pytest.raises(RecordingError, match="layers"):
        fill(tmp_path, 1, seeded("0"))
    for number in (1, 2):
        store = Disk(tmp_path, world_size=number)
        with pytest.raises(RecordingError, match="world_size is 3 there"):
            seeded().collect(data_of(0), store=store, sample_ids=lambda b: b[1], resume=True)
    with pytest.raises(CollectError, match="sample_ids"):
        seeded().collect(data_of(1), store=Disk(tmp_path, rank=1, world_size=3))
    fill(tmp_path, 1)
    fill(tmp_path, 2)
    check(tmp_path)


def test_ids_that_two_processes_have(tmp_path):
    fill(tmp_path, 0)
    fill(tmp_path, 1)
    with pytest.raises(CollectError, match="two samples have the id '1-0', in part 1 and part 2"):
        fill(tmp_path, 2, data=data_of(1))
    # What is durable can be looked at, and is no less wrong the next time.
    assert open_recording(tmp_path).num_samples == sum(SIZES[0]) + 2 * sum(SIZES[1])
    with pytest.raises(CollectError, match="two samples"):
        fill(tmp_path, 0, resume=True)


@pytest.mark.parametrize(
    "numbers",
    [
        {"rank": 1},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
        {"world_size": 0},
        {"rank": True, "world_size": 2},
    ],
)
def test_numbers_of_no_process(tmp_path, numbers):
    with pytest.raises(CollectError, match=r"rank|world_size"):
        Disk(tmp_path, **numbers)


def reductions() -> list[Any]:
    return [
        Moments(),
        Moments(by=lambda batch: [name[0] for name in batch[1]]),
        Histogram(5, range=(-1, 1)),
        Quantiles([0.0, 0.5, 1.0]),
        Last(),
    ]


def test_reductions_are_merged(tmp_path):
    for rank in (1, 0, 2):
        own = reductions()
        recording = fill(
            tmp_path,
            rank,
            seeded("0", "3"),
            reduce={"0": own, "3": Fold(lambda total, a: (total or 0) + a.sum())},
        )
        assert recording["1-1"][0].count == sum(SIZES[rank])
    everything = torch.cat([batch for rank in range(WORLD_SIZE) for batch, _ in data_of(rank)])
    net = seeded("0").net
    with torch.no_grad():
        values = net[0](everything).double()
    recording = open_recording(tmp_path)
    moments, by_rank, histogram, quantiles, last = recording["1-1"]
    assert moments.count == len(values)
    torch.testing.assert_close(
        moments.mean, values.mean(0), rtol=1e-6, atol=1e-7, check_dtype=False
    )
    torch.testing.assert_close(
        moments.variance, values.var(0), rtol=1e-6, atol=1e-7, check_dtype=False
    )
    assert {key: own.count for key, own in by_rank.items()} == {"0": 5, "1": 7, "2": 5}
    assert int(histogram.counts.sum() + histogram.below + histogram.above) == values.numel()
    assert quantiles[0].item() == pytest.approx(values.min().item())
    assert quantiles[2].item() == pytest.approx(values.max().item())
    torch.testing.assert_close(last, values[-5:].float())
    with pytest.raises(RecordingError, match=r"Fold in 3 processes.*can't be merged"):
        recording["1-4"]


def test_rounding_is_measured_over_all(tmp_path):
    parts = []
    for rank in range(WORLD_SIZE):
        fill(tmp_path / "run", rank, seeded("0"), dtype=torch.bfloat16)
        parts += [batch for batch, _ in data_of(rank)]
    with torch.no_grad():
        exact = torch.cat([seeded("0").net[0](part) for part in parts]).double()
    wanted = (exact.bfloat16() - exact).norm() / exact.norm()
    assert open_recording(tmp_path / "run").relative_errors["1-1"] == pytest.approx(wanted.item())


def test_inputs_of_all(tmp_path):
    for rank in range(WORLD_SIZE):
        own = fill(tmp_path, rank, seeded("2", inputs=True))
        assert len(own.inputs["1-3"]) == len(SIZES[rank])
    recording = open_recording(tmp_path)
    rnet = seeded("2.second")
    sizes = [args[0].shape[0] for args, _ in recording.inputs["1-3"]]
    assert sizes == [size for own in SIZES for size in own]
    again = recording.recompute(rnet, "2.second")["2.second"]
    data = [batch for rank in range(WORLD_SIZE) for batch, _ in data_of(rank)]
    truth = expected(rnet, data)[rnet.architecture.resolve("2.second")]
    assert torch.equal(again, truth)

"""Samplers that split a dataset: whose sample is which, without a process for each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
)

from scio_recorder import CollectError, Recorder, RecordingError, Tokens, open_recording
from scio_recorder.reductions import Last, Mean, Moments
from scio_recorder.stores import Disk
from tests.recording.loaders import (
    LOADERS,
    Numbers,
    Stream,
    accelerated,
    distributed,
    of_lightning,
    predicting,
)
from tests.recording.nets import Sizes, recorder_of

BY_VALUE: dict[str, Any] = {"sample_ids": lambda batch: batch[:, 0].int()}


def recorder(*selectors: str, net: nn.Module | None = None, **options: Any) -> Recorder:
    rnet = Recorder(net or nn.Sequential(nn.Identity(), nn.Tanh()), input_size=(1, 2))
    rnet.record(*selectors or ("0",), **options)
    return rnet


def collect(path: Any, loaders: list[Any], **options: Any) -> Any:
    store = f"disk:{path}"
    parts = [recorder().collect(loader, store=store, **options) for loader in loaders]
    recording = open_recording(path, verify=True)
    assert recording.complete
    assert list(recording.sample_ids) == [i for part in parts for i in part.sample_ids]
    return recording


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize(("size", "world", "batch"), [(11, 2, 3), (12, 3, 2), (7, 3, 2), (3, 2, 4)])
def test_every_sample_once(tmp_path, loader, size, world, batch):
    data = Numbers(size)
    recording = collect(tmp_path, [loader(data, rank, world, batch) for rank in range(world)])
    assert sorted(recording.sample_ids) == list(range(size))
    wanted = torch.stack([data[i] for i in recording.sample_ids])
    assert torch.equal(recording["0"][:], wanted)
    # Each process keeps what it is given, in order, but for repeats at the end.
    ids = list(recording.sample_ids)
    for rank in range(world):
        given = [int(x[0]) for x in torch.cat(list(loader(data, rank, world, batch)))]
        own = list(
            itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, given, strict=False))
        )
        ids = ids[len(own) :]
    assert not ids


@pytest.mark.parametrize("loader", [of_lightning, predicting])
def test_other_samplers_need_ids(tmp_path, loader):
    """Their order may draw random numbers, so they are not asked twice."""
    data = Numbers(8)
    loaders = [loader(data, rank, 2, 3) for rank in range(2)]
    with pytest.raises(CollectError, match=r"not known which samples a .*sample_ids=lambda"):
        collect(tmp_path / "none", loaders)
    assert not (tmp_path / "none").exists()
    recording = collect(tmp_path / "run", loaders, **BY_VALUE)
    assert sorted(recording.sample_ids) == list(range(8))
    assert torch.equal(recording["0"][:, 0].int(), torch.tensor(recording.sample_ids.tolist()))


@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_what_accelerate_deals_out_is_not_followed(tmp_path, kind):
    def loader(rank: int) -> Any:
        if kind == "batches":
            return accelerated(Numbers(8), rank, 2, 2)
        return DataLoaderShard(
            IterableDatasetShard(Stream(8), 2, num_processes=2, process_index=rank), batch_size=2
        )

    with pytest.raises(CollectError, match=r"Accelerate.*DistributedSampler, or write sample_ids"):
        collect(tmp_path / "none", [loader(0)], **BY_VALUE)
    assert not (tmp_path / "none").exists()
    # Elsewhere than on a disk, each process has what it has.
    assert recorder().collect(loader(1), store="host").num_samples == 4
    # Who says whose samples they are is taken at his word.
    for rank in range(2):
        store = Disk(tmp_path / "run", rank=rank, world_size=2)
        recorder().collect(loader(rank), store=store, **BY_VALUE)
    assert sorted(open_recording(tmp_path / "run").sample_ids) == list(range(8))


def test_repeats_that_nobody_drops_are_refused_by_their_ids(tmp_path):
    for rank in range(2):
        store = Disk(tmp_path / "run", rank=rank, world_size=2)
        loader = accelerated(Numbers(7), rank, 2, 2)
        if rank == 0:
            recorder().collect(loader, store=store, **BY_VALUE)
        else:
            with pytest.raises(CollectError, match=r"two samples have the id \d.*repeats"):
                recorder().collect(loader, store=store, **BY_VALUE)


class Labelled(Numbers):
    """With a class, a mask and a text of a few tokens."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]  # a mapping
        mask = torch.arange(4) <= index % 4
        return {"x": super().__getitem__(index).expand(4, 2), "attention_mask": mask}


class Text(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return x * 2


@pytest.mark.filterwarnings("ignore:the attention_mask of batch")
def test_rows_and_labels_of_repeats_are_dropped(tmp_path):
    data, labels = Labelled(7), lambda batch: batch["x"][:, 0, 0].int() % 2
    reductions = [Moments(), Mean(by=labels), Last()]

    def fill(path: Any, **options: Any) -> Any:
        for rank in range(3):
            rnet = recorder_of(Text(), "0-1", input_size=(1, 4, 2))
            loader = distributed(data, rank, 3, 2)
            rnet.collect(loader, store=Disk(path, chunk_bytes=64), **options)
        return open_recording(path)

    rows = {"rows": Tokens()}
    found = fill(tmp_path / "rows", **rows)
    assert found.num_rows == sum(min(4, i % 4 + 1) for i in range(7))
    for place, each in enumerate(found.sample_ids):
        own = found.by_sample("0-1")[place]
        assert torch.equal(own, torch.tensor([each, each + 0.5]).mul(2).expand(each % 4 + 1, 2))
    for options in ({}, rows):
        moments, by_class, _ = fill(tmp_path / f"{len(options)}", reduce=reductions, **options)[
            "0-1"
        ]
        number = {i: i % 4 + 1 if options else 1 for i in range(7)}
        values = [2.0 * i for i in range(7) for _ in range(number[i])]
        assert moments.count == len(values)
        assert moments.mean.reshape(-1)[0].item() == pytest.approx(sum(values) / len(values))
        for label, mean in by_class.items():
            own = [2.0 * i for i in range(7) if i % 2 == label for _ in range(number[i])]
            assert mean.reshape(-1)[0].item() == pytest.approx(sum(own) / len(own))


def test_what_sees_whole_batches_refuses_repeats(tmp_path):
    data = Numbers(7)
    with pytest.raises(CollectError, match=r"Sizes.*may read the batch.*drop_last=True"):
        recorder().collect(distributed(data, 1, 2, 2), store=f"disk:{tmp_path}/a", reduce=Sizes())
    with pytest.raises(CollectError, match=r"repeats.*whole batches.*drop_last"):
        recorder(inputs=True).collect(distributed(data, 0, 2, 2), store=f"disk:{tmp_path}/b")
    assert not (tmp_path / "b").exists()
    for rank in range(2):
        loader = distributed(data, rank, 2, 3, drop_last=True)
        recorder(inputs=True).collect(loader, store=f"disk:{tmp_path}/c")
    assert len(open_recording(tmp_path / "c").inputs["0"]) == 2


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_loader_gives_what_it_would_give(tmp_path, workers):
    data, options = Numbers(9), {"num_workers": workers, "persistent_workers": workers > 0}

    def loader() -> DataLoader[Any]:
        torch.manual_seed(0)
        return DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1), **options)

    plain, rounds = loader(), []
    for epoch in range(2):
        plain.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # of this sampler
        rounds.append([x[:, 0].int().tolist() for x in plain])
    state = torch.get_rng_state()
    watched = loader()
    for epoch, given in enumerate(rounds):
        watched.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # of this sampler
        recording = recorder().collect(watched, store=f"disk:{tmp_path}/{epoch}", progress=False)
        assert list(recording.sample_ids) == [*itertools.chain(*given)][:4]
        assert torch.equal(recording["0"][:, 0].int(), torch.tensor([*itertools.chain(*given)][:4]))
    assert torch.equal(torch.get_rng_state(), state)


class Bucketed(BatchSampler):
    """Orders samples by itself."""

    def __iter__(self) -> Iterator[list[int]]:
        return (sorted(batch) for batch in super().__iter__())


def bucketed(size: int, rank: int = 0, **options: Any) -> DataLoader[Any]:
    data = Numbers(size)
    sampler = DistributedSampler(data, 2, rank, **options)
    return DataLoader(data, batch_sampler=Bucketed(sampler, 2, drop_last=False))


def out_of_order() -> DataLoader[Any]:
    data = Numbers(4)
    sampler = DistributedSampler(data, 2, 0)
    return DataLoader(data, 2, sampler=sampler, num_workers=1, in_order=False)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: bucketed(5), "a DistributedSampler in a Bucketed adds repeats.*drop_last=True"),
        (out_of_order, "another order.*in_order=True"),
    ],
)
def test_what_cannot_be_known_is_refused_before_anything_runs(tmp_path, loader, message):
    ran: list[Any] = []
    rnet = recorder()
    rnet.net[0].register_forward_hook(lambda *call: ran.append(call))
    with pytest.raises(CollectError, match=message):
        rnet.collect(loader(), store=f"disk:{tmp_path}/run")
    assert not ran
    assert not (tmp_path / "run").exists()
    # Who says whose samples they are is taken at his word, and so is who keeps them elsewhere.
    with_rank = Disk(tmp_path / "run", rank=1, world_size=2)
    number = rnet.collect(loader(), store=with_rank, **BY_VALUE).num_samples
    assert number == rnet.collect(loader(), store="host").num_samples > 0
    assert open_recording(tmp_path / "run").num_samples == number


def test_an_order_of_its_own_without_repeats(tmp_path):
    recording = collect(tmp_path / "even", [bucketed(8, rank) for rank in range(2)], **BY_VALUE)
    assert sorted(recording.sample_ids) == list(range(8))
    loaders = [bucketed(9, rank, drop_last=True) for rank in range(2)]
    recording = collect(tmp_path / "less", loaders, **BY_VALUE)
    assert recording.num_samples == 8
    assert torch.equal(recording["0"][:, 0].int(), torch.tensor(recording.sample_ids.tolist()))


def test_samples_are_counted_as_the_sampler_counts_them(tmp_path):
    class Doubled(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index).expand(2, 2)

    data = Doubled(5)
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1), collate_fn=torch.cat)
    with pytest.raises(
        CollectError, match=r"chose 2 samples for batch 0.*the batch has 4.*sample_ids"
    ):
        recorder().collect(loader, store=f"disk:{tmp_path}/run")
    twice = {"sample_ids": lambda batch: [f"{x[0]}-{i}" for i, x in enumerate(batch)]}
    with pytest.raises(CollectError, match=r"chose 3 samples.*repeats 1.*batch has 6.*drop_last"):
        recorder().collect(distributed_with(loader, batch=4), store=f"disk:{tmp_path}/b", **twice)


def distributed_with(loader: DataLoader[Any], batch: int) -> DataLoader[Any]:
    return DataLoader(loader.dataset, batch, sampler=loader.sampler, collate_fn=torch.cat)


def test_ids_that_are_given_win_and_repeats_are_dropped_all_the_same(tmp_path):
    names = {"sample_ids": lambda batch: [f"s{int(x[0])}" for x in batch]}
    data = Numbers(5)
    recording = collect(tmp_path, [distributed(data, rank, 2, 2) for rank in range(2)], **names)
    assert sorted(recording.sample_ids) == [f"s{i}" for i in range(5)]


def test_ranks_that_do_not_fit_together(tmp_path):
    data, store = Numbers(8), f"disk:{tmp_path}/run"
    recorder().collect(distributed(data, 0, 2, 2), store=store)
    for other, message in (
        (distributed(data, 1, 2, 2, seed=4), "sampler.seed is 3 there and 4 here"),
        (distributed(Numbers(9), 1, 2, 2), "sampler.samples is 8 there and 9 here"),
        (distributed(data, 1, 3, 2), "world_size is 2 there and 3 here.*collect_parts"),
        (DataLoader(data, 2), "collect_parts"),
    ):
        for resume in (False, True):
            with pytest.raises(RecordingError, match=message if resume else None):
                recorder().collect(other, store=store, resume=resume)
    epoch = distributed(data, 1, 2, 2)
    epoch.sampler.set_epoch(1)  # type: ignore[attr-defined]  # of this sampler
    with pytest.raises(RecordingError, match=r"sampler.epoch is 0 there and 1 here"):
        recorder().collect(epoch, store=store)
    recorder().collect(distributed(data, 1, 2, 2), store=store)
    assert sorted(open_recording(tmp_path / "run").sample_ids) == list(range(8))


def test_a_part_is_for_one_process(tmp_path):
    with pytest.raises(
        CollectError, match=r"make_batches\(\d\).*one process collects a part alone"
    ):
        recorder().collect_parts(
            lambda part: distributed(Numbers(4), part, 2, 2), 2, store=f"disk:{tmp_path}/run"
        )
    recording = recorder().collect_parts(
        lambda part: DataLoader(Stream(4), 2), 1, store=f"disk:{tmp_path}/stream", **BY_VALUE
    )
    assert list(recording.sample_ids) == [0, 1, 2, 3]


class Stopped(Exception):  # noqa: N818 - it is thrown by no fault of anybody
    pass


@pytest.mark.parametrize("loader", [distributed])
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_resume_goes_on_in_each_process(tmp_path, loader, batches):
    data, store = Numbers(11), Disk(tmp_path, chunk_bytes=8)
    for rank in range(2):
        rnet, runs = recorder(), []
        hook = rnet.net.register_forward_hook(lambda *call, runs=runs: runs.append(len(call[2])))

        def stop(*call: Any, runs: list[int] = runs) -> None:
            if len(runs) == batches:
                raise Stopped

        stopping = rnet.net[1].register_forward_hook(stop)
        with pytest.raises(Stopped):
            rnet.collect(loader(data, rank, 2, 2), store=store)
        stopping.remove()
        own = rnet.collect(loader(data, rank, 2, 2), store=store, resume=True)
        # Nothing ran twice, but for the batch that failed.
        assert sum(runs) == 6
        hook.remove()
        again = rnet.collect(loader(data, rank, 2, 2), store=store, resume=True)
        assert list(again.sample_ids) == list(own.sample_ids)
    recording = open_recording(tmp_path, verify=True)
    assert sorted(recording.sample_ids) == list(range(11))
    assert torch.equal(recording["0"][:, 0].int(), torch.tensor(recording.sample_ids.tolist()))


def test_every_and_max_batches_count_in_each_process(tmp_path):
    data = Numbers(16)
    loaders = [distributed(data, rank, 2, 2, shuffle=False) for rank in range(2)]
    recording = collect(tmp_path, loaders, every=2, max_batches=1)
    assert list(recording.sample_ids) == [0, 2, 1, 3]


def test_one_replica_and_other_samplers_do_not_split(tmp_path):
    data = Numbers(5)
    for loader in (distributed(data, 0, 1, 2), DataLoader(data, 2, shuffle=True)):
        assert list(recorder().collect(loader).sample_ids) == list(range(5))


def test_a_process_without_batches_waits_for_another(tmp_path):
    data, store = Numbers(3), f"disk:{tmp_path}"

    class Uneven(Sampler[int]):
        def __init__(self, rank: int) -> None:
            self.num_replicas, self.rank, self.drop_last = 2, rank, True

        def __iter__(self) -> Iterator[int]:
            return iter(range(3) if self.rank == 0 else ())

    def loader(rank: int) -> Any:
        return DataLoader(data, 2, sampler=Uneven(rank))

    begun = threading.Event()

    def later() -> None:
        begun.wait(30)
        recorder().collect(loader(0), store=store, **BY_VALUE)

    other = threading.Thread(target=later)
    other.start()
    threading.Timer(0.3, begun.set).start()
    own = recorder().collect(loader(1), store=store, **BY_VALUE)
    other.join()
    assert own.num_samples == 0
    assert sorted(open_recording(tmp_path).sample_ids) == [0, 1, 2]
    with pytest.raises(CollectError, match="batches is empty"):
        recorder().collect(distributed(Numbers(0), 0, 2, 2), store=f"disk:{tmp_path}/none")

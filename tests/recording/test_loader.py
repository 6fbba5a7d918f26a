"""Rows in random order: every one once, those that the recording holds, in bounded memory."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from scio_recorder import Recording, open_recording
from scio_recorder.errors import ArgumentError, LayerNotFoundError, RecordingError
from scio_recorder.reductions import Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import tensor_file
from scio_recorder.stores.files import RunReader
from tests.recording.nets import LoaderMemory, batches, recorder, recorder_of
from tests.stores.disk_format.runs import flip

ROWS = 61
SIZES = (9, 20, 1, 31)


def collected(store: str, path: Any, **keywords: Any) -> Recording:
    place = Disk(path / "run", chunk_bytes=300) if store == "disk" else store
    return recorder("0", "2.act", "3").collect(batches(*SIZES), store=place, **keywords)


@pytest.fixture(params=["host", "disk"])
def recording(request: pytest.FixtureRequest, tmp_path: Any) -> Recording:
    return collected(request.param, tmp_path)


def numbers(loader: Any) -> list[list[int]]:
    """Return which rows each batch has; for a loader that is made ``with_rows``."""
    return [known["sample"].tolist() for _, known in loader]


def shuffled(recording: Recording, *names: str, **options: Any) -> Any:
    """Return rows in random order with what is known of each, from a small buffer."""
    usual = {"batch_size": 4, "shuffle": True, "with_rows": True, "buffer_bytes": 900}
    return recording.loader(*names, **{**usual, **options})


def flat(parts: Any) -> list[int]:
    return [row for part in parts for row in part]


def wide(path: Any, rows: int = 2048, features: int = 1024, chunks: int = 4) -> Recording:
    """Return a recording of many blocks on disk: of 256 rows each, where there are 1024 features.

    The first feature of each row is its number.
    """
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, features))
    data = torch.zeros(rows, features)
    data[:, 0] = torch.arange(rows)
    each = rows // chunks
    rnet.collect(data.split(each), store=Disk(path / "wide", chunk_bytes=each))
    # Opened, so that headers have been read.
    return open_recording(path / "wide")


@pytest.mark.parametrize(
    ("shuffle", "buffer_bytes", "batch_size"),
    [
        (True, 1, 1),
        (True, 700, 7),
        (True, 3000, 7),
        (True, 1 << 20, 61),
        (True, 3000, 10**12),
        (False, 700, 7),
        (False, 1 << 20, 100),
    ],
)
def test_every_row_comes_once(recording, shuffle, buffer_bytes, batch_size):
    options = {"batch_size": batch_size, "shuffle": shuffle, "buffer_bytes": buffer_bytes}
    loader = recording.loader("0", "3", with_rows=True, **options)
    given = list(loader)
    assert len(given) == len(loader) == math.ceil(ROWS / batch_size)
    rows = torch.cat([known["sample"] for _, known in given])
    assert rows.tolist() == list(range(ROWS)) or (shuffle and sorted(rows) == list(range(ROWS)))
    for label in ((1, 1), (1, 4)):
        assert torch.equal(
            torch.cat([batch[label] for batch, _ in given]), recording[label][:][rows]
        )
    assert [list(batch) for batch, _ in given] == [[(1, 1), (1, 4)]] * len(given)
    assert {len(known["sample"]) for _, known in given[:-1]} <= {batch_size}


def test_one_layer_is_a_tensor_and_none_are_all_that_have_rows(recording):
    batch = next(iter(recording.loader("0-1" if "0-1" in recording else "0", batch_size=5)))
    assert type(batch) is Tensor
    assert torch.equal(batch, recording["0"][:5])
    assert list(next(iter(recording.loader(batch_size=5)))) == list(recording.stored)
    # A name of which several calls are here stands for all of them.
    assert len(next(iter(recording.loader("2.act", batch_size=5)))) == 2
    assert list(next(iter(recording.loader("*", batch_size=5)))) == list(recording.stored)


@pytest.mark.parametrize(
    ("dtype", "store"),
    [
        (torch.bfloat16, "disk"),
        (torch.float8_e4m3fn, "host"),
        (torch.float8_e5m2fnuz, "disk"),
        (torch.float64, "host"),
    ],
)
def test_dtypes(dtype, store, tmp_path):
    recording = collected(store, tmp_path, dtype=dtype)
    loader = shuffled(recording, "0", batch_size=8)
    for batch, known in loader:
        assert batch.dtype == dtype
        wanted = recording["0"][:].view(torch.uint8)[known["sample"]]
        assert torch.equal(batch.view(torch.uint8), wanted)


def test_rows_without_bytes(tmp_path):
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, 2))
    for store in ("host", f"disk:{tmp_path}/run"):
        recording = rnet.collect([torch.ones(5, 0, 2)], store=store)
        loader = recording.loader("0-1", batch_size=2, shuffle=True)
        assert [tuple(batch.shape) for batch in loader] == [(2, 0, 2), (2, 0, 2), (1, 0, 2)]
        assert recording["0-1"][[3, 1]].shape == (2, 0, 2)


def test_batches_belong_to_the_caller(recording):
    before = recording["0"][:].clone()
    for batch in recording.loader("0", batch_size=61):
        batch.zero_()
    assert torch.equal(recording["0"][:], before)


def test_seed_and_epoch_decide_the_order(recording):
    def order(seed: int = 0, epoch: int = 0) -> list[list[int]]:
        loader = shuffled(recording, "0", batch_size=8, seed=seed)
        loader.set_epoch(epoch)
        return numbers(loader)

    found = [order(), order(seed=1), order(epoch=1), order(seed=1, epoch=1)]
    assert found == [order(), order(seed=1), order(epoch=1), order(seed=1, epoch=1)]
    assert len({str(one) for one in found}) == 4
    loader = shuffled(recording, "0", batch_size=8)
    assert numbers(loader) == numbers(loader) == found[0]
    loader.set_epoch(1)
    assert numbers(loader) == found[2]


def test_neighbours_come_from_everywhere(tmp_path):
    recording = wide(tmp_path, rows=4096, features=256)
    loader = recording.loader("0-1", batch_size=16, shuffle=True, buffer_bytes=1 << 20)
    rows = torch.cat(list(loader))[:, 0]
    assert rows.diff().abs().mean() > 0.8 * len(rows) / 3
    # No order of the epoch is left: a permutation of all rows gives at most 0.05 or so.
    assert torch.corrcoef(torch.stack([rows, torch.arange(4096.0)]))[0, 1].abs() < 0.3


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, True)])
def test_goes_on_at_every_batch(recording, tmp_path, shuffle, drop_last):
    keywords = {"shuffle": shuffle, "drop_last": drop_last, "with_rows": True, "buffer_bytes": 900}
    loader = recording.loader("0", "3", batch_size=7, **keywords)
    loader.set_epoch(3)
    whole = numbers(loader)
    for given in range(len(whole) + 1):
        iterator = iter(loader)
        for _ in range(given):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        assert (state["epoch"], state["batches"]) == (3, given)
        opened = open_recording(recording.path) if recording.path else recording
        again = opened.loader("0", "3", batch_size=7, **keywords)
        again.load_state_dict(state)
        assert again.state_dict() == state
        again.set_epoch(3)
        assert numbers(again) == whole[given:]
        # The one after is whole, and so is another epoch.
        assert numbers(again) == whole
        again.load_state_dict(state)
        again.set_epoch(4)
        assert len(numbers(again)) == len(whole)


def test_the_latest_iteration_counts(recording):
    loader = recording.loader("0", batch_size=7)
    first, second = iter(loader), iter(loader)
    for iterator in (first, second, first, first):
        next(iterator)
    assert loader.state_dict()["batches"] == 1
    loader.set_epoch(2)
    next(second)
    assert loader.state_dict()["batches"] == 0


def test_a_state_of_something_else_is_refused(recording, tmp_path):
    loader = recording.loader("0", batch_size=7, seed=3)
    state = loader.state_dict()
    for other in (
        recording.loader("3", batch_size=7, seed=3),
        recording.loader("0", batch_size=8, seed=3),
        recording.loader("0", batch_size=7, seed=4),
        recording.loader("0", batch_size=7, seed=3, shuffle=True),
        recording.loader("0", batch_size=7, seed=3, rank=0, world_size=2),
        recording.loader("0", batch_size=7, seed=3, buffer_bytes=1 << 20),
    ):
        with pytest.raises(
            ArgumentError, match=r"loader with .*: make a loader with the same arguments"
        ):
            other.load_state_dict(state)
    for data in (batches(*SIZES, seed=1), batches(*SIZES, 1)):
        another = recorder("0", "2.act", "3").collect(data)
        with pytest.raises(RecordingError, match="another recording"):
            another.loader("0", batch_size=7, seed=3).load_state_dict(state)
    for bad in (
        {},
        {**state, "batches": -1},
        {**state, "batches": 10},
        {**state, "batches": 1, "readers": 2},  # as earlier versions wrote it
    ):
        with pytest.raises(ArgumentError, match="state"):
            loader.load_state_dict(bad)
    assert loader.state_dict() == state


def as_worker(monkeypatch: pytest.MonkeyPatch, number: int, workers: int) -> None:
    info = SimpleNamespace(id=number, num_workers=workers)
    monkeypatch.setattr("scio_recorder.recording.loader.get_worker_info", lambda: info)


@pytest.mark.parametrize(
    ("ranks", "workers", "shuffle", "drop_last"),
    [
        (1, 2, True, False),
        (2, 1, True, True),
        (3, 2, True, False),
        (3, 5, False, True),
        # Equal shares where the rest of the rows would make a batch more.
        (4, 1, True, True),
        (70, 2, True, False),
        (70, 1, False, True),
    ],
)
def test_ranks_and_workers_share_the_rows(
    recording, monkeypatch, ranks, workers, shuffle, drop_last
):
    shares, lengths = [], []
    for rank in range(ranks):
        share, given = [], 0
        for worker in range(workers):
            as_worker(monkeypatch, worker, workers)
            options = {"shuffle": shuffle, "rank": rank, "world_size": ranks}
            loader = shuffled(recording, "0", drop_last=drop_last, **options)
            parts = numbers(loader)
            share += flat(parts)
            given += len(parts)
        assert given == len(loader)
        shares.append(share)
        lengths.append(given)
    rows = flat(shares)
    assert len(set(rows)) == len(rows)
    if drop_last:
        assert len(set(lengths)) == 1
        assert lengths[0] == ROWS // ranks // 4
        assert {len(share) for share in shares} == {4 * lengths[0]}
    else:
        assert sorted(rows) == list(range(ROWS))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_are_those_of_torch_distributed(recording, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    keywords = {"batch_size": 5, "shuffle": True, "with_rows": True}
    found = numbers(recording.loader("0", **keywords))
    assert found == numbers(recording.loader("0", rank=1, world_size=3, **keywords))
    assert found != numbers(recording.loader("0", rank=0, world_size=1, **keywords))


def test_a_data_loader_divides_the_work(tmp_path):
    recording = collected("disk", tmp_path)
    loader = shuffled(recording, "0")
    served = DataLoader(loader, batch_size=None, num_workers=2)
    found = [known["sample"].tolist() for _, known in served]
    assert len(found) == len(served) == len(loader)
    assert sorted(flat(found)) == list(range(ROWS))
    assert found == [known["sample"].tolist() for _, known in served]
    # Which of the workers' batches came is not known, until another epoch is chosen.
    with pytest.raises(ArgumentError, match=r"workers read this epoch.*set_epoch"):
        loader.state_dict()
    loader.set_epoch(1)
    again = shuffled(recording, "0")
    again.load_state_dict(loader.state_dict())
    assert numbers(again) == numbers(loader)
    assert loader.state_dict()["batches"] == len(found)


def test_workers_do_not_go_on_inside_an_epoch(recording, monkeypatch):
    loader = shuffled(recording, "0")
    whole = numbers(loader)
    loader.load_state_dict({**loader.state_dict(), "batches": 5})
    with monkeypatch.context() as patch:
        as_worker(patch, 1, 2)
        with pytest.raises(ArgumentError, match=r"5 batches came.*num_workers=0"):
            next(iter(loader))
        with pytest.raises(ArgumentError, match="workers read"):
            loader.state_dict()
    # Nothing is lost by that.
    assert numbers(loader) == whole[5:]


@pytest.mark.campaign
def test_workers_that_persist_see_the_epoch(recording):
    loader = shuffled(recording, "0")
    served = DataLoader(loader, batch_size=None, num_workers=1, persistent_workers=True)
    first = [known["sample"].tolist() for _, known in served]
    loader.set_epoch(1)
    second = [known["sample"].tolist() for _, known in served]
    assert (first, second) == (numbers_of(recording, 0), numbers_of(recording, 1))
    assert first != second
    loader.set_epoch(2)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batches": 5})
    with pytest.raises(ArgumentError, match="inside an epoch"):
        list(served)
    assert numbers(loader) == first[5:]


def numbers_of(recording: Recording, epoch: int) -> list[list[int]]:
    loader = shuffled(recording, "0")
    loader.set_epoch(epoch)
    return numbers(loader)


def test_a_loader_travels_to_another_process(recording):
    loader = shuffled(recording, "0", "3")
    loader.set_epoch(2)
    for again in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert numbers(again) == numbers(loader)
        assert again.state_dict() == loader.state_dict()


def test_shards_of_several_processes_complete_or_not(tmp_path):
    data = batches(13, 5, 8, seed=4)
    for rank in (2, 0, 1):
        torch.manual_seed(0)
        store = Disk(tmp_path, chunk_bytes=100, rank=rank, world_size=3)
        recorder("0", "3").collect(
            [data[rank]],
            store=store,
            sample_ids=lambda batch, rank=rank: [rank * 99 + i for i in range(len(batch))],
        )
        recording = open_recording(tmp_path)
        assert recording.complete == (rank == 1)
        found = list(shuffled(recording, "3", buffer_bytes=300))
        rows = torch.cat([known["sample"] for _, known in found])
        assert sorted(rows.tolist()) == list(range(recording.num_samples))
        assert torch.equal(torch.cat([batch for batch, _ in found]), recording["3"][:][rows])


def test_a_pickled_recording_stays_as_it_was_opened(tmp_path, monkeypatch):
    rnet = recorder("0")

    def collect(place: Any, rank: int) -> Recording:
        data = torch.full((3, 4), float(rank + 1))
        store = Disk(place, rank=rank, world_size=2)
        return rnet.collect([data], store=store, sample_ids=lambda _: [*range(rank, 6, 2)])

    collect(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    recording = open_recording("run")
    monkeypatch.chdir(tmp_path.parent)
    expected = recording["0"][:].clone()
    pickled = pickle.dumps((recording, recording["0"], recording.loader("0", batch_size=2)))
    # Rows of the first rank come before those that are there.
    collect(tmp_path / "run", 0)
    again, values, loader = pickle.loads(pickled)
    for read in (again["0"][:], values[:], torch.cat([*loader])):
        assert torch.equal(read, expected)
    assert again.num_rows == len(again.sample_ids) == 3
    assert not again.complete
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    collect(tmp_path / "run", 0)
    with pytest.raises(RecordingError, match="holds another recording by now: open it again"):
        pickle.loads(pickled)


def count_checksums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the blocks that are verified from now on."""
    seen: list[int] = []
    plain = tensor_file.checksum

    def checksum(data: Any) -> str:
        # The header of a file that is opened is a page, without the digits of its own checksum.
        if len(data) != 4096 - 16:
            seen.append(len(data))
        return plain(data)

    monkeypatch.setattr(tensor_file, "checksum", checksum)
    return seen


@pytest.mark.parametrize("features", [1024, 100])
def test_each_block_is_verified_once_an_epoch(tmp_path, monkeypatch, features):
    recording = wide(tmp_path, features=features)
    chunk_bytes = 512 * features * 4
    blocks = [min(1 << 20, chunk_bytes - start) for start in range(0, chunk_bytes, 1 << 20)] * 4
    loader = recording.loader("0-1", batch_size=64, shuffle=True, buffer_bytes=3 << 20)
    seen = count_checksums(monkeypatch)
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen.clear()
        rows = torch.cat(list(loader))[:, 0]
        assert sorted(rows.tolist()) == list(range(2048))
        # Headers are read again with each epoch.
        assert sorted(size for size in seen if size > 4096) == sorted(blocks)


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many bytes each read takes from now on."""
    reads: list[int] = []
    plain = RunReader.read_into

    def reading(self: Any, out: Any, layer: str, start: int) -> None:
        reads.append(len(out))
        plain(self, out, layer, start)

    monkeypatch.setattr(RunReader, "read_into", reading)
    return reads


def test_memory_is_bounded_by_the_buffer(tmp_path, monkeypatch):
    buffer_bytes = 6 << 20
    # As much is read at a time, and no more is taken than for both halves.
    recording = wide(tmp_path, rows=8192)
    held, reads = LoaderMemory(monkeypatch), reads_of(monkeypatch)
    batch_bytes = 64 * 4096
    loader = recording.loader("0-1", batch_size=64, shuffle=True, buffer_bytes=buffer_bytes)
    assert sum(len(batch) for batch in loader) == 8192
    assert 0.8 * buffer_bytes < held.most + 2 * batch_bytes <= buffer_bytes
    assert held.now == 0
    assert sum(reads) == 8192 * 4096
    assert max(reads) <= 16 << 20


def test_resuming_reads_no_earlier_rows(tmp_path, monkeypatch):
    recording = wide(tmp_path)
    loader = recording.loader("0-1", batch_size=64, shuffle=True, buffer_bytes=2 << 20)
    reads = reads_of(monkeypatch)
    loader.load_state_dict({**loader.state_dict(), "batches": len(loader) - 1})
    assert len(list(loader)) == 1
    assert 0 < sum(reads) <= 2 << 20


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_block_raises_and_what_came_before_is_right(tmp_path, shuffle):
    recording = wide(tmp_path)
    damaged = sorted((tmp_path / "wide").glob("chunk*"))[-1]
    flip(damaged, -1)
    loader = open_recording(recording.path).loader(
        "0-1", batch_size=64, shuffle=shuffle, buffer_bytes=2 << 20
    )
    given: list[Tensor] = []
    with pytest.raises(RecordingError, match=f"{damaged.name} is damaged"):
        given.extend(loader)
    assert given or shuffle
    assert all(batch[:, 1:].eq(0).all() for batch in given)
    assert loader.state_dict()["batches"] == len(given)


def test_damage_done_after_an_epoch_is_noticed_in_the_next(tmp_path):
    recording = wide(tmp_path)
    loader = recording.loader("0-1", batch_size=64)
    assert sum(map(len, loader)) == 2048
    files = sorted((tmp_path / "wide").glob("chunk*"))
    # As a disk that goes bad would: the file looks as it did.
    before = files[0].stat()
    flip(files[0], -1)
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(RecordingError, match="damaged"):
        list(loader)


def test_bad_arguments(recording, tmp_path):
    for keywords, message in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": 2, "seed": -1}, "seed=-1"),
        ({"batch_size": 2, "buffer_bytes": 0}, "buffer_bytes=0"),
        ({"batch_size": 2, "shuffle": "no"}, "shuffle='no': write True or False"),
        ({"batch_size": 2, "with_rows": 2}, "with_rows=2"),
        ({"batch_size": 2, "world_size": 2}, "rank=None"),
        ({"batch_size": 2, "rank": 0}, "world_size=None"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "counted from 0 to 1"),
        ({"batch_size": 2, "rank": 0, "world_size": 0}, "world_size=0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            recording.loader("0", **keywords)
    with pytest.raises(LayerNotFoundError, match="nowhere"):
        recording.loader("nowhere", batch_size=2)
    with pytest.raises(LayerNotFoundError, match="there is no recording of layer 1-5"):
        recording.loader("4", batch_size=2)
    with pytest.raises(LayerNotFoundError, match="own parentheses"):
        recording.loader(1, 3, batch_size=2)
    with pytest.raises(ArgumentError, match="epoch=-1"):
        recording.loader("0", batch_size=2).set_epoch(-1)
    reduced = recorder("0", "3").collect(batches(3), reduce={"0": Mean()})
    with pytest.raises(ArgumentError, match=r"no rows of 1-1 .*reduce="):
        reduced.loader("0", batch_size=2)
    assert type(next(iter(reduced.loader("*", batch_size=2)))) is Tensor
    nothing = recorder("0").collect(batches(3), store=None, reduce=Mean())
    with pytest.raises(ArgumentError, match="no samples"):
        nothing.loader(batch_size=2)


def test_a_list_of_indices_reads_each_block_once(tmp_path, monkeypatch):
    samples = wide(tmp_path)["0-1"]
    chosen = torch.randperm(2048)[:400]
    opened: list[Any] = []
    plain = tensor_file.TensorFile.copy_into

    def copy_into(self: Any, out: Any, name: str, start: int) -> None:
        opened.append((self.name, start))
        plain(self, out, name, start)

    monkeypatch.setattr(tensor_file.TensorFile, "copy_into", copy_into)
    seen = count_checksums(monkeypatch)
    assert samples[chosen][:, 0].tolist() == chosen.tolist()
    assert sorted(seen) == [1 << 20] * 8
    # Of every chunk in one go.
    assert len(opened) == 4
    assert samples[chosen.tolist()][:, 0].tolist() == chosen.tolist()
    assert samples[[-1, 0, -1]][:, 0].tolist() == [2047, 0, 2047]
    assert samples[range(3, 9, 2)][:, 0].tolist() == [3, 5, 7]
    for beyond in ([2048], [0, -2049]):
        with pytest.raises(IndexError):
            samples[beyond]


def test_rows_far_apart_are_not_read_with_what_is_between(tmp_path, monkeypatch):
    samples = wide(tmp_path)["0-1"]
    seen = count_checksums(monkeypatch)
    assert samples[[2000, 3, 4]][:, 0].tolist() == [2000, 3, 4]
    assert len(seen) == 2


def test_a_data_loader_asks_for_samples_together(tmp_path, monkeypatch):
    samples = wide(tmp_path)["0-1"]
    asked = []
    plain = type(samples).__getitems__
    monkeypatch.setattr(
        type(samples), "__getitems__", lambda self, index: asked.append(index) or plain(self, index)
    )
    batches = list(DataLoader(samples, batch_size=500, shuffle=True))
    assert list(map(len, asked)) == [500, 500, 500, 500, 48]
    assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(2048))


def test_a_batch_is_kept_without_the_others(tmp_path):
    recording = wide(tmp_path)
    for batch in recording.loader("0-1", batch_size=64, shuffle=True, buffer_bytes=2 << 20):
        assert batch.untyped_storage().nbytes() == batch.nbytes
        batch.zero_()
    assert recording["0-1"][:].any(1).sum() >= 2047

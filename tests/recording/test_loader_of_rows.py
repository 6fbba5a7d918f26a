"""A loader of rows that are not samples: what each row is comes along, by the same promises."""

from __future__ import annotations

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.errors import RecordingError
from scio_recorder.stores import Disk
from tests.recording.nets import LoaderMemory
from tests.recording.rows import MANY, NARROW, PADDED, WIDE, Pass, expected, write

NUM_ROWS = len(expected(MANY)["sample"])


def made(store, path, passes=MANY):
    return write(Disk(path / "run", chunk_bytes=500) if store == "disk" else store, passes)


@pytest.fixture(params=["host", "disk"])
def recording(request, tmp_path):
    return made(request.param, tmp_path)


def places(known):
    """Where rows are in the recording, by what is unique of each."""
    wanted = expected(MANY)
    numbers = {
        (int(sample), int(position)): place
        for place, (sample, position) in enumerate(
            zip(wanted["sample"], wanted["position"], strict=True)
        )
    }
    pairs = zip(known["sample"].tolist(), known["position"].tolist(), strict=True)
    return [numbers[pair] for pair in pairs]


@pytest.mark.parametrize(
    ("shuffle", "buffer_bytes", "batch_size"),
    [(True, 1, 16), (True, 900, 16), (True, 1 << 20, 1000), (False, 900, 16)],
)
def test_every_row_comes_once_with_what_it_is(recording, shuffle, buffer_bytes, batch_size):
    loader = recording.loader(
        batch_size=batch_size, shuffle=shuffle, buffer_bytes=buffer_bytes, with_rows=True
    )
    wanted, seen = expected(MANY), []
    assert len(loader) == -(-NUM_ROWS // batch_size)
    for batch, known in loader:
        assert list(batch) == [WIDE, NARROW]
        assert list(known) == ["sample", "position", "token"]
        at = places(known)
        seen += at
        for key, found in {**batch, **known}.items():
            assert found.dtype == wanted[key].dtype
            assert torch.equal(found, wanted[key][at])
    assert sorted(seen) == list(range(NUM_ROWS))
    assert (seen == sorted(seen)) is not shuffle


@pytest.mark.parametrize("buffer_bytes", [900, 1 << 20])
def test_the_order_is_the_same_without_what_rows_are(recording, buffer_bytes):
    options = {"batch_size": 16, "shuffle": True, "buffer_bytes": buffer_bytes}
    without = recording.loader("0", **options)
    with_rows = recording.loader("0", **options, with_rows=True)
    for batch, (other, _) in zip(without, with_rows, strict=True):
        assert torch.equal(batch, other)
    # So a state of the one serves the other.
    state = without.state_dict()
    with_rows.load_state_dict({**state, "batches": 2})
    rest = [batch for batch, _ in with_rows]
    assert all(map(torch.equal, rest, list(without)[2:]))


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_state_of_other_rows_is_refused(tmp_path, store):
    # Layers are alike, and what rows are is not.
    first = made(store, tmp_path / "first", [Pass(range(2), [(0, 0), (0, 1), (1, 0)])])
    other = made(store, tmp_path / "other", [Pass(range(2), [(0, 0), (0, 1), (1, 0)])])
    if store == "host":
        other.rows["token"][1] += 1
    state = first.loader("0", batch_size=2).state_dict()
    with pytest.raises(RecordingError, match="of another recording"):
        other.loader("0", batch_size=2).load_state_dict(state)
    first.loader("0", batch_size=2).load_state_dict(state)


def test_samples_are_counted_over_all_ranks(tmp_path):
    for rank in range(2):
        ids = [f"{rank}-{number}" for number in range(6)]
        passes = [Pass(ids, [row for one in PADDED for row in one.rows])]
        write(Disk(tmp_path / "run", rank=rank, world_size=2), passes)
    recording = open_recording(tmp_path / "run")
    for buffer_bytes in (1, 1 << 20):
        loader = recording.loader(
            "0", batch_size=4, shuffle=True, with_rows=True, buffer_bytes=buffer_bytes
        )
        for batch, known in loader:
            number = 100 * (known["sample"] % 6) + known["position"]
            assert torch.equal(batch[:, 0], number.float())
        samples = torch.cat([known["sample"] for _, known in loader])
        assert torch.equal(samples.sort().values, recording.rows["sample"][:])


def test_memory_is_bounded_by_the_buffer(tmp_path, monkeypatch):
    buffer_bytes = 20_000
    rows = [(sample, at) for sample in range(200) for at in range(5)]
    recording = made("disk", tmp_path, [Pass(range(200), rows)])
    held = LoaderMemory(monkeypatch)
    loader = recording.loader(
        "1", batch_size=8, shuffle=True, with_rows=True, buffer_bytes=buffer_bytes
    )
    assert sum(len(batch) for batch, _ in loader) == 1000
    # Two batches, and a number and a place for each row in the buffer.
    row_bytes = 4 + 8 + 8 + 4
    in_all = held.most * (row_bytes + 16) / row_bytes + 2 * 8 * row_bytes
    assert 0.9 * buffer_bytes < in_all <= buffer_bytes

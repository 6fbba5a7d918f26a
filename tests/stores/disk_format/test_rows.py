"""Rows that are not samples: columns that say what each is, kept with every promise of samples."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder.stores.disk_format.description import SAMPLE, holds_recording, row_column
from scio_recorder.stores.disk_format.medium import ContentError, FormatError
from scio_recorder.stores.disk_format.reader import KeptBatches, Packed, RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.by_the_book import read_kept, read_rows, read_run, rewrite, unseal
from tests.stores.disk_format.runs import calls_of, killed_at
from tests.stores.disk_format.test_faults import outcomes

LAYERS = {
    "1-1": TensorInfo((3,), torch.float32),
    "nothing": TensorInfo((0,), torch.bfloat16),
}
ROWS = {
    "sample": TensorInfo((), torch.int64),
    "position": TensorInfo((), torch.int64),
    "is_bold": TensorInfo((), torch.bool),
}
# Of each commit the new samples, and (sample, position) of its rows: the second goes on with
# earlier samples, the third has samples without rows, the fourth has nothing but a state.
COMMITS: tuple[tuple[range, tuple[tuple[int, int], ...]], ...] = (
    (range(3), ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))),
    (range(3, 3), ((0, 2), (1, 1), (2, 3))),
    (range(3, 5), ()),
    (range(5, 5), ()),
    (range(5, 6), ((5, 0), (0, 3))),
)
NUM_ROWS = 11
FIRST = "chunk-00000-00000000.safetensors"


def tensors_of(rows: tuple[tuple[int, int], ...]) -> dict[str, torch.Tensor]:
    numbers = [10 * sample + position for sample, position in rows]
    pairs = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    return {
        "1-1": torch.tensor([[i, -i, i / 8] for i in numbers]).view(-1, 3),
        "nothing": torch.empty(len(rows), 0, dtype=torch.bfloat16),
        SAMPLE: pairs[:, 0].contiguous(),
        row_column("position"): pairs[:, 1],
        row_column("is_bold"): pairs[:, 1] % 2 == 1,
    }


def expected(commits: int = len(COMMITS)) -> tuple[int, dict[str, torch.Tensor]]:
    """Return how many samples and which rows there are after so many commits."""
    made = COMMITS[:commits]
    rows = tuple(row for _, some in made for row in some)
    return sum(len(ids) for ids, _ in made), tensors_of(rows)


def begin(path: Path, **options: Any) -> RunWriter:
    return RunWriter.create(path, layers=LAYERS, header={}, rows=ROWS, **options)


def write(path: Path, *, finish: bool = True, commits: int = len(COMMITS)) -> None:
    """Write what is not there yet; the state says how many commits there were."""
    begun = 0
    if holds_recording(path):
        with RunReader(path) as reader:
            if reader.complete:
                return
            state = reader.read_state()
            begun = 0 if state is None else state.value
    with RunWriter.resume(path) if holds_recording(path) else begin(path) as writer:
        for number in range(begun, commits):
            ids, rows = COMMITS[number]
            state = Packed(number + 1, [])
            writer.append(tensors_of(rows), ids, rows=len(rows), state=state)
        if finish:
            writer.finish()


def check(reader: RunReader, commits: int | None = None) -> int:
    """Compare all that is there with the rule; return after how many commits that is."""
    state = reader.read_state()
    found = 0 if state is None else state.value
    assert commits in (None, found)
    samples, tensors = expected(found)
    assert list(reader.sample_ids) == list(range(samples))
    assert (reader.num_samples, reader.num_rows) == (samples, len(tensors[SAMPLE]))
    assert (reader.layers, reader.rows) == (LAYERS, ROWS)
    for name, wanted in tensors.items():
        assert torch.equal(reader.read(name, 0, reader.num_rows), wanted), name
        for start in range(reader.num_rows):
            assert torch.equal(reader.read(name, start, reader.num_rows), wanted[start:])
    return found


def verified(path: Path, commits: int | None = None) -> int:
    with RunReader(path, verify=True) as reader:
        return check(reader, commits)


def test_round_trip_over_attempts(tmp_path):
    for commits in range(len(COMMITS)):
        write(tmp_path / "run", finish=False, commits=commits)
        verified(tmp_path / "run", commits)
    write(tmp_path / "run")
    verified(tmp_path / "run", len(COMMITS))
    with RunReader(tmp_path / "run") as reader, pytest.raises(IndexError, match="rows 0 to 12"):
        reader.read("1-1", 0, NUM_ROWS + 1)


def test_another_program_reads_it(tmp_path):
    write(tmp_path / "run")
    samples, wanted = expected()
    ids, layers = read_run(tmp_path / "run")
    assert ids == list(range(samples))
    assert torch.equal(layers["1-1"], wanted["1-1"])
    rows = read_rows(tmp_path / "run")
    assert list(rows) == list(ROWS)
    for name, column in rows.items():
        assert torch.equal(column, wanted[row_column(name)])


def test_ranks_are_joined_and_samples_counted_on(tmp_path):
    # The ranks are filled in another order than that in which they are read.
    for rank in (1, 2, 0):
        with begin(tmp_path / "run", world_size=3, rank=rank) as writer:
            for ids, rows in COMMITS[: 2 + rank]:
                own = [100 * rank + number for number in ids]
                writer.append(tensors_of(rows), own, rows=len(rows))
            writer.finish()
    wanted: list[int] = []
    ids: list[int] = []
    for rank in range(3):
        samples, tensors = expected(2 + rank)
        wanted += (tensors[SAMPLE] + len(ids)).tolist()
        ids += [100 * rank + number for number in range(samples)]
    with RunReader(tmp_path / "run", verify=True) as reader:
        assert list(reader.sample_ids) == ids
        assert reader.read(SAMPLE, 0, reader.num_rows).tolist() == wanted
        assert reader.read(SAMPLE, 10, 12).tolist() == wanted[10:12]
    assert read_rows(tmp_path / "run")["sample"].tolist() == wanted
    with RunReader(tmp_path / "run", rank=2) as part:
        assert torch.equal(part.read(SAMPLE, 0, part.num_rows), expected(4)[1][SAMPLE])


@pytest.mark.campaign
def test_killed_at_every_system_call(tmp_path):
    total = len(calls_of(lambda: write(tmp_path / "count")))
    assert total > 60
    for target in range(0, total, 3):
        path = tmp_path / str(target)
        killed_at(target, lambda reports, path=path: write(path))
        if holds_recording(path):
            verified(path)
        write(path)
        verified(path, len(COMMITS))
        shutil.rmtree(path)


def test_rows_samples_and_state_are_all_there_or_none(tmp_path):
    assert outcomes(tmp_path, write, verified) == set(range(len(COMMITS) + 1))


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        (lambda chunk: None, 5, r"layer 1-1 is .*6, 3.* not .*5, 3"),
        (lambda chunk: None, None, "rows=None"),
        (lambda chunk: chunk.pop(SAMPLE), 6, "layer @sample is missing"),
        (lambda chunk: chunk[SAMPLE].add_(1), 6, "of samples other than the 3 samples"),
        (lambda chunk: chunk[SAMPLE].sub_(1), 6, "of samples other than the 3 samples"),
        (lambda chunk: chunk.update({"@more": chunk[SAMPLE]}), 6, "layer @more is .* not one of"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_writer_usable(tmp_path, change, rows, message):
    chunk = tensors_of(COMMITS[0][1])
    change(chunk)
    with begin(tmp_path / "run") as writer:
        with pytest.raises(ContentError, match=message):
            writer.append(chunk, range(3), rows=rows)
        writer.append(tensors_of(COMMITS[0][1]), range(3), rows=6, state=Packed(1, []))
    verified(tmp_path / "run", 1)


@pytest.mark.parametrize(
    "rows",
    [{}, {"position": ROWS["position"]}, {"sample": TensorInfo((), torch.int32)}],
    ids=["none", "without sample", "narrow"],
)
def test_without_a_number_of_the_sample_nothing_is_created(tmp_path, rows):
    with pytest.raises(ContentError, match="the first column of rows is not sample"):
        RunWriter.create(tmp_path / "run", layers=LAYERS, header={}, rows=rows)
    assert not holds_recording(tmp_path / "run")


def test_rows_are_counted_where_there_are_no_layers(tmp_path):
    with RunWriter.create(tmp_path / "run", layers={}, header={}, rows={}) as writer:
        writer.append({}, range(2), rows=7)
        writer.append({}, [], rows=3)
    with RunReader(tmp_path / "run") as reader:
        assert (reader.num_samples, reader.num_rows, reader.rows) == (2, 10, {})


def test_batches_are_kept_by_samples(tmp_path):
    ids, rows = COMMITS[0]
    kept = KeptBatches([2, 1], ["a", {"tensor": 0}], [torch.ones(2)])
    with begin(tmp_path / "run") as writer:
        writer.append(tensors_of(rows), ids, rows=len(rows), kept=kept)
        writer.finish()
    assert [count for count, _, _ in read_kept(tmp_path / "run")] == [2, 1]
    with RunReader(tmp_path / "run") as reader:
        assert reader.kept.rows == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(version=2), "not a scio-recording of version"),
        (lambda said: said.update(rows=None), "not a scio-recording of version"),
        (lambda said: said["rows"].pop(0), "the first column of rows is not sample"),
        (lambda said: said["rows"].append(said["rows"][1]), "listed twice"),
        (lambda said: said.update(rows=7), "not a list|damaged"),
        (lambda said: said["layers"].append(["@a", {"dtype": "int8", "shape": []}]), "# or @"),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(tmp_path, change, message):
    write(tmp_path / "run", finish=False)
    rewrite(tmp_path / "run" / "recording.safetensors", change)
    with pytest.raises(FormatError, match=message):
        RunReader(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(rows=None), "are not counted as the recording's are"),
        (lambda said: said.pop("rows"), "are not counted as the recording's are"),
        (lambda said: said.update(rows=7), "are not those of the recording's layers"),
        (lambda said: said.update(rows=-6), "-6 rows"),
        (lambda said: said.update(rows=True), "damaged"),
        (lambda said: said.update(rows=1 << 62), "rows"),
    ],
)
def test_commits_that_contradict_themselves_are_refused(tmp_path, change, message):
    write(tmp_path / "run", finish=False)
    rewrite(tmp_path / "run" / FIRST, change)
    with pytest.raises(FormatError, match=message):
        RunReader(tmp_path / "run")


@pytest.mark.parametrize("value", [-1, 3, 1 << 62])
def test_rows_of_samples_that_are_not_there_are_damage(tmp_path, value):
    class Trusting(RunWriter):
        """Writes whatever it is given."""

        def _checked(self, tensors: Any, samples: int, rows: int | None) -> Any:
            return dict(tensors)

    chunk = tensors_of(COMMITS[0][1])
    chunk[SAMPLE][4] = value
    with Trusting.create(tmp_path / "run", layers=LAYERS, header={}, rows=ROWS) as writer:
        writer.append(chunk, range(3), rows=6)
    with RunReader(tmp_path / "run") as reader:
        assert reader.read(SAMPLE, 0, 4).tolist() == [0, 0, 1, 2]
        assert torch.equal(reader.read("1-1", 0, 6), chunk["1-1"])
        with pytest.raises(FormatError, match="rows of samples that don't exist yet"):
            reader.read(SAMPLE, 0, 6)


def test_recordings_of_before_are_read_and_gone_on_with(tmp_path):
    layers = {"x": TensorInfo((), torch.int64)}
    with RunWriter.create(tmp_path / "run", layers=layers, header={}) as writer:
        writer.append({"x": torch.arange(3)}, range(3))
    rewrite(tmp_path / "run" / "recording.safetensors", lambda said: said.pop("rows"))
    rewrite(tmp_path / "run" / FIRST, lambda said: said.pop("rows"))
    assert unseal((tmp_path / "run" / "recording.safetensors").read_bytes())["version"] == 2
    with RunWriter.resume(tmp_path / "run") as writer:
        with pytest.raises(ContentError, match="rows=2"):
            writer.append({"x": torch.arange(2)}, range(3, 5), rows=2)
        writer.append({"x": torch.arange(2)}, range(3, 5))
        writer.finish()
    with RunReader(tmp_path / "run", verify=True) as reader:
        assert reader.rows is None
        assert reader.num_rows == reader.num_samples == 5
        assert reader.read("x", 0, 5).tolist() == [0, 1, 2, 0, 1]

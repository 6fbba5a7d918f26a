"""What is kept of whole batches: with the samples or not at all, read one batch at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder.stores.disk_format.medium import ContentError, FormatError
from scio_recorder.stores.disk_format.reader import KeptBatches, Packed, RunReader
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.by_the_book import put_together, read_kept, read_run, take_apart
from tests.stores.disk_format.runs import CHUNKS, HEADER, LAYERS, rows
from tests.stores.disk_format.test_faults import outcomes

# Two batches a chunk, the second of the last chunk without samples.
ROWS = ((2, 1), (1, 1), (4, 0))


def kept(chunk: int) -> KeptBatches:
    shared = torch.full((3,), chunk, dtype=torch.float16)
    own = [torch.arange(chunk + 1), torch.ones(0, 2, dtype=torch.bool)]
    values: list[Any] = [{"shared": 0, "own": 1, "chunk": chunk}, [{"shared": 0}, 2, "é\n"]]
    return KeptBatches(ROWS[chunk], values, [shared, *own])


def write(path: Path, *, chunks: range = range(3), finish: bool = True) -> None:
    begun = (
        RunWriter.resume(path)
        if chunks.start
        else RunWriter.create(path, layers=LAYERS, header=HEADER)
    )
    with begun as writer:
        for chunk in chunks:
            ids = range(*CHUNKS[chunk])
            state = Packed({"count": ids.stop}, [])
            writer.append(rows(*CHUNKS[chunk]), ids, state=state, kept=kept(chunk))
        if finish:
            writer.finish()


def check(reader: RunReader, chunks: int = 3) -> None:
    assert reader.kept.rows == [count for some in ROWS[:chunks] for count in some]
    assert reader.num_samples == sum(reader.kept.rows)
    for chunk in reversed(range(chunks)):
        given = kept(chunk)
        for number, value in enumerate(given.values):
            found, tensor = reader.kept.read(2 * chunk + number)
            assert found == value
            for position, wanted in enumerate(given.tensors):
                assert tensor(position).dtype == wanted.dtype
                assert torch.equal(tensor(position), wanted)


def test_round_trip_over_attempts(tmp_path: Path) -> None:
    write(tmp_path / "run", chunks=range(1), finish=False)
    with RunReader(tmp_path / "run") as reader:
        check(reader, 1)
    write(tmp_path / "run", chunks=range(1, 3))
    with RunReader(tmp_path / "run", verify=True) as reader:
        check(reader)
        with pytest.raises(IndexError):
            reader.kept.read(6)


def test_another_program_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "run")
    ids, samples = read_run(tmp_path / "run")
    assert ids == list(range(9))
    assert all(len(tensor) == 9 for tensor in samples.values())
    batches = read_kept(tmp_path / "run")
    assert [count for count, _, _ in batches] == [2, 1, 1, 1, 4, 0]
    for number, (_, value, tensors) in enumerate(batches):
        given = kept(number // 2)
        assert value == given.values[number % 2]
        assert all(torch.equal(*pair) for pair in zip(tensors, given.tensors, strict=True))


def test_without_layers(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", layers={}, header={}) as writer:
        writer.append({}, range(3), kept=kept(0))
        writer.finish()
    with RunReader(tmp_path / "run", verify=True) as reader:
        check(reader, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (KeptBatches([1], [0], []), r"\[1\] samples are kept with 3"),
        (KeptBatches([3], [0, 1], []), "are kept with 3 samples"),
        (KeptBatches([3], [{"a": float("nan")}], []), "not JSON compliant"),
        (KeptBatches([3], [object()], []), "not JSON serializable"),
        (KeptBatches([3], [0], [torch.ones(2).to_sparse()]), "plain memory"),
        (KeptBatches([3], [eval("[" * 70 + "]" * 70)], []), "deeper than 64"),
    ],
    ids=["rows", "values", "number", "object", "tensor", "depth"],
)
def test_what_is_refused_leaves_the_writer_usable(
    tmp_path: Path, given: KeptBatches, message: str
) -> None:
    with RunWriter.create(tmp_path / "run", layers=LAYERS, header=HEADER) as writer:
        with pytest.raises(ContentError, match=message):
            writer.append(rows(0, 3), range(3), kept=given)
        assert writer.durable == 0
        writer.append(rows(0, 3), range(3), kept=kept(0))
        writer.finish()
    with RunReader(tmp_path / "run", verify=True) as reader:
        check(reader, 1)


def test_with_some_chunks_only_is_damage(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", layers=LAYERS, header=HEADER) as writer:
        writer.append(rows(0, 3), range(3), kept=kept(0))
        writer.append(rows(3, 5), range(3, 5))
        writer.finish()
    with pytest.raises(FormatError, match="of some batches and not of others"):
        RunReader(tmp_path / "run")


def test_samples_and_what_is_kept_of_them_are_both_there_or_both_not(tmp_path: Path) -> None:
    def verified(path: Path) -> int:
        with RunReader(path, verify=True) as reader:
            chunks = len(reader.kept.rows) // 2
            check(reader, chunks)
            return chunks

    assert outcomes(tmp_path, write, verified) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.update(batches=[2, 2]),
        lambda content: content.update(batches=[4, -1]),
        lambda content: content["tensors"][-1][1].update(dtype="int8"),
        lambda content: content["tensors"][-1].__setitem__(0, "#9"),
        lambda content: content.update(batches=None),
    ],
    ids=["rows", "sign", "dtype", "name", "all"],
)
def test_commits_that_contradict_themselves_are_refused(
    tmp_path: Path, spoil: Callable[[Any], None]
) -> None:
    write(tmp_path / "run", chunks=range(1), finish=False)
    file = tmp_path / "run" / "chunk-00000-00000000.safetensors"
    parts = take_apart(file.read_bytes())
    content = json.loads(json.dumps(parts.content))
    spoil(content)
    # Its entries say the same, so that nothing but the rule is broken.
    names = [name for name, _ in parts.content["tensors"]]
    renamed = dict(zip(names, content["tensors"], strict=True))
    kinds = {"int8": "I8"}
    entries = {
        renamed[name][0]: {**entry, "dtype": kinds.get(renamed[name][1]["dtype"], entry["dtype"])}
        for name, entry in parts.entries.items()
    }
    file.write_bytes(put_together(parts._replace(content=content, entries=entries)))
    with pytest.raises(FormatError, match=r"is damaged: (a part of what is kept|batches)"):
        RunReader(tmp_path / "run")

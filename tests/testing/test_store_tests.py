"""Each of these faults of a store makes `StoreTests` fail, and a store without one passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from scio_recorder.stores import Column, Disk, Held, Store, StoreWriter
from scio_recorder.stores.disk_format.reader import SampleIds
from scio_recorder.stores.memory import HostBuffer, wait_for
from scio_recorder.testing import StoreTests
from tests.testing.failures import first_failure


class Shelves(Store):
    """Somebody's own store, which keeps each batch by itself."""

    def __init__(self, writer: type[ShelfWriter] | None = None) -> None:
        self._writer = ShelfWriter if writer is None else writer

    def open(self, job: Any) -> StoreWriter:
        return self._writer(job)


class ShelfWriter(StoreWriter):
    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job = job
        self.shelves: list[dict[Any, torch.Tensor]] = []

    def column(self, key: Any, spec: Any, first: torch.Tensor) -> Column:
        self.columns[key] = Column(spec, HostBuffer(), len(first))
        self.devices.add(first.device)
        return self.columns[key]

    def on_commit(self, ids: Any, state: Any) -> None:
        wait_for(self.devices)
        self.shelves.append({key: self.taken(column) for key, column in self.columns.items()})
        self.start = 0

    def taken(self, column: Column) -> torch.Tensor:
        return column.array[: self.start].clone()

    def finish(self, state: Any, *, is_complete: bool = True) -> Held:
        arrays = {key: torch.cat([one[key] for one in self.shelves]) for key in self.columns}
        return self.held(arrays, self.job.architecture, is_complete=is_complete)

    def abandon(self, state: Any) -> None:
        self.shelves.clear()


class LosesLastChunk(ShelfWriter):
    def finish(self, *args: Any, **kwargs: Any) -> Held:
        if len(self.shelves) > 1:
            del self.shelves[-1]
        return super().finish(*args, **kwargs)


class NotingColumn(Column):
    __slots__ = ("used",)

    def place(self, start: int, rows: int) -> torch.Tensor:
        self.used = max(getattr(self, "used", 0), start + rows)
        return super().place(start, rows)


class TakesRowsThatDoNotCount(ShelfWriter):
    """The commit is not atomic: what a failed pass has written is taken with the next one."""

    def column(self, key: Any, spec: Any, first: torch.Tensor) -> Column:
        super().column(key, spec, first)
        self.columns[key] = NotingColumn(spec, HostBuffer(), len(first))
        return self.columns[key]

    def taken(self, column: Any) -> torch.Tensor:
        taken = column.array[: column.used].clone()
        column.used = 0
        return taken


class KeepsReferences(ShelfWriter):
    def taken(self, column: Column) -> torch.Tensor:
        return column.array[: self.start]


class ReversesBatches(ShelfWriter):
    def finish(self, *args: Any, **kwargs: Any) -> Held:
        self.shelves.reverse()
        return super().finish(*args, **kwargs)


class ReversesRows(ShelfWriter):
    def taken(self, column: Column) -> torch.Tensor:
        return super().taken(column).flip(0)


class ChangesDtypes(ShelfWriter):
    def taken(self, column: Column) -> torch.Tensor:
        taken = super().taken(column)
        return taken.float() if taken.dtype == torch.bfloat16 else taken


class RoundsToBfloat16(ShelfWriter):
    def taken(self, column: Column) -> torch.Tensor:
        taken = super().taken(column)
        return taken.bfloat16().float() if taken.dtype == torch.float32 else taken


class LosesIds(ShelfWriter):
    def finish(self, *args: Any, **kwargs: Any) -> Held:
        held = super().finish(*args, **kwargs)
        return dataclasses.replace(held, sample_ids=type(held.sample_ids)())


class CountsIds(ShelfWriter):
    def on_commit(self, ids: Any, state: Any) -> None:
        super().on_commit(ids, state)
        count = len(self.sample_ids)
        self.sample_ids = type(self.sample_ids)()
        self.sample_ids.add(range(count))


class DoesNotWait(ShelfWriter):
    def on_commit(self, ids: Any, state: Any) -> None:
        self.shelves.append({key: self.taken(column) for key, column in self.columns.items()})
        self.start = 0


class NotesNoDevice(ShelfWriter):
    def column(self, key: Any, spec: Any, first: torch.Tensor) -> Column:
        column = super().column(key, spec, first)
        self.devices.clear()
        return column


class LosesInputs(ShelfWriter):
    def commit(self, ids: Any, state: Any, calls: Any = None, **kwargs: Any) -> None:
        super().commit(ids, state, None, **kwargs)


class LosesFactsAboutRows(ShelfWriter):
    def finish(self, *args: Any, **kwargs: Any) -> Held:
        held = super().finish(*args, **kwargs)
        held.rows = {name: torch.zeros_like(facts) for name, facts in held.rows.items()}
        return held


class AlwaysSaysComplete(ShelfWriter):
    def finish(self, state: Any, *, is_complete: bool = True) -> Held:
        return super().finish(state)


class SharesMemory(ShelfWriter):
    """Each job writes into the memory of the one before, which is part of its recording."""

    memory: dict[Any, torch.Tensor]

    def finish(self, *args: Any, **kwargs: Any) -> Held:
        held = super().finish(*args, **kwargs)
        shared = vars(type(self)).get("memory", {})
        for label, rows in held.values.items():
            if label in shared and shared[label].shape[1:] == rows.shape[1:]:
                shared[label][: len(rows)] = rows[: len(shared[label])]
        type(self).memory = dict(held.values)
        return held


class ForgetsOnResuming(Disk):
    """Takes samples again that it has."""

    def open(self, job: Any) -> StoreWriter:
        writer = super().open(job)
        if job.resume:
            writer.sample_ids = SampleIds()
        return writer


class ShelfTests(StoreTests):
    writer: type[ShelfWriter] = ShelfWriter

    def make_store(self, path: Any) -> Store:
        return Shelves(self.writer)


class TestShelves(ShelfTests):
    pass


@pytest.mark.parametrize("writer", ShelfWriter.__subclasses__())
def test_a_fault_of_a_writer_is_found(writer, tmp_path):
    tests = ShelfTests()
    tests.writer = writer
    assert first_failure(tests, tmp_path)


def test_a_resume_that_forgets_is_found(tmp_path):
    class Tests(StoreTests):
        def make_store(self, path):
            return ForgetsOnResuming(path / "run")

    assert first_failure(Tests(), tmp_path) == "test_resuming"

"""Collecting tokens in processes that are killed, in several at once, and on disks that fail."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder import Tokens, open_recording
from scio_recorder.recording import Recording
from scio_recorder.reductions import Max, Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.files import holds_recording
from tests.recording.campaign import finish, killed_at
from tests.recording.tables import (
    assert_rows,
    batches,
    columns,
    reader,
    run_all,
    seen,
    tokens,
)
from tests.stores.disk_format.runs import calls_of
from tests.stores.disk_format.test_faults import failing, problem_of

ROOT = Path(__file__).parents[2]
LENGTHS = ((3, 1, 5), (2, 2), (4,))
# One call of every so many is tried.
STEP = 5


class TokensJob:
    """Two layers of padded texts that are stored, and one that is reduced."""

    def __init__(self, *lengths: Sequence[int]) -> None:
        self.rnet, self.data = reader("embed", "act", "mix"), batches(*lengths)
        self.reduce = {"act": [Max(), Mean()]}
        clean = seen(self.rnet.net, ["embed", "act", "mix"], run_all(self.rnet.net, self.data))
        self.tables = {name: tokens(values, self.data) for name, values in clean.items()}

    def collect(self, path: Path, **options: Any) -> Recording:
        # A chunk holds one batch.
        store = Disk(path, chunk_bytes=1)
        options = {"rows": Tokens(), "reduce": self.reduce, "resume": True, **options}
        return self.rnet.collect(self.data, store=store, progress=False, **options)

    def check(self, path: Path, *, is_complete: bool = False) -> int:
        """Compare all that is durable with what plain hooks gave; return how many samples."""
        if not holds_recording(path):
            assert not is_complete
            return 0
        found = open_recording(path, verify=True)
        count = found.num_samples
        assert found.sample_ids == list(range(count))
        if not count:
            return 0
        samples = self.data[: len([one for one in ends(self.data) if one <= count])]
        assert sum(len(batch["input_ids"]) for batch in samples) == count
        assert_rows(found, columns(samples))
        for name in ("embed", "mix"):
            assert torch.equal(found[name][:], self.tables[name][: found.num_rows])
            lengths = [len(one) for one in found.by_sample(name)]
            assert lengths == [int(n) for one in samples for n in one["attention_mask"].sum(1)]
        if is_complete:
            assert found.complete
            assert found.num_rows == len(self.tables["embed"])
            assert torch.equal(found["act"][0], self.tables["act"].amax(0))
            torch.testing.assert_close(found["act"][1], self.tables["act"].mean(0))
        return count


def ends(data: Sequence[dict[str, torch.Tensor]]) -> list[int]:
    counts = [len(batch["input_ids"]) for batch in data]
    return [sum(counts[: number + 1]) for number in range(len(counts))]


@pytest.mark.campaign
def test_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.recording.test_kills_of_rows", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def killed_at_some_calls(folder: Path) -> None:
    job: Any = TokensJob(*LENGTHS)
    total = len(calls_of(lambda: job.collect(folder / "clean")))
    counts = set()
    for target in range(0, total, STEP):
        path = folder / str(target)
        counts.add(killed_at(job, path, target))
        finish(job, path)
    assert counts == {0, 3, 5, 6}, counts


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("code", "from_then_on"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC"]
)
def test_any_call_failing(code: int, from_then_on: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(system, "fsync", lambda descriptor: os.fstat(descriptor) and None)
    job = TokensJob(*LENGTHS)
    total = len(calls_of(lambda: job.collect(tmp_path / "clean")))
    raised = 0
    for target in range(0, total, STEP):
        path = tmp_path / str(target)
        with failing(target, code, from_then_on=from_then_on):
            problem = problem_of(lambda path=path: job.collect(path))
        raised += problem is not None
        del problem
        job.check(path)
        job.collect(path)
        job.check(path, is_complete=True)
    assert raised > total // STEP // 2


def main() -> None:
    torch.set_num_threads(1)
    # No power is lost here, and waiting for the disk would take minutes.
    system.fsync = lambda descriptor: os.fstat(descriptor) and None
    killed_at_some_calls(Path(sys.argv[1]))


if __name__ == "__main__":
    main()

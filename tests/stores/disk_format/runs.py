"""Small recordings whose every value follows from its sample id, and what must hold of them."""

from __future__ import annotations

import gc
import itertools
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch

from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.disk_format.description import holds_recording
from scio_recorder.stores.disk_format.reader import Packed, RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter

LAYERS = {
    "1-1": TensorInfo((3,), torch.float32),
    "2-1": TensorInfo((2, 2), torch.bfloat16),
    "label": TensorInfo((), torch.int64),
    "nothing": TensorInfo((0, 4), torch.float16),
}
HEADER = {"fingerprint": "abc", "settings": {"every": 1, "scale": 0.1}}
CHUNKS = ((0, 3), (3, 5), (5, 9))
NUM_SAMPLES = 9
SYSTEM_CALLS = {"begin_sync", "fsync", "rename_new"}.union(
    name for name, call in vars(system).items() if isinstance(call, BuiltinFunctionType)
)


def rows(start: int, stop: int) -> dict[str, torch.Tensor]:
    numbers = range(start, stop)
    return {
        "1-1": torch.tensor([[i, i + 0.25, -i] for i in numbers]).view(-1, 3),
        "2-1": torch.tensor([[[i, 2 * i], [3 * i, 4 * i]] for i in numbers])
        .view(-1, 2, 2)
        .bfloat16(),
        "label": torch.tensor([i * i for i in numbers], dtype=torch.int64),
        "nothing": torch.empty(stop - start, 0, 4, dtype=torch.float16),
    }


def state_after(count: int) -> Packed:
    """What a running sum over the first ``count`` samples would commit."""
    total = torch.tensor(sum(range(count)), dtype=torch.float64)
    return Packed({"total": {"tensor": 0}, "count": count, "note": {"seen": [count]}}, [total])


def start(path: Path) -> RunWriter:
    if holds_recording(path):
        return RunWriter.resume(path)
    return RunWriter.create(path, layers=LAYERS, header=HEADER)


def write_rest(path: Path, durable: list[int], *, finish: bool = True, step: int = 0) -> None:
    """Write what is not durable yet; ``durable`` receives each count that the writer reports.

    With a ``step`` there is no end to it.
    """
    with start(path) as writer:
        durable.append(writer.durable)
        bounds = ((i, i + step) for i in itertools.count(0, step)) if step else CHUNKS
        for first, last in bounds:
            if last > writer.durable:
                begin = max(first, writer.durable)
                ids = range(begin, last)
                writer.append(rows(begin, last), ids, state=state_after(last))
                durable.append(writer.durable)
        if finish:
            writer.finish()


def make_run(path: Path, *, finish: bool = True) -> Path:
    write_rest(path, [], finish=finish)
    return path


def check_contents(path: Path, *, with_state: bool = True) -> int:
    """Compare everything that the recording holds with the rule; return how many samples."""
    with RunReader(path) as reader:
        count = reader.num_samples
        assert list(reader.sample_ids) == list(range(count))
        assert reader.header == HEADER
        for name, expected in rows(0, count).items():
            found = reader.read(name, 0, count)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        if count and with_state:
            assert reader.read_state() == state_after(count)
        return count


def check_complete(path: Path) -> None:
    with RunReader(path, verify=True) as reader:
        assert reader.complete
    assert check_contents(path) == NUM_SAMPLES


def finish_and_check(path: Path) -> None:
    """Resume, if there is anything left to write, and find every sample once."""
    if not holds_recording(path) or not is_complete(path):
        write_rest(path, [])
    check_complete(path)


def is_complete(path: Path) -> bool:
    with RunReader(path) as reader:
        return reader.complete


@contextmanager
def intercepted(
    act: Callable[[int, str, Callable[[], Any], tuple[Any, ...]], Any],
) -> Iterator[None]:
    """Hand every system call of the disk format to ``act(number, name, call, arguments)``.

    Those of the block alone: what earlier tests left behind is not closed meanwhile.
    """
    numbers = itertools.count()

    def stand_in(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            def go_on() -> Any:
                return original(*arguments, **keywords)

            return act(next(numbers), name, go_on, arguments)

        return call

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in SYSTEM_CALLS:
                patch.setattr(system, name, stand_in(name, getattr(system, name)))
            yield
    finally:
        if was_enabled:
            gc.enable()


def flip(file: Path, position: int, bits: int = 1) -> None:
    """Change bits of a byte; a negative position counts from the end."""
    with file.open("r+b") as stream:
        stream.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (value,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([value ^ bits]))


def calls_of(work: Callable[[], object]) -> list[str]:
    """Return the system calls that ``work`` makes, in order."""
    names: list[str] = []

    def act(number: int, name: str, go_on: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        names.append(name)
        return go_on()

    with intercepted(act):
        work()
    return names


class Reports(list[int]):
    """Passes every count that is reported durable on to the parent process at once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor

    def append(self, count: int) -> None:
        os.write(self.descriptor, struct.pack("q", count))


def in_child(
    work: Callable[[Reports], object],
    meanwhile: Callable[[int, int], bytes] = lambda child, reading: b"",
) -> tuple[int, int]:
    """Run ``work`` in a forked process; return its last report and its exit status.

    ``meanwhile`` is given the process and a pipe, and returns the reports that it has read.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Forking a process with threads may deadlock in code that takes their locks; the child
        # works on tensors of a few bytes, for which torch starts none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work(Reports(writing))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    reports = meanwhile(child, reading)
    _, status = os.waitpid(child, 0)
    with open(reading, "rb") as stream:
        reports += stream.read()
    durable = struct.unpack("q", reports[-8:])[0] if reports else 0
    return durable, os.waitstatus_to_exitcode(status)


def killed_at(target: int, work: Callable[[Reports], object], *, torn: bool = False) -> int:
    """Run ``work`` in a process that ends at a system call; return its last report.

    If it is to be ``torn`` and the call writes, half is written.
    """

    def act(number: int, name: str, go_on: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if number == target:
            if torn and name == "write":
                os.pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
            os._exit(9)
        return go_on()

    def dying(reports: Reports) -> None:
        with intercepted(act):
            work(reports)

    durable, status = in_child(dying)
    assert status == 9
    return durable

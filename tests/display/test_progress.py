"""The progress bar: what it tells on a terminal, and elsewhere if asked; otherwise it is silent."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from scio_recorder.display import progress
from tests.recording.nets import batches, recorder


class Slow:
    """A loader that gives time to look at the bar."""

    def __init__(self, data: list[Tensor], *, is_known: bool = True) -> None:
        self.data = data
        self.is_known = is_known

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.data:
            time.sleep(0.01)
            yield batch

    def __len__(self) -> int:
        if not self.is_known:
            raise TypeError("no length")
        return len(self.data)


def shown(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> io.StringIO:
    text = io.StringIO()

    def console(**options: Any) -> Console:
        assert options == {"stderr": True}
        return Console(file=text, force_terminal=is_terminal, width=120, color_system=None)

    monkeypatch.setattr(progress, "Console", console)
    return text


@pytest.mark.parametrize("is_known", [True, False])
def test_a_terminal_sees_batches_samples_bytes_and_times(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    text = shown(monkeypatch)
    rnet = recorder("0")
    rnet.collect(Slow(batches(*[50] * 8), is_known=is_known))
    last = text.getvalue().split("\r")[-4:]
    assert any("8/8" if is_known else "8/?" in line for line in last)
    # Of 400 samples with 6 numbers each.
    assert any("9.6 kB" in line for line in last)
    assert any("samples/s" in line for line in last)
    assert any("0:00:00" in line for line in last)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_work_that_counts_no_bytes_shows_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    text = shown(monkeypatch, is_terminal=is_terminal)
    with progress.lines_every(0.0), progress.progress_bar("comparing", 2) as advance:
        advance(3, 0)
        advance(3, 0)
    said = text.getvalue() + capsys.readouterr().err
    assert "2/2" in said
    assert "samples/s" in said
    assert "bytes" not in said


def test_nothing_is_shown_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rnet, data = recorder("0"), batches(3, 2)
    rnet.collect(data)
    text = shown(monkeypatch, is_terminal=False)
    rnet.collect(data)
    assert text.getvalue() == ""
    text = shown(monkeypatch)
    rnet.collect(data, progress=False)
    assert text.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_the_bar_goes_when_a_batch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch)

    def loader() -> Iterator[Tensor]:
        yield from batches(3)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        recorder("0").collect(loader())
    # The cursor is shown again, and the line erased.
    assert "\x1b[?25h" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")


def test_samples_that_were_there_already_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rnet, data = recorder("0"), batches(3, 2, 4)

    def loader() -> Iterator[Tensor]:
        yield from data[:2]
        raise KeyError("broken")

    store = f"disk:{tmp_path / 'run'}"
    with pytest.raises(KeyError):
        rnet.collect(loader(), store=store)
    text = shown(monkeypatch)
    # The first six samples hold five that are durable.
    rnet.collect(torch.cat(data).split(6), store=store, resume=True)
    assert "96 bytes" in text.getvalue()
    assert "216 bytes" not in text.getvalue()


def test_lines_where_they_are_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    data = batches(3, 2)
    with progress.lines_every(0.0):
        recorder("0").collect(data)
        assert "0:" not in capfd.readouterr().out
        with progress.progress_bar("reading", None) as advance:
            advance(0, 2_000_000, 0)
            advance(0, 0)
        read = capfd.readouterr().err.splitlines()
        recorder("0").collect(data)
        collected = capfd.readouterr().err.splitlines()
        recorder("0").collect(data, progress=False)
    recorder("0").collect(data)
    assert capfd.readouterr().err == ""
    assert read[0].startswith("reading 0/?, ")
    assert read[1].startswith("reading 1/?, ")
    assert all(line.endswith("B/s, 2.0 MB") for line in read)
    # Of 3 and 2 samples with 6 numbers each.
    assert collected[0].startswith("collecting batches 1/2, ")
    assert collected[0].endswith(" samples/s, 72 bytes")
    assert collected[1].startswith("collecting batches 2/2, ")
    assert collected[1].endswith(" samples/s, 120 bytes")


def test_lines_count_the_passes_that_others_run(capfd: pytest.CaptureFixture[str]) -> None:
    rnet = recorder("0")
    with progress.lines_every(0.0), rnet.collecting(progress=True):
        for batch in batches(3, 2):
            rnet.net(batch)
    said = capfd.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in said] == [f"collecting passes {n}/?" for n in (1, 2)]


def test_lines_come_no_more_often_than_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.lines_every(10.0), progress.progress_bar("reading", 40) as advance:
        for step in range(1, 41):
            now = float(step)
            advance(5, 0)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"reading {step}/40, 5 samples/s" for step in (10, 20, 30, 40)]


def test_work_goes_on_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(progress.sys, "stderr", Closed())
    with progress.lines_every(0.0):
        recorder("0").collect(batches(3))

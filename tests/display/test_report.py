"""The page of a recording: written whole, complete in itself, also where little can be shown."""

from __future__ import annotations

import errno
import os
import re
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from scio_recorder import Recorder, Recording, open_recording, reductions
from scio_recorder.command_line import main
from scio_recorder.display import figure
from scio_recorder.display.page import asset, write_page
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.recording import statistics
from scio_recorder.recording.statistics import RunningStatistics
from scio_recorder.reductions import plain
from tests.display.examples import hostile_recording, small_recording
from tests.zoo.base import Net


def text(recording: Recording, folder: Path, **options: str) -> str:
    return recording.report(folder / "page.html", **options).read_text(encoding="utf-8")  # type: ignore[arg-type]


def test_nothing_may_be_fetched(tmp_path: Path) -> None:
    html = text(small_recording(), tmp_path)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy[1] == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert html.index("Content-Security-Policy") < html.index("<style")
    assert "://" not in html
    assert not re.search(r"<(img|link|iframe|object|embed|base)\b", html)
    assert set(re.findall(r'href="(.)', html)) == {"#"}


def test_every_link_leads_somewhere(tmp_path: Path) -> None:
    html = text(hostile_recording(), tmp_path)
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', html)) <= set(ids)


def test_counts_of_the_warning(tmp_path: Path) -> None:
    samples = torch.zeros(4, 3)
    samples[0, 0], samples[1] = float("inf"), float("nan")
    html = text(of(samples), tmp_path)
    assert "3 NaN and 1 infinite values" in html
    assert "Look at this first" not in text(of(torch.zeros(4, 3)), tmp_path)
    samples[1] = 0.0
    assert ": 1 infinite value</li>" in text(of(samples), tmp_path)


def of(samples: torch.Tensor, **options: object) -> Recording:
    rnet = Recorder(nn.Identity(), input_data=samples[:1])
    rnet.record("0-1")
    return rnet.collect([samples], progress=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "samples",
    [
        torch.full((3, 2), float("nan")),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.ones(3, 2, dtype=torch.bool),
        torch.ones(3, 2, dtype=torch.complex64),
        torch.ones(3),
        torch.ones(3, 0),
        torch.ones(1, 2),
    ],
    ids=["nans", "integers", "booleans", "complex", "0-d", "no values", "one sample"],
)
def test_whatever_was_recorded(samples: torch.Tensor, tmp_path: Path) -> None:
    html = text(of(samples), tmp_path)
    assert '<tr id="layer-0-1"' in html
    assert str(samples.dtype).removeprefix("torch.") in html


def test_no_samples(tmp_path: Path) -> None:
    recording = of(torch.ones(0, 2))
    assert recording.num_samples == 0
    recording.save(tmp_path / "run")
    for empty in (recording, open_recording(tmp_path / "run")):
        html = text(empty, tmp_path)
        assert "There are no samples." in html
        assert "There are no values to draw." in html
        assert '<tr id="layer-0-1"' in html


def test_only_reductions(tmp_path: Path) -> None:
    samples = torch.randn(6, 3)
    html = text(of(samples, reduce=[reductions.Histogram(4), reductions.Covariance()]), tmp_path)
    assert "Histogram, Covariance" in html
    assert "Covariance is not drawn" in html
    assert html.count("<figure") == 1
    assert "<dt>Layers with values</dt><dd>none</dd>" in html


def test_results_of_reductions_that_are_not_numbers_stand_first(tmp_path: Path) -> None:
    samples = torch.ones(4, 3)
    samples[1, 1] = float("nan")
    html = text(of(samples, reduce=[reductions.Mean(), reductions.Moments()]), tmp_path)
    warning = html[html.index('class="warning"') : html.index('id="statistics"')]
    assert 'href="#layer-0-1"' in warning
    assert "Mean: 1 of 3 numbers NaN; Moments: 1 of 3 numbers NaN" in warning
    assert html.count('<span class="alarm">nan</span>') == 1
    # The spread of a single value is not known, which is no cause for alarm.
    single = text(of(torch.ones(1, 1)), tmp_path)
    assert ">nan<" in single
    assert 'class="alarm"' not in single
    assert "Look at this first" not in single


def test_what_was_interrupted_says_so(tmp_path: Path) -> None:
    rnet = Recorder(nn.Identity(), input_size=(1, 2))
    rnet.record("0-1")

    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(3, 2)
        raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError, match="power"):
        rnet.collect(batches(), store=f"disk:{tmp_path}/run", progress=False)
    recording = open_recording(tmp_path / "run")
    assert not recording.complete
    assert "The recording was interrupted" in text(recording, tmp_path)


def test_pages_of_memory_and_disk_show_the_same_numbers(tmp_path: Path) -> None:
    recording = small_recording()
    recording.save(tmp_path / "run")
    rows = re.compile(r"<tr id=.*?</tr>", re.DOTALL)
    ours = rows.findall(text(recording, tmp_path))
    assert ours == rows.findall(text(open_recording(tmp_path / "run"), tmp_path))
    assert len(ours) == 4


def test_title_and_type_of_the_net(tmp_path: Path) -> None:
    assert "<h1>Recording of Identity</h1>" in text(of(torch.ones(2, 2)), tmp_path)
    assert "<h1>a &lt;b&gt; &amp; c</h1>" in text(of(torch.ones(2, 2)), tmp_path, title="a <b> & c")


def test_a_page_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")

    def pieces() -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_page(page, pieces())
    assert page.read_text() == "before"
    assert os.listdir(tmp_path) == ["page.html"]
    with page.open() as held:
        write_page(page, ["after"])
        assert held.read() == "before", "whoever reads it goes on with what was there"
    assert page.read_text() == "after"
    assert os.listdir(tmp_path) == ["page.html"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(page.stat().st_mode) == 0o666 & ~mask


def test_a_page_takes_its_place_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"

    def fail(number: int) -> None:
        assert page.read_text() == "first"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_page(page, ["first"])
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordingError, match="No space left"):
        write_page(page, ["second"])
    assert page.read_text() == "first"
    assert os.listdir(tmp_path) == ["page.html"]


def test_where_a_page_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = of(torch.ones(2, 2))
    with pytest.raises(ArgumentError, match="bins=0"):
        recording.report(tmp_path / "page.html", bins=0)
    for path in ("", None, 3, b"page.html", "s3://bucket/page.html", "a\0b.html"):
        with pytest.raises(ArgumentError, match=re.escape(f"report({path!r})") + r".*page\.html"):
            recording.report(path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="title=3"):
        recording.report(tmp_path / "page.html", title=3)  # type: ignore[arg-type]
    # It must be said before hours of reading.
    monkeypatch.setattr("scio_recorder.recording.recording.summarise", None)
    with pytest.raises(RecordingError, match=r"no_such_folder.*No such file.*folder that is there"):
        recording.report(tmp_path / "no_such_folder" / "page.html")
    with pytest.raises(RecordingError, match="Not a directory"):
        recording.report(Path(__file__) / "page.html")
    monkeypatch.chdir(tmp_path)
    folders: dict[str | Path, str]
    folders = {".": "page.html", "..": "../page.html", "/": "/page.html", "new/": "new/page.html"}
    for folder, page in {
        **folders,
        Path("."): "page.html",
        tmp_path: tmp_path / "page.html",
    }.items():
        with pytest.raises(RecordingError, match=f"is a folder: name a file, such as {page}$"):
            recording.report(folder)

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match="pipe is a device, which a page would replace"):
        recording.report("pipe")
    (tmp_path / "pipe").unlink()

    def refuse(path: Path, *options: object, **others: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(RecordingError, match=r"page: Permission denied. Name a file in"):
            recording.report("page")
    assert os.listdir(tmp_path) == []


def test_layers_are_read_with_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for cores which others want made a report fifty times slower."""
    threads, seen = torch.get_num_threads(), []
    original = RunningStatistics.update

    def update(self: RunningStatistics, value: object) -> None:
        seen.append(torch.get_num_threads())
        original(self, value)

    monkeypatch.setattr(RunningStatistics, "update", update)
    try:
        torch.set_num_threads(2)
        of(torch.ones(2, 2)).report(tmp_path / "page.html")
        of(torch.ones(2, 2)).to_frame()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 1]


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_recording().save("runs")
    assert main(["report", "runs/", "--title", "Mine"]) == 0
    assert capsys.readouterr().out == "wrote runs.html\n"
    assert "<h1>Mine</h1>" in Path("runs.html").read_text(encoding="utf-8")
    assert open_recording("runs", verify=True).complete
    assert main(["report", "runs", "--output", "other.html"]) == 0
    assert "<h1>Recording of Sequential</h1>" in Path("other.html").read_text(encoding="utf-8")
    assert main(["report", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err


def table_of(page: str) -> list[dict[str, str]]:
    """The cells of the statistics by the names of their columns, without tags."""
    table = page.partition('aria-label="Statistics of layers"')[2].partition("</table>")[0]
    rows = [
        [re.sub(r"<.*?>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in table.split("<tr")[1:]
    ]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_each_row_shows_its_own_layer(tmp_path: Path) -> None:
    recording = small_recording()
    rows = table_of(recording.report(tmp_path / "page.html").read_text(encoding="utf-8"))
    frame = recording.to_frame()
    assert [row["Layer"] for row in rows] == list(frame.index)
    numbers = {name: name.lower() for name in ("NaN", "Inf", "Units", "Dead", "Saturated")}
    figures = {name: name.lower() for name in ("Mean", "Std", "Min", "Max")}
    for row, (_, wanted) in zip(rows, frame.iterrows(), strict=True):
        for column, key in numbers.items():
            assert row[column] == ("" if pd.isna(wanted[key]) else f"{wanted[key]:,}")
        for column, key in figures.items():
            assert row[column] == f"{wanted[key]:.4g}"
        assert row["Zeros"] == f"{wanted['zeros']:.1%}"
        assert row["Kept"].startswith(f"{wanted['dtype']} {wanted['shape']}, ")
    assert frame["nan"].tolist() != frame["inf"].tolist()


def test_rows_are_sorted_by_the_numbers_that_are_shown(tmp_path: Path) -> None:
    cell = r'class="number" data-value="(.*?)">(?:<span class="alarm">)?(.*?)<'
    cells = re.findall(cell, text(small_recording(), tmp_path))
    assert {"", "nan", "-inf"} < {shown for _, shown in cells}
    for key, shown in cells:
        if shown in ("", "nan"):
            assert key == "", "it comes last"
        else:
            number = float(shown.rstrip("%").replace(",", "")) / (100 if "%" in shown else 1)
            assert float(key) == pytest.approx(number, rel=1e-3, abs=5e-4)


def test_columns_without_any_text_are_left_out(tmp_path: Path) -> None:
    known = {"Layer", "Name", "Type", "Kept"}
    samples = torch.randn(6, 3)
    (row,) = table_of(text(of(samples, reduce=reductions.Covariance()), tmp_path))
    assert set(row) == known
    (row,) = table_of(text(of(samples, reduce=reductions.Min()), tmp_path))
    assert set(row) == known | {"Min"}
    # No bounds are known of an Identity.
    assert "Saturated" not in table_of(text(of(samples), tmp_path))[0]


def test_layers_of_the_same_values_share_a_histogram(tmp_path: Path) -> None:
    layers = [nn.Dropout(), nn.ReLU(), nn.Identity(), nn.Sequential(nn.Tanh()), nn.Flatten()]
    net = nn.Sequential(*layers).eval()
    rnet = Recorder(net, input_size=(1, 3, 2))
    rnet.record("*")
    recording = rnet.collect([torch.randn(9, 3, 2)], progress=False)
    html = text(recording, tmp_path)
    drawn = re.findall(r"(?s)<figure.*?</figure>", html)
    figures = [re.sub(r"<svg.*?</svg>", "", one) for one in drawn]
    labels = [re.findall(r'href="#layer-([\d-]+)"', one) for one in figures]
    # By the net: ReLU changes what Dropout hands on, and Tanh what Identity does.
    assert labels == [["1-1"], ["1-2", "1-3"], ["2-1", "1-4", "1-5", "0-1"]]
    for drawn, html in zip(labels, figures, strict=True):
        searched = html.partition('data-search="')[2].partition('"')[0]
        assert all(label in searched.split() for label in drawn)


def test_values_outside_the_histogram_are_told(tmp_path: Path) -> None:
    samples = torch.zeros(8, 9000)
    samples[:, ::100] = 9.0
    page = of(samples).report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<p>720 above this range</p>" in page
    (axis,) = of(samples).plot().axes
    assert any(text.get_text() == "720 outside" for text in axis.texts)


def test_what_is_wrong_comes_first(tmp_path: Path) -> None:
    page = small_recording().report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert list(table_of(page)[0])[:5] == ["Layer", "NaN", "Inf", "Dead", "Name"]
    warnings = page.partition("Look at this first")[2].partition("</section>")[0]
    said = [re.sub(r"<.*?>", "", one) for one in re.findall(r"<li>.*?</li>", warnings)]
    assert said[0].startswith("1-3 2: ")
    assert "NaN" in said[0]
    assert said[1] == "2-2 0.act: 1 of 4 units are dead: zero for all samples"
    # Nothing is moved, and nothing is said, where all is well.
    rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), input_size=(1, 3))
    rnet.record("*")
    page = rnet.collect([torch.rand(9, 3) + 0.1]).report(tmp_path / "well.html").read_text()
    columns = list(table_of(page)[0])
    assert columns[:5] == ["Layer", "Name", "Type", "Mean", "Std"]
    assert not {"NaN", "Inf"} & set(columns)
    assert "Look at this first" not in page


def test_a_relu_that_is_dead_as_a_whole(tmp_path: Path) -> None:
    rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 3))
    rnet.record("0")
    page = rnet.collect([-torch.rand(9, 3)]).report(tmp_path / "page.html").read_text()
    assert "all 3 units are dead: zero for all samples" in page


def test_a_layer_is_read_in_parts_of_which_few_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 1000))
    rnet.record("0")
    recording = rnet.collect([torch.randn(50, 1000) for _ in range(8)])
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    original = type(recording).parts

    def parts(self: Recording, key: object) -> Iterator[torch.Tensor]:
        nonlocal most
        for part in original(self, key):  # type: ignore[arg-type]
            copy = part.clone()
            alive.add(copy)
            most = max(most, len(alive))
            yield copy
            del copy, part

    monkeypatch.setattr(type(recording), "parts", parts)
    monkeypatch.setattr("scio_recorder.recording.readable._PART_BYTES", 20 * 4000)
    recording.report(tmp_path / "page.html")
    # The one that is looked at, the next one, and the one that is being read after it.
    assert 1 <= most <= 3


def alarms(recording: Recording, folder: Path) -> list[str]:
    """Return the lines that a page begins with, without their links."""
    html = text(recording, folder)
    if "Look at this first" not in html:
        return []
    warning = html[html.index('class="warning"') : html.index('id="statistics"')]
    return [re.sub("<[^>]*>", "", line) for line in re.findall(r"<li>(.*?)</li>", warning)]


def test_units_far_beyond_the_others_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = torch.randn(50, 12)
    samples[:, :2] = 0.0
    samples[3, 5], samples[7, 9] = -4000.0, 900.0
    size = np.abs(samples.numpy().astype(np.float64)).max(0)
    factor = size[5] / np.sort(size[size > 0])[4]
    (line,) = alarms(of(samples), tmp_path)
    assert f"units 5, 9 explode: the largest value is {factor:,.0f} times that of" in line
    # Whatever is kept of the layer.
    (line,) = alarms(of(samples, store=None, reduce=reductions.Alive()), tmp_path)
    assert "units 5, 9 explode" in line
    samples[7, 9] = float("nan")
    (line,) = alarms(of(samples), tmp_path)
    assert "1 NaN value; unit 5 explodes" in line


@pytest.mark.parametrize(
    "samples",
    [
        torch.randn(64, 16),
        # Outliers as they are usual.
        torch.randn(64, 16) * torch.linspace(1, 20, 16),
        # What can't exceed 1, and numbers of which few are alive.
        torch.softmax(40 * torch.randn(64, 16), 1),
        torch.randn(64, 16) * torch.tensor([1e4] * 3 + [0.0] * 13),
        torch.randn(64, 3) * torch.tensor([1e4, 1.0, 1.0]),
        # So many large ones that they are no exceptions.
        torch.randn(64, 16) * torch.tensor([900.0] * 5 + [1.0] * 11),
        torch.full((64, 16), 7.0),
        torch.zeros(64, 16),
    ],
)
def test_plain_layers_give_no_alarm(samples: torch.Tensor, tmp_path: Path) -> None:
    assert alarms(of(samples), tmp_path) == []


def test_an_infinity_is_no_explosion_and_faults_come_first(tmp_path: Path) -> None:
    def both(net: Any, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(x.shape[1])
        scale[2] = 1e5
        net.dead(-x.abs())
        return net.broken(net.loud(x * scale) / torch.zeros(()))  # type: ignore[no-any-return]  # a module

    net = Net(both, dead=nn.ReLU(), loud=nn.Identity(), broken=nn.Identity())
    rnet = Recorder(net, input_size=(2, 10))
    rnet.record("dead", "loud", "broken")
    recording = rnet.collect([torch.rand(9, 10) + 1], progress=False)
    lines = alarms(recording, tmp_path)
    assert [
        word for line in lines for word in ("infinite", "explodes", "dead:") if word in line
    ] == [
        "infinite",
        "explodes",
        "dead:",
    ]
    assert len(lines) == 3


def test_definitions_have_the_numbers_that_are_used() -> None:
    words = asset("recording.html")
    assert f"more than {statistics.EXPLOSION_FACTOR:g} times" in words
    assert f"above {statistics.EXPLOSION_LEAST:g}. " in words
    assert (
        f"{statistics.EXPLOSION_UNITS} others. At most {statistics.EXPLOSION_SHARE:.0%} of" in words
    )
    share, width = plain.SATURATION_SHARE, plain.SATURATION_WIDTH
    assert f"at least {share:.0%} of its values within {width:.0%} of" in words
    for kind, ends in figure.SATURATION_BOUNDS.items():
        bounds = " and ".join(f"{end:g}" for end in ends if end is not None)
        assert f"{kind} ({bounds})" in words

"""Everything that lists layers does so in one order, that of execution, and names calls alike."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from scio_recorder import Recorder, compare, open_recording, similarity
from scio_recorder.command_line import main
from tests.zoo.base import Net


def block() -> nn.Module:
    """Return one declared in another order than it runs in, with a module that runs twice."""
    parts = {"second": nn.Linear(4, 4), "first": nn.Linear(4, 4), "act": nn.Tanh()}
    return Net(lambda net, x: net.act(net.second(net.act(net.first(x)))), **parts)


class Awkward(nn.Module):
    """Containers whose modules run backwards, and in turn with others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.blocks = nn.ModuleList([block(), block()])
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](x)
        x = self.blocks[0](self.middle(x))
        out: Tensor = self.head(x)
        return out


@pytest.fixture(scope="module")
def rnet() -> Recorder:
    torch.manual_seed(0)
    rnet = Recorder(Awkward(), input_size=(2, 4))
    rnet.record("*", inputs=True, gradients=True)
    return rnet


@pytest.fixture(scope="module")
def titles(rnet: Recorder) -> list[str]:
    """What returns, in order, by hooks that know nothing of labels."""
    names = {module: name for name, module in rnet.net.named_modules()}
    found: list[str] = []

    def note(module: nn.Module, *given: object) -> None:
        again = sum(title.startswith(names[module] + " ") for title in found)
        found.append(f"{names[module]} {f'(call {again + 1})' * (again > 0)}")

    with register_module_forward_hook(note):
        rnet.net(torch.randn(2, 4))
    return [title.strip() for title in found]


def titles_of(rnet: Recorder, labels: object) -> list[str]:
    layers = [rnet.architecture[label] for label in labels]  # type: ignore[attr-defined]
    return [f"{one.name} {f'(call {one.call + 1})' * (one.call > 0)}".strip() for one in layers]


def test_mappings(rnet: Recorder, titles: list[str], tmp_path: Path) -> None:
    assert titles[:4] == [
        "blocks.1.first",
        "blocks.1.act",
        "blocks.1.second",
        "blocks.1.act (call 2)",
    ]
    rnet(torch.randn(2, 4)).sum().backward()
    recording = rnet.collect([torch.randn(3, 4)])
    recording.save(tmp_path / "run")
    with rnet.watch() as passes:
        rnet.net(torch.randn(2, 4))
    rnet(torch.randn(2, 4)).sum().backward()
    for found in (rnet.activations, rnet.inputs, rnet.gradients, rnet.recorded_modules, passes[0]):
        assert titles_of(rnet, found) == titles
    for one in (recording, open_recording(tmp_path / "run")):
        assert titles_of(rnet, one) == titles
        assert titles_of(rnet, one.to_frame().index) == titles
        assert titles_of(rnet, one.inputs) == titles
    # The selection is sorted by label, as ever.
    assert list(rnet.recording) == sorted(rnet.recording)


def test_figures(rnet: Recorder, titles: list[str]) -> None:
    recording = rnet.collect([torch.randn(3, 4)])
    wanted = [title or "Awkward" for title in titles]
    figure = recording.plot()
    assert [axis.get_title().partition(" ")[2] for axis in figure.axes] == wanted
    (axis,) = recording.plot("depth").axes
    assert [tick.get_text().partition(" ")[2] for tick in axis.get_xticklabels()] == wanted
    assert "return" in axis.get_xlabel()
    rooted = [title or "(root)" for title in titles]
    assert list(similarity(recording, recording).to_frame().index) == rooted
    difference = compare(recording, recording)
    assert titles_of(rnet, difference.to_frame().index) == titles


def test_sweeps(rnet: Recorder, titles: list[str]) -> None:
    effects = rnet.sweep(torch.randn(2, 4), torch.randn(2, 4), lambda out: out.sum())
    frame = effects.to_frame()
    assert titles_of(rnet, frame.index) == titles
    for label, metric in frame["metric"].items():
        assert metric == float(effects[label])  # type: ignore[index]
    rooted = [title or "(root)" for title in titles]
    drawn = [tick.get_text() for tick in effects.plot().axes[0].get_xticklabels()]
    assert [title.partition(" ")[2] for title in drawn] == rooted
    lines = str(effects).splitlines()[2:]
    assert [re.split(r"\s{2,}", line)[1] for line in lines] == rooted


def test_pages_and_tables(
    rnet: Recorder, titles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = rnet.collect([torch.randn(3, 4)], store=f"disk:{tmp_path / 'run'}")
    page = recording.report(tmp_path / "page.html").read_text(encoding="utf-8")
    rows = re.findall(
        r'<tr id="layer-([\d-]+)".*?<td class="name.*?<bdi>(.*?)</bdi>(.*?)</span></td>', page
    )
    assert [f"{name}{call}" for _, name, call in rows] == titles
    captions = re.findall(r"<figcaption.*?<bdi>(.*?)</bdi>(.*?)</span></span></figcaption>", page)
    drawn, named = (
        [f"{name}{call}" for name, call in captions],
        [one or "Awkward" for one in titles],
    )
    # Layers of the same values share a histogram.
    assert drawn == [one for one in named if one in drawn]
    assert drawn[0] == named[0]
    assert len(drawn) >= 4
    assert main(["inspect", str(tmp_path / "run")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d+-\d+ ", line)]
    assert titles_of(rnet, [line.split()[0] for line in lines]) == titles
    for line, title in zip(lines, titles, strict=True):
        assert f" {title or '(root)'} " in line


def test_a_tree_shows_each_layer_inside_what_holds_it(rnet: Recorder) -> None:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(rnet.architecture)
    for lines in (capture.get().splitlines()[2:], str(rnet.architecture).splitlines()):
        # The list of blocks goes on after what runs between them.
        assert len(lines) == len(rnet.architecture) + 1
        path: list[str] = []
        for line in lines:
            label = re.search(r"\d+-\d+", line)
            layer = rnet.architecture[label[0]]
            path[layer.depth :] = [layer.name.rpartition(".")[2]]
            assert path[-1] in line
            assert ".".join(path[1:]) == layer.name

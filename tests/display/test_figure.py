"""Figures of a recording: what is drawn is what NumPy finds, and nothing global is touched."""

from __future__ import annotations

import itertools
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from scio_recorder import Recorder, Recording, reductions
from scio_recorder.errors import ArgumentError, LayerNotFoundError
from tests.display.examples import hostile_recording, small_recording, wide_recording
from tests.rotation import one_in

pytest.importorskip("matplotlib")


def of(layers: dict[str, torch.Tensor], **options: object) -> Recording:
    """Return a recording whose layers hold these samples."""
    net = nn.Sequential()
    for name in layers:
        net.add_module(name, nn.Identity())
    rnet = Recorder(net, input_size=(1, 1))
    rnet.record(*layers)
    transforms = {name: lambda _, __, name=name: layers[name] for name in layers}
    size = len(next(iter(layers.values())))
    return rnet.collect([torch.ones(size, 1)], transform=transforms, progress=False, **options)  # type: ignore[arg-type]


def test_histograms_hold_the_shares_of_values() -> None:
    samples = torch.randn(50, 7)
    figure = of({"a": samples}).plot(bins=9)
    (axis,) = figure.axes
    (stairs,) = axis.patches
    shares, edges, _ = stairs.get_data()
    counts, expected = np.histogram(samples.double().numpy(), bins=9)
    np.testing.assert_allclose(shares, counts / 350)
    np.testing.assert_allclose(edges, expected)
    assert axis.get_title() == "1-1 a"


def test_depth_shows_mean_spread_and_extremes() -> None:
    layers = {name: torch.randn(20, 4) * (place + 1) for place, name in enumerate("abc")}
    (axis,) = of(layers).plot("depth").axes
    whole = [samples.double().numpy() for samples in layers.values()]
    mean, low, high = (line.get_ydata() for line in axis.lines[:3])
    np.testing.assert_allclose(mean, [one.mean() for one in whole])
    np.testing.assert_allclose(low, [one.min() for one in whole])
    np.testing.assert_allclose(high, [one.max() for one in whole])
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(max(one.mean() + one.std(ddof=1) for one in whole))
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1-1 a", "1-2 b", "1-3 c"]


@pytest.mark.parametrize("kind", ["histograms", "depth"])
@pytest.mark.parametrize("count", [1, 7, pytest.param(100, marks=pytest.mark.campaign)])
def test_any_number_of_layers(kind: str, count: int) -> None:
    figure = of({f"m{place}": torch.randn(4, 2) for place in range(count)}).plot(kind)  # type: ignore[arg-type]
    assert sum(axis.get_visible() for axis in figure.axes) == (count if kind != "depth" else 1)
    if count < 100:
        # To draw takes long, and shows no more of many than of a few.
        assert figure._repr_png_().startswith(b"\x89PNG")
    width, height = figure.get_size_inches()
    assert width <= 14
    assert height <= 40


AWKWARD = {
    "nan": torch.full((3, 2), math.nan),
    "inf": torch.tensor([[math.inf, 1.0], [math.nan, 2.0]]),
    "constant": torch.zeros(3, 2),
    "empty": torch.ones(3, 0),
    "0-d": torch.ones(3),
    "single": torch.ones(1, 1),
    "bool": torch.ones(3, 2, dtype=torch.bool),
    "complex": torch.ones(3, 2, dtype=torch.complex64),
    "huge": torch.tensor([[1e300, -1e300]], dtype=torch.float64),
    "tiny": torch.tensor([[0.0, 1e-310]], dtype=torch.float64),
}
KINDS = ("histograms", "depth")
# By default of each value one kind of figure, of the next value the other kind.
DRAWN = [(KINDS[(place + turn) % 2], name) for place, name in enumerate(AWKWARD) for turn in (0, 1)]


@pytest.mark.parametrize(("kind", "value"), one_in(2, DRAWN))
def test_awkward_values(kind: str, value: str) -> None:
    figure = of({"a": AWKWARD[value]}).plot(kind)  # type: ignore[arg-type]
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("far", [pytest.param(1e4, marks=pytest.mark.campaign), 1e300])
def test_marks_of_far_extremes_keep_apart(far: float) -> None:
    layers = {f"m{place}": torch.randn(60, 4).double() for place in range(5)}
    layers["far"] = torch.randn(60, 4).double() * far
    figure = of(layers).plot("depth")
    (axis,) = figure.axes
    figure.draw_without_rendering()
    assert axis.get_yscale() == "symlog"
    boxes = sorted(
        (label.get_window_extent().y0, label.get_window_extent().y1)
        for label in axis.get_yticklabels()
        if label.get_text()
    )
    assert len(boxes) >= 3
    assert all(lower[1] < upper[0] for lower, upper in itertools.pairwise(boxes))
    bottom, top = axis.get_ylim()
    assert bottom < layers["far"].min() < layers["far"].max() < top


@pytest.mark.parametrize("count", [4, pytest.param(26, marks=pytest.mark.campaign)])
def test_nothing_in_a_grid_is_printed_over_its_neighbour(count: int) -> None:
    layers = {
        f"a_long_name_of_a_module_{place}": torch.randn(9, 4) * 1e-3 for place in range(count)
    }
    layers["nothing"] = torch.full((9, 4), math.nan)
    figure = of(layers).plot()
    figure.draw_without_rendering()
    boxes = [axis.get_tightbbox() for axis in figure.axes]
    assert len(boxes) == count
    texts = [figure._suptitle, figure._supxlabel, figure._supylabel]
    boxes += [text.get_window_extent() for text in texts]
    for place, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_what_can_not_be_drawn_is_named() -> None:
    layers = {"a": torch.randn(4, 2), "b": torch.full((4, 2), math.nan)}
    figure = of(layers).plot()
    assert figure.get_suptitle() == "Nothing to draw: 1-2"
    assert sum(axis.get_visible() for axis in figure.axes) == 1
    nothing = of({"b": layers["b"]}).plot("depth")
    assert nothing.axes == []
    assert nothing.texts[0].get_text() == "There is nothing to draw."


def test_an_infinite_value_leaves_the_rest_to_be_drawn() -> None:
    samples = torch.randn(20, 4)
    samples[3, 1], samples[4, 2] = math.inf, -math.inf
    figure = of({"a": samples}).plot("depth")
    finite = samples[samples.isfinite()].double().numpy()
    mean, low, high = (line.get_ydata()[0] for line in figure.axes[0].lines[:3])
    assert mean == pytest.approx(finite.mean())
    assert (low, high) == (finite.min(), finite.max())
    assert figure.get_suptitle() == ""


def test_reduced_layers_are_drawn_from_what_they_know() -> None:
    samples = torch.randn(30, 4)
    counted = of({"a": samples}, reduce=reductions.Histogram(6, range=(-1.0, 1.0)))
    (axis,) = counted.plot(bins=99).axes
    shares, edges, _ = axis.patches[0].get_data()
    counts = np.histogram(samples.double().numpy(), bins=6, range=(-1.0, 1.0))[0]
    np.testing.assert_allclose(shares, counts / samples.numel())
    assert len(edges) == 7
    assert f"{samples.numel() - counts.sum()} outside" in {text.get_text() for text in axis.texts}
    (axis,) = of({"a": samples}, reduce=reductions.Moments()).plot("depth").axes
    assert axis.lines[0].get_ydata()[0] == pytest.approx(samples.mean().item(), rel=1e-5)
    assert of({"a": samples}, reduce=reductions.Moments()).plot().axes == []


def test_layers_are_chosen_by_any_key() -> None:
    recording = small_recording()
    figure = recording.plot(layers=["2", (1, 4), "2-3"])
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert titles == ["2-3 0.act (call 2)", "1-3 2", "1-4 3"]
    with pytest.raises(LayerNotFoundError, match="1-2"):
        recording.plot(layers=["1-2"])


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match='"histograms" or "depth"'):
        small_recording().plot("violin")  # type: ignore[arg-type]
    for bins in (0, -1, 1.5, True, "9", None):
        with pytest.raises(ArgumentError, match=f"bins={bins!r}"):
            small_recording().plot(bins=bins)  # type: ignore[arg-type]
    assert small_recording().plot(bins=np.int64(3)).axes  # type: ignore[arg-type]


def test_too_many_histograms_for_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scio_recorder.recording.recording._MOST_HISTOGRAMS", 3)
    recording = wide_recording(4)
    with pytest.raises(ArgumentError, match=r"5 histograms.*3.*layers="):
        recording.plot()
    assert len(recording.plot("depth").axes) == 1


def test_names_are_not_formulas() -> None:
    figure = hostile_recording().plot()
    assert figure._repr_png_()
    dollar = of({"$\\frac$": torch.randn(3, 2)}).plot()
    assert dollar._repr_png_()
    assert dollar.axes[0].get_title() == "1-1 $\\frac$"


@pytest.mark.campaign
def test_pyplot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert small_recording().plot()._repr_png_()


def test_figures_can_be_pickled() -> None:
    figure = pickle.loads(pickle.dumps(of({"a": torch.randn(4, 2)}).plot()))
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = small_recording()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '.\[plot\]'"):
        recording.plot()

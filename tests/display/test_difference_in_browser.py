"""The page of a comparison in a browser: its first difference, its table, a phone, the dark."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scio_recorder import Recorder, compare
from scio_recorder.analysis.comparing.difference import Difference

pytestmark = pytest.mark.campaign

LABELS = (
    "return [...document.querySelectorAll('.table tbody tr')].filter(r => r.checkVisibility())"
    ".map(r => r.cells[0].textContent)"
)
WIDER = "return arguments[0].scrollWidth > arguments[0].clientWidth"
IN_BOX = (
    "const box = document.querySelector('.sn-tree').getBoundingClientRect();"
    "const row = document.querySelector('.sn-alarm').getBoundingClientRect();"
    "return row.top >= box.top && row.bottom <= box.bottom;"
)


@pytest.fixture(scope="module")
def difference() -> Difference:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(40))).eval()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[30][0].bias[0] += 1
    recorders = [Recorder(one, input_size=(1, 3)) for one in (net, other)]
    return compare(*recorders, [torch.randn(4, 3)], progress=False)


@pytest.fixture(scope="module")
def report(difference: Difference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return difference.report(tmp_path_factory.mktemp("report") / "page.html")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_difference_is_in_sight(browser: Any, report: Path, width: int) -> None:
    browser.open(report, width=width)
    assert browser.ask(IN_BOX)
    # Nothing is wider than the window.
    assert browser.ask("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("local", [False, True])
def test_a_long_name_is_no_wider_than_a_phone(browser: Any, tmp_path: Path, local: bool) -> None:
    net = nn.Linear(3, 3)
    for _ in range(5):
        net = nn.Sequential(OrderedDict({"a_long_name_without_a_place_to_break_it": net}))
    other = copy.deepcopy(net)
    next(other.parameters()).data += 1
    recorders = [Recorder(one, input_size=(1, 3)) for one in (net, other)]
    difference = compare(*recorders, [torch.randn(4, 3)], local=local, progress=False)
    browser.open(difference.report(tmp_path / "page.html"), width=390)
    assert browser.ask("return document.documentElement.scrollWidth") <= 390
    # What is said of a layer stands beside its name in a wide window, uncut.
    browser.open(tmp_path / "page.html")
    remarks = browser.all(".sn-remark")
    assert len(remarks) == 6
    assert not [e for e in remarks if browser.ask(WIDER, e)]


def test_the_table_sorts_and_is_searched(
    browser: Any, report: Path, difference: Difference
) -> None:
    browser.open(report)
    assert browser.ask(LABELS) == [str(label) for label in difference]
    button = next(b for b in browser.all(".table thead button") if b.text == "Max abs")
    button.click()
    button.click()
    largest = max(difference.values(), key=lambda one: one.max_abs)
    assert browser.ask(LABELS)[0] == str(largest.label)
    browser.find("#search").send_keys("30.0")
    assert browser.ask(LABELS) == ["2-61"]


def test_layers_that_differ_are_shown_alone(
    browser: Any, report: Path, difference: Difference
) -> None:
    browser.open(report)
    next(b for b in browser.all(".sn-tools button") if b.text == "Different only").click()
    shown = browser.ask(
        "return [...document.querySelectorAll('.sn-row')].filter(e => e.checkVisibility())"
        ".map(e => e.querySelector('.sn-label').textContent)"
    )
    assert set(shown) == {str(one.label) for one in difference.values() if one.differs}


def test_the_row_of_the_first_is_linked(browser: Any, report: Path) -> None:
    browser.open(report)
    browser.find(".warning a").click()
    assert browser.find("tr:target").find_element("css selector", "th").text == "2-61"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser: Any, report: Path, scheme: str) -> None:
    browser.open(report, scheme=scheme)
    found = browser.ask((Path(__file__).parent / "contrasts.js").read_text(encoding="utf-8"))
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []

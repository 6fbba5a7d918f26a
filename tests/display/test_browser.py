"""Pages and notebook outputs in a real browser: by mouse, by keyboard, on a phone, in the dark."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.display.examples import (
    awkward_recording,
    deep_recording,
    hostile_recording,
    small_recorder,
    small_recording,
    wide_recording,
)

pytestmark = pytest.mark.campaign

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

# Pixels between margins of a centimetre.
A4_ACROSS = 1046

ORDER = (
    "return [...document.querySelectorAll('#statistics tbody tr')].map(r => r.cells[0].textContent)"
)
SHOWN = (
    "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
    ".map(e => e.querySelector('.sn-label').textContent)"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_recording().report(tmp_path_factory.mktemp("report") / "page.html")


def header(browser: Any, name: str) -> Any:
    buttons = browser.all("#statistics thead button")
    return next(button for button in buttons if button.text == name)


def test_columns_sort_by_number_with_what_is_missing_last(browser: Any, report: Path) -> None:
    browser.open(report)
    frame = small_recording().to_frame()
    given = browser.ask(ORDER)
    numbers = {label: frame.loc[label, "std"] for label in given}
    assert sum(map(np.isnan, numbers.values())) == 1
    present = [label for label in given if not np.isnan(numbers[label])]
    missing = [label for label in given if np.isnan(numbers[label])]

    header(browser, "Std").click()
    assert browser.ask(ORDER) == sorted(present, key=numbers.__getitem__) + missing
    header(browser, "Std").click()
    assert browser.ask(ORDER) == sorted(present, key=numbers.__getitem__, reverse=True) + missing
    header(browser, "Min").click()
    assert browser.ask(ORDER)[0] == "1-3", "minus infinity comes first"
    header(browser, "Layer").click()
    assert browser.ask(ORDER) == given
    header(browser, "Kept").click()
    sizes = [frame.loc[label, "bytes"] for label in browser.ask(ORDER)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_headers_tell_the_order_and_work_by_keyboard(browser: Any, report: Path) -> None:
    browser.open(report)
    name = header(browser, "Name")
    cell = name.find_element("xpath", "..")
    browser.ask("arguments[0].focus()", name)
    for key, order in ((Keys.ENTER, "ascending"), (Keys.SPACE, "descending")):
        browser.press(key)
        assert cell.get_attribute("aria-sort") == order
        names = browser.ask(ORDER.replace("cells[0]", "querySelector('.name')"))
        assert names == sorted(names, reverse=order == "descending")
    sorted_by = browser.all("#statistics th[aria-sort$='ending']")
    assert len(sorted_by) == 1
    outline = browser.ask("return getComputedStyle(document.activeElement).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2


def test_search_narrows_table_and_histograms(browser: Any, report: Path) -> None:
    browser.open(report)
    box = browser.find("#search")
    visible = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(e => e.checkVisibility()).length"
    )
    rows, figures = "#statistics tbody tr", "figure"
    whole = browser.ask(visible, rows), browser.ask(visible, figures)
    assert whole == (4, 4)
    box.send_keys("TANH")
    assert (browser.ask(visible, rows), browser.ask(visible, figures)) == (1, 1)
    assert browser.find("#found").text == "1 of 4 layers"
    box.send_keys(" that is not there")
    assert browser.ask(visible, rows) == 0
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.BACKSPACE)
    assert (browser.ask(visible, rows), browser.ask(visible, figures)) == whole


def test_tree_folds_by_mouse_and_keyboard(browser: Any, report: Path) -> None:
    browser.open(report)
    root = browser.find(".sn-tree summary")
    every = browser.ask(SHOWN, ".sn-row")
    assert len(every) == 8
    root.click()
    assert browser.ask(SHOWN, ".sn-row") == ["0-1"]
    browser.press(Keys.ARROW_RIGHT)
    assert browser.ask(SHOWN, ".sn-row") == every
    focused = (
        "return document.activeElement.closest('.sn-row').querySelector('.sn-label').textContent"
    )
    seen = [browser.ask(focused)]
    for key in (
        Keys.ARROW_DOWN,
        Keys.ARROW_DOWN,
        Keys.ARROW_LEFT,
        Keys.ARROW_LEFT,
        Keys.ARROW_LEFT,
    ):
        browser.press(key)
        seen.append(browser.ask(focused))
    assert seen == ["0-1", "1-1", "2-2", "1-1", "1-1", "0-1"]
    assert browser.ask(SHOWN, ".sn-row") == ["0-1", "1-1", "1-2", "1-3", "1-4"]
    browser.press(Keys.ENTER)
    assert browser.ask(SHOWN, ".sn-row") == ["0-1"]
    expand, collapse, only = browser.all(".sn-tools button")
    expand.click()
    assert browser.ask(SHOWN, ".sn-row") == every
    collapse.click()
    assert browser.ask(SHOWN, ".sn-row") == ["0-1", "1-1", "1-2", "1-3", "1-4"]
    only.click()
    assert browser.ask(SHOWN, ".sn-recorded") == ["2-2", "2-3", "1-3", "1-4"]
    assert browser.ask(SHOWN, ".sn-row") == ["0-1", "1-1", "2-2", "2-3", "1-3", "1-4"]
    only.click()
    assert browser.ask(SHOWN, ".sn-row") == ["0-1", "1-1", "1-2", "1-3", "1-4"]


def test_tree_is_searched_with_the_way_to_what_is_found(browser: Any, report: Path) -> None:
    browser.open(report)
    browser.find(".sn-tree summary").click()
    box = browser.find(".sn-tools input")
    box.send_keys("0.MIX")
    assert browser.ask(SHOWN, ".sn-row") == ["0-1", "1-1", "2-1"]
    assert browser.find(".sn-tools output").text == "1 of 8"
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.BACKSPACE)
    assert browser.ask(SHOWN, ".sn-row") == ["0-1"], "folded as it was before"


def test_labels_in_the_tree_lead_to_the_table(browser: Any, report: Path) -> None:
    browser.open(report)
    # A click at a place can miss while the page still settles.
    browser.ask("document.querySelector('.sn-recorded a').click()")
    assert browser.ask("return document.querySelector('tr:target').cells[0].textContent") == "2-2"


@pytest.mark.parametrize("link", [".warning a", ".sn-recorded a"])
def test_links_lead_to_rows_that_the_search_has_hidden(
    browser: Any, report: Path, link: str
) -> None:
    browser.open(report)
    box = browser.find("#search")
    target = f"document.querySelector(document.querySelector('{link}').hash)"
    for _ in range(2):
        box.send_keys("that is not there")
        assert not browser.ask(f"return {target}.checkVisibility()")
        browser.ask(f"document.querySelector('{link}').click()")
        assert browser.ask(f"return {target}.checkVisibility()")
        assert browser.ask(f"return {target}.matches(':target')")
        assert box.get_attribute("value") == browser.find("#found").text == ""
        top, bottom, header, height = browser.ask(
            f"const place = {target}.getBoundingClientRect();"
            "const head = document.querySelector('#statistics thead th').getBoundingClientRect();"
            "return [place.top, place.bottom, head.bottom, innerHeight]"
        )
        assert header <= top + 1
        assert bottom <= height
    box.send_keys("that is not there")
    browser.ask("location.hash = '#layer-1-4'")
    shown = "return document.querySelector('#layer-1-4').checkVisibility()"
    deadline = time.monotonic() + 5
    while not browser.ask(shown):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("print", A4_ACROSS)])
def test_all_columns_fit(browser: Any, tmp_path: Path, media: str, width: int) -> None:
    browser.open(awkward_recording().report(tmp_path / "page.html"), width=width)
    browser.command("Emulation.setEmulatedMedia", media=media)
    try:
        region = "document.querySelector('.table')"
        assert browser.ask(f"return {region}.scrollWidth - {region}.clientWidth") == 0
        assert browser.ask("return document.documentElement.scrollWidth") <= width
    finally:
        browser.command("Emulation.setEmulatedMedia", media="")


# Whatever has more to show than there is room for, unless it says so by an ellipsis.
CUT = """
return [...document.querySelectorAll('main *')].filter(one => one.checkVisibility()).filter(one => {
  const style = getComputedStyle(one);
  const across = one.scrollWidth > one.clientWidth && style.overflowX !== 'visible';
  const down = one.scrollHeight > one.clientHeight + 1 && style.overflowY !== 'visible';
  return (across && style.textOverflow !== 'ellipsis') || (down && style.overflowX === 'visible');
}).map(one => one.tagName + '.' + one.className);
"""
LOWER = """
return ['.table', '.sn-tree'].map(name => document.querySelector(name))
  .filter(one => one.scrollHeight > one.clientHeight + 1).map(one => one.className);
"""


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("screen", 390), ("print", 1046)])
def test_all_is_drawn_and_nothing_is_cut_without_a_hint(
    browser: Any, tmp_path: Path, media: str, width: int
) -> None:
    for recording in (awkward_recording(), wide_recording(250)):
        browser.open(recording.report(tmp_path / "page.html"), width=width)
        browser.command("Emulation.setEmulatedMedia", media=media)
        try:
            # No part of the page is scrolled by itself, but for a table that is too wide.
            assert browser.ask(LOWER) == []
            assert set(browser.ask(CUT)) <= ({"DIV.table wide"} if width == 390 else set())
            assert browser.find(".scrolls").is_displayed() == (width == 390)
            rows = len(recording.architecture)
            for part in ("tbody tr", ".sn-row"):
                assert sum(one.is_displayed() for one in browser.all(part)) == rows
            links = "return [...document.querySelectorAll('figure a')].map(a => a.hash)"
            named = browser.ask(links)
            assert len(named) == len(set(named)) == rows
        finally:
            browser.command("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("width", [390, 700, 1030, 1150, 1280])
def test_a_hint_says_whether_columns_are_out_of_sight(
    browser: Any, report: Path, tmp_path: Path, width: int
) -> None:
    for path in (report, awkward_recording().report(tmp_path / "page.html")):
        browser.open(path, width=width)
        region = "document.querySelector('.table')"
        is_wide = browser.ask(f"return {region}.scrollWidth > {region}.clientWidth")
        assert browser.find(".scrolls").is_displayed() == is_wide
        assert browser.ask("return document.documentElement.scrollWidth") <= width
        browser.ask("scrollTo(0, document.querySelector('tbody tr:last-child').offsetTop)")
        header = "document.querySelector('thead th').getBoundingClientRect().top"
        assert is_wide or browser.ask(f"return {header}") >= 0


def test_a_phone_shows_first_what_is_wrong(browser: Any, report: Path) -> None:
    browser.open(report, width=390)
    edges = browser.ask(
        "return Object.fromEntries([...document.querySelectorAll('#statistics th[scope=col]')]"
        ".map(one => [one.textContent, one.getBoundingClientRect().right]))"
    )
    assert max(edges[name] for name in ("Layer", "NaN", "Inf", "Dead")) <= 390


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_nothing_reaches_over_the_edge(browser: Any, report: Path, width: int) -> None:
    browser.open(report, width=width)
    assert browser.ask("return document.documentElement.scrollWidth") <= width
    assert browser.ask("return innerWidth") == width
    small = (
        "return [...document.querySelectorAll('p, dd, td, a, h1, button')]"
        ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length"
    )
    assert browser.ask(small) == 0


CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["small", "deep"])
def test_text_stands_out(
    browser: Any, report: Path, scheme: str, kind: str, tmp_path: Path
) -> None:
    page = report if kind == "small" else deep_recording().report(tmp_path / "page.html")
    browser.open(page, scheme=scheme)
    found = browser.ask(CONTRASTS)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []
    ground = browser.ask("return getComputedStyle(document.body).backgroundColor")
    assert ("255, 255, 255" in ground) == (scheme == "light")


def test_the_end_of_a_long_name_is_seen_on_a_phone(browser: Any, tmp_path: Path) -> None:
    browser.open(deep_recording().report(tmp_path / "page.html"), width=390)
    cut, beyond = browser.ask(
        "const cells = [...document.querySelectorAll('td.name')].map(cell => {"
        "const range = document.createRange(); range.selectNodeContents(cell);"
        "return [cell.getBoundingClientRect(), range.getBoundingClientRect()]; });"
        "return [cells.filter(([cell, name]) => name.left < cell.left).length,"
        " cells.filter(([cell, name]) => name.right > cell.right).length]"
    )
    assert cut >= 3
    assert beyond == 0


def test_hostile_names_are_only_text(browser: Any, tmp_path: Path) -> None:
    recording = hostile_recording()
    browser.open(recording.report(tmp_path / "page.html", title="</title><script>x()</script>"))
    assert browser.ask("return document.querySelectorAll('script').length") == 2
    assert browser.ask("return document.querySelectorAll('img').length") == 0
    assert browser.driver.title == "</title><script>x()</script>"
    names = browser.ask(ORDER.replace("cells[0]", "cells[1]"))
    assert names[-1] == "", "the net itself"
    assert names[:-1] == [
        "<script>alert(1)</script>",
        "\"quoted\" & 'single'",
        "</script><img src=x onerror=alert(2)>",
        "משהו",
        "\\u202egnp-exe",
        "[red]markup[/red]",
        "{{ 7 * 7 }}{% raw %}{# no more",
        "línea\\nnueva\\x1b[31m",
        "\\ud800",
    ]
    assert browser.ask("return document.documentElement.scrollWidth") <= 1280


def test_two_thousand_layers(browser: Any, tmp_path: Path) -> None:
    page = wide_recording(2000).report(tmp_path / "page.html")
    browser.open(page)
    shown = "return [...arguments[0].rows].filter(row => row.checkVisibility()).length"
    body = browser.find("#statistics tbody")
    deadline = time.monotonic() + 20
    while browser.ask(shown, body) < 2001:
        assert time.monotonic() < deadline
    browser.find("#search").send_keys("999.0")
    assert browser.find("#found").text == "1 of 2001 layers"
    given = browser.ask(ORDER)
    header(browser, "Layer").click()
    assert browser.ask(ORDER) == given[::-1]


def test_several_outputs_live_in_one_page(browser: Any, page: Any) -> None:
    rnet = small_recorder()
    style = "<style>p { color: rgb(1, 2, 3) } summary { display: list-item }</style>"
    body = "<p id=own>own</p><details id=mine><summary>s</summary>own</details>"
    browser.open(page(style + rnet._repr_html_() + rnet._repr_html_() + body))
    trees = browser.all(".scio-net")
    assert [len(tree.find_elements("css selector", ".sn-tools")) for tree in trees] == [1, 1]
    assert browser.ask("return document.querySelectorAll('[id]').length") == 2
    assert (
        browser.ask("return getComputedStyle(document.querySelector('#own')).color")
        == "rgb(1, 2, 3)"
    )
    display = "return getComputedStyle(document.querySelector('#mine summary')).display"
    assert browser.ask(display) == "list-item"
    trees[1].find_element("css selector", "input").send_keys("0.mix")
    shown = SHOWN.replace("document.", "arguments[1].")
    assert browser.ask(shown, ".sn-row", trees[1]) == ["0-1", "1-1", "2-1"]
    assert len(browser.ask(shown, ".sn-row", trees[0])) == 8


def test_script_runs_when_a_notebook_puts_it_in_later(browser: Any, page: Any) -> None:
    browser.open(page("<div id=output></div>"))
    # As JupyterLab does: the markup first, then each script once more, to make it run.
    browser.ask(
        "const host = document.querySelector('#output'); host.innerHTML = arguments[0];"
        "for (const old of host.querySelectorAll('script')) {"
        "const made = document.createElement('script');"
        "made.textContent = old.textContent; old.parentNode.replaceChild(made, old); }",
        small_recorder()._repr_html_(),
    )
    assert len(browser.all(".sn-tools input")) == 1
    browser.ask("window.seen = 0; document.addEventListener('keydown', () => { seen += 1; });")
    browser.find(".sn-tools input").send_keys("dd")
    assert browser.ask("return seen") == 0, "a notebook would delete the cell"


def test_without_scripts_all_is_there(
    browser: Any, page: Any, report: Path, tmp_path: Path
) -> None:
    try:
        browser.open(page(small_recorder()._repr_html_()), script=False)
        assert browser.all(".sn-tools") == []
        rows = browser.all(".sn-row")
        assert all(row.is_displayed() for row in rows)
        browser.find(".sn-tree summary").click()
        assert [row.is_displayed() for row in rows] == [True] + [False] * 7
        browser.open(report, script=False)
        assert len(browser.all("#statistics tbody tr")) == 4
        assert not browser.find("#search").is_displayed()
        arrow = "return getComputedStyle(document.querySelector('thead button'), '::after').display"
        assert browser.ask(arrow) == "none"
        browser.open(wide_recording(250).report(tmp_path / "wide.html"), script=False)
        assert len(browser.all("#statistics tbody tr")) == 251
        assert browser.find("#statistics tbody tr:last-child").is_displayed()
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize(
    ("ground", "ink"), [("#fff", "#111"), ("#111", "#eee"), ("#1e1e1e", "#d4d4d4")]
)
def test_output_takes_the_colours_around_it(browser: Any, page: Any, ground: str, ink: str) -> None:
    tree = small_recorder()._repr_html_()
    browser.open(page(f"<main style='background: {ground}; color: {ink}'>{tree}</main>"))
    found = browser.ask(CONTRASTS)
    assert len(found) > 20
    assert [entry for entry in found if entry[0] < 4.5] == []

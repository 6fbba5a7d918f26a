"""The tree as markup: well formed, alone in its styles, without any address."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from scio_recorder.display.page import asset
from tests.display.examples import (
    HOSTILE,
    hostile_recording,
    small_recorder,
    small_recording,
    wide_recording,
)


class Outliner(HTMLParser):
    """Collects rows with their depth in the markup, and fails on tags that don't match."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []
        self.rows: list[tuple[int, str, bool]] = []
        self.open: list[bool] = []
        self.tags: set[str] = set()
        self.in_label = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.path.append(tag)
        self.tags.add(tag)
        kinds = (given.get("class") or "").split()
        if tag == "details":
            self.open.append("open" in given)
        if "sn-row" in kinds:
            self.rows.append((self.path.count("details"), "", "sn-recorded" in kinds))
            self.row_is_branch = tag == "summary"
        self.in_label = "sn-label" in kinds

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.in_label:
            depth, _, is_recorded = self.rows[-1]
            self.rows[-1] = (depth - self.row_is_branch, data, is_recorded)
            self.in_label = False


def read(html: str) -> Outliner:
    outliner = Outliner()
    outliner.feed(html)
    outliner.close()
    assert outliner.path == []
    return outliner


def test_rows_nest_like_modules_and_recorded_ones_are_marked() -> None:
    rnet = small_recorder()
    expected = [
        (depth, f"{depth}-{index}", (depth, index) in rnet.recording)
        for depth, index in rnet.architecture
    ]
    assert read(rnet._repr_html_()).rows == expected
    assert read(small_recording()._repr_html_()).rows == expected
    bare = [(depth, label, False) for depth, label, _ in expected]
    assert read(rnet.architecture._repr_html_()).rows == bare


def test_marks_are_said_and_not_only_coloured() -> None:
    html = small_recorder()._repr_html_()
    assert html.count('<span role="img" aria-label="recorded">●</span>') == 4


def test_trees_start_open_whatever_their_size() -> None:
    rows = read(wide_recording(200)._repr_html_())
    assert len(rows.open) == 101
    assert all(rows.open)


def test_rows_can_be_read_where_styles_are_stripped() -> None:
    plain = re.sub(r"<[^>]*>", "", small_recorder()._repr_html_())
    assert "● 2-2 act ReLU (1, 4, 4, 4) -" in plain
    assert "1-3 2 Linear (1, 8) 520" in plain


def test_hostile_names_add_no_tags() -> None:
    html = hostile_recording()._repr_html_()
    known = {"style", "script", "div", "span", "details", "summary", "bdi", "code", "ul", "li"}
    assert read(html).tags == known
    assert html.count("<script") == 1
    html.encode("utf-8")
    assert "\u202e" not in html
    assert len(read(html).rows) == len(HOSTILE) + 1


@pytest.mark.parametrize("sheet", ["tree.css", "page.css"])
def test_styles_name_no_other_host(sheet: str) -> None:
    assert not re.search(r"url\(|@import|//", asset(sheet))


def test_every_rule_of_the_tree_is_its_own() -> None:
    sheet = re.sub(
        r"@(media|container)[^{]*\{((?:[^{}]*\{[^{}]*\})*)\s*\}", r"\2", asset("tree.css")
    )
    selectors = [
        one.strip() for rule in re.findall(r"([^{}]+)\{[^{}]*\}", sheet) for one in rule.split(",")
    ]
    assert len(selectors) > 30
    assert [one for one in selectors if not one.startswith(".scio-net")] == []


def test_no_address_leads_outside() -> None:
    html = small_recorder()._repr_html_()
    assert "//" not in re.sub(r"(?m)^\s*//.*$", "", html)
    assert not re.search(r"\b(src|href|id)=", html)


def test_the_size_of_a_large_tree_stays_bounded() -> None:
    rows = wide_recording(200)._repr_html_()
    assert len(rows) < 201 * 1000

"""A plugin of pytest for runs without some rooms: whatever imports one of them is skipped.

The rooms are named by the environment. Of each file only some tests run, spread over it, and at
the end there is a line for each test that passed, and for each that wanted such a room.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from importlib.abc import MetaPathFinder
from typing import Any

import pytest

VARIABLE = "SCIO_RECORDER_LEFT_OUT"
GONE = tuple(f"scio_recorder.{room}" for room in os.environ.get(VARIABLE, "").split())
MOST_OF_A_FILE = 2


class _Gone(MetaPathFinder):
    """Finds nothing, and skips the test that asks for a room that is left out."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if GONE and name.startswith(GONE):
            pytest.skip(f"left out: {name}", allow_module_level=True)


sys.meta_path.insert(0, _Gone())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    items[:] = [
        test for tests in files.values() for test in tests[:: -(-len(tests) // MOST_OF_A_FILE)]
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.getreports("passed"):
        terminalreporter.write_line(f"without: passed {report.nodeid}")
    for report in terminalreporter.getreports("skipped"):
        if "left out: " in str(report.longrepr):
            terminalreporter.write_line(f"without: skipped {report.nodeid}")

"""Where commands run in tests: a folder with the modules that they load nets and data from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _modules(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write what a file of tests has in `MODULES`, texts by name, into a folder of the test."""
    modules = getattr(request.module, "MODULES", {})
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    if modules:
        monkeypatch.chdir(tmp_path)

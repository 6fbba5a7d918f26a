"""Running the tests of a class by hand, to see which of them fail."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch


def first_failure(tests: Any, path: Path) -> str | None:
    """Return the name of the first test that fails; each has a folder of its own."""
    # The slowest come last: most faults are found without them.
    slow = ("damaged", "collected", "any_sizes")
    names = [name for name in dir(tests) if name.startswith("test_")]
    for name in sorted(names, key=lambda name: any(word in name for word in slow)):
        test, folder = getattr(tests, name), path / name
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            given = {"tmp_path": folder, "monkeypatch": monkeypatch}
            wanted = {key: given[key] for key in inspect.signature(test).parameters}
            try:
                test(**wanted)
            except Exception:
                return name
    return None

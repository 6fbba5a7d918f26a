"""The README's table of who is right, as far as it speaks of this library."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def comparison() -> ModuleType:
    return importlib.import_module("benchmarks.comparison")


def test_every_value_is_right(comparison: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with torch.no_grad():
        for case in comparison.cases():
            verdict = comparison.verdict(comparison.ours, case)
            assert verdict in ("right", "right: error"), case.title
            assert f"\n| {case.title} | {verdict} |" in readme


def test_references_alone_are_found_wrong(comparison: ModuleType) -> None:
    def by_reference(net: torch.nn.Module, case: Any) -> Any:
        kept: list[Any] = []
        module = net.get_submodule(case.name)
        module.register_forward_hook(lambda *call: kept.append(call[2]))

        def run() -> Any:
            net(*case.args, **case.kwargs)
            return kept[0]

        return run

    with torch.no_grad():
        verdicts = [
            comparison.verdict(by_reference, case)
            for case in comparison.cases()
            if not case.operation
        ]
    assert verdicts.count("**wrong**") == 3
    assert verdicts.count("right") == 3

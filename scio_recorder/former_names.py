"""Modules that had other names: what was pickled or imported under a former name is still found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Former name of a module -> its present name, both inside the package.
MOVED = {
    "stores.base": "stores.store",
    "stores.disk_format.row_reader": "stores.disk_format.reader",
    "stores.joined": "stores.disk_format.reader",
    "analysis.alikeness": "analysis",
    "analysis.guarding.kept_call": "analysis.guarding.guard",
    "analysis.alikeness.similarity": "analysis.similarity",
    "nets.shards": "nets.sharded",
    "analysis.sweeping": "analysis",
    "analysis.sweeping.effects": "analysis.effects",
    "analysis.sweeping.sweep": "analysis.sweep",
    "stores.column": "stores.buffers",
    "stores.disk_format.progress": "workers.parts",
    "workers.holders": "workers.parts",
    "stores.room": "stores.memory",
    "integrations.statistics": "recording.statistics",
    "recording.collect.nodes": "recording.row_kinds",
    "recording.collect.rows": "recording.rows",
    "recording.collect.tokens": "recording.row_kinds",
    "recording.nodes": "recording.row_kinds",
    "recording.tokens": "recording.row_kinds",
    "postprocessors.base": "postprocessors.floating_map",
    "reductions.digest": "reductions.plain",
    "recorder.comparing": "analysis.comparing.compare",
    "stores.calls": "stores.kept_inputs",
    "capture.uncopied": "capture.around",
    "capture.hook_changes": "capture.around",
    "postprocessors.directions": "postprocessors.values",
    "recorder.reading": "recorder.collecting",
    "recorder.watching": "recorder.collecting",
    "reductions.fold": "reductions.plain",
    "reductions.positions": "reductions.plain",
    "reductions.samples": "reductions.base",
    "capture.saved_tensors": "recompute.saved_tensors",
}


class FormerNames(MetaPathFinder, Loader):
    """Finds a module under a former name, as one that holds the names of the present module.

    Examples
    --------
    >>> FormerNames().find_spec("scio_recorder.never_was") is None
    True
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that was moved; None for any other."""
        package, _, name = fullname.partition(".")
        is_moved = package == __package__ and name in MOVED
        return ModuleSpec(fullname, self, is_package=True) if is_moved else None

    def exec_module(self, module: ModuleType) -> None:
        """Give a module of a former name everything that the present one holds."""
        package, _, name = module.__name__.partition(".")
        present = importlib.import_module(f"{package}.{MOVED[name]}")
        vars(module).update((k, v) for k, v in vars(present).items() if not k.startswith("__"))


def find_former_names() -> None:
    """Look for former names where Python finds no module of that name."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.append(FormerNames())

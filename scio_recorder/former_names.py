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
    "analysis.alikeness": "analysis",
    "analysis.alikeness.similarity": "analysis.similarity",
    "analysis.comparing.findings": "analysis.comparing.difference",
    "analysis.comparing.part_pairs": "analysis.comparing.measures",
    "analysis.comparing.traced_code": "analysis.comparing.parting",
    "analysis.effects": "analysis.sweep",
    "analysis.guarding.guarded_calls": "analysis.guarding.guard",
    "analysis.guarding.kept_call": "analysis.guarding.origin",
    "analysis.sweeping": "analysis",
    "analysis.sweeping.effects": "analysis.sweep",
    "analysis.sweeping.sweep": "analysis.sweep",
    "capture.hook_changes": "capture.around",
    "capture.kept": "capture.keeping",
    "capture.learning": "capture.keeping",
    "capture.saved_tensors": "recompute.saved_tensors",
    "capture.uncopied": "capture.around",
    "integrations.statistics": "recording.statistics",
    "nets.shards": "nets.sharded",
    "postprocessors.base": "postprocessors.floating_map",
    "postprocessors.directions": "postprocessors.values",
    "postprocessors.places": "postprocessors.wrapping",
    "recorder.comparing": "analysis.comparing.compare",
    "recorder.reading": "recorder.collecting",
    "recorder.watching": "recorder.collecting",
    "recording.collect": "recording",
    "recording.collect.nodes": "recording.row_kinds",
    "recording.collect.rows": "recording.rows",
    "recording.collect.tokens": "recording.row_kinds",
    "recording.resuming": "recording.collection",
    "reductions.digest": "reductions.plain",
    "reductions.fold": "reductions.plain",
    "reductions.positions": "reductions.plain",
    "reductions.samples": "reductions.base",
    "stores.base": "stores.store",
    "stores.calls": "stores.kept_inputs",
    "stores.column": "stores.buffers",
    "stores.disk_format.progress": "workers.parts",
    "stores.disk_format.row_reader": "stores.disk_format.reader",
    "stores.disk_format.run": "stores.disk_format.reader",
    "stores.joined": "stores.disk_format.reader",
    "stores.room": "stores.memory",
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

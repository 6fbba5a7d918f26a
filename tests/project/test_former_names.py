"""What was imported or pickled under the former name of a module is still found."""

from __future__ import annotations

import importlib
import pickle
from types import ModuleType

import pytest

from scio_recorder import Nodes, Tokens
from scio_recorder.former_names import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_has_what_the_present_one_has(former: str) -> None:
    found = importlib.import_module(f"scio_recorder.{former}")
    present = importlib.import_module(f"scio_recorder.{MOVED[former]}")
    public = {name: value for name, value in vars(present).items() if not name.startswith("__")}
    assert all(
        getattr(found, name) is value
        for name, value in public.items()
        # A room may have loaded more of its files since.
        if not isinstance(value, ModuleType)
    )


# Names of classes as pickles of version 0.2.0 have them.
PICKLED = {
    "recording.collect.tokens Tokens": Tokens,
    "recording.collect.nodes Nodes": Nodes,
    "stores.calls Calls": "stores.kept_inputs Calls",
    "capture.learning Setting": "capture.keeping Setting",
    "tensors.ownership Held": "tensors.ownership HeldTensor",
    "postprocessors.directions Add": "postprocessors.values Add",
    "reductions.positions Mean": "reductions Mean",
    "analysis.sweeping.effects Effects": "analysis.sweep Effects",
    "analysis.comparing.findings LayerDifference": "analysis.comparing.difference LayerDifference",
    "analysis.alikeness.similarity Similarity": "analysis.similarity Similarity",
}


@pytest.mark.parametrize("former", PICKLED)
def test_a_pickle_finds_a_class_under_its_former_name(former: str) -> None:
    module, name = former.split()
    present = PICKLED[former]
    if isinstance(present, str):
        home, present_name = present.split()
        present = getattr(importlib.import_module(f"scio_recorder.{home}"), present_name)
    assert pickle.loads(f"cscio_recorder.{module}\n{name}\n.".encode()) is present


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("scio_recorder.recording.never_was")

"""What is imported, and when: nobody waits for what they do not use."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

NET = "torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())"


def imported_by(code: str) -> set[str]:
    code += "; import sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


def test_the_package_alone_imports_nothing_heavy() -> None:
    assert not imported_by("import scio_recorder") & {"torch", "numpy", "rich", "torchinfo"}


def test_a_recorder_imports_nothing_that_shows_or_examines() -> None:
    modules = imported_by("from scio_recorder import Recorder")
    assert "scio_recorder.capture.engine" in modules
    assert not modules & {"rich", "jinja2", "pandas", "matplotlib"}
    rooms = {
        ".".join(name.split(".")[1:2]) for name in modules if name.startswith("scio_recorder.")
    }
    assert not rooms & {"analysis", "command_line", "events", "integrations", "workers"}
    assert "scio_recorder.nets.labelling.data_flow" not in modules


@pytest.mark.campaign
def test_a_recorder_of_a_net_that_asks_for_no_value_imports_no_compiler() -> None:
    modules = imported_by(
        f"import torch, scio_recorder; scio_recorder.Recorder({NET}, input_size=(2, 3, 8, 8))"
    )
    assert not modules & {"torch._dynamo", "sympy", "pandas", "matplotlib", "sklearn"}


def test_what_is_imported_on_first_use_draws_no_random_numbers() -> None:
    code = f"""
import random, torch, scio_recorder
x = torch.ones(2, 3, 8, 8)
rnet = scio_recorder.Recorder({NET}, input_data=x, verbose=0)
rnet.record("0")
random.seed(0)
rnet.collect([x], progress=True)
str(rnet)
rnet.check(x)
print("", *sorted({{module.split(".")[0] for module in __import__("sys").modules}}))
print(random.random())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    *_, modules, number = result.stdout.splitlines()
    assert " rich " in modules
    assert float(number) == random.Random(0).random()


OTHERS = ("events", "postprocessors", "reductions")


@pytest.mark.parametrize(
    "name",
    ["errors", "stores", *(pytest.param(name, marks=pytest.mark.campaign) for name in OTHERS)],
)
def test_public_rooms_are_there_without_an_import_of_their_own(name: str) -> None:
    assert f"scio_recorder.{name}" in imported_by(f"import scio_recorder; scio_recorder.{name}")

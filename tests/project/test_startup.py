"""What is imported, and when: nobody waits for what they do not use."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys

import pytest

import scio_recorder

NET = "torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())"


# What is imported after each step, and at the end the next random number of the program.
STEPS = f"""
import sys
def step():
    print("", *sys.modules, "")
import scio_recorder
step()
from scio_recorder import Recorder
step()
import random, torch
x = torch.ones(2, 3, 8, 8)
rnet = Recorder({NET}, input_data=x, verbose=0)
rnet.record("0")
random.seed(0)
rnet.collect([x], progress=True)
str(rnet)
rnet.check(x)
step()
print(random.random())
"""


def output_of(code: str) -> list[str]:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def imported_by(code: str) -> set[str]:
    return set(output_of(code + "; import sys; print(*sys.modules)")[-1].split())


@pytest.fixture(scope="module")
def steps() -> list[str]:
    return [line for line in output_of(STEPS) if line.startswith((" ", "0."))]


def test_the_package_alone_imports_nothing_heavy(steps: list[str]) -> None:
    assert not set(steps[0].split()) & {"torch", "numpy", "rich", "torchinfo"}


def test_a_recorder_imports_nothing_that_shows_or_examines(steps: list[str]) -> None:
    modules = set(steps[1].split())
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


def test_what_is_imported_on_first_use_draws_no_random_numbers(steps: list[str]) -> None:
    *_, before, after, number = steps
    assert " rich " not in before
    assert " rich " in after
    assert float(number) == random.Random(0).random()


ROOMS = ("events", "postprocessors", "reductions", "stores")


@pytest.mark.parametrize("name", ROOMS)
def test_a_public_room_is_imported_when_it_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = importlib.import_module(f"scio_recorder.{name}")
    monkeypatch.delattr(scio_recorder, name)
    assert getattr(scio_recorder, name) is room


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["errors", *ROOMS])
def test_public_rooms_are_there_without_an_import_of_their_own(name: str) -> None:
    assert f"scio_recorder.{name}" in imported_by(f"import scio_recorder; scio_recorder.{name}")

"""Each upper room can be left out of a copy of the package, with those that stand on it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.left_out import VARIABLE
from tests.project.test_project import FRONT_DOORS, PACKAGE, ROOT, ROWS, STANDS_ON, UPPER_STOREY

# Every other room takes about a minute of a processor, all of them almost two.
FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
# Finds a test without a mark, in a file without one; a campaign would not run.
PLAIN = re.compile(r"\A((?!\npytestmark).)*\n\n\ndef test_", re.DOTALL).search
ROOMS = sorted({room for row in UPPER_STOREY for room in row.split()} - {"__init__", "__main__"})

# Imports all that is left of each copy, and uses what everybody needs, in a process of its own. All
# come from one that has imported what takes long.
PROGRAM = """
import os, pkgutil, sys, tempfile
import jinja2, rich.console, torch, torch.utils._pytree, torchinfo

# The finder of an editable install would find the room that is left out.
sys.meta_path = [finder for finder in sys.meta_path if "_frozen" in finder.__module__]
for heavy in ("lightning", "ray", "tensorboard", "transformers"):
    sys.modules[heavy] = None  # nothing of them is tested here


def use(place):
    sys.path.insert(0, place)
    import scio_recorder
    left = [name for _, name, _ in pkgutil.walk_packages(scio_recorder.__path__, "scio_recorder.")]
    for name in left:
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            # An extra that is not installed.
            assert not (error.name or "").startswith("scio_recorder"), (name, error)
    ours = [module for name, module in sys.modules.items() if name.startswith("scio_recorder")]
    assert all(module.__file__.startswith(place) for module in ours)

    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True))
    rnet = scio_recorder.Recorder(net, input_size=(2, 4), verbose=0)
    rnet.record("*", inputs=True)
    rnet(torch.randn(2, 4))
    assert torch.equal(rnet.activations["0"], net[0](rnet.inputs["0"].args[0]))
    with tempfile.TemporaryDirectory() as folder:
        loader = torch.utils.data.DataLoader(torch.randn(9, 4), batch_size=4, shuffle=True)
        rnet.collect(loader, store=f"disk:{folder}/run", progress=False)
        recording = scio_recorder.open_recording(f"{folder}/run")
        assert recording.num_samples == 9
        recording.report(f"{folder}/page.html")
    str(recording)
    print(*left, flush=True)


for place in sys.argv[1:]:
    if not os.fork():
        use(place)
        break
    if os.wait()[1]:
        sys.exit(f"failed: {place}")
"""


def without(room: str) -> set[str]:
    """Return a room and all that stand on it, directly or not."""
    gone = {room}
    while more := {other for other, below in STANDS_ON.items() if below & gone} - gone:
        gone |= more
    return gone


def copied(room: str, to: Path) -> Path:
    shutil.copytree(PACKAGE, to / "scio_recorder", ignore=shutil.ignore_patterns("__pycache__"))
    for name in without(room):
        place = to / "scio_recorder" / name
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    return to


def test_each_room_can_be_left_out(tmp_path: Path) -> None:
    # Those that stand on others are left out with them.
    rooms = [room for room in ROOMS if room not in STANDS_ON]
    assert set.union(*map(without, rooms)) >= set(ROOMS)
    places = [str(copied(room, tmp_path / room)) for room in rooms]
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *places],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for room, line in zip(rooms, done.stdout.splitlines(), strict=True):
        left = {name.split(".")[1] for name in line.split()}
        assert not left & without(room)
        assert left >= set(ROOMS) - without(room)


def chosen(room: str) -> list[str]:
    """Return a file of tests of each other upper room, and of every third one of the core.

    They are short, and others for each room that is left out.
    """
    turn, files = ROOMS.index(room), []
    folders = [place for place in sorted((ROOT / "tests").iterdir()) if place.name in ROWS]
    for number, folder in enumerate(folders):
        tests = [file for file in folder.rglob("test_*.py") if PLAIN(file.read_text())]
        tests = sorted(tests, key=lambda file: file.stat().st_size)[:3]
        is_chosen = folder.name in ROOMS or (number + turn) % 3 == 0
        if folder.name not in without(room) and is_chosen:
            files.append(str(tests[turn % len(tests)].relative_to(ROOT)))
    return files


@pytest.mark.campaign
@pytest.mark.parametrize("room", ROOMS if FULL else ROOMS[::2])
def test_the_other_rooms_pass_their_own_tests(room: str, tmp_path: Path) -> None:
    place, files = copied(room, tmp_path), chosen(room)
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    environment = os.environ | {VARIABLE: " ".join(without(room)), "PYTHONPATH": str(place)}
    plugins = ["-p", "tests.project.left_out", "-p", "no:cacheprovider", "-n", "0", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *files],
        capture_output=True, text=True, env=environment, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    tests = [(line[1], line[2]) for line in lines if line[:1] == ["without:"]]
    passed = {name.split("/")[1] for outcome, name in tests if outcome == "passed"}
    # Tests of rooms that delegate upwards may use what is left out, some in all of their file.
    missing = {file.split("/")[1] for file in files} - passed
    assert missing <= {name.partition(".")[0] for name in FRONT_DOORS}, done.stdout
    assert len([name for outcome, name in tests if outcome == "skipped"]) <= 2, done.stdout


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_who_would_miss_it(room: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    assert "would not miss this room" in " ".join(text.split())

"""Without the packages of the extras: each feature that needs one names what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

ABSENT = (
    "obstore", "ray", "lightning", "pandas", "matplotlib", "pyarrow", "datasets", "zarr", "sklearn",
    "tensorboard", "transformers",
)  # fmt: skip
HEAD = f"""
import json, sys
for name in {ABSENT!r}:
    sys.modules[name] = None
import torch
import scio_recorder
from scio_recorder import Recorder, open_recording
from scio_recorder.command_line import main
rnet = Recorder(torch.nn.Linear(4, 2), input_size=(1, 4))
rnet.record("*")
data = [torch.ones(2, 4)]
recording = rnet.collect(data, store="disk:run")
other = rnet.collect(data)
with scio_recorder.events.track(rnet.net) as events:
    rnet.net(data[0])
"""
# What is done, and the extra that it needs.
CASES = {
    "rnet.collect(data, store='s3://bucket/run')": "cloud",
    "rnet.collect_parts(lambda part: data, 2, store='gs://bucket/run')": "cloud",
    "open_recording('az://bucket/run')": "cloud",
    "recording.save('s3://bucket/run')": "cloud",
    "__import__('scio_recorder.integrations.ray')": "ray",
    "__import__('scio_recorder.integrations.lightning')": "lightning",
    "__import__('scio_recorder.integrations.transformers')": "transformers",
    "recording.to_frame()": "frame",
    "events.to_frame()": "frame",
    "scio_recorder.compare(recording, other).to_frame()": "frame",
    "scio_recorder.similarity(recording, other).to_frame()": "frame",
    "recording.plot()": "plot",
    "scio_recorder.similarity(recording, other).plot()": "plot",
    "recording.to_arrow()": "arrow",
    "recording.to_datasets('folder')": "datasets",
    "recording.to_zarr('folder')": "zarr",
}
WORKS = ("import scio_recorder.integrations.tensorboard", "recording.report('page.html')")
# Names of commands, and the extra that they need.
COMMANDS = {
    "inspect s3://bucket/run": "cloud",
    "verify s3://bucket/run": "cloud",
    "status s3://bucket/run": "cloud",
    "report s3://bucket/run": "cloud",
    "compare s3://bucket/run run": "cloud",
    "collect torch.nn:ReLU --input-size 1,4 --layers 0-1 --data builtins:list --out s3://b/run": (
        "cloud"
    ),
    "demo": "demo",
    "inspect run": None,
    "verify run": None,
    "compare run run": None,
    "report run": None,
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    code = f"""{HEAD}
told = {{}}
for case in {list(CASES)!r}:
    try:
        eval(case)
    except scio_recorder.MissingPackageError as error:
        told[case] = [str(isinstance(error, ModuleNotFoundError)), str(error)]
for case in {WORKS!r}:
    exec(case)
print(json.dumps(told))
"""
    folder = tmp_path_factory.mktemp("absent")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_what_needs_an_extra_names_it(told, case):
    is_not_found, text = told[case]
    assert is_not_found == "True"
    assert f"pip install -e '.[{CASES[case]}]'" in text


def test_no_command_shows_a_traceback(tmp_path: Path) -> None:
    code = f"""{HEAD}
for command in {list(COMMANDS)!r}:
    try:
        status = main(command.split())
    except SystemExit as error:
        status = error.code
    print("\\n#", command, status, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.split("\n# ")
    for number, (command, extra) in enumerate(COMMANDS.items()):
        ended, status = said[number + 1].splitlines()[0].rsplit(maxsplit=1)
        assert ended == command
        assert (status == "0") == (extra is None), done.stderr
        if extra is not None:
            assert f"pip install -e '.[{extra}]'" in said[number].splitlines()[-1]

"""The command compare, whose exit status says whether two runs differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scio_recorder import RecordingError, open_recording
from scio_recorder.command_line import main

CODE = """
import torch
from torch import nn
def reference():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(6, 3))
def changed():
    net = reference()
    with torch.no_grad():
        net[3].bias[1] += 1e-3
    return net
def renamed():
    names = ["first", "1", "2", "last"]
    net = nn.Sequential()
    for name, module in zip(names, reference()):
        net.add_module(name, module)
    return net
def half():
    return reference().bfloat16()
def half_changed():
    net = half()
    with torch.no_grad():
        net[0].bias[2] += 1
    return net
class Broken(nn.Module):
    def forward(self, x):
        raise KeyError("no way")
data = [(torch.full((3, 4), float(i)), "label") for i in range(4)]
def once():
    yield from data
def failing():
    yield data[0]
    raise ValueError("the share is gone")
def leaving():
    yield data[0]
    raise SystemExit(0)
def nothing():
    return []
def no_loader():
    return None
wide = [torch.ones(3, 5)]
"""
MODULES = {"compare_nets": CODE}
NETS = ["compare", "compare_nets:reference", "compare_nets:changed"]
DATA = ["--data", "compare_nets:data"]


def recorded(net: str, path: str) -> str:
    size = ["--input-size", "1,4"]
    command = ["collect", f"compare_nets:{net}", *size, *DATA, "--layers", "*", "--out", path]
    assert main(command) == 0
    return path


@pytest.mark.parametrize("data", ["data", "once"])
def test_nets(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = ["--data", f"compare_nets:{data}"]
    assert main([*NETS, *source]) == 1
    said = capsys.readouterr().out
    assert said.startswith("First difference: 1-4 (3), sample 0, index (1,): ")
    assert "its inputs are equal" in said
    assert "2 of 5 layers differ, in 12 samples." in said
    assert main(["compare", *["compare_nets:reference"] * 2, *source]) == 0
    assert capsys.readouterr().out.startswith("No difference in 5 layers, 12 samples.")


def test_recordings_and_nets(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = recorded("reference", "one"), recorded("changed", "two")
    same = recorded("reference", "same")
    capsys.readouterr()
    assert main(["compare", one, same]) == 0
    assert main(["compare", one, two]) == 1
    assert "inputs=True" in capsys.readouterr().out
    assert main(["compare", one, same, "--operations"]) == 2
    assert "--operations runs both networks again" in capsys.readouterr().err
    assert main(["compare", one, "compare_nets:changed", *DATA]) == 1
    assert main(["compare", "compare_nets:reference", same, *DATA]) == 0


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NETS, *DATA, "--atol", "0.01"]) == 0
    assert main([*NETS, *DATA, "--layers", "0", "2"]) == 0
    assert "2 layers, 12 samples" in capsys.readouterr().out
    assert main([*NETS, *DATA, "--max-batches", "2"]) == 1
    assert "in 6 samples" in capsys.readouterr().out
    assert main([*NETS, *DATA, "--operations"]) == 1
    assert "In the candidate, the operation linear:0 made it at" in capsys.readouterr().out
    assert main([*NETS, *DATA, "--report", "page.html"]) == 1
    assert "wrote page.html" in capsys.readouterr().out
    assert "First difference: 1-4" in Path("page.html").read_text(encoding="utf-8")
    renamed = ["compare", NETS[1], "compare_nets:renamed", *DATA]
    assert main([*renamed, "--layers", "0", "3", "--match", "0=first", "3=last"]) == 0
    assert "2 layers" in capsys.readouterr().out


def test_a_net_is_given_its_own_type_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    near = ["--rtol", "0.02", "--atol", "0.02"]
    half = ["compare", NETS[1], "compare_nets:half", *DATA]
    assert main(half) == 1
    assert main([*half, *near]) == 0
    capsys.readouterr()
    changed = ["compare", NETS[1], "compare_nets:half_changed", *DATA]
    assert main([*changed, *near]) == 1
    assert "First difference: 1-1 (0)" in capsys.readouterr().out
    one = recorded("reference", "one")
    assert main(["compare", one, "compare_nets:half", *DATA, *near]) == 0


def test_faults_beyond_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    half = ["compare", NETS[1], "compare_nets:half", *DATA, "--local"]
    assert main(half) == 0
    assert capsys.readouterr().out.startswith(
        "No fault: rounding explains all that differs. Judged: 5 layers."
    )
    assert main(["compare", NETS[1], "compare_nets:half_changed", *DATA, "--local"]) == 1
    assert capsys.readouterr().out.startswith("Fault: 1-1 (0): local error ")
    assert main(["compare", recorded("reference", "one"), *half[2:]]) == 2
    assert "--local needs what each layer" in capsys.readouterr().err


def test_training_mode_is_asked_for() -> None:
    assert main([*NETS[:2], NETS[1], *DATA]) == 0
    assert sys.modules["compare_nets"].reference().training
    # Both sides draw the same numbers for dropout.
    assert main([*NETS[:2], NETS[1], *DATA, "--train"]) == 0


TROUBLE = {
    "no data": (NETS, "--data MODULE:NAME"),
    "data for recordings": (["compare", ".", ".", *DATA], "leave it out"),
    "layers of recordings": (["compare", ".", ".", "--layers", "0"], "--layers"),
    "no recording": (["compare", ".", "."], "no recording"),
    "a file": (["compare", "compare_nets.py", "."], "is a file"),
    "no folder": (["compare", "nowhere", "."], "no such folder"),
    "no net": ([*NETS[:2], "compare_nets:data", *DATA], "torch.nn.Module"),
    "no module": (["compare", "nowhere:net", NETS[1], *DATA], "can't load"),
    "a broken net": ([*NETS[:2], "compare_nets:Broken", *DATA], "KeyError: 'no way'"),
    "a broken loader": ([*NETS, "--data", "compare_nets:failing"], "the share is gone"),
    "a loader that leaves": ([*NETS, "--data", "compare_nets:leaving"], "sys.exit"),
    "no loader": ([*NETS, "--data", "compare_nets:no_loader"], "--data is a NoneType, which can't"),
    "inputs": ([*NETS, "--data", "compare_nets:wide"], "the dry run of Sequential on --data="),
    "an empty loader": ([*NETS, "--data", "compare_nets:nothing"], "no batches"),
    "a tolerance": ([*NETS, *DATA, "--rtol", "-1"], "give a number from 0 on"),
    "no tolerance": ([*NETS, *DATA, "--atol", "nan"], "give a number from 0 on"),
    "a match": ([*NETS, *DATA, "--match", "0"], "layers.*=h.*"),
    "a match of nothing": ([*NETS, *DATA, "--match", "8=0"], "'8'"),
    "a layer": ([*NETS, *DATA, "--layers", "8"], "8"),
    "a page": ([*NETS, *DATA, "--report", "nowhere/page.html"], "can't write"),
    "nothing in common": ([*NETS[:2], "torch.nn:ReLU", *DATA, "--match", "0=1"], "Write --match"),
    "a word for rows": ([*NETS, *DATA, "--rows", "lines"], "tokens"),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_any_trouble_is_two(trouble: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, word = TROUBLE[trouble]
    assert main(command) == 2
    said = capsys.readouterr()
    assert word in said.err
    assert said.err.startswith("scio-recorder: error: ")
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("more", [["--rtol", "small"], ["--what"]])
def test_wrong_use_is_two(more: list[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main([*NETS, *DATA, *more])
    assert status.value.code == 2


def test_damaged_data_is_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = recorded("reference", "one"), recorded("changed", "two")
    chunk = max(Path(two).rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[-20] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(RecordingError):
        open_recording(two, verify=True)
    assert main(["compare", one, two]) == 2


@pytest.mark.campaign
def test_output_that_nobody_reads_is_trouble() -> None:
    command = f"{sys.executable} -m scio_recorder {' '.join([*NETS, *DATA])}"
    result = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True)
    assert result.returncode == 2
    assert "No space left" in result.stderr

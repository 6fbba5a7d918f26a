"""The commands collect, inspect and verify."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from scio_recorder import open_recording
from scio_recorder.cli import main

CODE = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
data = [torch.full((3, 4), float(i)) for i in range(4)]
def loader():
    return iter(data)
"""
COMMAND = ["collect", "collect_nets:net", "--input-size", "1,4", "--data", "collect_nets:loader"]


@pytest.fixture(autouse=True)
def code(tmp_path, monkeypatch):
    (tmp_path / "collect_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "collect_nets", raising=False)


def test_collect_inspect_verify(capsys):
    assert main([*COMMAND, "--layers", "0", "1-3", "--out", "run"]) == 0
    assert "12 samples, complete" in capsys.readouterr().out
    net = sys.modules["collect_nets"].net
    data = torch.cat(sys.modules["collect_nets"].data)
    with torch.no_grad():
        assert torch.equal(open_recording("run")["0"][:], net[0](data))
        assert torch.equal(open_recording("run")["2"][:], net(data))
    assert isinstance(net, nn.Module)
    assert not net.training

    assert main(["inspect", "run"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.strip().startswith("1-3"))
    with torch.no_grad():
        values = net(data).double()
    figures = [
        f"{value:.4g}" for value in (values.mean(), values.std(), values.min(), values.max())
    ]
    assert row.split()[:5] == ["1-3", "2", type(net[2]).__name__, "[3]", "float32"]
    assert row.split()[5:10] == ["144", *figures]
    assert row.split()[-2:] == ["0", "0"]
    assert main(["verify", "run"]) == 0
    assert "every checksum is right; complete" in capsys.readouterr().out


def test_thinned_and_rounded(capsys):
    options = ["--every", "2", "--max-batches", "1", "--keep-dtype", "float16"]
    assert main([*COMMAND, "--layers", "0", "--out", "run", *options]) == 0
    assert open_recording("run")["0"].dtype == torch.float16
    assert open_recording("run").num_samples == 3


def test_what_is_there_is_only_gone_on_with_when_asked(capsys):
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 0
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 2
    assert "already holds a recording" in capsys.readouterr().err
    assert main([*COMMAND, "--layers", "0", "--out", "run", "--resume"]) == 0


def test_damage_is_told(tmp_path, capsys):
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 0
    (chunk,) = (tmp_path / "run").glob("*/chunk-*")
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1
    chunk.write_bytes(content)
    assert main(["verify", "run"]) == 2
    assert chunk.name in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_nothing_there(command, capsys):
    assert main([command, "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err

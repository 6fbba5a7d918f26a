"""Messages of the library in the words of the command line."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

from scio_recorder.command_line import main
from scio_recorder.command_line.wording import warnings_spoken

CODE = """
import torch
from torch import nn
from scio_recorder import Tokens
net = nn.Linear(4, 3)
data = [torch.ones(3, 4)]
def words():
    return Tokens(mask="mask")
single = torch.ones(4, 4)
samples = [torch.ones(4) for _ in range(3)]
texts = ["one", "two"]
pairs = [(torch.ones(3, 4), torch.ones(3, 4))]
lengths = [torch.ones(2, 5, 4), torch.ones(2, 6, 4)]
keywords = [{"input": torch.ones(2, 4), "id": 3}]
wide = [torch.ones(3, 5)]
class Pair(nn.Module):
    def forward(self, input, mask=None):
        return {"out": input}
class Flow(nn.Module):
    def forward(self, input):
        return input if input.sum() > 0 else -input
nothing = []
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfit_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "unfit_nets", raising=False)


PLAIN = ("unfit_nets:net", "--input-size", "2,4")
OF_TEXTS = ("torch.nn:Tanh", "--input-size", "2,5,4")
PYTHON = "write Recorder(net, ...).collect(batches, {}=...) in Python"
INPUTS = "let --data give what the net takes"
# A net, its batches, further arguments, and words of the message.
UNFIT = {
    "nothing": (PLAIN, "nothing", [], ["--data gave no batch"]),
    "a tensor": (PLAIN, "single", [], ["--data is a single tensor", "give [x]"]),
    "samples": (PLAIN, "samples", [], ["DataLoader", PYTHON.format("sample_ids")]),
    "texts": (PLAIN, "texts", [], ["batch 0 is a str", INPUTS]),
    "widths": (PLAIN, "wide", [], ["[3, 5]", INPUTS]),
    "keywords": (PLAIN, "keywords", [], ["'id'", INPUTS]),
    "lengths": (OF_TEXTS, "lengths", [], ["give --rows tokens", PYTHON.format("transform")]),
    "rows": (PLAIN, "data", ["--rows", "tokens"], ["--rows needs", PYTHON.format("transform")]),
    "names": (OF_TEXTS, "lengths", ["--rows", "unfit_nets:words"], ["--rows has", "'mask'"]),
    "a dict": (
        ("unfit_nets:Pair", "--input-size", "2,4"),
        "data",
        [],
        ["choose one with transform", PYTHON.format("transform")],
    ),
    "flow": (
        ("unfit_nets:Flow", "--input-size", "2,4"),
        "data",
        [],
        ["give --allow-dynamic-flow"],
    ),
}
# What only Python knows, unless a message says that it is Python.
KEYWORDS = re.compile(r"(?<!in Python, write )\b(to_inputs|sample_ids|rows|resume|force_\w+)=\B")


@pytest.mark.parametrize("what", UNFIT)
def test_messages_name_options_and_say_what_needs_python(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (net, *size), data, more, words = UNFIT[what]
    command = ["collect", net, *size, "--data", f"unfit_nets:{data}", "--layers", "*", *more]
    assert main([*command, "--out", "run"]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in words:
        assert word in said
    assert KEYWORDS.findall(said.replace("batches, sample_ids=", "")) == []


def test_a_warning_is_one_line_in_words_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["collect", "unfit_nets:Pair", "--input-size", "2,4", "--out", "run"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*command, "--data", "unfit_nets:pairs", "--layers", "*"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("scio-recorder: warning: only batch[0] goes into the net")
    assert INPUTS in warning
    assert error.startswith("scio-recorder: error: ")
    # Other libraries' warnings are shown as ever.
    with pytest.warns(UserWarning, match="of another"), warnings_spoken():
        warnings.warn("of another", UserWarning, stacklevel=1)

"""Messages of the library in the words of the command line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import scio_recorder
from scio_recorder import Recorder
from scio_recorder.command_line import main
from scio_recorder.command_line.command_words import command_message, command_warnings
from scio_recorder.recording.options import CollectOptions

PACKAGE = Path(scio_recorder.__file__).parent

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
no_parts = lambda part: []
mapping = {"input": torch.ones(2, 4)}
"""
MODULES = {"unfit_nets": CODE}


PLAIN = ("unfit_nets:net", "--input-size", "2,4")
OF_TEXTS = ("torch.nn:Tanh", "--input-size", "2,5,4")
PYTHON = "In Python, write Recorder(net, ...).collect(batches, {}=...)"
INPUTS = "let --data give what the net takes"
# A net, its batches, further arguments, and words of the message.
UNFIT = {
    "nothing": (PLAIN, "nothing", [], ["--data is empty: it gave no batch"]),
    "parts": (PLAIN, "no_parts", ["--parts", "2"], ["are empty: --data gave no batch"]),
    "a tensor": (PLAIN, "single", [], ["--data is a single tensor", "write [x]"]),
    "samples": (PLAIN, "samples", [], ["DataLoader", PYTHON.format("sample_ids")]),
    "texts": (PLAIN, "texts", [], ["batch 0 is a str", INPUTS]),
    "widths": (PLAIN, "wide", [], ["[3, 5]", INPUTS]),
    "keywords": (PLAIN, "keywords", [], ["'id'", INPUTS]),
    "lengths": (OF_TEXTS, "lengths", [], ["write --rows tokens", PYTHON.format("transform")]),
    "rows": (PLAIN, "data", ["--rows", "tokens"], ["--rows needs", PYTHON.format("transform")]),
    "names": (OF_TEXTS, "lengths", ["--rows", "unfit_nets:words"], ["--rows has", "'mask'"]),
    "a dict": (
        ("unfit_nets:Pair", "--input-size", "2,4"),
        "data",
        [],
        ["choose one with transform", PYTHON.format("transform")],
    ),
    "a mapping": (PLAIN, "mapping", [], ["--data is a mapping", "write [x] if it is one batch"]),
    "flow": (
        ("unfit_nets:Flow", "--input-size", "2,4"),
        "data",
        [],
        ["write --allow-dynamic-flow"],
    ),
}
# Keywords for which there are options.
KEYWORDS = re.compile(r"(?<![-\w])(rows|resume|every|dtypes?|batches|max_batches|force_\w+)=")


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
    assert KEYWORDS.findall(said) == []


ROOMS = ("capture", "nets", "postprocessors", "recording", "stores")


def messages() -> Iterator[str]:
    """Yield the texts in the rooms in which a command runs, with ``_`` for what is put in."""
    for room in ROOMS:
        for file in (PACKAGE / room).rglob("*.py"):
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                for field in ast.iter_child_nodes(node):
                    parts = field.values if isinstance(field, ast.JoinedStr) else [field]
                    texts = [getattr(part, "value", "_") for part in parts]
                    shown = "".join(text if isinstance(text, str) else "_" for text in texts)
                    is_docstring = isinstance(node, ast.Expr)
                    if " " in shown and not (is_docstring or isinstance(node, ast.JoinedStr)):
                        yield shown


def test_no_message_leaves_a_keyword_of_python_unexplained() -> None:
    keywords = set(inspect.signature(Recorder.collect).parameters) - {"store"}
    keywords |= {"input_size", "input_data", "dtypes", "force_static_flow"}
    found = 0
    for text in (text for text in messages() if "=" in text):
        said = command_message(text)
        for keyword in re.findall(r"(?<![-\w])(\w+)=(?!=)", said):
            if keyword in keywords:
                found += 1
                assert f"{keyword}=..." in said.partition("In Python, write ")[2], text
    assert found > 20


def test_the_command_has_the_options_that_need_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = {"store": "--out", "dtype": "--keep-dtype"}
    of_code = {"reduce", "transform", "to_inputs", "sample_ids", "activation_postproc"}
    left_out = of_code | {"stop_early", "progress"}
    with pytest.raises(SystemExit):
        main(["collect", "--help"])
    offered = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for field in dataclasses.fields(CollectOptions):
        word = words.get(field.name, f"--{field.name.replace('_', '-')}")
        assert (word in offered) == (field.name not in left_out), field.name
        # Messages name it as the command does; these two are said by what is written for them.
        if word in offered and field.name not in ("store", "resume"):
            assert "In Python" not in command_message(f"give {field.name}=")
    page = (PACKAGE.parent / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert {word for word in offered if f"`{word}" not in page} == {"--help"}


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
    with pytest.warns(UserWarning, match="of another"), command_warnings():
        warnings.warn("of another", UserWarning, stacklevel=1)

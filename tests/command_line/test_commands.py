"""The command line, called in this process and, once for each command, as a user would."""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from scio_recorder import Recorder, open_recording
from scio_recorder.command_line import command_arguments, main

NETS = """
import torch
from torch import nn

class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.mix = nn.Bilinear(4, 3, 2)

    def forward(self, words, features):
        assert words.dtype == torch.int64 and features.dtype == torch.float32
        return self.mix(self.embed(words), features)

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() >= 0 else x

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)

    def forward(self, x):
        return self.norm(self.conv(x))

pairs = ([1, 2],)
loader = torch.utils.data.DataLoader([1])
net = Small()
half = Small().bfloat16()
build = lambda: Small()
tensor = torch.zeros(5, 3)
pair = (torch.zeros(5, dtype=torch.int64), torch.zeros(5, 3))
keywords = {"words": pair[0], "features": pair[1]}
make_pair = lambda: pair
number = 3
def broken(): raise RuntimeError("no weights here")
def leaving(): raise SystemExit(4)
def wants(argument): return Small()
"""


MODULES = {
    "cli_nets": NETS,
    "cli_broken": "import no_such_module_anywhere",
    "cli_leaving": "import sys; sys.exit(3)",
    "cli_interrupted": "raise KeyboardInterrupt",
}


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["summary", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def expected(net: nn.Module, **inputs: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(Recorder(net, **inputs))
    return capture.get()


@pytest.mark.parametrize("name", ["net", "Small", "build"])
def test_summary_is_what_the_recorder_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, f"cli_nets:{name}", "--input-size", "2,3")
    import cli_nets

    assert text == expected(cli_nets.Small(), input_size=(2, 3))
    for label in ("1-1", "1-2", "1-3"):
        assert label in text


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        (["--input-size=5", "--dtype=int64", "--input-size=5,3", "--dtype=torch.float32"], "pair"),
        (["--input-data=cli_nets:pair"], "pair"),
        (["--input-data=cli_nets:keywords"], "keywords"),
        (["--input-data=cli_nets:make_pair"], "pair"),
    ],
)
def test_several_inputs(
    arguments: list[str], same: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(capsys, "cli_nets:Words", *arguments)
    import cli_nets

    assert text == expected(cli_nets.Words(), input_data=getattr(cli_nets, same))


def test_one_tensor_as_data_and_one_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "cli_nets:Small", "--input-data", "cli_nets:tensor")
    import cli_nets

    assert text == expected(cli_nets.Small(), input_size=(5, 3))
    text = out(capsys, "torch.nn:Identity", "--input-size", "1,2", "--dtype", "int64")
    assert text == expected(nn.Identity(), input_size=(1, 2), dtypes=[torch.int64])
    text = out(capsys, "cli_nets:half", *SIZE)
    assert text == expected(cli_nets.half, input_size=(2, 3))


def test_what_is_imported_later_is_found_in_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cli_helper.py").write_text("from torch import nn\nnet = nn.Tanh()")
    lazy = "def build():\n    from cli_helper import net\n    return net"
    (tmp_path / "cli_lazy.py").write_text(lazy)
    for name in ("cli_helper", "cli_lazy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "Tanh" in out(capsys, "cli_lazy:build", "--input-size", "2,3")


@pytest.mark.campaign
def test_help_where_python_has_removed_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "scio_recorder", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "inspect" in done.stdout


def test_flow_that_depends_on_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", "cli_nets:Branching", "--input-size", "1,2"]) == 2
    assert "error:" in capsys.readouterr().err
    text = out(capsys, "cli_nets:Branching", "--input-size", "1,2", "--allow-dynamic-flow")
    assert "Linear" in text


SIZE = ["--input-size", "2,3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cli_nets", *SIZE], ["'cli_nets'", "MODULE:NAME"]),
        (["cli_nets:", *SIZE], ["MODULE:NAME"]),
        (["no_such_module_at_all:net", *SIZE], ["no_such_module_at_all", "write mynets:build"]),
        (["cli_broken:net", *SIZE], ["cli_broken:net", "no_such_module_anywhere"]),
        (["cli_nets:missing", *SIZE], ["AttributeError", "missing"]),
        (["cli_nets:number", *SIZE], ["is of type int", "not a torch.nn.Module"]),
        (["cli_leaving:net", *SIZE], ["can't load cli_leaving:net", "it called sys.exit(3)"]),
        (["cli_nets:leaving", *SIZE], ["cli_nets:leaving", "it called sys.exit(4)"]),
        (["cli_nets:broken", *SIZE], ["failed", "RuntimeError: no weights here"]),
        (["cli_nets:wants", *SIZE], ["without arguments", "argument"]),
        (["builtins:dict", *SIZE], ["dict", "torch.nn.Module"]),
        (["cli_nets.py:net", *SIZE], ["write cli_nets:net"]),
        (["./src/cli_nets.py:net", *SIZE], ["write src.cli_nets:net"]),
        (["cli_nets:Smal", *SIZE], ["the closest name is 'Small'"]),
        (["cli_nets:Small.forwrd", *SIZE], ["the closest name is 'forward'"]),
        (
            ["cli_nets:net", "--dtype", "int64", "--dtype", "int64", *SIZE],
            ["2 --dtype", "1 --input-size"],
        ),
        (["cli_nets:net", "--dtype", "nn", *SIZE], ["'nn' is not a dtype"]),
        (["cli_nets:net", "--dtype", "flaot32", *SIZE], ["the closest name is 'float32'"]),
        (["cli_nets:net", "--input-data", "cli_nets:tensor", "--dtype", "int64"], ["--dtype"]),
        (["cli_nets:net", "--input-size", "2,5"], ["--input-size 2,5 failed", "2x5"]),
        (["cli_nets:net", *SIZE, "--dtype", "half"], ["Half", "Without --dtype its inputs"]),
        (["cli_nets:Image", "--input-size", "3,8,8"], ["write --input-size 1,3,8,8"]),
        (["cli_nets:Image", "--input-data", "cli_nets:number"], ["got (int,", "a tensor, a tuple"]),
        (["cli_nets:Image", "--input-data", "cli_nets:loader"], ["(DataLoader,", "next(iter("]),
        (["cli_nets:Image", "--input-data", "cli_nets:pairs"], ["conv2d() received", "expected"]),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", *arguments]) == 2
    assert_one_line(capsys, words)


def assert_one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Whether what was printed is one line about an error, with these words."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("scio-recorder: error: ")
    assert captured.err.count("\n") == 1
    assert [word for word in words if word not in captured.err] == []
    # What torch would accept is not listed.
    assert "padding" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["unknown"], ["unknown"]),
        (["inspct", "run"], ["inspct", "inspect"]),
        (["--what"], ["COMMAND; scio-recorder --help lists"]),
        (["summary", "cli_nets:net"], ["--input-size"]),
        (["summary", "cli_nets:net", "--input-size", "1,x"], ["1,3,32,32"]),
        (["summary", "cli_nets:net", "--input-size", "-1,3"], ["--input-size"]),
        (["summary", "cli_nets:net", "--input-size=2,-3"], ["not a shape"]),
        (["summary", "cli_nets:net", "--input-size=0,3"], ["not a shape"]),
        (["summary", "a:b", "--input-size", "2", "--input-data", "c:d"], ["not allowed with"]),
        (["summary", "--input-size", "1"], ["MODULE:NAME; scio-recorder summary --help lists"]),
        (["demo", "--epochs", "many"], ["--epochs"]),
        (["report", "run", "--titel", "x"], ["--titel x; scio-recorder report --help lists"]),
        (["collect", "--layers", "fc", "a:b", "--input-size", "1"], ["(write it before --layers"]),
        (
            ["compare", "a", "--match", "0=1", "b"],
            ["CANDIDATE (write it before --layers and --match"],
        ),
    ],
)
def test_what_the_parser_refuses(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert_one_line(capsys, words)


@pytest.mark.parametrize(
    "size",
    [["2", "3"], ["2,3"], ["(2, 3)"], ["[2,3]"], ["2, 3"]],
)
def test_shapes_as_people_write_them(size: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = out(capsys, "--input-size", *size, "cli_nets:Small")
    assert out(capsys, "cli_nets:Small", "--input-size", *size) == before
    assert "(2, 4)" in before


@pytest.mark.parametrize("words", [["--help"], ["collect", "--help"], ["--version"], ["--what"]])
def test_help_comes_without_torch(words: list[str]) -> None:
    code = f"""
import sys
from scio_recorder.command_line import main
try:
    main({words})
except SystemExit:
    print(sorted({{"torch", "numpy", "rich", "torchinfo"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_demo_without_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # None in sys.modules makes the import fail as a missing package does.
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo"]) == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.campaign
def test_demo_takes_its_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert main(["demo", "--epochs", "1", "--seed", "1", "--out", str(folder)]) == 0
        texts.append(capsys.readouterr().out.replace(str(folder), "FOLDER"))
        page = (folder / "digits.html").read_text(encoding="utf-8")
        assert "<h1>Known and unknown digits</h1>" in page
        assert "embed" in (folder / "layers.html").read_text(encoding="utf-8")
        assert open_recording(folder / "digits", verify=True).num_samples == 533
    assert texts[0] == texts[1]
    assert "AUROC" in texts[0]
    commands = re.findall(r"^  scio-recorder (.*)", texts[0], re.MULTILINE)
    assert len(commands) == 3
    for command in commands[:2]:
        assert main(command.replace("FOLDER", str(folder)).split()) == 0


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scio_recorder.command_line.demo.run_demo", interrupt)
    assert main(["demo"]) == 130
    assert main(["summary", "cli_interrupted:net", "--input-size", "2"]) == 130


@pytest.mark.parametrize(("encoding", "corner"), [("ascii", "|"), ("cp1252", "|"), ("utf-8", "├")])
def test_signs_that_the_output_can_not_take(
    encoding: str, corner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding=encoding))
    assert main(["summary", "cli_nets:net", "--input-size", "2,3"]) == 0
    text = bytes_out.getvalue().decode(encoding)
    (row,) = (line for line in text.splitlines() if line.startswith("  1-1"))
    assert row.split()[1] == corner


def test_an_output_that_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["summary", "cli_nets:net", "--input-size", "2,3"]) == 1
        # What could not be written is not tried again at the end.
        full.flush()
    said = capsys.readouterr().err
    assert said.startswith("scio-recorder: error: ")
    assert "No space left" in said
    assert said.count("\n") == 1


@pytest.mark.campaign
def test_as_a_program() -> None:
    command = [sys.executable, "-m", "scio_recorder"]
    arguments = ["summary", "cli_nets:Small", "--input-size", "2,3"]
    # The folder of this checkout, in case the package is not installed.
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": root},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Linear" in done.stdout


def test_every_argument_is_read() -> None:
    arguments = set()
    for command in (
        "summary",
        "collect",
        "status",
        "inspect",
        "verify",
        "report",
        "compare",
        "demo",
    ):
        parser = argparse.ArgumentParser(add_help=False)
        getattr(command_arguments, command)(parser)
        arguments |= {action.dest for action in parser._actions}
    tree = ast.parse((Path(command_arguments.__file__).parent / "commands.py").read_text("utf-8"))
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in reads if ast.unparse(node.value) == "parsed"}
    assert len(arguments) > 20
    assert arguments <= read


def test_without_a_word_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    assert "inspect" in capsys.readouterr().out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # The tests also run where the package is not installed.
    installed = {"scio-recorder": "1.2.3"}
    monkeypatch.setattr(
        "scio_recorder.command_line.command_arguments.version", installed.__getitem__
    )
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "1.2.3\n"

"""The commands collect, inspect and verify."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from torch import nn

from scio_recorder import CollectError, Recorder, open_recording
from scio_recorder.command_line import main
from scio_recorder.stores import Disk
from scio_recorder.workers.leases import lease_name
from tests.display.examples import hostile_recording

CODE = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
data = [torch.full((3, 4), float(i)) for i in range(4)]
def loader():
    return iter(data)
def failing():
    yield from data[:2]
    raise OSError("the share is gone")
calls = []
def part_of(part):
    calls.append(part)
    if len(calls) == 2:
        raise OSError("the share is gone")
    return [data[part]]
def asking(part):
    calls.append(part)
    if len(calls) == 2:
        from scio_recorder.command_line import main
        assert main(["status", "run"]) == 0
    return [data[part]]
def empty_handed():
    yield 1 / 0
from scio_recorder import Tokens
def padded():
    for length in (3, 2):
        x = torch.randn(2, length, 4)
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, -1] = False
        yield {"input": x, "mask": mask, "word": torch.full((2, length), length)}
class Inputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, input, mask=None, word=None):
        return self.layer(input)
words_net = Inputs()
def words():
    return Tokens(mask="mask", fields=("word",))
"""
MODULES = {"collect_nets": CODE}
COMMAND = ["collect", "collect_nets:net", "--input-size", "1,4", "--data", "collect_nets:loader"]


def test_collect_inspect_verify(capsys):
    assert main([*COMMAND, "--layers", "0", "1-3", "--out", "run"]) == 0
    assert "12 samples, complete" in capsys.readouterr().out
    net, data = sys.modules["collect_nets"].net, sys.modules["collect_nets"].data
    # In batches as they were: kernels for other sizes round otherwise.
    with torch.no_grad():
        assert torch.equal(open_recording("run")["0"][:], torch.cat([net[0](x) for x in data]))
        assert torch.equal(open_recording("run")["2"][:], torch.cat([net(x) for x in data]))
    assert isinstance(net, nn.Module)
    assert not net.training

    assert main(["inspect", "run"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.strip().startswith("1-3"))
    with torch.no_grad():
        values = torch.cat([net(x) for x in data]).double()
    figures = [
        f"{value:.3g}" for value in (values.mean(), values.std(), values.min(), values.max())
    ]
    assert row.split()[:5] == ["1-3", "2", type(net[2]).__name__, "[3]", "float32"]
    assert row.split()[5:11] == ["144", "bytes", *figures]
    assert row.split()[11:] == ["0"]
    assert main(["verify", "run"]) == 0
    assert "all checksums match; complete" in capsys.readouterr().out


def test_operations_are_listed_collected_and_compared(capsys):
    net = ["collect_nets:words_net", "--input-size", "1,2,4"]
    assert main(["summary", *net, "--operations", "layer"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].strip() == "1 operation"
    assert listed[2].split()[:5] == ["layer/linear:0", "(1,", "2,", "3)", listed[2].split()[4]]
    assert listed[2].rstrip().endswith("return F.linear(input, self.weight, self.bias)")
    assert main(["summary", *net, "--operations"]) == 0
    assert capsys.readouterr().out.splitlines() == listed
    assert main(["summary", *net, "--operations", "layer/add"]) == 2
    assert "no operation is 'layer/add'" in capsys.readouterr().err
    command = ["collect", *net, "--data", "collect_nets:padded", "--rows", "collect_nets:words"]
    assert main([*command, "--layers", "*/linear", "layer", "--out", "run"]) == 0
    assert "1 of 2 layers and 1 operation recorded" in capsys.readouterr().out
    recording = open_recording("run")
    assert recording.num_rows == 8
    assert torch.equal(recording["layer/linear"][:], recording["layer"][:])
    for command in ("inspect", "verify", "report"):
        assert main([command, "run"]) == 0
    assert "1-1/linear:0  layer/linear:0" in capsys.readouterr().out
    assert "1-1/linear:0" in Path("run.html").read_text(encoding="utf-8")
    assert main(["compare", "run", "run"]) == 0
    assert "No difference in 2 layers" in capsys.readouterr().out


def test_a_table_fits_120_columns_and_cuts_no_figure(tmp_path, capsys):
    name = "encoder_of_the_whole_network_層層"
    net = nn.Sequential()
    for place in range(2):
        inner = nn.Sequential()
        inner.add_module(f"attention{place}", nn.Linear(2048, 1024))
        net.add_module(f"{name}{place}", inner)
        net.add_module(f"act{place}", ActivationOfALongName())
    rnet = Recorder(net, input_size=(1, 256, 2048))
    rnet.record("*")
    layers = {"*attention1": lambda value, batch: value.double() * -1.2345e-17}
    recording = rnet.collect([torch.randn(2, 256, 2048)], transform=layers, store="disk:run")
    capsys.readouterr()
    assert main(["inspect", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 120
    frame = recording.to_frame()
    note = " ".join(lines[2 + len(frame) :])
    assert note.startswith("Made with scio_recorder ")
    assert f"torch {torch.__version__}, python {platform.python_version()}, numpy" in note
    for label, line in zip(frame.index, lines[2 : 2 + len(frame)], strict=True):
        cells = line.split()
        assert cells[0] == label
        assert cells[1].rstrip("…")
        assert frame["name"][label].startswith(cells[1].rstrip("…")) or label == "0-1"
        row = frame.loc[label]
        assert [float(cell) for cell in cells[-5:-1]] == pytest.approx(
            [row["mean"], row["std"], row["min"], row["max"]], rel=6e-3, abs=1e-30
        )


class ActivationOfALongName(nn.Module):
    def forward(self, x):
        return x.repeat(1, 1, 2)


def test_parts_and_their_status(capsys):
    command = [*COMMAND[:-1], "collect_nets:part_of", "--layers", "0", "--out", "run"]
    assert main([*command, "--parts", "3"]) == 1
    shown = capsys.readouterr().err
    assert "1 of 3 parts are complete, durable data of the others stays, and the same" in shown
    # What nobody of ours has put there counts as nothing.
    strange = Path("run", "manifest-of mine")
    strange.touch()
    assert main(["status", "run"]) == 0
    assert "1 of 3 parts are complete, 0 are held" in capsys.readouterr().out
    strange.unlink()
    assert main([*command, "--parts", "2"]) == 2
    assert "in 3 parts, and --parts is 2 here" in capsys.readouterr().err
    assert main([*command, "--parts", "3"]) == 0
    assert "9 samples, complete" in capsys.readouterr().out
    assert main(["status", "run"]) == 0
    assert capsys.readouterr().out == "3 of 3 parts are complete\n"
    net, data = sys.modules["collect_nets"].net, sys.modules["collect_nets"].data
    with torch.no_grad():
        wanted = torch.cat([net[0](x) for x in data[:3]])
    assert torch.equal(open_recording("run")["0"][:], wanted)


def test_status_says_who_holds_what(capsys):
    command = [*COMMAND[:-1], "collect_nets:asking", "--layers", "0", "--out", "run"]
    assert main([*command, "--parts", "2"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 parts are complete, 1 are held" in shown
    row = next(line for line in shown.splitlines() if str(os.getpid()) in line)
    assert row.split()[0] in "01"


@pytest.mark.parametrize("said", ['{"machine":"other"}', '{"host":1,"pid":[],"since":-1}'])
def test_status_trusts_no_lease(capsys, said):
    command = [*COMMAND[:-1], "collect_nets:part_of", "--layers", "0", "--out", "run"]
    main([*command, "--parts", "3"])
    for number in range(3):
        Path("run", lease_name(number, 7)).write_text(said, encoding="ascii")
    capsys.readouterr()
    assert main(["status", "run"]) == 0
    assert "1 of 3 parts are complete" in capsys.readouterr().out


def test_status_of_nothing(capsys):
    assert main(["status", "run"]) == 2
    Path("run").mkdir()
    assert main(["status", "run"]) == 1
    assert "run holds no recording" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "known", "count"),
    [
        ("tokens", "sample, position", 10),
        ("collect_nets:words", "sample, position, word", 8),
        ("collect_nets:Tokens", "sample, position", 10),
    ],
)
def test_rows_of_tokens(rows, known, count, capsys):
    command = ["collect", "collect_nets:words_net", "--input-size", "1,5,4", "--layers", "layer"]
    command += ["--data", "collect_nets:padded", "--out", "run", "--rows", rows]
    assert main(command) == 0
    assert main(["inspect", "run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"4 samples, {count} rows ({known}), complete" in shown
    recording = open_recording("run")
    assert recording["layer"].shape == (count, 3)
    # Whatever rows are must agree when a recording is gone on with.
    other = [*command[:-1], "collect_nets:words" if rows == "tokens" else "tokens", "--resume"]
    assert main([*command, "--resume"]) == 0
    if rows != "collect_nets:Tokens":
        assert main(other) == 2
        assert "other settings: rows" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["token", "collect_nets:nothing", "collect_nets:loader"])
def test_rows_that_are_none(rows, capsys):
    assert main([*COMMAND, "--layers", "0", "--out", "run", "--rows", rows]) == 2
    error = capsys.readouterr().err
    assert rows in error or "rows=" in error
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", ""], "--out '': name a folder"),
        (["--out", "collect_nets.py"], "--out 'collect_nets.py': name a folder"),
        (["--max-batches", "-1"], "error: --max-batches=-1: give a whole number from 1 on"),
        (["--every", "0"], "error: --every=0: give a whole number from 1 on"),
        (["--parts", "0"], "error: --parts=0: give a whole number from 1 on"),
        (
            ["--keep-dtype", "flaot16"],
            "is not a dtype; write it like float32 or int64; the closest",
        ),
    ],
)
def test_options_that_can_not_be(arguments, words, capsys):
    data = ["--data", "collect_nets:part_of"] if "--parts" in arguments else []
    assert main([*COMMAND, "--layers", "0", "--out", "run", *data, *arguments]) == 2
    said = capsys.readouterr().err
    assert is_one_line(said)
    assert words in said
    assert not Path("run").exists()


def test_layers_that_are_named_one_by_one_add_up():
    assert main([*COMMAND, "--layers", "0", "--layers", "1-3", "--out", "run"]) == 0
    assert list(open_recording("run")) == [(1, 1), (1, 3)]


def test_thinned_and_rounded(capsys):
    options = ["--every", "2", "--max-batches", "1", "--keep-dtype", "half"]
    assert main([*COMMAND, "--layers", "0", "--out", "run", *options]) == 0
    assert open_recording("run")["0"].dtype == torch.float16
    assert open_recording("run").num_samples == 3


def test_names_of_layers_do_nothing_to_the_terminal(capsys):
    hostile_recording().save("run")
    assert main(["inspect", "run"]) == 0
    shown = capsys.readouterr().out
    assert all(character.isprintable() for character in shown.replace("\n", ""))


def test_what_is_there_is_only_gone_on_with_when_asked(capsys):
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 0
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 2
    assert "already holds a recording: resume it with --resume," in capsys.readouterr().err
    assert main([*COMMAND, "--layers", "0", "--out", "run", "--resume"]) == 0


def test_damage_is_told(tmp_path, capsys):
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 0
    (chunk,) = (tmp_path / "run").glob("chunk-*")
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1
    chunk.write_bytes(content)
    assert main(["verify", "run"]) == 1
    assert chunk.name in capsys.readouterr().err
    # Cut off altogether.
    chunk.write_bytes(b"")
    for command in ("inspect", "verify", "report"):
        assert main([command, "run"]) == 1
        assert is_one_line(capsys.readouterr().err)


def test_ids_that_are_there_twice_are_told(tmp_path, capsys):
    rnet = Recorder(nn.ReLU(), input_size=(1, 2))
    rnet.record("0-1")

    def collect(rank: int) -> None:
        store = Disk(tmp_path / "run", rank=rank, world_size=2)
        rnet.collect([torch.ones(2, 2)], store=store, sample_ids=lambda batch: [4, rank])

    collect(0)
    with pytest.raises(CollectError, match="two samples have the id 4"):
        collect(1)
    # What is there can be read, and nobody but who asks compares the ids of all.
    assert list(open_recording(tmp_path / "run").sample_ids) == [4, 0, 4, 1]
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "two samples have the id 4" in capsys.readouterr().err


def is_one_line(said):
    return said.startswith("scio-recorder: error: ") and said.count("\n") == 1


def with_data(name):
    return [*COMMAND[:-1], f"collect_nets:{name}", "--layers", "0", "--out", "run"]


def test_a_loader_that_raises_midway(capsys):
    assert main(with_data("failing")) == 1
    said = capsys.readouterr().err
    assert is_one_line(said)
    assert "OSError: the share is gone; 6 samples are durable, --resume goes on after them" in said
    assert main([*with_data("loader"), "--resume"]) == 0
    assert open_recording("run").num_samples == 12


def test_a_loader_that_raises_at_once_leaves_nothing_to_go_on_with(capsys):
    assert main(with_data("empty_handed")) == 1
    said = capsys.readouterr().err
    assert is_one_line(said)
    assert said.endswith("batch 0: the loader raised ZeroDivisionError: division by zero\n")


def test_where_an_error_comes_from_is_shown_when_asked(capsys):
    assert main([*with_data("failing"), "--traceback"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "in failing" in said
    assert said.endswith("--resume goes on after them\n")


def test_a_disk_that_fails_is_no_wrong_use(capsys, monkeypatch):
    monkeypatch.setattr("scio_recorder.stores.disk_format.folder.fsync", fail)
    assert main(with_data("loader")) == 1
    assert "No space left" in capsys.readouterr().err


def fail(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_pipe_gets_lines_about_long_work(capsys, monkeypatch):
    monkeypatch.setattr("scio_recorder.command_line.command_words.SECONDS", 0.0)
    assert main(with_data("loader")) == 0
    assert "collecting batches 4/" in capsys.readouterr().err
    for command in ("inspect", "report"):
        assert main([command, "run"]) == 0
        assert "reading layers 1/1" in capsys.readouterr().err
    assert main(["verify", "run"]) == 0
    assert "verifying files 1/?, " in capsys.readouterr().err


SLOW = """
import os, time, torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 2)
def loader():
    for _ in range(2):
        yield torch.ones(3, 4)
    print("waiting", flush=True)
    time.sleep(60)
def part_of(part):
    for number in range(3):
        if number == 2 and not os.path.exists("fast"):
            print("waiting", flush=True)
            time.sleep(60)
        yield torch.ones(3, 4)
"""


def interrupted(arguments, *, path=None, by=signal.SIGINT):
    """Run the command line as a user does, and stop it when it says that it waits."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, root]))}
    # Shells let jobs in the background ignore Ctrl-C, and so what they start.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from scio_recorder.command_line import main; sys.exit(main())"
    # An installed script has the current folder not on its path either.
    command = [sys.executable, "-P", "-c", program]
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(by)
        _, said = process.communicate(timeout=600)
    return process.returncode, said


def collecting_from(module):
    arguments = ["collect", f"{module}:net", "--input-size", "1,4", "--data", f"{module}:loader"]
    return [*arguments, "--layers", "0-1", "--out", "run"]


def assert_says_how_to_go_on(said):
    last = said.splitlines()[-1]
    assert last == "scio-recorder: interrupted; 6 samples are durable, --resume goes on after them"
    assert "Traceback" not in said
    assert open_recording("run").num_samples == 6


def test_interrupted_says_how_to_go_on(tmp_path, capsys):
    text = SLOW.replace("time.sleep(60)", "raise KeyboardInterrupt")
    (tmp_path / "interrupted_nets.py").write_text(text)
    assert main(collecting_from("interrupted_nets")) == 130
    assert_says_how_to_go_on(capsys.readouterr().err)


@pytest.mark.campaign
def test_interrupted_by_a_signal_says_how_to_go_on(tmp_path):
    (tmp_path / "slow_nets.py").write_text(SLOW)
    status, said = interrupted(collecting_from("slow_nets"))
    assert status == 130
    assert_says_how_to_go_on(said)


@pytest.mark.parametrize(
    ("by", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.campaign
def test_stopped_in_a_part_gives_it_back_and_the_same_command_goes_on(tmp_path, by, status, word):
    (tmp_path / "slow_nets.py").write_text(SLOW)
    arguments = ["collect", "slow_nets:net", "--input-size", "1,4", "--data", "slow_nets:part_of"]
    arguments += ["--layers", "0-1", "--out", "run", "--parts", "2"]
    found, said = interrupted(arguments, by=by)
    assert found == status
    assert said.splitlines()[-1] == (
        f"scio-recorder: {word}; 0 of 2 parts are complete, durable data of the others stays, and "
        "the same command goes on"
    )
    assert "Traceback" not in said
    # Nobody has to wait for the part that was given back, and what was seen of it is durable.
    assert not list(Path("run").glob("lease-*"))
    assert open_recording("run").num_samples == 6
    Path("fast").touch()
    assert main(arguments) == 0
    assert open_recording("run").num_samples == 18
    assert open_recording("run").complete


@pytest.mark.campaign
def test_interrupted_before_anything_was_kept(tmp_path):
    (tmp_path / "slow_nets.py").write_text(SLOW.replace("range(2)", "range(0)"))
    arguments = ["collect", "slow_nets:net", "--input-size", "1,4", "--data", "slow_nets:loader"]
    assert interrupted([*arguments, "--layers", "0-1", "--out", "run"]) == (
        130,
        "scio-recorder: interrupted\n",
    )


@pytest.mark.campaign
def test_interrupted_while_torch_is_imported(tmp_path):
    (tmp_path / "slow").mkdir()
    code = "import time; print('waiting', flush=True); time.sleep(60)"
    (tmp_path / "slow" / "torch.py").write_text(code)
    assert interrupted(["inspect", "run"], path=str(tmp_path / "slow")) == (130, "")


@pytest.mark.parametrize("command", ["inspect", "verify", "report", "status"])
def test_what_is_no_recording_is_wrong_use(command, capsys):
    Path("empty").mkdir()
    assert main([*COMMAND, "--layers", "0", "--out", "run"]) == 0
    capsys.readouterr()
    for path, words in {
        "missing": "no such folder",
        "": "no such folder",
        "collect_nets.py": "is a file: give the folder that holds the recording\n",
        "run/recording.safetensors": "is a file: give the folder that holds the recording, such",
    }.items():
        assert main([command, path]) == 2
        assert is_one_line(said := capsys.readouterr().err)
        assert repr(path) in said
        assert words in said
    for path, more in {"empty": "", ".": ": scio-recorder inspect './run'\n"}.items():
        assert main([command, path]) == 1
        said = capsys.readouterr().err
        assert "holds no recording" in said
        assert said.endswith(more)

"""The table on terminals of all widths, and piped."""

from __future__ import annotations

import io
import re

import pytest
import rich
from rich.cells import cell_len
from rich.console import Console
from torch import nn

from scio_recorder import Recorder
from tests.display.examples import hostile_recording, small_recorder, small_recording
from tests.zoo.base import Net


def printed(shown: object, width: int, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_row_with_its_label_name_type_shape_and_parameters() -> None:
    lines = printed(small_recorder(), 80).splitlines()
    assert lines[0] == "Recorder: Sequential, 4 of 8 layers recorded"
    words = [line.replace("●", "").split() for line in lines[2:]]
    assert [row[0] for row in words] == ["0-1", "1-1", "2-1", "2-2", "2-3", "1-2", "1-3", "1-4"]
    assert "├ mix Conv2d" in lines[4]
    assert "(1, 4, 4, 4)" in lines[4]
    assert lines[4].endswith(" 16"), "3 x 4 weights and 4 biases"
    assert lines[8].endswith(" 520"), "64 x 8 weights and 8 biases"
    assert "act ReLU (call 2)" in lines[6]


def test_recorded_rows_are_marked_by_a_sign() -> None:
    lines = printed(small_recorder(), 80, color_system=None).splitlines()[2:]
    marked = [line.split()[1] for line in lines if line.startswith("●")]
    assert marked == ["2-2", "2-3", "1-3", "1-4"]
    ascii_lines = printed_in_ascii(small_recorder())
    assert sum(line.startswith("* ") for line in ascii_lines) == 4
    assert "".join(ascii_lines).isascii()


def printed_in_ascii(shown: object) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=34).print(shown)
    file.flush()
    return file.buffer.getvalue().decode("ascii").splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [8, 20, 30, 40, 63, 64, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_none_is_wrapped(width: int) -> None:
    for recorder in (small_recorder(), deep_recorder()):
        lines = printed(recorder, width).splitlines()
        assert len(lines) == len(recorder.architecture) + 2
        assert max(map(cell_len, lines)) <= width


def deep_recorder() -> Recorder:
    net: nn.Module = nn.Identity()
    for place in range(30):
        outer = nn.Sequential()
        outer.add_module(f"a_module_with_a_very_long_name_{place}_漢字", net)
        net = outer
    rnet = Recorder(net, input_size=(1, 3), depth=40)
    rnet.record("*")
    return rnet


def test_deep_rows_keep_room_for_their_names() -> None:
    lines = printed(deep_recorder(), 60).splitlines()
    assert all("a_mod" in line for line in lines[3:])


def test_what_fits_is_not_shortened() -> None:
    assert "…" not in printed(small_recorder(), 64)
    assert "…" in printed(small_recorder(), 30)
    assert printed(small_recorder(), 20).splitlines()[0] == "Recorder: Sequentia…"


def test_names_are_not_markup_and_reach_no_terminal() -> None:
    text = printed(hostile_recording(), 120, force_terminal=True)
    assert "[red]markup[/red]" in text
    assert "línea\\nnueva\\x1b[31m" in text
    assert "\u202e" not in text
    assert "\\ud800" in text


def test_rows_that_did_not_run_say_so_and_are_dim() -> None:
    # It calls what is in a list, and never the list.
    net = Net(lambda net, x: net.steps[0](x), steps=nn.ModuleList([nn.Linear(2, 2)]))
    text = printed(Recorder(net, input_size=(1, 2)), 80, force_terminal=True)
    (line,) = [line for line in text.splitlines() if "steps" in line]
    assert "did not run" in line
    assert line.startswith("\x1b[2m")
    (line,) = [line for line in text.splitlines() if "Linear" in line]
    assert re.search(r"\x1b\[0m0 ", line), "a name that ran is as bright as any text"
    assert "did not run" not in printed(Recorder(nn.ReLU(), input_size=(1, 2)), 80)


def test_structures_of_outputs_stay_in_their_line() -> None:
    text = printed(Recorder(nn.LSTM(3, 4), input_size=(5, 1, 3)), 64)
    assert len(text.splitlines()) == 3
    assert "((5, 1, 4), ((1, 1, 4), (1, 1, 4)))" in text


def test_structures_do_not_push_columns_apart() -> None:
    # It returns so many tensors that their shapes fill a line.
    net = nn.Sequential(Net(lambda _, x: {f"hidden_state_{place}": x for place in range(20)}))
    lines = printed(Recorder(net, input_size=(1, 2)), 200).splitlines()
    assert max(map(len, lines)) < 80
    assert "{'hidden_state_0': (1, 2)" in lines[2]


def test_architecture_and_recording_print_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    recording = small_recording()
    of_recording = printed(recording, 80).splitlines()
    of_recorder = printed(small_recorder(), 80).splitlines()
    of_architecture = printed(recording.architecture, 80).splitlines()
    assert of_recording[1:] == of_recorder[1:]
    assert of_architecture[0] == "Architecture: Sequential, 8 layers"
    assert [line.replace("●", " ") for line in of_recorder[1:]] == of_architecture[1:]
    rich.print(small_recorder())
    assert "● 2-2" in capsys.readouterr().out


def test_numbers_are_never_cut() -> None:
    rnet = Recorder(nn.Linear(1000, 1234, bias=False), input_size=(1, 1000))
    for width in (30, 40, 80):
        assert "1,234,000" in printed(rnet, width)


def test_plain_text_passes_no_control_characters_on() -> None:
    net = nn.Sequential()
    net.add_module("\x1b[31m\u202ename", nn.Identity())
    rnet = Recorder(net, input_size=(1, 2))
    for shown in (str(rnet), str(rnet.architecture)):
        assert "\\x1b[31m\\u202ename" in shown
        assert all(line.isprintable() for line in shown.split("\n"))

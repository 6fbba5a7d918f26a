"""Between words and the library: what arguments name, what messages become, how commands end."""

from __future__ import annotations

import importlib
import inspect
import io
import os
import re
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import nn

from scio_recorder import Nodes, Recorder, Tokens
from scio_recorder.display.progress import lines_every
from scio_recorder.errors import CollectError, RecorderError, RecordingError
from scio_recorder.lowlevel import nearest, what_is_durable
from scio_recorder.stores.files import holds_recording, is_url
from scio_recorder.tensors import DTYPES

FAILED = 1
# The status with which diff and cmp report a difference.
DIFFERENT = 1
# The status with which argparse itself exits.
WRONG_USE = 2
# The statuses that shells report for a process that Ctrl-C or SIGTERM ended.
INTERRUPTED, TERMINATED = 130, 143

# Keywords of the library, and the options of the command that stand for them.
_OPTIONS = {"dtype": "--keep-dtype", "dtypes": "--dtype"}
_SAME = "every", "atol", "input_data", "input_size", "match", "max_batches", "rtol", "rows"
_OPTIONS |= {name: f"--{name.replace('_', '-')}" for name in _SAME}
# What is written otherwise on the command line, after keywords became options.
_WORDS = (
    (r'store="disk:PATH"', "--out PATH"),
    (r"resume=True", "--resume"),
    (r"force_static_flow=False", "--allow-dynamic-flow"),
    (r"call net\.eval\(\) before collect\(\.\.\.\)", "leave out --train"),
    (r"the same call goes on", "the same command goes on"),
    (r"open_recording\((['\"].+?['\"])\)", r"scio-recorder inspect \1"),
    (r"with open_recording", "with scio-recorder inspect"),
    (r"^(make_)?batches is\b", "--data is"),
    (r"\bnum_parts\b", "--parts"),
    (r"\bmake_batches\(\w+\)", "--data"),
    (r"\b(local|operations)=True", r"--\1"),
    (r"(?<![\w-])batches=(?=\S)", ""),
    (r"\binput_(size|data)\b", r"--input-\1"),
    (r"=\[torch\.long\]", " int64"),
    (r"=Tokens\(\)", " tokens"),
    (r"=Nodes\(\)", " nodes"),
    (r"[ =]\{['\"]([^'\"]+)['\"]: ['\"]([^'\"]+)['\"]\}", r" '\1=\2'"),
    (r"\brecord\(\*rnet\.net\.([\w.]+)\)", r"--layers '\1.?'"),
    (r"\brecord\('([^']+)'\)", r"--layers '\1'"),
    (r"\b[Ww]rite (?=to_inputs=)", "let --data give what the net takes, or write "),
)
# A shape, which is written without brackets and spaces.
_SHAPE = re.compile(r"--input-size=\(([\d, ]+?),?\)")
# Seconds between progress lines if there is no terminal.
SECONDS = 10.0


def run(command: Callable[[Namespace, Console], int | None], parsed: Namespace) -> int:
    """Run a command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # If the lines of a table can't be encoded, its text should still be printed.
        sys.stdout.reconfigure(errors="replace")
    # As ``python -m`` does: what is named may lie there, and may import more from there.
    sys.path.insert(0, os.getcwd())
    try:
        with lines_every(SECONDS), command_warnings():
            status = command(parsed, Console())
        sys.stdout.flush()
        return status or 0
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if parsed.traceback:
            traceback.print_exc()
        text, status = _outcome(parsed, error)
    # Outside of the exception, which holds the net: an error while looking for the recording would
    # hold both until the interpreter exits.
    if parsed.command == "collect" and status != WRONG_USE:
        durable = what_is_durable(parsed.out, parsed.parts)
        text += f"; {command_message(durable)}" if durable else ""
    print(f"scio-recorder: {text}", file=sys.stderr)
    _drop_output()
    return status


def _outcome(parsed: Namespace, error: BaseException) -> tuple[str, int]:
    """Return what is printed about an error, and the exit status."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, SystemExit) and error.code == TERMINATED:
        return "terminated", TERMINATED
    # A caller that asks whether runs differ must not mistake a failure for an answer.
    failed = WRONG_USE if parsed.command == "compare" else FAILED
    if not isinstance(error, UsageError | RecorderError | OSError):
        return f"error: {one_line(error)}", failed
    notes = (note.removesuffix(".") for note in getattr(error, "__notes__", ()))
    text = ". ".join([command_message(in_one_line(str(error))), *notes])
    if parsed.command == "compare":
        # Nets are labelled with the first batch.
        text = text.replace("--input-data", "--data")
    return f"error: {text}", failed if _is_failure(parsed, error) else WRONG_USE


def _is_failure(parsed: Namespace, error: Exception) -> bool:
    """Whether a command was right, and the loader, the net, the disk or its data were not."""
    if isinstance(error, RecordingError):
        # Without a fault of the system, the folder is another recording's.
        return parsed.command != "collect" or isinstance(error.__cause__, OSError)
    if isinstance(error, CollectError):
        return error.__cause__ is not None
    return not isinstance(error, UsageError | RecorderError)


def _drop_output() -> None:
    """Keep Python from trying again at exit to write output that could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command_message(text: str) -> str:
    """Return a message that names options in place of keywords, and says what has no option.

    Examples
    --------
    >>> command_message("the folder holds a recording: resume it with resume=True, or give rows=")
    'the folder holds a recording: resume it with --resume, or give --rows'
    >>> command_message("the shapes differ: pad them by transform=")
    'the shapes differ: ... In Python, write Recorder(net, ...).collect(batches, transform=...)'
    >>> command_message("record what it holds, by record(*rnet.net.layers)")
    "record what it holds, by --layers 'layers.?'"
    >>> command_message("input_size=(3,) failed: write input_size=(1, 3), or give input_data=")
    '--input-size 3 failed: write --input-size 1,3, or give --input-data'
    """
    # A value follows an equals sign.
    keyword = re.compile(rf"(?<![\w-])({'|'.join(_OPTIONS)})=(?=(.?))")
    text = keyword.sub(lambda f: _OPTIONS[f[1]] + ("" if f[2] in " ,;:.)" else "="), text)
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    text = _SHAPE.sub(lambda match: f"--input-size {match[1].replace(' ', '')}", text)
    keywords = inspect.signature(Recorder.collect).parameters
    named = [name for name in keywords if re.search(rf"(?<![\w-]){name}=(?!=)", text)]
    if named:
        options = ", ".join(f"{name}=..." for name in named)
        call = f"Recorder(net, ...).collect(batches, {options})"
        text = f"{text.removesuffix('.')}. In Python, write {call}"
    return text


def in_one_line(text: str) -> str:
    r"""Return a text without ends of lines, and without the signatures that torch lists.

    Examples
    --------
    >>> in_one_line("linear() got (int), but expected one of:\n * (Tensor input)\nWrite x")
    'linear() got (int), but expected one of: Write x'
    """
    text = re.sub(r"\n +(\* \(|didn't match).*", "", text)
    return re.sub(r"(?<![.:;,])\s*\n\s*", ". ", text).replace("\n", " ")


@contextmanager
def command_warnings() -> Iterator[None]:
    """Print this library's warnings in one line each inside the block, and others as ever."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if getattr(message, "is_of_scio_recorder", False):
                text = in_one_line(command_message(str(message)))
                print(f"scio-recorder: warning: {text}", file=sys.stderr)
            else:
                usual(message, category, *where, **options)

        warnings.showwarning = show
        yield


def print_line(console: Console, text: str) -> None:
    """Print a text as it is, in one line of any length."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


_ROWS = {"tokens": Tokens, "nodes": Nodes}


class UsageError(Exception):
    """An argument is wrong; this text is all that the user sees."""


def load(target: str) -> Any:
    """Import the object that ``MODULE:NAME`` names."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{target!r} is not of the form MODULE:NAME, such as mynets:build")
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{module_name!r} is a file, not a module: write {module}:{name}")
    near = ""
    try:
        value: Any = importlib.import_module(module_name)
        for part in name.split("."):
            near = nearest(part, dir(value))
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            near = "; for build() in your mynets.py write mynets:build"
        raise UsageError(f"can't load {target}: {one_line(error)}{near}") from error
    return value


def made(target: str) -> Any:
    """Return the object that ``MODULE:NAME`` names, or its result if it is a function."""
    value = load(target)
    if isinstance(value, nn.Module) or not callable(value):
        return value
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{target}, called without arguments, failed: {one_line(error)}"
        ) from error


def net_of(target: str, *, is_eval: bool) -> nn.Module:
    """Return the net that ``MODULE:NAME`` names or makes."""
    net = made(target)
    if not isinstance(net, nn.Module):
        raise UsageError(f"{target} is of type {type(net).__name__}, not a torch.nn.Module")
    return net.eval() if is_eval else net


def one_line(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def recording_at(path: str, *, other: str = "") -> str:
    """Return the place of a recording, which is there and no file.

    Parameters
    ----------
    path : str
        A folder, or a URL, of which only opening it tells more.
    other : str, optional
        What else might have been given, for messages.
    """
    if is_url(path):
        return path
    if not os.path.exists(path):
        raise UsageError(f"{path!r}: there is no such folder{other}")
    if not os.path.isdir(path):
        folder = os.path.dirname(path) or "."
        is_part = holds_recording(folder)
        such = f", such as {folder!r}" if is_part else ""
        raise UsageError(f"{path!r} is a file: give the folder that holds the recording{such}")
    return path


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype of a name, as torch has it."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        near = nearest(text, DTYPES)
        raise UsageError(f"{text!r} is not a dtype; write it like float32 or int64{near}")
    return dtype


def rows_of(text: str | None) -> Any:
    """Return the rows that a word names or ``MODULE:NAME`` makes."""
    if text is None or text in _ROWS:
        return text and _ROWS[text]()
    if ":" not in text:
        words = ", ".join(_ROWS)
        raise UsageError(f"--rows {text!r}: write {words}, or MODULE:NAME for Tokens(...)")
    return made(text)

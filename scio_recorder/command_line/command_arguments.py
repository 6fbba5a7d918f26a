"""Read arguments of the command line: things to import, shapes, dtypes and numbers."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from scio_recorder.nets.architecture import closest, closest_are
from scio_recorder.stores.disk_format.description import DESCRIPTION_NAME
from scio_recorder.stores.disk_format.medium import is_url
from scio_recorder.tensors.copies import DTYPES


class UsageError(Exception):
    """An argument is wrong; this text is all that the user sees."""


class FailureError(Exception):
    """A command was understood and failed; this text is all that the user sees."""


class BrokenOffError(FailureError):
    """A collection failed midway, so the user should also be told how to continue."""


def add_flow(command: argparse.ArgumentParser) -> None:
    """Add the option that lets nets of dynamic flow be labelled."""
    text = "label nets although their control flow depends on the data"
    command.add_argument("--allow-dynamic-flow", action="store_true", help=text)


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the options that say how nets run over batches."""
    add = command.add_argument
    add("--max-batches", type=whole_from(1), metavar="N", help="stop after so many taken batches")
    add("--rows", metavar="ROWS", help="a row, if not a sample: tokens, nodes, or MODULE:NAME")
    add("--train", action="store_true", help="leave nets in their mode; by default it is eval")


def load(target: str) -> Any:
    """Import the object that ``MODULE:NAME`` names."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{target!r} is not of the form MODULE:NAME, such as mynets:build")
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{module_name!r} is a file, not a module: write {module}:{name}")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"can't load {target}: {one_line(error)}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except Exception as error:
            near = _nearest(part, dir(found))
            raise UsageError(f"can't load {target}: {one_line(error)}{near}") from error
    return found


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return the closest names, as the end of a message; empty if there are none."""
    near = closest(name, sorted(names))
    return f"; {closest_are(near)}" if near else ""


def made(target: str) -> Any:
    """Return the object that ``MODULE:NAME`` names, or its result if it is a function."""
    found = load(target)
    if isinstance(found, nn.Module) or not callable(found):
        return found
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{target}, called without arguments, failed: {one_line(error)}"
        ) from error


def net_of(target: str, *, is_eval: bool) -> nn.Module:
    """Return the net that ``MODULE:NAME`` names or makes."""
    net = made(target)
    if not isinstance(net, nn.Module):
        raise UsageError(f"{target} gives {kind_of(net)}, not a torch.nn.Module")
    return net.eval() if is_eval else net


def one_line(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def kind_of(thing: Any) -> str:
    """Return the type of a thing with its article."""
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


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
        is_part = os.path.exists(os.path.join(folder, DESCRIPTION_NAME))
        such = f", such as {folder!r}" if is_part else ""
        raise UsageError(f"{path!r} is a file: give the folder that holds the recording{such}")
    return path


def size(text: str) -> tuple[int, ...]:
    """Read a shape."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write it like 1,3,32,32")
    return shape


def dtype_of(text: str) -> torch.dtype:
    """Read a dtype."""
    dtype = DTYPES.get(text.removeprefix("torch."))
    if dtype is None:
        near = _nearest(text, DTYPES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a dtype; write it like float32 or int64{near}"
        )
    return dtype


def whole_from(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return read


def rows_of(text: str) -> Any:
    """Return the rows that a word names or ``MODULE:NAME`` makes."""
    # Imported here so that --help and wrong use answer at once.
    from scio_recorder import Nodes, Tokens

    known = {"tokens": Tokens, "nodes": Nodes}
    if text in known:
        return known[text]()
    if ":" not in text:
        raise UsageError(f"--rows {text!r}: write tokens, nodes, or MODULE:NAME for Tokens(...)")
    return made(text)

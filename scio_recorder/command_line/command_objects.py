"""What arguments name: networks, data and rows to import, recordings to open."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import nn

from scio_recorder.nets.offers import nearest
from scio_recorder.recording.row_kinds import Nodes, Tokens
from scio_recorder.stores.disk_format.description import DESCRIPTION_NAME, is_url
from scio_recorder.tensors.copies import DTYPES

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
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            near = nearest(part, dir(found))
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            near = "; for build() in your mynets.py write mynets:build"
        raise UsageError(f"can't load {target}: {one_line(error)}{near}") from error
    return found


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
        is_part = os.path.exists(os.path.join(folder, DESCRIPTION_NAME))
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
        raise UsageError(f"--rows {text!r}: write tokens, nodes, or MODULE:NAME for Tokens(...)")
    return made(text)

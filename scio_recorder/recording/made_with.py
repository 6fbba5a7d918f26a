"""What a recording was made with: versions, the net, and the time."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

from torch import nn

from scio_recorder.tensors import private
from scio_recorder.tensors.copies import dtype_name


def made_with(net: nn.Module) -> dict[str, Any]:
    """Return the versions that run now, and what a net is, as JSON.

    Parameters
    ----------
    net : torch.nn.Module
        The net whose activations are recorded.

    Returns
    -------
    dict
        The versions of ``scio_recorder``, ``torch``, ``python``, ``numpy`` and of the package that
        the class of the net comes from, under the name of each; ``net``, the name of that class;
        ``dtypes`` and ``devices`` of its parameters; ``attention``, the implementation that a net
        of transformers has chosen; ``training``, its flag; ``time``, in UTC.

    Examples
    --------
    >>> import torch
    >>> found = made_with(nn.Linear(2, 1))
    >>> found["torch"] == torch.__version__, found["net"], found["dtypes"], found["devices"]
    (True, 'torch.nn.modules.linear.Linear', ['float32'], ['cpu'])
    """
    kind = type(net)
    # A class that code has made may have no module.
    package = str(kind.__module__ or "builtins").partition(".")[0]
    versions = {
        "scio_recorder": _version("scio_recorder"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        package: _version(package),
    }
    parameters = list(net.parameters())
    found = {
        **versions,
        "net": f"{kind.__module__}.{kind.__qualname__}",
        "dtypes": sorted(map(dtype_name, {one.dtype for one in parameters})),
        "devices": sorted({str(one.device) for one in parameters}),
        "attention": private.attention_of(net),
        "training": net.training,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in found.items() if value is not None}


@cache
def _version(package: str) -> str | None:
    """Return the version of an imported package; None for code that has none."""
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return str(found)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_words(made: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """Return what a recording was made with, in one line; empty if it does not know.

    Parameters
    ----------
    made : mapping
        From `made_with`, or from a file.
    other : mapping, optional
        That of another recording: only entries that differ from it are named, but for the time.

    Examples
    --------
    >>> made = {"torch": "2.13.0", "dtypes": ["bfloat16", "float32"], "time": "now"}
    >>> in_words(made), in_words(made, {**made, "torch": "2.12.0", "time": "then"})
    ('torch 2.13.0, dtypes bfloat16 + float32, time now', 'torch 2.13.0')
    """
    texts = {
        str(name): " + ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in made.items()
        if other is None or (value != other.get(name) and name != "time")
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items() if text)

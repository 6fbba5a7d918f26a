"""Functions that are tried when they are first used.

NOTE [Checked at first use]

A private name of torch can go, or mean something else, in the next version. So nothing is looked up
at import, and each function is tried when it is first called, on a small example whose answer is
known. If that fails, ``UnsupportedTorchError`` names the feature that can't be had. From then on
the bare function stands in its place in its module, so that a check costs nothing in a pass. That
is why callers write ``private.backward_pass()``, and import no such function by its name.

An example runs in a thread of its own: modes, transforms, hooks on saved tensors and the backward
pass under way belong to a thread, and must neither see the example nor change its answer.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from scio_recorder.errors import UnsupportedTorchError

Function = TypeVar("Function", bound=Callable[..., Any])


def unsupported(feature: str, name: str) -> UnsupportedTorchError:
    """Return the error for a feature whose private name is gone or means something else."""
    return UnsupportedTorchError(
        f"{feature} needs {name}, which torch {torch.__version__} on Python "
        f"{platform.python_version()} does not have, or which means something else there: use "
        "versions that scio-recorder was run with (docs/versions.md), or do without this feature"
    )


def checked(
    name: str, feature: str, works: Callable[[Any], bool]
) -> Callable[[Function], Function]:
    """Try a function on an example when it is first called."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def first_use(*args: Any) -> Any:
            if function.__globals__[function.__name__] is not function:
                _try(works, function, feature, name)
                function.__globals__[function.__name__] = function
            return function(*args)

        return first_use  # type: ignore[return-value]  # the same signature, by functools.wraps

    return decorate


def _try(works: Callable[[Any], bool], function: Any, feature: str, name: str) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            works_here = pool.submit(works, function).result()
        except Exception as error:
            # The name is gone, or is used otherwise: whatever it raises, the feature is missing.
            raise unsupported(feature, name) from error
    if not works_here:
        raise unsupported(feature, name)

"""The check that private names of torch and of the interpreter mean what they are taken for.

NOTE [Checked at first use]

A private name of torch can go, or change its meaning, in the next version. So nothing is looked up
at import, and each function is tried at its first call, on a small example with a known answer. If
that fails, ``UnsupportedTorchError`` names the missing feature. From then on the bare function
takes its place in its module, so that checks cost nothing in a pass. That is why callers write
``private.backward_pass()``, and import no such function by its name.

An example runs in its own thread: modes, transforms, hooks on saved tensors and the current
backward pass belong to a thread, and must neither see the example nor change its answer.
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
    """Return the error for a feature whose private name is gone or has changed its meaning."""
    return UnsupportedTorchError(
        f"{feature} needs {name}, which torch {torch.__version__} on Python "
        f"{platform.python_version()} does not have, or which means something else there: use "
        "versions that scio-recorder was tested with (docs/versions.md), or do without this "
        "feature"
    )


def checked(
    name: str, feature: str, works: Callable[[Any], bool]
) -> Callable[[Function], Function]:
    """Try a function on an example when it is first called."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def first_use(*args: Any) -> Any:
            if function.__globals__[function.__name__] is not function:
                try_example(works, function, feature, name)
                function.__globals__[function.__name__] = function
            return function(*args)

        return first_use  # type: ignore[return-value]  # the same signature, by functools.wraps

    return decorate


def try_example(works: Callable[[Any], bool], function: Function, feature: str, name: str) -> None:
    """Raise an error unless a function gives the right answer on an example."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            works_here = pool.submit(works, function).result()
        except Exception as error:
            # The name is gone, or is used differently: whatever it raises, the feature is missing.
            raise unsupported(feature, name) from error
    if not works_here:
        raise unsupported(feature, name)

"""The check that private names of torch and of the interpreter mean what they are taken for.

NOTE [What is checked when]

A private name of torch can go, or change its meaning, in the next version. A function whose name is
gone raises ``UnsupportedTorchError`` when it is called. The tests try the meaning of every name on
an example, with all versions from `OLDEST` to `NEWEST`; with any other version, the import warns.
Where another meaning would not be an error but another number, the example is here, and runs at the
first call: for the objects that checkpointing keeps, and for who holds a tensor. From then on the
bare function takes its place in its module. So callers write ``private.use_count(...)`` and import
no such function by its name.

An example runs in its own thread: modes, transforms, hooks on saved tensors and the current
backward pass belong to a thread, and must neither see the example nor change its answer.
"""

from __future__ import annotations

import functools
import inspect
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import __file__ as checkpoint_file
from torch.utils.checkpoint import checkpoint

from scio_recorder.errors import UnsupportedTorchError, warn

Function = TypeVar("Function", bound=Callable[..., Any])

# The versions of torch that the tests have run with, see docs/versions.md.
OLDEST, NEWEST = (2, 8), (2, 14)
# What the names of `needs` begin with.
_OWNERS = {"torch": torch, "Tensor": Tensor, "Module": nn.Module()}


def warn_if_untested(version: tuple[int, ...]) -> None:
    """Warn of a version of torch that nobody has tried."""
    if not OLDEST <= version <= NEWEST:
        first, last = (".".join(map(str, tested)) for tested in (OLDEST, NEWEST))
        warn(
            f"scio-recorder was tested with torch {first} to {last}, and this is "
            f"{torch.__version__}: private names of torch may be missing or mean something else"
        )


def unsupported(feature: str, name: str) -> UnsupportedTorchError:
    """Return the error for a feature whose private name is gone or has changed its meaning."""
    return UnsupportedTorchError(
        f"{feature} needs {name}, which torch {torch.__version__} on Python "
        f"{platform.python_version()} does not have, or which means something else there: use "
        "versions that scio-recorder was tested with (docs/versions.md), or do without this "
        "feature"
    )


def found(name: str, feature: str) -> Any:
    """Return what a private name stands for, or a function that raises if it is gone."""
    owner, *parts = name.split(".")
    try:
        return functools.reduce(getattr, parts, _OWNERS[owner])
    except AttributeError:

        def gone(*args: Any, **kwargs: Any) -> Any:
            raise unsupported(feature, name)

        return gone


def needs(name: str, feature: str) -> Callable[[Function], Function]:
    """Let a function raise when it is called if a private name that it needs is gone."""
    stands_for = found(name, feature)
    is_gone = getattr(stands_for, "__name__", "") == "gone"
    return lambda function: stands_for if is_gone else function


def tried(name: str, feature: str, works: Callable[[Any], bool]) -> Callable[[Function], Function]:
    """Try a function on an example when it is first called."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def first_use(*args: Any) -> Any:
            if function.__globals__[function.__name__] is not function:
                _try_example(works, function, feature, name)
                function.__globals__[function.__name__] = function
            return function(*args)

        return first_use  # type: ignore[return-value]  # the same signature, by functools.wraps

    return decorate


def _try_example(works: Callable[[Any], bool], function: Function, feature: str, name: str) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            works_here = pool.submit(works, function).result()
        except Exception as error:
            # The name is gone, or is used differently: whatever it raises, the feature is missing.
            raise unsupported(feature, name) from error
    if not works_here:
        raise unsupported(feature, name)


# -- examples, which use only public names of torch ------------------------------------------------


def leaf_and_output() -> tuple[Tensor, Any]:
    """Return a leaf, and what two operations make of it."""
    leaf = torch.ones(1, requires_grad=True, device="cpu")
    return leaf, (leaf * 2).exp()


def is_on_same_node(saved: Callable[[Any], Tensor]) -> bool:
    """Whether a saved tensor is another one at the same node."""
    _, output = leaf_and_output()
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor.detach()):
        taken = torch.take(output, torch.empty(0, dtype=torch.int64, device="cpu"))
        given = saved(taken.grad_fn)
    is_other = given.data_ptr() != output.data_ptr()
    return is_other and given.grad_fn is output.grad_fn and torch.equal(given, output)


def distinguishes_kept_results(keeps: Callable[[Tensor], bool]) -> bool:
    """Whether operations that keep their results are found."""
    leaf, output = leaf_and_output()
    several = torch.var_mean(leaf.expand(1, 3))[1]
    return keeps(output) and not keeps(leaf * 2) and not keeps(several)


def _in_both_runs(function: Callable[[], Any]) -> list[Any]:
    """Return a function's results in both runs of a checkpointed region."""
    found = []

    def region(x: Tensor) -> Tensor:
        found.append(function())
        return x.exp()

    leaf, _ = leaf_and_output()
    output: Any = checkpoint(region, leaf, use_reentrant=False, preserve_rng_state=False)
    output.backward()
    return found


def runs_twice(region_of: Callable[[FrameType], Any]) -> bool:
    """Whether both runs of a checkpointed region find the same object on the stack."""

    def nearest() -> Any:
        frame = inspect.currentframe()
        while frame is not None:
            found = region_of(frame) if frame.f_code.co_filename == checkpoint_file else None
            if found is not None:
                return found
            frame = frame.f_back
        return None

    (first, is_first_again), (second, is_second_again) = _in_both_runs(nearest)
    return first is second and not is_first_again and is_second_again


def saves_twice(saving: Callable[[], Any]) -> bool:
    """Whether both runs of a checkpointed region find the same object in its hooks."""
    first, second = _in_both_runs(saving)
    return first is not None and first is second and saving() is None


def counts_what_the_graph_holds(count: Callable[[Tensor], int]) -> bool:
    """Whether references from the graph to a tensor count."""
    leaf, _ = leaf_and_output()
    before = count(leaf)
    held = leaf.exp() * leaf
    after = count(leaf)
    del held
    return before < after and count(leaf) == before


def counts_aliases(count: Callable[[Tensor], int]) -> bool:
    """Whether each tensor that shares memory counts."""
    tensor = torch.ones(2, device="cpu")
    before = count(tensor)
    aliases = [tensor.view(1, 2), tensor.view(2, 1)]
    after = count(tensor)
    del aliases
    return after == before + 2 and count(tensor) == before

"""Whether a net's control flow depends on the values of its inputs.

A copy of the net whose tensors have shapes and no values is run once. Where it can't go on without
a value, the source at that point tells whether it was about to take a branch.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.errors import FlowError, UnsupportedTorchError
from scio_recorder.nets.labelling.branches import (
    Step,
    calls_operation,
    is_returned,
    steps_of,
    takes_branch,
)
from scio_recorder.nets.state.copying import (
    CopyTensors,
    OriginalCalledError,
    copy_net,
    refusing_calls,
)
from scio_recorder.nets.state.restoring import eager, preserved_rng, quiet
from scio_recorder.tensors import private

__all__ = ["check_static_flow"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Modules of torch branch like anyone's; the rest of torch does so on behalf of its caller.
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
# These report the failure that is looked for.
_TALKATIVE = (
    "torch.fx.experimental.recording",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
)


def check_static_flow(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, mode: str = "eval"
) -> None:
    """Refuse a net whose control flow depends on the data.

    Any other failure is no answer and no reason to refuse: some operations can't be followed
    without values.

    Parameters
    ----------
    net : torch.nn.Module
        The net. It is not changed, and its hooks are not run.
    args, kwargs : tuple, dict
        What it is called with.
    mode : str
        ``"eval"`` or ``"train"``.

    Raises
    ------
    FlowError
        A branch or a loop depends on values; says where.

    Examples
    --------
    >>> check_static_flow(nn.ReLU(), (torch.ones(2),), {})
    """
    try:
        with quiet(), eager(), _silent_loggers(), preserved_rng():
            _run_without_values(net, args, kwargs, mode)
    except UnsupportedTorchError:
        raise
    except OriginalCalledError:
        return
    except Exception as error:
        step = _branch_behind(error)
    else:
        return
    if step is not None:
        raise FlowError(
            f"the control flow of {type(net).__name__} depends on the data at {step}: on other "
            "data other layers may run, and labels would change their meaning. If the layers that "
            "you record run whatever the data, write force_static_flow=False; every pass is then "
            "still checked against the labelling"
        )


def _run_without_values(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str
) -> None:
    world = private.fake_tensors()

    def state_without_numbers(tensor: Tensor) -> Tensor:
        # A flag in a buffer belongs to the net, not to the data: a branch on it is static.
        make = world.with_number if tensor.numel() == 1 else world.without_numbers
        return make(tensor)

    twin = copy_net(net, copier=state_without_numbers, share_uncopyable=False)
    with CopyTensors(world.without_numbers):
        args, kwargs = copy.deepcopy((args, kwargs))
    twin.train(mode == "train")
    with refusing_calls(net), world.mode, torch.no_grad():
        twin(*args, **kwargs)


def _branch_behind(error: BaseException) -> Step | None:
    """Return the step of the net that was about to branch on a value, None if there is none."""
    world = private.fake_tensors()
    if not isinstance(error, world.needs_number | world.needs_size):
        return None
    steps = steps_of(error.__traceback__)
    while _is_internal(steps[-1]):
        steps.pop()
    # An operation may need a number of hits for reasons of its own, which are none of the net's.
    if isinstance(error, world.needs_size) and calls_operation(steps[-1]):
        return None
    for step in reversed(steps):
        if _is_internal(step) or step.filename == __file__:
            break
        if takes_branch(step):
            return step
        # A helper that returns the value may be called in the head of a branch.
        if not is_returned(step):
            break
    return None


def _is_internal(step: Step) -> bool:
    return step.filename.startswith(_TORCH) and not step.filename.startswith(_TORCH_MODULES)


@contextlib.contextmanager
def _silent_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled

"""Whether what a net runs depends on the values of its inputs.

NOTE [Other answers]

A copy of the net runs on fake tensors, which have shapes and no values. Wherever it asks for a
value, or for a size that depends on values, it is told one of a few made-up answers. Then it runs
again for every other answer. If the net calls other functions of torch then, or the same on other
tensors, the answer has decided what runs: that is a branch on data. If it calls the same, the
answer was only computed with. If it raises, the question was a check of the data. Neither source
nor byte code is looked at: these differ from one Python to the next, or can't be had.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.errors import FlowError, UnsupportedTorchError
from scio_recorder.nets.labelling.worlds import Question, World
from scio_recorder.nets.state.copying import (
    CopyTensors,
    OriginalCalledError,
    copy_net,
    refusing_calls,
)
from scio_recorder.nets.state.restoring import eager, preserved_rng, quiet
from scio_recorder.tensors import private

# These report what fake tensors can't do.
_TALKATIVE = (
    "torch.fx.experimental.recording",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
)
# Other answers that are tried to get past an exception.
_ATTEMPTS = 16


def check_static_flow(
    net: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mode: str = "eval",
    grad: bool = False,
) -> None:
    """Refuse a net whose control flow depends on the data.

    A failure is no answer and no reason to refuse: some operations can't be followed without
    values.

    Parameters
    ----------
    net : torch.nn.Module
        The net. It is not changed, and its hooks are not run.
    args, kwargs : tuple, dict
        What it is called with.
    mode : str
        ``"eval"`` or ``"train"``.
    grad : bool
        Whether it runs with gradients.

    Raises
    ------
    FlowError
        A branch or a loop depends on values; says where.

    Examples
    --------
    >>> check_static_flow(nn.ReLU(), (torch.ones(2),), {})
    """
    try:
        with quiet(), eager(), _silent_loggers():
            question = _deciding_question(_Pass(net, args, kwargs, mode == "train", grad))
    except UnsupportedTorchError:
        raise
    except (OriginalCalledError, Exception):
        return
    if question is not None:
        raise FlowError(
            f"the control flow of {type(net).__name__} depends on the data at {question.place}: on "
            "other data other layers may run, and labels would change their meaning. If the layers "
            "that you record run whatever the data, write force_static_flow=False; every pass is "
            "then still checked against the labelling"
        )


def _deciding_question(run: Callable[[list[int]], World]) -> Question | None:
    """Return a question whose answer decides what runs, None if there is none."""
    base = _settled(run, [], 0, {None})
    seen = set()
    for index, question in enumerate(base.questions):
        # A line that asks in a loop does the same each time.
        if question.stack in seen:
            continue
        seen.add(question.stack)
        for choice in set(range(len(question.choices))) - {question.chosen}:
            answers = base.answers
            answers[index] = choice
            other = _settled(run, answers, index + 1, {None, base.failure})
            if base.differs(other, question):
                # A net that does something else each time gives no answer.
                is_repeatable = not base.differs(run(base.answers), question)
                return question if is_repeatable else None
    return None


def _settled(
    run: Callable[[list[int]], World], answers: list[int], fixed: int, ends: set[Any]
) -> World:
    """Change answers but the first until the pass ends well; return the first pass if none does."""
    first = world = run(answers)
    for _ in range(_ATTEMPTS):
        following = _following(world, fixed)
        if world.failure in ends or following is None:
            break
        world = run(following)
    return world if world.failure in ends else first


def _following(world: World, fixed: int) -> list[int] | None:
    """Return the next answers to try: the latest question gets its next choice."""
    answers = world.answers
    while len(answers) > fixed:
        answers[-1] += 1
        if answers[-1] < len(world.questions[len(answers) - 1].choices):
            return answers
        answers.pop()
    return None


@dataclass(frozen=True)
class _Pass:
    """Runs a net without values, each time from the same state."""

    net: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    grad: bool

    def __call__(self, answers: list[int]) -> World:
        world = World(answers)
        fakes = private.fake_tensors()

        def state_without_values(tensor: Tensor) -> Tensor:
            # A flag in a buffer belongs to the net, not to the data: a branch on it is static.
            make = fakes.with_number if tensor.numel() == 1 else fakes.without_numbers
            return make(tensor)

        with preserved_rng():
            twin = copy_net(self.net, copier=state_without_values, share_uncopyable=False)
            with CopyTensors(fakes.without_numbers):
                args, kwargs = copy.deepcopy((self.args, self.kwargs))
            twin.train(self.training)
            with refusing_calls(self.net), fakes.mode, torch.set_grad_enabled(self.grad):
                world.run(twin, args, kwargs)
        return world


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

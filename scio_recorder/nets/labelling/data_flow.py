"""Finding out whether a net's control flow depends on the values of its inputs.

NOTE [Other answers]

A network that asks for no value goes the same way on all data of the same shapes. Most networks are
of that kind, and need no closer look than `ValueRequests` in their only run. If a network asks,
copies of it run again, and each gets a false answer to one question about a value that depends on
its data: another number, or another number of hits of a mask. If such a copy calls other functions
of torch, or the same ones on other tensors, the answer has decided what runs: that is a branch on
data. If it makes the same calls, it only computed with the answer. If it raises, the question was a
check of the data, unless other modules ran before. Neither source nor byte code is read: they
differ between versions of Python, or are unavailable.

Unless they are traced, libraries look at masks, and drop those that hide nothing. That is no branch
of the network. So in copies, tensors of flags and integers claim to be traced.

Copies run on the CPU: a made-up index that is too large would break a GPU for the whole process.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder.errors import FlowError, UnsupportedTorchError
from scio_recorder.interpreter import lines_on_stack
from scio_recorder.nets import operations
from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.operations import (
    HANDING_OUT,
    ValueRequests,
    dim_of_hits,
    tells_value,
)
from scio_recorder.nets.state.moment import preserved_rng
from scio_recorder.nets.state.untouched import (
    NotSeparateError,
    copy_inputs,
    quiet,
    separate_copy,
)
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import fold, map_tensors

# Frames between the net and the questions that it asks.
_OWN = (__file__, private.__file__, operations.__file__, contextlib.__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Torch's modules are part of nets; the rest of torch works on behalf of its caller.
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep

# Calls of torch in a longer pass take too much time to be compared.
_MAX_STEPS = 100_000
# The most passes with other answers, each of which takes as long as several ordinary ones, and the
# time after which none begins.
_MAX_PASSES = 8
_SECONDS = 10.0

# The file and the number of a line of code.
_CodeLine: TypeAlias = tuple[str, int]

# Other answers: numbers of hits of a mask, whole numbers and others.
_HITS = (0, 4096, 1, 2, 3)
_INTEGERS = (0, 100, 1, -1, 2, 3, 4, 5, 6, 7)
_REALS = (0.0, 1e6, -1e6, 0.5, 1.0, 2.5, 3.0, 4.0)


class Question(NamedTuple):
    """A value or a size that depends on the data, for which the net asked.

    ``choices`` are the answers, the true one first. ``stack`` is where it was asked, the innermost
    place first.
    """

    choices: Sequence[Any]
    stack: tuple[_CodeLine, ...]


class _Step(NamedTuple):
    """A call of a function of torch, or of a module, which is a number here."""

    called: Any
    # The number and the result of the step that made each tensor argument.
    tensors: tuple[tuple[int, int], ...]
    # Its other arguments.
    others: tuple[str, ...]


class Flow(ValueRequests):
    """The path that a pass of a net takes.

    Parameters
    ----------
    net : torch.nn.Module
        The net, or a copy of it.
    at, choice : int
        The number of a question, and of the answer that it gets; all others get the true one.
    max_steps : int, optional
        The largest number of calls of torch: a false answer may lead to an endless loop.

    Attributes
    ----------
    questions : list of Question
        The net's questions about values that depend on its inputs or on random numbers.

    Examples
    --------
    >>> flow = Flow(net := nn.Identity())
    >>> with flow.followed():
    ...     is_positive = bool(net(torch.ones(3)).sum() > 0)
    >>> [question.choices for question in flow.questions]
    [[True, False]]
    """

    def __init__(
        self, net: nn.Module, at: int = -1, choice: int = 0, max_steps: float = math.inf
    ) -> None:
        super().__init__()
        self.questions: list[Question] = []
        self.steps: list[_Step] = []
        self.failed = False
        self._net, self._at, self._choice, self._max_steps = net, at, choice, max_steps
        self._numbers = {id(module): number for number, module in enumerate(net.modules())}
        # For each tensor, the step that made it, and whether it depends on the data.
        self._origins = WeakTensorKeyDictionary()
        self._data = WeakTensorKeyDictionary()
        # For each tensor whose value was asked for, its version then, and the answer.
        self._answered = WeakTensorKeyDictionary()
        # The number of tensors that no step has made, such as inputs and parameters.
        self._num_foreign = 0
        self._is_on_data = self._is_replay = False

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the operations of this thread inside the block."""
        with hooked(self._net, before=self._enter), super().followed():
            yield

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the net once more, and note whether it fails."""
        self._is_replay = True
        try:
            with self.followed():
                output = self._net(*args, **kwargs)
            self._note("return", output)
        except UnsupportedTorchError:
            raise
        except (Exception, _TooLongError):
            self.failed = True

    def differs(self, other: Flow, question: Question | None) -> bool:
        """Whether another pass, with another answer to a question, took another path."""
        if other.failed:
            # A check of the data raises before any further module runs.
            calls = other._calls()
            return calls != self._calls()[: len(calls)]
        # The net may have computed with a number, so that functions receive another one.
        is_flag = question is None or isinstance(question.choices[0], bool)
        compared = 3 if is_flag else 2
        return [step[:compared] for step in self.steps] != [step[:compared] for step in other.steps]

    def take(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and note the step."""
        received = self._note(func, args, kwargs)
        step, self._is_on_data = len(self.steps), any(tensor in self._data for tensor in received)
        result = func(*args, **kwargs)
        if self._is_on_data and func in HANDING_OUT:
            result = self._answer([result, *other_values(result)])
        made = [part for part in _parts(result) if isinstance(part, Tensor)]
        for position, tensor in enumerate(made):
            if tensor not in self._origins:
                self._origins[tensor] = (step, position)
        if self._is_on_data:
            # A function that returns nothing has written to its first argument.
            self._mark(received[:1] if result is None else made)
        return result

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy that the net makes of a module shares its hooks.
        received = self._note(self._numbers.get(id(module), -1), args, kwargs)
        if module is self._net:
            self._mark(received)

    def _mark(self, tensors: list[Tensor]) -> None:
        """Note that these tensors depend on the data."""
        for tensor in tensors:
            self._data[tensor] = True
            if self._is_replay and type(tensor) is Tensor and not tensor.dtype.is_floating_point:
                private.pass_for_traced(tensor)

    def _note(self, called: Any, *received: Any) -> list[Tensor]:
        """Add a step, and return its tensor arguments."""
        if len(self.steps) >= self._max_steps:
            raise _TooLongError
        parts = _parts(received)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        for tensor in tensors:
            if tensor not in self._origins:
                # Tensors that no function has made, in the order of their first use.
                self._num_foreign += 1
                self._origins[tensor] = (0, self._num_foreign)
        origins = tuple(self._origins[tensor] for tensor in tensors)
        others = tuple(_shown(part) for part in parts if not isinstance(part, Tensor))
        self.steps.append(_Step(called, origins, others))
        return tensors

    def _operate(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **kwargs or {})
        if self.is_paused:
            return result
        self._is_on_data |= torch.Tag.nondeterministic_seeded in operation.tags
        if not self._is_on_data:
            return result
        if (dim := dim_of_hits(operation, args)) is not None:
            return self._with_hits(result, dim)
        if tells_value(operation):
            return self._answer_for(args, [result, *other_values(result)])
        return result

    def _answer_for(self, args: tuple[Any, ...], choices: Sequence[Any]) -> Any:
        """Return the value of a tensor that the net gets, the same one each time it asks."""
        if len(args) != 1 or args[0].is_inference():
            return self._answer(choices)
        (asked,) = args
        if asked not in self._answered or self._answered[asked][0] != asked._version:
            self._answered[asked] = asked._version, self._answer(choices)
        return self._answered[asked][1]

    def _with_hits(self, result: Any, dim: int) -> Any:
        """Return the result of an operation, or one of another number of hits."""
        hits = self._answer([None, *_HITS])
        return result if hits is None else map_tensors(partial(_resized, hits, dim), result)

    def _answer(self, choices: Sequence[Any]) -> Any:
        """Return the answer that the net gets."""
        index = len(self.questions)
        self.questions.append(Question(choices, tuple(_lines_on_stack())))
        return choices[self._choice if index == self._at else 0]

    def _calls(self) -> list[int]:
        return [step.called for step in self.steps if isinstance(step.called, int)]


class _TooLongError(BaseException):
    """A pass with too many steps, perhaps a loop that a false answer does not end.

    No ``except Exception`` of a net may catch it.
    """


def check_static_flow(
    net: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mode: str = "eval",
    grad: bool = False,
) -> None:
    """Refuse a net whose control flow depends on the data.

    A failure is neither an answer nor a reason to refuse: not every network runs on the CPU. At
    most 8 other answers are tried, and none after 10 s. A net that asks for more is accepted: every
    later pass is compared with the labelling anyway.

    Parameters
    ----------
    net : torch.nn.Module
        The net. It is not changed, and its user's hooks are not run.
    args, kwargs : tuple, dict
        Its inputs.
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

    def run(at: int = -1, choice: int = 0, max_steps: int = _MAX_STEPS) -> Flow:
        with preserved_rng(), separate_copy(net) as twin, torch.set_grad_enabled(grad):
            flow = Flow(twin.cpu().train(mode == "train"), at, choice, max_steps)
            flow.run(*map_tensors(Tensor.cpu, copy_inputs((args, kwargs))))
        return flow

    try:
        with quiet():
            decides = _deciding_line(run)
    except UnsupportedTorchError:
        raise
    except (NotSeparateError, Exception):
        return
    if decides is not None:
        file, number = decides
        line = linecache.getline(file, number).strip()
        raise FlowError(
            f"the control flow of {type(net).__name__} depends on the data at {file}:{number}"
            + (f" ({line})" if line else "")
            + ": on other data other layers may run, and labels would mean other layers. If the "
            "layers that you record run whatever the data, write force_static_flow=False; every "
            "pass is then still checked against the labelling"
        )


def _deciding_line(run: Callable[..., Flow]) -> _CodeLine | None:
    """Return where an answer decides what runs; None if none does."""
    base = run()
    # A line that asks in a loop does the same in each iteration.
    first = {question.stack: index for index, question in reversed([*enumerate(base.questions)])}
    # The first false answer to each question, then the second one to each.
    asked = sorted(
        (choice, index)
        for index in first.values()
        for choice in range(1, len(base.questions[index].choices))
    )
    deadline = time.monotonic() + _SECONDS
    for choice, index in () if base.failed else asked[:_MAX_PASSES]:
        if time.monotonic() > deadline:
            break
        question, other = base.questions[index], run(index, choice, 10 * len(base.steps) + 1000)
        if base.differs(other, question):
            # A net that does something else in each pass gives no answer.
            is_repeatable = not base.differs(run(), None)
            return question.stack[0] if is_repeatable else None
    return None


def _parts(value: Any) -> list[Any]:
    """Return what containers and slices hold."""
    parts: list[Any] = []

    def add(part: Any) -> None:
        parts.extend((part.start, part.stop, part.step) if isinstance(part, slice) else (part,))

    fold(value, add, lambda container, inside: None)
    return parts


def _shown(part: Any) -> str:
    # A net may compute with a flag: as a factor, it is one or zero.
    if isinstance(part, bool | int | float) and part in (0, 1):
        return "flag"
    return repr(part) if isinstance(part, int | float | complex | str) else type(part).__name__


def _lines_on_stack() -> Iterator[_CodeLine]:
    """Yield the net's lines on the stack, the innermost first, without those inside torch."""
    for name, line in lines_on_stack():
        is_internal = name.startswith(_TORCH) and not name.startswith(_TORCH_MODULES)
        if not is_internal and name not in _OWN:
            yield name, line


# -- other answers ---------------------------------------------------------------------------------


def other_values(value: Any) -> list[Any]:
    """Return other values of the same kind.

    Parameters
    ----------
    value : bool, int, float, complex, list or numpy.ndarray
        What the net was told, a nested list for a whole tensor.

    Returns
    -------
    list
        The other flag, or the same structure filled with each of several numbers.

    Examples
    --------
    >>> other_values(True), other_values([[2.0, 3.0]])[:2]
    ([False], [[[0.0, 0.0]], [[1000000.0, 1000000.0]]])
    """
    if isinstance(value, bool):
        return [not value]
    numbers = _INTEGERS if isinstance(value, int) else _REALS
    return [_filled(value, number) for number in numbers]


def _filled(value: Any, number: float) -> Any:
    if isinstance(value, list):
        return [_filled(item, number) for item in value]
    if isinstance(value, np.ndarray):
        return np.full_like(value, number)
    return type(value)(number)


def _resized(hits: int, dim: int, result: Tensor) -> Tensor:
    shape = [*result.shape]
    length, shape[dim] = shape[dim], hits
    rows = torch.arange(hits, device=result.device)
    return result.index_select(dim, rows % length) if length else result.new_zeros(shape)

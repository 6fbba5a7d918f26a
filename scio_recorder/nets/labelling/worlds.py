"""One pass of a net on fake tensors, whose questions about values get answers that are made up."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.nets.labelling.watching import asks, intercepted
from scio_recorder.tensors import private

# What stands between the net and the questions that it asks.
_OWN = (os.path.dirname(__file__) + os.sep, private.__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Modules of torch belong to nets; the rest of torch works on behalf of its caller.
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
# Methods that do nothing but pass a question on.
_PASSING_ON = (os.path.join(_TORCH, "_tensor.py"), os.path.join(_TORCH, "functional.py"))

_FLAGS = (False, True)
_INTEGERS = (1, 0, 2, 3, 4, 5, 6, 7, 100, -1)
_REALS = (0.5, 0.0, 1.0, 2.5, 3.0, 4.0, 1e6, -1e6)
_SIZES = (2, 1, 0, 3)
# The natural answer to how many hits there are may be all of them; unbinding more takes long.
_LARGEST_SIZE = 4096
_MAX_QUESTIONS = 1000
_MAX_STEPS = 100_000


@dataclass(frozen=True)
class Place:
    """A line of code."""

    filename: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.filename, self.line).strip()
        return f"{self.filename}:{self.line}" + (f" ({text})" if text else "")


@dataclass
class Question:
    """A value that the net asked for, or a size that depends on values.

    ``stack`` is where it was asked, the innermost place first. ``place`` is where the answer is
    used first. ``is_of_torch`` tells that code of torch asked, and not the net.
    """

    choices: tuple[Any, ...]
    chosen: int
    stack: tuple[Place, ...]
    is_of_torch: bool
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.stack[0]


# What was called, the tensors that it was given, and what else it was given.
_Step: TypeAlias = tuple[Any, tuple[Any, ...], tuple[str, ...]]


class World:
    """What a net does if its questions get certain answers.

    Parameters
    ----------
    answers : sequence of int
        Which of its choices is the answer to each question; the first for those beyond.

    Attributes
    ----------
    questions : list of Question
        In the order in which they were asked.
    failure : tuple or None
        Type and place of the exception that ended the pass.
    """

    def __init__(self, answers: Sequence[int] = ()) -> None:
        self._answers = answers
        self.questions: list[Question] = []
        self.failure: tuple[Any, ...] | None = None
        self._steps: list[_Step] = []
        self._numbers: dict[int, Any] = {}
        self._foreign = 0
        # Keeps the ids in the dictionary above from being given away.
        self._alive: list[Tensor] = []
        self._sizes: dict[str, int] = {}
        # Results of unknown size, by id: nobody has used them yet.
        self._unused: dict[int, Question] = {}

    @property
    def answers(self) -> list[int]:
        """Which of its choices each question got."""
        return [question.chosen for question in self.questions]

    def run(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a net whose tensors are fake, under their mode.

        Parameters
        ----------
        net : torch.nn.Module
            The net, which is used up.
        args, kwargs : tuple, dict
            What it is called with.
        """
        for number, module in enumerate(net.modules()):
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(self._hook(number), with_kwargs=True)
        try:
            with intercepted(self._call_function, self._call_operation):
                output = net(*args, **kwargs)
        except (Exception, _TooLongError) as error:
            self.failure = _failure(error)
        else:
            self._note("return", output)

    def differs(self, other: World, question: Question) -> bool:
        """Whether something else runs in another world than here.

        Parameters
        ----------
        other : World
            One that differs in the answer to a question, and may have failed.
        question : Question
            That question.
        """
        if self.failure != other.failure:
            # A check of the data raises before any module runs that would not run otherwise.
            here, there = self._calls(), other._calls()
            known = len(here) if self.failure else len(there)
            return here[:known] != there[:known]
        if question.is_of_torch:
            # torch chooses between ways to compute the same; only other layers matter.
            return self._calls() != other._calls()
        if question.choices is not _FLAGS:
            # The number may have been computed with.
            return [step[:2] for step in self._steps] != [step[:2] for step in other._steps]
        return self._steps != other._steps

    def _note(self, called: Any, *given: Any) -> None:
        """Add a step."""
        if len(self._steps) >= _MAX_STEPS:
            raise _TooLongError
        tensors: list[Any] = []
        others: list[str] = []
        for part in _parts(given):
            if isinstance(part, Tensor):
                tensors.append(self._number(part))
                if id(part) in self._unused:
                    self._unused.pop(id(part)).place = _stack()[0]
            else:
                others.append(_shown(part))
        self._steps.append((called, tuple(tensors), tuple(others)))

    def _call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(function, args, kwargs)
        step = len(self._steps)
        result = function(*args, **kwargs)
        for position, part in enumerate(_parts(result)):
            if isinstance(part, Tensor):
                self._number(part, (step, position))
        return result

    def _answer(self, choices: tuple[Any, ...]) -> Any:
        """Return what the net is told."""
        index = len(self.questions)
        if index >= _MAX_QUESTIONS:
            raise _TooLongError
        chosen = self._answers[index] if index < len(self._answers) else 0
        chosen = chosen if chosen < len(choices) else 0
        self.questions.append(Question(choices, chosen, _stack(), _is_torch_asking()))
        return choices[chosen]

    def _call_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and put answers in the place of what can't be known."""
        if not asks(operation, args):
            return operation(*args, **kwargs)
        if torch.Tag.data_dependent_output in operation.tags:
            return self._value(operation, args, kwargs)
        result = operation(*args, **kwargs)
        most = max(tensor.numel() for tensor in _parts(args) if isinstance(tensor, Tensor))
        return _mapped(lambda tensor: self._sized(tensor, most), result)

    def _value(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            value = operation(*args, **kwargs)
        except Exception:
            value = None
        if isinstance(value, bool | int | float | complex):
            # A flag of the net's own, which is no data.
            return value
        dtype = args[0].dtype
        is_scalar = operation is torch.ops.aten._local_scalar_dense.default
        if not is_scalar or dtype is torch.bool:
            return self._answer(_FLAGS)
        if dtype.is_complex:
            return complex(self._answer(_REALS))
        return self._answer(_REALS if dtype.is_floating_point else _INTEGERS)

    def _sized(self, tensor: Tensor, most: int) -> Tensor:
        """Return a tensor of known sizes for one whose sizes depend on data."""
        if all(isinstance(length, int) for length in tensor.shape):
            return tensor
        asked = len(self.questions)
        shape = [self._size(length, most) for length in tensor.shape]
        sized = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        self._alive.append(sized)
        for question in self.questions[asked:]:
            self._unused[id(sized)] = question
        return sized

    def _size(self, length: Any, most: int) -> int:
        if isinstance(length, int):
            return length
        if str(length) not in self._sizes:
            likely = [size for size in (*_SIZES, most) if size <= min(most, _LARGEST_SIZE)]
            self._sizes[str(length)] = self._answer(tuple(dict.fromkeys(likely)) or (0,))
        return self._sizes[str(length)]

    def _number(self, tensor: Tensor, new: Any = None) -> Any:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)
            # Tensors that no function has made, in the order in which they are met.
            self._foreign += new is None
            self._numbers[id(tensor)] = new or self._foreign
        return self._numbers[id(tensor)]

    def _calls(self) -> list[int]:
        return [called for called, _, _ in self._steps if isinstance(called, int)]

    def _hook(self, number: int) -> Any:
        return lambda module, args, kwargs: self._note(number, args, kwargs)


class _TooLongError(BaseException):
    """A loop that no made-up answer ends. No ``except Exception`` of a net may catch it."""


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, item) for item in value)
    return value


def _shown(part: Any) -> str:
    # A flag may be computed with: as a factor, it is one or zero.
    if isinstance(part, bool | int | float) and part in (0, 1):
        return "flag"
    return repr(part) if isinstance(part, int | float | complex | str) else type(part).__name__


def _stack() -> tuple[Place, ...]:
    """Return where the net is, the innermost place first, without what torch does in between."""
    return tuple(place for place in _frames() if not _is_internal(place.filename)) or (
        Place("<unknown>", 0),
    )


def _is_torch_asking() -> bool:
    innermost = next(_frames(), None)
    return (
        innermost is not None
        and innermost.filename.startswith(_TORCH)
        and innermost.filename not in _PASSING_ON
    )


def _frames() -> Iterator[Place]:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not World.run.__code__:
        if not frame.f_code.co_filename.startswith(_OWN):
            yield Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


def _is_internal(filename: str) -> bool:
    return filename.startswith(_TORCH) and not filename.startswith(_TORCH_MODULES)


def _failure(error: BaseException) -> tuple[Any, ...]:
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    of_net = [place for place in places if not place[0].startswith(_OWN)]
    return type(error), of_net[-1] if of_net else None

"""Modules that run again during the backward pass, under activation checkpointing.

NOTE [Whose run is run again]

A re-run happens inside a backward pass, on whatever thread that runs, when any number of other
forward passes may have run in between. Nothing is recorded then, but post-processors must act as
they did, or gradients would be those of another function.

What ties a re-run to its first run is the region: the object that torch keeps in the graph for
each checkpointed call. That is the context of an autograd function whose ``forward`` runs modules
(reentrant checkpointing and its kin), or torch's own frame object (non-reentrant). Both are local
variables of functions that are running when a hook is called, in the first run and in the re-run.
So each event of a pass marks the regions around it, found by walking up the stack, and a re-run
looks for the nearest marked region in the same way. The marks live and die with the graph.

A region holds the positions of its events in order, so that the calls of a module that runs several
times are told apart by counting. Hooks of a selection that was given up stay, for re-runs only, as
long as any of its marks lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

from scio_recorder.postprocessors.assigning import (
    Postprocessor,
    apply,
    apply_to_input,
    on_inputs,
)
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import flatten

if TYPE_CHECKING:
    from scio_recorder.capture.gradients import Gradients
    from scio_recorder.capture.program import Program
    from scio_recorder.nets.architecture import DepthIdx

__all__ = ["Rerun", "Reruns", "is_rerun", "regions"]

_ATTRIBUTE = "_scio_recorder_marks"
_FRAME: type = getattr(checkpoint, "_CheckpointFrame", type(None))


def is_rerun() -> bool:
    """Whether activation checkpointing is running something again on this thread."""
    if private.backward_pass() == -1:
        return False
    node = private.running_node()
    if node is not None and node.name() == "CheckpointFunctionBackward":
        return True
    hooks = private.active_saved_tensors_hooks()
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def regions(until: CodeType | None) -> Iterator[tuple[Any, bool]]:
    """Yield the regions around the caller, innermost first, up to a function.

    With each, whether it is being run again rather than for the first time.
    """
    frame: FrameType | None = private.calling_frame()
    while frame is not None and frame.f_code is not until:
        found = _region_of(frame)
        if found is not None:
            yield found, frame.f_code.co_name in ("backward", "unpack_hook")
        frame = frame.f_back


def _region_of(frame: FrameType) -> Any:
    code = frame.f_code
    if code.co_name in ("forward", "backward"):
        # A static method of an autograd function, not a method of a module.
        first = code.co_varnames[0] if code.co_argcount else "self"
        found = None if first == "self" else frame.f_locals.get(first)
        return found if private.is_function_context(found) else None
    if code.co_name == "checkpoint":
        generator = frame.f_locals.get("gen")
        inner = getattr(generator, "gi_frame", None)
        return None if inner is None else inner.f_locals.get("new_frame")
    if code.co_name == "unpack_hook" and "frame" in code.co_freevars:
        found = frame.f_locals.get("frame")
        return found if isinstance(found, _FRAME) else None
    return None


class _Mark:
    """One region of one pass."""

    __slots__ = ("counts", "positions", "rerun", "root", "task")

    def __init__(self, rerun: Rerun, root: int | None = None) -> None:
        self.rerun = rerun
        self.positions: list[int] = []
        # The backward pass that a mark was made in, if it was: checkpointing in a re-run region.
        self.root = root
        self.task = -1
        self.counts: dict[tuple[int, bool], int] = {}

    def next_position(self, index: int, *, starts: bool = False) -> int | None:
        """Return the position of the next call of a module in this re-run, by starts or returns."""
        task = private.backward_pass()
        if task != self.task:
            self.task, self.counts = task, {}
        count = self.counts.get((index, starts), 0)
        self.counts[index, starts] = count + 1
        own = self.rerun.positions[index]
        found = [position for position in self.positions if position in own]
        return found[count] if count < len(found) else None


def _marks(region: Any) -> dict[int, _Mark]:
    marks: dict[int, _Mark] | None = getattr(region, _ATTRIBUTE, None)
    if marks is None:
        marks = {}
        setattr(region, _ATTRIBUTE, marks)
    return marks


class Rerun:
    """What a re-run of one forward pass needs; held by the regions of its graph."""

    def __init__(
        self,
        program: Program,
        posts: dict[DepthIdx, Postprocessor],
        gradients: Gradients | None,
        owner: Reruns,
        until: CodeType,
    ) -> None:
        self._owner = id(owner)
        self._until = until
        self.positions = program.positions
        self.labels = program.labels
        self.posts = posts
        self.on_inputs = on_inputs(posts)
        # The graph must hold neither the network, which the program leads to, nor gradients.
        self._program = weakref.ref(program)
        self._gradients = None if gradients is None else weakref.ref(gradients)

    def note(self, position: int) -> None:
        """Mark the regions around an event of the first run."""
        for region, _ in regions(self._until):
            marks = _marks(region)
            mark = marks.get(self._owner)
            if mark is None or mark.rerun is not self:
                mark = marks[self._owner] = _Mark(self)
            mark.positions.append(position)

    def again(self, label: DepthIdx, output: Any, task: int) -> Any:
        """Do to an output what the first run did to it; None to go on with it as it is."""
        gradients = None if self._gradients is None else self._gradients()
        if gradients is not None:
            gradients.attach(label, *flatten(output), task)
        program = self._program()
        if label not in self.posts or label in self.on_inputs:
            return None
        layer: Any = label if program is None else program.architecture[label]
        handed = apply(self.posts[label], output, layer)
        return None if handed is output else handed

    def inputs_again(self, label: DepthIdx, args: Any, kwargs: Any) -> Any:
        """Do to inputs what the first run did to them; None to go on with them as they are."""
        if label not in self.on_inputs:
            return None
        program = self._program()
        layer: Any = label if program is None else program.architecture[label]
        return apply_to_input(self.on_inputs[label], args, kwargs, layer)


class Reruns:
    """The passes of one selection that may be run again."""

    def __init__(self) -> None:
        self._alive: set[weakref.ref[Rerun]] = set()
        self._when_over: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self._alive)

    def add(self, rerun: Rerun) -> None:
        """Take up a pass that may be run again."""
        self._alive.add(weakref.ref(rerun, self._is_gone))

    def when_over(self, function: Callable[[], None]) -> None:
        """Call a function as soon as there is nothing left to run again."""
        if self._alive:
            self._when_over = function
        else:
            function()

    def _is_gone(self, reference: weakref.ref[Rerun]) -> None:
        self._alive.discard(reference)
        if not self._alive and self._when_over is not None:
            function, self._when_over = self._when_over, None
            function()

    def inputs_again(self, index: int, args: Any, kwargs: Any) -> Any:
        """Post-process inputs in a re-run; None to go on with them as they are."""
        for region, runs_again in regions(None) if self._alive else ():
            mark = getattr(region, _ATTRIBUTE, {}).get(id(self)) if runs_again else None
            if mark is not None:
                position = mark.next_position(index, starts=True)
                label = None if position is None else mark.rerun.labels[position]
                return None if label is None else mark.rerun.inputs_again(label, args, kwargs)
        return None

    def again(self, index: int, output: Any) -> Any:
        """Post-process an output in a re-run; None to go on with it as it is."""
        if not self._alive:
            return None
        owner, inner = id(self), []
        for region, runs_again in regions(None):
            mark = getattr(region, _ATTRIBUTE, {}).get(owner) if runs_again else None
            if mark is None:
                inner.append(region)
                continue
            position = mark.next_position(index)
            label = None if position is None else mark.rerun.labels[position]
            if position is None or label is None:
                return None
            task = private.backward_pass() if mark.root is None else mark.root
            for new in inner:
                # Checkpointing inside a checkpointed region: its own re-run comes later.
                own = _marks(new).setdefault(owner, _Mark(mark.rerun, task))
                own.positions.append(position)
            return mark.rerun.again(label, output, task)
        return None

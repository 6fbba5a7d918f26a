"""Modules that run again during the backward pass, under activation checkpointing.

NOTE [Whose run is run again]

A re-run happens inside a backward pass, on any thread, and other forward passes may have run in
between. Nothing is recorded then, but post-processors must act as they did, or gradients would be
those of another function.

The region ties a re-run to its first run: the object that torch keeps in the graph for each
checkpointed call. That is the context of an autograd function whose ``forward`` runs modules
(reentrant checkpointing and similar functions), or torch's own object (non-reentrant). Functions
that are running when a hook is called hold it, in the first run and in the re-run. So each call of
a pass marks the regions around it, found by walking up the stack, and a re-run looks for the
nearest marked region in the same way. The marks live as long as the graph.

A region holds its calls in order, by starts and by returns, so that several calls of a module are
distinguished by counting. Hooks of a selection that was given up stay, for re-runs only, as long as
any of its marks lives.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, MutableMapping
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from scio_recorder.capture.gradients import CallStart, CallStarts
from scio_recorder.postprocessors.assigning import Assigned
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import flatten

if TYPE_CHECKING:
    from scio_recorder.capture.gradients import CallKey, Gradients
    from scio_recorder.capture.program import Program
    from scio_recorder.layer import RowIdx


# The index of a called module, and which of its calls it was.
_MarkedCall: TypeAlias = "tuple[int, CallKey]"
_ATTRIBUTE = "_scio_recorder_marks"
# The functions that begin a backward pass: it does not run again what is around them.
_BACKWARD = {inspect.unwrap(f).__code__ for f in (torch.autograd.backward, torch.autograd.grad)}


def is_rerun() -> bool:
    """Whether activation checkpointing is running something again on this thread."""
    if private.backward_pass() == -1:
        return False
    return any(
        region.is_rerun
        # Other functions than checkpointing may run modules in their backward, for the first time.
        and (not region.is_reentrant or type(region.kept).__name__ == "CheckpointFunctionBackward")
        for region in private.regions_around(_BACKWARD)
    )


def _first_runs(outermost: Collection[CodeType]) -> list[Any]:
    """Return the objects that the graph will keep of the regions around a call of a pass."""
    around = [region.kept for region in private.regions_around(outermost)]
    # Nothing on the stack holds a region that hooks of a module begin and end.
    saving = private.region_that_saves()
    if saving is not None and all(region.kept is not saving for region in private.regions_around()):
        around.insert(0, saving)
    return around


class _Mark:
    """What one checkpointed region needs to replay one pass."""

    __slots__ = ("calls", "counts", "rerun", "root", "task")

    def __init__(self, rerun: Rerun, root: int | None = None) -> None:
        self.rerun = rerun
        # The calls of modules: by returns, and by starts, which come in another order
        # if modules call themselves, and of which some are of calls that fail.
        self.calls: tuple[list[_MarkedCall], list[_MarkedCall]] = ([], [])
        # The backward pass in which the mark was made, if any: checkpointing in a re-run region.
        self.root = root
        self.task = -1
        self.counts: dict[tuple[int, bool], int] = {}

    def next_call(self, index: int, *, starts: bool) -> _MarkedCall | None:
        """Return the next call of a module in this re-run, by starts or returns."""
        task = private.backward_pass()
        if task != self.task:
            self.task, self.counts = task, {}
        count = self.counts.get((index, starts), 0)
        self.counts[index, starts] = count + 1
        found = [call for call in self.calls[starts] if call[0] == index]
        return found[count] if count < len(found) else None


class Rerun:
    """The state that a re-run of one forward pass needs; the regions of its graph hold it."""

    def __init__(
        self,
        program: Program,
        posts: Assigned,
        gradients: Gradients | None,
        owner: Reruns,
        outermost: CodeType,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._outermost = (outermost,)
        # Those around the whole pass, which are run again outside of the block that made it.
        self._around = [weakref.ref(region.kept) for region in private.regions_around()]
        self.posts = posts
        # The graph must hold neither the network, which the program leads to, nor gradients.
        self._program = weakref.ref(program)
        self._gradients = None if gradients is None else weakref.ref(gradients)

    def note(self, index: int, call: CallKey, *, starts: bool = False) -> None:
        """Mark the regions around the return, or the start, of a module's call in the first run."""
        owner = self._owner()
        assert owner is not None, "the hooks that bring calls hold it"
        around = [region for alive in self._around if (region := alive()) is not None]
        for region in (*_first_runs(self._outermost), *around):
            mark = owner.on(region)
            if mark is None or mark.rerun is not self:
                mark = owner.put(region, _Mark(self))
            mark.calls[starts].append((index, call))

    def again(self, call: CallKey, output: Any, start: CallStart, task: int) -> Any:
        """Do to an output what the first run did to it; None leaves it as it is."""
        gradients = None if self._gradients is None else self._gradients()
        if gradients is not None:
            leaves, rebuild = flatten(output)
            gradients.attach(call, leaves, rebuild, [*map(start.seen, leaves)], task)
        label: Any = call.label  # those of calls without one are never marked
        handed = self.posts.after(label, output, self._layer(label))
        return None if handed is output else handed

    def inputs_again(self, label: RowIdx, args: Any, kwargs: Any) -> Any:
        """Do to inputs what the first run did to them."""
        return self.posts.before(label, args, kwargs, self._layer(label))

    def _layer(self, label: RowIdx) -> Any:
        program = self._program()
        return label if program is None else program.architecture[label]


class Reruns:
    """The passes of one selection that may be run again, by marks that it has put on regions.

    A graph holds marks, but no selection.
    """

    def __init__(self) -> None:
        self._alive: set[weakref.ref[Any]] = set()
        self._when_over: Callable[[], None] | None = None
        self._call_starts = CallStarts()

    def __bool__(self) -> bool:
        """Whether there is anything left that can run again."""
        return bool(self._alive)

    def hold(self, mark: object) -> None:
        """Note an object that a graph will hold as long as something can run again."""
        self._alive.add(weakref.ref(mark, self._is_gone))

    def when_over(self, function: Callable[[], None]) -> None:
        """Call a function whenever nothing is left that can run again."""
        self._when_over = function
        if not self._alive:
            function()

    def _is_gone(self, reference: weakref.ref[Any]) -> None:
        self._alive.discard(reference)
        if not self._alive and self._when_over is not None:
            self._when_over()

    def on(self, region: Any) -> Any:
        """Return this selection's mark on a region; None if it has none."""
        return getattr(region, _ATTRIBUTE, {}).get(self)

    def put(self, region: Any, mark: Any) -> Any:
        """Mark a region, and return the mark."""
        marks: MutableMapping[Reruns, Any] | None = getattr(region, _ATTRIBUTE, None)
        if marks is None:
            marks = weakref.WeakKeyDictionary()
            setattr(region, _ATTRIBUTE, marks)
        marks[self] = mark
        return mark

    def inputs_again(self, index: int, args: Any, kwargs: Any) -> Any:
        """Post-process inputs in a re-run; None leaves them as they are."""
        self._call_starts.begin(index, args, kwargs)
        mark, call, _ = self._next_call(index, starts=True)
        return None if mark is None else mark.rerun.inputs_again(call.label, args, kwargs)

    def again(self, index: int, output: Any) -> Any:
        """Post-process an output in a re-run; None leaves it as it is."""
        start = self._call_starts.end(index)
        mark, call, task = self._next_call(index, starts=False)
        return None if mark is None else mark.rerun.again(call, output, start, task)

    def _next_call(self, index: int, *, starts: bool) -> tuple[Any, Any, int]:
        """Return the mark of the nearest re-run region, and the call that comes next.

        The last item is the backward pass that the call belongs to.
        """
        inner: list[Any] = []
        for region in private.regions_around() if self else ():
            mark = self.on(region.kept) if region.is_rerun else None
            if mark is None:
                inner.append(region.kept)
                continue
            found = mark.next_call(index, starts=starts)
            task = private.backward_pass() if mark.root is None else mark.root
            if found is None:
                return None, None, task
            for around in inner:
                # Checkpointing inside a checkpointed region: its own re-run comes later.
                own = self.on(around) or self.put(around, _Mark(mark.rerun, task))
                own.calls[starts].append(found)
            _, call = found
            return (None if call.label is None else mark), call, task
        return None, None, -1

"""Modules that run again during the backward pass, under activation checkpointing.

NOTE [Whose run is run again]

A re-run happens inside a backward pass, on whatever thread that runs, when any number of other
forward passes may have run in between. Nothing is recorded then, but post-processors must act as
they did, or gradients would be those of another function. What is known in a re-run is the autograd
node that is being executed. Autograd numbers the nodes that a thread makes in order. So each pass
notes the numbers at its start and end, and at each of its events; a node belongs to the pass
between whose numbers it lies.

Which call of its module is run again matters only where a module has several calls that are
post-processed differently. With reentrant checkpointing the node is made right before its region
runs, so that the first event with a higher number opens the region. Non-reentrant checkpointing
runs again when a tensor is needed that some node inside the region saved; the region is recognised
by the object that torch keeps for it. Where neither tells, an error is raised: never a wrong
gradient without a word.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from scio_recorder.errors import FlowError
from scio_recorder.postprocessing import Postprocessor, apply
from scio_recorder.tree import flatten, tensors

if TYPE_CHECKING:
    from scio_recorder.architecture import DepthIdx
    from scio_recorder.capture.gradients import Gradients
    from scio_recorder.capture.program import Program

__all__ = ["Rerun", "Reruns", "is_rerun"]

_TAG = "scio_recorder.rerun"
_FRAME: type = getattr(checkpoint, "_CheckpointFrame", type(None))


def is_rerun() -> bool:
    """Whether activation checkpointing is running something again on this thread."""
    if torch._C._current_graph_task_id() == -1:
        return False
    node = torch._C._current_autograd_node()
    if node is not None and _is_reentrant(node):
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def _is_reentrant(node: Any) -> bool:
    return bool(node.name() == "CheckpointFunctionBackward")


def _region() -> Any:
    """Return the object that torch keeps for the non-reentrant region that is running, if any."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    function = None if hooks is None else inspect.unwrap(hooks[0])
    for cell in getattr(function, "__closure__", None) or ():
        found = cell.cell_contents
        found = found() if isinstance(found, weakref.ref) else found
        if isinstance(found, _FRAME):
            return found
    return None


class Rerun:
    """What a re-run of one forward pass needs; alive as long as the graph of that pass."""

    def __init__(
        self, program: Program, posts: dict[DepthIdx, Postprocessor], gradients: Gradients | None
    ) -> None:
        # The graph holds this object, and must not hold the network, which the program refers to.
        self._program = weakref.ref(program)
        self.posts = posts
        self.gradients = None if gradients is None else weakref.ref(gradients)
        self.thread = threading.get_ident()
        self.first = torch._C._autograd._get_sequence_nr()
        self.last: int | None = None
        # Of each event: the number of the next node, and its position.
        self._events: list[tuple[int, int]] = []
        self._regions: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._counts: dict[Any, Counter[int]] = {}

    def note(self, position: int) -> None:
        """Note an event of the forward pass."""
        self._events.append((torch._C._autograd._get_sequence_nr(), position))
        region = _region()
        if region is not None:
            self._regions.setdefault(region, []).append(position)

    def close(self, *values: Any) -> None:
        """End the pass, and live on with the graph that it has made."""
        self.last = torch._C._autograd._get_sequence_nr()
        for tensor in (tensor for value in values for tensor in tensors(value)):
            if tensor.grad_fn is not None:
                metadata: Any = tensor.grad_fn.metadata
                metadata[_TAG] = self

    def contains(self, number: int) -> bool:
        """Whether the node with this number was made by the pass, if on its thread."""
        return self.first <= number and (self.last is None or number < self.last)

    def again(self, index: int, output: Any, node: Any, task: int) -> Any:
        """Post-process what a module returned in a re-run; None to go on with it as it is."""
        program = self._program()
        position = None if program is None else self._position(program, index, node)
        label = None if program is None or position is None else program.labels[position]
        if program is None or label is None:
            return None
        gradients = None if self.gradients is None else self.gradients()
        if gradients is not None:
            leaves, rebuild = flatten(output)
            gradients.attach(label, leaves, rebuild, task)
        if label not in self.posts:
            return None
        handed = apply(self.posts[label], output, program.architecture[label])
        return None if handed is output else handed

    def _position(self, program: Program, index: int, node: Any) -> int | None:
        positions = program.positions[index]
        labels = [program.labels[position] for position in positions]
        if len(positions) == 1:
            return positions[0]
        functions = {id(self.posts.get(label)) if label else None for label in labels}
        key, found = self._candidates(set(positions), node)
        counts = self._counts.setdefault((torch._C._current_graph_task_id(), key), Counter())
        count = counts[index]
        counts[index] += 1
        if count < len(found):
            return found[count]
        if len(functions) > 1:
            raise FlowError(
                "activation checkpointing runs the module of layer "
                f"{program.architecture[next(filter(None, labels))]} again, and it can't be "
                "told which of its calls this is, while these are post-processed differently: give "
                "all calls of the module the same post-processor, or don't checkpoint it"
            )
        # Any call will do for post-processing; gradients come by the graph of the first run.
        return positions[0] if self.posts else None

    def _candidates(self, mine: set[int], node: Any) -> tuple[Any, list[int]]:
        """Return a key for the region, and which of some positions lie in it, in order."""
        if _is_reentrant(node):
            number = node._sequence_nr()
            return number, [at for seen, at in self._events if seen > number and at in mine]
        region = _region()
        if region is None:
            return None, []
        return id(region), [at for at in self._regions.get(region, []) if at in mine]


class Reruns:
    """Finds the pass that a re-run belongs to."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Rerun] = weakref.WeakSet()
        self._local = threading.local()

    def __bool__(self) -> bool:
        return len(self._alive) > 0

    def add(self, rerun: Rerun) -> None:
        """Take up a pass that may be run again."""
        self._alive.add(rerun)
        self.forget()

    def forget(self) -> None:
        """Note that this thread is in no re-run."""
        self._local.current = None

    def again(self, index: int, output: Any) -> Any:
        """Post-process an output in a re-run; None to go on with it as it is."""
        if not self._alive:
            return None
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        task = torch._C._current_graph_task_id()
        found = self._owner(node)
        if found is not None:
            self._enter(found, task)
        else:
            found, task = self._enclosing(task)
        return None if found is None else found.again(index, output, node, task)

    def _enter(self, rerun: Rerun, task: int) -> None:
        if getattr(self._local, "current", None) is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)
        self._local.current = (weakref.ref(rerun), task)

    def _enclosing(self, task: int) -> tuple[Rerun | None, int]:
        """Serve a node that no known pass has made.

        It was made by the re-run around it where reentrant checkpointing is nested: that runs a
        backward pass of its own inside the other one.
        """
        current = getattr(self._local, "current", None)
        if current is None or current[1] == task:
            self.forget()
            return None, task
        return current[0](), current[1]

    def _owner(self, node: Any) -> Rerun | None:
        number = node._sequence_nr()
        found = [rerun for rerun in self._alive if rerun.contains(number)]
        own = [rerun for rerun in found if rerun.thread == threading.get_ident()]
        found = own or found
        if len(found) > 1:
            raise FlowError(
                "activation checkpointing runs modules again on a thread of its own, and several "
                "forward passes of other threads come into question: run the backward pass on the "
                "thread of the forward pass, or post-process on one thread at a time"
            )
        return found[0] if found else None

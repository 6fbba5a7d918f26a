"""What the modules of one guarded block share, and the pass that a thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.analysis.guarding.gradients import GuardedGradients
from scio_recorder.analysis.guarding.guard import Call, Case, Cases, Guard
from scio_recorder.analysis.guarding.kept_call import CallBefore
from scio_recorder.analysis.guarding.passing import NOTHING, Ends, Operations, Passing
from scio_recorder.analysis.guarding.vouching import Link, Traits
from scio_recorder.capture.brackets import Bracket
from scio_recorder.capture.engine import fusable, refuse_transforms, warn_of_other_kernels
from scio_recorder.nets.architecture import Architecture
from scio_recorder.tensors import private
from scio_recorder.tensors.finite import Found, Known
from scio_recorder.tensors.structures import tensors

# A call's arguments, as far as it matters when it returns: findings about its inputs, its
# counterpart in the backward pass unless it is made later, the number of operations ahead of it (-1
# if nobody listens), its copy, and the outputs that it vouches for.
Received: TypeAlias = tuple[list[Found], Passing | None, int, CallBefore | None, list[Link]]
# A call that has not returned yet: its name, its arguments, and what is known of its module.
Frame: TypeAlias = tuple[str, Any, Received, Traits]
# A call that has returned, to whose gradients nobody listens yet: its counterpart in the backward
# pass, or what that is made from; its name and number; what made its output; what is known about
# its operations; and whether a Sequential hands on its output, so that nobody else receives it.
Unheard: TypeAlias = tuple[
    Passing | None, int, Passing | None, str, int, Ends, Operations | None, bool
]
_WITHOUT_TENSORS = (str, int, float)

is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # not in its stubs
NO_LINKS: list[Link] = []


class State:
    """The pass that a thread runs."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.known = Known()
        self.counts: dict[str, int] = {}
        self.pass_number = 0
        # Whether torch.jit traces it, for which all modules must be called by torch.
        self.is_traced = False
        self.cases = Cases()
        # Outputs that nobody has examined yet, in order.
        self.links = NO_LINKS
        # Calls to whose gradients nobody listens yet, in order.
        self.unheard: list[Unheard] = []

    def look(self, values: Iterable[Any]) -> list[Found]:
        """Return findings about those tensors of some values that are not finite, or may not be."""
        found = NOTHING
        for value in values:
            # Taking structures apart takes longer than examining most tensors.
            if isinstance(value, Tensor):
                one = self.known.look(value)
                if one is not None:
                    found = [*found, one]
            elif not (value is None or isinstance(value, _WITHOUT_TENSORS)):
                seen = [self.known.look(tensor) for tensor in tensors(value)]
                found = [*found, *(one for one in seen if one is not None)]
        return found

    def pop(self, name: str, args: Any) -> Frame | None:
        """Take the frame of a call that returns, and those of calls that failed in it."""
        frames = self.frames
        if frames and frames[-1][1] is args and frames[-1][0] == name:
            return frames.pop()
        own = [at for at, frame in enumerate(frames) if frame[0] == name]
        if not own:
            return None
        at = next((at for at in reversed(own) if frames[at][1] is args), own[-1])
        found = frames[at]
        del frames[at:]
        return found

    def forget_waiting(self) -> None:
        """Forget what waits, since the calls around it are broken off."""
        self.links = NO_LINKS
        self.unheard.clear()


class Local(threading.local):
    """The pass of each thread."""

    def __init__(self) -> None:
        self.state = State()


class Block:
    """What the modules of one block share."""

    def __init__(
        self, architecture: Architecture, guard: Guard, gradients: GuardedGradients | None
    ) -> None:
        self._architecture = architecture
        # Found once: there are many passes, and most networks have none.
        self._fusable = fusable(architecture)
        self._has_warned = False
        self.guard = guard
        self.gradients = gradients
        self.local = Local()
        self.brackets: Mapping[nn.Module, Bracket] = {}
        # Names of modules that ran as compiled code.
        self.unseen: dict[str, bool] = {}

    def begin_pass(self, state: State) -> None:
        """Begin a pass: a call that is part of no other."""
        refuse_transforms("guarded")
        state.known.forget()
        state.cases.reset()
        state.forget_waiting()
        state.is_traced = is_tracing()
        if self._fusable and not self._has_warned:
            self._has_warned = warn_of_other_kernels(
                self._fusable, {row.module for row in self._architecture.values()}, "guarded"
            )
        if private.backward_pass() != -1:
            # Checkpointing re-runs calls of a pass that was counted.
            return
        state.counts.clear()
        state.pass_number = self.guard.begin_pass()

    def judge(self, state: State, case: Case) -> None:
        """Judge a call; at the end of a pass, also all that still wait for a device."""
        if case.made:
            state.cases.add(self.guard, case)
        if case.call.is_outermost and case.made:
            state.cases.add(self.guard, case._replace(given=(), is_handed_on=True))
        if case.call.is_outermost or case.kept is not None:
            state.cases.read(self.guard)

    def hear(self, state: State) -> None:
        """Listen to the gradients of calls that have returned.

        A call takes a third of the time if many are listened to in turn.
        """
        unheard, state.unheard = state.unheard, []
        for given, start, around, name, number, ends, known, is_chained in unheard:
            if self.gradients is not None:
                passing = given or Passing(start, around, ())
                passing.call = Call(name, number, state.pass_number, is_outermost=False)
                self.gradients.listen(passing, ends, known, is_chained)

    def settle(self, state: State, links: list[Link]) -> list[Found]:
        """Judge calls that were not examined when they returned; return what the last one made."""
        state.links = NO_LINKS
        found = links[0][-1]
        for tensor, version, name, number, _ in links:
            # Nothing is known about a tensor that was written to since.
            values = (tensor,) if tensor._version == version else ()
            given, found = found, state.look(values)
            call = Call(name, number, state.pass_number, is_outermost=False)
            self.judge(state, Case(call, "forward", given, found))
        return found

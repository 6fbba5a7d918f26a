"""Looking at the inputs and outputs of every call of a network, while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.analysis.guarding.gradients import GuardedGradients, Passing
from scio_recorder.analysis.guarding.guard import Call, Case, Cases, Guard
from scio_recorder.analysis.guarding.kept_call import CallBefore
from scio_recorder.analysis.guarding.vouching import (
    Link,
    can_wait,
    followed,
    is_harmless,
    runs_own,
    tells,
)
from scio_recorder.capture.brackets import Bracket, bracketed
from scio_recorder.capture.engine import fusable, refuse_transforms, warn_of_other_kernels
from scio_recorder.errors import FlowError, UnsupportedNetError
from scio_recorder.layer import Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private
from scio_recorder.tensors.digests import Weights
from scio_recorder.tensors.finite import Found, Known
from scio_recorder.tensors.structures import tensors

_WITHOUT_TENSORS = (str, int, float)


@contextlib.contextmanager
def guarded(
    architecture: Architecture, guard: Guard, *, gradients: bool, keep_inputs: bool
) -> Iterator[Guard]:
    """Let a guard judge every call of a network's modules inside a block.

    Backward passes of passes made in the block are judged after it too, as long as somebody holds
    the guard. Inputs are kept until a call returns, and those of the one that fails from then on.

    Raises
    ------
    FlowError
        No module of the network was called.
    UnsupportedNetError
        The network is compiled, in part or as a whole.
    """
    # The rows of a module differ in nothing that matters here.
    rows = {
        row.module: row
        for row in architecture.values()
        if row.module is not None and takes_hooks(row.module)
    }
    if any(map(private.is_compiled, rows)):
        raise UnsupportedNetError(
            "the network is compiled, in part or as a whole, and compiled code ignores hooks: "
            "guard the uncompiled network"
        )
    watched = GuardedGradients(guard) if gradients else None
    guard.gradients = watched
    shared = _Shared(architecture, guard, watched)
    compiled: dict[str, bool] = {}
    weights = Weights() if keep_inputs else None
    brackets = {
        module: _GuardedCall(module, row, compiled, shared, weights) for module, row in rows.items()
    }
    # Calls are kept as they return.
    for module, parent in {} if keep_inputs else followed(rows).items():
        if module in brackets and parent in brackets:
            brackets[module].chained_in = brackets[parent].name
    try:
        with bracketed(brackets):
            yield guard
    except BaseException:
        guard.is_settled = True
        raise
    if compiled:
        raise UnsupportedNetError(
            f"the module {next(iter(compiled))!r} ran as compiled code inside the block, which "
            "can't be guarded: leave the network uncompiled there"
        )
    if not guard.num_passes:
        raise FlowError(
            "nothing was guarded: the network was not called inside the block, or a copy of it "
            "was called, or it was compiled before"
        )


# A call that has not returned yet: its name, its arguments, those that are not finite, its
# counterpart in the backward pass, its copy, and the output that it vouches for. A bare tuple,
# since every call makes one.
_Frame: TypeAlias = tuple[str, Any, list[Found], Passing | None, CallBefore | None, list[Link]]
_NOTHING: list[Found] = []
_NO_LINKS: list[Link] = []


class _State:
    """The pass that a thread runs."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.known = Known()
        self.counts: dict[str, int] = {}
        self.pass_number = 0
        self.cases = Cases()
        # Outputs that nobody has examined yet, in order.
        self.links = _NO_LINKS


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = _State()


class _Shared:
    """The state that the modules of one block share."""

    def __init__(
        self, architecture: Architecture, guard: Guard, gradients: GuardedGradients | None
    ) -> None:
        self._architecture = architecture
        # Found once: there are many passes, and most networks have none.
        self._fusable = fusable(architecture)
        self._has_warned = False
        self.guard = guard
        self.gradients = gradients
        self.local = _Local()

    def begin_pass(self, state: _State) -> None:
        """Begin a pass: a call that is part of no other."""
        refuse_transforms("guarded")
        state.known.forget()
        state.cases.reset()
        state.links = _NO_LINKS
        if self._fusable and not self._has_warned:
            self._has_warned = warn_of_other_kernels(
                self._fusable, {row.module for row in self._architecture.values()}, "guarded"
            )
        if private.backward_pass() != -1:
            # Checkpointing re-runs calls of a pass that was counted.
            return
        state.counts.clear()
        state.pass_number = self.guard.begin_pass()

    def judge(self, state: _State, case: Case) -> None:
        """Judge a call; at the end of a pass, also all that still wait for a device."""
        if case.made:
            state.cases.add(self.guard, case)
        if case.call.is_outermost and case.made:
            state.cases.add(self.guard, case._replace(given=(), is_handed_on=True))
        if case.call.is_outermost or case.kept is not None:
            state.cases.read(self.guard)

    def settle(self, state: _State, links: list[Link]) -> list[Found]:
        """Judge calls that were not examined when they returned; return what the last one made."""
        state.links = _NO_LINKS
        found = links[0].given
        for link in links:
            given, found = found, link.look(state.known)
            call = Call(link.name, link.number, state.pass_number, is_outermost=False)
            self.judge(state, Case(call, "forward", given, found))
        return found


class _GuardedCall(Bracket):
    """Examines the inputs before each call of a module, and its output afterwards."""

    def __init__(
        self,
        module: nn.Module,
        layer: Layer,
        unseen: dict[str, bool],
        shared: _Shared,
        weights: Weights | None,
    ) -> None:
        super().__init__(layer.name, module, unseen)
        self._module = module
        self._layer = layer
        self._shared = shared
        # Takes digests of parameters, if calls are kept before they run.
        self._weights = weights
        self._is_harmless = is_harmless(module)
        self._tells = tells(module)
        # The Sequential in which the next module vouches for this one's output, if any.
        self.chained_in: str | None = None

    @property
    def _is_as_it_was(self) -> bool:
        """Whether nobody has changed in the block what the module computes."""
        return self.is_alone and runs_own(self._module)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Examine the module's inputs before the call, since it may work in place."""
        shared = self._shared
        state = shared.local.state
        frames = state.frames
        if not frames:
            shared.begin_pass(state)
        passing, kept, given, links = None, None, _NOTHING, state.links
        if links:
            state.links, last = _NO_LINKS, links[-1]
            is_next = len(args) == 1 and args[0] is last.tensor and not kwargs
            is_next = is_next and self._tells and self._is_as_it_was
            if not is_next or last.tensor._version != last.version:
                shared.settle(state, links)
                links = _NO_LINKS
        if not shared.guard.is_settled:
            if not links:
                given = _look(state.known, args)
            if kwargs:
                given = given + _look(state.known, kwargs.values())
            if shared.gradients is not None and torch.is_grad_enabled():
                around = frames[-1][3] if frames else None
                passing = Passing(private.num_operations(), around, (args, kwargs))
            if self._weights is not None:
                kept = CallBefore(self._layer, self._module, Inputs(args, kwargs), self._weights)
        frames.append((self.name, args, given, passing, kept, links))

    def end(self, args: Any, output: Any) -> None:
        """Judge the module's output."""
        shared, name = self._shared, self.name
        state = shared.local.state
        frame = _popped(state.frames, name, args)
        if frame is None:
            return
        _, _, given, passing, kept, links = frame
        number = state.counts.get(name, 0)
        state.counts[name] = number + 1
        is_outermost = not state.frames
        if state.links:
            shared.settle(state, state.links)
        if not shared.guard.is_settled:
            made = _NOTHING
            makes_nothing = self._is_harmless and not given and self._is_as_it_was
            if makes_nothing and can_wait(output, links):
                state.known.note_finite(output)
            elif self.chained_in is not None and self._waits(state, output, links):
                state.links = [*links, Link(output, output._version, name, number, given)]
            else:
                made = _look(state.known, (output,))
                if links and (made or output is None):
                    given = shared.settle(state, links)
            if made or is_outermost or passing is not None:
                call = Call(name, number, state.pass_number, is_outermost)
                if made or is_outermost:
                    if made and kept is not None:
                        kept.end(output)
                    shared.judge(state, Case(call, "forward", given, made, kept=kept))
                if passing is not None and shared.gradients is not None:
                    shared.gradients.listen(passing, call, output)
        if is_outermost:
            state.known.forget()

    def abandon(self, args: Any) -> None:
        """Leave the call, and those inside it."""
        state = self._shared.local.state
        _popped(state.frames, self.name, args)
        state.links = _NO_LINKS

    def _waits(self, state: _State, output: Any, links: list[Link]) -> bool:
        return (
            bool(state.frames)
            and state.frames[-1][0] == self.chained_in
            and can_wait(output, links)
        )


def _look(known: Known, values: Iterable[Any]) -> list[Found]:
    """Return findings about those tensors of some arguments that are not finite, or may not be."""
    found = _NOTHING
    for value in values:
        # Taking structures apart takes longer than examining most tensors.
        if isinstance(value, Tensor):
            one = known.look(value)
            if one is not None:
                found = [*found, one]
        elif not (value is None or isinstance(value, _WITHOUT_TENSORS)):
            seen = [known.look(tensor) for tensor in tensors(value)]
            found = [*found, *(one for one in seen if one is not None)]
    return found


def _popped(frames: list[_Frame], name: str, args: Any) -> _Frame | None:
    """Take the frame of a call that returns, and those of calls that failed in it."""
    if frames and frames[-1][1] is args and frames[-1][0] == name:
        return frames.pop()
    own = [at for at, frame in enumerate(frames) if frame[0] == name]
    if not own:
        return None
    at = next((at for at in reversed(own) if frames[at][1] is args), own[-1])
    frame = frames[at]
    del frames[at:]
    return frame

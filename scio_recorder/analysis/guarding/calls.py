"""Looking at the inputs and outputs of every call of a network, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from scio_recorder.analysis.guarding.block import NO_LINKS, Block, Received, State, is_tracing
from scio_recorder.analysis.guarding.gradients import GuardedGradients
from scio_recorder.analysis.guarding.guard import Call, Case, Guard
from scio_recorder.analysis.guarding.kept_call import CallBefore
from scio_recorder.analysis.guarding.passing import NOTHING, Passing, ends_of
from scio_recorder.analysis.guarding.vouching import (
    BESIDE_OTHERS,
    NO_TRAITS,
    Traits,
    can_wait,
    traits_of,
)
from scio_recorder.capture.brackets import Bracket, bracketed
from scio_recorder.errors import ArgumentError, FlowError, UnsupportedNetError
from scio_recorder.layer import Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import boolean
from scio_recorder.tensors.digests import Weights


@contextlib.contextmanager
def guarded(
    architecture: Architecture, guard: Guard, *, gradients: bool, keep_inputs: bool
) -> Iterator[Guard]:
    """Let a guard judge every call of a network's modules inside a block.

    Backward passes of passes made in the block are judged after it too, as long as somebody holds
    the guard. Inputs are kept until a call returns, and those of the one that fails from then on.

    Raises
    ------
    ArgumentError
        An option is not True or False.
    FlowError
        No module of the network was called.
    UnsupportedNetError
        The network is compiled, in part or as a whole.
    """
    boolean("gradients", gradients, ArgumentError)
    boolean("keep_inputs", keep_inputs, ArgumentError)
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
    block = Block(architecture, guard, watched)
    weights = Weights() if keep_inputs else None
    brackets = {module: GuardedCall(module, row, block, weights) for module, row in rows.items()}
    block.brackets = brackets
    # Calls are kept as they return.
    for parent in () if keep_inputs else brackets.values():
        parent.chain(brackets)
    try:
        with bracketed(brackets.values()):
            yield guard
    except BaseException:
        guard.is_settled = True
        raise
    if block.unseen:
        raise UnsupportedNetError(
            f"the module {next(iter(block.unseen))!r} ran as compiled code inside the block, which "
            "can't be guarded: leave the network uncompiled there"
        )
    if not guard.num_passes:
        raise FlowError(
            "nothing was guarded: the network was not called inside the block, or a copy of it "
            "was called, or it was compiled before"
        )


class GuardedCall(Bracket):
    """Examines the inputs before each call of a module, and its output afterwards."""

    def __init__(
        self, module: nn.Module, layer: Layer, block: Block, weights: Weights | None
    ) -> None:
        super().__init__(layer.name, module, block.unseen)
        self._layer = layer
        self._block = block
        self._local = block.local
        # Takes digests of parameters, if calls are kept before they run.
        self._weights = weights
        self._traits = traits_of(module)
        # The Sequential in which the next module vouches for this one's output, if any.
        self.chained_in: str | None = None

    def chain(self, brackets: Mapping[nn.Module, GuardedCall]) -> None:
        """Note which modules of a Sequential have a next one that vouches for their outputs."""
        modules = vars(self._module)["_modules"].values() if self._traits.is_plain else ()
        for module, following in pairwise(modules):
            if module in brackets and following in brackets and brackets[following]._traits.tells:
                brackets[module].chained_in = self.name

    def run_alone(self, args: Any, kwargs: Any) -> Any:
        """Call the forward between both examinations."""
        forward, traits, state = self._module.forward, self._traits, self._local.state
        # Its traits are those of its own forward, which may have been replaced in the block.
        if getattr(forward, "__func__", None) is not traits.forward:
            traits = NO_TRAITS
        if state.is_traced if state.frames else is_tracing():
            return self.run_beside_others(args, kwargs)
        if traits.is_leaf and state.frames:
            return self._run_leaf(forward, args, kwargs, traits, state)
        self.begin(args, kwargs, traits)
        try:
            if traits.is_plain and len(args) == 1 and not kwargs:
                output = self._run_sequential(args[0])
            else:
                output = forward(*args, **kwargs)
        except Exception:
            self.end(args, None)
            raise
        except BaseException:
            self.abandon(args)
            raise
        self.end(args, output)
        return output

    def _run_sequential(self, value: Any) -> Any:
        """Do what the forward of a Sequential does, without going through the calls of torch."""
        brackets, sequential = self._block.brackets, self._module
        for module in sequential:  # type: ignore[attr-defined]  # of nn.Sequential
            bracket = brackets.get(module)
            if (
                bracket is not None
                and private.compiled_call(module) is bracket
                and private.has_usual_call(module)
                and bracket.is_alone()
            ):
                value = bracket.run_alone((value,), {})
            else:
                value = module(value)
        return value

    def _run_leaf(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, traits: Traits, state: State
    ) -> Any:
        """Do the same for a module that calls no others, so that nothing need be noted for them."""
        received = self._received(state, args, kwargs, traits)
        try:
            output = forward(*args, **kwargs)
        except Exception:
            self._returned(state, None, received, traits)
            raise
        self._returned(state, output, received, traits)
        return output

    def begin(self, args: Any, kwargs: Any, traits: Traits = BESIDE_OTHERS) -> None:
        """Examine the module's inputs before the call, since it may work in place."""
        state = self._block.local.state
        if not state.frames:
            self._block.begin_pass(state)
        received = self._received(state, args, kwargs, traits)
        state.frames.append((self.name, args, received, traits))

    def end(self, args: Any, output: Any) -> None:
        """Judge the module's output."""
        state = self._block.local.state
        frame = state.pop(self.name, args)
        if frame is not None:
            self._returned(state, output, *frame[2:])
            if not state.frames:
                state.known.forget()

    def abandon(self, args: Any) -> None:
        """Leave the call, and those inside it."""
        state = self._block.local.state
        state.pop(self.name, args)
        state.forget_waiting()

    def _received(self, state: State, args: Any, kwargs: Any, traits: Traits) -> Received:
        """Examine the inputs of a call."""
        block, passing, start, kept, given = self._block, None, -1, None, NOTHING
        links = state.links
        if links:
            state.links, last = NO_LINKS, links[-1]
            is_next = traits.tells and len(args) == 1 and args[0] is last[0] and not kwargs
            if not is_next or last[0]._version != last[1]:
                block.settle(state, links)
                links = NO_LINKS
        if traits.operations is None and state.unheard:
            block.hear(state)
        if block.guard.is_settled:
            return given, passing, start, kept, links
        if not links:
            given = state.look(args)
        if kwargs:
            given = given + state.look(kwargs.values())
        if block.gradients is not None and torch.is_grad_enabled():
            start = private.num_operations()
            around = state.frames[-1][2][1] if state.frames else None
            if around is None or not traits.is_leaf:
                passing = Passing(start, around, (args, kwargs))
        if self._weights is not None:
            kept = CallBefore(self._layer, self._module, Inputs(args, kwargs), self._weights)
        return given, passing, start, kept, links

    def _returned(self, state: State, output: Any, received: Received, traits: Traits) -> None:
        """Examine the output of a call that is no longer among those that run."""
        block, name, frames, counts = self._block, self.name, state.frames, state.counts
        given, passing, start, kept, links = received
        number = counts.get(name, 0)
        counts[name] = number + 1
        if state.links:
            block.settle(state, state.links)
        if block.guard.is_settled:
            return
        made = NOTHING
        if traits.is_harmless and not given and can_wait(output, links):
            state.known.note_finite(output)
        elif (
            self.chained_in is not None
            and traits.is_alone
            and frames
            and frames[-1][0] == self.chained_in
            and can_wait(output, links)
        ):
            state.links = [*links, (output, output._version, name, number, given)]
        else:
            made = state.look((output,))
            if links and (made or output is None):
                given = block.settle(state, links)
        if made or not frames:
            if made and kept is not None:
                kept.end(output)
            call = Call(name, number, state.pass_number, not frames)
            block.judge(state, Case(call, "forward", given, made, kept=kept))
        if start >= 0:
            known = traits.operations
            is_chained = known is not None and bool(frames) and frames[-1][3].is_plain
            around, ends = frames[-1][2][1] if frames else None, ends_of(output)
            state.unheard.append((passing, start, around, name, number, ends, known, is_chained))
            # Between the calls of such modules by a Sequential, no backward pass runs.
            if not is_chained:
                block.hear(state)

"""The own code of one layer, as it runs: its operations, and its calls of other modules."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from scio_recorder.capture.own_code import AroundCode, ObservingMode, OwnCodeHook
from scio_recorder.layer import Layer, Operation, describe
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.operations import calling_line, is_unset
from scio_recorder.nets.state.untouched import reached
from scio_recorder.tensors.copies import Copies, memories_of
from scio_recorder.tensors.structures import tensors

_CALL, _RETURN = "call of a module", "return"
# Functions that write to all of a tensor, and read nothing of it.
_FILLING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"}


# The maker of what was there before the call.
OUTSIDE = -1


class Given(NamedTuple):
    """A tensor that a step is given, and the number of the step that made it; None if unseen."""

    value: Tensor
    maker: int | None


@dataclass(frozen=True, eq=False)
class Step:
    """What own code does: an operation, the call of another module, or the return at the end.

    Parameters
    ----------
    row : Operation or None
        The operation.
    key : tuple
        What it has in common with its partner: the function, and the shapes that it returns.
    given : sequence of Given
        Its inputs, without parameters and buffers.
    made : sequence of Tensor
        What it returned, but for memory without values.
    """

    row: Operation | None
    key: tuple[Any, ...]
    given: Sequence[Given]
    made: Sequence[Tensor]


class _TracingMode(ObservingMode):
    """Keeps the steps of one call, with copies of all tensors."""

    def __init__(
        self, layer: Layer, weights: set[int], outside: Iterable[int], steps: list[Step]
    ) -> None:
        super().__init__()
        self.steps = steps
        self._layer = layer
        # The ids of parameters and buffers.
        self._weights = weights
        self._copies = Copies()
        self._makers = dict.fromkeys(outside, OUTSIDE)
        # By memory: the number of the step that has written there last, perhaps through a view.
        self._writers: dict[int, int] = {}
        # What functions such as ``empty`` have returned, by its memories.
        self._unset: dict[int, Tensor] = {}

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Given]:
        """Copy the inputs."""
        found = (one for one in tensors((args, kwargs)) if id(one) not in self._weights)
        return [Given(self._copies.of(one), self._maker_of(one)) for one in self._set(found)]

    def _maker_of(self, tensor: Tensor) -> int | None:
        """Return the number of the step that has made a tensor, or written to it since."""
        maker, memories = self._makers.get(id(tensor)), memories_of(tensor)
        writers = [self._writers.get(at, OUTSIDE) for at in memories]
        return None if maker is None else max([maker, *writers])

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Keep an operation."""
        if is_unset(function):
            self._unset |= {at: one for one in tensors(output) for at in memories_of(one)}
        elif function in _FILLING:
            for at in memories_of(output) & self._unset.keys():
                # Not if it is only a view of a part.
                if output.untyped_storage().nbytes() == output.nbytes:
                    self._unset.pop(at)
        row = Operation(self._layer, function, index, describe(output), calling_line())
        self.add(row, function, given, output)

    def add(self, row: Operation | None, what: str, given: list[Given], output: Any) -> None:
        """Keep a step."""
        made = tensors(output)
        written = filter(self._copies.is_written, made)
        self._writers |= {at: len(self.steps) for one in written for at in memories_of(one)}
        kept = [self._copies.of(one) for one in self._set(made)]
        self._makers.update((id(one), len(self.steps)) for one in made)
        key = (what, *(tuple(one.shape) for one in made))
        self.steps.append(Step(row, key, given, kept))

    def _set(self, found: Any) -> Iterator[Tensor]:
        return (one for one in found if memories_of(one).isdisjoint(self._unset))


class _Local(threading.local):
    """The mode of the own code that runs just now, for each thread."""

    own_code: ObservingMode | None = None


class _AroundTraced(AroundCode):
    """Stands around the calls of the layer's module, each with steps of its own, or all of one."""

    def __init__(self, net: nn.Module, layer: Layer, local: _Local, *, is_one: bool) -> None:
        assert layer.module is not None
        super().__init__(layer.module, local)
        self._layer = layer
        self._is_one = is_one
        self._weights = {*map(id, net.parameters()), *map(id, net.buffers())}
        # What the network holds, and what the module receives.
        self._outside = reached([net])
        self._received: list[Tensor] = []
        self.calls: list[_TracingMode] = []

    def mode(self) -> _TracingMode:
        """Return the mode for a call, in the order in which calls start."""
        steps = self.calls[0].steps if self._is_one and self.calls else []
        outside = (*self._outside, *map(id, self._received))
        self.calls.append(_TracingMode(self._layer, self._weights, outside, steps))
        return self.calls[-1]

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the module, and keep what it returns."""
        number, self._received = len(self.calls), tensors((args, kwargs))
        output = super().run(args, kwargs)
        own = self.calls[number]
        own.add(None, _RETURN, own.before((output,), {}), None)
        return output


class _AroundOther(AroundCode):
    """Stands around the calls of other modules, which are steps of the own code around them.

    They run under a mode as well, one that sees nothing. So the whole network leaves PyTorch's fast
    paths, as it does when it is recorded: an encoder on one would give nested tensors to attention
    that is not.
    """

    def mode(self) -> ObservingMode:
        """Return a mode that stays paused."""
        return ObservingMode()

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the module outside of the mode."""
        outer = self.local.own_code
        if not isinstance(outer, _TracingMode) or outer.is_paused:
            return super().run(args, kwargs)
        with _paused(outer):
            given = outer.before(args, kwargs)
        output = super().run(args, kwargs)
        with _paused(outer):
            outer.add(None, _CALL, given, output)
        return output


@contextlib.contextmanager
def _paused(mode: _TracingMode) -> Iterator[None]:
    mode.is_paused = True
    try:
        yield
    finally:
        mode.is_paused = False


@contextlib.contextmanager
def traced(net: nn.Module, layer: Layer, *, all_calls: bool) -> Iterator[list[Step]]:
    """Trace the own code of a layer inside the block, and have its steps at the end.

    Parameters
    ----------
    net : torch.nn.Module
        The network, which is called once in the block.
    layer : Layer
        The layer.
    all_calls : bool
        Trace all calls of its module, one after the other, and not only the layer's.
    """
    module, local, steps = layer.module, _Local(), list[Step]()
    assert module is not None
    around = _AroundTraced(net, layer, local, is_one=all_calls)
    others = [one for one in net.modules() if one is not module and takes_hooks(one)]
    hook = OwnCodeHook(local)
    wrappers = [(one, _AroundOther(one, local)) for one in others]
    with contextlib.ExitStack() as stack:
        for one, wrapper in [(module, around), *wrappers]:
            wrapper.put_around(one)
            stack.callback(wrapper.take_from, one)
        stack.callback(module.register_forward_pre_hook(hook.resume).remove)
        stack.callback(module.register_forward_hook(hook.pause, prepend=True).remove)
        yield steps
        number = 0 if all_calls else layer.call
        for call in around.calls[number : number + 1]:
            steps += call.steps

"""Runs of a network that all start from one state, and leave no state behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.restoring import (
    CLONED_PARAMETER_BYTES,
    are_large,
    attributes_of,
    gradients_aside,
    preserved_rng,
    random_state,
    restore_random,
)
from scio_recorder.nets.state.traces import Look, Surroundings
from scio_recorder.nets.state.values import ContentsState, TensorState
from scio_recorder.tensors.copies import is_plain, twin
from scio_recorder.tensors.structures import map_tensors

T = TypeVar("T")
# A look at all values takes as long as a short run: later runs do as the first ones did.
_CHECKED_RUNS = 2


class Bench:
    """A network that runs again and again as if for the first time.

    Each run has the random numbers, the tensors, the attributes and the contents of these that the
    network had at the start, and inputs of its own. After the block the network is as it was.

    Parameters
    ----------
    net : torch.nn.Module
        The network.

    Attributes
    ----------
    surroundings : Surroundings
        Tells what calls of the network's modules can write to.
    has_unseen_writes : bool
        Whether the first two runs wrote to tensors without new versions, as through ``.data``.

    Examples
    --------
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    >>> bench, x = Bench(net), Inputs((torch.rand(8, 2),), {})
    >>> with bench.open():
    ...     first, second = (bench.run(x, net, torch.sum) for _ in range(2))
    >>> bool(first == second), int(net[0].num_batches_tracked)
    (True, 0)
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._random = random_state()
        self.surroundings = Surroundings(net)
        self._put_backs: list[Callable[[], None]] = []
        self._look: Look | None = None
        # Tensors that get a new version when they are written to, and how many runs were checked.
        self._checked: list[TensorState] = []
        self._num_checked = 0
        self.has_unseen_writes = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Note the current state for runs in the block, whose operations leave no graph."""
        self._note()
        try:
            aside = gradients_aside(self._net.parameters())
            with preserved_rng(), aside, torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self._put_back()

    def run(self, inputs: Inputs, call: Callable[..., Any], measure: Callable[[Any], T]) -> T:
        """Call a function on copies of inputs, and return the measure of its output."""
        given = map_tensors(twin, inputs)
        restore_random(self._random)
        try:
            return measure(call(*given.args, **given.kwargs))
        finally:
            self._put_back()

    def _note(self) -> None:
        """Note the present state."""
        net = self._net
        self._look = self.surroundings.look(net)
        reach, parameters = self._look.own, list(net.parameters())
        own = {id(one): one for one in (*parameters, *net.buffers())}
        others = {
            key: one for key, one in reach.tensors.items() if key not in own and is_plain(one)
        }
        left_out = {id(one) for one in parameters} if are_large(net) else set()
        if sum(one.nbytes for one in others.values()) > CLONED_PARAMETER_BYTES:
            left_out |= others.keys()
        found = (own | others).items()
        states = {key: TensorState(one) for key, one in found if key not in left_out}
        # Modules in training count as changed if they have buffers: see `Surroundings`.
        training = [module for module in net.modules() if module.training]
        seen = {id(one) for module in training for one in module.buffers(recurse=False)}
        self._checked = [state for key, state in states.items() if key not in seen]
        put_back = [attributes_of(list(net.modules())), ContentsState(reach).restore]
        self._put_backs = put_back + [state.restore for state in states.values()]

    def _put_back(self) -> None:
        assert self._look is not None, "inside `open`"
        if self._num_checked < _CHECKED_RUNS:
            self._num_checked += 1
            self.has_unseen_writes |= any(one.is_written_unseen() for one in self._checked)
        if self.has_unseen_writes or not self._look.is_unchanged():
            for put_back in self._put_backs:
                put_back()
            self._look.restore_generators()
            # Version counters are not put back.
            self._look = self.surroundings.look(self._net)

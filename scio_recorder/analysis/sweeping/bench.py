"""Runs of a network that all start from one state, and leave no state behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.restoring import (
    gradients_aside,
    preserved_rng,
    random_state,
    restore_random,
    snapshot,
)
from scio_recorder.nets.state.traces import Look, Surroundings
from scio_recorder.tensors.copies import twin
from scio_recorder.tensors.structures import map_tensors

T = TypeVar("T")


class Bench:
    """A network that runs again and again as if for the first time.

    Each run has the random numbers, the buffers and the attributes that the network had at the
    start, and inputs of its own. After the block the network is as it was.

    Parameters
    ----------
    net : torch.nn.Module
        The network.

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
        self._restore: Callable[[], None] = lambda: None
        self._look: Look | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Note the current state for runs in the block, whose operations leave no graph."""
        self._restore, self._look = snapshot(self._net), self.surroundings.look(self._net)
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

    def _put_back(self) -> None:
        assert self._look is not None, "inside `open`"
        if not self._look.is_unchanged(random=False):
            self._restore()
            self._look.restore_generators()
            # Version counters are not put back.
            self._look = self.surroundings.look(self._net)

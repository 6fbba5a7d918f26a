"""What a recorder offers for passes that others run."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scio_recorder.capture.watch import Passes, Watcher, around_calls
from scio_recorder.errors import SelectorTypeError, UnsupportedNetError
from scio_recorder.recorder.reading import Reading

if TYPE_CHECKING:
    from scio_recorder.postprocessors.assigning import Postprocessors


# Only transformers' Trainer looks for it. It would take our forward's keywords for the network's.
_OF_TRAINERS = "accepts_loss_kwargs"


class Watching(Reading):
    """The part of a recorder that sees calls of the network by others."""

    _watchers: list[Watcher]

    @contextlib.contextmanager
    def watch(
        self, activation_postproc: Postprocessors | None = None, *, last: int | None = None
    ) -> Iterator[Passes]:
        """Make each call of the network in a block a pass, whoever makes it.

        ``generate``, a pipeline, a trainer and a sampler call the network, not the recorder. Inside
        the block ``net(x)`` does what ``rnet(x)`` does: it is recorded, changed and checked.

        Parameters
        ----------
        activation_postproc : callable, list or mapping, optional
            As in ``Recorder.forward``, for passes in the block that are given none of their own.
        last : int, optional
            Keep the records of so many latest passes. All of them by default.

        Yields
        ------
        Passes
            The records of each pass that has ended, in order. They hold whatever later passes
            write, and stay after the block.

        Raises
        ------
        SelectorTypeError
            Nothing is recorded.
        UnsupportedNetError
            The network is compiled, or is compiled inside the block.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> with rnet.watch(activation_postproc=lambda t: t.clamp(max=2)) as passes:
        ...     out = rnet.net(torch.tensor([[1.0, 3.0]]))
        >>> out, passes[0]["0"]
        (tensor([[1., 2.]]), tensor([[1., 3.]]))
        """
        if not self._capture.program.recording:
            raise SelectorTypeError("nothing to watch: choose layers with record(...) first")
        passes = Passes(last)
        recorder = weakref.ref(self)

        def run(call: Any, args: Any, kwargs: Any) -> Any:
            owner = recorder()
            if owner is None:
                return call(*args, **kwargs)
            return owner._capture.run(call, args, kwargs)

        def is_running() -> bool:
            owner = recorder()
            return owner is not None and owner._capture.is_running

        watcher = Watcher(passes, activation_postproc)
        with around_calls(self._net, run, is_running):
            self._watchers.append(watcher)
            try:
                yield passes
            finally:
                self._watchers.remove(watcher)

    def __getattr__(self, name: str) -> Any:
        if name == _OF_TRAINERS:
            raise UnsupportedNetError(
                "a Trainer works on the network itself: give it rnet.net, and write `with "
                "rnet.watch() as passes: trainer.train()` to record the passes that it makes"
            )
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # that of nn.Module
        except AttributeError as error:
            net = self.__dict__.get("_modules", {}).get("_net")
            if net is None or not hasattr(net, name):
                raise
            raise AttributeError(
                f"a Recorder has no {name}, its network has one: write rnet.net.{name}. Calls of "
                "the network by others are recorded inside `with rnet.watch() as passes:`",
                name=name,
                obj=self,
            ) from error

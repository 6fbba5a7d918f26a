"""The methods of a recorder for passes that other code runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from scio_recorder.capture.watch import (
    WHY_NOT_CALLED,
    AroundCalls,
    Passes,
    Watcher,
    around_calls,
)
from scio_recorder.errors import CollectError, SelectorTypeError, UnsupportedNetError, warn
from scio_recorder.recorder.reading import Reading

if TYPE_CHECKING:
    import torch

    from scio_recorder.capture.engine import Capture
    from scio_recorder.layer import Layer
    from scio_recorder.postprocessors.assigning import Postprocessors
    from scio_recorder.recording.collected_passes import CollectedPasses
    from scio_recorder.recording.options import Reduce, Transforms
    from scio_recorder.recording.rows import Rows
    from scio_recorder.stores import Store


# Only transformers' Trainer looks for it. It would mistake our forward's keywords for the
# network's.
_OF_TRAINERS = "accepts_loss_kwargs"


class Watching(Reading):
    """The part of a recorder that sees calls of the network by other code."""

    _watchers: list[Watcher]
    # The block of `collecting`, if the recorder is in one.
    _collected: CollectedPasses | None

    @property
    def _runner(self) -> Capture | CollectedPasses:
        """The function that runs a pass."""
        return self._capture if self._collected is None else self._collected

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
            As in ``Recorder.forward``, for passes in the block that have none of their own.
        last : int, optional
            Keep the records of this many latest passes. By default all are kept.

        Yields
        ------
        Passes
            The records of each pass that has ended, in order. Later passes don't change them, and
            they stay after the block.

        Raises
        ------
        SelectorTypeError
            Nothing is recorded.
        UnsupportedNetError
            The network is compiled, or is compiled inside the block.

        Warns
        -----
        UserWarning
            The network was not called in the block, or a recorded layer was called in it without
            the network.

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
        with self._around(Watcher(passes, activation_postproc)) as calls:
            yield passes
        if not calls.were_made:
            warn(f"the network was not called in the block of watch: {WHY_NOT_CALLED}")

    @contextlib.contextmanager
    def collecting(
        self,
        *,
        store: str | Store | None = "auto",
        reduce: Reduce | None = None,
        transform: Transforms | None = None,
        every: int = 1,
        max_batches: int | None = None,
        sample_ids: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        rows: Rows | None = None,
        activation_postproc: Postprocessors | None = None,
        progress: bool = False,
        resume: bool = False,
    ) -> Iterator[CollectedPasses]:
        """Collect the outputs of the recorded layers in a block, whoever calls the network.

        Each call of the network is a pass, and its batch is the mapping of the arguments of the
        network's ``forward`` by name. The network runs as without the block: in the caller's modes,
        with gradients and training as they are. Passes leave no `activations`.

        Parameters
        ----------
        store, reduce, dtype
            As in :meth:`collect`.
        transform : callable or mapping by selector, optional
            ``transform(activation, batch) -> Tensor [batch, ...]``, without gradients.
        every : int, default 1
            Take every n-th pass. The others run and are not collected.
        max_batches : int, optional
            Take at most this number of passes.
        sample_ids : callable, optional
            ``batch ->`` integers or strings, one for each sample, none twice. It is called for
            passes that begin samples.
        rows : Tokens or Nodes, optional
            As in :meth:`collect`. A pass that receives a filled cache continues the samples of the
            pass before, as in ``generate``: ``recording.rows["step"]`` counts
            the passes of a sample, and ``recording.by_sample`` joins prompt and continuation.
        activation_postproc : callable, list or mapping, optional
            As in :meth:`watch`. The recording holds the outputs of layers before it acts.
        progress : bool, default False
            Show a progress bar, on a terminal. Trainers have their own.
        resume : bool, default False
            Continue a recording on disk: durable passes run again, and are not collected again. If
            the recording is complete, no pass is collected.

        Yields
        ------
        CollectedPasses
            Its ``recording`` exists after the block. After an exception in the block, it holds
            the passes that had ended before. A pass that fails does not count.

        Raises
        ------
        CollectError
            The network was not called, samples have different shapes, or something else can't be
            done as asked.
        RecordingError
            The disk fails, or holds a recording with other settings.
        UnsupportedNetError
            The network is compiled, or is compiled inside the block.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Linear(2, 1)
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with rnet.collecting() as collection:
        ...     for _ in range(3):
        ...         net(torch.ones(4, 2)).sum().backward()
        ...         optimizer.step()
        >>> collection.recording["0-1"].shape
        torch.Size([12, 1])
        """
        from scio_recorder.recording.collected_passes import CollectedPasses
        from scio_recorder.recording.collection import Collection
        from scio_recorder.recording.feed import Feed
        from scio_recorder.recording.options import CollectOptions
        from scio_recorder.recording.resuming import saying_what_is_durable

        if self._collected is not None:
            raise CollectError(
                "the recorder is collecting already: leave that block first, or use another "
                "Recorder of the same network"
            )
        asked = CollectOptions(
            store=store,
            reduce=reduce,
            transform=transform,
            every=every,
            max_batches=max_batches,
            sample_ids=sample_ids,
            dtype=dtype,
            rows=rows,
            activation_postproc=activation_postproc,
            resume=resume,
        )
        # An iterator, since the number of passes is not known.
        feed = Feed(iter(()), asked)
        collected = CollectedPasses(Collection(self._capture, feed, asked, is_of_others=True))
        with (
            saying_what_is_durable(store),
            collected.open(progress=progress),
            self._around(Watcher(None, activation_postproc)),
        ):
            self._collected = collected
            try:
                yield collected
            finally:
                self._collected = None

    @contextlib.contextmanager
    def _around(self, watcher: Watcher) -> Iterator[AroundCalls]:
        """Make each call of the network inside a block a pass of the recorder."""
        recorder = weakref.ref(self)

        def run(call: Any, args: Any, kwargs: Any) -> Any:
            owner = recorder()
            if owner is None:
                return call(*args, **kwargs)
            return owner._runner.run(call, args, kwargs)

        def is_running() -> bool:
            owner = recorder()
            return owner is not None and owner._capture.is_running

        with around_calls(self._net, run, is_running) as calls:
            self._capture.has_missed &= bool(self._watchers)
            self._capture.site.local.outside = set()
            self._watchers.append(watcher)
            try:
                yield calls
            finally:
                self._watchers.remove(watcher)
        if self._capture.has_missed:
            raise UnsupportedNetError(
                "a compiled recorder was called in the block, which does not see compiled passes: "
                "call the network there, uncompiled; rnet.collect(...) runs a compiled recorder"
            )

        local = self._capture.site.local
        outside, local.outside = local.outside, set() if self._watchers else None
        _warn_of_calls_outside(self._capture.program.layers_of(outside or ()))

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
                f"a Recorder has no {name}, but its network has: write rnet.net.{name}. Calls of "
                "the network by other code are recorded inside `with rnet.watch() as passes:`",
                name=name,
                obj=self,
            ) from error


def _warn_of_calls_outside(layers: Sequence[Layer]) -> None:
    # The hooks of the network itself are called outside of a pass only by a shallow copy of it.
    if layers and layers[-1].depth:
        more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
        warn(
            f"code in the block called {', '.join(map(str, layers[:4]))}{more} without the network "
            "around it, as generate calls an encoder. Such a call belongs to no pass: it is "
            "neither recorded nor changed. Watch that part with a Recorder of its own"
        )

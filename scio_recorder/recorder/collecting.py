"""The methods of a recorder that collect whole datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.recorder.reading import Reading
from scio_recorder.tensors import private

if TYPE_CHECKING:
    from scio_recorder.display.progress import Advance
    from scio_recorder.postprocessors.assigning import Postprocessors
    from scio_recorder.recording import Recording
    from scio_recorder.recording.collection import Collection
    from scio_recorder.recording.feed import Share
    from scio_recorder.recording.options import Reduce, Transforms
    from scio_recorder.recording.rows import Rows
    from scio_recorder.stores import Plan, Store


class Collecting(Reading):
    """The part of a recorder that goes through datasets."""

    def collect(
        self,
        batches: Iterable[Any],
        *,
        store: str | Store | None = "auto",
        reduce: Reduce | None = None,
        transform: Transforms | None = None,
        every: int = 1,
        max_batches: int | None = None,
        to_inputs: Callable[[Any], Any] | None = None,
        sample_ids: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        rows: Rows | None = None,
        activation_postproc: Postprocessors | None = None,
        stop_early: bool = False,
        progress: bool = True,
        resume: bool = False,
    ) -> Recording:
        """Run the network over a dataset and keep the outputs of the recorded layers.

        The net runs under ``no_grad``, in its current mode. After ``rnet.compile()`` it runs
        compiled; the ``collect`` of ``torch.compile(rnet)`` is that of ``rnet``.

        Parameters
        ----------
        batches : iterable
            A DataLoader, a list, a generator. The net gets a batch that is a tensor, the first
            element of a tuple or list, and the entries of a mapping as keywords.
        store : str, Store or None, default "auto"
            Where samples go: "device", "host", "disk:PATH", "s3://BUCKET/RUN", an object of
            :mod:`scio_recorder.stores`, None if all layers are reduced, or "auto", which
            chooses by needed and free bytes.
        reduce : Reduction, list of them or mapping by selector, optional
            Summaries to keep instead of samples.
        transform : callable or mapping by selector, optional
            ``transform(activation, batch) -> Tensor [batch, ...]``: what to keep or reduce.
        every : int, default 1
            Take every n-th batch.
        max_batches : int, optional
            Stop after this number of taken batches.
        to_inputs : callable, optional
            ``batch ->`` a tensor, a tuple of positional or a dict of keyword inputs of the net, or
            both as a pair ``(tuple, dict)``.
        sample_ids : callable, optional
            ``batch ->`` integers or strings, one for each sample, none twice. By default samples
            are numbered from 0 on, and those of skipped batches are counted too. Samples that a
            ``DistributedSampler`` gives this process have their indices in the dataset, and its
            repeats are dropped. Other samplers that split a dataset need ids.
        dtype : torch.dtype, optional
            Keep floating-point activations in this dtype, rounded.
        rows : Tokens or Nodes, optional
            Keep one row for each token or node instead of each sample, without padding. Layers, or
            the results of ``transform``, must be [batch, positions, ...] or [nodes, ...].
        activation_postproc : callable, list or mapping, optional
            Changes the output of recorded layers before it goes on through the network, as in
            ``Recorder.forward``. The recording holds the outputs before that, but a post-processor
            that works in place changes the recording too.
        stop_early : bool, default False
            Run the network no further than the last recorded layer.
        progress : bool, default True
            Show a progress bar, on a terminal.
        resume : bool, default False
            Continue the recording on disk. The loader must give the same samples in the same
            order. A complete recording is returned as it is. Its loader is not read if it has the
            same length as before; otherwise, another number of samples is an error.

        Returns
        -------
        Recording
            Samples or summaries by layer; if processes share a dataset, those of this process.

        Raises
        ------
        CollectError
            Nothing is selected, batches are not understood or are samples, samples have different
            shapes, or something else can't be done as asked.
        PostprocessorError
            Too few post-processors, or one that failed.
        RecordingError
            The disk fails, or holds a recording with other settings.

        Warns
        -----
        CollectWarning
            The net is in training mode and has layers that behave differently there. Or only the
            first element of batches goes into a net that would accept the second one too. Or the
            first batch has one dimension less than the input at labelling, as a sample would.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Flatten(), nn.ReLU()), input_size=(1, 2, 2))
        >>> rnet.record("1")
        >>> loader = [(torch.ones(3, 2, 2), "labels"), (torch.ones(1, 2, 2), "labels")]
        >>> rnet.collect(loader)["1"].shape
        torch.Size([4, 4])
        """
        from scio_recorder.display.progress import progress_bar
        from scio_recorder.recording.collection import Collection
        from scio_recorder.recording.feed import Feed
        from scio_recorder.recording.options import CollectOptions
        from scio_recorder.recording.resuming import saying_what_is_durable

        asked = CollectOptions(
            store=store,
            reduce=reduce,
            transform=transform,
            every=every,
            max_batches=max_batches,
            to_inputs=to_inputs,
            sample_ids=sample_ids,
            dtype=dtype,
            rows=rows,
            activation_postproc=activation_postproc,
            stop_early=stop_early,
            resume=resume,
        )
        feed = Feed(batches, asked, share=self._share_of(batches, has_ids=sample_ids is not None))
        bar = progress_bar("collecting batches", feed.num_batches, is_wanted=progress)
        with saying_what_is_durable(store):
            return self._go_through(Collection(self._capture, feed, asked), bar)

    def _share_of(self, loader: Any, *, has_ids: bool) -> Share | None:
        """Return the share of this process in a dataset that a sampler splits."""
        raise NotImplementedError

    def _go_through(
        self, collection: Collection, progress: AbstractContextManager[Advance]
    ) -> Recording:
        """Run the network over the batches of a collection."""
        from scio_recorder.recording.collection import go_through

        self._refuse_inside_fsdp()
        # torch.compile(rnet) is another module, and can't be distinguished here.
        module: Any = self
        compiled = module if private.calls_compiled(module) else None
        return go_through(collection, compiled=compiled, progress=progress)

    def plan(self, num_samples: int) -> Plan:
        """Return the bytes that collecting the recorded layers would take, before anything runs.

        Parameters
        ----------
        num_samples : int
            The number of samples.

        Returns
        -------
        Plan
            Bytes by layer, from the shapes at labelling, and free bytes by store; printable.

        Raises
        ------
        CollectError
            Nothing is selected.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Linear(4, 3), input_size=(2, 4))
        >>> rnet.record("0-1")
        >>> rnet.plan(1000).num_bytes
        {(0, 1): 12000}
        """
        recording = self._capture.program.recording
        if not recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        from scio_recorder.stores.room import make_plan

        device = next((p.device for p in self._net.parameters()), torch.device("cpu"))
        return make_plan(self.architecture, recording, num_samples, device)

    def parameters_snapshot(self) -> dict[str, Tensor]:
        """Return copies of the parameters inside recorded layers, in host memory.

        Returns
        -------
        dict
            The names of ``recorded_params`` -> tensors of their own; a parameter under several
            names is copied once.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Linear(4, 3), input_size=(2, 4))
        >>> rnet.record("0-1")
        >>> before = rnet.parameters_snapshot()
        >>> _ = rnet.net.bias.data.add_(1)
        >>> (rnet.parameters_snapshot()["_net.bias"] - before["_net.bias"]).round()
        tensor([1., 1., 1.])
        """
        copies: dict[int, Tensor] = {}
        for parameter in self.recorded_params.values():
            if id(parameter) not in copies:
                copies[id(parameter)] = parameter.detach().clone().cpu()
        return {name: copies[id(value)] for name, value in self.recorded_params.items()}

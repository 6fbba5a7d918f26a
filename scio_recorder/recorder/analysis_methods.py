"""The methods of a recorder that belong to upper rooms: each calls one, and does nothing else.

This is the only file of the room that imports from there, inside its functions: without a call of
these methods, nothing of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Unpack

from scio_recorder.recorder.collecting import Collecting
from scio_recorder.recording.options import CollectOptions, PartKeywords, shows

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Literal

    import torch
    from torch import Tensor

    from scio_recorder.analysis.checking import CheckReport
    from scio_recorder.analysis.effects import Effects
    from scio_recorder.analysis.guarding.guard import Action, Guard
    from scio_recorder.events import Tracker
    from scio_recorder.nets.records import LayerMapping
    from scio_recorder.recompute.saved_tensors import SavedTensors
    from scio_recorder.recording import Recording
    from scio_recorder.recording.feed import Share
    from scio_recorder.stores import Store


class AnalysisMethods(Collecting):
    """The part of a recorder that asks questions about passes, or shares work with others."""

    def check(self, *args: Any, **kwargs: Any) -> CheckReport:
        """Check on this network that records are right and that recording changes nothing.

        The network runs four times without a trace, twice bare and twice recorded. Records must
        be, bit for bit, copies that another hook took at the call. The output, gradients (in
        gradient mode, if it has any), buffers, random numbers and training flags must be those of
        the bare network. What two bare runs do differently is listed and not judged.

        Parameters
        ----------
        *args, **kwargs
            The inputs of the network. The selected layers are checked; if none is, all layers.

        Returns
        -------
        CheckReport
            What was compared; it can be printed.

        Raises
        ------
        CheckError
            Something differs. The message names the first layer, which is ``error.layer``, or what
            the recorded network does differently.
        FlowError
            A module with a recorded layer ran more or less often than at labelling.
        UnsupportedNetError
            The network is compiled or sharded.

        Examples
        --------
        >>> from torch import nn, ones
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> print(rnet.check(ones(4, 2)))
        no difference in 2 recorded passes
        equal to copies taken at the call: 3 layers, 1-1 0 (Linear), 1-2 1 (ReLU) and 1 more
        as in a bare run: output, random numbers, training flags, hooks, 2 gradients
        """
        from scio_recorder.analysis.checking import check

        return check(self.capture, args, kwargs)

    def track(self, **options: Any) -> Tracker:
        """Log the outputs of the net's modules, and the gradients with respect to them.

        Parameters
        ----------
        **options
            The keywords of :func:`scio_recorder.track`; names are those of :attr:`net`.

        Returns
        -------
        Tracker
            The log, and a context manager.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
        >>> with rnet.track(grad=False) as events:
        ...     _ = rnet(torch.ones(1, 2))
        >>> [event.name for event in events]
        ['0', '']
        """
        from scio_recorder.events import track

        return track(self.net, **options)

    def guard(
        self,
        *,
        gradients: bool = True,
        action: Action = "raise",
        kinds: Collection[str] = ("nan", "inf"),
        keep_inputs: bool = False,
        operations: bool = False,
    ) -> AbstractContextManager[Guard]:
        """Find the layer that makes the first NaN or infinity in a block.

        Every call of the network in the block is checked, whoever makes it, and so are the backward
        passes of these calls. All layers are checked, recorded or not. A layer makes a NaN
        if it returns one and received none, and an infinity if all its inputs were finite.

        Parameters
        ----------
        gradients : bool, default True
            Check gradients in backward passes as well.
        action : {"raise", "warn", "record"}
            What to do: raise an error at the place where the NaN is made, warn, or only set
            `origin`.
        kinds : collection of str, default ("nan", "inf")
            What to look for. With "nan" alone, infinities are ignored.
        keep_inputs : bool, default False
            Copy the inputs of each call until it returns, so that ``guard.origin.save(path)`` can
            write the inputs of the call that failed. This takes time, and memory for the inputs
            of all nested modules that are running.
        operations : bool, default False
            Examine each operation inside the forwards as well, so that ``guard.origin.operation``
            is the one, with its line, with which the fault of the call began. Which call is the
            origin does not change.

        Returns
        -------
        context manager of Guard
            The result; its ``origin`` is None as long as nothing was found.

        Raises
        ------
        NonFiniteError
            A layer has made a NaN or an infinity; ``error.origin`` says which.
        ArgumentError
            ``action`` or ``kinds`` has a value that can't work.
        FlowError
            The network was not called in the block.
        UnsupportedNetError
            The network is compiled, or is compiled inside the block.

        Warns
        -----
        UserWarning
            The network passes on NaNs of its inputs or of the gradients of the loss.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> with rnet.guard(action="record") as guard:
        ...     out = rnet(torch.tensor([[1.0, 2.0], [3.0, 3.0]]))
        >>> guard.origin.layer.name, guard.origin.num_nan, guard.origin.sample
        ('1', 2, 1)
        """
        from scio_recorder.analysis.guarding.guard import guarded

        options = {"gradients": gradients, "keep_inputs": keep_inputs, "operations": operations}
        return guarded(self.architecture, action, kinds, **options)

    def sweep(
        self,
        clean: Any,
        corrupted: Any,
        metric: Callable[[Any], float | Tensor],
        positions: Literal["all"] | Iterable[int] | None = None,
        *,
        estimate: bool = False,
    ) -> Effects:
        """Measure the effect of each recorded layer: activation patching.

        The network runs on the corrupted inputs once for each layer. In that run, the layer's
        output is replaced by its output in the clean run. Every run is a whole one, and
        starts in the same state, random numbers included. Afterwards the network and the recorder
        are as before, and gradients have not changed.

        Parameters
        ----------
        clean, corrupted : Tensor, tuple or dict
            The inputs of the two runs: one tensor, several, or some by keyword. Layers must return
            the same shapes on both.
        metric : callable
            Takes the network's output, and returns a number or a tensor of shape ().
        positions : None, "all" or list of int
            Which positions of dimension 1 are patched, such as tokens, one in each run. Negative
            ones count from the end. None patches the whole output. In a structure all tensors are
            patched; with positions, those that share the first two dimensions of the first one.
        estimate : bool, default False
            Estimate the effects to first order, from gradients of one backward pass: attribution
            patching. The metric must be differentiable.

        Returns
        -------
        Effects
            ``values`` [layers] or [layers, positions] in float64, in the order of
            :attr:`recording`; ``clean`` and ``corrupted``, the metric of both runs.

        Raises
        ------
        ArgumentError
            ``estimate`` is not True or False.
        ComparisonError
            Nothing is recorded; a layer returns other shapes in the two runs; there is no such
            position; the metric returns no number, or no gradient if one is needed; or the
            corrupted run, made again at the end, has another metric than at first: the network
            keeps state that can't be put back.
        FlowError
            A module with a recorded layer ran more or less often than at labelling.
        UnsupportedNetError
            The network is compiled.

        References
        ----------
        Vig et al., "Investigating Gender Bias in Language Models Using Causal Mediation Analysis",
        NeurIPS 2020; Nanda, "Attribution Patching: Activation Patching At Industrial Scale", 2023.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Softmax(1)), input_size=(1, 2))
        >>> rnet.record("0")
        >>> clean, corrupted = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> effects = rnet.sweep(clean, corrupted, lambda output: output[0, 0], positions="all")
        >>> effects.values
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
        """
        from scio_recorder.analysis.sweep import sweep

        return sweep(self.capture, clean, corrupted, metric, positions, estimate=estimate)

    @shows(PartKeywords)
    def collect_parts(
        self,
        make_batches: Callable[[int], Iterable[Any]],
        num_parts: int,
        *,
        store: str | Store,
        wait: bool = True,
        **options: Unpack[PartKeywords],
    ) -> Recording:
        """Collect a dataset together with other processes, which may come and go.

        Every process makes this same call, at any time, on any machine that sees the store. Each
        takes a part that no other has, until none is left. If a process dies, another one takes
        its part, and continues after the durable samples. The result does not depend on which
        process did which part: samples are in the order of the parts.

        Parameters
        ----------
        make_batches : callable
            ``part -> batches``, for parts from 0 to ``num_parts - 1``. It must return the same
            batches in the same order in every process. A part may be empty.
        num_parts : int
            The number of parts, at most 100,000. Parts that take minutes are good: a process
            that dies loses only what is not durable, and the last parts are soon done.
        store : str or Store
            "disk:PATH" or ``Disk(PATH, chunk_bytes=...)``, in a folder that all processes see, or
            "s3://BUCKET/RUN".
        wait : bool, default True
            Wait until all parts are complete, and take over the parts of processes that die
            meanwhile. Otherwise this returns as soon as there is no part that it can take.
        **options
            Those of `CollectOptions`.

        Returns
        -------
        Recording
            All parts; without ``wait``, their durable samples.

        Raises
        ------
        CollectError
            As ``collect`` raises it; or a reduction can't be merged, or two samples have the same
            id.
        RecordingError
            Other processes fill the recording with another net, other settings or another number
            of parts. Or the disk fails. Or the lease of a part has expired, since this process was
            stopped or did not reach the disk for a minute. Durable samples stay, and any process
            that makes the same call continues.

        Examples
        --------
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Flatten(), nn.ReLU()), input_size=(1, 2, 2))
        >>> rnet.record("1")
        >>> folder = tempfile.TemporaryDirectory()
        >>> recording = rnet.collect_parts(
        ...     lambda part: [torch.full((3, 2, 2), 1.0 * part)], 4, store=f"disk:{folder.name}/run"
        ... )
        >>> recording["1"][:, 0], recording.sample_ids[3]
        (tensor([0., 0., 0., 1., 1., 1., 2., 2., 2., 3., 3., 3.]), 1000000000000)
        >>> folder.cleanup()
        """
        from scio_recorder.recording.collection import saying_what_is_durable
        from scio_recorder.workers.parts import Parts

        asked = CollectOptions.of(AnalysisMethods.collect_parts, options, store=store, resume=True)
        parts = Parts(self.capture, make_batches, num_parts, asked, self._go_through)
        with saying_what_is_durable(store, num_parts):
            return parts.collect(wait=wait)

    def _share_of(self, loader: Any, *, has_ids: bool) -> Share | None:
        from scio_recorder.recording.feed import gives_whole_dataset

        if gives_whole_dataset(loader):
            return None
        from scio_recorder.workers.samplers import share_of

        return share_of(loader, has_ids=has_ids)

    def recompute(self, *selectors: Any) -> LayerMapping[Any]:
        """Return activations of the latest pass that were not recorded.

        After ``record(..., inputs=True)``: the nearest recorded module around each layer runs again
        as it did then, and its output is compared with the record. The net does not change.
        The user's hooks on inner modules are called again, and objects that the network reaches
        through them are put back as well.

        Parameters
        ----------
        *selectors
            As for :meth:`record`; for recorded layers, the record is returned.

        Returns
        -------
        LayerMapping
            Detached copies, equal bit for bit to the layers' outputs; keys as in
            :attr:`activations`.

        Raises
        ------
        RecomputeError
            No module around a layer was recorded with its inputs in the latest pass. Or weights or
            something else have changed since, so the module returns other values now.
        LayerNotFoundError
            A selector matches no layer.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> x = torch.ones(4, 2)
        >>> _ = rnet(x)
        >>> torch.equal(rnet.recompute("0.0")["0.0"], net[0][0](x))
        True
        """
        from scio_recorder.recompute.recomputing import recompute_pass

        return recompute_pass(self.capture, selectors)

    def saved_tensors(
        self,
        *selectors: Any,
        device: torch.device | str | None = "cpu",
        pin_memory: bool = False,
        dtype: torch.dtype | None = None,
    ) -> SavedTensors:
        """Move or shrink the tensors that autograd saves inside the chosen layers for backward.

        It acts on all passes inside the block, through this recorder or not. Parameters,
        buffers, views of these, and regions under activation checkpointing are left alone.

        Parameters
        ----------
        *selectors
            As for :meth:`record`; the layers need not be recorded.
        device : torch.device or str, default "cpu"
            Where to keep tensors; None to leave them where they are.
        pin_memory : bool, default False
            Keep tensors from a GPU in pinned host memory, so the host need not wait for their
            copies back.
        dtype : torch.dtype, optional
            Keep wider floating-point tensors in this dtype. Without it, gradients are bit for bit
            the same as without the block.

        Returns
        -------
        SavedTensors
            A context manager. Backward may run after its block.

        Raises
        ------
        LayerNotFoundError
            A selector matches no layer.
        SelectorTypeError
            The dtype is not a floating-point dtype, or the device is not available.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), input_size=(1, 2))
        >>> with rnet.saved_tensors("1", dtype=torch.bfloat16):
        ...     rnet(torch.ones(1, 2)).sum().backward()
        """
        from scio_recorder.recompute.saved_tensors import SavedTensors

        return SavedTensors(self.architecture, selectors, device, pin_memory, dtype)

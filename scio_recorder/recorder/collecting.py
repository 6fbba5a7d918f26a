"""The methods of a recorder that read passes, see those of others, collect, and ask questions.

Upper rooms answer these. This is the only file of the room that imports from there, inside
functions: without a call of them, nothing of it is loaded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.watch import Block, Blocks, Passes, why_not_called
from scio_recorder.errors import (
    ArgumentError,
    CollectError,
    LabellingError,
    SelectorTypeError,
    UnsupportedNetError,
    caught_as,
    warn,
)
from scio_recorder.layer import few
from scio_recorder.nets.architecture import nearest
from scio_recorder.nets.attention import AttentionRecords
from scio_recorder.nets.records import LayerMapping, Records
from scio_recorder.nets.refusals import explain_call
from scio_recorder.nets.sharded import refuse_part_of_fsdp
from scio_recorder.recording.options import (
    CollectKeywords,
    CollectOptions,
    PartKeywords,
    PassKeywords,
    shows,
)
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import names_arguments, opens_block
from scio_recorder.tensors.structures import map_tensors, tensors

if TYPE_CHECKING:
    from typing import Literal

    from torch.amp.grad_scaler import GradScaler
    from torch.nn.parameter import Parameter

    from scio_recorder.analysis.checking import CheckReport
    from scio_recorder.analysis.guarding.guard import Action, Guard
    from scio_recorder.analysis.residual_stream import ResidualStream
    from scio_recorder.analysis.sweep import Effects
    from scio_recorder.capture.engine import Capture
    from scio_recorder.capture.gradients import GradientHooks
    from scio_recorder.display.progress import Advance
    from scio_recorder.events import Tracker
    from scio_recorder.layer import Layer, RowIdx
    from scio_recorder.nets.architecture import Architecture
    from scio_recorder.postprocessors.assigning import Postprocessors
    from scio_recorder.recompute.saved_tensors import SavedTensors
    from scio_recorder.recording import Recording
    from scio_recorder.recording.collection import CollectedPasses, Collection
    from scio_recorder.recording.feed import Share
    from scio_recorder.stores import Plan, Store

# Only transformers' Trainer looks for it. It would mistake our forward's keywords for the
# network's.
_OF_TRAINERS = "accepts_loss_kwargs"
# Methods of TransformerLens and nnsight and other guesses, and what does their work.
_ELSEWHERE = {
    **dict.fromkeys(("close", "clear", "reset", "stop"), "rnet.remove()"),
    **dict.fromkeys(("reset_hooks", "remove_all_hook_fns"), "rnet.remove()"),
    **dict.fromkeys(("labels", "layers", "get_layer"), "rnet.architecture"),
    **dict.fromkeys(("outputs", "cache"), "rnet.activations"),
    "hooks": "rnet.recording",
    "compare": "scio_recorder.compare(rnet, candidate, batches)",
    "open_recording": "scio_recorder.open_recording(path)",
    "run_with_cache": "rnet.record(...), then rnet(x), and read rnet.activations",
    "run_with_hooks": "rnet(x, activation_postproc={...}), with recorded layers as keys",
    "trace": "rnet.record(...), then rnet(x), and read rnet.activations",
}


class Collecting(nn.Module):
    """The part of a recorder that reads passes, sees those of others, collects, and asks."""

    architecture: Architecture
    _capture: Capture
    _net: nn.Module
    _blocks: Blocks
    _gradient_hooks: GradientHooks
    # The keywords of the labelling; None in a copy.
    _labelling: dict[str, Any] | None

    def _refuse_inside_fsdp(self) -> None:
        if private.is_inside_fsdp(self):
            raise UnsupportedNetError(
                "the recorder itself is sharded by FSDP, whose parameters are there only while "
                "the wrapper is called: call it, inside `with rnet.collecting(...):`, or "
                "shard the network, as in fully_shard(rnet.net)"
            )
        refuse_part_of_fsdp(self._net)

    @property
    def net(self) -> nn.Module:
        """The wrapped network."""
        return self._net

    @property
    def capture(self) -> Capture:
        """What records the present selection, until the next :meth:`record`.

        For code on top of this package: ``capture.architecture``, ``capture.recording`` and
        ``capture.options`` say what is recorded, and ``Capture(net, architecture, recording,
        options)`` makes another one, which leaves this recorder as it is.
        """
        return self._capture

    @property
    def recording(self) -> tuple[RowIdx, ...]:
        """The labels of the recorded layers, sorted."""
        return self._capture.program.recording

    @property
    def activations(self) -> Records:
        """The outputs of the recorded layers in the latest pass that this thread ran.

        A read-only mapping; keys are ``(1, 3)``, ``"1-3"`` or unambiguous qualified names. It does
        not change when the next pass runs. A call of the network itself, as ``rnet.net(x)``, is no
        pass outside of :meth:`watch`, and leaves the records of the pass before.
        """
        return self._capture.activations

    @property
    def inputs(self) -> Records:
        """The inputs of the recorded modules' forward, after ``record(..., inputs=True)``.

        Values are named tuples ``(args, kwargs)``.
        """
        return self._capture.inputs

    @property
    def attention(self) -> AttentionRecords:
        """The attention of layers in the latest pass, after ``record(..., attention=True)``.

        A read-only mapping with the keys of :attr:`activations`. Each value has ``query``, ``key``,
        ``value``, ``output``, and ``weights(heads, queries)``, which are computed when asked for
        and checked against what the kernel returned.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> x = torch.ones(2, 5, 8)
        >>> rnet = Recorder(nn.MultiheadAttention(8, 2, batch_first=True), input_data=(x, x, x))
        >>> rnet.record("", attention=True)
        >>> _ = rnet(x, x, x)
        >>> rnet.attention[""].weights(heads=[0], queries=[-1])
        tensor([[[[0.2000, 0.2000, 0.2000, 0.2000, 0.2000]]],
        <BLANKLINE>
        <BLANKLINE>
                [[[0.2000, 0.2000, 0.2000, 0.2000, 0.2000]]]])
        """
        return self._capture.attention

    @property
    def gradients(self) -> Records:
        """Gradients of the loss with respect to the activations.

        They exist after ``record(..., gradients=True)``, a pass and a backward pass. A layer
        without a gradient is absent. A new backward pass replaces them. Under gradient scaling they
        are scaled.
        """
        return self._capture.gradients

    @property
    def recorded_modules(self) -> LayerMapping[nn.Module]:
        """The modules of the recorded layers, by label; operations have none."""
        layers = [self.architecture[at] for at in self.recording if len(at) == 2]
        modules: dict[RowIdx, Any] = {layer.label: layer.module for layer in layers}
        return LayerMapping(self.architecture, modules, "module")

    @property
    def recorded_params(self) -> dict[str, Parameter]:
        """The parameters inside recorded layers by their names in this module.

        A parameter that the net holds under several names appears under each.
        """
        modules = self.recorded_modules.values()
        recorded = {id(parameter) for module in modules for parameter in module.parameters()}
        every = self._net.named_parameters("_net", remove_duplicate=False)
        return {name: parameter for name, parameter in every if id(parameter) in recorded}

    @property
    def grad_nodes(self) -> LayerMapping[Any]:
        """The node of autograd's graph behind each recorded activation.

        It exists after a pass with gradients on. For a layer that returns a structure, it is the
        same structure of nodes, with None for tensors without a node. A layer without nodes is
        absent. A leaf's node is the one that accumulates its gradient.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("1")
        >>> _ = rnet(torch.ones(1, 2))
        >>> rnet.grad_nodes["1"].name()
        'ReluBackward0'
        """
        activations = self.activations
        peeked = {label: activations.peek(label) for label in activations}
        nodes = {
            label: map_tensors(_node, activation)
            for label, activation in peeked.items()
            if any(tensor.requires_grad for tensor in tensors(activation))
        }
        return LayerMapping(self.architecture, nodes, "autograd node")

    def on_gradients(self, hook: Callable[[dict[RowIdx, Any]], object]) -> RemovableHandle:
        """Register a function that is called with the gradients of the recorded layers.

        The function is called when a backward pass ends, once for each pass that it went
        through, even if newer passes have run since. Layers without a gradient are absent.

        Parameters
        ----------
        hook : callable
            Called with a dictionary, label -> gradient.

        Returns
        -------
        torch.utils.hooks.RemovableHandle
            Its ``remove()`` ends the calls. A later :meth:`record` does not.

        Raises
        ------
        SelectorTypeError
            Gradients are not recorded, or ``hook`` is not callable.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("*", gradients=True)
        >>> handle = rnet.on_gradients(lambda gradients: print(list(gradients)))
        >>> rnet(torch.ones(1, 2)).sum().backward()
        [(1, 1), (1, 2), (0, 1)]
        >>> handle.remove()
        """
        if not callable(hook):
            raise SelectorTypeError(
                f"on_gradients({hook!r}): give a function of a dictionary, label -> gradient"
            )
        if not self._capture.program.options.gradients:
            raise SelectorTypeError(
                "no gradients are recorded: write record(..., gradients=True) first"
            )
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    @shows(CollectKeywords)
    def collect(self, batches: Iterable[Any], **options: Unpack[CollectKeywords]) -> Recording:
        """Run the network over a dataset and keep the outputs of the recorded layers.

        The net runs under ``no_grad``, in its current mode. After ``rnet.compile()`` it runs
        compiled; the ``collect`` of ``torch.compile(rnet)`` is that of ``rnet``.

        Parameters
        ----------
        batches : iterable
            A DataLoader, a list, a generator. The net gets a batch that is a tensor, the first
            element of a tuple or list, and the entries of a mapping as keywords.
        **options
            Those of `CollectOptions`.

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
            Too few or too many post-processors, or one that failed.
        RecordingError
            The disk fails, or holds a recording with other settings.

        Warns
        -----
        CollectWarning
            The net is in training mode and has layers that behave differently there. Or only the
            first element of batches goes into a net that would accept the second one too. Or the
            first batch has one dimension less than the input at labelling, as a sample would. Or a
            batch is padded on the left and lacks the ``position_ids`` that the net takes.

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
        from scio_recorder.recording.collection import Collection, saying_what_is_durable
        from scio_recorder.recording.feed import Feed

        asked = CollectOptions(**options)
        share = self._share_of(batches, has_ids=asked.sample_ids is not None)
        feed = Feed(batches, asked, share=share)
        bar = progress_bar("collecting batches", feed.num_batches, is_wanted=asked.progress)
        with saying_what_is_durable(asked.store):
            return self._go_through(Collection(self._capture, feed), bar)

    def _go_through(
        self, collection: Collection, progress: AbstractContextManager[Advance]
    ) -> Recording:
        """Run the network over the batches of a collection."""
        from scio_recorder.recording.collection import go_through

        self._refuse_inside_fsdp()
        # torch.compile(rnet) is another module, and can't be distinguished here.
        compiled = self if private.calls_compiled(self) else None
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
        from scio_recorder.stores.memory import make_plan

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
        parameters = self.recorded_params
        copies: dict[str, Tensor]
        copies = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), parameters)
        return copies

    @opens_block
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
            As in ``Recorder.forward``, for passes in the block. Those of blocks inside each other,
            and those that a call is given, act together; two for one layer are an error.
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
        with self._around(Block(passes, activation_postproc)) as block:
            yield passes
        if not block.num_calls:
            why = why_not_called(self._net)
            warn(f"the network was not called in the block of watch: {why}")

    @opens_block
    @shows(PassKeywords, progress=False)
    @contextlib.contextmanager
    def collecting(self, **options: Unpack[PassKeywords]) -> Iterator[CollectedPasses]:
        """Collect the outputs of the recorded layers in a block, whoever calls the network.

        Each call of the network is a pass, and its batch is the mapping of the arguments of the
        network's ``forward`` by name. The network runs as without the block: in the caller's modes,
        with gradients and training as they are. Passes leave no `activations`.

        A batch is a pass here: ``every`` and ``max_batches`` count passes, the others run and are
        not collected. ``transform`` gets no gradients, and ``sample_ids`` is called for passes that
        begin samples. With ``rows``, a pass that receives a filled cache continues the samples of
        the pass before, as in ``generate``: ``recording.rows["step"]`` counts the passes of a
        sample, and ``recording.by_sample`` joins prompt and continuation. With ``resume``, durable
        passes run again, and are not collected again; if the recording is complete, no pass is.

        Parameters
        ----------
        **options
            Those of `CollectOptions`.

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
        from scio_recorder.recording.collection import (
            CollectedPasses,
            Collection,
            saying_what_is_durable,
        )
        from scio_recorder.recording.feed import Feed

        if self._runner() is not self._capture:
            raise CollectError(
                "the recorder is collecting already: leave that block, or use another Recorder"
            )
        options.setdefault("progress", False)
        asked = CollectOptions(**options)
        # An iterator, since the number of passes is not known.
        collection = Collection(self._capture, Feed(iter(()), asked), is_of_others=True)
        with saying_what_is_durable(asked.store):
            collected = CollectedPasses(collection.open())
            block = Block(posts=asked.activation_postproc, collected=collected)
            with collected.block(), self._around(block):
                yield collected

    def _runner(self) -> Any:
        """Return what runs the passes of the caller: the innermost block that collects, or none."""
        collected = [block.collected for block in self._blocks.here()]
        return next((each for each in collected[::-1] if each is not None), self._capture)

    @contextlib.contextmanager
    def _around(self, block: Block) -> Iterator[Block]:
        """Make each call of the network inside a block a pass of the recorder."""
        if private.is_compiled(self._net):
            raise UnsupportedNetError(
                "the network was compiled after it was wrapped, and compiled code ignores hooks: "
                "watch it uncompiled, or compile the recorder and call that"
            )
        local = self._capture.site.local
        run = partial(_run_in_block, weakref.ref(self))
        with self._blocks.entered(block, self._net, run):
            local.outside = set()
            yield block
        local = self._capture.site.local
        outside, local.outside = local.outside, set() if self._blocks.here() else None
        if self._blocks.has_compiled:
            raise UnsupportedNetError(
                "a compiled recorder was called in the block, which does not see compiled passes: "
                "call the network there, uncompiled; rnet.collect(...) runs a compiled recorder"
            )
        layers = self._capture.program.layers_of(outside or ())
        _warn_of_calls_outside(layers, has_base=hasattr(self._net, "get_base_model"))

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

        if args and isinstance(args[0], DataLoader):
            text = "check takes an input: write rnet.check(next(iter(loader)))"
            raise caught_as(ArgumentError, TypeError(), text)
        try:
            return check(self.capture, args, kwargs)
        except Exception as error:
            explain_call(error, args, kwargs, self.architecture)
            raise

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

    @opens_block
    def guard(
        self,
        *,
        gradients: bool = True,
        action: Action = "raise",
        kinds: abc.Collection[str] = ("nan", "inf"),
        keep_inputs: bool = False,
        operations: bool = False,
        scaler: GradScaler | None = None,
        immediate: bool = False,
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
            What to do when the network's call or the backward pass ends: raise an error, warn, or
            only set `origin`. Nothing asks the device for a value before.
        kinds : collection of str, default ("nan", "inf")
            What to look for. With "nan" alone, infinities are ignored.
        keep_inputs : bool, default False
            Copy the inputs of each call until it returns, so that ``guard.origin.save(path)`` can
            write the inputs of the call that failed. This takes time, and memory for the inputs
            of all nested modules that are running, and implies `immediate`.
        operations : bool, default False
            Examine each operation inside the forwards as well, so that ``guard.origin.operation``
            is the one, with its line, with which the fault of the call began. Which call is the
            origin does not change.
        scaler : GradScaler, optional
            What scales the loss. Gradients that are not finite while its scale is above one are
            counted in ``guard.num_skipped_steps``, and not reported.
        immediate : bool, default False
            Ask at once, and raise inside the layer. On a GPU this waits for each call.

        Returns
        -------
        context manager of Guard
            The result; its ``origin`` is None as long as nothing was found.

        Raises
        ------
        NonFiniteError
            A layer has made a NaN or an infinity; ``error.origin`` says which. If the pass ended
            by another error, that is the cause.
        ArgumentError
            An argument has a value that can't work.
        FlowError
            The network was not called in the block.
        UnsupportedNetError
            The network is compiled, or is compiled inside the block, or its modules lie too deep
            inside each other for the interpreter's limit.

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

        return guarded(
            self.architecture,
            action,
            kinds,
            gradients=gradients,
            keep_inputs=keep_inputs,
            operations=operations,
            scaler=scaler,
            immediate=immediate,
        )

    @names_arguments
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
            the same shapes on both, but for dimension 1 if positions are listed.
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

    def residual_stream(self) -> ResidualStream:
        """Find the residual stream of a network of blocks, such as a language model.

        The network runs without a trace on the inputs of its labelling, four times or more. Every
        name is proved there: sums of what a block receives and of what its branches return must
        lead to what it returns, from block to block, and on to the output.

        Returns
        -------
        ResidualStream
            A read-only mapping, which can be printed, of names to labels for :meth:`record`. Names
            are keys of this mapping only: ``blocks.N.resid_pre``, ``.attn_out``, ``.resid_mid``,
            ``.mlp_out`` and ``.resid_post``, ``final_norm`` and ``logits``; ``.mixer_out`` is what
            a branch adds that mixes positions without attention. A key that is missing is a
            ``KeyError`` with the reason.

        Raises
        ------
        LayerNotFoundError
            No stream can be proved; the message says what is in the way.
        ComparisonError
            The caller is inside a block of :meth:`watch` or :meth:`collecting`.
        UnsupportedNetError
            The network is compiled or sharded.
        LabellingError
            This recorder is a copy, and no longer has the inputs of its labelling.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2)).eval()
        >>> rnet = Recorder(net, input_data=torch.tensor([[11, 12, 13]]))
        >>> stream = rnet.residual_stream()
        >>> str(stream["blocks.1.resid_mid"]), rnet.operations()[stream["blocks.1.resid_mid"]].name
        ('3-2/add:0', 'transformer.h.1/add:0')
        >>> rnet.record(*stream.values())
        >>> _ = rnet(torch.tensor([[14, 15]]))
        >>> rnet.activations[stream["blocks.1.resid_mid"]].shape
        torch.Size([1, 2, 8])
        """
        from scio_recorder.analysis.residual_stream import find_stream
        from scio_recorder.nets.labelling.label import labelled_example

        example, is_training = labelled_example(self.net, **self._labelled_with())
        architecture = self.operations().architecture
        return find_stream(self.capture, architecture, example, is_training=is_training)

    def _labelled_with(self) -> dict[str, Any]:
        if self._labelling is None:
            raise LabellingError(
                "this recorder is a copy, or was unpickled, and no longer has the inputs with "
                "which its network was labelled, so it can't list operations: call "
                "operations() before, or construct the Recorder again"
            )
        return self._labelling

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

        asked = CollectOptions(store=store, resume=True, **options)
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

    @names_arguments
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

    def __getattr__(self, name: str) -> Any:
        if name == _OF_TRAINERS:
            raise UnsupportedNetError(
                "a Trainer works on the network itself: give it rnet.net, and write `with "
                "rnet.watch() as passes: trainer.train()` to record the passes that it makes"
            )
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            from scio_recorder.recording import Recording

            net = self.__dict__.get("_modules", {}).get("_net")
            if net is None or name.startswith("_"):
                raise
            hint = nearest(name, dir(type(self)))
            if hasattr(net, name):
                hint = (
                    f", but its network has: write rnet.net.{name}. Calls of the network by other "
                    "code are recorded inside `with rnet.watch() as passes:`"
                )
            elif name in _ELSEWHERE:
                hint = f": write {_ELSEWHERE[name]}"
            elif hasattr(Recording, name):
                hint = f", but a recording has: write rnet.collect(batches).{name}"
            text = f"'Recorder' object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self) from error


def _run_in_block(
    recorder: weakref.ref[Collecting], call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a pass of the network, or call it as without any block."""
    # Where dynamo can't go on, as behind this error, it runs the call without a graph.
    if torch.compiler.is_compiling() or private.compiler_around():
        raise UnsupportedNetError(
            "the network is compiled inside a block that watches it, and a traced run is not a "
            "pass: leave it uncompiled there (for generate, disable_compile=True in its "
            "configuration), or compile the recorder and call that"
        )
    owner = recorder()
    # A run again in a backward pass belongs to its pass, whose hooks know it.
    if owner is None or is_rerun():
        return call(*args, **kwargs)
    is_inside = owner._blocks.take_call()
    if owner._capture.is_running:
        return call(*args, **kwargs)
    if is_inside:
        return owner._runner().run(call, args, kwargs)
    # What is outside of this task's blocks says nothing about another's on this thread.
    local = owner._capture.site.local
    outside, local.outside = local.outside, None
    try:
        return call(*args, **kwargs)
    finally:
        local.outside = outside


def _warn_of_calls_outside(layers: Sequence[Layer], *, has_base: bool) -> None:
    # The hooks of the network itself are called outside of a pass only by a shallow copy of it.
    if layers and layers[-1].depth:
        recorder = "Recorder(net.get_base_model())" if has_base else "a Recorder of its own"
        warn(
            f"code in the block called {few(layers, 4)} without the network "
            "around it, as generate calls an encoder. Such a call belongs to no pass: it is "
            f"neither recorded nor changed. Watch that part with {recorder}"
        )


def _node(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None

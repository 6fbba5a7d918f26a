"""Running passes: the state between them, and what holds before and after each."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from scio_recorder.capture.checkpoint_regions import Rerun, Reruns, is_rerun
from scio_recorder.capture.compiled import CompiledPass, GraphMemory
from scio_recorder.capture.gradients import GradientHooks, Gradients
from scio_recorder.capture.hooks import RUNNING, TRACED, Hooks, RunningPass, Site
from scio_recorder.capture.keeping import Setting, Settings
from scio_recorder.capture.passes import Ended, Pass, StopForward
from scio_recorder.capture.program import Program, RecordOptions, Sink
from scio_recorder.capture.watch import Blocks
from scio_recorder.errors import (
    ComparisonError,
    LayerNotFoundError,
    PostprocessorError,
    RecorderError,
    UnsupportedNetError,
    warn,
)
from scio_recorder.layer import Layer, OperationIdx, RowIdx, few, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.attention import AttentionRecords
from scio_recorder.nets.operations import unseen
from scio_recorder.nets.records import RUN_IT, Inputs, Records
from scio_recorder.nets.sharded import Shards, is_sharded
from scio_recorder.nets.state.moment import LiveMoment
from scio_recorder.postprocessors.assigning import (
    Assigned,
    Postprocessor,
    Postprocessors,
    assign,
)
from scio_recorder.postprocessors.knockout import Knockout, KnockoutOf
from scio_recorder.postprocessors.wrapping import OnInput
from scio_recorder.tensors import private

_NO_POSTS = Assigned({})
# Beyond this number, the oldest settings are forgotten: learning them again costs only copies.
_MAX_SETTINGS = 64


class CallStates(NamedTuple):
    """What calls of one pass need to run again as they ran."""

    moments: Mapping[RowIdx, LiveMoment]
    posts: Mapping[RowIdx, Postprocessor]


_NOTHING = Ended(*[cast("Any", {})] * 3)


class _Latest(threading.local):
    """The latest pass of each thread."""

    ended: Ended = _NOTHING
    gradients: Gradients | None = None
    state = CallStates({}, {})


class Capture:
    """Runs passes of a network, and records the layers of one selection.

    Each selection has its own. The network's hooks refer to a part of this object, never to a
    recorder, so that dropping the recorder drops everything.

    Parameters
    ----------
    net : torch.nn.Module
        The network; it has hooks from now on, until `remove` is called.
    architecture : Architecture
        Its layers.
    recording : tuple of (int, int)
        The labels of the layers to record, sorted.
    options : RecordOptions, optional
        The keywords of ``record``.

    Examples
    --------
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Tanh()), input_size=(1, 2))
    >>> capture = Capture(rnet.net, rnet.architecture, ((1, 1),))
    >>> _ = capture.run(rnet.net, (torch.tensor([[-1.0, 1.0]]),), {})
    >>> capture.activations["0"]
    tensor([[0., 1.]])
    >>> capture.remove()
    """

    def __init__(
        self,
        net: nn.Module,
        architecture: Architecture,
        recording: tuple[RowIdx, ...] = (),
        options: RecordOptions | None = None,
    ) -> None:
        self.net = net
        self.recording = recording
        self.options = options or RecordOptions()
        self.program = Program(architecture, recording, self.options)
        # With the operations that are recorded, and others of their functions.
        self.architecture = self.program.architecture
        self._shards = Shards(self.architecture, recording)
        self._known: dict[object, Setting] = {}
        # The recorder owns them: they are the user's, and may refer to the recorder.
        self.gradient_hooks: weakref.ref[GradientHooks] | None = None
        # The recorder gives its own.
        self.blocks = Blocks()
        self._reruns = Reruns()
        self.site = Site(self._reruns, skips_transforms=not self.program.counts_calls)
        sees_inputs = self.options.inputs or bool(self.options.gradients)
        self._hooks = Hooks(self.program, self.site, sees_inputs)
        self._latest = _Latest()
        # The latest pass, if it was compiled.
        self._compiled: CompiledPass | None = None
        self._graph_memory = GraphMemory()
        # Whether who calls compiled code ends the pass behind it.
        self.ends_compiled = False
        # Why there are no records, if it is not for want of a pass.
        self.why_none = ""
        self._lock = threading.Lock()
        self._is_removed = False
        self._has_warned = False
        self._has_warned_of_detached = False
        self._hooks.attach()

    def remove(self, *, waits: bool = True) -> None:
        """Take all hooks away and drop the records; a finalizer must not wait.

        If a post-processed checkpointed region may still run again, its hooks stay until its graph
        is gone: otherwise gradients would be silently wrong.
        """
        self._is_removed = True
        # With regions left, it is the finalizer of their graph that detaches.
        waits = waits and not self._reruns
        self._reruns.when_over(partial(self._hooks.detach, waits=waits))
        self._latest = _Latest()
        self._compiled = None
        self._known.clear()

    @cached_property
    def _settings(self) -> Settings:
        """Return what distinguishes settings, which nobody needs before the first pass."""
        return Settings(self.net)

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Take the hooks away inside the block, and keep the records."""
        self._hooks.detach()
        try:
            yield
        finally:
            if not self._is_removed:
                self._hooks.attach()

    @property
    def latest(self) -> tuple[dict[str, Any], CompiledPass | None]:
        """All that is known of the latest pass that this thread has run; it can be put back."""
        return {**vars(self._latest)}, self._compiled

    @latest.setter
    def latest(self, latest: tuple[dict[str, Any], CompiledPass | None]) -> None:
        self._forget_latest()
        vars(self._latest).update(latest[0])
        self._compiled = latest[1]

    @property
    def activations(self) -> Records:
        """The activations of the latest pass that this thread has run."""
        if self._compiled is not None:
            self._warn_of_detached(self._compiled)
            # For the next pass, if a hook acted behind ours in this one.
            self.prepare_compiled()
            return self._compiled.records()
        return self._latest.ended.activations or self._none_yet()

    @property
    def inputs(self) -> Records:
        """The inputs of the latest pass that this thread has run."""
        self._refuse_compiled("inputs")
        return self._latest.ended.inputs or self._none_yet("input")

    @property
    def attention(self) -> AttentionRecords:
        """The attention of layers in the latest pass that this thread has run."""
        self._refuse_compiled("attention")
        return self._latest.ended.attention or self._none_yet("attention", AttentionRecords)

    @property
    def gradients(self) -> Records:
        """The gradients that the latest backward pass through the latest pass has brought."""
        self._refuse_compiled("gradients")
        gradients, architecture = self._latest.gradients, self.architecture
        return gradients.records(architecture) if gradients else self._none_yet("gradient")

    def _none_yet(self, what: str = "activation", kind: Any = Records) -> Any:
        """Return no records: there are none before the first pass, nor of one that still runs."""
        thread = threading.get_ident()
        if any(run.site is self.site and run.thread == thread for run in [*RUNNING.values()]):
            raise LayerNotFoundError(
                f"the pass is still running, and leaves no {what} before it ends: read them after "
                "it. A post-processor is given what its layer returns, or with OnInput receives"
            )
        records = kind(self.architecture, what=what)
        is_asked = bool(self.recording) and (what == "activation" or bool(self.options.gradients))
        chosen = few([text_of(label) for label in self.recording], 6)
        has_not_run = f"the net has not run since record(...), which chose {chosen}: {RUN_IT}"
        records.why_none = self.why_none or has_not_run * is_asked
        return records

    @property
    def state(self) -> CallStates:
        """The states and post-processors with which calls of the latest pass run again."""
        return self._latest.state

    @property
    def is_running(self) -> bool:
        """Whether the caller runs inside a call of the recorder."""
        return self.site.local.active is not None or self.site.local.is_idle

    @property
    def is_watched(self) -> bool:
        """Whether a block around the caller wants the records of each pass."""
        return any(block.passes is not None for block in self.blocks.here())

    def refuse_side_runs(self, what: str) -> None:
        """Refuse to run the network inside a block around it, or if its hooks see too little.

        Parameters
        ----------
        what : str
            What runs it, such as ``"a sweep"``.
        """
        if self.blocks.open or self.is_running:
            raise ComparisonError(
                f"{what} runs the network itself, and its runs must not count as passes of a block "
                "around it: leave the block of watch(...) or collecting(...) first"
            )
        has_compiler = private.DYNAMO in sys.modules
        is_compiled = has_compiler and any(map(private.is_compiled, self.net.modules()))
        if is_compiled or is_sharded(self.net):
            raise UnsupportedNetError(
                "the network is compiled or sharded, in whole or in part, and compiled code does "
                f"not call hooks: {what} needs the network without torch.compile, in one process"
            )

    def acting(self, posts: Postprocessors | None) -> Postprocessors | None:
        """Return the post-processors of a call and of the blocks around it."""
        every = [*(block.posts for block in self.blocks.here()), posts]
        sources = [source for source in every if source is not None]
        if len(sources) < 2:
            return sources[0] if sources else None
        acting: dict[RowIdx, Postprocessor] = {}
        for source in sources:
            assigned = assign(self.architecture, self.program.order, source)
            for label in acting.keys() & assigned.keys():
                raise PostprocessorError(
                    f"two post-processors for {self.architecture[label]}: {acting[label]!r} of a "
                    f"block, and inside it {assigned[label]!r}. Write one that does both"
                )
            acting |= assigned
        return acting

    def run(
        self,
        net: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        posts: Postprocessors | None = None,
        records_outputs: bool = True,
        stop: bool = False,
        sink: Sink | None = None,
    ) -> Any:
        """Run the network, recording what it does; with ``stop``, no further than needed.

        With a sink, activations go there at once, whether the pass leaves records or not.
        """
        program = self.program
        if sink is None and self.blocks.open:
            posts = self.acting(posts)
        is_observed = records_outputs or sink is not None
        is_empty = not (self.recording or program.attention)
        if self._is_removed or is_empty or (posts is None and not is_observed):
            self._forget_latest()
            if posts is not None:
                # There is no layer to act on, which is wrong if layers are named.
                assign(self.architecture, (), posts)
            return self.site.local.run_aside(net, *args, **kwargs)
        refuse_transforms()
        if private.backward_pass() != -1 and is_rerun():
            # Checkpointing around the recorder: the re-run pass is recorded already.
            records_outputs = False
        else:
            self._forget_latest()
        # FSDP waits for the end of a pass that it has begun.
        stop = stop and not is_sharded(self.net)
        assigned = _NO_POSTS if posts is None else self._assigned(posts)
        key = self._settings.key(args, kwargs, assigned, stop)
        setting = self._known.get(key) or self._new_setting(key)
        current = Pass(
            program, setting, assigned, records_outputs=records_outputs, stops=stop, sink=sink
        )
        if "torch.distributed.tensor" not in sys.modules or not self._shards.are_to_be_found:
            return self._run(net, args, kwargs, current)
        with self._shards.found():
            return self._run(net, args, kwargs, current)

    def _assigned(self, posts: Postprocessors) -> Assigned:
        assigned: dict[RowIdx, Any] = assign(self.architecture, self.program.order, posts)
        for label, post in [*assigned.items()]:
            if not isinstance(post, Knockout):
                continue
            calls = self.program.attention.get((label[0], label[1]))
            if calls is None or label in self.program.own_code:
                raise PostprocessorError(
                    f"{post!r} acts on the attention of a layer, and that of "
                    f"{self.architecture[label]} is not recorded: write record(..., attention=True)"
                    ", and name the layer"
                )
            first = calls.first.label
            if first in assigned:
                raise PostprocessorError(
                    f"{post!r} acts on what {self.architecture[first]} receives, so no other "
                    "post-processor can act there: let it act on an operation before or behind it"
                )
            assigned[first] = KnockoutOf(post, calls)
            del assigned[label]
        return Assigned(assigned, self.site.local.run_aside)

    def _run(self, net: Callable[..., Any], args: Any, kwargs: Any, current: Pass) -> Any:
        local = self.site.local
        outer, outer_log = local.active, local.log
        try:
            with self._lock:
                # From here on a pass of another thread that fails leaves the hooks where they are.
                RUNNING[id(current)] = RunningPass(self.site, threading.get_ident(), current)
                on_inputs = current.posts.on_inputs
                self._hooks.make_ready(self.program.modules_of(on_inputs) if on_inputs else ())
            if self.options.gradients or current.posts.acts:
                self._expect_rerun(current)
            local.active = current
            local.log = current.log if current.is_fast else None
            output = None
            try:
                output = net(*args, **kwargs)
            except StopForward as stop:
                if stop.owner is not current:
                    raise
            local.active, local.log = outer, outer_log
            unseen(private.apart_from_modes, self._finish, current)
            RUNNING.pop(id(current), None)
        except BaseException as error:
            # An interruption can come anywhere, even before the pass has begun to run.
            local.active, local.log = outer, outer_log
            RUNNING.pop(id(current), None)
            if isinstance(error, Exception) and not isinstance(error, RecorderError):
                current.explain(error, Inputs(args, kwargs))
            current.abandon()
            self._detach_if_idle()
            raise
        return output

    def _finish(self, current: Pass) -> None:
        hooks = self._hooks
        # Otherwise the number of calls shows that a hook is gone.
        is_hidden = hooks.with_inputs or not self.program.counts_calls
        unhooked = hooks.removed_by_others() if is_hidden else ()
        ended = current.finish(unhooked)
        if ended is not None and current.records_outputs:
            latest = self._latest
            latest.ended, latest.gradients = ended, current.gradients
            latest.state = CallStates(current.moments, current.posts.functions)
            for block in self.blocks.here() if self.blocks.open else ():
                # Another thread may leave the block.
                if (passes := block.passes) is not None:
                    passes.add(ended)

    def _expect_rerun(self, current: Pass) -> None:
        if self.options.gradients:
            current.gradients = Gradients(self.gradient_hooks, self.options)
        parts = self.program, current.posts, current.gradients, self._reruns
        current.rerun = Rerun(*parts, Capture._run.__code__)
        self._reruns.hold(current.rerun)

    def _new_setting(self, key: object) -> Setting:
        setting = Setting(self.program)
        while len(self._known) >= _MAX_SETTINGS:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = setting
        around_code = [code.module for code in self.program.functions]
        for modules, in_mode in ((self.program.modules, False), (around_code, True)):
            if modules and not self._has_warned:
                self._has_warned = warn_of_other_kernels(
                    self.architecture.values(), modules, "recorded", of_functions=in_mode
                )
        return setting

    def _warn_of_detached(self, compiled: CompiledPass) -> None:
        if compiled.is_on_graph and not self._has_warned_of_detached:
            self._has_warned_of_detached = True
            warn(
                "activations of a compiled pass are detached copies: a loss on them has no "
                "gradient. Call the recorder without torch.compile for such a loss"
            )

    def _refuse_compiled(self, what: str) -> None:
        if self._compiled is not None:
            raise UnsupportedNetError(
                f"the latest pass was compiled, and left only activations and no {what}: run the "
                "recorder without torch.compile for these"
            )

    def _forget_latest(self) -> None:
        vars(self._latest).clear()
        if self._compiled is not None:
            self._compiled, self._graph_memory = None, GraphMemory()

    def _detach_if_idle(self) -> None:
        """After an exception nothing may stay behind, unless others still need the hooks."""
        with self._lock:
            is_idle = all(running.site is not self.site for running in list(RUNNING.values()))
            if is_idle and not self._reruns:
                self._hooks.detach()

    # -- the compiled path -------------------------------------------------------------------------

    def run_compiled(
        self,
        net: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        posts: dict[RowIdx, Postprocessor] | None,
        records_outputs: bool,
    ) -> Any:
        """Run the network while it is compiled."""
        if any(isinstance(post, OnInput) for post in (posts or {}).values()):
            raise PostprocessorError(
                "OnInput can't act in a compiled pass: call the recorder without torch.compile, "
                "or let the post-processor act on the output of the layer before"
            )
        self.refuse_on_operations(posts)
        current = CompiledPass(self.program, posts, records_outputs)
        # After a pass that failed, hooks come back with the next pass that is not compiled, or when
        # the records of this one are read. Code that was made without them is made again then.
        if not self._hooks.is_attached:
            current.has_hooks = False
        if posts and not current.has_hooks:
            raise PostprocessorError(
                "a pass that failed has taken the recorder's hooks away, without which no "
                "post-processor acts in a compiled pass: call record(...) again"
            )
        name = self.site.name
        TRACED[name] = current
        try:
            output = net(*args, **kwargs)
        finally:
            del TRACED[name]
        if self.blocks.open:
            self.blocks.has_compiled = True
        if not private.is_exporting():
            self._compiled = current
        elif not torch.compiler.is_dynamo_compiling():
            self._forget_latest()
        return output

    def refuse_on_operations(self, posts: dict[RowIdx, Postprocessor] | None) -> None:
        """Refuse post-processors inside own code, which can't act in a compiled pass."""
        for label, post in (posts or {}).items():
            if isinstance(label, OperationIdx) or isinstance(post, Knockout):
                raise PostprocessorError(
                    "a post-processor can't act on an operation in a compiled pass: call the "
                    "recorder without torch.compile, or let it act on a layer"
                )

    def prepare_compiled(self) -> None:
        """Put the hooks behind those of others, before compiled code is made or checked.

        Code that was made for another order follows hooks that are new, not a change of order.
        """
        with self._lock:
            if self._compiled is not None and self._compiled.hooks_behind:
                self._hooks.detach()
            self._hooks.make_ready()

    def end_compiled(self) -> None:
        """Let the records of a compiled pass that has ended outlast what runs from now on."""
        if self._compiled is not None:
            self._graph_memory.end(self._compiled)

    def hand_on_compiled(self, call: Callable[[], Any], sink: Sink) -> Any:
        """Run a compiled recorder, and hand its records to a sink, so that none are left."""
        if self.program.own_code:
            raise UnsupportedNetError(
                "operations are seen in passes that are not compiled, and the recorder is: collect "
                "with a recorder that is not compiled, or record layers"
            )
        self.prepare_compiled()
        self._forget_latest()
        output = call()
        if self._compiled is None:
            raise UnsupportedNetError(
                "the recorder was compiled, but its call ran uncompiled: find the graph break by "
                "compiling it with fullgraph=True, or use a recorder that is not compiled"
            )
        for label, value in self._compiled.checked().items():
            sink.receivers[label](value)
        self._forget_latest()
        return output


def warn_of_other_kernels(
    layers: Iterable[Layer],
    modules: Collection[nn.Module | None],
    what: str,
    *,
    of_functions: bool = False,
) -> bool:
    """Warn if hooks on modules make torch run another kernel, and return whether they do.

    With ``of_functions``, also if a function mode does.
    """
    if torch.is_grad_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    # Those for which torch has a fused kernel, which it doesn't use beside hooks or under a mode.
    kinds = (nn.TransformerEncoderLayer, *((nn.MultiheadAttention,) if of_functions else ()))
    for row in layers:
        module = row.module
        if not isinstance(module, kinds) or module.training:
            continue
        if any(inner in modules for inner in module.modules()):
            warn(
                f"layer {row} runs without torch's fused kernel while it is {what}: torch uses "
                "the plain kernel for modules with hooks, and its results can differ in the last "
                "bits"
            )
            return True
    return False


def refuse_transforms(what: str = "recorded") -> None:
    """Refuse transforms whose tensors don't outlive the call, and captures that compute nothing."""
    if private.is_capturing():
        raise UnsupportedNetError(
            f"a CUDA graph is being captured, in which nothing is computed, so that nothing can be "
            f"{what}, and replays run no hooks: compile the recorder in place of capturing it, as "
            'in rnet.compile(mode="reduce-overhead"), which makes graphs that record, or capture '
            "rnet.net"
        )
    if private.transform_around() is not None:
        raise UnsupportedNetError(
            "inside torch.func transforms (vmap, grad, ...) tensors die with the transform and "
            f"can't be {what}: call rnet.net there, outside of blocks such as watch(), or "
            "record() nothing"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # not in its stubs
        raise UnsupportedNetError(
            f"torch.jit.trace would keep one {what} pass and repeat it: trace rnet.net, outside "
            "of blocks such as watch(), or record() nothing"
        )

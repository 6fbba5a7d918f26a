"""The recorder: a network with its layers labelled, recorded and changed."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Self

import torch
from torch import nn

from scio_recorder.capture.around import CallWrapper
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import CopyPolicy, RecordOptions
from scio_recorder.capture.watch import Blocks
from scio_recorder.display.outline import Outline, outline, printed, visible
from scio_recorder.display.page import Outlined
from scio_recorder.errors import (
    ArgumentError,
    MissingInputError,
    PostprocessorError,
    SelectorTypeError,
    caught_as,
    warn,
)
from scio_recorder.layer import (
    DepthIdx,
    Operation,
    OperationIdx,
    RowIdx,
    counted,
    few,
    label_of,
    text_of,
)
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.labelling.label import label_net, list_operations
from scio_recorder.nets.labelling.torchinfo import ModelStatistics
from scio_recorder.nets.operations import Operations
from scio_recorder.nets.records import Records
from scio_recorder.nets.refusals import explain_call, takes_any_keyword, unknown_keyword
from scio_recorder.nets.selection import (
    did_not_run,
    look_alikes,
    select,
    select_for_option,
    select_modules,
    selector_for,
    warn_of_longer_numbers,
)
from scio_recorder.postprocessors.assigning import Postprocessors, assign, assign_by_key
from scio_recorder.recorder.collecting import Collecting
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import booleans, names_arguments, signature_of

_Given = ParamSpec("_Given")


def _given_one_net(construct: Callable[_Given, None]) -> Callable[_Given, None]:
    """Let a constructor say by which keyword to give a second positional argument."""

    @functools.wraps(construct)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
        if len(args) > 2:
            second = args[2]
            is_size = isinstance(second, list | tuple) and all(isinstance(n, int) for n in second)
            raise caught_as(
                MissingInputError,
                TypeError(),
                "a Recorder takes the net alone by position: write Recorder(net, "
                f"{f'input_size={second!r}' if is_size else 'input_data=x'})",
            )
        construct(*args, **kwargs)

    return checked


def _refuse_mistaken(net: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse a keyword that means ``activation_postproc``, which the network might ignore."""
    for name in kwargs:
        is_meant = "post" in name and "proc" in name
        if is_meant and name not in signature_of(net.forward).parameters:
            raise PostprocessorError(
                f"{name}= is no argument of the network's forward: write activation_postproc="
            )
    # Other networks refuse it themselves. To look at a signature takes long, so it comes last.
    if (unknown := unknown_keyword(net, kwargs)) and takes_any_keyword(net):
        warn(unknown)


def _attending(
    architecture: Architecture, recording: Sequence[RowIdx], attention: Any
) -> tuple[DepthIdx, ...]:
    """Return the layers whose attention is asked for."""
    if attention is False:
        return ()
    several = isinstance(attention, list | tuple | set) and label_of(attention) is None
    chosen = recording
    if attention is not True:
        wanted = list(attention) if several else [attention]
        note = "attention=True is for all recorded layers; another value chooses some of them."
        chosen = select_for_option(architecture, wanted, note)
    layers = tuple((at[0], at[1]) for at in chosen if not isinstance(at, OperationIdx))
    if chosen and not layers:
        raise SelectorTypeError(
            "attention= is for layers, and only operations are chosen: name the layers around "
            'them, as in record(..., attention="h.*.attn")'
        )
    return layers


class Recorder(Collecting, Outlined, private.NotReplicated):
    """A network whose layers are labelled, and can be recorded and changed while it runs.

    Parameters
    ----------
    net : torch.nn.Module
        The network. It is not copied, and not changed by the construction.
    force_static_flow : bool, default True
        Refuse a net whose control flow depends on the values in its input, since a label would
        mean different layers for different inputs. With False, each pass is still checked against
        the labelling, and raises :class:`~scio_recorder.errors.FlowError` if they differ.
    **summary_kwargs
        Passed to :func:`torchinfo.summary`, which runs the net once, on a copy. ``input_size``
        (with the batch dimension) or ``input_data`` is required.

    Attributes
    ----------
    summary : torchinfo.ModelStatistics
        The table that labels come from.
    architecture : Architecture
        The layers by label.

    Raises
    ------
    MissingInputError
        Neither ``input_size`` nor ``input_data`` was given.
    UnsupportedNetError
        The net is not a module, or hooks can't observe it (scripted, compiled, ``DataParallel``,
        lazy).
    LabellingError
        The net failed on the input.
    FlowError
        The control flow depends on the data.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    >>> rnet = Recorder(net, input_size=(1, 5))
    >>> rnet.record((1, 1), nn.ReLU)
    >>> rnet.recording
    ((1, 1), (1, 2))
    >>> out = rnet(torch.ones(2, 5))
    >>> torch.equal(rnet.activations["1-1"], net[0](torch.ones(2, 5)))
    True
    """

    summary: ModelStatistics
    architecture: Architecture

    @_given_one_net
    def __init__(
        self, net: nn.Module, /, *, force_static_flow: bool = True, **summary_kwargs: Any
    ) -> None:
        statistics, architecture = label_net(
            net, force_static_flow=force_static_flow, **summary_kwargs
        )
        super().__init__()
        self.training = net.training
        self._net = net
        self.summary = statistics
        self.architecture = architecture
        # How to run the network once more.
        self._labelling: dict[str, Any] | None = summary_kwargs
        self._operations: list[Operation] | None = None
        self._blocks = Blocks()
        self._gradient_hooks = OrderedDict()
        self._install(Capture(net, architecture))

    def __setattr__(self, name: str, value: Any) -> None:
        # A module would hide in `_modules`, unseen.
        if isinstance(getattr(type(self), name, None), property):
            raise caught_as(
                ArgumentError,
                AttributeError(),
                f"rnet.{name} can't be set: choose layers by rnet.record(...), and wrap another "
                "network by another Recorder(net, ...)",
            )
        super().__setattr__(name, value)

    def _install(self, capture: Capture) -> None:
        capture.gradient_hooks = weakref.ref(self._gradient_hooks)
        capture.blocks = self._blocks
        self._capture = capture
        self._finalizer = weakref.finalize(self, capture.remove, waits=False)
        self._finalizer.atexit = False

    @names_arguments
    def record(
        self,
        *selectors: Any,
        inputs: bool = False,
        gradients: bool | Literal["accumulate"] = False,
        copy: CopyPolicy = "auto",
        offload: bool = False,
        calls: Literal["labelled", "any"] = "labelled",
        attention: Any = False,
    ) -> None:
        """Choose the layers to record, in place of the previous choice; none to stop recording.

        Parameters
        ----------
        *selectors
            Each is a label (``(1, 3)`` or ``"1-3"``), a qualified name or a glob over names
            (``*`` crosses dots), a compiled pattern to be searched in the name, a module type, a
            module, or a predicate on :class:`~scio_recorder.layer.Layer`.
        inputs : bool, default False
            Also record the inputs of the modules' forward, see :attr:`inputs`.
        gradients : bool or "accumulate", default False
            Also record gradients with respect to the activations, see :attr:`gradients`; with
            "accumulate", the sum over all backward passes through the latest pass.
        copy : {"auto", "always", "never"}
            When to copy outputs. "auto" copies all outputs in the first pass of each setting, and
            then only those that the network overwrote in that pass. "never" is for when memory
            is short: reading an overwritten record raises.
        offload : bool, default False
            Keep detached copies in host memory (pinned, from a GPU) instead.
        calls : {"labelled", "any"}
            "any" is for nets in which the number of calls of a module changes from pass to pass,
            such as mixtures whose experts are modules (fused experts have no rows). The record of a
            name is then the tuple of the outputs of its calls in the pass, in order; it is empty if
            there was no call. Its gradient is the tuple of their gradients, None for a call that
            got none. No number of calls raises :class:`~scio_recorder.errors.FlowError`. A module
            that did not run at labelling has no label, and is left out with a warning.
        attention : bool or selectors, default False
            Also record the attention of layers whose own code computes it, see :attr:`attention`:
            of all selected layers, or of those that one selector, or a list of them, chooses.

        Raises
        ------
        LayerNotFoundError
            A selector matches no layer, or the own code of one does not compute attention once. The
            selection stays as it was.

        Examples
        --------
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("*", gradients=True)
        >>> rnet.recording
        ((0, 1), (1, 1), (1, 2))
        """
        if copy not in ("auto", "always", "never"):
            raise SelectorTypeError(f'copy={copy!r}: write "auto", "always" or "never"')
        booleans(SelectorTypeError, inputs=inputs, offload=offload)
        if not isinstance(gradients, bool) and gradients != "accumulate":
            raise SelectorTypeError(f'gradients={gradients!r}: write True, False or "accumulate"')
        if calls not in ("labelled", "any"):
            raise SelectorTypeError(f'calls={calls!r}: write "labelled" or "any"')
        choose = select if calls == "labelled" else select_modules
        if attention is not False and calls == "any":
            raise SelectorTypeError(
                'attention= needs layers whose calls are counted, not calls="any"'
            )
        is_inside = attention is not False or any(map(self.architecture.means_operation, selectors))
        architecture = self._with_operations() if is_inside else self.architecture
        recording = choose(architecture, selectors)
        self._warn_of_missed(architecture, selectors, recording)
        if calls == "any":
            self._warn_of_unlabelled(selectors)
        layers = _attending(architecture, recording, attention)
        options = RecordOptions(inputs, gradients, copy, offload, calls, layers)
        self._replace_capture(Capture(self._net, architecture, recording, options))
        # Which knows the recorded operations, too.
        self.architecture = self._capture.program.architecture

    def operations(self, *selectors: Any) -> Operations:
        """List what the own code of layers calls: functions, methods and operators of torch.

        The network runs once more for the first list, on a copy and with the inputs of its
        labelling.

        Parameters
        ----------
        *selectors
            Layers as for :meth:`record`, or operations; without any, all layers.

        Returns
        -------
        Operations
            A read-only mapping of ``OperationIdx`` to ``Operation``, in the order in which they
            returned. A key can also be a text, such as ``"h.3/add:1"``. It is printed with names,
            shapes and lines of code.

        Raises
        ------
        LayerNotFoundError
            A selector matches nothing.
        LabellingError
            The network is not as it was when it was labelled.

        Examples
        --------
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> operations = rnet.operations()
        >>> [row.name for row in operations.values()], operations["1/relu"].source
        (['0/linear:0', '1/relu:0'], 'return F.relu(input, inplace=self.inplace)')
        """
        architecture = self._with_operations()
        chosen = set(select(architecture, selectors or [lambda row: True]))
        rows = architecture.operations.items()
        inside: dict[RowIdx, Operation] = {
            at: row for at, row in rows if at in chosen or row.layer.label in chosen
        }
        return Operations(architecture, inside, "operation")

    def _with_operations(self) -> Architecture:
        if self._operations is None:
            labelling = self._labelled_with()
            self._operations = list_operations(self._net, self.architecture, **labelling)
        return self.architecture.with_operations(self._operations)

    def _warn_of_missed(
        self,
        architecture: Architecture,
        selectors: Sequence[object],
        recording: Sequence[RowIdx],
    ) -> None:
        warn_of_longer_numbers(architecture, selectors, recording)
        missing = look_alikes(architecture, selectors, recording)
        if missing:
            kinds = sorted({row.type_name for row in missing})
            named = selector_for(architecture, missing[0].label, architecture)
            warn(
                f"nn.Linear misses {counted(len(missing), 'layer')} that multiply by a matrix too, "
                f"such as {missing[0]}, since their class is another one: write record(nn.Linear, "
                f"lambda layer: layer.type_name in {kinds}), or choose by name, record({named!r})"
            )

    def _warn_of_unlabelled(self, selectors: Sequence[object]) -> None:
        missing = did_not_run(self._net, self.architecture, selectors)
        if missing:
            warn(
                f"{few(missing, 4)} did not run at labelling, so they have no label "
                "and are not recorded, even if they run later: label the net with an input at "
                "which all of them run (input_data=)"
            )

    def remove(self) -> None:
        """Remove all hooks from the network and drop all records; the selection becomes empty.

        Examples
        --------
        >>> rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> rnet.remove()
        >>> len(rnet.net[0]._forward_hooks), rnet.recording
        (0, ())
        """
        self._replace_capture(Capture(self._net, self.architecture))

    def _replace_capture(self, capture: Capture) -> None:
        if any(block.collected is not None for block in tuple(self._blocks.open)):
            raise SelectorTypeError(
                "record(...) can't change layers that are collected: leave the block of collecting"
            )
        self._finalizer.detach()
        self._capture.remove()
        self._install(capture)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()
        self._capture.why_none = (
            "the block of `with rnet:` has ended, and with it hooks, records and selection: read "
            "them inside it, or write no such block. A block that records what other code calls is "
            "`with rnet.watch() as passes:`"
        )

    def forward(
        self,
        *args: Any,
        activation_postproc: Postprocessors | None = None,
        dont_record: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the network, recording the selected layers and changing them if asked.

        Parameters
        ----------
        *args, **kwargs
            Passed to the network.
        activation_postproc : callable, list or mapping, optional
            Changes the output of recorded layers before it goes on through the network: one
            callable for all of them; a list with one for each, in the order in which the layers
            return; or a mapping from selectors to callables. A callable takes the layer's output,
            and returns its replacement, or None to keep it. It is called after recording, and not
            on a copy: a callable that works in place changes the record too. If no layer is
            recorded, a callable for all of them acts on none, with a warning.
        dont_record : bool, default False
            Record nothing, but still post-process.

        Returns
        -------
        Any
            The network's output.

        Raises
        ------
        FlowError
            A module with a recorded layer ran more or less often than at labelling.
        PostprocessorError
            Too few or too many post-processors, or one that failed.

        Examples
        --------
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> rnet(torch.tensor([[1.0, 3.0]]), activation_postproc=lambda t: t.clamp(max=2))
        tensor([[1., 2.]])
        >>> rnet.activations["0"]
        tensor([[1., 3.]])
        """
        if torch.compiler.is_compiling():
            # An exported program runs elsewhere: nothing can be recorded here.
            records_outputs = not (dont_record or private.is_exporting())
            posts = self._posts_of(activation_postproc)
            output = self._capture.run_compiled(self._net, args, kwargs, posts, records_outputs)
            if not self._capture.ends_compiled and private.makes_cuda_graphs():
                private.call_behind_graph(self._capture.end_compiled)
            return output
        if kwargs:
            _refuse_mistaken(self._net, kwargs)
        # Attributes of a module that are modules are found last, which takes a microsecond.
        net: Any = self._modules["_net"]
        run: Any = (self._runner() if self._blocks.open else self._capture).run
        if private.compiler_around():
            self._capture.refuse_on_operations(self._posts_of(activation_postproc))
            # Dynamo can't follow this call, but would compile the modules inside, whose hooks then
            # record nothing.
            run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]  # in torch
        try:
            output = run(
                net, args, kwargs, posts=activation_postproc, records_outputs=not dont_record
            )
        except Exception as error:
            explain_call(error, args, kwargs, self.architecture)
            raise
        if activation_postproc and not self._capture.program.recording:
            warn("activation_postproc acts on no layer: choose layers with record(...) first")
        return output

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights, as ``torch.nn.Module`` does.

        Parameters
        ----------
        state_dict : mapping
            Weights by their names in a recorder, which begin with ``_net.``.
        strict, assign : bool
            As ``torch.nn.Module.load_state_dict`` takes them.

        Raises
        ------
        ArgumentError
            It is of the bare network, whose names lack ``_net.``.
        """
        if state_dict and not any(name.startswith("_net.") for name in state_dict):
            raise caught_as(
                ArgumentError,
                RuntimeError(),
                "these weights are not of a recorder, whose names begin with _net: if they are of "
                "its network, write rnet.net.load_state_dict(...)",
            )
        return super().load_state_dict(state_dict, strict, assign)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the calls of this recorder, as ``torch.nn.Module.compile`` does.

        Parameters
        ----------
        *args, **kwargs
            Passed to ``torch.compile``.
        """
        super().compile(*args, **kwargs)

        def run(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(*args, **kwargs)
            self._capture.prepare_compiled()
            self._capture.ends_compiled = True
            try:
                output = call(*args, **kwargs)
            finally:
                self._capture.ends_compiled = False
            self._capture.end_compiled()
            return output

        CallWrapper(self, run).put_around()

    def _posts_of(self, posts: Postprocessors | None) -> Any:
        program = self._capture.program
        if isinstance(posts, Mapping):
            return assign_by_key(program.keys, posts)
        return None if posts is None else assign(self.architecture, program.order, posts)

    def extract(self, *args: Any, **kwargs: Any) -> Records:
        """Run the network no further than the last recorded layer.

        Parameters
        ----------
        *args, **kwargs
            As for :meth:`forward`.

        Returns
        -------
        Records
            The activations, as :attr:`activations` gives them from then on.

        Raises
        ------
        SelectorTypeError
            Nothing is recorded.

        Examples
        --------
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Softmax(1)), input_size=(1, 2))
        >>> rnet.record("0")
        >>> rnet.extract(torch.tensor([[-1.0, 3.0]]))["0"]
        tensor([[0., 3.]])
        """
        if not self.recording:
            raise SelectorTypeError("nothing to extract: choose layers with record(...) first")
        self._refuse_inside_fsdp()
        posts = kwargs.pop("activation_postproc", None)
        try:
            self._capture.run(self._net, args, kwargs, posts=posts, stop=True)
        except Exception as error:
            explain_call(error, args, kwargs, self.architecture)
            raise
        return self.activations

    def __repr__(self) -> str:
        table = "\n".join(map(visible, repr(self.summary).split("\n")))
        line = table[0] * table.find("\n")
        labels = ", ".join(map(text_of, self.recording))
        return (
            f"Recorder instance for the following network\n{table}\n"
            f"Currently recording: {labels or None}\n{line}"
        )

    def __str__(self) -> str:
        """Return the table, or if it does not fit the terminal, that of rich."""
        from scio_recorder.display.printing import Console

        text, terminal = repr(self), Console()
        is_wider = terminal.is_terminal and len(text.split("\n", 2)[1]) > terminal.width
        return printed(self, terminal.width) if is_wider else text

    def _outline(self) -> Outline:
        rows, inner = list(self.architecture.values()), self.architecture.operations
        return outline("Recorder", rows, self.recording, inner)

    # Hooks refer to this recorder, so a copy attaches its own.

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # nn.Module
        capture = state.pop("_capture")
        del state["_finalizer"], state["_blocks"]
        state |= {"_labelling": None, "_gradient_hooks": OrderedDict()}
        return {**state, "_selection": (capture.program.recording, capture.program.options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        recording, options = state.pop("_selection")
        # A recorder that an earlier version has pickled lacks some.
        state = {"_operations": None, "_labelling": None, "_gradient_hooks": OrderedDict(), **state}
        state["_blocks"] = Blocks()
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # that of nn.Module
        operations = self._operations or ()
        architecture = self.architecture.with_operations(operations)
        if options.attention and all("attention" not in vars(row) for row in operations):
            # Version 0.3 did not check the layout of attention.
            warn(
                "this recorder was pickled by an earlier version, and the attention that it "
                "recorded is left out: construct it again"
            )
            options, self._operations = dataclasses.replace(options, attention=()), None
        self._install(Capture(self._net, architecture, recording, options))

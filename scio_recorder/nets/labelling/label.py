"""Labelling: one dry run of a copy of the net, interpreted as torchinfo does."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchinfo.layer_info import LayerInfo

from scio_recorder.errors import LabellingError, MissingInputError, UnsupportedTorchError
from scio_recorder.layer import DepthIdx, Label, Layer, describe, shapes_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.labelling.data_flow import Flow, check_static_flow
from scio_recorder.nets.labelling.torchinfo import (
    ModelStatistics,
    Statistics,
    forgiving,
    point_to,
    random_inputs,
    summary,
)
from scio_recorder.nets.refusals import check_supported, failed_run
from scio_recorder.nets.sharded import Following, is_sharded, mark, plain_type
from scio_recorder.nets.state.copying import (
    OriginalCalledError,
    copy_inputs,
    copy_net,
    quiet,
    refusing_calls,
)
from scio_recorder.nets.state.moment import preserved_rng
from scio_recorder.nets.state.untouched import reached, shared_untouched, untouched
from scio_recorder.tensors import private

_DEFAULTS: dict[str, Any] = {
    "col_names": ("input_size", "output_size", "num_params", "params_percent"),
    "row_settings": ("var_names", "depth"),
    "depth": sys.maxsize,
    "verbose": 0,
    "input_size": None,
    "input_data": None,
    "batch_dim": None,
    "mode": "eval",
}
_OF_TORCHINFO = frozenset(inspect.signature(summary).parameters) - {"model", "kwargs"}


def label_net(
    net: nn.Module, *, force_static_flow: bool = True, **summary_kwargs: Any
) -> tuple[ModelStatistics, Architecture]:
    """Run a copy of a net once and label every call of its modules as torchinfo does.

    Parameters
    ----------
    net : torch.nn.Module
        The net. Neither it nor any global state is changed.
    force_static_flow : bool
        Whether to refuse a net whose control flow depends on the values of its inputs.
    **summary_kwargs
        Keywords of ``torchinfo.summary``: ``input_size`` or ``input_data`` above all. Others go to
        the net's ``forward``. Its cache of passes is never used.

    Returns
    -------
    summary : torchinfo.ModelStatistics
        torchinfo's summary of the modules of ``net``.
    architecture : Architecture
        The layers by label.

    Raises
    ------
    MissingInputError
        Neither ``input_size`` nor ``input_data`` was given.
    UnsupportedNetError
        Hooks can't observe such a net.
    LabellingError
        The pass failed.
    FlowError
        The control flow depends on the data.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> summary, architecture = label_net(net, input_size=(1, 4))
    >>> architecture[1, 2].module is net[1]
    True
    """
    check_supported(net, summary_kwargs.get("device"))
    keywords = _keywords(net, summary_kwargs)
    # An interruption can come after torch has turned gradients off and before it restores them.
    with preserved_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
        statistics, architecture, trace, flow = _label(net, keywords)
        if force_static_flow and flow.questions and trace.inputs is not None:
            mode = keywords["mode"] or "eval"
            check_static_flow(net, *trace.inputs, mode=mode, grad=trace.grad)
    verbose = _DEFAULTS["verbose"] if keywords["verbose"] is None else keywords["verbose"]
    statistics.formatting.verbose = verbose
    if verbose:
        print(statistics)
    return statistics, architecture


def _keywords(net: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    keywords = {**_DEFAULTS, **given, "cache_forward_pass": False}
    if keywords["input_size"] is None and keywords["input_data"] is None:
        raise MissingInputError(
            "labelling runs the net once and needs an input for that: write input_size=(1, 3, "
            "32, 32), batch dimension included, or input_data= a tensor, a tuple of positional "
            "or a dict of keyword inputs"
        )
    size = keywords["input_size"]
    if isinstance(size, int | float):
        raise LabellingError(
            f"input_size={size!r} is a number, not a shape: write input_size=(1, {size:g}), batch "
            "dimension included"
        )
    if keywords["input_data"] is None:
        state = [*net.parameters(), *net.buffers()]
        if keywords.get("device") is None:
            # Without a device, torchinfo would move the net to a GPU if there is one.
            keywords["device"] = state[0].device if state else torch.device("cpu")
        if keywords.get("dtypes") is None:
            numbers = (t.dtype for t in state if t.is_floating_point() or t.is_complex())
            # One for each input: there are at most as many inputs as entries of their sizes.
            keywords["dtypes"] = [next(numbers, torch.float)] * len(keywords["input_size"])
    return keywords


def _understood_by_torchinfo(input_data: Any) -> Any:
    """Wrap inputs that torchinfo would not take for one positional input, or for keyword inputs."""
    if isinstance(input_data, Mapping):
        return input_data if isinstance(input_data, dict) else dict(input_data)
    known = isinstance(input_data, Tensor | np.ndarray | list | tuple | None)
    return input_data if known else [input_data]


@dataclass(eq=False)
class _Call:
    """One call of a module; ``completion`` stays None if it did not return."""

    module: nn.Module
    number: int
    input_shape: Any
    handled_error: BaseException | None
    completion: int | None = None
    output_spec: Any = None


class _CallTrace:
    """The calls of one pass, in the order in which they started.

    Parameters
    ----------
    net : torch.nn.Module
        The net to observe, inside a block of :meth:`watching`.
    grad : bool
        Whether the net runs with gradients, although the caller has turned them off.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.ReLU())
    >>> trace = _CallTrace(net)
    >>> with trace.watching():
    ...     _ = net(torch.ones(2))
    >>> [(type(call.module).__name__, call.completion) for call in trace.calls]
    [('Sequential', 1), ('ReLU', 0)]
    """

    def __init__(self, net: nn.Module, *, grad: bool = False) -> None:
        self.calls: list[_Call] = []
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._net = net
        self.grad = grad
        self._open: dict[int, list[_Call]] = {}
        self._counts: dict[int, int] = {}
        self._completed = 0

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Take the calls inside a block."""
        return hooked(self._net, before=self._start, after=self._end, always=True)

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._net and self.inputs is None:
            # Before the pass, which may resize inputs or fill a cache among them.
            self.inputs = copy_inputs((args, kwargs))
            if self.grad:
                # The caller's `no_grad` puts this back.
                torch.set_grad_enabled(True)
        number = self._counts.get(id(module), 0)
        self._counts[id(module)] = number + 1
        call = _Call(module, number, _input_shape(args, kwargs), sys.exc_info()[1])
        self.calls.append(call)
        self._open.setdefault(id(module), []).append(call)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open[id(module)].pop()
        # A hook that is always called is given None after an exception. A call that the net makes
        # while it handles an exception had that exception from its start.
        if sys.exc_info()[1] is call.handled_error:
            call.completion = self._completed
            call.output_spec = describe(output)
            self._completed += 1


_Labelled = tuple[ModelStatistics, Architecture, _CallTrace, Flow]


def _label(net: nn.Module, keywords: dict[str, Any]) -> _Labelled:
    failure: _DryRunError | None = None
    in_step = is_sharded(net)
    # The user's hooks may have side effects, so they are left out, unless the net can't run without
    # them.
    # Gradients cost memory, so they are off, unless the net itself differentiates something.
    has_hooks = any(any(private.forward_hooks(module)) for module in net.modules())
    hooks = (False, True) if has_hooks and not in_step else (False,)
    # Functions that compile themselves, such as `flex_attention`, fail while they are followed.
    following = (True,) if in_step else (True, False)
    for followed, keep_hooks, grad in itertools.product(following, hooks, (False, True)):
        try:
            if in_step:
                return _label_in_step(net, keywords, grad)
            return _label_once(net, keywords, keep_hooks, grad, followed)
        except _DryRunError as error:
            # A failure with gradients may be due to the gradients.
            failure = failure if grad else error
    assert failure is not None
    try:
        raise LabellingError(failed_run(net, keywords, failure.cause)) from failure.cause
    finally:
        # Frames that hold an error which holds them live until garbage is collected.
        del failure


def _label_once(
    net: nn.Module, keywords: dict[str, Any], keep_hooks: bool, grad: bool, followed: bool
) -> _Labelled:
    twin = _faithful_copy(net, keep_hooks)
    if twin is not None:
        alone = shared_untouched(reached([net]), twin)
        with contextlib.suppress(OriginalCalledError), refusing_calls(net), alone:
            return _dry_run(twin, keywords, net, grad, followed)
    # A part of the net can't be copied, or leads from the copy back to the net, as closures do.
    with untouched(net, keep_hooks=keep_hooks, keep_random=True):
        return _dry_run(net, keywords, net, grad, followed)


def _label_in_step(net: nn.Module, keywords: dict[str, Any], grad: bool) -> _Labelled:
    """Label a net that is spread over processes, all of which take part."""
    # With different inputs, processes could take different paths, and wait for each other forever.
    torch.manual_seed(0)
    if keywords["input_data"] is None:
        given = (keywords[name] for name in ("input_size", "batch_dim", "dtypes", "device"))
        # With a device, torchinfo would move the net.
        inputs = {"input_data": random_inputs(*given), "input_size": None, "device": None}
        keywords = {**keywords, **inputs}
    following = Following(net)
    with untouched(net, keep_hooks=False, keep_random=True), following.followed():
        labelled = _dry_run(net, keywords, net, grad)
    mark(labelled[1], following)
    return labelled


def _faithful_copy(net: nn.Module, keep_hooks: bool) -> nn.Module | None:
    try:
        twin = copy_net(net, keep_hooks=keep_hooks)
    except Exception:
        return None
    names = [(name, type(m)) for name, m in net.named_modules(remove_duplicate=False)]
    copied = [(name, type(m)) for name, m in twin.named_modules(remove_duplicate=False)]
    own = {id(module) for module in net.modules()}
    is_separate = not any(id(module) in own for module in twin.modules())
    return twin if is_separate and names == copied else None


@dataclass
class _DryRunError(Exception):
    cause: BaseException


def _cause_of(error: Exception) -> BaseException:
    """Return the net's exception, which torchinfo wraps."""
    wrapped = error.__cause__ if "Failed to run torchinfo" in str(error) else None
    return wrapped or error


def _dry_run(
    twin: nn.Module, keywords: dict[str, Any], net: nn.Module, grad: bool, followed: bool = True
) -> _Labelled:
    names = dict(net.named_modules(remove_duplicate=False))
    copies = twin.named_modules(remove_duplicate=False)
    originals = {id(module): names[name] for name, module in copies}
    trace, flow = _CallTrace(twin, grad=grad), Flow(twin)
    try:
        following = flow.followed() if followed else contextlib.nullcontext()
        with quiet(), forgiving(), trace.watching(), following:
            statistics = Statistics.of(summary(twin, **_dry_run_keywords(keywords)), originals)
    except UnsupportedTorchError:
        raise
    except Exception as error:
        raise _DryRunError(_cause_of(error)) from error
    calls = [call for call in trace.calls if id(call.module) in originals]
    rows = list(_rows(statistics.summary_list, calls))
    point_to(statistics.summary_list, originals)
    # For a shared module, its first name.
    first_names = {id(module): name for name, module in net.named_modules()}
    layers = [_layer(info, call, first_names[id(info.module)]) for info, call in rows]
    if all(layer.depth for layer in layers):
        # Its class has a call of its own, which passes hooks by.
        root = LayerInfo("", net, 0)
        root.depth_index, root.num_params = 1, statistics.total_params
        layers.insert(0, _layer(root, None, ""))
    return statistics, Architecture(layers, _names(net, layers)), trace, flow


def _dry_run_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    copied = {
        name: copy_inputs(value)
        for name, value in keywords.items()
        if name not in _OF_TORCHINFO or name == "input_data"
    }
    copied["input_data"] = _understood_by_torchinfo(copied["input_data"])
    verbose = 0 if keywords["verbose"] in (None, 0, 1, 2) else keywords["verbose"]
    return {**keywords, **copied, "verbose": verbose}


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = shapes_of(describe(args))
    named = shapes_of(describe(kwargs))
    if not kwargs:
        return shapes[0] if len(args) == 1 else shapes
    return (*shapes, named) if args else named


def _rows(infos: list[LayerInfo], calls: list[_Call]) -> Iterator[tuple[LayerInfo, _Call | None]]:
    """Pair each row with its call.

    torchinfo adds a row when a call starts, and later inserts rows for containers that were not
    called, each before that of a descendant. A row of another module than the next call's is one.
    """
    pending = iter(calls)
    upcoming = next(pending, None)
    for info in infos:
        if upcoming is not None and upcoming.module is info.module:
            yield info, upcoming
            upcoming = next(pending, None)
        else:
            yield info, None


def _layer(info: LayerInfo, call: _Call | None, name: str) -> Layer:
    ran = call if call is not None and call.completion is not None else None
    return Layer(
        label=Label((info.depth, info.depth_index or 0)),
        name=name,
        module=info.module,
        type_name=plain_type(info.module).__name__,
        call=call.number if call is not None else 0,
        input_shape=ran and ran.input_shape,
        num_params=int(info.num_params),
        executed=ran is not None,
        completion=ran.completion if ran else None,
        output_spec=ran and ran.output_spec,
    )


def _names(net: nn.Module, layers: list[Layer]) -> dict[str, tuple[DepthIdx, ...]]:
    labels: dict[int, dict[DepthIdx, None]] = {}
    for layer in layers:
        labels.setdefault(id(layer.module), {})[layer.label] = None
    modules = net.named_modules(remove_duplicate=False)
    return {name: tuple(labels.get(id(module), ())) for name, module in modules}

"""Labelling: one dry run of a copy of the net, interpreted as torchinfo does."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.errors import LabellingError, MissingInputError, UnsupportedTorchError, warn
from scio_recorder.layer import DepthIdx, Label, Layer, Operation, shapes_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.attention import checked_order
from scio_recorder.nets.labelling.torchinfo import (
    CallTrace,
    Row,
    Statistics,
    formatting,
    random_inputs,
)
from scio_recorder.nets.operations import OperationTrace, ValueRequests
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.refusals import (
    check_supported,
    failed_run,
    no_input,
    no_room,
    not_a_size,
    takes_any_keyword,
    unknown_keyword,
)
from scio_recorder.nets.sharded import Following, is_sharded, mark_shards, plain_type
from scio_recorder.nets.state.moment import preserved_rng
from scio_recorder.nets.state.untouched import (
    copied_bytes,
    copy_inputs,
    quiet,
    run_copy,
    untouched,
)
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import booleans
from scio_recorder.tensors.copies import is_out_of_memory
from scio_recorder.tensors.structures import map_tensors

# Keywords of ``torchinfo.summary``, with the values that they have unless they are given.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("input_size", "input_data", "batch_dim", "device", "dtypes")),
    "col_names": ("input_size", "output_size", "num_params", "params_percent"),
    "row_settings": ("var_names", "depth"),
    "depth": sys.maxsize,
    "col_width": 25,
    "mode": "eval",
    "verbose": 0,
    "cache_forward_pass": False,
}


def label_net(
    net: nn.Module, *, force_static_flow: bool = True, **summary_kwargs: Any
) -> tuple[Statistics, Architecture]:
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
    booleans(LabellingError, force_static_flow=force_static_flow)
    check_supported(net, summary_kwargs.get("device"))
    keywords = _keywords(net, summary_kwargs)
    # An interruption can come after torch has turned gradients off and before it restores them.
    with preserved_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            inputs = _inputs(net, keywords)
        except Exception as error:
            raise _failed(net, keywords, error) from error
        labelled = _label(net, keywords, inputs, is_followed=force_static_flow)
        if labelled.asks_for_values:
            from scio_recorder.nets.labelling.data_flow import check_static_flow

            check_static_flow(net, *inputs, mode=keywords["mode"], grad=labelled.grad)
    if keywords["verbose"]:
        print(labelled.statistics)
    return labelled.statistics, labelled.architecture


def list_operations(
    net: nn.Module, architecture: Architecture, **summary_kwargs: Any
) -> list[Operation]:
    """Run a copy of a net as for labelling, and list what the own code of its modules calls.

    Parameters
    ----------
    net : torch.nn.Module
        The net. Neither it nor any global state is changed.
    architecture : Architecture
        Its layers.
    **summary_kwargs
        The keywords with which it was labelled.

    Returns
    -------
    list of Operation
        In the order in which they returned.

    Raises
    ------
    LabellingError
        The net fails, or is not as it was when it was labelled.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> _, architecture = label_net(net, input_size=(1, 4))
    >>> [one.name for one in list_operations(net, architecture, input_size=(1, 4))]
    ['0/linear:0', '1/relu:0']
    """
    keywords = _keywords(net, summary_kwargs)
    with preserved_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
        inputs = _inputs(net, keywords)
        try:
            labelled = _label(net, keywords, inputs, OperationTrace)
        except LabellingError:
            # The network was moved since, and its inputs were not.
            inputs = _moved_to(net, inputs)
            labelled = _label(net, keywords, inputs, OperationTrace)
        if labelled.architecture != architecture:
            raise LabellingError(
                "the layers of the net are not those of its labelling any more, so its operations "
                "have no labels: construct the Recorder again"
            )
        attention = checked_order(
            labelled.trace.attention(),
            inputs,
            lambda other: _label(net, keywords, other, OperationTrace).trace.attention(),
        )
        operations: list[Operation] = labelled.trace.operations(architecture, attention)
        return operations


def labelled_example(net: nn.Module, **summary_kwargs: Any) -> tuple[Inputs, bool]:
    """Return the inputs with which a net was labelled, and whether it was in training mode.

    Parameters
    ----------
    net : torch.nn.Module
        The net. The inputs are on its device, and those with a fraction are of its dtype.
    **summary_kwargs
        The keywords with which it was labelled.

    Examples
    --------
    >>> inputs, is_training = labelled_example(nn.ReLU(), input_size=(1, 4))
    >>> inputs.args[0].shape, is_training
    (torch.Size([1, 4]), False)
    """
    keywords = _keywords(net, summary_kwargs)
    with preserved_rng():
        return _moved_to(net, _inputs(net, keywords)), keywords["mode"] == "train"


def _keywords(net: nn.Module, summary_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    not_none = {name: value for name, value in summary_kwargs.items() if value is not None}
    keywords = _DEFAULTS | not_none
    # The net's own.
    further = {name: value for name, value in summary_kwargs.items() if name not in _DEFAULTS}
    size, data = keywords["input_size"], keywords["input_data"]
    unknown = unknown_keyword(net, further, [*_DEFAULTS, "force_static_flow"], "Recorder()")
    if size is None and data is None:
        raise MissingInputError(unknown or no_input(net, [*further]))
    if unknown and not takes_any_keyword(net):
        raise LabellingError(unknown)
    if unknown := unknown_keyword(net, further, ["force_static_flow"], "Recorder()"):
        warn(unknown)
    if size is not None and data is not None:
        raise LabellingError("give either input_size= or input_data=, not both")
    if size is not None and not isinstance(size, list | tuple):
        raise LabellingError(not_a_size(size))
    kinds = keywords["dtypes"]
    if not (kinds is None or all(isinstance(kind, torch.dtype) for kind in kinds)):
        raise LabellingError(f"dtypes={kinds!r}: write one for each input, as [torch.float32]")
    if keywords["mode"] not in ("eval", "train"):
        raise LabellingError(f'mode={keywords["mode"]!r}: write "eval" or "train"')
    try:
        return keywords | {"formatting": formatting(keywords), "further": further}
    except (ValueError, TypeError) as error:
        raise LabellingError(f"the table can't be made: {error}") from error


def _inputs(net: nn.Module, keywords: Mapping[str, Any]) -> Inputs:
    """Return what the network is run on."""
    size, data, device = (keywords[name] for name in ("input_size", "input_data", "device"))
    if size is not None:
        if is_sharded(net):
            # With different inputs, processes could take different paths, and wait for each other
            # forever.
            torch.manual_seed(0)
        home, dtype = _home(net)
        # One for each input: there are at most as many inputs as entries of their sizes.
        kinds = keywords["dtypes"] or [dtype] * len(size)
        data = random_inputs(size, keywords["batch_dim"], kinds, device or home)
    is_mapping = isinstance(data, Mapping)
    args = () if is_mapping else tuple(data) if isinstance(data, list | tuple) else (data,)
    inputs = Inputs(args, {**(data if is_mapping else {}), **keywords["further"]})
    return inputs if device is None else map_tensors(lambda tensor: tensor.to(device), inputs)


def _home(net: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device of a network, and the dtype of its first weights with a fraction."""
    state = [*net.parameters(), *net.buffers()]
    dtypes = (tensor.dtype for tensor in state)
    numbers = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return state[0].device if state else torch.device("cpu"), next(numbers, torch.float)


def _moved_to(net: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs on the device of a network, those with a fraction in its dtype."""
    device, dtype = _home(net)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    result: Inputs = map_tensors(moved, inputs)
    return result


class _Labelled(NamedTuple):
    """What one run of a network shows."""

    statistics: Statistics
    architecture: Architecture
    asks_for_values: bool
    grad: bool
    # Of the kind that was asked for.
    trace: Any


def _label(
    net: nn.Module,
    keywords: Mapping[str, Any],
    inputs: Inputs,
    trace: type[CallTrace] = CallTrace,
    *,
    is_followed: bool = False,
) -> _Labelled:
    failure: _FailedRunError | None = None
    in_step = is_sharded(net)
    # The user's hooks may have side effects, so they are left out, unless the net can't run without
    # them.
    # Gradients cost memory, so they are off, unless the net itself differentiates something.
    hooks = [vars(part).get(name) for part in net.modules() for name in private.FORWARD_HOOKS]
    hook_choices = (False, True) if any(hooks) and not in_step else (False,)
    # Functions that compile themselves, such as `flex_attention`, fail while they are followed, on
    # older versions of torch.
    follow_choices = (is_followed,) if in_step else dict.fromkeys((is_followed, False))
    choices = itertools.product(follow_choices, hook_choices, (False, True))
    for follow, keep_hooks, grad in choices:
        run = partial(_dry_run, net, keywords, inputs, trace, grad, follow)
        try:
            labelled = _label_in_step(net, run) if in_step else _label_once(net, run, keep_hooks)
        except _FailedRunError as error:
            # A failure with gradients may be due to the gradients.
            failure = failure if grad else error
        except RuntimeError as error:
            # The copy itself has failed.
            if is_out_of_memory(error):
                raise _failed(net, keywords, error) from error
            raise
        else:
            # Frames that hold an error which holds them live, with the copy, until garbage is
            # collected.
            failure = None
            return labelled
    assert failure is not None
    try:
        raise _failed(net, keywords, failure.cause) from failure.cause
    finally:
        del failure


def _failed(net: nn.Module, keywords: Mapping[str, Any], cause: BaseException) -> LabellingError:
    is_short = is_out_of_memory(cause)
    text = no_room(copied_bytes(net)) if is_short else failed_run(net, keywords, cause)
    return LabellingError(text)


def _label_once(
    net: nn.Module, run: Callable[[nn.Module], _Labelled], keep_hooks: bool
) -> _Labelled:
    labelled = run_copy(net, run, keep_hooks=keep_hooks)
    if labelled is not None:
        return labelled
    # A part of the net can't be copied, or leads from the copy back to the net, as closures do.
    with untouched(net, keep_hooks=keep_hooks, keep_random=True):
        return run(net)


def _label_in_step(net: nn.Module, run: Callable[[nn.Module], _Labelled]) -> _Labelled:
    """Label a net that is spread over processes, all of which take part."""
    following = Following(net)
    with untouched(net, keep_hooks=False, keep_random=True), following.followed():
        labelled = run(net)
    mark_shards(labelled.architecture, following)
    return labelled


@dataclass
class _FailedRunError(Exception):
    cause: BaseException


def _dry_run(
    net: nn.Module,
    keywords: Mapping[str, Any],
    inputs: Inputs,
    trace_type: type[CallTrace],
    grad: bool,
    is_followed: bool,
    twin: nn.Module,
) -> _Labelled:
    """Run a copy of the network, or itself."""
    trace, requests = trace_type(net, twin, keywords["batch_dim"]), ValueRequests()
    block = requests.followed() if is_followed else contextlib.nullcontext()
    args, kwargs = copy_inputs(inputs)
    with quiet(), trace.watched(), block, torch.set_grad_enabled(grad):
        try:
            twin.train(keywords["mode"] == "train")
            if keywords["device"] is not None and not is_sharded(net):
                twin.to(keywords["device"])
            twin(*args, **kwargs)
        except UnsupportedTorchError:
            raise
        except Exception as error:
            raise _FailedRunError(error) from error
    rows = trace.labelled_rows()
    size, data = keywords["input_size"], keywords["input_data"]
    received = inputs.args if data is None else data
    statistics = Statistics(rows, size or shapes_of(data), received, keywords["formatting"])
    # For a shared module, its first name.
    first_names = {id(module): name for name, module in net.named_modules()}
    layers = [_layer(row, first_names[id(row.module)]) for row in rows]
    if all(layer.depth for layer in layers):
        # The class of the network overrides `__call__`, so its hooks did not run.
        root = Row("", net, 0, None)
        root.depth_index, root.num_params = 1, statistics.total_params
        layers.insert(0, _layer(root, ""))
    architecture = Architecture(layers, _names(net, layers))
    return _Labelled(statistics, architecture, requests.were_made, grad, trace)


def _layer(row: Row, name: str) -> Layer:
    has_returned = row.completion is not None
    return Layer(
        label=Label((row.depth, row.depth_index or 0)),
        name=name,
        module=row.module,
        type_name=plain_type(type(row.module)).__name__,
        call=row.call,
        input_shape=row.input_shape if has_returned else None,
        num_params=int(row.num_params),
        executed=has_returned,
        completion=row.completion,
        output_spec=row.output_spec,
        called_as=row.called_as,
    )


def _names(net: nn.Module, layers: list[Layer]) -> dict[str, tuple[DepthIdx, ...]]:
    labels: dict[int, dict[DepthIdx, None]] = {}
    for layer in layers:
        labels.setdefault(id(layer.module), {})[layer.label] = None
    modules = net.named_modules(remove_duplicate=False)
    return {name: tuple(labels.get(id(module), ())) for name, module in modules}

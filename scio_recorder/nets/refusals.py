"""Messages, with advice, about nets that can't be observed or that fail."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from scio_recorder.errors import LabellingError, RecorderError, UnsupportedNetError
from scio_recorder.interpreter import objects_in
from scio_recorder.layer import Layer, few, map_leaves
from scio_recorder.nets.architecture import Architecture, nearest
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.sharded import refuse_part_of_fsdp
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import signature_of, takes, usable_device
from scio_recorder.tensors.properties import dtype_name
from scio_recorder.tensors.structures import Apart, holder_out_of_sight, tensors

_SHOWN = 8
# One of these is in each message of torch about a dtype.
_ABOUT_DTYPES = re.compile("type|not implemented for", re.IGNORECASE)
# Keywords of a call of the recorder, and of `record`.
_OF_CALL = ("activation_postproc", "dont_record")
_OF_RECORD = ("inputs", "gradients", "copy", "offload", "calls", "attention")
_ADVICE = {
    "input_size": "input_size includes the batch dimension, as in (1, 3, 32, 32) for an image, and "
    "its other lengths must be those that the network takes. ",
    "float": "It gives float inputs; for others write dtypes=[torch.long], or give input_data",
    "dtypes": "Without dtypes= its inputs have the dtype of the weights",
    "input_data": "input_data is what forward takes: a tensor, a tuple of positional inputs or a "
    'dict of keyword inputs, such as tokenizer(texts, return_tensors="pt")',
    "meta": "The parameters have no data here, as when they are offloaded, nor has an input made "
    "of input_size: give input_data= with a tensor on the device where the network runs",
}


def check_supported(net: Any, device: Any = None) -> None:
    """Refuse a net that can't be observed, and a device that isn't there.

    Parameters
    ----------
    net : Any
        The user's object.
    device : any, optional
        Where the net is to be labelled.

    Raises
    ------
    LabellingError
        It is no device of this machine.
    UnsupportedNetError
        It is not a module, or hooks of its submodules don't fire as they should.

    Examples
    --------
    >>> check_supported(nn.ReLU)
    Traceback (most recent call last):
    scio_recorder.errors.UnsupportedNetError: ... write ReLU(...)
    """
    if isinstance(net, type) and issubclass(net, nn.Module):
        raise UnsupportedNetError(
            f"{net.__name__} is a class, not a net: write {net.__name__}(...)"
        )
    if not isinstance(net, nn.Module):
        raise UnsupportedNetError(
            f"a net must be a torch.nn.Module, not {type(net).__name__}: make the module, load "
            "weights into it, and give that"
        )
    if not takes_hooks(net):
        raise UnsupportedNetError(
            f"{type(net).__name__} is a TorchScript module, whose submodules run without hooks: "
            "give the module that it was made from"
        )
    if private.is_compiled(net):
        raise UnsupportedNetError(
            "the net is compiled already, and compiled code ignores hooks that are added later: "
            "wrap it first and compile afterwards, as in rnet = Recorder(net, ...); rnet.compile()"
        )
    if device is not None:
        usable_device(device, LabellingError)
    refuse_part_of_fsdp(net)
    count = len(list(net.modules()))
    for name, module in net.named_modules(remove_duplicate=False):
        if name.count(".") >= count:
            raise UnsupportedNetError(
                f"the module {name!r} contains itself: hold a reference to an outer module in a "
                "tuple, so that it does not become a submodule"
            )
        _check_module(name, module)


def _check_module(name: str, module: nn.Module) -> None:
    where = f"the module {name!r}" if name else "the net"
    if isinstance(module, nn.DataParallel):
        raise UnsupportedNetError(
            f"{where} is a DataParallel, whose replicas share hooks and lose the records: use "
            "torch.nn.parallel.DistributedDataParallel, or give its .module"
        )
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(is_lazy(tensor) for tensor in tensors):
        raise UnsupportedNetError(
            f"{where} ({type(module).__name__}) is not initialised, and labelling must not "
            "do that for you: run the net once on an input, then wrap it"
        )


def not_a_size(value: Any) -> str:
    """Return the message about an ``input_size`` that is neither a tuple nor a list.

    Examples
    --------
    >>> not_a_size(8)
    'input_size=8 is no shape: write input_size=(1, 8), batch dimension included'
    """
    if isinstance(value, Tensor | np.ndarray):
        return (
            f"input_size is an input, not a shape: write input_data=, with what was given, or "
            f"input_size={tuple(value.shape)}"
        )
    shape = (1, value) if isinstance(value, int) else (1, 3, 32, 32)
    return f"input_size={value!r} is no shape: write input_size={shape}, batch dimension included"


def _as_text(value: Any) -> str:
    holds_tensors = isinstance(value, Tensor | Mapping | list | tuple) and tensors(value)
    return f"{'tensors of shape ' * bool(holds_tensors)}{map_leaves(_shape, value)!r:.300}"


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor | np.ndarray):
        return tuple(leaf.shape)
    return leaf if leaf is None or isinstance(leaf, int | float | str) else type(leaf)


def _argument_names(net: nn.Module) -> list[str]:
    parameters = signature_of(net.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def takes_any_keyword(net: nn.Module) -> bool:
    """Whether a network's forward takes keywords of any name."""
    parameters = signature_of(net.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@functools.cache
def _is_like_ours(name: str) -> bool:
    """Whether a keyword of a call may be meant for the recorder; calls repeat their keywords."""
    return name in _OF_RECORD or bool(nearest(name, _OF_CALL))


def unknown_keyword(
    net: nn.Module,
    keywords: Mapping[str, Any],
    known: Sequence[str] = _OF_CALL,
    caller: str = "rnet()",
) -> str:
    """Return the message about a keyword that neither a recorder nor the forward has; or nothing.

    Where the forward takes any keyword, it is about one that is nearly one of the recorder.

    Examples
    --------
    >>> unknown_keyword(nn.ReLU(), {"dont_recrd": True})
    "rnet() and the network's forward name no dont_recrd=; the closest name is 'dont_record'"
    """
    if not keywords or (known is _OF_CALL and not any(map(_is_like_ours, keywords))):
        return ""
    taken, takes_any = _argument_names(net), takes_any_keyword(net)
    for name, value in keywords.items():
        near = nearest(name, known if takes_any else [*known, *taken])
        if name in _OF_RECORD and value is True:
            near = f": write rnet.record(..., {name}=True)"
        if name not in taken and (near or not takes_any):
            return f"{caller} and the network's forward name no {name}={near}"
    return ""


def no_input(net: nn.Module, keywords: Sequence[str]) -> str:
    """Return the message about a `Recorder` without an input, given only other keywords.

    Examples
    --------
    >>> no_input(nn.Bilinear(2, 2, 1), ["input1", "input2"])
    'labelling runs the net once ... write input_data={"input1": input1, "input2": input2}'
    >>> no_input(nn.Sequential(nn.Linear(4, 2)), [])
    'labelling runs the net once ... write input_size=(1, 4), batch dimension included, ...'
    """
    weighted = (
        part for part in net.modules() if next(part.parameters(recurse=False), None) is not None
    )
    first = next(weighted, None)
    size = (1, first.in_features) if isinstance(first, nn.Linear) else (1, 3, 32, 32)
    advice = (
        f"write input_size={size}, batch dimension included, or input_data= a tensor, a "
        "tuple of positional or a dict of keyword inputs"
    )
    if keywords and set(keywords) <= set(_argument_names(net)):
        entries = ", ".join(f'"{name}": {name}' for name in keywords)
        advice = f"write input_data={{{entries}}}"
    return f"labelling runs the net once and needs an input for that: {advice}"


def failed_run(net: nn.Module, keywords: Mapping[str, Any], cause: BaseException) -> str:
    """Return the message of a dry run that failed.

    Parameters
    ----------
    net : torch.nn.Module
        The network that failed.
    keywords : Mapping
        The keywords of `Recorder`.
    cause : BaseException
        The error that the network raised.

    Returns
    -------
    str
        What the net was given, its error, and what to give instead.

    Examples
    --------
    >>> keywords = {"input_data": "a text"}
    >>> print(failed_run(nn.ReLU(), keywords, TypeError("must be Tensor")))
    the dry run of ReLU on input_data='a text' failed with TypeError: must be Tensor
    input_data is what forward takes: a tensor, a tuple of positional inputs or a dict of keyword \
inputs, such as tokenizer(texts, return_tensors="pt")
    """
    keyword = "input_size" if keywords["input_data"] is None else "input_data"
    value, advice = keywords[keyword], _ADVICE[keyword]
    if keyword == "input_size":
        advice += _ADVICE["dtypes" if keywords["dtypes"] else "float"]
        if any(parameter.is_meta for parameter in net.parameters()):
            advice = _ADVICE["meta"]
    inputs = Inputs.of(tuple(value) if isinstance(value, list) else value)
    cast = inputs and cast_for(net, inputs, cause)
    if cast:
        advice = f"Probably {cast[1]}: convert it, as input_data=x.{cast[0]} does"
    else:
        advice += _advice_on_arguments(net, inputs, cause)
    parts = (*inputs.args, *inputs.kwargs.values()) if inputs else (value,)
    if any(isinstance(part, np.ndarray) for part in parts):
        advice = "Probably it takes tensors, not NumPy arrays: convert them by torch.from_numpy(x)"
    is_loader = inputs is None and isinstance(value, Iterable)
    if (is_loader and not isinstance(value, str | np.ndarray)) or _is_batch(net, keyword, inputs):
        advice = (
            "Probably it takes one batch of a loader: give next(iter(loader)), or of (inputs, "
            "labels) next(iter(loader))[0]"
        )
    if isinstance(cause, TypeError) and isinstance(value, list) and not tensors(value):
        advice = "Probably it takes tensors, not lists: convert them by torch.tensor(x)"
    is_shape = keyword == "input_size" and all(isinstance(part, int) for part in parts)
    if is_shape and (len(parts) == 1 or (len(parts) == 3 and parts[0] in (1, 3))):
        advice += f". For one sample of shape {parts}, write input_size={(1, *parts)}"
    if type(net).forward is nn.Module.forward:
        parts_of = "*net.values()" if isinstance(net, nn.ModuleDict) else "*net"
        advice = f"It has no forward: write nn.Sequential({parts_of}), or a module that calls them"
    if isinstance(cause, RecursionError):
        advice = (
            "Beside each module that runs inside another, labelling has calls of its own: raise "
            "Python's limit first, as by sys.setrecursionlimit(10_000)"
        )
    return (
        f"the dry run of {type(net).__name__} on {keyword}={_as_text(value)} failed with "
        f"{type(cause).__name__}: {cause}\n{advice}"
    )


def no_room(copied_bytes: int) -> str:
    """Return the message about memory that labelling lacks, for a copy of the network and a pass.

    Examples
    --------
    >>> no_room(1 << 29)[:42], "takes 512 MiB beside it" in no_room(1 << 29)
    ('there is too little memory for labelling: ', True)
    """
    return (
        "there is too little memory for labelling: the copy of the network that is run in its "
        f"place takes {copied_bytes / 2**20:,.0f} MiB beside it, and a pass on top (weights of "
        "more than 1 GiB are not copied). Label with a smaller input, free memory, or wrap the "
        "network on the CPU and move it afterwards"
    )


def _is_batch(net: nn.Module, keyword: str, inputs: Inputs | None) -> bool:
    """Whether several inputs were given to a network that takes one, as a loader's batch has."""
    count = 0 if inputs is None or keyword == "input_size" else len(inputs.args)
    return count > 1 and takes(net.forward, 1) and not takes(net.forward, count)


def _advice_on_arguments(net: nn.Module, inputs: Inputs | None, cause: BaseException) -> str:
    """Return a sentence on what a network takes; empty if its error is about something else."""
    names = _argument_names(net)
    if _ABOUT_DTYPES.search(str(cause).replace("NoneType", "")) or len(names) < 2:
        return ""
    decoder = "decoder_input_ids"
    if decoder in names[1:] and inputs and decoder not in inputs.kwargs:
        return (
            f". It has a decoder, which needs an input, too: write input_data={{"
            f'"{names[0]}": x, "{decoder}": ids}}'
        )
    return f". Here its forward takes {few(names, _SHOWN)}"


def cast_for(net: nn.Module | None, inputs: Inputs, error: BaseException) -> tuple[str, str] | None:
    """Return the method that gives a network's first tensor another dtype or device, and why.

    Those of the first module with parameters of its own are expected.

    Parameters
    ----------
    net : torch.nn.Module or None
        The network.
    inputs : Inputs
        What it was given.
    error : BaseException
        The error that it raised.

    Returns
    -------
    (str, str) or None
        None if the error is about something else.

    Examples
    --------
    >>> error = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
    >>> inputs = Inputs((torch.ones(2, 3, dtype=torch.float64),), {})
    >>> cast_for(nn.Linear(3, 2), inputs, error)
    ('to(torch.float32)', 'the input is float64, and the weights of the network take float32')
    """
    values = (*inputs.args, *inputs.kwargs.values())
    tensor = next((value for value in values if isinstance(value, Tensor)), None)
    is_about_either = _ABOUT_DTYPES.search(str(error)) or "device" in str(error)
    if net is None or tensor is None or not is_about_either:
        return None
    received = tensor.dtype
    for module in net.modules():
        parameter = next(module.parameters(recurse=False), None)
        if parameter is not None:
            device = parameter.device
            # What is offloaded has its device later.
            if tensor.device != device and not parameter.is_meta:
                return f'to("{device}")', (
                    f"the input is on {tensor.device}, and the weights of the network on {device}"
                )
            takes_indices = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            wanted = torch.int64 if takes_indices else parameter.dtype
            if received == wanted or wanted.itemsize == 1 or "device" in str(error):
                return None
            return f"to({wanted})", (
                f"the input is {dtype_name(received)}, and the weights of the network take "
                f"{dtype_name(wanted)}"
            )
    return None


def runs_without_gradients(error: BaseException) -> str:
    """Return a sentence on a net that differentiates in its forward; empty for other errors.

    Examples
    --------
    >>> runs_without_gradients(RuntimeError("element 0 of tensors does not require grad"))[:46]
    'the network runs without gradients here, and d'
    """
    if "does not require grad" not in str(error):
        return ""
    return (
        "the network runs without gradients here, and differentiates inside its forward: put `with "
        "torch.enable_grad():` around that, or collect in passes of your own, inside `with "
        "rnet.collecting(...) as collection:`"
    )


def failing_layer(error: BaseException, architecture: Architecture) -> str:
    """Return the innermost module of the net that was running, from the traceback."""
    rows = {id(row.module): row for row in architecture.values() if row.module is not None}
    layers = [row for part in objects_in(error.__traceback__) if (row := rows.get(id(part)))]
    if not layers:
        return ""
    running = layers[-1]
    calls = architecture.labels_of(running.name)
    # For a module that runs several times, the failed call is unknown.
    return str(running) if len(calls) <= 1 else f"{running.name} ({running.type_name})"


def explain_call(
    error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any], architecture: Architecture
) -> None:
    """Add notes to a network's own error: what was probably meant, or else which layer raised it.

    Parameters
    ----------
    error : Exception
        The error.
    args, kwargs
        What the network was given.
    architecture : Architecture
        Its layers.
    """
    if isinstance(error, RecorderError):
        return
    layer, net = failing_layer(error, architecture), architecture[0, 1].module
    if net is not None and "unexpected keyword" in str(error):
        names = few(_argument_names(net), _SHOWN)
        error.add_note(unknown_keyword(net, kwargs) or f"Its forward takes {names}.")
    elif (
        kwargs and not tensors((args, kwargs)) and any(isinstance(x, list) for x in kwargs.values())
    ):
        error.add_note('Its inputs are lists: write tokenizer(texts, return_tensors="pt").')
    if not (args or kwargs):
        error.add_note("The network was given no input: write one, as in rnet(x).")
    elif isinstance(error, TypeError) and any(map(callable, args[1:])):
        error.add_note("If the function is a post-processor, write activation_postproc=.")
    elif len(args) == 1 and (note := _note_on_batch(args[0], error)):
        error.add_note(f"The network was given {note}.")
    shape = architecture[0, 1].input_shape
    if layer and not getattr(error, "__notes__", ()):
        error.add_note(
            f"Layer {layer} raised this. The network was labelled with inputs of shape {shape}."
        )


def _note_on_batch(batch: Any, error: Exception) -> str:
    """Say what an only input is that is no tensor, and how it is given; empty for others."""
    several = isinstance(batch, list | tuple)
    if isinstance(batch, str) or (several and batch and {*map(type, batch)} == {str}):
        return 'text: write rnet(**tokenizer(texts, return_tensors="pt"))'
    if isinstance(batch, np.ndarray):
        return "a NumPy array: write rnet(torch.from_numpy(x))"
    if isinstance(batch, DataLoader):
        return "a loader: write rnet.collect(loader), or rnet(batch) for each batch"
    if isinstance(batch, Mapping):
        return (
            f"one {type(batch).__name__}. If its entries are inputs by keyword, as in collect, "
            "write rnet(**batch)"
        )
    if several and not tensors(batch):
        return f"a {type(batch).__name__} without tensors: write rnet(torch.tensor(x))"
    if several and isinstance(error, TypeError):
        return (
            f"one {type(batch).__name__}. Of such a batch, collect takes the first part, but a "
            "call hands on what it is given: write rnet(batch[0]), or rnet(*batch) for several "
            "inputs"
        )
    return ""


def refuse_unkeepable(layer: Layer, apart: Apart, searched: set[object]) -> None:
    """Refuse what a layer returns if no copy of it would have all its tensors.

    Parameters
    ----------
    layer : Layer
        The layer.
    apart : Apart
        What it returns, taken apart.
    searched : set
        The layers that were found in order, with the types of what they return: to look at all that
        an object holds takes long.
    """
    if isinstance(apart.value, Iterator):
        raise UnsupportedNetError(
            f"layer {layer} returns a {type(apart.value).__name__}, which can be read only once, "
            "and the network reads it: record the layers inside this one"
        )
    key = (layer.label, *[type(part.value) for part in apart.shared])
    holder = None if key in searched else holder_out_of_sight(apart.shared)
    if holder is not None:
        raise UnsupportedNetError(
            f"layer {layer} returns a {type(holder).__name__} with tensors inside it, as in a "
            "closure, a bound method or the keys of a dictionary. The network can overwrite them, "
            "and no record can copy them: let the layer return the tensors themselves, or record "
            "the layers inside this one"
        )
    searched.add(key)
    if private.transform_around() is not None:
        raise UnsupportedNetError(
            f"layer {layer} runs inside a torch.func transform (vmap, grad, ...), whose tensors "
            "die with the transform: record a layer around the transform"
        )

"""Errors of batches: naming the batch that failed, the layer, and the input."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from scio_recorder.errors import CollectError, RecorderError, caught_as
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.wrong_dtype import cast_for
from scio_recorder.recording.feed import advice_on_lists
from scio_recorder.tensors.dtypes import dtype_name


@contextmanager
def naming_batch(
    number: int, architecture: Architecture, net: nn.Module, inputs: Inputs, batch: Any = None
) -> Iterator[None]:
    """Let an error of a pass inside the block name the batch that failed, and the layer.

    It can also be caught as the original error.

    Parameters
    ----------
    number : int
        The number of the batch.
    architecture : Architecture
        The architecture of the net.
    net : torch.nn.Module
        The net.
    inputs : Inputs
        The net's inputs.
    batch : Any, optional
        The loader's batch, unless a function has chosen the inputs.
    """
    try:
        yield
    except RecorderError as error:
        error.add_note(f"This happened in batch {number}.")
        raise
    except Exception as error:
        refused = _refused(net, inputs, batch) if isinstance(error, TypeError) else ""
        text = refused or _failed(error, architecture, net, inputs, batch)
        raise caught_as(CollectError, error, f"batch {number}: {text}") from error


@contextmanager
def naming_part(part: int) -> Iterator[None]:
    """Let an error inside the block name the part of the dataset in which it happened."""
    try:
        yield
    except RecorderError as error:
        error.args = (f"part {part}: {error}",)
        raise
    except Exception as error:
        error.add_note(f"This happened in part {part}.")
        raise


def _failed(
    error: Exception, architecture: Architecture, net: nn.Module, inputs: Inputs, batch: Any
) -> str:
    layer = _failing_layer(error, architecture)
    text = f"layer {layer or '0-1 (root)'} raised {type(error).__name__}: {error}"
    if getattr(error, "__notes__", ()):
        # The cause is known, and it isn't the batch.
        return text
    given = [*map(_look, inputs.args)]
    given += [f"{name}={_look(one)}" for name, one in inputs.kwargs.items()]
    # A list of masks shows the number of samples, so this may come out only in the pass.
    advice = (
        advice_on_lists(inputs.kwargs)
        or _advice_on_dtype(error, net, inputs, batch)
        or f"the net was given {', '.join(given) or 'nothing'}: write to_inputs=lambda batch: ... "
        "if it takes something else"
    )
    return f"{text}; {advice}"


def _advice_on_dtype(error: Exception, net: nn.Module, inputs: Inputs, batch: Any) -> str:
    """Return a sentence on an input with a wrong dtype; empty if the error is about another."""
    found = cast_for(net, inputs, error)
    if found is None:
        return ""
    cast, reason = found
    if isinstance(batch, Mapping):
        name = next(name for name, one in inputs.kwargs.items() if isinstance(one, Tensor))
        converted = f'{{**batch, "{name}": batch["{name}"].{cast}}}'
    else:
        converted = f"{'batch' if isinstance(batch, Tensor) else 'batch[0]'}.{cast}"
    if batch is None:
        return f"{reason}: convert it in to_inputs, as x.{cast} does"
    return f"{reason}: write to_inputs=lambda batch: {converted}"


def _refused(net: nn.Module, inputs: Inputs, batch: Any) -> str:
    """Return a sentence on why a net's forward can't be called like this; empty if it can."""
    try:
        signature = inspect.signature(net.forward)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as reason:
        names = signature.parameters
        unknown = [name for name in inputs.kwargs if name not in names]
        if not unknown:
            failed = f"the net's forward can't be called with it: {reason}."
            needed = [
                name
                for name, one in names.items()
                if one.default is one.empty
                and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            ]
            if inputs.args and isinstance(batch, tuple | list) and len(needed) <= len(batch):
                pairs = ", ".join(f'"{name}": batch[{at}]' for at, name in enumerate(needed))
                return (
                    f"{failed} Only the first element of a tuple goes into the net: write "
                    f"to_inputs=lambda batch: {{{pairs}}}"
                )
            return f"{failed} Write to_inputs=lambda batch: ... with inputs that forward takes"
        taken = tuple(name for name in inputs.kwargs if name in names)
        chosen = f"{{name: batch[name] for name in {taken}}}" if taken else f"batch[{unknown[0]!r}]"
        return (
            f"the net's forward takes no {', '.join(map(repr, unknown))}, which a batch has: write "
            f"to_inputs=lambda batch: {chosen}"
        )
    return ""


def _failing_layer(error: Exception, architecture: Architecture) -> str:
    """Return the innermost module of the net that was running, from the traceback."""
    rows = {id(row.module): row for row in architecture.values() if row.module is not None}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = rows.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    if found is None:
        return ""
    calls = architecture.labels_of(found.name)
    # For a module that runs several times, the failed call is unknown.
    return str(found) if len(calls) <= 1 else f"{found.name} ({found.type_name})"


def _look(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {dtype_name(value.dtype)} {list(value.shape)}"
    return f"a {type(value).__name__}"

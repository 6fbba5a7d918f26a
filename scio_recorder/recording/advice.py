"""What to say about batches: likely mistakes in feeding a net, and the batch that failed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from scio_recorder.errors import CollectError, CollectWarning, RecorderError, caught_as, warn
from scio_recorder.interpreter import objects_in
from scio_recorder.layer import few
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.refusals import cast_for
from scio_recorder.recording.feed import counting_tensor
from scio_recorder.recording.options import CollectOptions
from scio_recorder.recording.rows import Source, advice_on_lists
from scio_recorder.tensors.arguments import signature_of
from scio_recorder.tensors.properties import dtype_name

_LABELS = {"label", "labels", "target", "targets", "y"}
# Layers that drop at random, including those of other libraries, by words in the names of their
# types.
_DROPPING = re.compile("Dropout|DropPath|StochasticDepth")
_SHOWN = 3
_POSITIONS = "position_ids"


class Advice:
    """Notices likely mistakes in feeding a net: it looks once at each batch, before that runs.

    Parameters
    ----------
    net : torch.nn.Module
        The net.
    asked : CollectOptions
        How batches are read.
    is_dataset : bool, default False
        Whether a dataset is collected, so that training mode and positions of padding are likely
        mistakes as well.
    """

    def __init__(self, net: nn.Module, asked: CollectOptions, *, is_dataset: bool = False) -> None:
        self._net, self._is_dataset = net, is_dataset
        # What was warned of once is not looked for again.
        self._sees_elements = asked.to_inputs is None
        self._sees_positions = is_dataset and _takes_positions(net)
        self._sees_samples = asked.rows is None and asked.sample_ids is None

    def look_at(self, source: Source) -> None:
        """Look at a batch that is about to run.

        Parameters
        ----------
        source : Source
            The batch and the net's inputs.

        Raises
        ------
        CollectError
            It is a single sample, whose features would count as samples.
        """
        is_first = source.number == 0
        if is_first and self._is_dataset:
            _advise_evaluation(self._net)
        if self._sees_elements:
            self._sees_elements = not _advise_second_element(self._net, source.batch)
        if self._sees_positions:
            self._sees_positions = not _advise_positions(source.arguments)
        if is_first and self._sees_samples:
            _refuse_sample(source)


def _advise_evaluation(net: nn.Module) -> None:
    """Warn if a net is in training mode and has layers that behave differently there."""
    if not net.training:
        return
    differing = [
        f"{name or 'the net itself'} ({type(module).__name__})"
        for name, module in net.named_modules()
        if module.training and _differs_in_training(module)
    ]
    if differing:
        warn(
            "the net is in training mode, which changes what some layers do, here "
            f"{few(differing, _SHOWN)}: call net.eval() before collect(...) unless you mean this",
            CollectWarning,
        )


def _advise_second_element(net: nn.Module, batch: Any) -> bool:
    """Warn if forward would accept the second element of a batch too; return whether it would.

    Only a tensor that looks like an input counts, as in ``(ids, mask)``, not labels; and mappings
    that look like samples.
    """
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        return False
    first, second = batch[0], batch[1]
    if all(isinstance(each, Mapping) and each.keys() == first.keys() for each in batch):
        warn(
            f"a batch is a {type(batch).__name__} of {len(batch)} mappings with the same keys, and "
            "only the first of them goes into the net: if each is a sample, let the loader join "
            "them (DataLoader does so without collate_fn, and a tokenizer by tokenizer.pad)",
            CollectWarning,
        )
        return True
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    parameter = _second_parameter(net)
    if parameter is None or first.shape[:1] != second.shape[:1]:
        return False
    if parameter.default is not parameter.empty and second.ndim <= 1:
        # One number for each sample counts as a label if the net can do without it.
        return False
    warn(
        "only batch[0] goes into the net, but its forward would accept batch[1] as well, a "
        f"tensor of shape {tuple(second.shape)}: write to_inputs=lambda batch: tuple(batch[:2]) "
        "to give it both, or to_inputs=lambda batch: batch[0] if the first is all that it should "
        "get",
        CollectWarning,
    )
    return True


def _takes_positions(net: nn.Module) -> bool:
    """Whether a net takes ``position_ids``, or hands them on."""
    parameters = signature_of(net.forward).parameters
    takes_any = inspect.Parameter.VAR_KEYWORD in [each.kind for each in parameters.values()]
    return _POSITIONS in parameters or (takes_any and any(map(_takes_positions, net.children())))


def _advise_positions(named: Mapping[str, Any]) -> bool:
    """Warn of padding on the left that a net counts as positions; return whether there is some."""
    mask = named.get("attention_mask")
    if named.get(_POSITIONS) is not None or not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    # Padding, and behind it something else.
    if not bool(((mask[:, :1] == 0) & (mask != 0)).any()):
        return False
    warn(
        "a batch is padded on the left and has no position_ids, so the net counts positions from "
        "the padding on, unless it makes them from the mask itself, and its activations may not "
        "be those of the texts without padding: pad on the right, or give it position_ids, as in "
        "(attention_mask.cumsum(-1) - 1).clamp(min=0)",
        CollectWarning,
    )
    return True


def _refuse_sample(source: Source) -> None:
    """Refuse a first batch that is a single sample, whose features would count as samples.

    A sample lacks the first dimension of what the net was labelled with. Many nets run on both, and
    nothing else would tell. If it is only similar to a sample, there is a warning.
    """
    counted, shapes = counting_tensor(source.inputs), source.shapes_at_labelling
    before = next((shape for value, shape in shapes if value is counted), None)
    is_like_a_sample = before is not None and len(before) == counted.ndim + 1
    # A length of 1 counts as one sample, and is one in any case.
    if before is None or not is_like_a_sample or len(counted) == 1 != before[1]:
        return
    text = (
        f"batch 0 has shape {tuple(counted.shape)}, but the net was labelled with {before}: if it "
        "is one sample, give batches, as DataLoader(samples, batch_size=32) or "
        f"torch.stack(samples) makes them; if it is {len(counted)} samples, label the net with a "
        "batch of such samples, "
        "or write sample_ids=lambda batch: ... with one id for each"
    )
    if len(counted) == before[1]:
        raise CollectError(text)
    warn(text, CollectWarning)


def _second_parameter(net: nn.Module) -> inspect.Parameter | None:
    """Return the second positional parameter of a net's forward, if it can be another input."""
    parameters = list(signature_of(net.forward).parameters.values())[:2]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < 2 or any(each.kind not in kinds for each in parameters):
        return None
    second = parameters[1]
    is_option = isinstance(second.default, bool | int | float | str) or second.name in _LABELS
    return None if is_option else second


def _differs_in_training(module: nn.Module) -> bool:
    # Without statistics of their own, batch norms do the same in both modes.
    if getattr(module, "track_running_stats", False) or isinstance(module, nn.RReLU):
        return True
    if _DROPPING.search(type(module).__name__):
        rates = (getattr(module, name, None) for name in ("p", "drop_prob"))
        return next((rate for rate in rates if isinstance(rate, int | float)), 1) > 0
    rate = getattr(module, "dropout", 0)
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and rate > 0


def raise_for_batch(
    error: Exception,
    number: int,
    architecture: Architecture,
    net: nn.Module,
    inputs: Inputs,
    batch: Any = None,
) -> NoReturn:
    """Raise an error of a pass again, so that it names the batch that failed, and the layer.

    It can also be caught as the original error.

    Parameters
    ----------
    error : Exception
        The error, which is being handled.
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
    if isinstance(error, RecorderError):
        error.add_note(f"This happened in batch {number}.")
        raise error
    refused = _refused(net, inputs) if isinstance(error, TypeError) else ""
    text = refused or _failed(error, architecture, net, inputs, batch)
    raise caught_as(CollectError, error, f"batch {number}: {text}") from error


def _failed(
    error: Exception, architecture: Architecture, net: nn.Module, inputs: Inputs, batch: Any
) -> str:
    layer = _failing_layer(error, architecture)
    text = f"layer {layer or '0-1 (root)'} raised {type(error).__name__}: {error}"
    if getattr(error, "__notes__", ()):
        # The cause is known, and it isn't the batch.
        return text
    shown = [*map(_described, inputs.args)]
    shown += [f"{name}={_described(value)}" for name, value in inputs.kwargs.items()]
    # A list of masks shows the number of samples, so this may come out only in the pass.
    advice = (
        advice_on_lists(inputs.kwargs)
        or _advice_on_dtype(error, net, inputs, batch)
        or f"the net was given {', '.join(shown) or 'nothing'}: write to_inputs=lambda batch: ... "
        "if it takes something else"
    )
    return f"{text}; {advice}"


def _advice_on_dtype(error: Exception, net: nn.Module, inputs: Inputs, batch: Any) -> str:
    """Return a sentence on an input with a wrong dtype; empty if the error is about another."""
    advised = cast_for(net, inputs, error)
    if advised is None:
        return ""
    cast, reason = advised
    if isinstance(batch, Mapping):
        name = next(name for name, value in inputs.kwargs.items() if isinstance(value, Tensor))
        converted = f'{{**batch, "{name}": batch["{name}"].{cast}}}'
    else:
        converted = f"{'batch' if isinstance(batch, Tensor) else 'batch[0]'}.{cast}"
    if batch is None:
        return f"{reason}: convert it in to_inputs, as x.{cast} does"
    return f"{reason}: write to_inputs=lambda batch: {converted}"


def _refused(net: nn.Module, inputs: Inputs) -> str:
    """Return a sentence on why a net's forward can't be called like this; empty if it can."""
    signature = signature_of(net.forward)
    unknown = [name for name in inputs.kwargs if name not in signature.parameters]
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as reason:
        if not unknown:
            return (
                f"the net's forward can't be called with it: {reason}. Only the first element of a "
                "tuple goes into the net: write to_inputs=tuple if the net takes all of them, or "
                "to_inputs=lambda batch: ... with inputs that forward takes"
            )
        taken = tuple(name for name in inputs.kwargs if name not in unknown)
        chosen = f"{{name: batch[name] for name in {taken}}}" if taken else f"batch[{unknown[0]!r}]"
        return (
            f"the net's forward takes no {', '.join(map(repr, unknown))}, which a batch has: write "
            f"to_inputs=lambda batch: {chosen}"
        )
    return ""


def _failing_layer(error: Exception, architecture: Architecture) -> str:
    """Return the innermost module of the net that was running, from the traceback."""
    rows = {id(row.module): row for row in architecture.values() if row.module is not None}
    layers = [row for part in objects_in(error.__traceback__) if (row := rows.get(id(part)))]
    if not layers:
        return ""
    running = layers[-1]
    calls = architecture.labels_of(running.name)
    # For a module that runs several times, the failed call is unknown.
    return str(running) if len(calls) <= 1 else f"{running.name} ({running.type_name})"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {dtype_name(value.dtype)} {list(value.shape)}"
    return f"a {type(value).__name__}"

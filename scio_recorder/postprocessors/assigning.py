"""The forms of ``activation_postproc``, and how the post-processors of a pass act."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError, raise_of_caller, warn
from scio_recorder.layer import (
    Layer,
    Operation,
    OperationIdx,
    RowIdx,
    counted,
    describe,
    few,
    text_of,
)
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.selection import by_selector
from scio_recorder.postprocessors.knockout import KnockoutOf
from scio_recorder.postprocessors.values import check_postprocessor
from scio_recorder.postprocessors.wrapping import Heads, OnInput
from scio_recorder.tensors.arguments import takes
from scio_recorder.tensors.structures import flatten, map_tensors, tensors

# Names of attentions, and of the projections that make their queries, keys and values.
_ATTENTION = re.compile("attn|attention|multihead|mha", re.IGNORECASE)
_BEFORE_HEADS = re.compile(
    "^(to_|w_?|in_|lin_|linear_)?[qkv]|query|key|value|_[qkv]$|in_proj|c_attn", re.IGNORECASE
)

# The shape and dtype of each tensor.
_Kinds: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]
_LIKE_IT = ", such as (changed, *output[1:])"
Postprocessor: TypeAlias = Callable[[Any], Any]
Postprocessors: TypeAlias = Postprocessor | Sequence[Postprocessor] | Mapping[Any, Postprocessor]


def assign(
    architecture: Architecture, order: Sequence[RowIdx], postprocessors: Postprocessors
) -> dict[RowIdx, Postprocessor]:
    """Return the post-processor of each recorded layer that has one.

    Parameters
    ----------
    architecture : Architecture
        Resolves the selectors.
    order : sequence of (int, int)
        The recorded layers in the order in which they return.
    postprocessors : callable, sequence or mapping
        One for all; one for each recorded layer in that order; or by
        selector.

    Returns
    -------
    dict
        Label -> post-processor.

    Raises
    ------
    PostprocessorError
        Too few or too many, not callable, on a layer that is not recorded, or two on one layer.
    LayerNotFoundError
        A selector of the mapping matches no layer.

    Examples
    --------
    >>> assign(None, [(1, 1), (1, 2)], abs)
    {(1, 1): <built-in function abs>, (1, 2): <built-in function abs>}
    """
    chosen = _chosen(architecture, order, postprocessors)
    for label in chosen:
        if isinstance(label, OperationIdx) and _is_no_value(label.function):
            raise PostprocessorError(
                f"a post-processor can't act on {architecture[label]}, which gives its argument "
                "another shape or place in memory, or writes to a list of tensors: let it act on "
                "the operation before or behind it"
            )
    if not torch.compiler.is_compiling():
        _warn_of_mixed_heads(architecture, chosen)
    return chosen


@cache
def _is_no_value(function: str) -> bool:
    """Whether a function gives its arguments no numbers, but shapes or strides, or is given lists.

    Examples
    --------
    >>> [_is_no_value(name) for name in ("squeeze_", "t_", "_foreach_add_", "add_", "squeeze")]
    [True, True, True, False, False]
    """
    packet: Any = getattr(torch.ops.aten, function, None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    is_view = any(torch.Tag.inplace_view in overload.tags for overload in overloads)
    return is_view or (function.startswith("_foreach_") and function.endswith("_"))


def _chosen(
    architecture: Architecture, order: Sequence[RowIdx], postprocessors: Postprocessors
) -> dict[RowIdx, Postprocessor]:
    if isinstance(postprocessors, Mapping):
        for selector, function in postprocessors.items():
            check_postprocessor(f"selector {selector!r}", function)
        return by_selector(
            architecture, order, postprocessors, "activation_postproc", PostprocessorError
        )
    if callable(postprocessors):
        check_postprocessor("activation_postproc", postprocessors)
        return dict.fromkeys(order, postprocessors)
    # A tuple of types, since the compiler of torch 2.9 can't follow a union.
    if not isinstance(postprocessors, (list, tuple)):
        raise PostprocessorError(
            f"activation_postproc is of type {type(postprocessors).__name__}: give a callable for "
            "all recorded layers, a list with one for each in the order in which they return, or a "
            "mapping by selector"
        )
    if len(postprocessors) < len(order):
        missing = few([architecture[label] for label in order[len(postprocessors) :]], 3)
        raise PostprocessorError(
            f"activation_postproc has {len(postprocessors)} post-processors for {len(order)} "
            f"recorded layers, so none is left for {missing}: give one for each, in the order in "
            "which the layers return, or a single callable for all of them"
        )
    if len(postprocessors) > len(order):
        layers = few([architecture[label] for label in order], 3) or "no layer"
        raise PostprocessorError(
            f"activation_postproc has {len(postprocessors)} post-processors for {len(order)} "
            f"recorded layers, {layers}: give one for each, in the order in which the layers "
            "return, or a mapping by selector"
        )
    chosen = dict(zip(order, postprocessors, strict=True))
    for label, function in chosen.items():
        if isinstance(function, type) or not callable(function):
            check_postprocessor(f"layer {architecture[label]}", function)
    return chosen


def _warn_of_mixed_heads(
    architecture: Architecture, chosen: Mapping[RowIdx, Postprocessor]
) -> None:
    """Warn, once for all layers, if heads are changed behind a projection that has mixed them."""
    mixed = {}
    heads = {label: function for label, function in chosen.items() if isinstance(function, Heads)}
    for label, function in heads.items():
        layer = architecture[label]
        if right := _right_place(function, layer, architecture):
            mixed[label] = f"{function!r} acts on what layer {layer}", right
    if mixed:
        (acts, right), *others = mixed.values()
        more = f" and {counted(len(others), 'other layer')}" if others else ""
        verb = "return" if others else "returns"
        warn(
            f"{acts}{more} {verb}, in which the projection has mixed the heads already, so it "
            f"changes no head: {right}"
        )


def _right_place(heads: Heads, layer: Layer, architecture: Architecture) -> str:
    """Say where the heads of an attention are apart, if a layer's output has them mixed."""
    rows = list(architecture.values())
    if _ATTENTION.search(f"{layer.name.rpartition('.')[2]} {layer.type_name}"):
        inside = f"{layer.name}.".removeprefix(".")
        mixing = [row for row in rows if row.name.startswith(inside) and _is_projection(row)]
    else:
        around = [row for row in rows if layer.name.startswith(f"{row.name}.") or not row.name]
        is_inside = any(_ATTENTION.search(f"{row.name} {row.type_name}") for row in around)
        mixing = [layer] if is_inside and _is_projection(layer) else []
    if mixing:
        return f"{{{mixing[-1].name!r}: OnInput({heads!r})}} acts on what it receives"
    if layer.type_name == "MultiheadAttention":
        return "torch's own attention runs its projection as no layer, so there its heads stay"
    return ""


def _is_projection(row: Layer) -> bool:
    """Whether a layer of an attention is a projection behind the heads, by its name."""
    name = row.name.rstrip(".0123456789").rpartition(".")[2]
    is_linear = "Linear" in row.type_name or row.type_name == "Conv1D"
    return is_linear and not _BEFORE_HEADS.search(name)


def assign_by_key(
    keys: Mapping[object, tuple[RowIdx, ...]], postprocessors: Mapping[Any, Postprocessor]
) -> dict[RowIdx, Postprocessor]:
    """Return the post-processor of each recorded layer that has one, using only dictionaries.

    Parameters
    ----------
    keys : mapping
        Labels and names of recorded layers -> labels.
    postprocessors : mapping
        By label or name.

    Returns
    -------
    dict
        Label -> post-processor.

    Raises
    ------
    PostprocessorError
        A key that is neither a label nor a name of a recorded layer, or two for one layer.

    Examples
    --------
    >>> assign_by_key({"0": ((1, 1),)}, {"0": abs})
    {(1, 1): <built-in function abs>}
    """
    chosen: dict[RowIdx, Postprocessor] = {}
    for key, function in postprocessors.items():
        if key not in keys:
            raise PostprocessorError(
                "under torch.compile, the keys of activation_postproc are labels or qualified "
                "names of recorded layers, not patterns or other selectors"
            )
        for label in keys[key]:
            if label in chosen:
                raise PostprocessorError(
                    f"two entries of activation_postproc are for layer {text_of(label)}, the "
                    f"second by {key!r}: combine them into one"
                )
            chosen[label] = function
    return chosen


class Assigned:
    """The post-processor of each layer in one pass.

    Parameters
    ----------
    functions : mapping
        Label -> post-processor.
    run : callable, optional
        Calls a post-processor, given it and the value.

    Attributes
    ----------
    acts : bool
        Whether there is any.
    on_inputs : set of (int, int)
        The layers whose inputs are changed, instead of their outputs.

    Examples
    --------
    >>> import torch
    >>> posts = Assigned({(1, 1): torch.neg, (1, 2): OnInput(torch.neg)})
    >>> posts.after((1, 1), torch.ones(1), "1-1"), posts.after((1, 2), torch.ones(1), "1-2")
    (tensor([-1.]), tensor([1.]))
    >>> posts.before((1, 2), (torch.ones(1),), {}, "1-2")
    ((tensor([-1.]),), {})
    """

    def __init__(
        self,
        functions: Mapping[RowIdx, Postprocessor],
        run: Callable[[Postprocessor, Any], Any] = lambda function, value: function(value),
    ) -> None:
        self.functions = functions
        self._run = run
        self.acts = bool(functions)
        kinds = OnInput, KnockoutOf
        # The names of the functions on whose calls they act.
        self.operations = {at.function for at in functions if isinstance(at, OperationIdx)}
        self.on_inputs = {at for at, post in functions.items() if isinstance(post, kinds)}
        # The post-processors that changed a shape or dtype, each with its layer, and how.
        self._changes: dict[str, str] = {}

    @property
    def signature(self) -> object:
        """A key that is equal for post-processors that work alike, in place or not."""
        return frozenset((label, _signature(post)) for label, post in self.functions.items())

    def after(self, label: RowIdx, output: Any, layer: Layer) -> Any:
        """Return the value with which the network goes on in place of a layer's output.

        Raises
        ------
        PostprocessorError
            The post-processor raised (the error is then also of the type that it raised), or
            returned something that can't stand in for the output.
        """
        if label not in self.functions or label in self.on_inputs:
            return output
        if isinstance(layer, Operation):
            # It may have returned what it was given, or a view of that.
            output = map_tensors(Tensor.clone, output)
        return self._apply(self.functions[label], output, layer)

    def before(
        self, label: RowIdx, args: tuple[Any, ...], kwargs: Mapping[str, Any], layer: Layer
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs that a layer's forward receives in place of the original ones.

        Raises
        ------
        PostprocessorError
            As `after`, or there is no tensor among the arguments.
        """
        if label not in self.on_inputs:
            return args, dict(kwargs)
        function: Any = self.functions[label]
        if isinstance(function, KnockoutOf):
            try:
                return function.changed(args, kwargs)
            except PostprocessorError as error:
                error.add_note(f"raised by the post-processor of {layer}")
                raise
        values = [*args, *kwargs.values()]
        for at, value in enumerate(values):
            # The network shares other objects, such as key-value caches.
            if isinstance(value, Tensor | list | tuple | dict):
                leaves, rebuild = flatten(value)
                if leaves:
                    # What the own code has may be written to later.
                    leaf = leaves[0].clone() if isinstance(layer, Operation) else leaves[0]
                    leaves[0] = self._apply(function.postprocessor, leaf, layer)
                    values[at] = rebuild(leaves)
                    named = zip(kwargs, values[len(args) :], strict=True)
                    return tuple(values[: len(args)]), dict(named)
        raise PostprocessorError(
            f"{function!r} acts on layer {layer}, whose forward received no tensor: name another "
            "layer, or let the post-processor act on the layer's output"
        )

    def explain(self, error: Exception) -> None:
        """Name in notes what post-processors had changed before the network failed."""
        for where, change in self._changes.items():
            error.add_note(
                f"The post-processor {where} had changed {change}, if the network can't go on with "
                "another one."
            )

    def _apply(self, function: Postprocessor, output: Any, layer: Layer) -> Any:
        """Post-process one output; None as the result means that it was changed in place."""
        before = _kinds(output)
        result = self._called(function, output, layer)
        if result is None:
            result = output
        expected = Tensor if isinstance(output, Tensor) else type(output)
        if not isinstance(result, expected):
            first = _LIKE_IT * (expected is tuple)
            raise PostprocessorError(
                f"the post-processor of layer {layer} returned a {type(result).__name__} where the "
                f"layer returns a {type(output).__name__}: return a {expected.__name__}{first}, or "
                "None to leave the output unchanged"
            )
        where = f"{getattr(function, '__name__', repr(function))} of layer {layer}"
        self._compare(before, _kinds(result), layer, where)
        if expected is tuple and len(result) != len(output):
            self._changes[where] = (
                f"a tuple of {len(output)} to one of {len(result)}: return a tuple like it"
                f"{_LIKE_IT}"
            )
        return result

    def _called(self, function: Postprocessor, output: Any, layer: Layer) -> Any:
        """Call a post-processor; an error names the layer."""
        where = f"the post-processor of layer {layer}"
        try:
            return self._run(function, output)
        except PostprocessorError as error:
            error.add_note(f"raised by {where}")
            raise
        except Exception as error:
            if not takes(function, 1):
                raise PostprocessorError(
                    f"{where} takes other arguments than the layer's output, the only one that it "
                    "is given: write a function of one argument, lambda output: ..."
                ) from error
            raise_of_caller(where, error, PostprocessorError)

    def _compare(self, before: _Kinds, after: _Kinds, layer: Layer, where: str) -> None:
        """Remember what a post-processor has changed that a network may not go on with."""
        for (old, dtype), (new, other) in zip(before, after, strict=False):
            if old[:1] != new[:1]:
                raise PostprocessorError(
                    f"the post-processor of layer {layer} returned the shape {new} where the layer "
                    f"returns {old}: it may change any dimension but the first, the batch's"
                )
            if (old, dtype) != (new, other):
                change = f"the shape {old} to {new}" if old != new else f"{dtype} to {other}"
                self._changes[where] = f"{change}: return a tensor of the same shape and dtype"


def _kinds(output: Any) -> _Kinds:
    """Return the shape and dtype of each tensor."""
    # A description takes much longer, and only nested tensors need one.
    return [
        (describe(leaf).shape if leaf.is_nested else tuple(leaf.shape), leaf.dtype)
        for leaf in tensors(output)
    ]


def _signature(function: Postprocessor) -> object:
    """Return a key that is equal for post-processors that work alike, in place or not.

    Lambdas made anew for every pass share their code.
    """
    if isinstance(function, OnInput):
        return OnInput, _signature(function.postprocessor)
    inner = getattr(function, "func", function)
    return getattr(inner, "__code__", type(inner))

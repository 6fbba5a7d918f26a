"""The options of ``collect``: as they are given, and as they apply to each layer."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from scio_recorder.errors import CollectError
from scio_recorder.layer import Layer, RowIdx, TensorSpec, few, text_of
from scio_recorder.nets.selection import by_selector, selector_for
from scio_recorder.postprocessors.assigning import Postprocessors, assign
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import (
    booleans,
    floating_or_none,
    names_arguments,
    takes,
    whole,
)
from scio_recorder.tensors.properties import dtype_name

# A recorder imports this module for the signatures of its methods, and no more of this room.
if TYPE_CHECKING:
    from scio_recorder.capture.engine import Capture
    from scio_recorder.recording.rows import Rows
    from scio_recorder.reductions import Reduction
    from scio_recorder.reductions.base import Reductions
    from scio_recorder.stores import Store

P = ParamSpec("P")
R = TypeVar("R")
Transform: TypeAlias = Callable[[Any, Any], Tensor]
Transforms: TypeAlias = Transform | Mapping[Any, Transform]
Reduce: TypeAlias = (
    "Reduction | Sequence[Reduction] | Mapping[Any, Reduction | Sequence[Reduction]]"
)


@dataclass
class CollectOptions:
    """The options of ``collect``, which all functions that collect share, checked.

    Parameters
    ----------
    store : str, Store or None, default "auto"
        Where samples go: "device", "host", "disk:PATH", "s3://BUCKET/RUN", an object of
        :mod:`scio_recorder.stores`, None if all layers are reduced, or "auto", which
        chooses by needed and free bytes.
    reduce : Reduction, list of them or mapping by selector, optional
        Summaries to keep instead of samples.
    transform : callable or mapping by selector, optional
        ``transform(activation, batch) -> Tensor [batch, ...]``: what to keep or reduce.
    every : int, default 1
        Take every n-th batch.
    max_batches : int, optional
        Stop after this number of taken batches.
    to_inputs : callable, optional
        ``batch ->`` a tensor, a tuple of positional or a dict of keyword inputs of the net, or
        both as a pair ``(tuple, dict)``.
    sample_ids : callable, optional
        ``batch ->`` integers or strings, one for each sample, none twice. By default samples
        are numbered from 0 on, and those of skipped batches are counted too. Samples that a
        ``DistributedSampler`` gives this process have their indices in the dataset, and its
        repeats are dropped. Other samplers that split a dataset need ids.
    dtype : torch.dtype, optional
        Keep floating-point activations in this dtype, rounded.
    rows : Tokens or Nodes, optional
        Keep one row for each token or node instead of each sample, without padding. Layers, or
        the results of ``transform``, must be [batch, positions, ...] or [nodes, ...].
    activation_postproc : callable, list or mapping, optional
        Changes the output of recorded layers before it goes on through the network, as in
        ``Recorder.forward``. The recording holds the outputs before that, but a post-processor
        that works in place changes the recording too.
    stop_early : bool, default False
        Run the network no further than the last recorded layer.
    progress : bool, default True
        Show a progress bar, on a terminal.
    resume : bool, default False
        Continue the recording on disk. The loader must give the same samples in the same
        order. A complete recording is returned as it is. Its loader is not read if it has the
        same length as before; otherwise, another number of samples is an error.

    Raises
    ------
    CollectError
        An option has a value that can't work, whatever the layers are.

    Examples
    --------
    >>> CollectOptions(every=2).every
    2
    """

    store: str | Store | None = "auto"
    reduce: Reduce | None = None
    transform: Transforms | None = None
    every: int = 1
    max_batches: int | None = None
    to_inputs: Callable[[Any], Any] | None = None
    sample_ids: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    rows: Rows | None = None
    activation_postproc: Postprocessors | None = None
    stop_early: bool = False
    progress: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        from scio_recorder.recording.rows import Rows

        flags = {name: getattr(self, name) for name in ("stop_early", "progress", "resume")}
        booleans(CollectError, **flags)
        self.every = whole("every", self.every, 1)
        if self.max_batches is not None:
            self.max_batches = whole("max_batches", self.max_batches, 1)
        for name in ("to_inputs", "sample_ids"):
            function = getattr(self, name)
            if function is not None and not takes(function, 1):
                raise CollectError(
                    f"{name} must be a function that is called with a batch alone: write "
                    f"{name}=lambda batch: ..."
                )
        floating_or_none(self.dtype, CollectError)
        Rows.or_none(self.rows, CollectError)


class SharedKeywords(TypedDict, total=False):
    """The options of all functions that collect, for type checkers and editors."""

    reduce: Reduce | None
    transform: Transforms | None
    every: int
    max_batches: int | None
    sample_ids: Callable[[Any], Any] | None
    dtype: torch.dtype | None
    rows: Rows | None
    activation_postproc: Postprocessors | None
    progress: bool


class PartKeywords(SharedKeywords, total=False):
    """The options of functions that run the network, such as ``collect_parts``."""

    to_inputs: Callable[[Any], Any] | None
    stop_early: bool


class PassKeywords(SharedKeywords, total=False):
    """The options of ``collecting``."""

    store: str | Store | None
    resume: bool


class CollectKeywords(PartKeywords, PassKeywords, total=False):
    """The options of ``collect``."""


def shows(keywords: type, **defaults: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show options in the signature and the docstring of a function that takes ``**options``.

    Parameters
    ----------
    keywords : type
        Those of its options, as a class of keywords.
    **defaults
        Defaults that are not those of `CollectOptions`.
    """

    def show(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=field.type,
            )
            for field in fields(CollectOptions)
            if field.name in keywords.__annotations__
        ]
        others = [each for name, each in signature.parameters.items() if name != "options"]
        shown: Any = function
        shown.__signature__ = signature.replace(parameters=[*others, *options])
        # Python's option -OO removes docstrings.
        if function.__doc__ is not None:
            texts = [_explained(option.name, option.default) for option in options]
            shown.__doc__ = re.sub(
                r"( *)\*\*options\n(\1 +.*\n)+",
                lambda match: re.sub(r"(?m)^(?=.)", match[1], "".join(texts)),
                function.__doc__,
            )
        checked: Callable[P, R] = names_arguments(shown)
        return checked

    return show


def _explained(name: str, default: object) -> str:
    """Return the lines on an option in the docstring above."""
    text = inspect.cleandoc(CollectOptions.__doc__ or "")
    lines = re.search(rf"(?m)^{name} : .*\n(    .*\n)+", text)
    return re.sub("default (True|False)", f"default {default}", lines[0]) if lines else ""


class LayerOptions:
    """The options of each recorded layer: stored or reduced, transformed or not.

    Parameters
    ----------
    capture : Capture
        Knows the recorded layers.
    asked : CollectOptions
        The options that were given.

    Raises
    ------
    CollectError
        They can't be satisfied, or there is nothing to do.
    """

    def __init__(self, capture: Capture, asked: CollectOptions) -> None:
        program = capture.program
        self.architecture, self.recording = program.architecture, program.recording
        self.recorded = {label: program.architecture[label] for label in program.recording}
        self.with_inputs, self.counts_calls = program.options.inputs, program.counts_calls
        self.asked = asked
        self._check()
        # Those of blocks of `watch` around the collection act too.
        posts = capture.acting(asked.activation_postproc)
        # Post-processors by layer.
        self.posts = None if posts is None else assign(program.architecture, program.order, posts)
        # All are fresh: the user's reductions are patterns.
        self.reductions: dict[RowIdx, Reductions] = {
            label: _fresh(pattern)
            for label, pattern in self._by_layer(asked.reduce, "reduce").items()
        }
        # Calls of the network in a user's function are no part of the pass.
        self.run_aside = capture.site.local.run_aside
        self.transforms: dict[RowIdx, Transform] = {}
        for label, function in self._by_layer(asked.transform, "transform").items():
            self.transforms[label] = partial(self.run_aside, function)
            if not takes(function, 2):
                takes_one = takes(function, 1) * ", which takes 1 argument"
                raise CollectError(
                    f"the transform of layer {self.recorded[label]} is {function!r}"
                    f"{takes_one}: it must be callable, transform(activation, batch) -> Tensor "
                    "[batch, ...], such as lambda activation, batch: activation[:, 0]"
                )
        # The layers of which transforms are given the attention.
        self.attention = tuple(program.attention)
        self._check_attention()
        self.stored = tuple([label for label in self.recording if label not in self.reductions])

    @property
    def keeps_padding(self) -> bool:
        """Whether positions of padding would be stored, or reduced, as all others are."""
        each = self.recorded.items()
        return self.asked.rows is None and any(self._may_keep_padding(*pair) for pair in each)

    def _may_keep_padding(self, label: RowIdx, layer: Layer) -> bool:
        from scio_recorder.reductions.base import SampleReduction, several

        spec = layer.output_spec
        has_positions = not isinstance(spec, TensorSpec) or len(spec.shape) > 2
        if label in self.transforms or not has_positions:
            return False
        # Digests are of whole samples, and a reduction of the user's is given the batch.
        kept = several(self.reductions.get(label, []))
        return label in self.stored or any(
            isinstance(reduction, SampleReduction) and not reduction.keeps_rows
            for reduction in kept
        )

    def _check(self) -> None:
        if not self.recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        if self.with_inputs and not self.counts_calls:
            raise CollectError('inputs=True can\'t be collected with calls="any": leave out one')
        if self.with_inputs and self.asked.rows is not None:
            raise CollectError(
                "inputs=True is for whole batches and can't be collected with rows=: leave one out"
            )

    def _check_attention(self) -> None:
        if self.attention and self.with_inputs:
            raise CollectError(
                "inputs=True can't be collected with attention=: calls that run again are checked "
                "by what a layer returned, in whose place its attention is received: leave one out"
            )
        for label in self.attention:
            layer = self.architecture[label]
            if label not in self.recording:
                raise CollectError(f"the attention of layer {layer} is recorded: record it too")
            if label not in self.transforms:
                raise CollectError(
                    f"the attention of layer {layer} is not one tensor: say what to keep of it, "
                    f'such as transform={{"{self.selector_for(label)}": lambda attention, batch: '
                    "attention.weights(queries=[-1])}"
                )

    def selector_for(self, label: RowIdx) -> str:
        """Return a selector of a recorded layer, and of those at its place in other blocks."""
        return selector_for(self.architecture, label, self.recording)

    def leaving_out(self, label: RowIdx, labelled: tuple[int, ...] | None) -> str:
        """Return how to leave out all layers that can't be kept; empty if it is one, or all are.

        Parameters
        ----------
        label : (int, int)
            A layer that can't be kept as it is.
        labelled : tuple of int or None
            The lengths of the leading dimensions at labelling, if known.
        """
        rows = [row for at, row in self.recorded.items() if at not in self.transforms]
        unfit = [row for row in rows if row.label == label or not _fits(row, labelled or ())]
        if len(unfit) in (1, len(self.recording)):
            return ""
        labels = ", ".join(str(tuple(row.label)) for row in unfit)
        return (
            f". To leave out all layers that can't be kept ({few(unfit, 4)}), write "
            f"rnet.record(*set(rnet.recording) - {{{labels}}})"
        )

    @property
    def keeps_rows(self) -> bool:
        """Whether what is kept has an entry for each row, which needs the row's sample."""
        from scio_recorder.reductions.base import several

        each_layer = map(several, self.reductions.values())
        return self.asked.store is not None or any(
            reduction.keeps_rows for reductions in each_layer for reduction in reductions
        )

    def refuse_shards(self) -> None:
        """Refuse layers of which each process has only a shard, as far as is known."""
        if self.architecture.num_sharing == 1:
            return
        layers = [self.architecture[label] for label in self.recording]
        sharded = [layer for layer in layers if layer.shard is not None]
        if sharded:
            raise CollectError(
                f"{few(sharded, 3)}: each process has only a shard of the output, and collect "
                "takes whole outputs: let the layer return a DTensor, which is gathered "
                "(use_local_output=False), or record a layer that returns the whole"
            )

    def settings(self, net: nn.Module) -> dict[str, Any]:
        """Return, as JSON, all that decides the values besides the data and the architecture.

        Functions count only by whether they are given, since they can't be compared. Earlier
        recordings lack later options, so these stand here only if they are used. The weights of
        the net are missing, since reading all of them takes time: see `weights_digest`.
        """
        from scio_recorder.reductions.base import of_each

        asked = self.asked
        recipes = {text_of(at): of_each(recipe_of, each) for at, each in self.reductions.items()}
        return {
            "layers": list(map(text_of, self.recording)),
            "reductions": recipes,
            **({"attention": list(map(text_of, self.attention))} if self.attention else {}),
            "dtype": None if asked.dtype is None else dtype_name(asked.dtype),
            "every": asked.every,
            "inputs": self.with_inputs,
            "transforms": list(map(text_of, sorted(self.transforms))),
            "postprocessors": list(map(text_of, sorted(self.posts or ()))),
            **({} if asked.rows is None else {"rows": asked.rows.settings}),
            "to_inputs": asked.to_inputs is not None,
            "sample_ids": asked.sample_ids is not None,
            "mode": _mode_of(net),
            "autocast": {
                kind: dtype_name(torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            },
            "made_with": made_with(net),
        }

    def _by_layer(self, option: Any, what: str) -> dict[RowIdx, Any]:
        if option is None:
            return {}
        if not isinstance(option, Mapping):
            return dict.fromkeys(self.recording, option)
        return by_selector(self.architecture, self.recording, option, what, CollectError)


def _fits(row: Layer, leading: tuple[int, ...]) -> bool:
    spec = row.output_spec
    return isinstance(spec, TensorSpec) and spec.shape[: len(leading)] == leading


def _mode_of(net: nn.Module) -> str:
    """Return words on the modules that are in training mode."""
    base = "train mode" if net.training else "eval mode"
    others = [repr(name) for name, inner in net.named_modules() if inner.training != net.training]
    return f"{base}, but for {', '.join(others)}" if others else base


def _fresh(pattern: Any) -> Reductions:
    """Return new reductions like those that ``reduce=`` gives for a layer; refuse other values."""
    from scio_recorder import reductions
    from scio_recorder.reductions import Reduction

    is_list = isinstance(pattern, list | tuple)
    patterns = pattern if is_list else [pattern]
    if patterns and all(isinstance(each, Reduction) for each in patterns):
        each = [reduction.fresh() for reduction in patterns]
        return each if is_list else each[0]
    wrong = next((each for each in patterns if not isinstance(each, Reduction)), pattern)
    shown = wrong.__name__ if isinstance(wrong, type) else repr(wrong)
    hint = f": write {shown}()" if isinstance(wrong, type) else ""
    if isinstance(wrong, str) and wrong.capitalize() in reductions.__all__:
        hint = f": write reductions.{wrong.capitalize()}()"
    raise CollectError(
        f"reduce has {shown} where a reduction is expected{hint}; give objects such as "
        "scio_recorder.reductions.Mean(), a list of them, or a mapping by selector"
    )


def recipe_of(reduction: Reduction) -> dict[str, Any]:
    """Return the recipe of a reduction, from which opening the recording makes a new one.

    Examples
    --------
    >>> from scio_recorder.reductions import Quantiles
    >>> recipe_of(Quantiles([0.5]))
    {'kind': 'Quantiles', 'by_class': False, 'q': [0.5]}
    """
    from scio_recorder import reductions

    ours: Any = reduction
    kind = type(reduction).__name__
    is_ours = getattr(reductions, kind, None) is type(reduction)
    return ours.recipe if is_ours else {"kind": kind, "custom": True}


def made_with(net: nn.Module) -> dict[str, Any]:
    """Return the versions that run now, and what a net is, as JSON.

    Parameters
    ----------
    net : torch.nn.Module
        The net whose activations are recorded.

    Returns
    -------
    dict
        The versions of ``scio_recorder``, ``torch``, ``python``, ``numpy`` and of the package that
        the class of the net comes from, under the name of each; ``net``, the name of that class;
        ``dtypes`` and ``devices`` of its parameters; ``attention``, the implementation that a net
        of transformers has chosen; ``training``, its flag; ``time``, in UTC.

    Examples
    --------
    >>> made = made_with(nn.Linear(2, 1))
    >>> made["torch"] == torch.__version__, made["net"], made["dtypes"], made["devices"]
    (True, 'torch.nn.modules.linear.Linear', ['float32'], ['cpu'])
    """
    kind = type(net)
    # A class that code has made may have no module.
    package = str(kind.__module__ or "builtins").partition(".")[0]
    versions = {
        "scio_recorder": _version("scio_recorder"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        package: _version(package),
    }
    parameters = list(net.parameters())
    facts = {
        **versions,
        "net": f"{kind.__module__}.{kind.__qualname__}",
        "dtypes": sorted(map(dtype_name, {parameter.dtype for parameter in parameters})),
        "devices": sorted({str(parameter.device) for parameter in parameters}),
        "attention": private.attention_of(net),
        "training": net.training,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in facts.items() if value is not None}


@cache
def _version(package: str) -> str | None:
    """Return the version of an imported package; None for code that has none."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return str(version)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_words(made: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """Return what a recording was made with, in one line; empty if it does not know.

    Parameters
    ----------
    made : mapping
        From `made_with`, or from a file.
    other : mapping, optional
        That of another recording: only entries that differ from it are named, but for the time.

    Examples
    --------
    >>> made = {"torch": "2.13.0", "dtypes": ["bfloat16", "float32"], "time": "now"}
    >>> in_words(made), in_words(made, {**made, "torch": "2.12.0", "time": "then"})
    ('torch 2.13.0, dtypes bfloat16 + float32, time now', 'torch 2.13.0')
    """
    texts = {
        str(name): " + ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in made.items()
        if other is None or (value != other.get(name) and name != "time")
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items() if text)

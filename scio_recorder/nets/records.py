"""The records of a pass: read-only mappings that notice overwritten records."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, LayerNotFoundError, MutationError, caught_as
from scio_recorder.layer import RowIdx, describe, few, map_leaves, text_of
from scio_recorder.nets.architecture import Architecture, nearest
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import HeldTensor, Hold
from scio_recorder.tensors.properties import dtype_name
from scio_recorder.tensors.structures import tensors

# Several threads may read the same records for the first time.
_BUILDING = threading.RLock()
T = TypeVar("T", covariant=True)
_SHOWN = 6
# The printed form: layers, and the widths of their names and of a structure's shapes.
_LISTED, _WIDEST, _LONGEST = 60, 60, 300
# The advice if there is nothing to read yet.
RUN_IT = (
    "run the net with rnet(x). Calls of the net itself, as rnet.net(x), are recorded inside `with "
    "rnet.watch() as passes:`"
)
_HOW = {
    "input": "Choose layers, as by {}, then run the net with rnet(x)",
    "gradient": "Choose layers, as by {}, run the net with rnet(x), and differentiate with "
    "loss.backward()",
    "attention": "Choose layers, as by {}, then run the net with rnet(x)",
    "recording": "Choose layers, as by {}, before rnet.collect(...)",
    "reduction": "Reduce layers as they are collected, by rnet.collect(batches, reduce=...)",
    "relative error": "Layers are kept with another precision by rnet.collect(batches, dtype=...)",
}

# The advice if there is something to read of other layers.
_RECORD_IT = {
    "activation": ". Record it, too: {}, and run the net again",
    "input": ". Record it, too: {}, and run the net again",
    "recording": ". Record it, too: {} before rnet.collect(...)",
}


class Inputs(NamedTuple):
    """The inputs of a module's ``forward``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Return the inputs that a tensor, a tuple, a mapping of keywords, or a pair of both means.

        Parameters
        ----------
        value : Tensor, tuple, mapping or (tuple, mapping)
            One positional input, several, those by keyword, or both kinds.

        Returns
        -------
        Inputs or None
            None for anything else.

        Examples
        --------
        >>> Inputs.of(((1, 2), {"scale": 3}))
        Inputs(args=(1, 2), kwargs={'scale': 3})
        """
        if isinstance(value, Tensor):
            return cls((value,), {})
        if isinstance(value, Mapping):
            return cls((), dict(value))
        if not isinstance(value, tuple):
            return None
        is_pair = len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], Mapping)
        return cls(value[0], dict(value[1])) if is_pair else cls(tuple(value), {})

    def named(self, module: nn.Module) -> dict[str, Any]:
        """Return the inputs by their names in the module's ``forward``.

        Parameters
        ----------
        module : torch.nn.Module
            The module.

        Returns
        -------
        dict
            Only given arguments, without defaults. Variable positional arguments are a tuple
            under their name.

        Examples
        --------
        >>> import torch
        >>> Inputs((torch.ones(2),), {}).named(torch.nn.ReLU())
        {'input': tensor([1., 1.])}
        """
        try:
            signature = inspect.signature(module.forward)
            arguments = signature.bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            # There are no names, or the call itself will explain the error.
            return {**{str(place): value for place, value in enumerate(self.args)}, **self.kwargs}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        return dict(arguments)


class LayerMapping(Mapping["RowIdx", T], Generic[T]):
    """A read-only mapping over layers, in the order of execution.

    If its values hold tensors, it is printed as their shapes, one line for each layer.

    Parameters
    ----------
    architecture : Architecture
        Resolves the keys: ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name.
    values : mapping of (int, int) to T
        The values by label.
    what : str
        The word for the values in messages.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4))
    >>> sizes = LayerMapping(architecture, {(1, 1): 4}, "size")
    >>> sizes["1-1"], sizes["0"], sizes
    (4, 4, {(1, 1): 4})
    """

    why_none = ""
    # By layer, why it has no value.
    reasons: Mapping[RowIdx, str] = {}

    def __init__(self, architecture: Architecture, values: Mapping[RowIdx, T], what: str) -> None:
        self._architecture = architecture
        self._values: Mapping[RowIdx, T] = {at: values[at] for at in architecture.in_order(values)}
        self._what = what

    @property
    def architecture(self) -> Architecture:
        """The labelled net to which the keys belong."""
        return self._architecture

    def __getitem__(self, key: RowIdx | str) -> T:
        label = self._label(key)
        if label not in self._values:
            raise LayerNotFoundError(self._explain(label))
        return self._get(label)

    def __contains__(self, key: object) -> bool:
        try:
            return self._label(key) in self._values
        except LayerNotFoundError:
            return False

    def __iter__(self) -> Iterator[RowIdx]:
        return iter(self._values)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise caught_as(
            ArgumentError,
            TypeError(),
            f"the {self._what} can't be replaced here: to change what a layer returns in a pass, "
            f"write rnet(x, activation_postproc={{{key!r}: lambda output: ...}})",
        )

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        if not any(map(_holds_tensors, map(self._look, self._values))):
            return repr(dict(self)) if self._values else f"{{}} ({self._explain_absence()})"
        rows = [str(self._architecture[label]) for label in list(self._values)[:_LISTED]]
        width = min(_WIDEST, max(map(len, rows)))
        lines = [
            f"{row:{width}}  {shown_shapes(self._look(label))}"
            for row, label in zip(rows, self._values, strict=False)
        ]
        if len(self) > _LISTED:
            lines.append(f"... and {len(self) - _LISTED:,} more layers")
        return "\n".join(lines)

    def _look(self, label: RowIdx) -> Any:
        """Return a value of which only shapes are shown."""
        return self._values[label]

    def _get(self, label: RowIdx) -> T:
        return self._values[label]

    def _label(self, key: object) -> RowIdx:
        """Resolve a key; the name of a module with several calls will do if only one is here."""
        labels = [label for label in self._architecture.rows_at(key) if label in self._values]
        return labels[0] if len(labels) == 1 else self._architecture.resolve(key)

    def _explain(self, label: RowIdx) -> str:
        layer = self._architecture[label]
        if label in self.reasons:
            return f"there is no {self._what} of layer {layer}: {self.reasons[label]}"
        if not self._values:
            return f"there is no {self._what} of layer {layer}: {self._explain_absence(label)}"
        here = few([self._architecture[at] for at in self._values], _SHOWN)
        advice = _RECORD_IT.get(self._what, "").format(self._recording_also(label))
        return f"there is no {self._what} of layer {layer}; there is one of {here}{advice}"

    def _recording_also(self, label: RowIdx | None) -> str:
        """Return the call that records a layer, too; by default the last one, as an example."""
        if label is None and self._what != "attention":
            label = [row.label for row in self._architecture.values() if row.executed][-1]
        options: dict[str, dict[str, object]] = {
            "input": {"inputs": True},
            "gradient": {"gradients": True},
            # Other recorded layers may have none.
            "attention": {"attention": label and text_of(label)},
        }
        key = f'"{text_of(label)}"' if label else "..."
        return self._architecture.recording_also(key, **options.get(self._what, {}))

    def _explain_absence(self, label: RowIdx | None = None) -> str:
        how = _HOW.get(self._what, f"Choose layers, as by {{}}, then {RUN_IT}")
        return self.why_none or (
            f"there is none of any layer yet. {how.format(self._recording_also(label))}"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            hint = nearest(name, [*dir(type(self)), *self._architecture.names])
            if self._architecture.rows_of(name):
                hint = f": write [{name!r}] in place of .{name}"
            elif name == "activations":
                example = "".join(f', such as recording["{text_of(at)}"]' for at in [*self][:1])
                hint = f": it holds them itself, so write recording[label]{example}"
            elif name == "gradients" and self._what == "recording":
                hint = ": collect runs without them, so keep what rnet.on_gradients(...) gives"
            elif name in ("inputs", "attention"):
                hint = f": write rnet.{name}, or for a pass of a block passes.{name}[-1]"
            elif hasattr(Tensor, name):
                hint = f", but its tensors have: write [label].{name}"
            text = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)


class _Shown(str):
    """A text that is printed without quotation marks inside a structure."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _holds_tensors(value: Any) -> bool:
    # Looks into containers only: other objects, such as inputs on disk, would be read.
    are_tensors: list[bool] = []
    map_leaves(lambda leaf: are_tensors.append(isinstance(leaf, Tensor)), value)
    return any(are_tensors)


def shown_shapes(value: Any) -> str:
    """Return the structure of a value with shape and dtype for each tensor."""
    text = repr(map_leaves(_shape, value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _shape(leaf: Any) -> _Shown:
    if not isinstance(leaf, Tensor):
        return _Shown(None if leaf is None else type(leaf).__name__)
    spec = describe(leaf)
    return _Shown(f"{spec.shape} {dtype_name(spec.dtype)}")


class Recorded:
    """The parts of a structure that a pass has kept, and how to build it from them."""

    __slots__ = ("_parts", "_rebuild", "_value")

    def __init__(
        self, parts: Sequence[Entry | None], rebuild: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._parts = parts
        self._rebuild = rebuild
        self._value: Any = None

    @property
    def is_intact(self) -> bool:
        """Whether no part was changed in place."""
        return all(part is None or part.is_intact for part in self._parts)

    def peek(self) -> Any:
        """Return the structure; other code may still change its tensors."""
        return self._rebuild([None if part is None else part.peek() for part in self._parts])

    def read(self) -> Any:
        """Return the structure, always the same object, which no other code can change."""
        if self._value is None:
            parts = [None if part is None else part.read() for part in self._parts]
            self._value = self._rebuild(parts)
        return self._value


def copied(value: Any, events: Sequence[Any] = ()) -> Recorded:
    """Return copies that nothing else holds, complete once some events have happened."""

    def completed(parts: Sequence[Any]) -> Any:
        for event in events:
            event.synchronize()
        return value

    return Recorded((), completed)


# A pass's record of a layer. Each knows whether it `is_intact`; `peek` looks at it, and `read`
# hands it out.
Entry: TypeAlias = HeldTensor | Recorded
Entries: TypeAlias = Mapping[RowIdx, Entry]


def entry_of(value: Any, versions: Any, hold: Hold) -> Entry:
    """Return the entry of a tensor or a plain tuple, with its versions from `plain_version`."""
    if isinstance(value, Tensor):
        return hold(value, versions)
    pairs = [*zip(value, versions, strict=True)]
    parts = [None if version is None else entry_of(part, version, hold) for part, version in pairs]
    return Recorded(parts, partial(_filled, [version is None and part for part, version in pairs]))


def _filled(others: Sequence[Any], parts: Sequence[Any]) -> tuple[Any, ...]:
    pairs = zip(parts, others, strict=True)
    return tuple([other if part is None else part for part, other in pairs])


class Records(LayerMapping[Any]):
    """The activations, inputs or gradients of one pass.

    Reading compares version counters with those at the calls. It raises
    :class:`~scio_recorder.errors.MutationError` if a tensor was changed in place since, later in
    the pass or after it. A record that was read does not change, whatever later passes,
    optimisers or the caller do.
    """

    def __init__(
        self,
        architecture: Architecture,
        entries: Entries | Callable[[], Entries] = dict,
        what: str = "activation",
    ) -> None:
        self._architecture = architecture
        self._what = what
        # Called with a layer whose record was only a reference and turned out to be overwritten.
        self.copy_from_now_on: Callable[[RowIdx], None] | None = None
        # Those on which the pass ran.
        self.streams = private.current_streams()
        # Most passes are never read: a function makes the entries at the first look.
        self._entries = entries

    @property
    def _values(self) -> Entries:  # type: ignore[override]  # a plain attribute
        with _BUILDING:
            if callable(self._entries):
                self._entries = self._entries()
        return self._entries

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other streams, and no tensors whose versions were noted.
        return {**vars(self), "_entries": self._values, "streams": ()}

    def peek(self, label: RowIdx) -> Any:
        """Return a record that may refer to memory to which other code writes."""
        return self._once_there(self._intact(label).peek)

    def _get(self, label: RowIdx) -> Any:
        return self._once_there(self._intact(label).read)

    def _once_there(self, read: Callable[[], Any]) -> Any:
        if private.current_streams() == self.streams:
            return read()
        # On the caller's stream, the numbers might be copied before they are there.
        value = private.run_on_streams(self.streams, read)
        for tensor in tensors(value):
            if tensor.is_cuda:
                # Its memory must not be used again before what comes here has run.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return value

    def read_all(self) -> None:
        """Read all records, so that they stay; one that is lost raises when somebody reads it."""
        for label in self._values:
            with contextlib.suppress(MutationError):
                self._get(label)

    def _look(self, label: RowIdx) -> Any:
        # Shapes can be shown even if values were overwritten; nothing is copied for them.
        return self._values[label].peek()

    def _intact(self, label: RowIdx) -> Entry:
        entry = self._values[label]
        if not entry.is_intact:
            if self.copy_from_now_on is not None:
                self.copy_from_now_on(label)
            raise MutationError(self._explain_mutation(label))
        return entry

    def _explain_mutation(self, label: RowIdx) -> str:
        changed = (
            f"the {self._what} of layer {self._architecture[label]} was changed in place, or its "
            "memory was freed, after it was recorded: later in the pass, or since, as by `output "
            "+= 1` on a tensor that the network returned or received. "
        )
        if self.copy_from_now_on is None:
            return changed + "Work on a clone of that tensor, or record with another copy="
        return changed + (
            "No earlier pass in this setting had shown that, so only a reference was kept. The "
            "other records hold, and from the next pass on this layer is copied. record(..., copy="
            '"always") copies in every pass'
        )

"""The labelled architecture: label <-> qualified name <-> call of a module."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from torch import nn

from scio_recorder.display.outline import Outline, Outlined, nested, outline, visible
from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.layer import DepthIdx, Layer, Shard, counted, label_of, not_its_label, text_of
from scio_recorder.nets import architecture_json
from scio_recorder.nets.absent import LABEL_WITH_IT, no_such_label, no_such_name


class Architecture(Outlined, Mapping[DepthIdx, Layer]):
    """The layers of a net by label, in the order in which torchinfo lists them.

    Parameters
    ----------
    layers : iterable of Layer
        The rows. torchinfo lists a container twice under one label if its submodules run in
        turn with others; that is one layer.
    names : mapping of str to iterable of (int, int)
        The labels of the rows of each module, for every qualified name that it has in the net: a
        shared module has several.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> _, architecture = label_net(net, input_size=(1, 4))
    >>> list(architecture)
    [(0, 1), (1, 1), (1, 2)]
    >>> architecture["1-2"] is architecture["1"] is architecture[1, 2]
    True
    >>> print(architecture)
    0-1 Sequential          (1, 3)
      1-1 Linear 0          (1, 3)
      1-2 ReLU 1            (1, 3)
    """

    def __init__(self, layers: Iterable[Layer], names: Mapping[str, Iterable[DepthIdx]]) -> None:
        self._rows: Mapping[DepthIdx, Layer] = MappingProxyType(
            {layer.label: layer for layer in layers}
        )
        self._names = MappingProxyType({name: tuple(labels) for name, labels in names.items()})
        # The number of processes that see the same samples, as far as it is known.
        self.num_sharing = 1

    def __getitem__(self, key: DepthIdx | str) -> Layer:
        return self._rows[self.resolve(key)]

    def __iter__(self) -> Iterator[DepthIdx]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    # Those of a Mapping would resolve every label.
    def values(self) -> ValuesView[Layer]:
        """Return all rows."""
        return self._rows.values()

    def items(self) -> ItemsView[DepthIdx, Layer]:
        """Return all labels and rows."""
        return self._rows.items()

    # A proxy can't be pickled, and the index by module must not survive a copy of the modules.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self._rows.values()), dict(self._names))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Architecture):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"<Architecture of {counted(len(self), 'layer')}, fingerprint {self.fingerprint[:12]}>"
        )

    def __str__(self) -> str:
        rows = nested(self.values())
        titles = [_title(layer) for layer in rows]
        width = max(map(len, titles), default=0) + 8
        shapes = [_shape_text(layer) for layer in rows]
        lines = [f"{title:<{width}}{shape}" for title, shape in zip(titles, shapes, strict=True)]
        return "\n".join(lines)

    def mark(self, shards: Mapping[DepthIdx, Shard | None], num_sharing: int = 1) -> None:
        """Note the shards that layers return in this process.

        Parameters
        ----------
        shards : mapping
            By label; None for layers that return their whole output. Other layers stay as they are.
        num_sharing : int
            The number of processes that see the same samples.
        """
        self.num_sharing = num_sharing
        rows = {
            label: dataclasses.replace(row, shard=shards.get(label, row.shard))
            for label, row in self._rows.items()
        }
        self._rows = MappingProxyType(rows)

    @property
    def names(self) -> tuple[str, ...]:
        """All qualified names in the net, including aliases of shared modules."""
        return tuple(self._names)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over everything that gives labels their meaning.

        Shapes are left out: the batch size must not matter.
        """
        rows = [
            [str(row.label), row.name, row.type_name, row.call, row.executed, row.num_params]
            for row in self.values()
        ]
        text = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def resolve(self, key: object) -> DepthIdx:
        """Return the label of a key.

        Parameters
        ----------
        key : (int, int) or str
            ``(1, 3)``, ``"1-3"`` or a qualified name that stands for one layer only.

        Returns
        -------
        (int, int)
            A label of this architecture.

        Raises
        ------
        LayerNotFoundError
            The key names no layer, or a module that ran several times.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4))[1].resolve("0")
        (1, 1)
        """
        label = label_of(key)
        if isinstance(key, str):
            if label is not None and label in self._rows:
                return label
            return self._resolve_name(key, label)
        if label is None:
            raise LayerNotFoundError(_not_a_key(key))
        if label not in self._rows:
            raise LayerNotFoundError(no_such_label(label, self))
        return label

    def labels_of(self, name: str) -> tuple[DepthIdx, ...]:
        """Return the labels of the executed calls of a module.

        Parameters
        ----------
        name : str
            A qualified name. A shared module has several, and any of them works.

        Returns
        -------
        tuple of (int, int)
            Sorted by when the calls started; empty for a name that is not in the net.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> relu = nn.ReLU()
        >>> label_net(nn.Sequential(relu, relu), input_size=(1, 4))[1].labels_of("0")
        ((1, 1), (1, 2))
        """
        return tuple(label for label in self.rows_of(name) if self._rows[label].executed)

    def rows_of(self, name: str) -> tuple[DepthIdx, ...]:
        """Return the labels of all rows of a module, including rows that did not run.

        Parameters
        ----------
        name : str
            A qualified name. A shared module has several, and any of them works.

        Returns
        -------
        tuple of (int, int)
            In the order of the architecture.
        """
        return self._names.get(name, ())

    def calls(self, module: nn.Module) -> tuple[DepthIdx, ...]:
        """Return the labels of the executed calls of a module.

        Parameters
        ----------
        module : torch.nn.Module
            A module of the net.

        Returns
        -------
        tuple of (int, int)
            In the order in which the calls returned. It differs from the order in which they
            started if a module calls itself.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> net = nn.Sequential(nn.ReLU())
        >>> label_net(net, input_size=(1, 4))[1].calls(net[0])
        ((1, 1),)
        """
        return self._calls.get(id(module), ())

    def in_order(self, labels: Iterable[DepthIdx]) -> list[DepthIdx]:
        """Return labels in the order of execution, which is the order in which calls return.

        All lists of layers have this order. Trees don't.

        Parameters
        ----------
        labels : iterable of (int, int)
            Labels of this architecture. Those of layers that did not run come first.

        Returns
        -------
        list of (int, int)
            The same labels.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> _, architecture = label_net(nn.Sequential(nn.ReLU(), nn.Tanh()), input_size=(1, 2))
        >>> architecture.in_order(architecture)
        [(1, 1), (1, 2), (0, 1)]
        """
        ranks = ((self._rows[label].completion, label) for label in labels)
        return [
            label for _, label in sorted((-1 if at is None else at, label) for at, label in ranks)
        ]

    def enclosing(self, label: DepthIdx) -> list[DepthIdx]:
        """Return the calls inside which a layer ran, the nearest first, without the layer itself.

        Parameters
        ----------
        label : (int, int)
            The layer.

        Returns
        -------
        list of (int, int)
            Layers that started before it and returned after it.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> net = nn.Sequential(nn.Sequential(nn.ReLU()))
        >>> label_net(net, input_size=(1, 2))[1].enclosing((2, 1))
        [(1, 1), (0, 1)]
        """
        # Rows stand in the order in which calls start.
        ended = self._rows[label].completion
        found: list[DepthIdx] = []
        for row in self._rows.values():
            if row.label == label or ended is None:
                break
            if row.completion is not None and row.completion > ended:
                found.append(row.label)
        return found[::-1]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the modules as plain values that JSON can hold.

        Returns
        -------
        dict
            The argument of :meth:`from_dict`.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> _, architecture = label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4))
        >>> Architecture.from_dict(architecture.to_dict()) == architecture
        True
        """
        encoded = architecture_json.encode(self.values(), self._names)
        return {**encoded, "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read the result of :meth:`to_dict`, without trusting it.

        Parameters
        ----------
        data : dict
            The plain values.

        Returns
        -------
        Architecture
            Without modules.

        Raises
        ------
        RecordingError
            The data are damaged, or were changed after they were written.

        Examples
        --------
        >>> Architecture.from_dict({})
        Traceback (most recent call last):
        scio_recorder.errors.RecordingError: architecture: entry 'format' is missing
        """
        architecture = cls(*architecture_json.decode(data))
        written = data.get("fingerprint") if isinstance(data, dict) else None
        if written != architecture.fingerprint:
            raise RecordingError(
                f"architecture: its fingerprint is {architecture.fingerprint}, but {written!r} is "
                "stored with it: the description was changed after it was written"
            )
        return architecture

    @cached_property
    def _calls(self) -> dict[int, tuple[DepthIdx, ...]]:
        calls: dict[int, list[DepthIdx]] = {}
        for row in map(self._rows.__getitem__, self.in_order(self)):
            if row.executed and row.module is not None:
                calls.setdefault(id(row.module), []).append(row.label)
        return {key: tuple(found) for key, found in calls.items()}

    def _outline(self) -> Outline:
        return outline("Architecture", list(self.values()), None)

    def _resolve_name(self, name: str, label: DepthIdx | None) -> DepthIdx:
        if name not in self._names:
            if label is not None:
                raise LayerNotFoundError(no_such_label(label, self))
            raise LayerNotFoundError(no_such_name(name, self._names))
        labels = self.labels_of(name) or self.rows_of(name)
        if not labels:
            raise LayerNotFoundError(
                f"module {name!r} did not run at labelling, so it has no label: {LABEL_WITH_IT}"
            )
        if len(labels) > 1:
            found = ", ".join(map(text_of, labels))
            raise LayerNotFoundError(
                f"the name {name!r} is ambiguous: the module has {len(labels)} calls, {found}; "
                f"write one of these labels, such as {labels[0]!r}"
            )
        return labels[0]


def _not_a_key(key: object) -> str:
    if isinstance(key, Layer):
        return not_its_label(key)
    try:
        hint = f"; a label has two numbers, such as (1, {operator.index(key)})"  # type: ignore[arg-type]  # tried
    except TypeError:
        hint = ""
    return f'{key!r} names no layer: write (1, 3), "1-3" or a qualified name{hint}'


def _title(layer: Layer) -> str:
    name = f" {layer.name}" if layer.name else ""
    return visible(f"{'  ' * layer.depth}{layer.label} {layer.type_name}{name}")


def _shape_text(layer: Layer) -> str:
    if not layer.executed:
        return "(did not run)"
    return f"{layer.output_shape}" + (f", {layer.shard}" if layer.shard else "")

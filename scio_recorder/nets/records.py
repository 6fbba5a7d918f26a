"""What a pass leaves behind: read-only mappings that notice when a record no longer holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from scio_recorder.errors import LayerNotFoundError, MutationError

if TYPE_CHECKING:
    from scio_recorder.nets.architecture import Architecture, DepthIdx

__all__ = ["Inputs", "LayerMapping", "Offloaded", "Records"]

T = TypeVar("T", covariant=True)


class Inputs(NamedTuple):
    """What a module's ``forward`` received."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerMapping(Mapping["DepthIdx", T], Generic[T]):
    """A read-only mapping over layers.

    Parameters
    ----------
    architecture : Architecture
        Resolves the keys: ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name.
    values : mapping of (int, int) to T
        The values by label.
    what : str
        What the values are, for messages.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4))
    >>> sizes = LayerMapping(architecture, {(1, 1): 4}, "size")
    >>> sizes["1-1"], sizes["0"], sizes
    (4, 4, {(1, 1): 4})
    """

    def __init__(self, architecture: Architecture, values: Mapping[DepthIdx, T], what: str) -> None:
        self._architecture = architecture
        self._values = values
        self._what = what

    @property
    def architecture(self) -> Architecture:
        """The labelled net that the keys are of."""
        return self._architecture

    def __getitem__(self, key: DepthIdx | str) -> T:
        label = self._label(key)
        if label not in self._values:
            raise LayerNotFoundError(self._explain(label))
        return self._get(label)

    def __contains__(self, key: object) -> bool:
        try:
            return self._label(key) in self._values
        except LayerNotFoundError:
            return False

    def __iter__(self) -> Iterator[DepthIdx]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _get(self, label: DepthIdx) -> T:
        return self._values[label]

    def _label(self, key: object) -> DepthIdx:
        """Resolve a key; of a module that ran several times, the one call that is here will do."""
        if isinstance(key, str):
            own = [label for label in self._architecture.rows_of(key) if label in self._values]
            if len(own) == 1:
                return own[0]
        return self._architecture.resolve(key)

    def _explain(self, label: DepthIdx) -> str:
        layer = self._architecture[label]
        if not self._values:
            return f"there is no {self._what} of layer {layer}: there is none of any layer yet"
        here = ", ".join(f"{depth}-{index}" for depth, index in sorted(self._values))
        return f"there is no {self._what} of layer {layer}; there is one of {here}"


class Offloaded:
    """Host copies that may still be under way."""

    __slots__ = ("_version", "events", "value")

    def __init__(self, value: Any, events: Sequence[Any]) -> None:
        self.value = value
        self.events = events
        # Compared at the end of a pass together with the versions of bare tensors.
        self._version = 0

    @classmethod
    def all_of(cls, parts: Sequence[Offloaded]) -> Offloaded:
        """Return several as one, whose value is the tuple of theirs."""
        return cls(
            tuple(part.value for part in parts),
            [event for part in parts for event in part.events],
        )

    def wait(self) -> Any:
        """Return the copies once they are complete."""
        for event in self.events:
            event.synchronize()
        return self.value


class Records(LayerMapping[Any]):
    """The activations, inputs or gradients of one pass.

    Reading compares version counters with those at the end of the pass, and raises
    :class:`~scio_recorder.errors.MutationError` where a tensor was changed in place since, and
    where the pass itself overwrote a record of which it held no copy (``lost``).
    """

    def __init__(
        self,
        architecture: Architecture,
        labels: Sequence[DepthIdx] = (),
        values: Sequence[Any] = (),
        versions: Sequence[int | Sequence[tuple[Tensor, int]]] = (),
        what: str = "activation",
        lost: Collection[DepthIdx | None] = (),
    ) -> None:
        self._architecture = architecture
        self._what = what
        self._lost = lost
        self._columns = (labels, values, versions)

    # Most passes are never read, or of few layers: the columns become mappings at the first look.

    @cached_property
    def _values(self) -> dict[DepthIdx, Any]:  # type: ignore[override]
        return dict(zip(self._columns[0], self._columns[1], strict=True))

    @cached_property
    def _versions(self) -> dict[DepthIdx, int | Sequence[tuple[Tensor, int]]]:
        return dict(zip(self._columns[0], self._columns[2], strict=True))

    def _get(self, label: DepthIdx) -> Any:
        if label in self._lost:
            raise MutationError(self._explain_loss(label))
        value, versions = self._values[label], self._versions[label]
        if isinstance(value, Offloaded):
            return value.wait()
        watched = [(value, versions)] if isinstance(versions, int) else versions
        for tensor, version in watched:
            if tensor._version != version:
                raise MutationError(self._explain_mutation(label))
        return value

    def _explain_loss(self, label: DepthIdx) -> str:
        return (
            f"an in-place operation overwrote the {self._what} of layer "
            f"{self._architecture[label]} later in the pass, which no earlier pass in this setting "
            "had done, so that only a reference was kept. The other records of the pass hold. From "
            'the next pass on this layer is copied; record(..., copy="always") copies in every pass'
        )

    def _explain_mutation(self, label: DepthIdx) -> str:
        return (
            f"the {self._what} of layer {self._architecture[label]} was changed in place after it "
            "was recorded, as by `output += 1` on a tensor that the network returned or received: "
            "work on a clone of that tensor"
        )

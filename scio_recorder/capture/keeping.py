"""How one output is kept so that nothing that runs later can change the record.

NOTE [What a record holds]

1. Reference: the tensor itself. Its version counter, noted here and compared whenever the record is
   read, tells whether an in-place operation touched it or a view of it. Then reading raises, and
   the layer is copied from the next pass on.
2. Copy: of a tensor on the graph, one that has its place there, see `own_copy`.
3. Exchange: an in-place operation on a view cuts the view's place out of the graph. So a view on
   the graph that nobody else holds is kept itself, and the network goes on with a copy of it.

While it is unknown whether a copy is needed (LEARN), one is made, and what the network goes on with
is watched: if it was overwritten by the end of the pass, copies are made from then on; if it was
not, references do.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.capture.program import COPY, LEARN, REFERENCE
from scio_recorder.errors import UnsupportedTorchError
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import own_copy, version_of
from scio_recorder.tensors.structures import flatten, tensors
from scio_recorder.tensors.substituting import replaceable, substitute


class KeptLeaf:
    """One tensor of a record until the pass ends."""

    __slots__ = ("copied", "original", "version", "watched", "watched_version")

    def __init__(self, original: Tensor, copied: Tensor | None = None) -> None:
        self.original = original
        self.version = version_of(original)
        self.copied = copied
        self.watched: Tensor | None = None
        self.watched_version = 0

    def watch(self, tensor: Tensor) -> None:
        """Learn from what becomes of the tensor that the network goes on with."""
        self.watched = tensor
        self.watched_version = version_of(tensor)

    @property
    def is_overwritten(self) -> bool:
        """Whether the network overwrote what it was given."""
        watched = self.watched
        return watched is not None and version_of(watched) != self.watched_version

    def settled(self) -> tuple[Tensor, int]:
        """Return what the record holds, and the version that it must show."""
        if self.copied is None:
            return self.original, self.version
        return self.copied, version_of(self.copied)


class Kept:
    """One recorded structure until the pass ends."""

    __slots__ = ("leaves", "rebuild")

    def __init__(self, leaves: list[KeptLeaf], rebuild: Callable[[Sequence[Any]], Any]) -> None:
        self.leaves = leaves
        self.rebuild = rebuild


NOTHING = Kept([], lambda leaves: None)


class Keeper:
    """Keeps the outputs of one pass."""

    __slots__ = ("_fresh", "_holds", "_private")

    def __init__(self) -> None:
        self._fresh = _Fresh()
        self._holds: dict[int, int] = {}
        # Modules often return what an inner module returned: one private tensor serves both.
        self._private: dict[int, tuple[Tensor, int, KeptLeaf]] = {}

    def keep(self, output: Any, handed: Any, kind: int, references: int) -> tuple[Kept, Any]:
        """Keep an output, and return what the network goes on with instead of ``handed``.

        ``references`` is the number of references to ``output`` that the hook counted.
        """
        leaves, rebuild = flatten(output)
        # Counted before anything here holds the leaves as well.
        alone = [False] * len(leaves)
        if kind != REFERENCE and any(map(_is_view_on_graph, leaves)):
            alone = self._fresh.is_alike(output, leaves, references, self._holds)
        is_same = handed is output
        onward = leaves if is_same else tensors(handed)
        movable = replaceable(handed) if any(alone) else set()
        replacements: dict[int, Tensor] = {}
        kept = []
        for leaf, is_alone in zip(leaves, alone, strict=True):
            shared = [other for other in onward if _overlaps(other, leaf)]
            # What a post-processor made out of the record itself could change it later.
            effective = COPY if shared and not is_same and kind == REFERENCE else kind
            if self._is_exchanged(leaf):
                # What an inner module returned and has been exchanged already.
                kept.append(self._again(self._private[id(leaf)][2], leaf, effective))
            elif is_alone and _is_view_on_graph(leaf) and movable.issuperset(map(id, shared)):
                kept.append(self._keep_private(leaf, effective, shared, replacements))
            else:
                kept.append(self._keep_shared(leaf, effective))
        return Kept(kept, rebuild), substitute(handed, replacements) if replacements else handed

    def _is_exchanged(self, leaf: Tensor) -> bool:
        seen, version, kept = self._private.get(id(leaf), (None, 0, None))
        is_same = seen is leaf and version == version_of(leaf) >= 0
        return is_same and kept is not None and kept.copied is None

    def _keep_private(
        self, leaf: Tensor, kind: int, shared: list[Tensor], replacements: dict[int, Tensor]
    ) -> KeptLeaf:
        """Keep the tensor itself, and let the network go on with copies."""
        if kind == REFERENCE:
            return KeptLeaf(leaf)
        copies = {id(other): _faithful_copy(other) for other in shared}
        if leaf.grad_fn is None or any(copy is None for copy in copies.values()):
            return self._keep_shared(leaf, kind)
        kept = KeptLeaf(leaf)
        for key, copy in copies.items():
            assert copy is not None
            replacements[key] = copy
            if kind == LEARN:
                kept.watch(copy)
            self._remember(copy, kept)
        self._hold(leaf, *([kept.watched] if kept.watched is not None else []))
        return kept

    def _keep_shared(self, leaf: Tensor, kind: int) -> KeptLeaf:
        """Keep a reference or a copy, and let the network go on with the tensor."""
        if kind == REFERENCE and not leaf.is_inference():
            self._hold(leaf)
            return KeptLeaf(leaf)
        earlier = self._private.get(id(leaf))
        if earlier is not None and earlier[0] is leaf and earlier[1] == version_of(leaf) >= 0:
            return self._again(earlier[2], leaf, kind)
        kept = KeptLeaf(leaf, own_copy(leaf))
        self._hold(leaf)
        if kind == LEARN:
            kept.watch(leaf)
            self._hold(leaf)
        self._remember(leaf, kept)
        return kept

    def _again(self, earlier: KeptLeaf, leaf: Tensor, kind: int) -> KeptLeaf:
        kept = KeptLeaf(earlier.original, earlier.copied)
        kept.version = earlier.version
        self._hold(earlier.original)
        if kind == LEARN:
            kept.watch(leaf)
            self._hold(leaf)
        return kept

    def _remember(self, seen: Tensor, kept: KeptLeaf) -> None:
        self._private[id(seen)] = (seen, version_of(seen), kept)
        self._hold(seen)

    def _hold(self, *held: Tensor) -> None:
        """Count the references that this object holds: they don't make a tensor less private."""
        for tensor in held:
            self._holds[id(tensor)] = self._holds.get(id(tensor), 0) + 1


def overwritten(events: Sequence[Kept]) -> list[bool]:
    """For the events of a pass in order, whether the network overwrote what one returned.

    An exchange shields the tensors of inner modules that share memory with what it keeps, which
    would be overwritten without it. So they count as overwritten too: what is learned of one layer
    must not lean on what is done for another.
    """
    shielded: set[int] = set()
    found = []
    for kept in reversed(events):
        is_hit = False
        for leaf in kept.leaves:
            watched = leaf.watched
            if watched is None or not (
                leaf.is_overwritten or private.memory_of(watched) in shielded
            ):
                continue
            is_hit = True
            shielded.add(private.memory_of(leaf.original))
        found.append(is_hit)
    return found[::-1]


def keep_inputs(value: Any, kind: int) -> Kept:
    """Keep what a module's forward is about to receive, which it must receive itself."""
    leaves, rebuild = flatten(value)
    kept = []
    for leaf in leaves:
        if kind == REFERENCE and not leaf.is_inference():
            kept.append(KeptLeaf(leaf))
            continue
        kept.append(KeptLeaf(leaf, own_copy(leaf)))
        if kind == LEARN:
            kept[-1].watch(leaf)
    return Kept(kept, rebuild)


def _is_view_on_graph(leaf: Tensor) -> bool:
    return leaf.grad_fn is not None and private.base_of(leaf) is not None


def _overlaps(one: Tensor, other: Tensor) -> bool:
    return one is other or private.memory_of(one) == private.memory_of(other)


def _faithful_copy(tensor: Tensor) -> Tensor | None:
    """Copy on the graph, or None where a copy would differ in layout and so in later kernels."""
    if tensor.layout is not torch.strided or getattr(tensor, "__dict__", None):
        return None
    copy = tensor.clone()
    if copy.stride() != tensor.stride():
        try:
            copy = tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        except RuntimeError:
            # Expanded tensors can't be written to.
            return None
    return copy if type(copy) is type(tensor) else None


def _leaf_references(leaves: list[Tensor]) -> list[int]:
    return [sys.getrefcount(leaf) for leaf in leaves]


class _Fresh:
    """What the reference counts of a tensor are that a module has just made.

    They depend on the versions of Python and torch, and on what drives the interpreter at the
    moment (dynamo changes how calls hold their arguments). So they are measured anew in each pass,
    on small modules, if they are needed.
    """

    __slots__ = ("base", "container", "leaf", "storage", "tensor", "uses")

    def __init__(self) -> None:
        self.tensor = self.container = self.leaf = self.uses = self.storage = 0
        self.base = (0, 0)

    def is_alike(
        self, output: Any, leaves: list[Tensor], references: int, own: Mapping[int, int]
    ) -> list[bool]:
        """For each leaf, whether nobody but the caller of the module holds it.

        ``own`` says how many of the references are the recorder's.
        """
        # No calls between here and the counts that hold the leaves in other ways than in a probe.
        is_plain = leaves[0] is output
        counts = [references] if is_plain else _leaf_references(leaves)
        self._measure(is_plain)
        if is_plain:
            is_free = references - own.get(id(output), 0) == self.tensor
            return [is_free and self._is_unshared(output, own)]
        if references != self.container:
            return [False] * len(leaves)
        return [
            count - own.get(id(leaf), 0) == self.leaf and self._is_unshared(leaf, own)
            for leaf, count in zip(leaves, counts, strict=True)
        ]

    def _is_unshared(self, leaf: Tensor, own: Mapping[int, int]) -> bool:
        """Whether nothing holds the tensor's memory but itself and what the graph needs of it."""
        if private.use_count(leaf) != self.uses:
            return False
        if weakref.getweakrefcount(leaf) > 0:
            return False
        is_view = private.base_of(leaf) is not None
        if is_view:
            references, uses = _base_references(leaf)
            references -= own.get(id(private.base_of(leaf)), 0)
            if (references, uses) != self.base:
                return False
        origin = private.base_of(leaf)
        is_saved = _is_saved(leaf if origin is None else origin)
        return private.storage_uses(leaf) == self.storage + is_view + is_saved

    def _measure(self, is_plain: bool) -> None:
        if self.uses == 0 and private.has_global_hooks():
            # These must not see the small modules: what was true at import has to do.
            for name in self.__slots__:
                setattr(self, name, getattr(_AT_IMPORT, name))
        if self.uses == 0:
            _probe(_make_view, self._of_tensor)
        if not is_plain and self.container == 0:
            _probe(_make_tuple, self._of_tuple)

    def _of_tensor(self, module: nn.Module, args: Any, output: Any) -> None:
        self.tensor = sys.getrefcount(output)
        self.uses = private.use_count(output)
        self.base = _base_references(output)
        # The view and what it is a view of both count.
        self.storage = private.storage_uses(output) - 1

    def _of_tuple(self, module: nn.Module, args: Any, output: Any) -> None:
        self.container = sys.getrefcount(output)
        leaves, _ = flatten(output)
        self.leaf = _leaf_references(leaves)[0]


class _Probe(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def _probe(make: Callable[[Tensor], Any], hook: Callable[..., None]) -> None:
    probe = _Probe(make)
    probe.register_forward_hook(hook)
    with torch.inference_mode(False), torch.enable_grad():
        probe(torch.ones(1, requires_grad=True))


def _make_view(x: Tensor) -> Tensor:
    return (x * 2).view(1, 1)


def _make_tuple(x: Tensor) -> tuple[Tensor]:
    return (x * 2,)


def _is_saved(tensor: Tensor) -> bool:
    """Whether the graph holds a tensor itself; under hooks, it holds what these make of it."""
    return private.active_saved_tensors_hooks() is None and private.keeps_its_result(tensor)


def _base_references(view: Tensor) -> tuple[int, int]:
    base = private.base_of(view)
    return sys.getrefcount(base), private.use_count(base)


_AT_IMPORT = _Fresh()
# Without these counts a pass with gradients says what is missing; an import must not.
with contextlib.suppress(UnsupportedTorchError):
    _AT_IMPORT._measure(is_plain=False)

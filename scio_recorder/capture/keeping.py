"""Keeping one output so that nothing that runs later can change the record.

NOTE [What a record holds]

1. Reference: the tensor itself. Its version counter, noted here and compared whenever the record is
   read, tells whether an in-place operation touched it or a view of it. Then reading raises, and
   the layer is copied from the next pass on.
2. Copy: the copy of a tensor on the graph takes the tensor's place there, see `own_copy`.
3. Exchange: an in-place operation on a view cuts the view's place out of the graph. So a view on
   the graph whose memory nobody else holds is kept itself, and whoever holds it holds a copy from
   then on, see `exchange`.

While it is unknown whether a copy is needed (LEARN), one is made, and the tensor that the network
goes on with is watched. If it was overwritten by the end of the pass, copies are made from then on;
otherwise references suffice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scio_recorder.capture.learning import BARE, COPY, LEARN, REFERENCE
from scio_recorder.nets.records import Recorded, copied
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import version_of
from scio_recorder.tensors.ownership import Hold, exchange, own_copy
from scio_recorder.tensors.structures import Rebuild, flatten, tensors


class KeptLeaf:
    """One tensor of a record until the pass ends."""

    __slots__ = ("exposed_by", "tensor", "used", "used_version", "version")

    def __init__(self, tensor: Tensor, used: Tensor) -> None:
        # The tensor that the record holds, and the version that it must have.
        self.tensor = tensor
        self.version = version_of(tensor)
        # The tensor that the network goes on with.
        self.used = used
        self.used_version = version_of(used)
        # The exchange without which the network would work on this tensor's memory.
        self.exposed_by: KeptLeaf | None = None

    @property
    def is_overwritten(self) -> bool:
        """Whether the network overwrote the tensor that it was given.

        A lesson about one layer must not depend on what is done for another, so an overwrite that
        an exchange prevented counts too.
        """
        return version_of(self.used) != self.used_version or (
            self.exposed_by is not None and self.exposed_by.is_overwritten
        )


class Kept:
    """One recorded structure until the pass ends."""

    __slots__ = ("is_tensor", "leaves", "rebuild")

    def __init__(self, leaves: list[KeptLeaf], rebuild: Rebuild, is_tensor: bool) -> None:
        self.leaves = leaves
        self.rebuild = rebuild
        self.is_tensor = is_tensor

    def record(self, hold: Hold) -> Recorded:
        """Return the record that is left when the pass has ended."""
        return Recorded([hold(leaf.tensor, leaf.version) for leaf in self.leaves], self.rebuild)

    def next_kind(self, kind: int, lasting: set[int]) -> int:
        """Return the kind to keep it by from now on, given memory that outlives the pass."""
        reference = BARE if self.is_tensor else REFERENCE
        if kind != LEARN:
            return max(kind, reference)
        for leaf in self.leaves:
            # Tensors of inference mode have no version counter: overwriting them can't be noticed.
            is_unknown = leaf.used.is_inference() or private.memory_of(leaf.used) in lasting
            if is_unknown or leaf.is_overwritten:
                return COPY
        return reference


NOTHING = Kept([], lambda leaves: None, is_tensor=False)


class Keeper:
    """Keeps the inputs and outputs of modules in one pass."""

    __slots__ = ("copied",)

    def __init__(self) -> None:
        # Modules often return what an inner module returned: one copy serves both.
        self.copied: dict[int, KeptLeaf] = {}

    def keep(self, value: Any, kind: int, onward: Any = None) -> tuple[Kept, list[Tensor]]:
        """Keep a structure, and return the record and the tensors that have its place on the graph.

        ``onward`` is what the network goes on with instead of an output, if anything. Inputs, for
        which it is left out, are never exchanged: a forward must receive what it was given.
        """
        leaves, rebuild = flatten(value)
        is_output = onward is not None
        if kind in (REFERENCE, BARE) and is_output and onward is not value:
            # A tensor that a post-processor made from the record itself could change it later.
            memory = {private.memory_of(tensor) for tensor in tensors(onward)}
            kind = COPY if any(private.memory_of(leaf) in memory for leaf in leaves) else kind
        kept = [self._keep(leaf, kind, is_output) for leaf in leaves]
        pairs = zip(kept, leaves, strict=True)
        places = [own.tensor if own.tensor.grad_fn is not None else leaf for own, leaf in pairs]
        return Kept(kept, rebuild, isinstance(value, Tensor)), places

    def _keep(self, leaf: Tensor, kind: int, is_output: bool) -> KeptLeaf:
        known = self.copied.get(id(leaf))
        if known is not None and (
            not known.used_version == version_of(leaf) >= 0
            # A tensor that an inner module returned inside an autograd Function comes onto the
            # graph later.
            or known.tensor.requires_grad != leaf.requires_grad
        ):
            known = None
        if known is None and kind in (REFERENCE, BARE) and not leaf.is_inference():
            return KeptLeaf(leaf, leaf)
        view = inner = None
        if is_output and leaf.grad_fn is not None:
            # Nothing here may hold the base of the view. The caller of an inner module holds it
            # until it returns, and then the same view comes once more, so this is tried again.
            inner = self.copied.get(id(private.base_of(leaf)))
            view = exchange(leaf, own_references=inner is not None)
        if known is None:
            known = self.copied[id(leaf)] = KeptLeaf(own_copy(leaf) if view is None else view, leaf)
        elif view is not None:
            known.tensor, known.version = view, version_of(view)
        if view is not None and inner is not None:
            inner.exposed_by = known
        return known


def offload(value: Any) -> Recorded:
    """Start copying every tensor of a structure to host memory, while the network continues.

    The copies are issued on the computing stream, where an in-place operation queued later can't
    overtake them. They go to pinned memory, so that the host does not wait.
    """
    leaves, rebuild = flatten(value)
    with torch.no_grad():
        copies = [_to_host(leaf.detach()) for leaf in leaves]
    devices = {leaf.device for leaf in leaves if leaf.device.type == "cuda"}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return copied(rebuild(copies), events)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
        return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

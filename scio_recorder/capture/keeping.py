"""Keeping outputs so that nothing that runs later can change the record.

NOTE [What a record holds]

1. Reference: the tensor itself. Its version counter, noted here and compared whenever the record is
   read, shows whether an in-place operation touched it or a view of it. Then reading raises, and
   the layer is copied from the next pass on.
2. Copy: the copy of a tensor on the graph takes the tensor's place there, see `own_copy`.
3. Exchange: an in-place operation on a view cuts the view's place out of the graph. So a view on
   the graph whose memory nobody else holds is kept itself, and whoever holds it holds a copy from
   then on, see `exchange`.

While it is unknown whether a copy is needed (LEARN), one is made, and the tensor that the network
goes on with is watched. If it was overwritten by the end of the pass, copies are made from then on;
otherwise references suffice. What was learned holds for a *setting*: everything but the data that
decides what a network does in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.capture.program import Program
from scio_recorder.layer import RowIdx
from scio_recorder.nets.records import Recorded
from scio_recorder.nets.records import copied as as_complete
from scio_recorder.postprocessors.assigning import Assigned
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import refuse_lost
from scio_recorder.tensors.ownership import Hold, exchange, has_place, own_copy
from scio_recorder.tensors.properties import inner_tensors, memories_of, same_bits, version_of
from scio_recorder.tensors.structures import Apart, Rebuild, fold, tensors

# The kinds of keeping. LEARN copies and watches whether that was needed. REFERENCE refers to the
# tensors of a structure, and BARE does if none is a wrapper of others: then a hook need only note
# plain values. Of several calls, the one that needs most decides: kinds are in that order.
LEARN, REFERENCE, BARE, COPY = range(4)
# The two things of each call that have a kind.
OUTPUT, INPUT = range(2)

_Kinds: TypeAlias = "tuple[list[int], list[int]]"
_training = operator.itemgetter("training")


class Settings:
    """Distinguishes settings, cheaply: this runs in every pass, however few layers are recorded."""

    def __init__(self, net: nn.Module) -> None:
        # Flags are read from the instances' dictionaries: attribute access on a module is slow. A
        # scripted part keeps its flag elsewhere.
        states = [module.__dict__ for module in net.modules()]
        self._states = [state for state in states if "training" in state]

    def key(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        posts: Assigned,
        stops: bool,
    ) -> object:
        """Return a key that is equal for passes in the same setting."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            inputs: object = args[0].dtype
        else:
            inputs = (_structure(args), _structure(kwargs))
        if posts.acts:
            inputs = (inputs, posts.signature)
        return (
            bytes(map(_training, self._states)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            private.is_any_autocast_on(),
            stops,
            inputs,
        )


class Setting:
    """The knowledge about a network in one setting; it improves from pass to pass.

    Attributes
    ----------
    kinds : pair of list of int
        The kinds of outputs and of inputs by position; replaced, never changed, when more is known.
    input_kinds : list of int
        The same for the inputs of each entry, whose call is known only when it returns.
    fast : list of bool
        For each entry, whether a hook need only note its output.
    noted : dict of int to int
        The entries of functions whose inputs need only be noted with the output, and the position
        of the call of each.
    is_new : bool
        Whether no pass has ended yet.
    counts_writes : bool
        Whether version counters have told of all writes to what calls return once more.
    calls_compiled : bool
        Whether own code with recorded operations calls functions that others have compiled.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        kind = {"auto": LEARN, "never": REFERENCE, "always": COPY}[program.options.copy]
        self.kinds = [kind] * len(program.expected), [kind] * len(program.expected)
        self.input_kinds = [kind] * len(program.positions)
        self.is_new = self.counts_writes = True
        self.calls_compiled = False
        self.fast = program.never_fast
        self.noted: dict[int, int] = {}
        self.is_fast = False
        # The layers whose outputs were searched for tensors that no copy can have, each with the
        # types of what was searched.
        self.searched: set[object] = set()

    def learn(self, before: _Kinds, seen: Iterable[tuple[int, int, int]]) -> None:
        """Keep from now on as a pass has shown: OUTPUT or INPUT, position and kind."""
        kinds = list(before[OUTPUT]), list(before[INPUT])
        for what, position, kind in seen:
            kinds[what][position] = max(kinds[what][position], kind)
        # Another thread may have learned more in the meantime.
        if kinds != before and before is self.kinds:
            program, options = self._program, self._program.options
            of_calls = [[kinds[INPUT][at] for at in places] for places in program.positions]
            self.input_kinds = [
                LEARN if LEARN in own else max(own, default=COPY) for own in of_calls
            ]
            is_simple = not (options.inputs or options.gradients or options.offload)
            fast = [
                is_simple
                and all(
                    program.callers[at] is None
                    and kinds[OUTPUT][at] == BARE
                    and program.labels[at] is not None
                    for at in positions
                )
                for positions in program.positions
            ]
            self.noted = {
                entry: program.positions[entry][0]
                for entry in program.keeps_inputs
                if fast[entry] and of_calls[entry] == [BARE]
            }
            self.is_fast = all(fast) and len(self.noted) == len(program.keeps_inputs)
            self.fast = [each and at not in program.keeps_inputs for at, each in enumerate(fast)]
            self.kinds = kinds

    def copy(self, label: RowIdx) -> None:
        """Copy what is kept of a layer, and of its attention, from the next pass on."""
        calls = self._program.attention.get((label[0], label[1]), ())
        rows = {label, *(row.label for row in calls)}
        places = [at for at, known in enumerate(self._program.labels) if known in rows]
        self.learn(self.kinds, [(what, at, COPY) for what in (OUTPUT, INPUT) for at in places])


class KeptTensor:
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
        self.exposed_by: KeptTensor | None = None

    @property
    def is_overwritten(self) -> bool:
        """Whether the network overwrote the tensor that it was given, counted by torch or not.

        What is learned about one layer must not depend on what is done for another, so an overwrite
        that an exchange prevented counts too.
        """
        return (
            version_of(self.used) != self.used_version
            or (self.exposed_by is not None and self.exposed_by.is_overwritten)
            or not same_bits(self.tensor, self.used)
        )


class KeptValue(NamedTuple):
    """One recorded structure until the pass ends."""

    leaves: list[KeptTensor]
    rebuild: Rebuild

    def record(self, hold: Hold) -> Recorded:
        """Return the record that is left when the pass has ended."""
        return Recorded([hold(leaf.tensor, leaf.version) for leaf in self.leaves], self.rebuild)

    def next_kind(self, kind: int, lasting: set[int]) -> int:
        """Return the kind to keep it by from now on, given memory that outlives the pass."""
        # Hooks on the fast path look at the counter of a tensor, not at those of tensors inside.
        is_bare = all(inner_tensors(leaf.used)[0] is leaf.used for leaf in self.leaves)
        reference = BARE if is_bare else REFERENCE
        if kind != LEARN:
            return max(kind, reference)
        for leaf in self.leaves:
            # Tensors of inference mode have no version counter: overwriting them can't be noticed.
            is_unknown = version_of(leaf.used) == -1 or memories_of(leaf.used) & lasting
            if is_unknown or leaf.is_overwritten:
                return COPY
        return reference


NOTHING = KeptValue([], lambda leaves: None)


class Keeper:
    """Keeps values of one pass.

    Modules often return what an inner module returned, and one copy serves both.

    Attributes
    ----------
    is_learning : bool
        Whether anything was kept of which the setting can learn.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        # By the ids of the tensors that were copied.
        self._copied: dict[int, KeptTensor] = {}
        self.is_learning = False

    def keep(self, apart: Apart, kind: int, onward: Any = None) -> tuple[KeptValue, list[Tensor]]:
        """Keep an input or output, and return it with the tensors that stand for it on the graph.

        ``onward`` is what the network goes on with instead of an output, if anything. Inputs, for
        which it is left out, are never exchanged: a forward must receive what it was given.
        """
        value, leaves, rebuild, _ = apart
        self.is_learning |= kind in (LEARN, REFERENCE)
        is_output = onward is not None
        if kind in (REFERENCE, BARE) and is_output and onward is not value:
            # A tensor that a post-processor made from the record itself could change it later.
            memory = {one for tensor in tensors(onward) for one in memories_of(tensor)}
            kind = COPY if any(memories_of(leaf) & memory for leaf in leaves) else kind
        kept = [self._keep_tensor(leaf, kind, is_output) for leaf in leaves]
        pairs = zip(kept, leaves, strict=True)
        on_graph = [own.tensor if has_place(own.tensor) else leaf for own, leaf in pairs]
        return KeptValue(kept, rebuild), on_graph

    def _keep_tensor(self, leaf: Tensor, kind: int, is_output: bool) -> KeptTensor:
        if kind in (REFERENCE, BARE) and version_of(leaf) != -1:
            return KeptTensor(leaf, leaf)
        known = self._known(leaf, kind)
        view = inner = None
        if is_output and has_place(leaf):
            # Nothing here may hold the base of the view. The caller of an inner module holds it
            # until it returns, and then the same view comes once more, so this is tried again.
            inner = self._copied.get(id(private.base_of(leaf)))
            view = exchange(leaf, own_references=inner is not None)
        if known is None:
            copy = own_copy(leaf) if view is None else view
            known = self._copied[id(leaf)] = KeptTensor(copy, leaf)
        elif view is not None:
            known.tensor, known.version = view, version_of(view)
        if view is not None and inner is not None:
            inner.exposed_by = known
        return known

    def _known(self, leaf: Tensor, kind: int) -> KeptTensor | None:
        """Return the copy of a tensor, unless it was changed since."""
        known, setting = self._copied.get(id(leaf)), self._setting
        # A tensor that an inner module returned inside an autograd Function comes onto the graph
        # later.
        if (
            known is None
            or not known.used_version == version_of(leaf) != -1
            or known.tensor.requires_grad != leaf.requires_grad
        ):
            return None
        # Torch doesn't count all writes. To compare waits for a GPU, so only the first pass does.
        if kind == LEARN or setting.is_new:
            setting.counts_writes &= (is_same := same_bits(known.tensor, leaf))
            return known if is_same else None
        return known if setting.counts_writes else None

    def end(self) -> None:
        """Drop what the network goes on with: records may be kept for long, and read late."""
        for known in self._copied.values():
            known.used = known.tensor
        self._copied.clear()


@private.without_modes
def offload(apart: Apart) -> Recorded:
    """Start copying every tensor of a structure to host memory, while the network continues.

    The copies are issued on the computing stream, where an in-place operation queued later can't
    overtake them. They go to pinned memory, so that the host does not wait.
    """
    _, leaves, rebuild, _ = apart
    with torch.no_grad():
        copies = [_to_host(leaf.detach()) for leaf in leaves]
    devices = {leaf.device for leaf in leaves if leaf.device.type == "cuda"}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return as_complete(rebuild(copies), events)


def _to_host(tensor: Tensor) -> Tensor:
    refuse_lost(tensor)
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
        return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _structure(value: Any) -> object:
    return fold(value, _kind_of, lambda container, parts: (type(container), *parts))


def _kind_of(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype if type(value) is Tensor else (type(value), value.dtype)
    return value if isinstance(value, str) else type(value)

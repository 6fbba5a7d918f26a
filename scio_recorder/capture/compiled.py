"""A pass under ``torch.compile``: plain dictionaries, since dynamo must follow all of it.

NOTE [Memory of a CUDA graph]

A CUDA graph, as ``mode="reduce-overhead"`` makes, writes what it returns to the same memory in
every pass, also while somebody holds it, and no version counts. An allocator never gives out memory
that is held. So one tensor of each pass is held until the next one has ended: if that has the same
address, the memory is a graph's, and from then on records are copied when a pass ends, before
another graph can run. So are those of the first passes, until that is known, and all other records
when they are looked at.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scio_recorder.capture.program import Program
from scio_recorder.errors import FlowError, PostprocessorError, UnsupportedNetError
from scio_recorder.layer import RowIdx, few
from scio_recorder.nets.records import Records, copied
from scio_recorder.postprocessors.assigning import Postprocessor
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import holder_out_of_sight, taken_apart, tensors

_COMPILED = (
    "the pass was compiled, and operations are seen in passes that are not: run the recorder "
    "without torch.compile"
)


class CompiledPass:
    """The state of one pass while it is traced; records are detached copies."""

    # The streams on which it ran, which can't be asked for while it is traced.
    streams: tuple[int, ...] = ()
    # Compiled code sets each attribute of the object again: what rarely changes is the class's.
    # Whether a post-processor runs, whose own calls of modules are no part of the pass.
    is_aside = False
    has_hooks = True
    # Whether copies were taken off a graph.
    is_on_graph = False
    _has_own_memory = False

    def __init__(
        self, program: Program, posts: dict[RowIdx, Postprocessor] | None, keeps: bool
    ) -> None:
        self.program = program
        self.posts = posts
        self.keeps = keeps
        # Not a dictionary, whose keys compiled code would look for in each module's hooks.
        self.counts = [0] * len(program.positions)
        self.values: dict[RowIdx, Any] = {}
        # The modules that have hooks of others behind ours, whose changes a record misses.
        self.hooks_behind: dict[int, bool] = {}

    def receive(self, index: int, output: Any) -> Any:
        """Take a module's output; return what the network goes on with, None for the same."""
        if self.is_aside:
            return None
        count = self.counts[index]
        self.counts[index] = count + 1
        positions = self.program.positions[index]
        position = count if self.program.counts_calls else 0
        label = self.program.labels[positions[position]] if position < len(positions) else None
        if label is None:
            return None
        handed = None
        if isinstance(output, Tensor) and output.requires_grad:
            self.is_on_graph = True
        before = _copy(output) if self.keeps else None
        if self.posts is not None and label in self.posts:
            if index in self.hooks_behind:
                raise PostprocessorError(
                    f"another hook acts on layer {label} behind the post-processor in a compiled "
                    "pass: call record(...) again, after which it acts before"
                )
            self.is_aside = True
            handed = self.posts[label](output)
            self.is_aside = False
            if handed is not None and isinstance(output, Tensor) != isinstance(handed, Tensor):
                raise PostprocessorError(
                    f"the post-processor of layer {label} returned another type"
                )
            is_tensor = isinstance(output, Tensor) and isinstance(handed, Tensor)
            if is_tensor and output.shape[:1] != handed.shape[:1]:
                raise PostprocessorError(
                    f"the post-processor of layer {label} changed the length of dimension 0"
                )
            # A post-processor that works in place changes the record too.
            before = _copy(output) if self.keeps else None
        if self.keeps and self.program.counts_calls:
            self.values[label] = before
        elif self.keeps:
            self.values[label] = (*self.values.get(label, ()), before)
        return handed

    @property
    def first_tensor(self) -> Tensor | None:
        """A tensor of the records; None if there is none, or one without numbers."""
        tensor = next((part for value in self.values.values() for part in tensors(value)), None)
        return tensor if tensor is not None and tensor.numel() else None

    def copy_records(self) -> None:
        """Move the records to memory of their own, see NOTE [Memory of a CUDA graph]."""
        if not self._has_own_memory:
            self._has_own_memory = True
            for label, value in self.values.items():
                # One after the other, so that there are never two of all.
                self.values[label] = _copy(value)

    def records(self) -> Records:
        """Return copies of the activations; raise as `checked` does."""
        private.run_on_streams(self.streams, self.copy_records)
        copies = {label: copied(value) for label, value in self.checked().items()}
        records = Records(self.program.architecture, copies)
        records.streams = self.streams
        records.reasons = dict.fromkeys(self.program.own_code, _COMPILED)
        return records

    def checked(self) -> dict[RowIdx, Any]:
        """Return the activations themselves, by label.

        Raises
        ------
        FlowError
            Layers ran more or less often than at labelling. Only here: in a compiled pass there is
            no place to raise it without a graph break.
        UnsupportedNetError
            A layer returned an object whose tensors a compiled pass can't copy, or a hook acted
            behind that of the recorder.
        """
        program, values = self.program, self.values
        if (fault := self._fault()) is not None:
            raise UnsupportedNetError(
                f"{fault}, so that records of this compiled pass are not what the layers returned: "
                "run the pass again, which compiles it anew"
            )
        if not program.counts_calls:
            layers = [label for label in program.order if label not in program.own_code]
            values = {label: values.get(label, ()) for label in layers}
        elif wrong := program.wrong_calls(dict(enumerate(self.counts)), of_functions=False):
            raise FlowError(
                "in the compiled pass, modules with recorded layers ran more or less often than at "
                f"labelling: {'; '.join(wrong)}. Compile the recorder after record(), and call it "
                "as for labelling"
            )
        for label, value in values.items():
            self._check_is_copy(label, value)
        return values

    def _fault(self) -> str | None:
        """Say why the hooks can't have seen what the layers returned; None if they have."""
        if not self.has_hooks:
            return "a pass that failed has taken the recorder's hooks away"
        layers = few(self.program.layers_of(self.hooks_behind), 4)
        return f"another hook acts behind the recorder's on {layers}" if layers else None

    def _check_is_copy(self, label: RowIdx, value: Any) -> None:
        leaves, _ = private.flatten_registered(value)
        # Anything else is the network's own object, which later layers may have changed.
        own = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and tensors(leaf)]
        holder = own[0] if own else holder_out_of_sight(taken_apart(value).shared)
        if holder is not None:
            raise UnsupportedNetError(
                f"layer {self.program.architecture[label]} returned a {type(holder).__name__}, "
                "whose tensors a compiled pass can't copy: let the layer return them in a "
                "tuple, list or dict, or in a dataclass that torch.export.register_dataclass "
                "was told of, record a layer inside it, or call the recorder uncompiled"
            )


class GraphMemory:
    """Finds out whether records of compiled passes lie in memory that every pass writes again."""

    _NUM_LEARNING = 3

    _held: Tensor | None = None
    _is_reused = False
    _num_passes = 0

    def end(self, current: CompiledPass) -> None:
        """Take note of a pass that has ended, and copy its records if that may be needed."""
        current.streams = private.current_streams()
        before, self._held = self._held, current.first_tensor
        if before is not None and before is not self._held and self._held is not None:
            self._is_reused |= _address(before) in (None, _address(self._held))
        self._num_passes += 1
        if self._is_reused or self._num_passes <= self._NUM_LEARNING:
            current.copy_records()


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Torch has taken the memory of a graph back.
        return None


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    leaves, rebuild = private.flatten_registered(value)
    return rebuild([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])

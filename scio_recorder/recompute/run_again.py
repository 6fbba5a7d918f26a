"""Running a recorded call of a module again, as it ran before.

NOTE [Why a recomputed activation is the original one]

The nearest recorded module around the layer runs again on the inputs recorded for it, in the state
noted at that call: random numbers, modes, training flags, buffers. Post-processors of that pass act
again. The module's output must equal its recorded output bit for bit, or nothing is handed out. The
output does not show every change, so the weights are compared too: in a live recorder their version
counters and some values of each, in a collected recording a digest of all.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.capture.hooks import follow, precede, remove_all
from scio_recorder.errors import RecomputeError
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.nets.state.restoring import preserved_rng, restored
from scio_recorder.nets.state.sharded import needs_fsdp
from scio_recorder.postprocessors.assigning import Assigned, Postprocessor
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import StridedCopy, is_plain
from scio_recorder.tensors.digests import digest_of
from scio_recorder.tensors.structures import flatten, map_tensors

_NOT_KEPT = (
    "attributes of modules that change from pass to pass, buffers of more than 256 KiB that "
    "forward writes in evaluation mode, inputs that share memory with each other or with weights "
    "and are changed in place, or a few numbers of the weights written through .data"
)
_OTHER_KERNELS = (
    "not deterministic (see torch.use_deterministic_algorithms), other ones chosen for attention "
    "or matrix products, other ones where inner modules have hooks, another number of threads or "
    "another version of torch"
)


@dataclass(frozen=True)
class Call:
    """A recorded call of a module that can be run again.

    Parameters
    ----------
    label : (int, int)
        The layer.
    inputs : Inputs
        The inputs that its forward received.
    output : str
        The digest of the call's original output, see `digest_of`.
    moment : Moment
        The state at that call.
    explain_change : callable
        Says what in a module is known to have changed since; None for nothing.
    posts : mapping
        The post-processors of that pass, by label.
    """

    label: DepthIdx
    inputs: Inputs
    output: str
    moment: Moment
    explain_change: Callable[[nn.Module], str | None]
    posts: Mapping[DepthIdx, Postprocessor] = field(default_factory=dict)


def rerun(architecture: Architecture, call: Call, targets: set[DepthIdx]) -> dict[DepthIdx, Any]:
    """Run a recorded call again, and return its output, or the outputs of layers inside it.

    To be called inside `untouched`.

    Parameters
    ----------
    architecture : Architecture
        The layers, with their modules.
    call : Call
        The call to run.
    targets : set of (int, int)
        Layers inside it; the layer of the call itself may be among them.

    Returns
    -------
    dict
        Label -> activation, copied and off the graph.

    Raises
    ------
    RecomputeError
        The call returns something else now.
    """
    layer = architecture[call.label]
    again, module = _Rerun(architecture, call, targets), layer.module
    assert module is not None, "the architecture of a recorder has modules"
    try:
        change = call.explain_change(module)
        if change is not None:
            raise RecomputeError(f"layer {layer} can't be run again: {change}")
        with again.watching(module), call.moment.entered(module):
            args, kwargs = _inputs_again(call)
            module(*args, **kwargs)
    except RecomputeError:
        raise
    except Exception as error:
        raise RecomputeError(
            f"layer {layer} failed when it was run again: {type(error).__name__}: {error}"
        ) from error
    if again.differs:
        raise RecomputeError(
            f"layer {layer} did not return the recorded output when it ran again. Either it "
            f"depends on something that is not kept: {_NOT_KEPT}. Or other kernels ran: "
            f"{_OTHER_KERNELS}. Recompute with the same net and the original settings"
        )
    return again.found


@contextlib.contextmanager
def untouched(architecture: Architecture, labels: Iterable[DepthIdx]) -> Iterator[None]:
    """Restore, at the end of the block, everything that re-runs of these layers change.

    Parameters are copied like everything else: a forward may write to them without a new version
    (``parameter.data``), which would be noticed too late.

    Parameters
    ----------
    architecture : Architecture
        The layers, with their modules.
    labels : iterable of (int, int)
        Layers that run again in the block.
    """
    layers = [architecture[label] for label in labels]
    for layer in layers:
        _refuse_fsdp(layer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_rng())
        for module in {layer.module for layer in layers}:
            if module is not None:
                stack.enter_context(restored(module, keep_hooks=True))
        yield


def _refuse_fsdp(layer: Layer) -> None:
    if layer.module is not None and needs_fsdp(layer.module):
        raise RecomputeError(
            f"layer {layer} can't be run again: FSDP provides parameters only to passes of the "
            "whole net. Record the layer itself, or recompute with a net that is not sharded"
        )


class _Rerun:
    """One re-run: the outputs of layers inside, and whether the call's own output is the same."""

    def __init__(self, architecture: Architecture, call: Call, targets: set[DepthIdx]) -> None:
        self._call = call
        self._targets = targets
        self._posts = Assigned(call.posts)
        self._is_other = False
        self.found: dict[DepthIdx, Any] = {}
        modules = {architecture[label].module for label in targets | {*call.posts, call.label}}
        # Rows are in the order in which calls start, and a call inside returns before this one.
        rows, own = list(architecture.values()), architecture[call.label]
        last = own.completion or 0
        inside = [
            row
            for row in rows[rows.index(own) :]
            if row.module in modules and row.completion is not None and row.completion <= last
        ]
        # The calls of each module that are still to come.
        self._starts = _by_module(inside)
        self._returns = _by_module(sorted(inside, key=lambda row: row.completion or 0))

    @property
    def differs(self) -> bool:
        """Whether calls are missing or surplus, or the call's own output differs."""
        return self._is_other or any(self._returns.values())

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Take the outputs of modules inside the block."""
        handles = [follow(watched, self._receive) for watched in self._returns]
        if self._posts.on_inputs:
            handles += [precede(watched, self._receive_inputs) for watched in self._starts]
        # Forward received the recorded inputs, so these hooks have acted on them already.
        _, hooks = private.forward_hooks(module)
        before = dict(hooks)
        hooks.clear()
        try:
            yield
        finally:
            hooks.update(before)
            remove_all(handles)

    def _receive_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        layer = self._starts[module].popleft() if self._starts[module] else None
        if layer is None or layer.label == self._call.label:
            # The call's own inputs were recorded after the post-processor.
            return None
        return self._posts.before(layer.label, args, kwargs, layer)

    def _receive(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._returns[module]:
            self._is_other = True
            return None
        layer = self._returns[module].popleft()
        label = layer.label
        handed = self._posts.after(label, output, layer)
        if label in self._targets:
            self.found[label] = map_tensors(copied, output)
        if label == self._call.label:
            self._is_other |= digest_of(output) != self._call.output
        return None if handed is output else handed


def _by_module(rows: Iterable[Layer]) -> dict[nn.Module, deque[Layer]]:
    found: dict[nn.Module, deque[Layer]] = {}
    for row in rows:
        assert row.module is not None
        found.setdefault(row.module, deque()).append(row)
    return found


def _inputs_again(call: Call) -> Inputs:
    """Copy the inputs, as similar to the original ones as possible, in the original state."""
    leaves, rebuild = flatten(call.inputs)
    moment = call.moment
    if len(leaves) != len(moment.devices):
        raise RecomputeError("the recorded inputs have changed since that pass")
    noted = zip(leaves, moment.devices, moment.requires_grad, strict=True)
    copies = [_input_again(leaf.to(device), requires) for leaf, device, requires in noted]
    again: Inputs = rebuild(copies)
    return again


def _input_again(leaf: Tensor, requires_grad: bool) -> Tensor:
    copy = StridedCopy(leaf) if is_plain(leaf) else None
    memory = leaf.detach().clone() if copy is None else copy.kept
    if requires_grad and not memory.is_inference():
        with torch.enable_grad():
            # Not a leaf: modules may work in place on their inputs.
            memory = memory.requires_grad_().clone()
    return memory if copy is None else copy.restored(memory)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy off the graph."""
    return tensor.detach().clone()

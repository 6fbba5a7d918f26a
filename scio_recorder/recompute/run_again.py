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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.capture.hooks import CallHook, CallHooks
from scio_recorder.errors import RecomputeError
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.sharded import needs_fsdp
from scio_recorder.nets.state.untouched import untouched as net_untouched
from scio_recorder.postprocessors.assigning import Assigned, Postprocessor
from scio_recorder.stores.kept_inputs import KeptCall
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import StridedCopy, is_plain
from scio_recorder.tensors.digests import Weights, digest_of
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
        for module in {layer.module for layer in layers}:
            if module is not None:
                stack.enter_context(net_untouched(module))
        yield


def _refuse_fsdp(layer: Layer) -> None:
    if layer.module is not None and needs_fsdp(layer.module):
        raise RecomputeError(
            f"layer {layer} can't be run again: FSDP provides parameters only to passes of the "
            "whole net. Record the layer itself, or recompute with a net that is not sharded"
        )


@dataclass(eq=False)
class Rerun:
    """A kept call of a layer that runs again, for its output or for those of layers inside it.

    Parameters
    ----------
    architecture : Architecture
        The layers, with their modules.
    label : (int, int)
        The layer.
    call : KeptCall
        The call to run.
    targets : set of (int, int)
        Layers inside it; the layer itself may be among them.
    posts : mapping
        The post-processors of that pass, by label.
    weights : Weights, optional
        Takes the digest of weights to compare with that of the kept call.
    """

    architecture: Architecture
    label: DepthIdx
    call: KeptCall
    targets: set[DepthIdx]
    posts: Mapping[DepthIdx, Postprocessor]
    weights: Weights | None = None

    def __post_init__(self) -> None:
        self._layer = layer = self.architecture[self.label]
        self._posts = Assigned(self.posts)
        self._found: dict[DepthIdx, Any] = {}
        self._is_other = False
        labels = {*self.targets, *self.posts, self.label}
        modules = {self.architecture[label].module for label in labels}
        # Rows are in the order in which calls start, and a call inside returns before this one.
        rows, last = list(self.architecture.values()), layer.completion or 0
        inside = [
            row
            for row in rows[rows.index(layer) :]
            if row.module in modules and row.completion is not None and row.completion <= last
        ]
        # The calls of each module that are still to come.
        self._starts = _by_module(inside)
        self._returns = _by_module(sorted(inside, key=lambda row: row.completion or 0))

    def run(self) -> dict[DepthIdx, Any]:
        """Run the call, inside `untouched`, and return copies of the targets' outputs.

        Returns
        -------
        dict
            Label -> activation, off the graph.

        Raises
        ------
        RecomputeError
            The call returns something else now.
        """
        layer, module = self._layer, self._layer.module
        assert module is not None, "the architecture of a recorder has modules"
        try:
            change = self._change(module)
            if change is not None:
                raise RecomputeError(f"layer {layer} can't be run again: {change}")
            with self._watching(module), self.call.moment.entered(module):
                args, kwargs = _inputs_again(self.call)
                module(*args, **kwargs)
        except RecomputeError:
            raise
        except Exception as error:
            raise RecomputeError(
                f"layer {layer} failed when it was run again: {type(error).__name__}: {error}"
            ) from error
        if self._is_other or any(self._returns.values()):
            raise RecomputeError(
                f"layer {layer} did not return the recorded output when it ran again. Either it "
                f"depends on something that is not kept: {_NOT_KEPT}. Or other kernels ran: "
                f"{_OTHER_KERNELS}. Recompute with the same net and the original settings"
            )
        return self._found

    def _change(self, module: nn.Module) -> str | None:
        now = self.call.weights if self.weights is None else self.weights.digest(module)
        change = self.call.moment.explain_change(module)
        # A module with the same output may have worked differently inside.
        if change is None and now != self.call.weights:
            return "its weights have changed since the collection: load the original ones"
        return change

    @contextlib.contextmanager
    def _watching(self, module: nn.Module) -> Iterator[None]:
        """Take the outputs of modules inside the block."""
        hooks = CallHooks()
        before = self._receive_inputs if self._posts.on_inputs else None
        hooks.add(*(CallHook(one, "", before, self._receive) for one in self._returns))
        # Forward received the recorded inputs, so these hooks have acted on them already.
        _, own = private.forward_hooks(module)
        kept = dict(own)
        own.clear()
        try:
            yield
        finally:
            own.update(kept)
            hooks.remove()

    def _receive_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        layer = self._starts[module].popleft() if self._starts[module] else None
        if layer is None or layer is self._layer:
            # The call's own inputs were recorded after the post-processor.
            return None
        return self._posts.before(layer.label, args, kwargs, layer)

    def _receive(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._returns[module]:
            self._is_other = True
            return None
        layer = self._returns[module].popleft()
        handed = self._posts.after(layer.label, output, layer)
        if layer.label in self.targets:
            self._found[layer.label] = map_tensors(copied, output)
        if layer is self._layer:
            self._is_other |= digest_of(output) != self.call.output
        return None if handed is output else handed


def _by_module(rows: Iterable[Layer]) -> dict[nn.Module, deque[Layer]]:
    found: dict[nn.Module, deque[Layer]] = {}
    for row in rows:
        assert row.module is not None
        found.setdefault(row.module, deque()).append(row)
    return found


def _inputs_again(call: KeptCall) -> Inputs:
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

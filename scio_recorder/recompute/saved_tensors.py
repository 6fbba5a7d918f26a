"""Moving or shrinking the tensors that autograd saves for the backward pass in chosen layers.

NOTE [Hooks inside hooks]

Around each call of a chosen module stands ``torch.autograd.graph.saved_tensors_hooks``. Only the
innermost hooks on saved tensors act, so ours hand on their results to the hooks that were active
before. Under activation checkpointing the earlier hooks count the saved tensors, so ours stay away.
With any hook, autograd does not check versions. If no others are active, ours do that.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder import Architecture
from scio_recorder.errors import MutationError, SelectorTypeError
from scio_recorder.layer import RowIdx
from scio_recorder.lowlevel import CallWrapper, select_layers
from scio_recorder.tensors import (
    StridedCopy,
    floating_or_none,
    is_plain,
    private,
    usable_device,
    version_counter,
    version_of,
)

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: write that operation out of place, or run the forward and the backward pass inside "
    "torch.autograd.graph.allow_mutation_on_saved_tensors()"
)


class SavedTensors:
    """A block in which autograd's saved tensors of chosen layers are moved or shrunk.

    Parameters
    ----------
    architecture : Architecture
        Resolves the selectors.
    selectors : sequence
        The layers.
    device : torch.device or str, optional
        Where to keep tensors.
    pin_memory : bool
        Whether tensors from a GPU are kept in pinned memory.
    dtype : torch.dtype, optional
        The dtype in which to keep wider floating-point tensors.
    """

    def __init__(
        self,
        architecture: Architecture,
        selectors: Sequence[Any],
        device: torch.device | str | None,
        pin_memory: bool,
        dtype: torch.dtype | None,
    ) -> None:
        if not selectors:
            raise SelectorTypeError('no layers are named: write saved_tensors("layer3.*", ...)')
        chosen = select_layers(architecture, selectors, "saved_tensors")
        self._device = _usable_device(device)
        self._dtype = floating_or_none(dtype, SelectorTypeError)
        self._pin_memory = pin_memory
        self._modules = _modules_of(architecture, set(chosen))
        self._wrappers: list[CallWrapper] = []
        self._copies: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()

    def __enter__(self) -> Self:
        if self._wrappers:
            raise RuntimeError("this saved_tensors block was entered already: make another one")
        modules = [module for module in self._modules if not private.calls_compiled(module)]
        self._wrappers = [CallWrapper(module, partial(self._run, module)) for module in modules]
        for wrapper in self._wrappers:
            wrapper.put_around()
        return self

    def __exit__(self, *exception: object) -> None:
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers = []

    def _run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        active = private.active_saved_tensors_hooks()
        if (
            not torch.is_grad_enabled()
            # Checkpointing runs a region again, and must find what its first run saved.
            or private.backward_pass() != -1
            or (active is not None and self._is_own_or_checkpointing(active[0]))
        ):
            return call(*args, **kwargs)
        with saved_tensors_hooks(_Packer(self, module, active).pack, lambda unpack: unpack()):
            return call(*args, **kwargs)

    def _is_own_or_checkpointing(self, pack: Any) -> bool:
        packer = getattr(pack, "__self__", None)
        if isinstance(packer, _Packer) and packer.owner is self:
            return True
        return getattr(inspect.unwrap(pack), "__module__", "") == checkpoint.__name__

    def shrink(self, tensor: Tensor) -> StridedCopy | None:
        """Return a copy to keep, the same for one tensor; None if the tensor stays as it is."""
        dtype = self._dtype if tensor.is_floating_point() else None
        if dtype is not None and tensor.itemsize <= dtype.itemsize:
            dtype = None
        if dtype is None and self._device in (None, tensor.device):
            return None
        version, known = self._copies.get(tensor, (None, None))
        copy: StridedCopy | None = known() if version == version_of(tensor) else None
        if copy is None:
            pins = self._pin_memory and tensor.is_cuda and self._device == torch.device("cpu")
            copy = StridedCopy(tensor, self._device, dtype, pin_memory=pins)
            self._copies[tensor] = (version_of(tensor), weakref.ref(copy))
        return copy


class _Packer:
    """The hook that packs the tensors saved in one call of a module."""

    def __init__(self, owner: SavedTensors, module: nn.Module, active: Any) -> None:
        self.owner = owner
        # The hooks that were active before, which go on working.
        self._outer_pack: Callable[[Tensor], Any] | None = active and active[0]
        self._outer_unpack: Callable[[Any], Tensor] | None = active and active[1]
        outer = getattr(self._outer_pack, "__self__", None)
        self._checks: bool = active is None or (isinstance(outer, _Packer) and outer._checks)
        weights = [*module.parameters(), *module.buffers()]
        self._weights = {private.memory_of(tensor) for tensor in weights if is_plain(tensor)}

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a saved tensor, and return the function that gives it back."""
        copy = None if self._stays(tensor) else self.owner.shrink(tensor)
        # Shares the tensor's version counter; None if others check versions.
        counter = version_counter(tensor) if self._checks else None
        outer_unpack, version = self._outer_unpack, counter is not None and version_of(counter)
        if self._outer_pack is not None:
            value = self._outer_pack(tensor if copy is None else copy.kept)
        else:
            # A saved output itself must not be held: it holds the node that saves it.
            value = tensor.detach() if copy is None else copy.kept

        def unpack() -> Tensor:
            if counter is not None and version_of(counter) != version:
                raise MutationError(_CHANGED)
            back: Tensor = value if outer_unpack is None else outer_unpack(value)
            return back if copy is None else copy.restored(back)

        return unpack

    def _stays(self, tensor: Tensor) -> bool:
        owners = tensor, private.base_of(tensor)
        return (
            not is_plain(tensor)
            or tensor.numel() == 0
            or any(isinstance(owner, nn.Parameter) for owner in owners)
            or private.memory_of(tensor) in self._weights
            or private.is_saving_inputs_of_a_region()
        )


def _modules_of(architecture: Architecture, labels: set[RowIdx]) -> set[nn.Module]:
    """Return the modules of layers, all calls of which must be among them."""
    modules = set()
    for layer in (architecture[label] for label in labels):
        assert layer.module is not None
        if not labels.issuperset(architecture.calls(layer.module)):
            raise SelectorTypeError(
                f"layer {layer} is one of several calls of its module, and saved_tensors acts on "
                f'all calls of a module: write saved_tensors("{layer.name}", ...)'
            )
        modules.add(layer.module)
    return modules


def _usable_device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    usable = usable_device(device, SelectorTypeError)
    if usable.type == "meta":
        raise SelectorTypeError(
            'device="meta" keeps no numbers: write a device that does, such as "cpu"'
        )
    return usable

"""Moving or shrinking the tensors that autograd saves for the backward pass in chosen layers."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.hooks import observe, remove_all
from scio_recorder.errors import MutationError, SelectorTypeError
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.selection import select
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import usable_device
from scio_recorder.tensors.copies import StridedCopy, is_plain, version_counter


class SavedTensors:
    """A block in which autograd's saved tensors of chosen layers are moved or shrunk.

    NOTE [Hooks inside hooks]

    Only the latest hooks on saved tensors act. So ours, pushed when a chosen module starts and
    popped when it ends, hand on their results to the hooks that were active before. Under
    activation checkpointing the earlier hooks count the saved tensors, so ours stay away. With any
    hook, autograd does not check versions. If no others are active, ours do that.

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
        labels = set(select(architecture, selectors))
        self._device = _usable_device(device)
        self._dtype = _usable_dtype(dtype)
        self._pin_memory = pin_memory
        self._root = architecture[0, 1].module
        self._calls: dict[nn.Module, set[int]] = {}
        for label in sorted(labels):
            module = architecture[label].module
            assert module is not None
            self._calls.setdefault(module, set()).add(architecture[label].call)
        # Modules with all calls chosen need no counting, and work outside of full passes.
        self._whole = {m for m in self._calls if labels.issuperset(architecture.calls(m))}
        # The calls that are running, on each thread.
        self._open: list[_Open] = []
        self._local = _Local(self._open)
        self._handles: list[RemovableHandle] = []
        self._is_over = False
        self._copies: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()

    def __enter__(self) -> Self:
        if self._handles:
            raise RuntimeError("this saved_tensors block was entered already: make another one")
        assert self._root is not None
        self._is_over = False
        if self._whole != self._calls.keys():
            self._handles.append(observe(self._root, self._restart, "", before=True))
        for module in self._calls:
            self._handles.append(observe(module, self._start, "", before=True))
            self._handles.append(observe(module, self._stop, "", always=True))
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        # Hooks are not called after an interruption by the user.
        while self._local.open:
            self._local.close()
        self._remove_hooks_when_idle()

    def _remove_hooks_when_idle(self) -> None:
        # A call on another thread, which began in the block, needs the hook at its end.
        if self._is_over and not any(self._open):
            remove_all(self._handles)

    def _restart(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._local.counts.clear()

    def _start(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._local.counts[module]
        self._local.counts[module] += 1
        is_chosen = module in self._whole or call in self._calls[module]
        hooks = self._hooks(module) if is_chosen and torch.is_grad_enabled() else None
        if hooks is not None:
            hooks.__enter__()
        self._local.open.append((module, hooks))
        # In this order: either the end of the block sees the call, or the call sees the end.
        if self._is_over:
            self._local.close()
            self._remove_hooks_when_idle()

    def _stop(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Another pre-hook may have raised before ours was called.
        if self._local.open and self._local.open[-1][0] is module:
            self._local.close()
            self._remove_hooks_when_idle()

    def _hooks(self, module: nn.Module) -> saved_tensors_hooks | None:
        active = private.active_saved_tensors_hooks()
        if is_rerun() or (active is not None and _is_ours_or_checkpointing(active[0], self)):
            return None
        packer = _Packer(self, module, active)
        return saved_tensors_hooks(packer.pack, _Packed.unpack)

    def shrink(self, tensor: Tensor) -> StridedCopy | None:
        """Return a copy to keep, the same for one tensor; None if the tensor stays as it is."""
        is_wide = self._dtype is not None and tensor.is_floating_point()
        dtype = self._dtype if is_wide and tensor.itemsize > self._dtype.itemsize else None  # type: ignore[union-attr]  # is_wide says so
        if dtype is None and self._device in (None, tensor.device):
            return None
        version, known = self._copies.get(tensor, (None, None))
        copy: StridedCopy | None = known() if version == tensor._version else None
        if copy is None:
            pins = self._pin_memory and tensor.is_cuda and self._device == torch.device("cpu")
            copy = StridedCopy(tensor, self._device, dtype, pin_memory=pins)
            self._copies[tensor] = (tensor._version, weakref.ref(copy))
        return copy


_Open: TypeAlias = list[tuple[nn.Module, saved_tensors_hooks | None]]


class _Local(threading.local):
    """The calls that are running on one thread, and how many there were in this pass."""

    def __init__(self, open_on_threads: list[_Open]) -> None:
        self.open: _Open = []
        open_on_threads.append(self.open)
        self.counts: Counter[nn.Module] = Counter()

    def close(self) -> None:
        _, hooks = self.open.pop()
        if hooks is not None:
            hooks.__exit__()


class _Packer:
    """The hooks on the tensors saved in one call of a module."""

    def __init__(self, owner: SavedTensors, module: nn.Module, active: Any) -> None:
        self.owner = owner
        # The hooks that were active before, which go on working.
        self._outer_pack: Callable[[Tensor], Any] | None = active and active[0]
        self._outer_unpack: Callable[[Any], Tensor] | None = active and active[1]
        outer = getattr(self._outer_pack, "__self__", None)
        self._checks: bool = active is None or (isinstance(outer, _Packer) and outer._checks)
        own = [*module.parameters(), *module.buffers()]
        self._own = {private.memory_of(tensor) for tensor in own if is_plain(tensor)}

    def pack(self, tensor: Tensor) -> _Packed:
        stays = (
            not is_plain(tensor)
            or tensor.numel() == 0
            or self._is_parameter(tensor)
            or _is_input_of_a_region()
        )
        copy = None if stays else self.owner.shrink(tensor)
        watched = tensor if self._checks else None
        if self._outer_pack is not None:
            value = self._outer_pack(tensor if copy is None else copy.kept)
        else:
            # A saved output itself must not be held: it holds the node that saves it.
            value = tensor.detach() if copy is None else None
        return _Packed(value, copy, watched, self._outer_unpack)

    def _is_parameter(self, tensor: Tensor) -> bool:
        is_alias = isinstance(tensor, nn.Parameter) or isinstance(
            private.base_of(tensor), nn.Parameter
        )
        return is_alias or private.memory_of(tensor) in self._own


class _Packed:
    """The kept form of one saved tensor."""

    __slots__ = ("_copy", "_counter", "_outer_unpack", "_shown", "_value", "_version")

    def __init__(
        self,
        value: Any,
        copy: StridedCopy | None,
        watched: Tensor | None,
        outer_unpack: Callable[[Any], Tensor] | None,
    ) -> None:
        self._value = value
        self._copy = copy
        self._outer_unpack = outer_unpack
        self._counter = None if watched is None else version_counter(watched)
        self._version = 0 if watched is None else watched._version
        self._shown = "" if watched is None else f"{watched.type()} {list(watched.shape)}"

    def unpack(self) -> Tensor:
        if self._counter is not None and self._counter._version != self._version:
            raise MutationError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self._shown}] is at version {self._counter._version}; "
                f"expected version {self._version} instead. Write that operation out of place, or "
                "run the forward and the backward pass inside "
                "torch.autograd.graph.allow_mutation_on_saved_tensors()"
            )
        if self._outer_unpack is not None:
            value = self._outer_unpack(self._value)
            return value if self._copy is None else self._copy.restored(value)
        if self._copy is not None:
            return self._copy.restored()
        assert isinstance(self._value, Tensor)
        return self._value


def _is_ours_or_checkpointing(pack: Any, owner: SavedTensors) -> bool:
    packer = getattr(pack, "__self__", None)
    if isinstance(packer, _Packer) and packer.owner is owner:
        return True
    return getattr(inspect.unwrap(pack), "__module__", "") == "torch.utils.checkpoint"


def _is_input_of_a_region() -> bool:
    """Whether checkpointing itself is saving the inputs of its re-run."""
    callers = inspect.currentframe()
    for _ in range(5):
        if callers is not None and callers.f_code.co_filename == checkpoint.__file__:
            return True
        callers = None if callers is None else callers.f_back
    return False


def _usable_device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    found = usable_device(device, SelectorTypeError)
    if found.type == "meta":
        raise SelectorTypeError(
            'device="meta" keeps no numbers: write a device that does, such as "cpu"'
        )
    return found


def _usable_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise SelectorTypeError(
        f"dtype={dtype!r}: write a dtype of floating-point numbers, such as torch.bfloat16"
    )

"""Tensors that are held until they are read, and belong to the reader from then on.

NOTE [What was read stays as it was read]

The memory of a layer's output can outlive the pass: it may be a running state, a key-value cache,
an input buffer, a parameter, or the caller's result. Later passes, optimisers and the caller write
there. So the first read hands out the tensor itself only if nothing else holds it or its memory,
which reference counts show. Otherwise it hands out a copy, which takes the tensor's place in the
record. Copying at the first read costs nothing in a pass, and nothing for records that are never
read.

On the graph, a clone would be downstream of the tensor, and no loss would depend on it. So the copy
has the node of the tensor itself. Autograd makes such tensors: hooks on saved tensors put other
memory in the place of a tensor, and the tensor that comes back has the original node.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge, increment_version, saved_tensors_hooks
from torch.nn import Parameter
from torch.utils import swap_tensors

from scio_recorder.errors import UnsupportedTorchError
from scio_recorder.interpreter import num_references
from scio_recorder.tensors import private
from scio_recorder.tensors.properties import Version, has_memory, inner_tensors, version_of

# The version that no tensor has.
_LOST = -2


class HeldTensor:
    """A tensor in a record: the only reference to it, and the version that it must have.

    Reading freed memory would end the process, so the memory is looked at first.

    Parameters
    ----------
    tensor : torch.Tensor
        The held tensor.
    version : int, optional
        The version at which it is intact; by default the present one.

    Examples
    --------
    >>> state = torch.zeros(2)
    >>> held = HeldTensor(state)
    >>> read = held.read()
    >>> _ = state.add_(1)
    >>> read, held.is_intact
    (tensor([0., 0.]), True)
    """

    __slots__ = ("_is_own", "tensor", "version")

    def __init__(self, tensor: Tensor, version: Version | None = None) -> None:
        self.tensor = tensor
        self.version: Version = version_of(tensor) if version is None else version
        self._is_own = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or file has counters of its own, and no memory that was freed.
        return HeldTensor, (self.tensor,) if self.is_intact else (torch.empty(0), _LOST)

    @property
    def is_intact(self) -> bool:
        """Whether the tensor was not changed in place, and its memory was not freed."""
        is_intact = version_of(self.tensor) == self.version and has_memory(self.tensor)
        if not is_intact:
            # Memory that was freed may come back with other numbers.
            self.version = _LOST
        return is_intact

    def peek(self) -> Tensor:
        """Return the tensor, which other code may still change."""
        return self.tensor

    def read(self) -> Tensor:
        """Return the tensor, or the copy in its place, which nothing else can change."""
        if not self._is_own:
            if not _is_held_alone(self):
                self.tensor = own_copy(self.tensor)
                self.version = version_of(self.tensor)
            self._is_own = True
        return self.tensor


Hold: TypeAlias = Callable[[Tensor, Version], HeldTensor]


def holder() -> Hold:
    """Return a function that holds each tensor once, however often it is given.

    Returns
    -------
    callable
        ``(tensor, version) -> HeldTensor``. Layers often return what an inner layer returned.

    Examples
    --------
    >>> hold, tensor = holder(), torch.ones(1)
    >>> hold(tensor, 0) is hold(tensor, 0)
    True
    """
    known: dict[tuple[int, Version], HeldTensor] = {}

    def hold(tensor: Tensor, version: Version) -> HeldTensor:
        held = known.get((id(tensor), version))
        if held is None:
            held = known[id(tensor), version] = HeldTensor(tensor, version)
        return held

    return hold


# What a tuple may hold beside tensors: values that never change.
_CONSTANTS = {type(None), bool, int, float, str, torch.dtype, torch.device}


def plain_version(value: Any) -> Any:
    """Return the version of a plain tensor, or of a tuple those of its parts, None for constants.

    None if there is none, as of a tensor of inference mode or of a subclass, or of a tuple that
    holds anything else.

    Examples
    --------
    >>> x = torch.zeros(1)
    >>> plain_version(x.add_(1)), plain_version((x, (x, 3))), plain_version(([x],))
    (1, (1, (1, None)), None)
    """
    kind = type(value)
    try:
        if kind is Tensor or kind is Parameter:
            return value._version
        if kind is not tuple:
            return None
        versions = []
        for part in value:
            version, kind = None, type(part)
            if kind not in _CONSTANTS:
                version = part._version if kind is Tensor else plain_version(part)
                if version is None:
                    return None
            versions.append(version)
        return tuple(versions)
    except RuntimeError:
        # Of inference mode.
        return None


def has_place(tensor: Tensor) -> bool:
    """Whether a tensor has a place in autograd's graph.

    Autograd refuses to tell that of a view made without gradients, behind which something was
    written with them. The network may go on with such a view as long as it needs no gradient of it.

    Examples
    --------
    >>> x = torch.ones(2, requires_grad=True)
    >>> has_place(x), has_place(x * 2)
    (False, True)
    """
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


@private.without_modes
def own_copy(tensor: Tensor) -> Tensor:
    """Return a copy in new memory with the same place in the graph.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Returns
    -------
    torch.Tensor
        Detached if the tensor is.

    Examples
    --------
    >>> x = torch.ones(2, requires_grad=True)
    >>> hidden = x * 2
    >>> copy = own_copy(hidden)
    >>> out = hidden.mul_(hidden.detach().clone()).sum()
    >>> copy.tolist(), torch.autograd.grad(out, copy)
    ([2.0, 2.0], (tensor([2., 2.]),))
    """
    # A view of a leaf that was made without gradients claims to require one, but has no place in a
    # graph. Nor has a tensor of inference mode.
    is_base = not tensor.is_inference() and private.base_of(tensor) is None
    is_on_graph = has_place(tensor) or (is_base and tensor.is_leaf)
    if not has_memory(tensor):
        # Reading the record says so.
        return tensor.detach()
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return own_copy(tensor)
    if tensor.requires_grad and is_on_graph:
        try:
            return _copy_on_graph(tensor)
        except UnsupportedTorchError:
            raise
        except RuntimeError:
            # Autograd can't save some kinds, such as nested tensors with strides, and saves nothing
            # if hooks on saved tensors are disabled. A clone has a place behind the tensor's own.
            with torch.enable_grad():
                return tensor.clone()
    return tensor.detach().clone()


def _copy_on_graph(tensor: Tensor) -> Tensor:
    # The node that accumulates a leaf's gradient lives only while it is held.
    node = get_gradient_edge(tensor).node if tensor.is_leaf else None
    own_memory = saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda copy: copy)
    with torch.enable_grad(), own_memory:
        saving = _Saving.apply(tensor)  # type: ignore[no-untyped-call]  # torch's own
        # Up to torch 2.11, the node drops its saved tensor with the last tensor that leads to it.
        copy: Tensor = saving.grad_fn.saved_tensors[0]
    if type(copy) is Tensor and type(tensor) is not Parameter and _become(copy, type(tensor)):
        vars(copy).update(vars(tensor))
    if node is not None:
        # Hooks are neither copied nor saved with a tensor, as attributes are.
        copy.register_hook(_LeafNode(tensor, node))  # type: ignore[no-untyped-call]  # torch leaves it without types
    return copy


@private.without_modes
def exchange(view: Tensor, own_references: int = 0) -> Tensor | None:
    """Keep a view's place on the graph from in-place operations, which would cut it out.

    The view's own tensor is returned. All other references to the view, also in containers, refer
    to a downstream copy from then on.

    Parameters
    ----------
    view : torch.Tensor
        A tensor on the graph, which becomes that copy if it is a view.
    own_references : int
        The number of references to its base that don't count.

    Returns
    -------
    torch.Tensor or None
        None if it is not a view, or if the exchange would be noticed: something else holds the
        memory or, inside torch, the tensor, or a copy would differ in more than its memory.

    Examples
    --------
    >>> hidden = (torch.ones(2, 3, requires_grad=True) * 2).view(6)
    >>> kept = exchange(hidden)
    >>> out = hidden.mul_(hidden.detach().clone()).sum()
    >>> kept[0].item(), torch.autograd.grad(out, kept)[0][0].item()
    (2.0, 2.0)
    """
    if private.base_of(view) is None or inner_tensors(view)[0] is not view:
        return None
    fresh = _holders_of_fresh(is_view=True, is_on_graph=True)[1]
    # Hooks of an overwritten view are not called, so they must not move with its place.
    is_special = private.has_hooks(view) or view.retains_grad or view.is_conj() or view.is_neg()
    if is_special or vars(view) or _holders(view, own_references) != fresh:
        return None
    try:
        with torch.inference_mode(False), torch.enable_grad():
            # Subclasses make a view of every result.
            copy: Tensor = private.run_without_overrides(_Copying.apply, (view,), {})
        if type(copy) is not type(view) and not _become(copy, type(view)):
            return None
        # Another recorder may have noted the version.
        while copy._version < view._version:
            increment_version(copy)
        swap_tensors(view, copy)  # type: ignore[no-untyped-call]  # torch's own
    except RuntimeError:
        # Expanded tensors can't be written to, and tensors that torch itself holds can't be
        # exchanged.
        return None
    return copy


def _become(copy: Tensor, kind: type[Tensor]) -> bool:
    """Make a plain tensor one of a subclass; return whether that is possible."""
    try:
        copy.__class__ = kind
    except TypeError:
        # The result of a pending collective wraps the tensor that it waits for; the copy has
        # waited.
        return False
    return True


def _is_held_alone(held: HeldTensor) -> bool:
    """Whether nothing else holds a tensor or its memory; in doubt the answer is no.

    Autograd may hold the tensor itself if it is on the graph, since it only reads.
    """
    tensor = held.tensor
    if inner_tensors(tensor)[0] is not tensor:
        # Who holds the tensors inside is not counted.
        return False
    fresh = _holders_of_fresh(private.base_of(tensor) is not None, tensor.requires_grad)
    del tensor
    if (num_references(held.tensor), _holders(held.tensor)) != fresh:
        return False
    # Unknown code may hold memory that torch did not allocate, or that processes share.
    memory = held.tensor.untyped_storage()
    return bool(memory.resizable()) and not (memory.device.type == "cpu" and memory.is_shared())


def _holders(tensor: Tensor, own_references: int = 0) -> tuple[int, ...]:
    """Count the holders, inside torch, of a tensor, of its base and of the memory of both."""
    base = private.base_of(tensor)
    based = (0, 0)
    if base is not None:
        based = num_references(base) - own_references, private.use_count(base)
    uses = 0 if tensor.requires_grad else private.use_count(tensor)
    storages = private.storage_uses(tensor)
    if base is not None and private.keeps_its_result(base):
        # The graph holds the memory itself, unless hooks replace it.
        storages -= private.active_saved_tensors_hooks() is None
    # Python has one object for each storage.
    storage_references = 0 if storages < 0 else num_references(tensor.untyped_storage())
    weak = weakref.getweakrefcount(tensor)
    return weak, uses, *based, storages, storage_references


@functools.cache
def _holders_of_fresh(is_view: bool, is_on_graph: bool) -> tuple[int, tuple[int, ...]]:
    """Count references and holders of a tensor that nothing else holds, which vary by version."""

    def count() -> tuple[int, tuple[int, ...]]:
        start = torch.ones(1, device="cpu", requires_grad=is_on_graph)
        held = HeldTensor((start * 2).view(1, 1) if is_view else start * 2)
        return num_references(held.tensor), _holders(held.tensor)

    # The caller's modes don't act in another thread.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(count).result()


class _LeafNode:
    """A hook on the copy of a leaf, never called, that holds the node of both.

    Up to torch 2.9, the node drops the hooks of the leaf when the copy goes. Then the copy drops
    its own hooks, and this one restores those of the leaf.
    """

    __torch_unserializable__ = True  # Otherwise torch.save warns.

    def __init__(self, leaf: Tensor, node: Node) -> None:
        self._leaf = weakref.ref(leaf)
        self._node = node

    def __call__(self, gradient: Tensor) -> None:
        pass

    def __del__(self) -> None:
        leaf = self._leaf()
        if leaf is not None:
            private.renew_hooks(leaf)


class _Saving(torch.autograd.Function):
    """Only saves a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


class _Copying(torch.autograd.Function):
    """Copies a tensor with its strides, to one whose version counter is at its start."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor).data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]

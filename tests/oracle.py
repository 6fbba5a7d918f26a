"""What a net's modules truly return: hooks copy every output at the moment of return.

Nothing of the package is used here. Values are copied into neutral trees (`Node`, `Leaf`), so that
neither a later in-place operation nor an assignment into a returned container can reach them, and
two trees are compared bit for bit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

OPAQUE = (type, nn.Module, torch.dtype, torch.device, Callable)


@dataclass
class Leaf:
    """A tensor as it was, whether it shared memory with what went in, and its gradient."""

    value: Tensor
    requires_grad: bool
    kind: type = Tensor
    aliased: bool = False
    is_view: bool = False
    gradient: Tensor | None = None


@dataclass
class Node:
    """A container, or an object with attributes."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Any, ...] = field(repr=False)


def parts(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Keys and values of anything that holds other things; None for the rest."""
    if isinstance(value, Mapping):
        return tuple(value.keys()), tuple(value.values())
    if isinstance(value, (tuple, list)):
        return tuple(range(len(value))), tuple(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(item.name for item in fields(value))
        return names, tuple(getattr(value, name) for name in names)
    if hasattr(value, "__dict__") and not isinstance(value, OPAQUE):
        return tuple(vars(value)), tuple(vars(value).values())
    return None


def snapshot(value: Any, make: Callable[[Tensor], Leaf], seen: tuple[int, ...] = ()) -> Any:
    """Copy a value into a tree; an object that holds itself is entered once."""
    if isinstance(value, Tensor):
        return make(value)
    inside = None if id(value) in seen else parts(value)
    if inside is None:
        return value
    keys, children = inside
    below = (*seen, id(value))
    return Node(type(value), keys, tuple(snapshot(child, make, below) for child in children))


def plain_leaf(tensor: Tensor) -> Leaf:
    """Copy a tensor with the numbers, conjugation resolved, and nothing of its graph."""
    # A record of a returned parameter is no parameter: it must not be trained.
    kind = Tensor if isinstance(tensor, nn.Parameter) else type(tensor)
    return Leaf(tensor.detach().clone(), tensor.requires_grad, kind)


def freeze(value: Any) -> Any:
    return snapshot(value, plain_leaf)


def leaves(tree: Any) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Node):
        for child in tree.children:
            yield from leaves(child)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside a value, depth first."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Leaf:
        found.append(tensor)
        return Leaf(tensor, tensor.requires_grad)

    snapshot(value, keep)
    return found


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape, layout and bytes: NaN equals NaN, 0.0 does not equal -0.0."""
    if (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
        return False
    if left.layout == torch.sparse_csr:
        one, two = left.detach(), right.detach()
        rows = same_bits(one.crow_indices(), two.crow_indices())
        columns = same_bits(one.col_indices(), two.col_indices())
        return rows and columns and same_bits(one.values(), two.values())
    if left.layout == torch.sparse_coo:
        one, two = left.detach().coalesce(), right.detach().coalesce()
        return same_bits(one.indices(), two.indices()) and same_bits(one.values(), two.values())
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def differences(record: Any, truth: Any, where: str = "") -> list[str]:
    """Say where two trees differ, in words; an empty list when they are equal."""
    if type(record) is not type(truth):
        return [f"{where}: {type(record).__name__} for {type(truth).__name__}"]
    if isinstance(truth, Leaf):
        if record.kind is not truth.kind:
            return [f"{where}: {record.kind} for {truth.kind}"]
        return _tensor_differences(record.value, truth.value, where)
    if not isinstance(truth, Node):
        return [] if record == truth else [f"{where}: {record!r} for {truth!r}"]
    if record.kind is not truth.kind:
        return [f"{where}: {record.kind} for {truth.kind}"]
    if record.keys != truth.keys:
        return [f"{where}: keys {record.keys} for {truth.keys}"]
    rows = zip(truth.keys, record.children, truth.children, strict=True)
    return [text for key, one, two in rows for text in differences(one, two, f"{where}[{key!r}]")]


def _tensor_differences(record: Tensor, truth: Tensor, where: str) -> list[str]:
    if same_bits(record, truth):
        return []
    if (record.dtype, record.shape, record.layout) != (truth.dtype, truth.shape, truth.layout):
        was = f"{record.dtype} {tuple(record.shape)} {record.layout}"
        return [f"{where}: {was} for {truth.dtype} {tuple(truth.shape)} {truth.layout}"]
    return [f"{where}: other values\n{record}\nfor\n{truth}"]


def storages(*values: Any) -> set[int]:
    dense = (tensor for tensor in tensors(values) if tensor.layout == torch.strided)
    return {tensor.untyped_storage().data_ptr() for tensor in dense if tensor.numel()}


class Watch:
    """Copies of everything that the modules of `net` return while this context is entered.

    `calls[name, call]` is the tree of what the module of that name returned; `call` counts from 0
    in the order in which calls start, and a shared module goes by the first of its names. With
    `gradients`, the leaves get the gradients of a later backward pass.
    """

    def __init__(self, net: nn.Module, *, gradients: bool = True) -> None:
        self._listens = gradients
        self._modules = dict(net.named_modules())
        self.calls: dict[tuple[str, int], Any] = {}
        self._own = storages(tuple(net.parameters()), tuple(net.buffers()))
        self._started: Counter[str] = Counter()
        self._open: list[int] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Watch:
        for name, module in self._modules.items():
            # Registered last, they see what other hooks made of an output.
            before = module.register_forward_pre_hook(partial(self._start, name))
            after = module.register_forward_hook(partial(self._stop, name), with_kwargs=True)
            self._handles += [before, after]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for leaf in leaves(Node(dict, (), tuple(self.calls.values()))):
            # A net that differentiates inside forward has set it already.
            leaf.gradient = None

    def _start(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._open.append(self._started[name])
        self._started[name] += 1

    def _stop(self, name: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entered = self._own | storages(args, kwargs)
        tree = snapshot(output, lambda tensor: self._leaf(tensor, entered))
        self.calls[name, self._open.pop()] = tree

    def _leaf(self, tensor: Tensor, entered: set[int]) -> Leaf:
        leaf = plain_leaf(tensor)
        leaf.aliased = bool(storages(tensor) & entered)
        leaf.is_view = tensor._is_view()
        if self._listens and tensor.requires_grad and tensor.layout == torch.strided:
            # Registered now, it sees the gradient of the value as returned, whatever comes later.
            tensor.register_hook(lambda gradient: setattr(leaf, "gradient", gradient))
        return leaf


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def generator_states() -> dict[str, Any]:
    """Return the state of every random number generator that a net could draw from."""
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    return freeze({**state, "numpy": (kind, tuple(keys.tolist()), *rest)})


def scalar_loss(output: Any) -> Tensor:
    """Weigh every differentiable number of an output differently, and add them up."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors(output):
        if tensor.requires_grad:
            dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            weights = torch.linspace(-1, 1.5, real.numel(), dtype=torch.float64)
            total = total + (real.reshape(-1).double() * weights).sum()
    return total

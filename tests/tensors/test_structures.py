"""Structures are taken apart and built again without losing types, attributes or sharing."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
import queue
import random
import re
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput

from scio_recorder.tensors.structures import (
    flatten,
    fold,
    holder_out_of_sight,
    is_container,
    map_tensors,
    taken_apart,
    tensors,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Tensor
    b: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Tensor


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.inner = {"value": value}
        self.label = "x"


class Both:
    __slots__ = ("__dict__", "__weakref__", "slot")

    def __init__(self, value: Tensor) -> None:
        self.slot = value
        self.other = value + 1


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held


class OwnSet(set[Any]):
    pass


class OwnDeque(deque[Any]):
    pass


ONE = torch.tensor([1.0])

STRUCTURES: list[tuple[Any, Any]] = [
    (ONE, lambda v: v),
    ((ONE, 2), lambda v: v[0]),
    ([ONE], lambda v: v[0]),
    ({"k": ONE, "n": None}, lambda v: v["k"]),
    (OrderedDict(k=ONE), lambda v: v["k"]),
    (defaultdict(list, k=ONE), lambda v: v["k"]),
    (Pair(ONE, "r"), lambda v: v.left),
    (Frozen(ONE, 3), lambda v: v.a),
    (Slotted(ONE), lambda v: v.a),
    (Opaque(ONE), lambda v: v.inner["value"]),
    (Both(ONE), lambda v: v.slot),
    (SimpleNamespace(k=ONE), lambda v: v.k),
    ({ONE}, lambda v: next(iter(v))),
    (OwnSet([ONE]), lambda v: next(iter(v))),
    (deque([ONE]), lambda v: v[0]),
    (OwnDeque([ONE, 3], 2), lambda v: v[v.maxlen - 2]),
    ({"k": ONE}.values(), lambda v: next(iter(v))),
    ({"k": ONE}.items(), lambda v: dict(v)["k"]),
    (OrderedDict(k=ONE).values(), lambda v: next(iter(v))),
    (SimpleNamespace(k=Holding({"k": ONE}.values())), lambda v: next(iter(v.k.held))),
    (BaseModelOutputWithPast(last_hidden_state=ONE), lambda v: v["last_hidden_state"]),
    (BaseModelOutputWithPast(last_hidden_state=ONE), lambda v: v.last_hidden_state),
    (BaseModelOutputWithPast(last_hidden_state=ONE), lambda v: v[0]),
    (pack_sequence([torch.ones(2, 1)]), lambda v: v.data[:1, 0]),
    (torch.return_types.max((ONE, torch.tensor([0.0]))), lambda v: v.values),
    (torch.distributions.Normal(ONE, ONE), lambda v: v.mean),
    ((([[ONE]],), {"deep": (ONE,)}), lambda v: v[1]["deep"][0]),
]


@pytest.mark.parametrize(("value", "get"), STRUCTURES)
def test_map_keeps_type_and_replaces_tensors(value: Any, get: Any) -> None:
    mapped = map_tensors(lambda t: t + 41, value)
    assert type(mapped) is type(value)
    assert torch.equal(get(mapped), get(value) + 41)
    assert torch.equal(get(value), ONE), "the original must stay as it was"


def test_rebuilt_containers_do_not_see_later_assignments() -> None:
    output = BaseModelOutputWithPast(last_hidden_state=ONE)
    leaves, rebuild = flatten(output)
    kept = rebuild(leaves)
    output.last_hidden_state = None
    output["past_key_values"] = ONE
    assert kept.last_hidden_state is ONE
    assert kept.past_key_values is None
    empty: dict[str, Tensor] = {}
    copied = map_tensors(lambda t: t, empty)
    empty["late"] = ONE
    assert copied == {}


def test_a_tensor_that_appears_twice_is_one_leaf() -> None:
    leaves, rebuild = flatten((ONE, {"again": ONE}))
    assert len(leaves) == 1
    rebuilt = rebuild([ONE + 1])
    assert rebuilt[0] is rebuilt[1]["again"]


def test_default_factory_survives() -> None:
    mapped = map_tensors(lambda t: t, defaultdict(list, k=ONE))
    assert mapped["absent"] == []


def test_cache_objects_are_opened() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), 0)
    kept = map_tensors(torch.clone, cache)
    cache.layers[0].keys.add_(1)
    assert torch.equal(kept.layers[0].keys, torch.ones(1, 1, 2, 3))
    assert len(tensors(cache)) >= 2


def test_what_may_receive_tensors_is_copied_while_it_is_empty() -> None:
    holder, later, fixed = Holding([]), Opaque.__new__(Opaque), Opaque.__new__(Opaque)
    kept, kept_inside = map_tensors(torch.clone, (holder, Holding([ONE, later])))
    holder.held.append(ONE)
    later.value = ONE  # type: ignore[attr-defined]
    assert type(kept) is Holding
    assert kept.held == []
    assert type(kept_inside.held[1]) is Opaque
    assert not hasattr(kept_inside.held[1], "value")
    assert map_tensors(torch.clone, fixed) is fixed


class Linked:
    """An object that knows what holds it."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value
        self.child: Any = None
        self.parent: Any = None


def both_ways(*, with_tensor: bool = True) -> Linked:
    parent, child = Linked(ONE if with_tensor else None), Linked()
    parent.child, child.parent = child, parent
    return parent


def test_objects_that_refer_back_and_hold_no_tensors_are_shared() -> None:
    parent = both_ways(with_tensor=False)
    assert map_tensors(torch.clone, {"a": parent, "b": ONE})["a"] is parent


def loops() -> dict[str, tuple[Any, Any, Any]]:
    """Structures that contain themselves, how to reach the tensor, and how to come back."""
    in_list: list[Any] = [ONE]
    in_list.append(in_list)
    in_dict: dict[str, Any] = {"k": ONE}
    in_dict["me"] = in_dict
    in_deque: deque[Any] = deque([ONE], maxlen=3)
    in_deque.append(in_deque)
    middle: list[Any] = [ONE]
    in_tuple = (middle, 1)
    middle.append(in_tuple)
    me = Linked(ONE)
    me.child = me
    namespace = SimpleNamespace(k=ONE)
    namespace.me = [namespace]
    return {
        "list": (in_list, lambda v: v[0], lambda v: v[1]),
        "dict": (in_dict, lambda v: v["k"], lambda v: v["me"]),
        "deque": (in_deque, lambda v: v[0], lambda v: v[1]),
        "tuple": (in_tuple, lambda v: v[0][0], lambda v: v[0][1]),
        "object": (me, lambda v: v.value, lambda v: v.child),
        "parent": (both_ways(), lambda v: v.value, lambda v: v.child.parent),
        "child": (both_ways().child, lambda v: v.parent.value, lambda v: v.parent.child),
        "namespace": (namespace, lambda v: v.k, lambda v: v.me[0]),
    }


@pytest.mark.parametrize("kind", loops())
def test_a_structure_that_contains_itself_is_rebuilt_with_its_loop(kind: str) -> None:
    loop, get, again = loops()[kind]
    mapped = map_tensors(lambda t: t + 1, loop)
    assert type(mapped) is type(loop)
    assert mapped is not loop
    assert again(mapped) is mapped
    assert torch.equal(get(mapped), ONE + 1)
    assert torch.equal(get(loop), ONE)
    assert len(tensors(mapped)) == 1


def test_a_container_that_appears_twice_is_one_container() -> None:
    part, fixed = [ONE], (ONE,)
    mapped = map_tensors(lambda t: t + 1, {"a": part, "b": [part], "c": fixed, "d": [fixed]})
    assert mapped["a"] is mapped["b"][0]
    assert mapped["c"] is mapped["d"][0]
    assert mapped["a"] is not part


def test_arrays_are_copied_and_modules_are_not() -> None:
    array, module = np.ones(2), torch.nn.Linear(1, 1)
    mapped = map_tensors(lambda t: t, (array, module, ONE))
    array[0] = 5
    assert mapped[0].tolist() == [1.0, 1.0]
    assert mapped[1] is module


@pytest.mark.parametrize("part", [re.compile("a"), threading.Lock(), random.Random(0)])
def test_parts_of_a_type_that_can_not_be_copied_are_shared(part: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.parts = [part, torch.ones(2)]

    copied = map_tensors(torch.neg, Holder())
    assert copied.parts[0] is part
    assert torch.equal(copied.parts[1], -torch.ones(2))


def test_objects_without_tensors_are_shared() -> None:
    thing = SimpleNamespace(a=1)
    plain = type("Plain", (), {})()
    plain.a = 1
    mapped = map_tensors(lambda t: t, (thing, plain))
    assert mapped[1] is plain
    assert mapped[0] == thing


class Part:
    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.proxy = weakref.proxy(owner)
        self.several = [weakref.ref(owner), {"inside": (weakref.proxy(owner),)}]


class Graph:
    """An object of which a part without tensors refers to it weakly."""

    def __init__(self, x: Tensor) -> None:
        self.part = Part(self)
        self.x = x


class Storage(MutableMapping[str, Any]):
    """As in PyTorch Geometric: a part that holds the tensors and refers to its owner."""

    __slots__ = ("__weakref__", "_mapping", "_parent")

    def __init__(self, parent: Any, **values: Any) -> None:
        self._parent = weakref.ref(parent)
        self._mapping = values

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class Data:
    """As in PyTorch Geometric: all attributes are those of the storage."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_store"] = Storage(self, **values)

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__:
            raise AttributeError(name)
        return self._store[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value


@pytest.mark.parametrize("make", [lambda: Graph(ONE), lambda: (Graph(ONE), 1)[0]])
def test_parts_refer_weakly_to_the_new_structure(make: Any) -> None:
    old = make()
    leaves, rebuild = flatten(old)
    (leaf,) = leaves
    del old
    for _ in range(2):
        new = rebuild([leaf])
        assert new.x is ONE
        assert new.part.owner() is new
        assert new.part.proxy.x is ONE
        new.mark = leaf
        assert new.part.proxy.mark is leaf
        assert new.part.several[0]() is new
        assert new.part.several[1]["inside"][0].mark is leaf


def test_what_shares_memory_out_of_sight_is_found() -> None:
    tensor, fields = torch.ones(2), np.zeros(2, dtype=[("one", object), ("other", float)])
    assert holder_out_of_sight(taken_apart(fields).shared) is None
    fields["one"][0] = tensor
    memory = memoryview(tensor.numpy())
    single = np.array(None, dtype=object)
    single[()] = tensor
    several = np.empty((2, 2), dtype=object)
    several[0, 1] = {"inside": tensor}
    proxy, floats = MappingProxyType({"inside": tensor}), ctypes.c_float * 2
    for value in (fields, memory, floats.from_buffer(memory), proxy, single, several):
        assert holder_out_of_sight(taken_apart([value]).shared) is value


def test_a_weak_set_is_shared_as_weak_references_are() -> None:
    tensor = torch.ones(2)
    value = tensor, weakref.WeakSet([tensor])
    assert holder_out_of_sight(taken_apart(value).shared) is None
    leaves, rebuild = flatten(value)
    assert len(leaves) == 1
    assert rebuild(leaves)[1] is value[1]


def test_storages_that_refer_weakly_to_their_owner() -> None:
    old = Data(x=ONE, index=torch.arange(2))
    new = map_tensors(torch.clone, old)
    del old
    assert new._store._parent() is new
    assert torch.equal(new.index, torch.arange(2))
    assert new.x is not ONE


def test_what_is_referred_to_from_outside_stays() -> None:
    outside = Graph(torch.zeros(1))
    inner = Graph(ONE)
    inner.part.owner = weakref.ref(outside)
    assert map_tensors(lambda t: t, inner).part.owner() is outside
    inner.part.proxy = weakref.proxy(outside)
    del outside
    with pytest.raises(ReferenceError):
        _ = map_tensors(lambda t: t, inner).part.proxy.x


class Called:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> Any:
        return self.held


def closure(tensor: Tensor) -> Any:
    def inner() -> Tensor:
        return tensor

    return lambda: inner()


def cached(tensor: Tensor) -> Any:
    function = functools.lru_cache(lambda: tensor)
    function()
    return function


def queued(tensor: Tensor) -> Any:
    held: Any = queue.SimpleQueue()
    held.put(tensor)
    return held


OUT_OF_SIGHT: dict[str, Any] = {
    "partial": lambda t: functools.partial(torch.add, t),
    "method": lambda t: Called(t).__call__,
    "builtin method": lambda t: t.sum,
    "closure": closure,
    "default": lambda t: lambda x=t: x,
    "keyword default": lambda t: lambda *, x=t: x,
    "object with a function": lambda t: Called(closure(t)),
    "key": lambda t: {t: 1},
    "key of an ordered dictionary": lambda t: OrderedDict({(1, t): 1}),
    "factory": lambda t: defaultdict(closure(t)),
    "iterator inside": lambda t: (iter([t]), 1),
    "cache": cached,
    "queue": queued,
    "caller": lambda t: operator.methodcaller("f", t),
    "memory": lambda t: [t.untyped_storage()],
    "future": lambda t: torch.jit.fork(torch.neg, t),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("kind", OUT_OF_SIGHT)
def test_holders_out_of_sight_are_found_at_any_depth(kind: str) -> None:
    for holder in (OUT_OF_SIGHT[kind](ONE.clone()), [{"a": (1, OUT_OF_SIGHT[kind](ONE.clone()))}]):
        assert holder_out_of_sight(taken_apart(holder).shared) is not None


IN_SIGHT: list[Any] = [
    *(value for value, _ in STRUCTURES),
    Called(ONE),
    Graph(ONE),
    Data(x=ONE),
    torch.distributions.Normal(ONE, ONE),
    len,
    closure(2),  # type: ignore[arg-type]  # holds no tensor
    torch.nn.Linear(2, 2).forward,
    [torch.nn.Linear(2, 2), Tensor, torch],
]


@pytest.mark.parametrize("value", IN_SIGHT, ids=lambda value: type(value).__name__)
def test_what_is_rebuilt_or_holds_no_tensor_is_no_such_holder(value: Any) -> None:
    assert holder_out_of_sight(taken_apart(value).shared) is None


def test_slots_whose_names_begin_with_two_underscores() -> None:
    class Hidden:
        __slots__ = ("__x",)

        def __init__(self, x: Tensor) -> None:
            self.__x = x

        def x(self) -> Tensor:
            return self.__x

    old = Hidden(torch.ones(2))
    new = map_tensors(lambda tensor: tensor * 2, old)
    assert old.x().tolist() == [1, 1]
    assert new.x().tolist() == [2, 2]


def with_parts(container: Any, parts: list[tuple[Any, Any]]) -> tuple[Any, ...]:
    return (type(container).__name__, *parts)


@dataclasses.dataclass
class HalfSet:
    x: int
    y: int = dataclasses.field(init=False)


CONTAINERS: list[tuple[Any, Any]] = [
    ([5, (6,)], ("list", (0, 5), (1, ("tuple", (0, 6))))),
    (Pair(5, "r"), ("Pair", (0, 5), (1, "r"))),
    (OrderedDict(k=5), ("OrderedDict", ("k", 5))),
    ({3: {"k": None}}, ("dict", (3, ("dict", ("k", None))))),
    (Storage(Both(ONE), k=5), ("Storage", ("k", 5))),
    (Frozen(ONE, 5), ("Frozen", ("a", ONE), ("b", 5))),
    # A field without a value is none.
    (HalfSet(5), ("HalfSet", ("x", 5))),
    (CausalLMOutput(logits=5), ("CausalLMOutput", ("logits", 5))),
    (torch.Size([5]), ("Size", (0, 5))),
]


@pytest.mark.parametrize(("value", "folded"), CONTAINERS)
def test_a_fold_shows_each_container_with_its_parts(value: Any, folded: Any) -> None:
    assert is_container(value)
    assert fold(value, lambda leaf: leaf, with_parts) == folded


@pytest.mark.parametrize(
    "value", [ONE, Frozen, {5}, deque([5]), slice(5), "text", Opaque(ONE), ...]
)
def test_a_fold_shows_anything_else_whole(value: Any) -> None:
    assert not is_container(value)
    assert fold(value, lambda leaf: (leaf,), with_parts) == (value,)


def test_a_fold_meets_a_container_inside_itself_as_a_leaf() -> None:
    holder: list[Any] = [5]
    holder.append({"k": holder, "twice": [5]})
    assert fold(holder, id, with_parts) == (
        *("list", (0, id(5))),
        (1, ("dict", ("k", id(holder)), ("twice", ("list", (0, id(5)))))),
    )


def test_a_fold_can_leave_containers_whole() -> None:
    assert fold([(5,)], str, with_parts, lambda part: part == (5,)) == ("list", (0, "(5,)"))

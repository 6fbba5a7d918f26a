"""State of every kind is as before, whatever runs the net on the side."""

from __future__ import annotations

import array
import copy
import functools
import itertools
import random
import tempfile
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from scio_recorder.nets.state.untouched import untouched
from scio_recorder.tensors import private
from tests.harness import recorder
from tests.zoo.base import Net as Composed


class Slots:
    __slots__ = ("absent", "count")

    def __init__(self) -> None:
        self.count = 0


class Marked(list[int]):
    """A list with an attribute, which goes its own ways."""

    count = 0

    def clear(self) -> None:
        raise AssertionError("a class may forbid or do more")


def closure() -> tuple[Callable[[], int], Callable[[], int]]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step, lambda: count


def by_default() -> tuple[Callable[[], int], Callable[[], int]]:
    def step(seen: list[int] = []) -> int:  # noqa: B006  # kept from call to call
        seen.append(1)
        return len(seen)

    return step, lambda: len(step.__defaults__[0])  # type: ignore[index]  # there is one


def method() -> tuple[Callable[[], None], Callable[[], int]]:
    thing = types.SimpleNamespace(count=0)

    def step(self: Any) -> None:
        self.count += 1

    return types.MethodType(step, thing), lambda: thing.count


def add(module: Any, key: str = "count") -> None:
    setattr(module, key, getattr(module, key, 0) + 1)


def write_data(state: Any) -> None:
    state[0].data.add_(1)


def write_byte(storage: Any) -> None:
    storage[0] += 1


def hooked() -> tuple[nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    return (parameter,)


def delete(state: Any) -> None:
    if hasattr(state, "count"):
        del state.count
        state.absent = 1


def slots(state: Slots) -> Any:
    return getattr(state, "count", None), getattr(state, "absent", None)


SPARSE = torch.eye(3).to_sparse()
# What the net holds, how its forward changes that, and what shows the change.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.zeros(3), lambda s: s.add_(1), Tensor.tolist),
    "data": (lambda: torch.zeros(3), lambda s: s.data.add_(1), Tensor.tolist),
    "other memory": (
        lambda: torch.zeros(3),
        lambda s: setattr(s, "data", torch.ones(2)),
        Tensor.tolist,
    ),
    "a tensor's attribute": (lambda: torch.zeros(3), add, lambda s: getattr(s, "count", 0)),
    "requires_grad": (lambda: torch.zeros(3), Tensor.requires_grad_, lambda s: s.requires_grad),
    "parameter": (lambda: (nn.Parameter(torch.zeros(3)),), write_data, lambda s: s[0].tolist()),
    "gradient": (
        lambda: (nn.Parameter(torch.zeros(3)),),
        lambda s: setattr(s[0], "grad", torch.ones(3)),
        lambda s: str(s[0].grad),
    ),
    "inference": (
        lambda: torch.inference_mode()(torch.zeros)(3),
        lambda s: torch.inference_mode()(Tensor.add_)(s, 1),
        Tensor.tolist,
    ),
    "sparse": (lambda: SPARSE.clone(), lambda s: s.mul_(2), lambda s: s.to_dense().tolist()),
    "more of a sparse tensor": (
        lambda: torch.zeros(3, 3).to_sparse(),
        lambda s: s.add_(SPARSE),
        lambda s: s.to_dense().tolist(),
    ),
    "storage": (lambda: torch.zeros(1).untyped_storage(), write_byte, list),
    "hooks on a gradient": (
        lambda: (nn.Parameter(torch.zeros(3)),),
        lambda s: s[0].register_hook(lambda gradient: gradient),
        lambda s: len(s[0]._backward_hooks or ()),
    ),
    "more hooks on a gradient": (
        hooked,
        lambda s: s[0].register_post_accumulate_grad_hook(lambda _: None),
        lambda s: len(s[0]._post_accumulate_grad_hooks or ()),
    ),
    "attributes of a thread": (threading.local, add, lambda s: getattr(s, "count", 0)),
    "list": (list, lambda s: s.append(1), list),
    "nested": (lambda: {"a": [({"b": [0]},)]}, lambda s: add_to(s["a"][0][0]["b"]), str),
    "a list in itself": (lambda: holding_itself(), lambda s: s.append(1), len),
    "dict": (lambda: {"a": 1, "b": 2}, lambda s: s.update(a=s.pop("b")), str),
    "order": (
        lambda: OrderedDict(a=1, b=2, c=3),
        lambda s: s.move_to_end("a"),
        lambda s: list(s.items()),
    ),
    "defaultdict": (lambda: defaultdict(int), lambda s: s["a"], len),
    "counter": (Counter, lambda s: s.update("a"), dict),
    "set": (set, lambda s: s.add(len(s)), sorted),
    "deque": (lambda: deque([0, 1], maxlen=2), lambda s: s.append(2), list),
    "bytearray": (lambda: bytearray(b"ab"), lambda s: s.append(1), bytes),
    "array": (lambda: array.array("d", [1]), lambda s: s.append(1), list),
    "numpy": (lambda: np.zeros(2), lambda s: np.add(s, 1, out=s), list),
    "objects in numpy": (lambda: np.array([Slots()]), lambda s: add(s[0]), lambda s: s[0].count),
    "list with attributes": (Marked, lambda s: (s.append(1), add(s)), lambda s: (s.count, len(s))),
    "slots": (Slots, add, slots),
    "deleted slot": (Slots, delete, slots),
    "namespace": (types.SimpleNamespace, add, lambda s: getattr(s, "count", 0)),
    "object in a list": (lambda: [Slots()], lambda s: add(s[0]), lambda s: s[0].count),
    "key": (lambda: {Slots(): 1}, lambda s: add(next(iter(s))), lambda s: next(iter(s)).count),
    "closure": (closure, lambda s: s[0](), lambda s: s[1]()),
    "default": (by_default, lambda s: s[0](), lambda s: s[1]()),
    "method": (method, lambda s: s[0](), lambda s: s[1]()),
    "partial": (lambda: functools.partial(add_to, [0]), lambda s: s(), lambda s: s.args[0][0]),
    # As torchao binds the function that prints a quantised layer.
    "method of a partial": (
        lambda: types.MethodType(functools.partial(add_to, [0]), types.SimpleNamespace()),
        lambda s: s(),
        lambda s: s.__func__.args[0][0],
    ),
    "bound builtin": (lambda: [].append, lambda s: s(1), lambda s: len(s.__self__)),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda s: torch.rand(1, generator=s),
        lambda s: s.get_state().tolist(),
    ),
    "np.random.Generator": (
        lambda: np.random.default_rng(0),
        lambda s: s.random(),
        lambda s: str(s.bit_generator.state),
    ),
    "RandomState": (
        lambda: np.random.RandomState(0),
        lambda s: s.random(),
        lambda s: str(s.get_state()),
    ),
    "random.Random": (lambda: random.Random(0), lambda s: s.random(), random.Random.getstate),
    "a module outside of the net": (
        lambda: (nn.BatchNorm1d(4),),
        lambda s: s[0](torch.rand(3, 4)),
        lambda s: s[0].running_mean.tolist(),
    ),
}


def add_to(counts: list[int], *others: Any) -> None:
    counts[0] += 1


def holding_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


class Net(nn.Module):
    """Changes its state in each pass, and can be copied or not."""

    def __init__(self, kind: str, *, can_be_copied: bool = True) -> None:
        super().__init__()
        self.make, self.step, self.show = KINDS[kind]
        self.state = self.make()
        self.inner, self.last = nn.Linear(4, 4), nn.ReLU()
        self.lock = None if can_be_copied else threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        self.step(self.state)
        return self.last(self.inner(x))


def label(net: nn.Module) -> None:
    Recorder(net, input_size=(2, 4))


def recompute(net: Any) -> Callable[[], Any]:
    rnet = recorder(nn.Sequential(net), "0", input_size=(2, 4), inputs=True)
    rnet(torch.randn(2, 4))
    net.state = net.make()
    return lambda: rnet.recompute("0.inner")


def compare_with_a_copy(net: nn.Module) -> Callable[[], Any]:
    first, second = (Recorder(net, input_size=(2, 4)) for _ in range(2))
    return lambda: compare(first, second, [torch.randn(2, 4)], progress=False)


def sweep(net: nn.Module) -> Callable[[], Any]:
    rnet = recorder(net, "inner", "last", input_size=(2, 4))
    return lambda: rnet.sweep(*torch.randn(2, 2, 4), lambda out: out.sum())


RUNNING: dict[str, Callable[[nn.Module], Any]] = {
    "label": lambda net: functools.partial(label, net),
    "recompute": recompute,
    "compare": compare_with_a_copy,
    "sweep": sweep,
}
# Each kind of state with one way to run the net, in turn, and with labelling if copies won't do.
PAIRS = [(kind, [*RUNNING][number % 4], True) for number, kind in enumerate(KINDS)]
PAIRS += [(kind, "label", False) for kind in KINDS]


@pytest.mark.parametrize(("kind", "running", "can_be_copied"), PAIRS)
def test_state_is_as_before(kind: str, running: str, can_be_copied: bool) -> None:
    net = Net(kind, can_be_copied=can_be_copied)
    run = RUNNING[running](net)
    before = copy.deepcopy(net.show(net.state))
    run()
    assert net.show(net.state) == before
    net.step(net.state)
    assert net.show(net.state) != before


@pytest.mark.campaign
@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_as_before_whatever_runs_the_net(kind: str, running: str) -> None:
    test_state_is_as_before(kind, running, can_be_copied=True)


def counting() -> Any:
    yield from itertools.count()


OPAQUE: dict[str, tuple[Callable[[], Any], str]] = {
    "count": (itertools.count, r"net\.state \(itertools\.count\)"),
    "iterator": (lambda: iter([1, 2, 3]), r"net\.state \(list_iterator\)"),
    "map": (lambda: map(str, [1, 2, 3]), r"net\.state \(map\)"),
    "generator": (counting, r"net\.state \(generator\)"),
    "in a list": (lambda: [itertools.count()], r"net\.state\.0 \(itertools\.count\)"),
    "a file": (tempfile.TemporaryFile, r"net\.state \(_io\.BufferedRandom\)"),
}


class Opaque(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.inner, self.is_used = state, nn.Linear(4, 4), True
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_used:
            state = self.state[0] if isinstance(self.state, list) else self.state
            state.write(b"x") if hasattr(state, "write") else next(state)
        return self.inner(x)

    def close(self) -> None:
        if hasattr(self.state, "tell"):
            self.state.close()


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_can_not_be_seen_into_is_named_where_it_may_have_moved(kind: str) -> None:
    make, says = OPAQUE[kind]
    net = Opaque(make())
    # Nothing shows whether a map has moved.
    net.is_used = kind == "map"
    if not net.is_used:
        label(net)
        net.is_used = True
    with pytest.warns(UserWarning, match=f"can't be put back: {says}"):
        label(net)
    net.close()


def test_values_that_take_too_much_memory_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scio_recorder.nets.state.untouched.CLONED_BYTES", 16)
    net = nn.BatchNorm1d(4)
    block = untouched(net)
    block.__enter__()
    net(torch.rand(3, 4))
    with torch.no_grad():
        net.weight.add_(1)
    with pytest.warns(UserWarning, match=r"too much memory .* net\.weight"):
        block.__exit__(None, None, None)
    assert net.running_mean.tolist() == [0] * 4
    assert net.weight.tolist() == [2] * 4


def test_several_passes_start_in_the_same_state() -> None:
    net = Net("parameter")
    with untouched(net) as state:
        for _ in range(3):
            net(torch.ones(1, 4))
            assert net.state[0].tolist() == [1] * 3
            state.put_back()


def test_a_graph_from_before_is_as_good_as_ever() -> None:
    net = nn.Module()
    net.register_buffer("state", torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    loss = (x * net.state).sum()
    with untouched(net):
        net.state.add_(1)
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1] * 3


def test_hooks_on_all_modules_run_in_other_threads_and_are_themselves_again() -> None:
    net, seen = nn.ReLU(), list[str]()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(threading.current_thread().name)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        with untouched(net):
            net(torch.ones(1))
            thread = threading.Thread(target=net, args=(torch.ones(1),), name="other")
            thread.start()
            thread.join()
        net(torch.ones(1))
        hooks = [hook for hooks in private.hooks_on_all_modules() for hook in hooks.values()]
        assert hooks == [note]
    finally:
        handle.remove()
    assert seen == ["other", threading.current_thread().name]


def test_hooks_of_the_recorder_may_come_and_go_meanwhile() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Tanh())
    rnet = recorder(net, "0", input_size=(2, 4))
    with untouched(net) as state:
        net[1].register_forward_hook(lambda *_: None)
        rnet.record("1")
        state.put_back()
        rnet(torch.ones(2, 4))
    assert torch.equal(rnet.activations["1"], torch.ones(2, 4).tanh())
    rnet.remove()
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("can_be_copied", [False, True])
def test_a_recorder_in_the_net_is_as_before(can_be_copied: bool) -> None:
    parts = {"inner": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
    net = Composed(lambda net, x: net.norm(net.inner(x)), **parts)
    net.lock = None if can_be_copied else threading.Lock()
    seen: list[str] = []
    rnet = recorder(net, "inner", input_size=(2, 4), inputs=True, gradients=True)
    rnet(torch.randn(3, 4)).sum().backward()
    net.inner.register_forward_hook(lambda *_: seen.append("hook"))

    def state() -> list[Tensor]:
        records = rnet.activations["inner"], rnet.inputs["inner"].args[0], rnet.gradients["inner"]
        return [tensor.clone() for tensor in (*records, *net.buffers())]

    before = state()
    outer = Recorder(rnet, input_size=(2, 4), mode="train")
    outer.record("*norm")
    outer.sweep(*torch.randn(2, 2, 4), lambda out: out.sum())
    assert all(map(torch.equal, state(), before))
    seen.clear()
    rnet(torch.randn(3, 4))
    assert seen == ["hook"]
    assert not torch.equal(rnet.activations["inner"], before[0])


def test_a_number_of_a_weight_that_is_written_behind_the_counters_is_put_back() -> None:
    net = nn.Linear(64, 64)
    before = net.weight.detach().clone()
    with untouched(net):
        net.weight.data[0, 1] = 7.0
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize(
    ("make", "change", "read"),
    [
        (lambda: memoryview(bytearray(2)), lambda v: v.__setitem__(0, 7), bytes),
        (lambda: memoryview(array.array("i", [1, 2])), lambda v: v.__setitem__(1, 7), bytes),
        (lambda: np.zeros(4), lambda v: v.resize((2, 2), refcheck=False), lambda v: v.shape),
        (lambda: ValueError("a"), lambda v: setattr(v, "args", ("b",)), lambda v: v.args),
        (lambda: KeyError(1, 2), lambda v: setattr(v, "args", ()), lambda v: v.args),
    ],
)
def test_views_shapes_and_arguments_are_put_back(make, change, read):
    net = nn.ReLU()
    net.held = make()
    before = read(net.held)
    with untouched(net):
        change(net.held)
        assert read(net.held) != before
    assert read(net.held) == before

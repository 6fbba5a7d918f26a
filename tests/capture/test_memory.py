"""T7 seen from the memory: graphs, records and nets die when nothing needs them any more."""

from __future__ import annotations

import functools
import gc
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from scio_recorder import Recorder
from tests.harness import recorder
from tests.recorder.test_lifecycle import Fails, live_tensors, small_net
from tests.zoo.base import Net, linear
from tests.zoo.graphs import Mark, marked_graphs


def test_deleting_the_recorder_frees_its_records() -> None:
    net = small_net()
    x = torch.randn(3, 4)
    # What other tests have left would be collected in between.
    gc.collect()
    before = live_tensors()
    rnet = recorder(net, "0", "2", "", inputs=True)
    rnet(x)
    assert live_tensors() > before
    del rnet
    assert live_tensors() == before


def test_exception_frees_the_graph() -> None:
    fails = Fails()
    marked = nn.Sequential(linear(), Net(lambda _, x: Mark.apply(x)), nn.ReLU(inplace=True), fails)
    rnet = recorder(marked, "0", "1", "2", gradients=True, inputs=True)
    rnet(torch.randn(3, 4))
    assert marked_graphs() == 1
    fails.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rnet(torch.randn(3, 4))
    fails.error = None
    assert marked_graphs() == 0


def test_many_passes_leave_memory_flat() -> None:
    net = small_net()
    rnet = recorder(net, "0", "2", gradients=True)

    def work(count: int) -> None:
        for index in range(count):
            output = rnet(torch.ones(3, 4), activation_postproc=None if index % 3 else torch.sin)
            if index % 4 == 0:
                output.sum().backward()

    work(200)
    tensors, objects = live_tensors(), len(gc.get_objects())
    tracemalloc.start()
    work(50)
    start, _ = tracemalloc.get_traced_memory()
    work(500)
    gc.collect()
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert live_tensors() == tensors
    # A tenth of an object, and ten bytes, for each pass: less than any real leak.
    # There may be fewer, where a library has emptied a cache of its own.
    assert len(gc.get_objects()) - objects < 50
    assert end - start < 5_000


# References to what functions hold; no copy of a network has its own.
MADE: list[Any] = []


class Overriding(nn.Module):
    """Calls a function that is made in each pass, and that function modes take."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        function, held = self.make(x)
        MADE.append(weakref.ref(held))
        is_overridden = has_torch_function((x,))
        return (handle_torch_function(function, (x,), x) if is_overridden else function(x)) + 1


class Held:
    pass


def closure(x: Tensor) -> Any:
    held = Held()

    def scale(y: Tensor) -> Tensor:
        return y * 2 if held else y

    return scale, held


def wrapped(x: Tensor) -> Any:
    scale, held = closure(x)
    return functools.wraps(torch.nn.functional.relu)(scale), held


def with_default(x: Tensor) -> Any:
    held = Held()
    return (lambda y, held=held: y * 2), held


def bound(x: Tensor) -> Any:
    class Scale(Held):
        def apply(self, y: Tensor) -> Tensor:
            return y * 2

    held = Scale()
    return held.apply, held


def of_objects(x: Tensor) -> Any:
    class Scale(Held):
        __name__ = "scale"

        def __call__(self, y: Tensor) -> Tensor:
            return y * 2

    held = Scale()
    return held, held


@pytest.mark.parametrize("make", [closure, wrapped, with_default, bound, of_objects])
def test_functions_that_a_pass_makes_are_not_held(make: Any) -> None:
    MADE.clear()
    net = Overriding(make)
    rnet = Recorder(net, input_size=(1, 4))
    name = next(row.function for row in rnet.operations().values() if row.function != "add")
    rnet.record(f"/{name}", "/add")
    x = torch.ones(1, 4)
    for _ in range(3):
        assert rnet(x).equal(2 * x + 1)
    assert rnet.activations[f"/{name}"].equal(2 * x)
    gc.collect()
    assert len(MADE) > 3
    assert [made() for made in MADE] == [None] * len(MADE)


def class_of_outputs(base: type) -> weakref.ref[Held]:
    """Run a net that returns an object of a class of its own; return what the class holds."""
    held = Held()
    kind: Any = type("Output", (base,), {"method": lambda self: held})

    def forward(net: Any, x: Tensor) -> Any:
        output = kind() if base is object else kind({"x": x + 1} if base is dict else [x + 1])
        output.x = x
        return output

    rnet = recorder(Net(forward, kept=kind()), "*", input_size=(1, 4))
    rnet(torch.ones(1, 4))
    return weakref.ref(held)


@pytest.mark.parametrize("base", [list, dict, tuple, object])
def test_classes_that_a_function_makes_are_not_held(base: type) -> None:
    reference = class_of_outputs(base)
    gc.collect()
    assert reference() is None

"""Blocks belong to the context that entered them: servers with threads, tasks and generators.

What each request must get is computed by hand, by another copy of the network's layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Recorder
from scio_recorder.errors import FlowError
from scio_recorder.postprocessors import Add
from tests.harness import in_a_thread, recorder

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture
def rnet() -> Recorder:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).requires_grad_(False)
    return recorder(net, "1", input_size=(1, 4))


class Request(NamedTuple):
    """What a client asks for: a vector to steer by, or none, and a number of calls."""

    vector: Tensor | None
    inputs: list[Tensor]


def requests(number: int) -> list[Request]:
    chosen, made = random.Random(0), torch.Generator().manual_seed(0)
    return [
        Request(
            torch.randn(4, generator=made) if chosen.random() < 0.7 else None,
            [torch.randn(2, 4, generator=made) for _ in range(chosen.randint(1, 3))],
        )
        for _ in range(number)
    ]


class Oracle:
    """The network by hand, out of reach of every recorder."""

    def __init__(self, net: nn.Module) -> None:
        self.first, self.last = copy.deepcopy(net[0]), copy.deepcopy(net[2])

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def answer(self, x: Tensor, vector: Tensor | None = None) -> Tensor:
        return self.last(self.hidden(x) + (0 if vector is None else vector))


def is_right(oracle: Oracle, request: Request, answers: list[Tensor], passes: Any) -> bool:
    vector, inputs = request
    expected = [oracle.answer(x, vector) for x in inputs]
    recorded = [oracle.hidden(x) for x in inputs] if vector is not None else []
    seen = [records["1"] for records in passes]
    return are_equal(answers, expected) and are_equal(seen, recorded)


def are_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def steering(rnet: Recorder, vector: Tensor | None) -> Any:
    if vector is None:
        return contextlib.nullcontext(())
    return rnet.watch(activation_postproc={"1": Add(vector)})


@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=pytest.mark.campaign)])
def test_a_server_with_threads(rnet: Recorder, number: int) -> None:
    oracle = Oracle(rnet.net)

    def serve(request: Request) -> bool:
        with steering(rnet, request.vector) as passes:
            answers = [rnet.net(x) for x in request.inputs]
        return is_right(oracle, request, answers, passes)

    # The pool grows while blocks of requests, and one of nobody's, are open.
    with ThreadPoolExecutor(16) as pool, rnet.watch({"1": Add(torch.ones(4))}) as other:
        assert all(pool.map(serve, requests(number)))
        rnet.net(X)
    assert len(other) == 1


@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=pytest.mark.campaign)])
def test_a_server_with_tasks(rnet: Recorder, number: int) -> None:
    oracle = Oracle(rnet.net)

    async def serve(request: Request, slots: asyncio.Semaphore) -> bool:
        async with slots:
            with steering(rnet, request.vector) as passes:
                answers = []
                for at, x in enumerate(request.inputs):
                    await asyncio.sleep(0)
                    # A thread that asyncio starts belongs to the task's block.
                    is_aside = at % 2
                    answers.append(
                        await asyncio.to_thread(rnet.net, x) if is_aside else rnet.net(x)
                    )
            return is_right(oracle, request, answers, passes)

    async def server() -> list[bool]:
        slots = asyncio.Semaphore(200)
        return await asyncio.gather(*(serve(request, slots) for request in requests(number)))

    assert all(asyncio.run(server()))


def test_dependencies_that_yield(rnet: Recorder) -> None:
    """As those of FastAPI: tasks share a dependency's block if it is entered in the task."""
    oracle = Oracle(rnet.net)

    async def dependency(vector: Tensor) -> AsyncIterator[Any]:
        with rnet.watch(activation_postproc={"1": Add(vector)}) as passes:
            yield passes

    async def serve(request: Request) -> bool:
        if request.vector is None:
            return torch.equal(rnet.net(request.inputs[0]), oracle.answer(request.inputs[0]))
        entered = dependency(request.vector)
        passes = await anext(entered)
        await asyncio.sleep(0)
        answers = [rnet.net(x) for x in request.inputs]
        # Left in a task of its own, which has a context of its own.
        with contextlib.suppress(StopAsyncIteration):
            await asyncio.create_task(anext(entered, None))
        return is_right(oracle, request, answers, passes)

    async def server() -> list[bool]:
        return await asyncio.gather(*map(serve, requests(100)))

    assert all(asyncio.run(server()))
    assert torch.equal(rnet.net(X), oracle.answer(X))


def test_a_block_left_in_another_context_is_closed(rnet: Recorder) -> None:
    oracle, vector = Oracle(rnet.net), torch.ones(4)

    def block() -> Iterator[Any]:
        with rnet.watch(activation_postproc={"1": Add(vector)}) as passes:
            yield passes

    contexts, entered = [contextvars.copy_context() for _ in range(2)], block()
    passes = contexts[0].run(next, entered)
    # A task that was started in the block.
    started = contexts[0].copy()
    assert torch.equal(contexts[0].run(rnet.net, X), oracle.answer(X, vector))
    assert torch.equal(contexts[1].run(rnet.net, X), oracle.answer(X))
    assert torch.equal(started.run(rnet.net, X), oracle.answer(X, vector))
    contexts[1].run(next, entered, None)
    for run in (contexts[0].run, contexts[1].run, started.run, lambda call, x: call(x)):
        assert torch.equal(run(rnet.net, X), oracle.answer(X))
        assert torch.equal(run(rnet, X), oracle.answer(X))
    assert len(passes) == 2
    assert vars(rnet.net).get("_compiled_call_impl") is None


def test_an_old_context_holds_no_records(rnet: Recorder) -> None:
    with rnet.watch() as passes:
        kept = contextvars.copy_context()
        rnet.net(X)
    record = weakref.ref(passes)
    del passes
    gc.collect()
    assert record() is None
    assert torch.equal(kept.run(rnet.net, X), rnet.net(X))


def in_a_pool(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def in_an_empty_context(call: Callable[[], Any]) -> Any:
    return contextvars.Context().run(call)


def in_an_executor(call: Callable[[], Any]) -> Any:
    async def work() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call)

    return asyncio.run(work())


ELSEWHERE = [in_a_thread, in_a_pool, in_an_empty_context, in_an_executor]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("way", ["watch", "collecting"])
def test_a_block_that_only_others_pass_by_says_so(rnet: Recorder, elsewhere: Any, way: str) -> None:
    oracle, options = Oracle(rnet.net), {"activation_postproc": Add(torch.ones(4))}
    with (
        pytest.raises(FlowError, match=r"another thread or task.*copy_context\(\).run"),
        getattr(rnet, way)(**options),
    ):
        assert torch.equal(elsewhere(lambda: rnet.net(X)), oracle.answer(X))
    # With a call of its own, others' are no fault.
    with getattr(rnet, way)(**options):
        assert torch.equal(elsewhere(lambda: rnet.net(X)), oracle.answer(X))
        assert torch.equal(rnet.net(X), oracle.answer(X, torch.ones(4)))


def test_the_error_of_a_block_comes_first(rnet: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), rnet.watch():
        in_a_thread(lambda: rnet.net(X)).add(1 // 0)


def test_each_collects_its_own(rnet: Recorder) -> None:
    oracle, barrier = Oracle(rnet.net), threading.Barrier(4)

    def collect(seed: int) -> bool:
        batches = list(torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(seed)))
        with rnet.collecting(progress=False) as collection:
            for x in batches:
                barrier.wait()
                rnet.net(x)
        return torch.equal(collection.recording["1"][:], torch.cat([*map(oracle.hidden, batches)]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(collect, range(4)))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_region_runs_again_as_in_its_block(rnet: Recorder, is_reentrant: bool) -> None:
    """Whichever thread the backward pass runs on, and whatever block that is in."""
    oracle, vector = Oracle(rnet.net), torch.full((4,), 3.0)
    x, by_hand = (X.clone().requires_grad_() for _ in range(2))
    (oracle.answer(by_hand, vector) ** 2).sum().backward()

    def square(value: Tensor) -> Tensor:
        return rnet.net(value) ** 2

    with rnet.watch(activation_postproc={"1": Add(vector)}) as passes:
        loss = checkpoint(square, x, use_reentrant=is_reentrant).sum()
        in_a_thread(lambda: loss.backward(retain_graph=True))
        first, x.grad = x.grad, None
    with (
        pytest.warns(UserWarning, match="not called in the block"),
        rnet.watch(activation_postproc={"1": Add(-vector)}) as others,
    ):
        loss.backward()
    assert torch.equal(first, by_hand.grad)
    assert torch.equal(x.grad, by_hand.grad)
    assert (len(passes), len(others)) == (1, 0)


def test_calls_outside_of_the_block_of_a_task_warn_nobody(rnet: Recorder) -> None:
    """A plain request calls the recorded layers without a pass on the same thread."""

    async def serve(opens: bool) -> None:
        for _ in range(3):
            with rnet.watch() if opens else contextlib.nullcontext():
                await asyncio.sleep(0)
                rnet.net(X)
                await asyncio.sleep(0)

    async def server() -> None:
        await asyncio.gather(*(serve(bool(at % 2)) for at in range(6)))

    asyncio.run(server())

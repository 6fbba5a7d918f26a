"""T9: threads, recorders on one net and recorders inside recorders keep their records apart."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.postprocessors import Scale
from tests.harness import in_a_thread, recorder
from tests.oracle import same_bits
from tests.zoo.base import Net, linear

THREADS = 4
CALLS = 80


def small_net() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.Tanh())


def together(work: Any) -> list[Any]:
    """Run `work(index)` in several threads that start at the same moment."""
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_threads_see_their_own_latest_pass() -> None:
    net = small_net()
    rnet = recorder(net, "0", "2", "2/linear")

    def work(index: int) -> int:
        source = torch.Generator().manual_seed(index)
        right = 0
        with torch.no_grad():
            for _ in range(CALLS):
                x = torch.randn(3, 4, generator=source)
                factor = float(index + 1)
                output = rnet(x, activation_postproc=dict.fromkeys("02", Scale(factor)))
                first = net[0].forward(x)
                third = net[2].forward(torch.relu(first * factor))
                right += same_bits(rnet.activations["0"], first)
                right += same_bits(rnet.activations["2"], third)
                right += same_bits(rnet.activations["2/linear"], third)
                right += same_bits(output, torch.tanh(third * factor))
        return right

    assert together(work) == [4 * CALLS] * THREADS


def test_threads_that_train_see_their_own_graph() -> None:
    net = small_net()
    rnet = recorder(net, "0")

    def work(index: int) -> int:
        source = torch.Generator().manual_seed(index)
        right = 0
        for _ in range(CALLS // 4):
            x = torch.randn(3, 4, generator=source)
            output = rnet(x)
            record = rnet.activations["0"]
            (mine,) = torch.autograd.grad(output.sum(), record)
            hidden = net[0].forward(x).detach().requires_grad_()
            truth = torch.tanh(net[2].forward(torch.relu(hidden))).sum()
            right += same_bits(mine, torch.autograd.grad(truth, hidden)[0])
        return right

    assert together(work) == [CALLS // 4] * THREADS


def test_other_thread_does_not_replace_what_this_one_sees() -> None:
    net = small_net()
    rnet = recorder(net, "0")
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    rnet(x)
    seen: list[Any] = []

    def work() -> None:
        seen.append(len(rnet.activations))
        rnet(other)
        seen.append(same_bits(rnet.activations["0"], net[0].forward(other)))

    in_a_thread(work)
    assert seen == [0, True]
    assert same_bits(rnet.activations["0"], net[0].forward(x))


def test_failure_in_one_thread_leaves_the_other_alone() -> None:
    net = small_net()
    rnet = recorder(net, "0")

    def work(index: int) -> int:
        right = 0
        for _ in range(CALLS // 4):
            x = torch.randn(3, 4 if index % 2 else 5)
            try:
                rnet(x)
            except RuntimeError:
                right += len(rnet.activations) == 0
            else:
                right += same_bits(rnet.activations["0"], net[0].forward(x))
        return right

    assert together(work) == [CALLS // 4] * THREADS


def test_two_recorders_on_one_net() -> None:
    net = small_net()
    one, two = recorder(net, "0", "2"), recorder(net, "2", "3")
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    one(x)
    two(y, activation_postproc=lambda tensor: tensor * 2)
    assert same_bits(one.activations["0"], net[0].forward(x))
    third = net[2].forward(torch.relu(net[0].forward(y)))
    assert same_bits(two.activations["2"], third)
    assert same_bits(two.activations["3"], torch.tanh(third * 2))
    assert same_bits(one.activations["2"], net[2].forward(torch.relu(net[0].forward(x))))
    one.remove()
    two(x)
    assert same_bits(two.activations["2"], net[2].forward(torch.relu(net[0].forward(x))))


def test_recorder_of_a_recorder() -> None:
    net = small_net()
    inner = recorder(net, "0", "2")
    outer = recorder(inner, nn.Tanh, nn.ReLU)
    for _ in range(3):
        x = torch.randn(3, 4)
        output = outer(x, activation_postproc=lambda tensor: tensor + 1)
        first = net[0].forward(x)
        hidden = torch.relu(first)
        third = net[2].forward(hidden + 1)
        assert same_bits(inner.activations["0"], first)
        assert same_bits(inner.activations["2"], third)
        found = list(outer.activations.values())
        assert len(found) == 2
        assert same_bits(found[0], hidden)
        assert same_bits(found[1], torch.tanh(third))
        assert same_bits(output, torch.tanh(third) + 1)


def test_recorder_that_runs_inside_another_pass() -> None:
    """A net whose forward uses a recorder of its own, on a net of its own."""

    def forward(net: Any, x: Tensor) -> Any:
        net.inner(x)
        return net.head(net.inner.activations["2"])

    encoder = small_net()
    net = Net(forward, encoder=encoder, inner=recorder(encoder, "2"), head=linear())
    rnet = recorder(net, "head", "")
    for _ in range(3):
        x = torch.randn(3, 4)
        rnet(x)
        third = net.encoder[2].forward(torch.relu(net.encoder[0].forward(x)))
        assert same_bits(net.inner.activations["2"], third)
        assert same_bits(rnet.activations["head"], net.head.forward(third))


def test_recorder_that_is_called_by_a_module_it_records() -> None:
    """A pass inside a pass of the same recorder: the outer one goes on where it was."""
    net = Net(lambda net, x: net.last(net.middle(net.first(x))), first=linear(), last=linear())
    calls: list[Tensor] = []

    def middle(_: Any, x: Tensor) -> Tensor:
        if len(calls) == 1:
            calls.append(x)
            rnet(torch.zeros(3, 4))
        return x * 2

    net.middle = Net(middle)
    rnet = recorder(net, "first", "last")
    x = torch.randn(3, 4)
    calls.append(x)
    rnet(x)
    first = net.first.forward(x)
    assert same_bits(rnet.activations["first"], first)
    assert same_bits(rnet.activations["last"], net.last.forward(first * 2))


def test_what_a_pass_of_another_thread_has_learned_meanwhile_stays() -> None:
    """Here it ends first, and shows that the layer is overwritten in this setting."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        result: Tensor = net.last(hidden)
        if x is plain:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(rnet, torch.randn(3, 4)).result()
        else:
            hidden.detach().zero_()
        return result

    plain = torch.randn(3, 4)
    rnet = recorder(Net(forward, first=linear(), last=linear()), "first")
    rnet(plain)
    x = torch.randn(3, 4)
    rnet(x)
    assert same_bits(rnet.activations["first"], rnet.net.first.forward(x))

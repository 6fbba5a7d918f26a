"""When a guard asks the device, and what it says of passes that errors end."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model

from scio_recorder import NonFiniteError, Recorder, UnsupportedNetError
from scio_recorder.analysis.guarding import finite
from scio_recorder.lowlevel import interpreter
from tests.analysis.guarding.nonfinite import INF, NAN, Do, linear
from tests.zoo.base import Net

X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, 0.0, 2.0, -0.5]])


def recorder(net: nn.Module) -> Recorder:
    return Recorder(net, input_data=torch.ones(1, 4), force_static_flow=False, verbose=0)


def root() -> nn.Module:
    """Return a module with infinite gradients for what is zero."""
    return nn.Sequential(Do(lambda x: x * 0), Do(lambda x: x.sqrt()))


# -- what is asked of the device -------------------------------------------------------------------

# Each of these waits for a GPU until it has done all that was asked before.
WAITS = {"item", "_local_scalar_dense", "equal", "nonzero", "is_nonzero"}


def operations_of(step: Callable[[], object]) -> Counter[str]:
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return Counter({e.key.removeprefix("aten::"): e.count for e in seen.key_averages()})


@pytest.mark.parametrize("with_gradients", [False, True])
def test_in_a_pass_nothing_is_asked_of_the_device(
    with_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"n_layer": 8, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 32}
    net = GPT2Model(GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None))
    net.eval()
    ids = torch.arange(8)[None]
    calls: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, *call: calls.append(m)) for m in net.modules()]
    net(ids)
    for handle in handles:
        handle.remove()
    # A call has inputs and outputs, and in a backward pass their gradients.
    num_rows = len(calls) * (1 + with_gradients)

    def step() -> None:
        with torch.set_grad_enabled(with_gradients):
            output = net(ids).last_hidden_state
            if with_gradients:
                output.sum().backward()

    transfers, plain = [0], Tensor.tolist

    def counting(tensor: Tensor) -> Any:
        transfers[0] += 1
        return plain(tensor)

    bare = operations_of(step)
    monkeypatch.setattr(Tensor, "tolist", counting)
    with Recorder(net, input_data=ids, verbose=0).guard():
        guarded = operations_of(step)
    guarded.subtract(bare)
    # Two steps. A pass asks once, and a backward pass once.
    assert transfers[0] == 2 * (1 + with_gradients)
    assert not any(guarded[name] for name in WAITS)
    assert sum(guarded.values()) <= 1.6 * num_rows


def test_regions_that_run_again_ask_at_the_end_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def region() -> nn.Module:
        return Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=linear())

    net = nn.Sequential(linear(), region(), region(), region())
    reads, plain = [0], finite._note

    def counting(*read: Any) -> bool:
        reads[0] += 1
        return plain(*read)

    monkeypatch.setattr(finite, "_note", counting)
    with recorder(net).guard():
        output = net(X)
        assert reads == [1]
        output.sum().backward()
    assert reads == [2]


# -- the moment of the error -----------------------------------------------------------------------


@pytest.mark.parametrize("immediate", [False, True])
def test_the_error_comes_when_the_call_of_the_network_ends(immediate: bool) -> None:
    later: list[int] = []
    net = nn.Sequential(Do(torch.log), Do(lambda x: later.append(1) or x))
    rnet = recorder(net)
    later.clear()
    with (
        rnet.guard(immediate=immediate),
        pytest.raises(NonFiniteError, match="layer 1-1 0 "),
    ):
        net(X)
    assert later == [1] * (not immediate)


@pytest.mark.parametrize("immediate", [False, True])
def test_the_error_comes_when_the_backward_pass_ends(immediate: bool) -> None:
    net = nn.Sequential(linear(), root())
    with recorder(net).guard(immediate=immediate):
        output = net(X)
        with pytest.raises(NonFiniteError, match="gradient of its inputs"):
            output.sum().backward()
    assert (net[0].weight.grad is None) == immediate


def test_inputs_are_kept_at_once() -> None:
    later: list[int] = []
    net = nn.Sequential(Do(torch.log), Do(lambda x: later.append(1) or x))
    rnet = recorder(net)
    later.clear()
    with rnet.guard(keep_inputs=True), pytest.raises(NonFiniteError):
        net(X)
    assert not later


class FailsError(Exception):
    pass


def failing(error: type[BaseException] = FailsError) -> nn.Module:
    def fails(x: Tensor) -> Tensor:
        if len(x) > 1:
            raise error("its own")
        return x

    return nn.Sequential(Do(torch.log), nn.Sequential(Do(fails)))


def test_a_pass_that_fails_of_itself_is_checked_too() -> None:
    net = failing()
    with recorder(net).guard() as guard:
        with pytest.raises(NonFiniteError, match="layer 1-1 0 ") as caught:
            net(X)
        assert isinstance(caught.value.__cause__, FailsError)
        # A pass without fault ends in its own error.
        with pytest.raises(FailsError):
            net(X.abs() + 1)
    assert guard.origin is caught.value.origin


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_stays_one(error: type[BaseException]) -> None:
    net = failing(error)
    rnet = recorder(net)
    with pytest.raises(error), rnet.guard():
        net(X)
    with rnet.guard() as guard:
        with pytest.raises(error):
            net(X)
        net(X[:1].abs() + 1)
    assert guard.origin is None


def test_the_error_of_a_device_that_answers_no_more_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = failing()
    rnet = recorder(net)

    def broken(*call: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch, "stack", broken)
    with rnet.guard() as guard, pytest.raises(FailsError):
        net(X)
    assert guard.origin is None


def test_a_part_that_fails_is_told_of_where_its_error_leaves_the_block() -> None:
    net = failing()
    rnet = recorder(net)
    with pytest.raises(NonFiniteError) as caught, rnet.guard():
        net[1](net[0](X))
    assert caught.value.origin.layer.name == "0"
    inner = nn.Sequential(nn.Sequential(Do(torch.log), Do(lambda x: x if len(x) == 1 else x @ x)))
    with pytest.raises(NonFiniteError, match=r"layer 2-1 0\.0 ") as caught, recorder(inner).guard():
        inner[0](X)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("where", ["the next pass", "the end"])
def test_a_part_that_fails_is_told_of_later_if_its_error_is_handled(where: str) -> None:
    net = nn.Sequential(failing())
    rnet = recorder(net)

    def block() -> None:
        with rnet.guard():
            with pytest.raises(FailsError):
                net[0](X)
            if where == "the next pass":
                net[0](X[:1].abs() + 1)
                raise AssertionError

    with pytest.raises(NonFiniteError, match=r"layer 2-1 0\.0 ") as caught:
        block()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("where", ["the next pass", "the end", "an error"])
def test_a_backward_pass_that_fails_is_checked_later(where: str) -> None:
    def fails(gradient: Tensor) -> None:
        raise FailsError

    net = nn.Sequential(linear(), root())
    rnet = recorder(net)
    net[0].weight.register_hook(fails)

    def block() -> None:
        with rnet.guard():
            with pytest.raises(FailsError):
                net(X).sum().backward()
            gc.collect()
            if where == "the next pass":
                net(X)
                raise AssertionError
            if where == "an error":
                raise KeyError

    with pytest.raises(NonFiniteError, match=r"layer 2-2 1\.1 ") as caught:
        block()
    assert caught.value.origin.direction == "gradient"
    # At the next pass, and not when the block ends.
    assert type(caught.value.__cause__) is (KeyError if where == "an error" else type(None))


def test_a_backward_pass_that_fails_keeps_no_values() -> None:
    def fails(gradient: Tensor) -> None:
        raise FailsError

    net = nn.Sequential(linear(), nn.GELU(), linear())
    net[0].weight.register_hook(fails)
    held: list[weakref.ref[Tensor]] = []
    with recorder(net).guard():
        output = net(X)
        output.grad_fn.register_prehook(lambda given: held.append(weakref.ref(given[0])))
        output.grad_fn.register_hook(lambda made, given: held.append(weakref.ref(made[1])))
        with pytest.raises(FailsError):
            output.square().sum().backward()
        del output
        gc.collect()
        assert [reference() for reference in held] == [None, None]


# -- guards, threads and optimisers ----------------------------------------------------------------


@pytest.mark.parametrize("immediate", [(False, False), (True, False), (False, True), (True, True)])
def test_two_guards_tell_of_the_same_call(immediate: tuple[bool, bool]) -> None:
    net = nn.Sequential(linear(), nn.ReLU(), Do(torch.log), nn.Identity())
    rnet = recorder(net)
    for run in (net, lambda x: net[3](net[2](x))):
        outer, inner = (rnet.guard(immediate=one) for one in immediate)
        with pytest.raises(NonFiniteError) as caught, outer as first, inner as second:
            run(X)
        assert caught.value.origin in (first.origin, second.origin)
        for guard in (first, second):
            assert guard.origin.layer.name == "2"


def test_each_thread_is_told_of_its_own_passes() -> None:
    net = nn.Sequential(Do(torch.log), linear(), root())
    rnet = recorder(net)
    told: dict[int, str] = {}
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        for _ in range(20):
            barrier.wait()
            try:
                net(X if number % 2 else X.abs() + 1).sum().backward()
            except NonFiniteError as error:
                told[number] = error.origin.layer.name

    with rnet.guard() as guard:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert told == {0: "2.1", 1: "0", 2: "2.1", 3: "0"}
    assert guard.num_passes == 80


def in_hooks(net: nn.Module, optimizer: Callable[[Any], Any]) -> None:
    """Let each weight take its step as soon as its gradient is there."""
    for weight in net.parameters():
        steps = optimizer([weight])

        def step(weight: Tensor, steps: Any = steps) -> None:
            steps.step()
            steps.zero_grad()

        weight.register_post_accumulate_grad_hook(step)


def test_an_optimiser_in_hooks_writes_weights_before_the_end() -> None:
    net = nn.Sequential(linear(), root())
    rnet = recorder(net)
    in_hooks(net, lambda weights: torch.optim.SGD(weights, lr=0.1))
    with rnet.guard(action="record") as guard:
        net(X).sum().backward()
    assert guard.origin.layer.name == "1.1"
    assert net[0].weight.isnan().any()
    # Of a module whose weights were written to, nobody knows any more.
    net = nn.Sequential(linear(), nn.Linear(4, 4))
    with torch.no_grad():
        net[1].weight.mul_(1e25)
    rnet = recorder(net)
    in_hooks(net, lambda weights: torch.optim.SGD(weights, lr=0.1))
    with rnet.guard(action="record") as guard:
        (net(X * 1e-3) * 1e20).sum().backward()
    assert (guard.origin.layer.name, guard.origin.weights_finite) == ("1", None)
    assert "its weights have changed since" in str(guard)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_gradient_of_a_weight_is_counted_as_it_came(is_first: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    with recorder(net).guard(action="record", kinds=("inf",)) as guard:
        if not is_first:
            net(X).sum().backward()
        before = None if is_first else net[0].weight.grad.clone()
        x = X.abs() * torch.tensor([1e30, 0.0, 1e30, 1e30])
        (net(x) * torch.tensor([0.0, 1e30, 0.0])).sum().backward()
    origin = guard.origin
    assert (origin.layer.name, origin.parameter) == ("0", "weight")
    # Those of the other units are zero.
    assert (origin.num_nan, origin.num_inf, origin.index) == (0, 3, (1, 0))
    # Autograd takes the first one, as without a guard.
    assert (before is None) == is_first


def test_autograd_takes_gradients_as_without_a_guard() -> None:
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    rnet = recorder(net)
    arrived: dict[str, int] = {}
    taken = []
    for name, weight in net.named_parameters():
        weight.register_hook(lambda g, name=name: arrived.update({name: g.data_ptr()}))
    for block in (contextlib.nullcontext(), rnet.guard()):
        net.zero_grad()
        with block:
            net(X).sum().backward()
        taken.append([w.grad.data_ptr() == arrived[name] for name, w in net.named_parameters()])
    assert taken[0] == taken[1]


# -- what is gone ----------------------------------------------------------------------------------


def test_what_was_overwritten_is_not_counted() -> None:
    net = nn.Sequential(Do(torch.log), nn.ReLU(inplace=True))
    with recorder(net).guard(action="record") as guard:
        net(X)
    origin = guard.origin
    assert origin.layer.name == "0"
    assert (origin.num_nan, origin.num_inf, origin.index, origin.sample) == (None,) * 4
    assert origin.num_values == 8
    assert "made NaNs among 8 values" in str(origin)
    assert "write guard(immediate=True)" in str(origin)
    with recorder(net).guard(action="record", immediate=True) as guard:
        net(X)
    assert guard.origin.num_nan == int(X.log().isnan().sum())


def test_what_is_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two tensors of a pass, not three.
    monkeypatch.setattr(finite, "_KEPT_BYTES", 2 * X.nbytes)
    fine = Do(lambda x: x * 1)
    for number, is_known in ((0, True), (1, True), (2, False)):
        modules = [fine, fine, fine]
        modules[number] = Do(lambda x: x / 0)
        net = nn.Sequential(*modules, Do(torch.nan_to_num))
        with recorder(net).guard(action="record", gradients=False) as guard:
            net(X)
        assert guard.origin.layer.name == str(number)
        assert (guard.origin.num_inf is not None) == is_known


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_small_pass_is_always_counted(mode: Any) -> None:
    net = nn.Sequential(Do(lambda x: x / 0), Do(torch.nan_to_num), Do(torch.zeros_like))
    with recorder(net).guard(action="record") as guard, mode():
        net(X.clone())
    assert (guard.origin.num_nan, guard.origin.num_inf, guard.origin.index) == (1, 7, (0, 0))


def test_a_nan_hides_infinities_of_its_tensor() -> None:
    values = torch.tensor([[NAN, INF, 1.0, 1.0]])
    for kinds, is_found in ((("nan", "inf"), True), (("nan",), True), (("inf",), False)):
        net = nn.Sequential(Do(lambda x: x * values))
        with recorder(net).guard(action="record", kinds=kinds) as guard:
            net(torch.ones(1, 4))
        assert (guard.origin is not None) == is_found
        if guard.origin is not None:
            assert (guard.origin.num_nan, guard.origin.num_inf) == (1, 1)


# -- nets that can't be guarded as they are --------------------------------------------------------


@pytest.mark.parametrize(("depth", "operations"), [(40, True), (80, False)])
def test_a_net_that_is_too_deep_says_what_to_write(depth: int, operations: bool) -> None:
    net: nn.Module = nn.Linear(4, 4)
    for _ in range(depth):
        net = Net(lambda net, x: net.inner(x), inner=net)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(20_000)
        rnet = recorder(net)
        # Python 3.12 lets modules lie less than 200 deep, whatever this limit is.
        sys.setrecursionlimit(len([*interpreter.stack()]) + 350)
        with (
            pytest.raises(
                UnsupportedNetError, match=r"write sys.setrecursionlimit\((\d+)\)"
            ) as caught,
            rnet.guard(operations=operations),
        ):
            pass
        advice = str(caught.value).partition("setrecursionlimit(")[2].partition(")")[0]
        sys.setrecursionlimit(int(advice))
        with rnet.guard(operations=operations) as guard:
            net(X)
    finally:
        sys.setrecursionlimit(limit)
    assert guard.num_passes == 1


def test_a_compiled_net_is_guarded_where_it_runs_uncompiled(fresh_compiler: None) -> None:
    for is_wrapped in (True, False):
        net = nn.Sequential(linear(), linear(NAN))
        rnet = recorder(net)
        if is_wrapped:
            run = torch.compile(net, backend="eager")
        else:
            net.compile(backend="eager")
            run = net
        run(X)
        if not is_wrapped:
            with pytest.raises(UnsupportedNetError, match="set_stance"), rnet.guard():
                run(X)
        with (
            torch.compiler.set_stance("force_eager"),
            pytest.raises(NonFiniteError, match="layer 1-2 1 "),
            rnet.guard(),
        ):
            run(X)

"""T1, T9: hooks come and go while other threads call the network, and no call notices."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.capture import around
from scio_recorder.capture.around import change_hooks, entries
from scio_recorder.errors import FlowError
from scio_recorder.events import track
from scio_recorder.postprocessors import OnInput
from scio_recorder.tensors import private
from tests.garbage import garbage_left
from tests.harness import in_a_thread, recorder
from tests.oracle import same_bits
from tests.zoo.base import Net, linear

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SLEEP_IN_SECONDS = 2e-4


class Reader(threading.Thread):
    """Reads hooks as torch does, and lets other threads run at each pair that is created."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._dictionaries = [hooks for module in net for hooks in private.forward_hooks(module)]
        self.errors: list[Exception] = []
        self.num_reads = 0
        self.is_over = False

    def run(self) -> None:
        held: list[Any] = []
        gc.callbacks.append(self._sleep)
        try:
            while not self.is_over:
                for hooks in self._dictionaries:
                    # The interpreter uses pairs again that were given up, and creates none as long
                    # as it has some left.
                    gc.disable()
                    held += [(number, number) for number in range(3000)]
                    gc.enable()
                    try:
                        held.append((*hooks.items(),))
                    except Exception as error:
                        self.errors.append(error)
                self.num_reads += 1
                # Collections of others need their turn.
                time.sleep(SLEEP_IN_SECONDS)
        finally:
            gc.callbacks.remove(self._sleep)

    def _sleep(self, phase: str, info: Any) -> None:
        if threading.current_thread() is self:
            time.sleep(SLEEP_IN_SECONDS)


@contextlib.contextmanager
def many_young_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 10**6, 10**6)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def guard(rnet: Recorder) -> None:
    with rnet.guard():
        rnet.net(X)


def guard_beside_a_new_hook(rnet: Recorder) -> None:
    with rnet.guard():
        # As the library's own changes: the tests are not about those of others.
        change_hooks(lambda: rnet.net[0].register_forward_hook(lambda *call: None))
        rnet.net(X)


def record(rnet: Recorder) -> None:
    rnet.record("0", inputs=True)
    rnet(X)


def record_behind_another_hook(rnet: Recorder) -> None:
    rnet.record("0")
    change_hooks(lambda: rnet.net[0].register_forward_hook(lambda *call: None))
    rnet(X)


def log_calls(rnet: Recorder) -> None:
    with track(rnet.net):
        rnet.net(X)


def save_less(rnet: Recorder) -> None:
    with rnet.saved_tensors("*", dtype=torch.float16):
        rnet.net(X).sum().backward()


WORKS = [guard, guard_beside_a_new_hook, record, record_behind_another_hook, log_calls, save_less]


@pytest.mark.parametrize("work", WORKS)
def test_hooks_never_change_while_another_thread_reads_them(work: Any) -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = Recorder(net, input_size=(3, 4))
    for module in net:
        for _ in range(20):
            module.register_forward_hook(lambda *call: None)
            module.register_forward_pre_hook(lambda *call: None)
    reader = Reader(net)
    with many_young_collections():
        reader.start()
        while reader.num_reads < 20:
            work(rnet)
        reader.is_over = True
        reader.join()
    assert not reader.errors
    assert same_bits(rnet.net(X), torch.relu(net[0].forward(X)))


class Guarded(OrderedDict[int, Any]):
    """A dictionary of hooks that counts its changes, and those that nobody else is kept from."""

    num_changes = num_unguarded = 0

    def _note(self) -> None:
        self.num_changes += 1
        self.num_unguarded += not around._ONE_AT_A_TIME._is_owned()

    def __setitem__(self, number: int, hook: Any) -> None:
        if "_is_made" in vars(self):
            self._note()
        super().__setitem__(number, hook)

    def __delitem__(self, number: int) -> None:
        self._note()
        super().__delitem__(number)

    def pop(self, number: int, *default: Any) -> Any:
        self._note()
        return super().pop(number, *default)

    def move_to_end(self, number: int, last: bool = True) -> None:
        self._note()
        super().move_to_end(number, last)


# Saved tensors change no hooks of modules.
@pytest.mark.parametrize("work", [work for work in WORKS if work is not save_less])
def test_all_changes_of_hooks_keep_other_threads_out(work: Any) -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = Recorder(net, input_size=(3, 4))
    for module in net:
        for name in private.FORWARD_HOOKS:
            hooks = Guarded(getattr(module, name))
            hooks._is_made = True  # type: ignore[attr-defined]  # what it begins with is no change
            setattr(module, name, hooks)
    work(rnet)
    rnet.remove()
    changed = [hooks for module in net for hooks in private.forward_hooks(module)]
    assert sum(hooks.num_changes for hooks in changed) >= 2
    assert not any(hooks.num_unguarded for hooks in changed)


class Noted(OrderedDict[int, Any]):
    """A dictionary of hooks that notes which are taken away."""

    missing: list[int]

    def pop(self, number: int, *default: Any) -> Any:
        self.missing.append(number)
        return super().pop(number, *default)


def noted(module: nn.Module) -> Noted:
    hooks = module._forward_hooks = Noted(module._forward_hooks)
    hooks.missing = []
    return hooks


def test_a_hook_that_moves_behind_others_is_never_missing() -> None:
    """Other threads run between two instructions of the interpreter, and look at hooks then."""
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "0")
    hooks = private.forward_hooks(net[0])[0]
    seen: set[tuple[int, ...]] = set()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        seen.add(tuple(hooks))
        return look

    def traced(call: Any) -> set[tuple[int, ...]]:
        seen.clear()
        before = sys.gettrace()
        sys.settrace(look)
        try:
            call()
        finally:
            sys.settrace(before)
        return set(seen)

    (own,) = hooks
    other = net[0].register_forward_hook(lambda module, args, output: output + 1).id
    assert traced(lambda: rnet(X)) == {(own, other), (other, own)}
    assert same_bits(rnet.activations["0"], net[0].forward(X) + 1)
    # The check does see hooks that are taken away.
    assert (other,) in traced(rnet.remove)


def test_hooks_lie_in_the_order_in_which_they_act() -> None:
    """Dynamo, of torch 2.8 for one, takes places in one order for those in the other."""
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "0", "0/linear", inputs=True)
    for prepend in (False, True):
        net[0].register_forward_hook(lambda *call: None, prepend=prepend)
        net[0].register_forward_pre_hook(lambda *call: None, prepend=prepend)
        rnet(X)
        for hooks in private.forward_hooks(net[0]):
            assert len(hooks) == 3 + prepend
            assert list(hooks) == list(dict.keys(hooks))


def test_hooks_on_inputs_come_without_taking_others_away() -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "*")
    hooks = noted(net[1])
    for factor in (2.0, 3.0):
        by: Any = lambda tensor, factor=factor: tensor * factor  # noqa: E731  # one for each pass
        output = rnet(X, activation_postproc={"1": OnInput(by)})
        assert same_bits(output, torch.relu(net[0].forward(X) * factor))
        assert same_bits(rnet.activations["1"], output)
    assert same_bits(rnet(X), torch.relu(net[0].forward(X)))
    assert not hooks.missing


@pytest.mark.parametrize(
    ("kind", "options", "post"),
    [
        ("_forward_hooks", {"calls": "any"}, None),
        ("_forward_hooks", {}, None),
        ("_forward_pre_hooks", {"inputs": True}, None),
        ("_forward_pre_hooks", {"gradients": True}, None),
        ("_forward_pre_hooks", {"inputs": True, "calls": "any"}, None),
        ("_forward_pre_hooks", {}, OnInput(torch.neg)),
    ],
)
def test_hooks_that_others_remove_are_missed_once(
    kind: str, options: dict[str, Any], post: Any
) -> None:
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    rnet = recorder(net, "0", "2", **options)
    posts = None if post is None else {"2": post}
    expected = rnet(X, activation_postproc=posts)
    getattr(net[2], kind).clear()
    with pytest.raises(FlowError, match=r"1-3 2 \(Linear\)") as caught:
        rnet(X, activation_postproc=posts)
    assert "1-1" not in str(caught.value)
    assert same_bits(rnet(X, activation_postproc=posts), expected)
    assert len(rnet.activations) == 2


def test_hooks_beside_own_code_that_others_remove_come_back() -> None:
    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    net = nn.Sequential(linear(), nn.Tanh())
    rnet = recorder(net, "0/linear", calls="any")
    received: list[Tensor] = []
    kinds = "_forward_hooks", "_forward_pre_hooks"
    for removed in [(), kinds[:1], kinds[1:], kinds]:
        for kind in removed:
            getattr(net[0], kind).clear()
        net[0].register_forward_pre_hook(lambda _, args: nn.functional.linear(*args, weight))
        net[0].register_forward_hook(lambda _, args, output: nn.functional.linear(output, weight))
        with net[0].register_forward_hook(lambda _, args, __: received.append(args[0])):
            rnet(X)
        (recorded,) = rnet.activations["0/linear"]
        assert same_bits(recorded, nn.functional.linear(received[-1], net[0].weight, net[0].bias))


def test_hooks_that_a_forward_adds_for_one_call_are_no_own_code() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with net.linear.register_forward_hook(lambda _, args, output: seen.append(output.exp())):
            net.linear(x)
        return net.linear(x).exp() + seen[0]  # type: ignore[no-any-return]

    class Exponential(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp()

    torch.manual_seed(0)
    net = Net(forward, linear=Exponential(4, 4))
    rnet = recorder(net, "1-1/exp", "1-2/exp")
    for _ in range(2):
        rnet(X)
        for name in ("1-1/exp", "1-2/exp"):
            assert same_bits(rnet.activations[name], net.linear(X))


def test_a_pass_that_fails_leaves_the_hooks_to_one_that_has_only_begun() -> None:
    class Options(Mapping[str, float]):
        """Options of a network, which are looked at when a pass begins."""

        def __getitem__(self, key: str) -> float:
            return 2.0

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            if is_beginning.is_set():
                is_beginning.clear()
                in_a_thread(fail)
            return iter(["factor"])

    def fail() -> None:
        with pytest.raises(RuntimeError):
            rnet(X[:, :3], {"factor": 1.0})
        failed.set()

    is_beginning, failed = threading.Event(), threading.Event()
    net = Net(lambda net, x, options: net.linear(x) * options["factor"], linear=linear())
    rnet = recorder(net, "*", input_data=(X, {"factor": 1.0}))
    rnet(X, {"factor": 1.0})
    is_beginning.set()
    output = rnet(X, Options())
    assert failed.is_set()
    assert same_bits(rnet.activations["linear"], net.linear.forward(X))
    assert same_bits(rnet.activations[""], output)


def end_log(rnet: Recorder) -> Any:
    log = track(rnet.net)
    log.__enter__()
    return lambda: log.__exit__(None, None, None)


def end_saved_tensors(rnet: Recorder) -> Any:
    block = rnet.saved_tensors("*", dtype=torch.float16)
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def select_again(rnet: Recorder) -> Any:
    rnet.record("*", inputs=True)
    return lambda: rnet.record("0")


@pytest.mark.parametrize("begin", [end_log, end_saved_tensors, select_again])
@pytest.mark.parametrize("before", [True, False])
def test_a_call_goes_on_when_another_thread_ends_what_looked_at_it(
    begin: Any, before: bool
) -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    expected = net(X)
    rnet = Recorder(net, input_size=(3, 4))
    ends: list[Any] = []

    # Torch has read the module's hooks when it calls this one, which is the first.
    def end(*call: Any) -> None:
        while ends:
            in_a_thread(ends.pop())

    if before:
        net[0].register_forward_pre_hook(end)
    else:
        net[0].register_forward_hook(end)
    ends.append(begin(rnet))
    assert same_bits(net(X), expected)
    assert not ends
    # And nothing acts on what comes later.
    net(X).sum().backward()
    parameters = [parameter.grad for parameter in net.parameters()]
    plain = torch.autograd.grad(torch.relu(net[0].forward(X)).sum(), list(net.parameters()))
    assert all(map(same_bits, parameters, plain))


def test_saved_tensors_of_a_thread_are_as_before_when_another_one_ends_the_block() -> None:
    def wait(_: Any, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            is_running.set()
            assert is_over.wait(60)
        return x.sin()

    def work() -> None:
        net(X)
        # The block is over: what follows is saved as it is.
        found.append(private.active_saved_tensors_hooks())
        found.extend(torch.autograd.grad(net(X).sum(), list(net.parameters())))

    is_running, is_over = threading.Event(), threading.Event()
    found: list[Any] = []
    net = nn.Sequential(linear(), Net(wait))
    thread = threading.Thread(target=work)
    with Recorder(net, input_size=(3, 4)).saved_tensors("*", dtype=torch.float16):
        thread.start()
        assert is_running.wait(60)
    is_over.set()
    thread.join()
    expected = torch.autograd.grad(net[0].forward(X).sin().sum(), list(net.parameters()))
    assert found[0] is None
    assert all(same_bits(*pair) for pair in zip(found[1:], expected, strict=True))
    assert not any(hooks for module in net for hooks in private.forward_hooks(module))


def test_a_block_of_saved_tensors_that_is_entered_again_acts_again() -> None:
    net = nn.Sequential(linear(), nn.Sigmoid())
    block = Recorder(net, input_size=(3, 4)).saved_tensors("*", dtype=torch.float16)
    for _ in range(2):
        with block:
            output = net(X)
        assert output.grad_fn is not None
        # Sigmoid saves its output, which comes back rounded.
        assert same_bits(output.grad_fn._saved_result, output.half().float())  # type: ignore[attr-defined]  # of this node


def no_waits(seconds: float) -> None:
    raise AssertionError("there is nothing to wait for")


def test_a_change_gives_its_result_and_its_error_and_may_hold_another(monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "sleep", no_waits)
    assert change_hooks(lambda: change_hooks(lambda: [1])) == [1]
    with pytest.raises(KeyError, match="here"):
        change_hooks(lambda: {}["here"])
    assert change_hooks(lambda: 2) == 2
    assert not any("capture.around" in getattr(one, "__module__", "") for one in gc.callbacks)


def test_an_error_of_a_change_is_gone_once_it_is_handled() -> None:
    class OwnError(Exception):
        pass

    def fail() -> None:
        raise OwnError

    errors = []
    with garbage_left():
        try:
            change_hooks(fail)
        except OwnError as error:
            errors.append(weakref.ref(error))
        assert [error() for error in errors] == [None]


def test_a_finalizer_does_not_wait_for_the_collection_that_calls_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "sleep", no_waits)
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "*")
    rnet.__dict__["itself"] = rnet
    del rnet
    assert any(net[0]._forward_hooks)
    gc.collect()
    assert not any(net[0]._forward_hooks)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="nothing waits for collections from 3.12")
def test_a_wait_that_is_interrupted_leaves_no_hook_behind(monkeypatch: Any) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    net = nn.Sequential(linear(), nn.ReLU())

    def interrupted_at_the_end() -> None:
        with Recorder(net, input_size=(3, 4)).guard():
            net(X)
            assert any(net[0]._forward_pre_hooks)
            # A collection inside another one does nothing.
            monkeypatch.setattr(gc, "collect", lambda generation: 0)
            monkeypatch.setattr(time, "sleep", interrupt)

    with pytest.raises(KeyboardInterrupt):
        interrupted_at_the_end()
    monkeypatch.undo()
    assert not any(net[0]._forward_pre_hooks)


def test_hooks_are_read_beside_changes() -> None:
    hooks: OrderedDict[int, Any] = OrderedDict((number, str(number)) for number in range(50))
    is_over = False

    def change() -> None:
        while not is_over:
            hooks[0] = hooks.pop(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            found = entries(hooks)
            assert len(found) >= 49
            assert all(hook == str(number) for number, hook in found)
    finally:
        is_over = True
        thread.join()
        sys.setswitchinterval(interval)

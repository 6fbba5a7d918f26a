"""T1, T9: hooks come and go while other threads call the network, and no call notices."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from scio_recorder import Recorder
from scio_recorder.capture import hook_changes
from scio_recorder.capture.hook_changes import change_hooks, entries
from scio_recorder.events import track
from scio_recorder.tensors import private
from tests.oracle import same_bits
from tests.zoo.base import linear

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SLEEP_IN_SECONDS = 2e-4


def recorder(net: nn.Module, *selectors: Any, **settings: Any) -> Recorder:
    rnet = Recorder(net, input_size=(3, 4), verbose=0)
    if selectors:
        rnet.record(*selectors, **settings)
    return rnet


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
    rnet = recorder(net)
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
        self.num_unguarded += not hook_changes._ONE_AT_A_TIME._is_owned()

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


@pytest.mark.parametrize("work", WORKS)
def test_all_changes_of_hooks_keep_other_threads_out(work: Any) -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net)
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


def test_a_hook_that_moves_behind_others_is_never_missing() -> None:
    class Noted(OrderedDict[int, Any]):
        missing: list[int]

        def pop(self, number: int, *default: Any) -> Any:
            self.missing.append(number)
            return super().pop(number, *default)

    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "0")
    hooks = net[0]._forward_hooks = Noted(net[0]._forward_hooks)
    hooks.missing = []
    net[0].register_forward_hook(lambda module, args, output: output + 1)
    rnet(X)
    assert same_bits(rnet.activations["0"], net[0].forward(X) + 1)
    assert not hooks.missing
    rnet.remove()
    # The check does see hooks that are taken away.
    assert hooks.missing


def no_waits(seconds: float) -> None:
    raise AssertionError("there is nothing to wait for")


def test_a_change_gives_its_result_and_its_error_and_may_hold_another(monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "sleep", no_waits)
    assert change_hooks(lambda: change_hooks(lambda: [1])) == [1]
    with pytest.raises(KeyError, match="here"):
        change_hooks(lambda: {}["here"])
    assert change_hooks(lambda: 2) == 2
    assert not any("hook_changes" in type(one).__module__ for one in gc.callbacks)


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
        with recorder(net).guard():
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

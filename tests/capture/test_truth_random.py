"""T1 and T2 for nets that nobody thought of: random programs of modules and in-place operations.

`SCIO_RECORDER_FULL_CAMPAIGN` (other than `0`) in the environment runs many more of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.harness import MODES, Mode, executed, make_recorder, run_pass
from tests.oracle import Watch, differences, freeze
from tests.zoo.base import Case, Net, linear, vectors
from tests.zoo.inplace import AddsOne, Overwrites

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from scio_recorder import Recorder

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"

MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "tanh": nn.Tanh,
    "relu": lambda: nn.ReLU(inplace=True),
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.3),
    "add_one": AddsOne,
    "overwrite": Overwrites,
    "norm": lambda: nn.BatchNorm1d(4),
    "view": lambda: Net(lambda _, x: x.view(4, 3).view(3, 4)),
    "rows": lambda: Net(lambda _, x: x[:, torch.arange(4)]),
    "transpose": lambda: Net(lambda _, x: x[:, :3].t().expand(3, 3)[:, :1].expand(3, 4)),
    "pair": lambda: Net(lambda _, x: {"a": x, "b": (x * 2, None)}),
    "nested": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Sequential(nn.Identity())),
    "holder": lambda: Net(_hold, linear=linear(), held=None),
}

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x.add_(1),
    "scale": lambda x: x.mul_(0.5),
    "slice": lambda x: x[:, 0].zero_(),
    "rows": lambda x: x[1].add_(2),
    "flat": lambda x: x.view(-1)[3:7].mul_(-1),
    "off the graph": lambda x: x.detach().add_(1),
}


def _hold(net: Any, x: Tensor) -> Tensor:
    net.held = net.linear(x)
    return net.held


class Program(nn.Module):
    """Runs instructions over a growing list of tensors."""

    def __init__(self, instructions: list[tuple[str, str, int]]) -> None:
        super().__init__()
        self.instructions = instructions
        used = sorted({what for kind, what, _ in instructions if kind == "call"})
        self.parts = nn.ModuleDict({name: MODULES[name]() for name in used})

    def forward(self, x: Tensor) -> Tensor:
        live = [x]
        for kind, what, which in self.instructions:
            value = live[which % len(live)]
            if kind == "call":
                result = self.parts[what](value)
                result = result["b"][0] if isinstance(result, dict) else result
                live.append(result)
            elif kind == "change":
                CHANGES[what](value)
            elif kind == "held":
                self._change_held()
            else:
                live.append(value + live[-1])
        return live[-1]

    def _change_held(self) -> None:
        held = self.parts["holder"].held if "holder" in self.parts else None
        if held is not None:
            with torch.no_grad():
                held.mul_(-2)


INSTRUCTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from(sorted(MODULES)), st.integers(0, 5)),
        st.tuples(st.just("change"), st.sampled_from(sorted(CHANGES)), st.integers(0, 5)),
        st.tuples(st.sampled_from(["sum", "held"]), st.just(""), st.integers(0, 5)),
        st.just(("call", "holder", 0)),
    ),
    min_size=1,
    max_size=9,
)


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """Some programs break autograd's rules; then that is what must come out of both nets."""
    try:
        return function(), None
    except RuntimeError as error:
        return None, str(error)


def _assert_true(rnet: Recorder, watch: Watch, read: list[tuple[Any, Any]]) -> None:
    names = {id(module): name for name, module in rnet.net.named_modules()}
    assert len(executed(rnet)) == len(watch.calls)
    for label in rnet.recording:
        layer = rnet.architecture[label]
        truth = watch.calls[names[id(layer.module)], layer.call]
        wrong = differences(freeze(rnet.activations[label]), truth, f"{label} {layer.name}")
        assert not wrong, wrong[0]
        read.append((rnet.activations[label], truth))


def _check_pass(
    rnet: Recorder,
    watched: nn.Module,
    case: Case,
    mode: Mode,
    seed: int,
    read: list[tuple[Any, Any]],
) -> None:
    for net in (rnet.net, watched):
        net.train(mode.training)
    # Hooks on tensors that overwritten views left half-way on the graph can crash torch itself.
    with Watch(watched, gradients=False) as watch:
        theirs, refused = _attempt(lambda: run_pass(watched, case, mode, seed))
    mine, my_refusal = _attempt(lambda: run_pass(rnet, case, mode, seed))
    if refused is not None:
        return
    assert my_refusal is None
    assert not differences(mine.frozen, theirs.frozen, "output")
    assert not differences(mine.random_state, theirs.random_state, "random state")
    _assert_true(rnet, watch, read)
    if mode.builds_graph:
        truth, refused = _attempt(lambda: theirs.gradients(watched))
        gradients, _ = _attempt(lambda: mine.gradients(rnet.net))
        # A record of its own may spare the net autograd's complaint about an overwritten tensor.
        assert refused is not None or not differences(gradients, truth, "gradients")
        _assert_true(rnet, watch, read)


@pytest.mark.campaign
@given(
    INSTRUCTIONS,
    st.lists(st.sampled_from(MODES), min_size=2, max_size=5),
    st.one_of(st.none(), st.randoms(use_true_random=False)),
)
@settings(
    max_examples=3000 if FULL else 60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_random_programs_are_recorded_truly(
    instructions: list[tuple[str, str, int]], modes: list[Mode], choice: Random | None
) -> None:
    case = Case("program", lambda: Program(instructions), vectors)
    assume(_attempt(lambda: run_pass(case.fresh().eval(), case, MODES[0], 0))[1] is None)
    watched, net = case.fresh(), case.fresh()
    rnet = make_recorder(net, case, force_static_flow=False)
    labels = executed(rnet)
    # All layers, or some: what is kept for one layer depends on which others are recorded.
    rnet.record(*(labels if choice is None else choice.sample(labels, k=(len(labels) + 1) // 2)))
    read: list[tuple[Any, Any]] = []
    for seed, mode in enumerate(modes):
        _check_pass(rnet, watched, case, mode, seed, read)
    # What was read stays as it was read, whatever later passes did.
    for record, truth in read:
        assert not differences(freeze(record), truth, "read earlier")

"""Branches on data are refused, and nothing else is."""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from scio_recorder import Recorder
from scio_recorder.errors import FlowError
from scio_recorder.nets.labelling import data_flow
from scio_recorder.nets.labelling.data_flow import check_static_flow
from scio_recorder.nets.labelling.label import label_net
from scio_recorder.nets.operations import ValueRequests
from tests.rotation import one_in
from tests.zoo import CASES
from tests.zoo.base import Net, linear
from tests.zoo.transformers import GROUPED, text

DATA = torch.linspace(-1, 2, 12).reshape(3, 4)


def build(function: Any) -> Net:
    flag, steps = torch.tensor(True), torch.tensor(2)
    return Net(
        function,
        a=linear(),
        b=linear(),
        flag=flag,
        steps=steps,
        norm=nn.BatchNorm1d(4, momentum=None),
    )


# Networks whose flow depends on data.
DYNAMIC: dict[str, Any] = {
    "sum": lambda net, x: net.b(net.a(x) if x.sum() > 0 else x),
    "item": lambda net, x: net.b(net.a(x) if x.max().item() > 0 else x),
    "float": lambda net, x: net.b(net.a(x) if float(x.mean()) > 0.1 else x),
    "negation": lambda net, x: net.b(x if not (x > 0).all() else net.a(x)),
    "equal": lambda net, x: net.b(net.a(x) if torch.equal(x, x.round()) else x),
    "allclose": lambda net, x: net.b(net.a(x) if torch.allclose(x, x.round()) else x),
    "number of hits": lambda net, x: net.b(net.a(x) if x[x > 0].shape[0] > 3 else x),
    "columns that are hit": lambda net, x: net.b(net.a(x) if x[:, x[0] > 9].shape[1] == 2 else x),
    "number of values": lambda net, x: net.b(net.a(x) if len(x.round().unique()) == 3 else x),
    "list": lambda net, x: net.b(net.a(x) if x.tolist()[0][0] > 0.3 else x),
    "any item of a list": lambda net, x: net.b(net.a(x) if x.tolist()[2][3] > 50 else x),
    "membership": lambda net, x: net.b(net.a(x) if 0.5 in x else x),
    "array": lambda net, x: net.b(net.a(x) if np.asarray(x.detach()).max() > 1 else x),
    "chance": lambda net, x: net.b(net.a(x) if torch.rand(()) < 0.5 else x),
    "one of two modules": lambda net, x: ((x.sum() > 0 and net.a) or net.b)(x),
    "module by its number": lambda net, x: (net.a, net.b)[x.argmax() % 2](x),
    "input": lambda net, x: net.a(x if x.any() else -x),
    "factor": lambda net, x: net.a(x * 2 if x.any() else x * 3),
}


def loop_until_small(net, x):
    while x.norm() > 1:
        x = net.a(x) * 0.1
    return x


def loop_as_often_as_data_say(net, x):
    for _ in range(int(x.max())):
        x = net.a(x)
    return x


def loop_over_hits(net, x):
    for _ in x.nonzero():
        x = net.a(x)
    return x


def loop_over_list_of_hits(net, x):
    for _ in x.sum(0).nonzero().tolist():
        x = net.a(x)
    return x


def loop_over_positions_of_hits(net, x):
    rows, _ = torch.where(x > 0)
    for _ in rows:
        x = net.a(x)
    return x


def branch_on_a_condition_that_is_asked_twice(net, x):
    is_large = x.sum() > 0
    y = net.a(x) if is_large else -1
    return net.b(y) if is_large else x


def choice_of_an_output(net, x):
    y, z = net.a(x), net.b(x)
    return y if x.any() else z


def branch_on_a_flag_of_before(net, x):
    flag = bool(x.any())
    y = net.a(x)
    return net.b(y) if flag else y


def branch_on_a_number_of_before(net, x):
    count = int((x > 0).sum())
    y = net.a(x)
    return net.b(y) if count == 3 else y


def branch_before_numpy(net, x):
    if x.any():
        x = net.a(x)
    return x + torch.from_numpy(np.tanh(x.detach().numpy()))


def branch_beyond_a_check(net, x):
    if x.any():
        assert (x < 99).all()
        x = net.a(x)
    return net.b(x)


def branch_into_numpy(net, x):
    if x.any():
        x = torch.from_numpy(np.tanh(net.a(x).detach().numpy()))
    return net.b(x)


# Networks that ask for values, or look as if they did, and go the same way on all data.
STATIC: dict[str, Any] = {
    "hits in arithmetic": lambda net, x: net.a(x) * x[x > 0].shape[0],
    "hits reshaped": lambda net, x: net.a(x[x > -9].view(-1, 4)),
    "items in arithmetic": lambda net, x: net.a(x) * x.max().item() + x.min().item(),
    "floats in arithmetic": lambda net, x: net.a(x) * float(x.max()),
    "integers in arithmetic": lambda net, x: net.a(x) * int(x.max()),
    "comparison in arithmetic": lambda net, x: net.a(x) * torch.equal(x, x),
    "flags in arithmetic": lambda net, x: net.a(x) * bool(x.any()) + (x > 0).all().item(),
    "cumulative average": lambda net, x: net.norm(net.a(x)),
    "elementwise": lambda net, x: torch.where(x > 0, net.a(x), net.b(x)),
    "sample": lambda net, x: net.a(torch.distributions.Normal(x, x.exp()).rsample()),
    "numpy": lambda net, x: net.a(x) + torch.from_numpy(np.tanh(x.detach().numpy())),
    "any inputs": lambda net, x, *rest, **named: net.a(x) * (1 + len(rest) + len(named)),
    # torch itself needs the number of hits to split them; the branch does not.
    "rank of hits": lambda net, x: net.b(net.a(x) if x[x > 0].chunk(2)[0].dim() == 1 else x),
}


def static_by_shapes(net, x):
    if x.shape[0] > 1 and x.numel() > 3 and len(x) > 2:
        x = net.a(x)
    for _ in range(x.size(1)):
        x = net.b(x)
    return x


def static_by_options(net, x):
    if net.training or x.dtype is torch.float64 or x.requires_grad:
        return net.a(x)
    return net.b(x)


def static_by_its_own_state(net, x):
    if net.flag:
        x = net.a(x)
    for _ in range(int(net.steps)):
        x = net.b(x)
    return x


def static_mask(net, x):
    y = net.a(x).clone()
    y[y < 0] = 0
    y[x > 0] += x[x > 0]
    chosen = torch.masked_select(x, x < 0)
    return y + x[x > 0].sum() + chosen.mean() + x.nonzero().float().sum()


def static_rows(net, x):
    rows = torch.where(x[:, 0] > -9)[0]
    return net.a(x).index_add(0, rows, x[rows])


def static_check(net, x):
    assert (x < 99).all()
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return net.a(x)


def static_check_with_a_message(net, x):
    if (x > 99).any():
        raise ValueError(f"up to {x.max()}, on average {x.mean().item()}")
    return net.a(x)


def static_by_what_it_made_itself(net, x):
    for _ in torch.linspace(0, 1, 3).tolist():
        x = net.a(x)
    return net.b(x) if torch.arange(3).max() > 1 else x


def static_up_to_the_longest(net, x):
    longest = int((x > -99).sum(1).max())
    return net.a(x)[:, :longest]


def static_parts_of_lengths(net, x):
    parts = torch.split(x, [int(length) for length in (x.sum(1) * 0 + 1).tolist()])
    return torch.cat([net.a(part) for part in parts])


def static_work_on_hits_only(net, x):
    y, chosen = torch.zeros_like(x), x[:, 0] > -9
    y[chosen] = net.a(x[chosen])
    return net.b(y)


def static_print(net, x):
    print(f"{x.sum()}")
    return net.a(x)


def defined(*beginnings: str) -> dict[str, Any]:
    """Return the functions of this file whose names begin so."""
    return {name: value for name, value in globals().items() if name.startswith(beginnings)}


DYNAMIC |= defined("branch_", "choice_", "loop_")
STATIC |= defined("static_")


def alternating(functions: dict[str, Any]) -> list[Any]:
    """Return parameters for a test: functions and modes, by default one mode for each function."""
    return [
        pytest.param(function, mode, marks=[pytest.mark.campaign] * (number % 2 != at), id=name)
        for number, (name, function) in enumerate(functions.items())
        for at, mode in enumerate(["eval", "train"])
    ]


@pytest.mark.parametrize(("function", "mode"), alternating(DYNAMIC))
def test_flow_that_depends_on_data_is_refused_with_the_place(function, mode):
    with pytest.raises(FlowError) as caught:
        check_static_flow(build(function), (DATA,), {}, mode=mode)
    first = function.__code__.co_firstlineno
    place = [f"{__file__}:{line} (" in str(caught.value) for line in range(first, first + 9)]
    assert any(place)
    assert isinstance(caught.value, RuntimeError)
    assert "force_static_flow=False" in str(caught.value)


@pytest.mark.parametrize(("function", "mode"), alternating(STATIC))
def test_other_flow_is_not_refused(function, mode):
    check_static_flow(build(function), (DATA,), {}, mode=mode)


@pytest.mark.parametrize("case", one_in(10, CASES, 9), ids=repr)
def test_nets_of_the_zoo(case):
    args, kwargs = case.inputs(0)
    net = case.fresh()
    if case.static_flow:
        check_static_flow(net, args, kwargs)
    else:
        with pytest.raises(FlowError):
            check_static_flow(net, args, kwargs)


def test_labelling_refuses_unless_told_otherwise():
    net = build(DYNAMIC["sum"])
    with pytest.raises(FlowError, match=r"control flow of Net depends on the data"):
        label_net(net, input_data=DATA)
    assert label_net(net, input_data=DATA, force_static_flow=False)[1]["b"].executed


def test_the_mode_of_the_labelling_counts():
    def only_in_training(net, x):
        if net.training and x.sum() > 0:
            return net.a(x)
        return net.b(x)

    label_net(build(only_in_training), input_data=DATA)
    with pytest.raises(FlowError):
        label_net(build(only_in_training), input_data=DATA, mode="train")


def test_a_branch_on_the_state_that_data_changed_is_refused():
    def count(net, x):
        net.steps.add_((x > 0).sum())
        if net.steps > 3:
            return net.a(x)
        return net.b(x)

    with pytest.raises(FlowError):
        check_static_flow(build(count), (DATA,), {})


def test_a_mask_that_hides_nothing_is_no_branch():
    transformers = pytest.importorskip("transformers")
    net = transformers.LlamaModel(transformers.LlamaConfig(**GROUPED, pad_token_id=0))
    ids = text(0)[0][0]
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert label_net(net, input_data=data)[1]["layers.1"].executed


def test_a_mixture_of_experts_in_a_loop_is_refused_where_it_loops():
    transformers = pytest.importorskip("transformers")
    settings = {**GROUPED, "num_experts_per_tok": 1, "num_local_experts": 2, "pad_token_id": 0}
    configuration = transformers.MixtralConfig(**settings, experts_implementation="eager")
    net = transformers.MixtralForCausalLM(configuration)
    with pytest.raises(FlowError, match=r"modeling_mixtral.py:\d+ \(expert_hit"):
        label_net(net, input_data=text(0)[0][0])
    assert label_net(net, input_data=text(0)[0][0], force_static_flow=False)[1]["model"].executed


def test_no_value_is_looked_at_and_no_state_left():
    def remember(net, x):
        net.cache["x"] = net.a(x)
        net.last = x
        net.steps.add_(1)
        x.add_(random.random() + np.random.rand() + torch.rand(()))
        return net.cache["x"]

    net = build(remember)
    net.cache = {}
    hooks = []
    net.a.register_forward_hook(lambda *_: hooks.append(1))
    data = DATA.clone()
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    attributes = set(vars(net))
    check_static_flow(net, (data,), {})
    after = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    assert after == before
    assert set(vars(net)) == attributes
    assert (net.cache, int(net.steps), hooks) == ({}, 2, [])
    assert torch.equal(data, DATA)


def test_shared_state_that_can_not_be_copied_is_left_alone():
    kept = types.SimpleNamespace(x=None)

    class Uncopyable:
        def __deepcopy__(self, memo):
            raise TypeError("shared on purpose")

        def keep(self, x: Tensor) -> None:
            kept.x = x

    def remember(net, x):
        net.uncopyable.keep(x)
        return net.a(x)

    net = build(remember)
    net.uncopyable = Uncopyable()
    check_static_flow(net, (DATA,), {})
    assert kept.x is None


@pytest.mark.parametrize(
    "source",
    [
        "return net.a(x) if x.sum() > 0 else net.b(x)",
        "return [x := net.a(x) for _ in x.nonzero()][-1]",
    ],
)
def test_code_without_source_is_judged_like_any_other(source):
    namespace: dict[str, Any] = {}
    exec(compile(f"def branch(net, x):\n    {source}\n", "<nowhere>", "exec"), namespace)
    with pytest.raises(FlowError, match="<nowhere>:2"):
        check_static_flow(build(namespace["branch"]), (DATA,), {})


def test_torch_that_chooses_how_to_compute_is_no_branch_of_the_net():
    # The encoder asks whether its mask is a causal one.
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = Net(
        lambda net, x, mask: net.encoder(x[None], mask=mask),
        encoder=nn.TransformerEncoder(layer, 2),
    )
    mask = torch.zeros(3, 3)
    check_static_flow(net, (DATA, mask), {})
    label_net(net, input_data=[DATA, mask])


def test_a_branch_in_a_loop_that_asks_very_often_is_refused():
    def forward(net, x):
        x = net.a(x)
        for _ in range(1001):
            if x.sum().item() > 50:
                x = net.b(x)
        return x

    with pytest.raises(FlowError, match=r"if x.sum\(\).item\(\) > 50"):
        label_net(build(forward), input_data=DATA)


def test_a_long_pass_is_labelled_and_gives_no_answer(monkeypatch):
    monkeypatch.setattr(data_flow, "_MAX_STEPS", 5)
    for function in (DYNAMIC["sum"], lambda net, x: net.a(x) + 1 + 2 + 3 + 4 + 5 + 6):
        _, architecture = label_net(build(function), input_data=DATA)
        assert architecture["a"].executed


def test_a_net_that_does_something_else_each_time_gives_no_answer():
    counter = iter(range(1000))

    def vary(net, x):
        for _ in range(next(counter) % 3):
            x = net.a(x)
        return net.b(x) * x.max().item()

    check_static_flow(build(vary), (DATA,), {})


def test_what_an_interruption_leaves_of_torchs_modes_does_nothing(monkeypatch):
    # An interruption between a mode's work and its being taken off leaves it where it is.
    left = ValueRequests.__exit__

    def interrupted(self: ValueRequests, *details: object) -> None:
        raise KeyboardInterrupt

    net = build(DYNAMIC["sum"])
    with monkeypatch.context() as patch:
        patch.setattr(ValueRequests, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Recorder(build(static_by_shapes), input_data=DATA)
        with pytest.raises(KeyboardInterrupt):
            check_static_flow(net, (DATA,), {})
    requests, flow = _get_current_function_mode_stack()
    try:
        steps = len(flow.steps)
        net(DATA)
        assert len(flow.steps) == steps > 0
        assert not requests.were_made
        assert torch.is_grad_enabled()
        assert not net.a._forward_pre_hooks
    finally:
        left(flow, None, None, None)
        left(requests, None, None, None)


# What a forward was told; labelling leaves no trace in anything but global variables.
TOLD: list[float] = []


def total_that_grows(net, x):
    total = x.sum()
    TOLD.append(total.item())
    total.add_(1)
    TOLD.append(total.item())
    return net.a(x) * total


def test_a_value_that_was_written_to_is_told_anew():
    TOLD.clear()
    label_net(build(total_that_grows), input_data=DATA)
    # Made-up answers come later.
    assert TOLD[:2] == [float(DATA.sum()), float(DATA.sum() + 1)]


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (static_by_shapes, False),
        (lambda net, x: net.a(x[torch.tensor([0, 1])]), False),
        (static_mask, True),
        (STATIC["items in arithmetic"], True),
        (static_by_what_it_made_itself, True),
        (STATIC["numpy"], True),
        (lambda net, x: net.a(x) * x.tolist()[0][0], True),
    ],
)
def test_only_nets_that_ask_for_values_run_again(function, asks):
    def told(net, x):
        TOLD.append(1.0)
        return function(net, x)

    for is_checked in (True, False):
        TOLD.clear()
        label_net(build(told), input_data=DATA, force_static_flow=is_checked)
        assert (len(TOLD) > 1) is (asks and is_checked)

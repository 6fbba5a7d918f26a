"""The log against copies taken by other hooks, over the zoo; and that it keeps no graph alive."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections import Counter
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import LayerNotFoundError, UnsupportedNetError
from scio_recorder.errors import ArgumentError
from scio_recorder.events import Event, Stash, Tracker, track
from tests.harness import MODES, by_default, hook_state, prepare
from tests.oracle import Watch, differences, freeze, leaves, scalar_loss, seed_everything
from tests.zoo import CASES, Case
from tests.zoo.base import Net

# By case, the modules that return a view which the net changes in place later, or a tensor that
# existed before, or that run in regions of reentrant checkpointing.
LOST = {
    "change_after_flatten": {"flatten"},
    "change_of_every_view": {"split"},
    "tensor_subclass_output": {"tag"},
    "parameter_and_buffer_returned": {"weight"},
    "leaf_made_inside": {"start"},
    "change_of_passed_through": {"identity", "dropout"},
    "checkpointed_shared_reentrant": {"shared", *(f"shared.{i}" for i in range(4))},
    "checkpointed_reentrant": {
        name for at in ("block", "other") for name in (at, *(f"{at}.{i}" for i in range(4)))
    },
    "checkpointed_nested_reentrant": {
        *("nested", "nested.inside", "nested.outside", *(f"nested.inside.{i}" for i in range(4)))
    },
}


# Those in which a call is more than a tensor in and a new tensor out.
TELLING = {
    *LOST,
    *("shared_module", "recursive_module", "direct_forward_call", "inplace_relu"),
    *("change_of_own_input", "parameter_and_buffer_returned", "overwritten_twice", "nested_output"),
    *("none_output", "same_tensor_twice", "dict_input", "lstm_packed", "transformer_encoder"),
    *("complex_numbers", "sparse_output", "checkpointed", "checkpointed_reentrant"),
    *("checkpointed_nested_reentrant", "energy_gradient", "leaf_made_inside", "detached_branch"),
    *("backward_hooks_of_the_user", "frozen_parameters"),
}


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def order(events: Any) -> list[tuple[str, bool]]:
    return [(event.name, event.grad) for event in events]


def inputs_of(case: Case, seed: int, grad: bool) -> tuple[Any, Any]:
    built: list[Tensor] = []
    args, kwargs = prepare(case.inputs(seed), grad and case.input_gradients, built)
    seed_everything(seed)
    return args, kwargs


@pytest.mark.parametrize("case", by_default(CASES, TELLING))
def test_values_are_what_modules_returned(case: Case) -> None:
    for mode in (mode for mode in MODES if mode.allows(case) and mode.context != "autocast"):
        net = case.fresh().train(mode.training)
        args, kwargs = inputs_of(case, 3, mode.builds_graph)
        with Watch(net) as watch, mode.entered(), track(net, grad=False) as events:
            net(*args, **kwargs)
        # Both lists are in the order in which calls return.
        truth = list(watch.calls.items())
        assert [event.name for event in events] == [name for (name, _), _ in truth]
        for event, (call, tree) in zip(events, truth, strict=True):
            assert not differences(freeze(event.value), freeze_kinds(tree, event.value), str(call))


def freeze_kinds(tree: Any, value: Any) -> Any:
    """Let the truth be of plain tensors where copying makes plain tensors of subclasses."""
    for leaf, other in zip(leaves(tree), leaves(freeze(value)), strict=True):
        leaf.kind = other.kind
    return tree


def bits(gradients: Any) -> bytes:
    return pickle.dumps([(g.dtype, g.detach().resolve_conj().tolist()) for g in gradients])


def unseen_by_the_truth(watch: Watch) -> set[str]:
    return {
        name
        for (name, _), tree in watch.calls.items()
        if any(leaf.value.layout != torch.strided for leaf in leaves(tree))
    }


@pytest.mark.parametrize(
    "case", by_default([case for case in CASES if case.backward and case.train], TELLING)
)
def test_gradients_are_those_of_the_outputs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scio_recorder.events.log._SHOWN", 100)
    net = case.fresh().train()
    args, kwargs = inputs_of(case, 3, True)
    truth: Counter[tuple[str, bytes]] = Counter()
    with Watch(net) as watch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with track(net) as events:
            loss = scalar_loss(net(*args, **kwargs))
            differentiates_inside = any(event.grad for event in events)
            if loss.requires_grad:
                loss.backward()
        for (name, _), tree in watch.calls.items():
            gradients = [leaf.gradient for leaf in leaves(tree) if leaf.gradient is not None]
            truth[name, bits(gradients)] += bool(gradients)
    texts = [str(item.message).partition(":")[0] for item in caught]
    lost = {name for text in texts for name in re.findall("'(.*?)'", text)}
    assert lost == LOST.get(case.name, set())
    unjudged = lost | unseen_by_the_truth(watch)
    seen = Counter(
        (event.name, bits(gradient for gradient in event.value if gradient is not None))
        for event in events
        if event.grad and event.name not in unjudged
    )
    wanted = Counter({key: n for key, n in truth.items() if n and key[0] not in unjudged})
    # The truth holds the latest gradient of each tensor, the log every one.
    assert wanted <= seen if differentiates_inside else wanted == seen


def test_order_and_values_are_those_of_torchs_own_module_hooks() -> None:
    def log_of(register: Any) -> list[tuple[str, Tensor]]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Sequential(nn.LSTM(5, 3)))
        seen: list[tuple[str, Tensor]] = []
        finish = register(net, seen)
        output, (hidden, _) = net(torch.randn(2, 7, 4, requires_grad=True))
        (output.square().sum() + hidden.sum()).backward()
        finish()
        return seen

    def by_torch(net: nn.Module, seen: list[tuple[str, Tensor]]) -> Any:
        for name, module in net.named_modules():
            module.register_full_backward_pre_hook(
                lambda _, gradients, name=name: seen.append((name, gradients[0].clone()))
            )
        return lambda: None

    def by_us(net: nn.Module, seen: list[tuple[str, Tensor]]) -> Any:
        events = track(net)

        def finish() -> None:
            seen.extend((event.name, event.first_value) for event in events if event.grad)

        return finish

    # torch hooks what a module returns directly, the tensors of a nested tuple apart.
    for ours, theirs in zip(log_of(by_us), log_of(by_torch), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])


def test_one_event_for_several_outputs() -> None:
    net = Net(lambda net, x: net.inner(x), inner=Net(lambda _, x: (x.sin(), None, x.cos())))
    x = torch.randn(3, requires_grad=True)
    with track(net) as events:
        left, _, right = net(x)
        (2 * left.sum() + (3 * right).sum()).backward()
    assert order(events)[2:] == [("", True), ("inner", True)]
    for event in events[2:]:
        left_gradient, nothing, right_gradient = event.value
        assert nothing is None
        assert torch.equal(left_gradient, torch.full((3,), 2.0))
        assert torch.equal(right_gradient, torch.full((3,), 3.0))


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_without_gradients_are_not_waited_for(used: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Net(lambda _, x: (x.sin(), x.cos())))
    with track(net) as events:
        net(torch.randn(2, 3))[used].sum().backward()
    assert order(events)[3:] == [("", True), ("1", True), ("0", True)]
    gradients = events[3].value
    assert gradients[1 - used] is None
    assert torch.equal(gradients[used], torch.ones(2, 3))


def test_tensors_of_one_node_make_one_event() -> None:
    net = Net(lambda _, x: x.split(2))
    with track(net) as events:
        for _ in range(2):
            left, right = net(torch.randn(4, requires_grad=True) * 2)
            (left.sum() + 3 * right.sum()).backward()
    gradients = [event.value for event in events if event.grad]
    assert len(gradients) == 2
    for value in gradients:
        for gradient, factor in zip(value, (1, 3), strict=True):
            assert torch.equal(gradient, torch.full_like(gradient, factor))


RETURNS_ITS_INPUT: dict[str, Any] = {
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout().eval(),
    "a container of one": lambda: nn.Sequential(nn.Identity()),
    "an empty container": nn.Sequential,
    "in a structure": lambda: Net(lambda _, x: {"new": x * 2, "same": x}),
    "kept by another": lambda: Net(lambda net, x: net.kept),
}


@pytest.mark.parametrize("kind", RETURNS_ITS_INPUT)
def test_the_gradient_of_a_tensor_that_existed_before_is_left_out(kind: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        net.middle.kept = hidden
        output = net.middle(hidden)
        output = output["new"] + output["same"] if isinstance(output, dict) else output
        return net.last(output) + 100 * hidden

    net = Net(forward, first=nn.Linear(3, 3), middle=RETURNS_ITS_INPUT[kind](), last=nn.Tanh())
    with (
        pytest.warns(UserWarning, match=r"'middle.*a tensor that existed before its call"),
        track(net) as events,
    ):
        net(torch.ones(1, 3)).sum().backward()
    gradients = {event.name: event.value for event in events if event.grad}
    assert {"first", "last", ""} <= gradients.keys()
    assert [*gradients.get("middle", ())][1:] == ([None] if kind == "in a structure" else [])
    del net.middle.kept
    # That of the module which made it counts all uses.
    first = gradients["first"][0]
    assert torch.equal(first, net.first.bias.grad[None])


def test_a_returned_parameter_keeps_no_hook() -> None:
    net = Net(lambda net, x: net.inner(x) * x, inner=Net(lambda net, _: net.weight))
    net.inner.weight = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="'inner'.*existed before"), track(net) as events:
        net(torch.ones(3)).sum().backward()
    assert order(events) == [("inner", False), ("", False), ("", True)]
    assert not net.inner.weight._backward_hooks


def test_what_a_tracked_net_returns_is_pickled_without_a_warning() -> None:
    net = nn.Linear(3, 2)
    with track(net):
        output = net(torch.ones(1, 3))
    assert torch.equal(pickle.loads(pickle.dumps(output)), output)


def test_modules_called_several_times_and_several_backward_passes() -> None:
    shared = nn.Linear(3, 3)
    with track(nn.Sequential(shared, nn.Tanh(), shared), include="0") as events:
        loss = shared(shared(torch.ones(3))).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert order(events) == [("0", False)] * 2 + [("0", True)] * 4
    assert torch.equal(events[2].first_value, torch.ones(3))
    assert torch.equal(events[3].first_value, torch.ones(3) @ shared.weight)


def test_a_gradient_asked_for_by_name_is_logged() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with track(net, include="^0$", stash=lambda event: event) as events:
        output = net(torch.ones(1, 4))
        (gradient,) = torch.autograd.grad(output.sum(), events[0].value)
    assert order(events) == [("0", False), ("0", True)]
    assert events[1].value[0] is gradient


def test_reruns_are_not_logged_again() -> None:
    inner = block()
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=inner)
    with track(net) as events:
        net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    names = ["inner.0", "inner.1", "inner.2", "inner", ""]
    assert order(events) == [(n, False) for n in names] + [(n, True) for n in names[::-1]]


@pytest.mark.parametrize("is_inside", [False, True])
def test_gradients_in_regions_of_reentrant_checkpointing_are_named(is_inside: bool) -> None:
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=True), inner=block())

    def run() -> tuple[Tracker, Tensor]:
        with track(net) as events:
            loss = net(torch.ones(2, 4, requires_grad=True)).sum()
            if is_inside:
                loss.backward()
        return events, loss

    with pytest.warns(UserWarning, match=r"'inner', 'inner\.0', .*use_reentrant=False"):
        events, loss = run()
    if not is_inside:
        loss.backward()
    names = ["inner.0", "inner.1", "inner.2", "inner", ""]
    assert order(events) == [*((name, False) for name in names), ("", True)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_regions_off_the_graph_have_no_gradients_to_miss() -> None:
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=True), inner=block())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), track(net) as events:
            net(torch.ones(2, 4))
        assert len(events) == 5


def test_calls_after_the_block_are_not_logged_but_gradients_of_those_inside_are() -> None:
    net = block()
    before = hook_state(net)
    with track(net) as events:
        inside = net(torch.ones(1, 4)).sum()
    assert hook_state(net) == before
    outside = net(torch.ones(1, 4)).sum()
    outside.backward()
    assert len(events) == 4
    inside.backward()
    assert order(events)[4:] == [("", True), ("2", True), ("1", True), ("0", True)]


def test_include_and_exclude_are_searched_in_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    for include, exclude, names in [
        ("1", None, ["1.0", "1.1", "1"]),
        (re.compile(r"^1\."), "1$", ["1.0"]),
        (None, r"\.", ["0", "1", ""]),
        ("^$", None, [""]),
        ("1", "1", []),
    ]:
        with track(net, grad=False, include=include, exclude=exclude) as events:
            net(torch.ones(1, 2))
        assert [event.name for event in events] == names


NO_PATTERN = "is no regular expression .*write one text"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *((given, NO_PATTERN) for given in ({"include": ["0"]}, {"exclude": 1}, {"include": "["})),
        ({"grad": "layer1"}, "grad="),
        ({"stash": 3}, "stash="),
        ({"stash_value": "mean"}, "stash_value="),
        ({"stash": lambda event: event, "stash_value": lambda tensor: tensor}, "both"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(wrong: dict[str, Any], says: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=says):
        track(net, **wrong)
    assert not net[0]._forward_hooks


def test_an_include_that_matches_nothing_says_what_is_close() -> None:
    net = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    with pytest.raises(LayerNotFoundError, match=r"'encodr'.*'encoder'"):
        track(net, include="encodr")
    assert not net["encoder"]._forward_hooks


def test_stash_value_maps_every_tensor_and_first_value_finds_the_first() -> None:
    class Pair(NamedTuple):
        left: Any
        right: Any

    net = Net(lambda _, x: {"none": None, "pair": Pair([x, 3], (x + 1,))})
    with track(net, stash_value=lambda tensor: tuple(tensor.shape)) as events:
        net(torch.zeros(2, 3))
    assert events[0].value == {"none": None, "pair": Pair([(2, 3), 3], ((2, 3),))}
    assert type(events[0].value["pair"]) is Pair
    with track(net) as events:
        net(torch.zeros(2, 3))
    assert torch.equal(events[0].first_value, torch.zeros(2, 3))
    assert events[0].value["pair"].right[0].device.type == "cpu"
    with track(Net(lambda _, x: [x]), stash_value=lambda tensor: tensor.sum().item()) as events:
        Net(lambda _, x: x)
    assert Stash("", nn.ReLU, False, [5.0]).first_value == 5.0
    assert Stash("", nn.ReLU, False, None).first_value is None


def test_values_are_copies() -> None:
    net = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    x = torch.tensor([-1.0, 2.0])
    with track(net) as events:
        net(x)
    assert events[0].value.tolist() == [-1.0, 2.0]
    assert events[1].value.tolist() == [0.0, 2.0]
    assert not events[0].value.requires_grad


def test_stash_sees_the_whole_event() -> None:
    seen: list[Event] = []
    net = Net(lambda _, x, scale: x * scale)
    x = torch.ones(2, requires_grad=True)
    with track(net, stash=lambda event: seen.append(event) or len(seen)) as events:  # type: ignore[func-returns-value]
        net(x, scale=3).sum().backward()
    assert list(events) == [1, 2]
    forward, backward = seen
    assert (forward.args[0] is x, forward.kwargs, forward.type) == (True, {"scale": 3}, Net)
    assert (backward.args, backward.kwargs) == ((), {})


def test_frame_holds_one_number_an_event() -> None:
    net = Net(lambda net, x: net.linear(x).argmax(1), linear=nn.Linear(3, 2))
    with track(net) as events:
        net(torch.randn(5, 3))
    frame = events.to_frame()
    assert list(frame.columns) == ["name", "type", "grad", "std"]
    assert list(frame["type"]) == ["torch.nn.modules.linear.Linear", f"{Net.__module__}.Net"]
    assert frame["std"][0] == events[0].value.std().item()
    assert frame["std"][1] == events[1].value.double().std().item()
    several = events.to_frame({"mean": torch.mean, "largest": torch.max})
    assert list(several.columns) == ["name", "type", "grad", "mean", "largest"]
    assert several["mean"][0] == events[0].value.mean().item()
    assert several["largest"][0] == events[0].value.max().item()
    named = events.to_frame(lambda tensor: tensor.abs().max(), stat_name="largest")
    assert named["largest"][0] == events[0].value.abs().max().item()
    events.clear()
    assert list(events.to_frame(torch.mean).columns) == ["name", "type", "grad", "mean"]
    assert len(events) == 0


def pair(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return net.a(x), net.b(x)


def through_pair(net: Any, x: Tensor) -> Any:
    first, second = net.pair(x)
    return net.last(first) if net.is_single else (second, net.last(first), first)


def pairs(is_single: bool) -> Net:
    inner = Net(pair, a=block(), b=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))
    inner.a[1] = nn.Tanh()  # torch's hooks for modules refuse in-place operations
    net = Net(through_pair, pair=Net(lambda net, x: net.same(x), same=inner), last=nn.Linear(3, 3))
    net.is_single = is_single
    return net


@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_of_several_tensors_come_in_the_order_of_torchs_own_hooks(
    is_single: bool, times: int
) -> None:
    def run() -> None:
        for _ in range(times):
            out = net(torch.ones(1, 4, requires_grad=True))
            sum(leaf.square().sum() for leaf in ([out] if is_single else out)).backward()

    net = pairs(is_single)
    with track(net) as events:
        run()
    wanted: list[str] = []
    for name, module in net.named_modules():
        module.register_full_backward_pre_hook(lambda *_, name=name: wanted.append(name))
    run()
    if is_single:
        # They are called for what no gradient reaches as well.
        wanted = [name for name in wanted if not name.startswith("pair.same.b")]
    assert [event.name for event in events if event.grad] == wanted


def test_a_log_that_is_cleared_while_gradients_come_begins_anew() -> None:
    net = pairs(is_single=False)
    with track(net) as events:
        out = net(torch.ones(1, 4))
        net.pair.same.b[1].weight.register_hook(lambda gradient: events.clear())
        sum(leaf.sum() for leaf in out).backward()
    assert [event.name for event in events][:3] == ["", "pair", "pair.same"]


def test_what_has_no_tensor_or_no_deviation_is_missing_from_a_table() -> None:
    parts = {"pick": Net(lambda _, x: None), "sum": Net(lambda _, x: x.sum())}
    net = Net(lambda net, x: (net.pick(x), net.sum(x))[1], **parts)
    with track(net) as events:
        net(torch.ones(3))
    frame = events.to_frame({"std": torch.std, "mean": torch.mean})
    assert list(frame["std"].isna()) == [True, True, True]
    assert list(frame["mean"].isna()) == [True, False, False]
    assert frame["mean"][1] == 3


def test_bad_statistics() -> None:
    net = nn.ReLU()
    with track(net) as events:
        net(torch.ones(3))
    for stat in (5, "std", {"std": 5}, {"grad": torch.std}, [torch.std]):
        with pytest.raises(ArgumentError, match="give a function Tensor -> number"):
            events.to_frame(stat)  # type: ignore[arg-type]
    for wrong in (torch.abs, torch.linalg.inv):
        with pytest.raises(ArgumentError, match=r"the statistic 'wrong'.*''.*ReLU.*raised"):
            events.to_frame({"wrong": wrong})
    with pytest.raises(ArgumentError, match="stat_name"):
        events.to_frame({"a": torch.std}, stat_name="b")
    with track(net, stash=lambda event: event.name) as events:
        net(torch.ones(3))
    with pytest.raises(ArgumentError, match="Stash"):
        events.to_frame()


def test_a_view_changed_later_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.ReLU(inplace=True), nn.Tanh())
    events = track(net)
    with pytest.warns(UserWarning, match="are missing .* of module '1'"), events:
        net(torch.ones(2, 4)).sum().backward()
    assert ("1", True) not in order(events)
    with pytest.warns(UserWarning, match="module '1'"), track(net, include="1") as events:
        net(torch.ones(2, 4))


def test_a_gradient_that_would_be_incomplete_is_left_out_and_named() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        view = net.flat(x)
        early = view * 2
        view.add_(1)
        return early + view * 3

    net = Net(forward, flat=nn.Flatten(0))
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.warns(UserWarning, match="incomplete.*'flat'"), track(net) as events:
        net(x * 1).sum().backward()
    # Only one of the two ways, that from before the change, leads to the view.
    assert ("flat", True) not in order(events)


def test_copies_of_a_tracked_net_log_nothing() -> None:
    net = block()
    with track(net) as events:
        copy.deepcopy(net)(torch.ones(1, 4))
        pickle.loads(pickle.dumps(net))(torch.ones(1, 4))
        assert len(events) == 0
        net(torch.ones(1, 4))
        assert len(events) == 4


def test_hooks_leave_with_the_tracker() -> None:
    net = block()
    before = hook_state(net)
    tracker = track(net)
    assert hook_state(net) != before
    del tracker
    assert hook_state(net) == before
    tracker = Tracker(lambda event: event.name)
    tracker.register(net[0], "first")
    net(torch.ones(1, 4))
    assert list(tracker) == ["first"]
    tracker.unregister()
    assert hook_state(net) == before
    assert repr(tracker) == "Tracker(stashes=1, tracking=0)"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_hooks_can_not_observe_is_refused() -> None:
    scripted = torch.jit.script(nn.ReLU())  # type: ignore[no-untyped-call]
    for bad in (nn.ReLU, "net", scripted):
        with pytest.raises(UnsupportedNetError):
            track(bad)  # type: ignore[arg-type]


def test_transforms_are_refused() -> None:
    net = block()
    with track(net) as events:
        for run in (torch.func.vmap(net), torch.func.grad(lambda x: net(x).sum())):
            with pytest.raises(
                UnsupportedNetError, match=r"'0' runs inside a torch\.func transform"
            ):
                run(torch.ones(3, 4))
    assert len(events) == 0


def test_what_is_compiled_inside_the_block_runs_and_is_named_at_its_end() -> None:
    net = block()
    x = torch.ones(2, 4)
    events = track(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), net[2](net[1](net[0](x))))
    # The three calls by hand, and those of compiled code not.
    assert order(events) == [("0", False), ("1", False), ("2", False)]
    with pytest.warns(UserWarning, match=r"calls of 4 modules.*'2'.*compiled code"):
        events.unregister()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events.unregister()


def test_tensors_without_numbers_stay_where_they_are() -> None:
    net = block().to("meta")
    with track(net) as events:
        net(torch.ones(2, 4, device="meta")).sum().backward()
    assert order(events) == [
        *((name, False) for name in ("0", "1", "2", "")),
        *((name, True) for name in ("", "2", "1", "0")),
    ]
    assert [event.first_value.device.type for event in events] == ["meta"] * 8
    assert events[7].first_value.shape == (2, 6)


def test_without_a_backward_pass_there_are_no_gradients_and_a_second_one_is_torchs_error() -> None:
    net = block()
    with track(net) as events:
        loss = net(torch.ones(2, 4)).sum()
        assert not any(event.grad for event in events)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    # The second one came as far as what needs the freed graph: the sum needs nothing.
    assert order(events)[4:8] == [("", True), ("2", True), ("1", True), ("0", True)]
    assert order(events)[8:] == [("", True), ("2", True)]


class Payload:
    """Held by a node of the graph, so that it tells whether that node is alive."""


class Marked(torch.autograd.Function):
    payloads: ClassVar[weakref.WeakSet[Payload]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.payload = Payload()
        Marked.payloads.add(ctx.payload)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def marked(_net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = Marked.apply(x)
    return y.sin(), y.cos(), y.view(-1)


def net_of_marks() -> nn.Module:
    return Net(lambda net, x: net.inner(net.first(x)), first=nn.Linear(3, 3), inner=Net(marked))


@pytest.mark.parametrize("backward", ["none", "first", "all", "with_graph", "failed"])
def test_a_pass_inside_the_block_leaves_no_graph(backward: str) -> None:
    net = net_of_marks()
    with track(net) as events:
        outputs = net(torch.ones(2, 3))
        if backward == "failed":
            outputs[0].register_hook(lambda _: 1 / 0)
        loss = outputs[0].sum() if backward == "first" else sum(part.sum() for part in outputs)
        if backward == "failed":
            with pytest.raises(ZeroDivisionError):
                loss.backward(create_graph=True)
        elif backward == "with_graph":
            gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            del gradients
        elif backward != "none":
            loss.backward()
        net.zero_grad()
        del outputs, loss
        # Exceptions hold frames in cycles; what C++ holds in cycles gc would not free.
        gc.collect()
        assert not Marked.payloads
    assert len(events) >= 3


def test_a_log_of_the_tensors_themselves_goes_with_the_tracker() -> None:
    net = net_of_marks()
    events = track(net, stash=lambda event: event)
    sum(part.sum() for part in net(torch.ones(2, 3))).backward()
    assert Marked.payloads
    del events
    gc.collect()
    assert not Marked.payloads


@pytest.mark.filterwarnings("ignore:.*existed before its call:UserWarning")
def test_many_training_steps_leave_nothing_behind() -> None:
    net = net_of_marks()
    net.bias = nn.Parameter(torch.zeros(3))
    net.returned = Net(lambda _, x: x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        outputs = net(net.returned(net.bias))
        optimizer.zero_grad()
        sum(part.sum() for part in outputs).backward()
        optimizer.step()
        events.clear()

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    with track(net) as events:
        for _ in range(20):
            step()
        before = count()
        for _ in range(200):
            step()
        # A step that left one object behind would leave 200.
        assert count() - before < 100
        assert not Marked.payloads

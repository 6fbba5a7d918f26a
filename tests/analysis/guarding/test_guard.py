"""Guards, beside plain hooks on every module and torch's own backward hooks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import (
    FlowError,
    NonFiniteError,
    Recorder,
    RecorderError,
    UnsupportedNetError,
    open_recording,
)
from scio_recorder.errors import ArgumentError
from scio_recorder.tensors import private
from tests.analysis.guarding.nonfinite import (
    INF,
    NAN,
    Do,
    Residual,
    first_maker,
    forward_faults,
    linear,
)
from tests.garbage import garbage_left
from tests.zoo.base import Net

X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, 0.0, 2.0, -0.5], [0.0, 1.0, -1.0, 4.0]])


def recorder(net: nn.Module) -> Recorder:
    torch.manual_seed(0)
    return Recorder(net, input_data=torch.ones(1, 4), force_static_flow=False, verbose=0)


# -- the forward pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_an_error_is_gone_once_it_is_handled(is_checkpointed: bool) -> None:
    bad = Do(lambda x: x * NAN)

    def forward(x: Tensor) -> Any:
        return checkpoint(bad, x, use_reentrant=False) if is_checkpointed else bad(x)

    net = Do(forward)
    net.bad = bad
    errors = []
    with garbage_left():
        try:
            with recorder(net).guard():
                net(X)
        except NonFiniteError as error:
            errors.append(weakref.ref(error))
        # It would hold the frames that it has left, and with them what these had open.
        assert [error() for error in errors] == [None]


MODES: list[Any] = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize(("number", "name"), list(enumerate(forward_faults())))
def test_the_maker_is_the_one_that_plain_hooks_find(number: int, name: str) -> None:
    torch.manual_seed(0)
    net, expected = forward_faults()[name]
    rnet = recorder(net)
    with MODES[number % 3]():
        seen = first_maker(net, lambda: net(X.clone()))
        with rnet.guard(action="record") as guard:
            (rnet if number % 2 else net)(X.clone())
    assert (seen and seen.name) == expected
    origin = guard.origin
    if seen is None:
        assert origin is None
        assert str(guard) == "no layer has made a NaN or an infinity in 1 pass"
        return
    assert origin.layer.name == seen.name
    assert origin.direction == "forward"
    assert (origin.num_nan, origin.num_inf) == (seen.num_nan, seen.num_inf)
    assert origin.inputs_finite == seen.inputs_finite
    weights = [*net.get_submodule(seen.name).parameters()]
    assert origin.weights_finite == all(bool(one.isfinite().all()) for one in weights)


def test_the_first_origin_stays_if_the_block_goes_on_after_its_error() -> None:
    net = nn.Sequential(Do(lambda x: x / x), Do(lambda x: x / (x - 1)))
    with recorder(net).guard() as guard:
        for value, maker in ((1.0, "1"), (0.0, "0")):
            with pytest.raises(NonFiniteError) as caught:
                net(torch.full((1, 4), value))
            assert caught.value.origin.layer.name == maker
    assert guard.origin.layer.name == "1"


def test_buffers_count_as_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    rnet = recorder(net)
    net[1].running_mean[0] = NAN  # type: ignore[index]  # torch says it may be a module
    with rnet.guard(action="record") as guard:
        net(X)
    assert guard.origin.layer.name == "1"
    assert (guard.origin.inputs_finite, guard.origin.weights_finite) == (True, False)


def test_all_that_a_call_returned_is_counted() -> None:
    net = Do(lambda x: (x, [x[:1] * NAN, x / 0], {"more": x[0, :2] * NAN}))
    with recorder(net).guard(action="record") as guard:
        net(torch.ones(3, 4))
    assert (guard.origin.num_nan, guard.origin.num_inf, guard.origin.num_values) == (6, 12, 18)


def test_the_error_says_where_in_a_sentence() -> None:
    net = nn.Sequential(nn.ReLU(), nn.LayerNorm(4, eps=0.0))
    x = X.clone()
    x[2] = 5.0
    with (
        pytest.raises(NonFiniteError, match=r"layer 1-2 1 \(LayerNorm\) made 4 NaN") as caught,
        recorder(net).guard() as guard,
    ):
        net(x)
    assert isinstance(caught.value, ArithmeticError)
    assert caught.value.origin is guard.origin
    assert (guard.origin.sample, guard.origin.index) == (2, (2, 0))
    assert str(caught.value) == str(guard.origin) == str(guard)
    assert "in pass 0, the first at [2, 0]: its inputs and its weights were finite" in str(guard)


def test_the_traceback_leads_to_the_call() -> None:
    def fails(x: Tensor) -> Tensor:
        return net[1](net[0](x))  # type: ignore[no-any-return]  # a module's call

    net = nn.Sequential(nn.ReLU(), Do(torch.log))
    rnet = recorder(net)
    with pytest.raises(NonFiniteError) as caught, rnet.guard():
        fails(X)
    assert "fails" in [entry.name for entry in caught.traceback]


def test_calls_of_a_module_are_told_apart() -> None:
    def twice(net: Any, x: Tensor) -> Any:
        return net.shared(net.shared(x.abs() + 0.5))

    net = Net(twice, shared=Do(lambda x: x.log()))
    rnet = recorder(net)
    assert len(rnet.architecture.labels_of("shared")) == 2
    with rnet.guard(action="record") as guard:
        net(torch.full((2, 4), 3.0))
        net(X)
    assert guard.origin.layer.call == 1
    assert guard.origin.pass_number == 1
    assert guard.num_passes == 2


def test_kinds_choose_what_is_looked_for() -> None:
    net = nn.Sequential(nn.ReLU(), Do(torch.reciprocal), Do(lambda x: x - x))
    rnet = recorder(net)
    with rnet.guard(action="record", kinds=("nan",)) as guard:
        net(X)
    assert guard.origin.layer.name == "2"
    assert not guard.origin.inputs_finite


def test_an_infinity_that_is_made_of_a_nan_is_no_fault() -> None:
    net = nn.Sequential(Do(lambda x: torch.nan_to_num(x, nan=INF)))
    with recorder(net).guard(action="record") as guard:
        net(X * NAN)
    assert guard.origin is None


def test_the_first_of_several_passes_stays_the_origin() -> None:
    net = nn.Sequential(Do(torch.log), nn.Softmax(-1))
    with recorder(net).guard(action="record") as guard:
        net(X.abs() + 1)
        net(torch.full((1, 4), -1.0))
        net(torch.zeros(1, 4))
    assert (guard.origin.pass_number, guard.origin.num_nan) == (1, 4)


def test_who_goes_on_after_an_error_is_told_again() -> None:
    net = nn.Sequential(Do(torch.log))
    with recorder(net).guard() as guard:
        for _ in range(2):
            with pytest.raises(NonFiniteError):
                net(X)
        net(X.abs() + 1)
    assert guard.num_passes == 3


def test_warning_says_the_same() -> None:
    net = nn.Sequential(Do(torch.log))
    with (
        pytest.warns(UserWarning, match="layer 1-1 0 .Do. made"),
        recorder(net).guard(action="warn"),
    ):
        net(X)


@pytest.mark.parametrize("action", ["raise", "warn"])
def test_what_is_given_is_nobodys_fault(action: Any) -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    bad = X.clone()
    bad[1, 1] = NAN
    with recorder(net).guard(action=action) as guard:
        with pytest.warns(UserWarning, match="its inputs held"):
            net(bad)
        net(bad)
    assert guard.origin is None
    assert guard.num_passed_on == 2
    assert "2 only handed on NaNs or infinities" in str(guard)


def test_modules_that_are_called_alone_are_guarded() -> None:
    net = nn.Sequential(nn.ReLU(), Do(torch.log))
    with recorder(net).guard(action="record") as guard:
        net[1](net[0](X))
    assert guard.origin.layer.name == "1"


def test_half_precision_overflows() -> None:
    net = nn.Sequential(linear(), Do(lambda x: x * 300), Do(lambda x: x * 300))
    rnet = recorder(net)
    with torch.autocast("cpu", torch.float16):
        with rnet.guard(action="record") as guard:
            net(X * 10)
        seen = first_maker(net, lambda: net(X * 10))
    assert guard.origin.layer.name == seen.name == "2"
    net = nn.Sequential(linear(), Do(lambda x: x * 300), Do(lambda x: x * 300)).bfloat16()
    with Recorder(net, input_data=X.bfloat16(), verbose=0).guard():
        net(X.bfloat16() * 10)


# -- the backward pass -----------------------------------------------------------------------------


def sqrt_at_zero() -> nn.Module:
    # The backward pass of a ReLU would take the infinities back.
    return nn.Sequential(Do(lambda x: x * 0), Do(lambda x: x.sqrt()))


def used_twice() -> nn.Module:
    """Use the input in a module, and in code of its own."""
    return Net(lambda net, x: net.linear(x) + (x * 0).sqrt(), linear=nn.Linear(4, 4))


def of_a_weight() -> nn.Module:
    scale = nn.Parameter(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    return Net(lambda net, x: x + net.scale.sqrt(), scale=scale)


def inside() -> nn.Module:
    """Make a NaN in code of its own that reaches a module inside."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    return Net(lambda net, x: net.last((net.first(x) * 0).sqrt()), first=first, last=last)


def ahead() -> nn.Module:
    """Make a NaN in code of its own, ahead of the module that makes the output."""
    inner = nn.Sequential(nn.Linear(4, 4))
    return Net(lambda net, x: net.inner((x * 0).sqrt()), inner=inner)


GRADIENTS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "nothing": (lambda: nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(4)), None),
    "sqrt at zero": (lambda: nn.Sequential(linear(), sqrt_at_zero(), linear()), "1.1"),
    "residual": (lambda: nn.Sequential(linear(), Residual(sqrt_at_zero()), linear()), "1.inner.1"),
    "sibling of a module": (lambda: nn.Sequential(linear(), used_twice()), "1"),
    "a weight": (lambda: nn.Sequential(linear(), nn.Sequential(of_a_weight())), "1.0"),
    "between, in a first module": (lambda: nn.Sequential(inside()), "0"),
    "between": (lambda: nn.Sequential(linear(), Residual(inside())), "1.inner"),
    "ahead of a module": (lambda: nn.Sequential(linear(), nn.Sequential(ahead())), "1.0"),
    "taken back inside": (
        lambda: nn.Sequential(linear(), Do(lambda x: x.relu().sqrt())),
        None,
    ),
    "where": (lambda: nn.Sequential(linear(), Do(lambda x: (x * 0).pow(0.5))), "1"),
    "in place": (lambda: nn.Sequential(linear(), Do(lambda x: x.mul_(0)), Do(Tensor.sqrt_)), "2"),
}


def loss_of(output: Tensor) -> Tensor:
    return (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum()


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_maker_of_a_gradient_is_named(name: str) -> None:
    make, expected = GRADIENTS[name]
    net = make()
    # What goes out of the network is finite, so that only gradients are not.
    with recorder(net).guard(action="record") as guard:
        loss_of(net(X)).backward()
    assert (guard.origin and guard.origin.layer.name) == expected
    is_bad = any(p.grad is not None and not p.grad.isfinite().all() for p in net.parameters())
    assert is_bad == (expected is not None)
    if guard.origin is not None:
        assert guard.origin.direction == "gradient"
        assert guard.origin.inputs_finite
        assert guard.origin.weights_finite
        assert (guard.origin.parameter == "scale") == (name == "a weight")


@pytest.mark.filterwarnings("ignore")  # of anomaly detection, about itself
def test_backward_hooks_of_torch_agree_on_chains() -> None:
    for position in range(1, 4):
        modules: list[nn.Module] = [linear(), nn.Tanh(), linear(), nn.Tanh()]
        modules.insert(position, sqrt_at_zero())
        net = nn.Sequential(*modules)
        found: list[str] = []

        def hook(
            module: nn.Module, made: Any, given: Any, name: str = "", found: list[str] = found
        ) -> None:
            is_given = any(one is not None and not one.isfinite().all() for one in given)
            if not is_given and any(one is not None and not one.isfinite().all() for one in made):
                found.append(name)

        handles = [
            module.register_full_backward_hook(
                lambda m, made, given, name=name: hook(m, made, given, name)
            )
            for name, module in net.named_modules()
        ]
        # Torch sees gradients of inputs only where there are some.
        loss_of(net(X.clone().requires_grad_())).backward()
        for handle in handles:
            handle.remove()
        with pytest.raises(NonFiniteError) as caught, recorder(net).guard():
            loss_of(net(X)).backward()
        assert caught.value.origin.layer.name == found[0] == f"{position}.1"
        # Torch looks for NaNs alone, which the multiplication makes of the infinities.
        with (
            pytest.raises(RuntimeError, match="'MulBackward0' returned nan"),
            torch.autograd.detect_anomaly(),
        ):
            loss_of(net(X)).backward()
        with pytest.raises(NonFiniteError) as caught, recorder(net).guard(kinds=("nan",)):
            loss_of(net(X)).backward()
        assert caught.value.origin.layer.name == f"{position}.0"
        assert not caught.value.origin.inputs_finite


def test_the_loss_may_be_the_maker() -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    with (
        pytest.warns(UserWarning, match="gradient of the network's output"),
        recorder(net).guard() as guard,
    ):
        net(X).sqrt().sum().backward()
    assert guard.origin is None
    assert guard.num_passed_on == 1


def test_backward_after_the_block_belongs_to_its_passes() -> None:
    net = nn.Sequential(linear(), sqrt_at_zero())
    with recorder(net).guard(action="record") as guard:
        output = net(X)
    unguarded = net(X)
    loss_of(unguarded).backward()
    assert guard.origin is None
    loss_of(output).backward()
    assert guard.origin is not None


def test_gradients_are_left_alone_where_nobody_asks() -> None:
    net = nn.Sequential(linear(), sqrt_at_zero())
    with recorder(net).guard(gradients=False):
        loss_of(net(X)).backward()


def of_a_zero() -> nn.Module:
    """Make the gradient of a weight infinite, and that of the input not."""
    return Net(lambda net, x: x * net.scale.sqrt(), scale=nn.Parameter(torch.zeros(4)))


@pytest.mark.parametrize(
    ("made", "penalty", "maker"),
    [
        # The gradients are zero, where a norm that is written out has no gradient itself.
        (lambda: Do(lambda x: (x - 100).relu()), lambda found: found.pow(2).sum(1).sqrt(), None),
        (nn.Identity, lambda found: (found.pow(2).sum(1) * 0).sqrt(), None),
        (nn.Identity, lambda found: found.norm(dim=1), None),
        (of_a_zero, lambda found: (found - 1).pow(2).sum(1), ("1.0", "scale")),
    ],
)
def test_the_penalty_of_a_gradient_may_be_the_maker(
    made: Callable[[], nn.Module], penalty: Callable[[Tensor], Tensor], maker: Any
) -> None:
    net = nn.Sequential(linear(), nn.Sequential(made(), nn.Tanh()), linear())
    x = X.clone().requires_grad_()
    with recorder(net).guard(action="record") as guard:
        (found,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        penalty(found).sum().backward()
    is_finite = all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    origin = guard.origin
    assert (origin and (origin.layer.name, origin.parameter)) == maker
    assert guard.num_passed_on == (not is_finite and maker is None)


@pytest.mark.parametrize(
    ("outside", "inside", "maker"),
    [(torch.sqrt, torch.cos, None), (torch.cos, lambda x: (x * 0).sqrt(), "0.0")],
)
def test_what_another_thread_has_made_is_no_part_of_a_call(
    outside: Callable[[Tensor], Tensor], inside: Callable[[Tensor], Tensor], maker: str | None
) -> None:
    net = nn.Sequential(nn.Sequential(Do(inside)))
    rnet, origins = recorder(net), []
    made = outside(torch.zeros(3, 4, requires_grad=True))
    # Each thread counts operations of its own: the other one has counted fewer.
    for _ in range(50):
        made = made * 0

    def work() -> None:
        with rnet.guard(action="record") as guard:
            net(made).sum().backward()
        origins.append(guard.origin)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [origin and origin.layer.name for origin in origins] == [maker]


def test_two_backward_passes_are_judged_each_by_itself() -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    with recorder(net).guard() as guard:
        output = net(X)
        with pytest.warns(UserWarning, match="the loss"):
            (output * NAN).sum().backward(retain_graph=True)
        (output * 2).sum().backward()
    assert guard.origin is None


@pytest.mark.parametrize(
    ("use_reentrant", "is_inside"), [(True, True), (False, True), (False, False)]
)
def test_checkpointed_regions_are_guarded(use_reentrant: bool, is_inside: bool) -> None:
    def checkpointed(net: Any, x: Tensor) -> Any:
        x = net.first(x)
        return checkpoint(net.inner, x, use_reentrant=use_reentrant)

    net = Net(checkpointed, first=linear(), inner=sqrt_at_zero())
    with recorder(net).guard(action="record") as guard:
        loss = loss_of(net(X))
        if is_inside:
            loss.backward()
    if not is_inside:
        loss.backward()
    assert guard.num_passes == 1
    assert (guard.origin.layer.name, guard.origin.direction) == ("inner.1", "gradient")
    assert guard.origin.pass_number == 0


# -- what is around it -----------------------------------------------------------------------------


def state_of(net: nn.Module) -> list[Any]:
    return [
        (list(hooks), dict(vars(hooks)))
        for m in net.modules()
        for hooks in private.forward_hooks(m)
    ] + [len(vars(module)) for module in net.modules()]


def test_nothing_is_changed_and_nothing_stays() -> None:
    net = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), linear())
    twin = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), linear())
    rnet = recorder(net)
    twin.load_state_dict(net.state_dict())
    before = state_of(net)
    results = []
    for one in (net, twin):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        if one is net:
            with rnet.guard():
                output = one(x)
                output.square().sum().backward()
        else:
            output = one(x)
            output.square().sum().backward()
        gradients = [p.grad for p in one.parameters()]
        results.append([output, x.grad, *gradients, *one.buffers(), torch.get_rng_state()])
    for ours, plain in zip(*results, strict=True):
        assert ours is not None
        assert plain is not None
        assert torch.equal(ours, plain)
    assert state_of(net) == before


ON_ALL = nn.modules.module
HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "all pre": lambda _, hook: ON_ALL.register_module_forward_pre_hook(hook),
    "all forward": lambda _, hook: ON_ALL.register_module_forward_hook(hook),
    "all backward pre": lambda _, hook: ON_ALL.register_module_full_backward_pre_hook(hook),
    "all backward": lambda _, hook: ON_ALL.register_module_full_backward_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_others_are_called_and_change_values(kind: str) -> None:
    net = nn.Sequential(linear(), nn.Tanh())
    rnet = recorder(net)
    number = 1 if kind.endswith("forward") else 0
    calls: list[nn.Module] = []

    def hook(module: nn.Module, *call: Any) -> Any:
        calls.append(module)
        value = call[-1] if number else call[0][0]
        changed = value * 2
        return changed if number else (changed, *call[0][1:])

    def run() -> list[Any]:
        x = X.clone().requires_grad_()
        handle = HOOKS[kind](net[0], hook)
        output = net(x)
        output.sum().backward()
        handle.remove()
        gradients = [x.grad, *(weight.grad for weight in net.parameters())]
        net.zero_grad()
        return [output, *gradients, calls.copy()]

    plain = run()
    calls.clear()
    with rnet.guard():
        guarded = run()
    assert calls
    assert guarded.pop() == plain.pop()
    for ours, theirs in zip(guarded, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_copies_made_in_the_block_are_called_as_usual() -> None:
    class Copied(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Copied:
            new = Copied.__new__(Copied)
            memo[id(self)] = new
            vars(new).update(copy.deepcopy(vars(self), memo))
            return new

    net = nn.Sequential(Copied(4, 4), nn.Tanh())
    with recorder(net).guard() as guard:
        twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net[1:]))]
        assert torch.equal(twins[0](X), net(X))
        assert torch.equal(twins[1](X), X.tanh())
    assert guard.num_passes == 1
    assert not any("_compiled_call_impl" in vars(module) for module in net.modules())


@pytest.mark.parametrize("hooked", [False, True])
def test_replicas_run_their_own_weights(hooked: bool) -> None:
    net = nn.Sequential(linear())
    rnet = recorder(net)
    if hooked:
        rnet.record("*")
    with rnet.guard() as guard:
        replica = net._replicate_for_data_parallel()
        first = net[0]._replicate_for_data_parallel()
        replica._modules["0"] = first
        for name, weight in net[0].named_parameters():
            setattr(first, name, weight * 2)
        assert torch.equal(replica(X), plain(first, X))
        assert torch.equal(net(X), plain(net[0], X))
    assert guard.num_passes == 2


def plain(module: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight, module.bias)


def test_after_an_error_nothing_is_kept() -> None:
    net = nn.Sequential(linear(), sqrt_at_zero())
    rnet = recorder(net)
    before = state_of(net)
    x = X.clone().requires_grad_()
    with pytest.raises(NonFiniteError), rnet.guard() as guard:
        net[1][1](torch.stack([output := net(x), X])[1])
    assert state_of(net) == before
    # The guard is over, also for the graph that is left.
    origin = guard.origin
    loss_of(output).backward()
    assert guard.origin is origin
    reference = weakref.ref(x)
    del output, x
    gc.collect()
    assert reference() is None


def test_the_graph_goes_without_the_collector() -> None:
    net = nn.Sequential(linear(), Residual(sqrt_at_zero()))
    rnet = recorder(net)
    with garbage_left(), rnet.guard():
        x = X.clone().requires_grad_()
        hidden = x * 1
        reference = weakref.ref(hidden)
        output = net(hidden)
        del hidden, output
        assert reference() is None


def test_a_graph_holds_no_guard() -> None:
    net = nn.Sequential(linear(), sqrt_at_zero())
    rnet = recorder(net)
    with garbage_left():
        with rnet.guard() as guard:
            output = net(X)
        reference = weakref.ref(guard)
        del guard
        assert reference() is None
    # Nobody asks any more.
    loss_of(output).backward()


def test_guards_recorders_and_blocks_go_together() -> None:
    net = nn.Sequential(linear(), nn.ReLU(), Do(torch.log))
    rnet = recorder(net)
    rnet.record("*")
    with (
        rnet.guard(action="record") as outer,
        rnet.watch() as passes,
        rnet.guard(action="record", kinds=("nan",)) as inner,
        recorder(net).guard(action="record") as other,
    ):
        net(X)
        rnet.extract(X)
        rnet(X)
    assert len(passes) == 3
    assert torch.equal(passes[0]["1"], net[1](net[0](X)))
    assert inner.origin is None
    for guard in (outer, other):
        assert guard.origin.layer.name == "2"
        assert guard.num_passes == 3
    with rnet.guard(action="record") as guard, rnet.collecting() as collection:
        net(X)
    assert guard.origin is not None
    assert collection.recording.num_samples == 3


@pytest.mark.parametrize("where", ["before the block", "in the block", "on all modules"])
def test_what_hooks_of_others_put_in_counts_as_the_modules_own(where: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    rnet = recorder(net)

    def changed(module: nn.Module, args: Any, output: Any) -> Any:
        return output * NAN if module is net[1] else None

    def add() -> Any:
        if where == "on all modules":
            return ON_ALL.register_module_forward_hook(changed)
        return net[1].register_forward_hook(changed, prepend=True)

    handle = add() if where == "before the block" else None
    with rnet.guard(action="record") as guard:
        handle = handle or add()
        net(X)
    handle.remove()
    assert guard.origin.layer.name == "1"


def test_what_a_post_processor_puts_in_is_no_layers_fault() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Do(torch.nan_to_num))
    rnet = recorder(net)
    with rnet.guard() as guard:
        net(X)
        rnet.record("0", "1")
        rnet(X, activation_postproc=lambda x: x * NAN)
        rnet(X, activation_postproc=lambda x: x.mul_(NAN))
    assert guard.origin is None
    with torch.no_grad():
        net[0].weight.fill_(NAN)
    with rnet.guard(action="record") as guard:
        rnet(X, activation_postproc=torch.zeros_like)
    assert guard.origin.layer.name == "0"


def test_blocks_of_threads_begin_and_end_beside_passes_of_others() -> None:
    net = nn.Sequential(*(linear() for _ in range(4)))
    rnet, errors = recorder(net), []

    def work() -> None:
        try:
            for _ in range(30):
                with rnet.guard():
                    net(X)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert not any("_compiled_call_impl" in vars(module) for module in net.modules())
    assert not any(hooks for module in net for hooks in private.forward_hooks(module))


class Breaks(BaseException):
    """Ends a pass, and is no exception that code handles."""


def test_a_pass_that_is_broken_off_leaves_no_calls_open() -> None:
    def maybe(x: Tensor) -> Tensor:
        if x[0, 0] > 9:
            raise Breaks
        return x.log()

    net = nn.Sequential(nn.ReLU(), nn.Sequential(Do(maybe)))
    with recorder(net).guard(action="record") as guard:
        for _ in range(2):
            with pytest.raises(Breaks):
                net(torch.full((1, 4), 10.0))
        net(X)
    assert (guard.origin.layer.name, guard.origin.pass_number) == ("1.0", 2)


def test_a_call_that_is_broken_off_in_a_pass_stays_open_in_none() -> None:
    def fails(x: Tensor) -> Tensor:
        raise Breaks

    def tries(net: Any, x: Tensor) -> Any:
        with pytest.raises(Breaks):
            net.fails(x=x)
        return x

    net = Net(tries, fails=Do(fails))
    with recorder(net).guard(action="record") as guard:
        net(x=X)
        net.fails.function = torch.sin
        net.fails(x=X * NAN)
    # The last call is not part of the one before.
    assert guard.origin is None
    assert (guard.num_passes, guard.num_passed_on) == (2, 1)


def test_a_part_that_is_broken_off_holds_no_later_call() -> None:
    def fails(x: Tensor) -> Tensor:
        if len(x) > 1:
            raise Breaks
        return x

    net = nn.Sequential(Do(fails), Do(torch.sin))
    with recorder(net).guard(action="record") as guard:
        with pytest.raises(Breaks):
            net[0](X)
        net[1](X * NAN)
    assert (guard.num_passes, guard.num_passed_on) == (2, 1)


def test_a_pass_that_is_broken_off_is_not_held() -> None:
    def fails(x: Tensor) -> Tensor:
        if len(x) > 1:
            raise Breaks
        return x

    net = nn.Sequential(nn.Sequential(Do(fails)))
    rnet = recorder(net)
    with garbage_left():
        references = []
        with rnet.guard():
            for _ in range(2):
                x = X.clone()
                references.append(weakref.ref(x))
                with contextlib.suppress(Breaks):
                    net(x)
                del x
            # Until the next pass.
            net(X[:1])
            assert [reference() for reference in references] == [None, None]
            x = X.clone()
            references.append(weakref.ref(x))
            with contextlib.suppress(Breaks):
                net(x)
            del x
        assert references[-1]() is None


class Fails(nn.Module):
    """Ends in a module that fails or makes a NaN, behind calls and code of its own."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = linear(), linear(), last
        self.references: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).sin()
        if len(x) == 3:
            self.references += [weakref.ref(x), weakref.ref(hidden)]
        return self.last(self.second(hidden * hidden))


@pytest.mark.parametrize("last", [lambda x: x if len(x) == 1 else x @ x, lambda x: x * NAN])
@pytest.mark.parametrize("action", ["raise", "record"])
def test_a_pass_that_fails_is_held_by_nobody(action: Any, last: Any) -> None:
    net = nn.Sequential(nn.Sequential(Fails(Do(last))))
    rnet = recorder(net)
    with garbage_left(), rnet.guard(action=action), torch.enable_grad():
        with contextlib.suppress(RuntimeError, NonFiniteError):
            net(X.clone())
        assert [reference() for reference in net[0][0].references] == [None, None]


def test_a_call_that_never_began_ends_no_other() -> None:
    def tries(net: Any, x: Tensor) -> Any:
        with contextlib.suppress(ValueError):
            net.inner(input=x)
        return x.log()

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("refused")

    net = Net(tries, inner=nn.Linear(4, 4))
    net.inner.register_forward_pre_hook(refuse)
    with recorder(net).guard(action="record") as guard:
        net(x=X)
    # The network itself makes it.
    assert guard.origin.layer.name == ""


def test_a_run_that_stops_early_leaves_no_calls_open() -> None:
    net = nn.Sequential(linear(), nn.ReLU(), linear())
    rnet = recorder(net)
    rnet.record("1")
    with contextlib.ExitStack() as stack:
        guards = [stack.enter_context(rnet.guard(action="record")) for _ in range(2)]
        rnet.extract(X)
        net[2](X * NAN)
    for guard in guards:
        assert (guard.num_passes, guard.num_passed_on) == (2, 1)


def over_halves(own: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a net that calls itself."""

    def forward(net: Any, x: Tensor) -> Any:
        if len(x) == 1:
            return net.linear(x)
        half = len(x) // 2
        return own(torch.cat([net(x[:half]), net(x[half:])]))

    return Net(forward, linear=nn.Linear(4, 4))


def test_a_network_that_calls_itself() -> None:
    net = over_halves(lambda y: y * NAN if len(y) == 3 else y)
    with recorder(net).guard(action="record") as guard:
        net(X)
    seen = first_maker(net, lambda: net(X))
    assert (guard.origin.layer.name, guard.origin.num_nan) == (seen.name, seen.num_nan) == ("", 12)
    net = over_halves(lambda y: (y * 0).sqrt() if len(y) == 3 else y)
    with recorder(net).guard(action="record") as guard:
        net(X).sum().backward()
    assert (guard.origin.layer.name, guard.origin.direction) == ("", "gradient")
    assert guard.num_passes == 1


def test_a_failing_call_is_passed_over() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError

    def tries(net: Any, x: Tensor) -> Any:
        try:
            x = net.fails(x)
        except ValueError:
            return net.log(x)

    net = Net(tries, fails=Do(fails), log=Do(torch.log))
    with recorder(net).guard(action="record") as guard:
        net(X.abs())
    assert guard.origin.layer.name == "log"


@pytest.mark.parametrize("under_mode", [False, True])
def test_a_call_that_failed_counts_among_those_of_its_module(under_mode: bool) -> None:
    def tries(net: Any, x: Tensor) -> Any:
        for scale in (-1.0, 1.0):
            with contextlib.suppress(ValueError):
                y = net.part(x * scale)
        return y

    def fails_at_first(x: Tensor) -> Tensor:
        if is_guarded and bool(x.sum() < 0):
            raise ValueError
        return x * (NAN if is_guarded else 1.0)

    is_guarded = False
    net = Net(tries, part=Do(fails_at_first))
    rnet, is_guarded = recorder(net), True
    mode = private.operations_made_by(
        lambda made, types, args=(), kwargs=None: made(*args, **kwargs or {})
    )
    with rnet.guard(action="record") as guard, mode if under_mode else contextlib.nullcontext():
        net(X.abs())
    assert (guard.origin.layer.name, guard.origin.layer.call) == ("part", 1)


def test_a_guard_around_nothing_is_an_error() -> None:
    rnet = recorder(nn.Sequential(nn.ReLU()))
    with pytest.raises(FlowError, match="not called inside the block"), rnet.guard():
        pass
    with pytest.raises(KeyError), rnet.guard():
        raise KeyError
    with pytest.raises(FlowError, match="copy"), rnet.guard():
        nn.Sequential(nn.ReLU())(X)


@pytest.mark.parametrize(
    "options",
    [
        *({"kinds": kinds} for kinds in (None, (), 1, [[]], ("Nan",), "inf nan")),
        *({"action": "stop"}, {"gradients": "no"}, {"keep_inputs": "all"}, {"operations": "*"}),
        {"scaler": True},
    ],
)
def test_bad_arguments_say_what_to_write(options: dict[str, Any]) -> None:
    rnet = recorder(nn.Sequential(nn.ReLU()))
    with pytest.raises(ArgumentError, match=rf"{next(iter(options))}(=| is).*write"):
        rnet.guard(**options).__enter__()


def test_compiled_networks_are_refused() -> None:
    net = nn.Sequential(linear(), nn.Sequential(linear()))
    rnet = recorder(net)
    with pytest.raises(UnsupportedNetError, match="compiled"), rnet.guard():
        torch.compile(net, backend="eager")(X)
    torch.compiler.reset()
    net[1].compile(backend="eager")
    with pytest.raises(UnsupportedNetError, match="compiled"), rnet.guard():
        net(X)


def test_compiled_parts_are_refused_when_they_are_traced() -> None:
    @torch.compile(backend="eager")
    def part(net: Any, x: Tensor) -> Any:
        return net.second(torch.relu(net.first(x)))

    compiles = Net(lambda net, x: part(net, x), first=linear(), second=linear())
    rnet = recorder(nn.Sequential(compiles, linear()))
    torch.compiler.reset()
    with pytest.raises(UnsupportedNetError, match=r"'0\.first' ran as compiled"), rnet.guard():
        rnet.net(X)


def test_transforms_are_refused() -> None:
    net = nn.Sequential(linear())
    with pytest.raises(UnsupportedNetError, match="vmap"), recorder(net).guard():
        torch.vmap(net)(X)


def test_infinities_of_a_mask_are_the_callers() -> None:
    net = Do(lambda x, mask=None: x if mask is None else torch.softmax(x + mask, -1))
    rnet = recorder(net)
    with rnet.guard():
        net(X, mask=torch.tensor([0.0, -INF, 0.0, 0.0]))
    with pytest.raises(NonFiniteError) as caught, rnet.guard():
        net(X, mask=torch.full((4,), -INF))
    assert not caught.value.origin.inputs_finite
    assert caught.value.origin.weights_finite


# -- keeping the call ------------------------------------------------------------------------------


def noisy(net: Any, x: Tensor, *, scale: Tensor) -> Tensor:
    """Draws random numbers, counts its calls, works in place and takes the logarithm."""
    net.calls += 1
    x = x.mul_(scale) if scale.dim() else x
    return (nn.functional.dropout(net.linear(x)) + net.calls).log()


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_call_runs_again_bit_for_bit(mode: Any, tmp_path: Path) -> None:
    def outer(net: Any, x: Tensor) -> Any:
        return net.noisy(net.first(x), scale=torch.full((4,), 2.0))

    first, inner = nn.Linear(4, 4), Net(noisy, linear=nn.Linear(4, 4), calls=torch.zeros(()))
    net = Net(outer, first=first, noisy=inner)
    rnet = recorder(net)
    seen: list[Tensor] = []
    net.noisy.register_forward_hook(lambda m, a, output: seen.append(output.clone()))
    with rnet.guard(action="record", keep_inputs=True) as guard, mode():
        net(X.abs())
        net(X * 3)
        net(X.abs())
    assert guard.origin.layer.name == "noisy"
    seen, x = [seen[guard.origin.pass_number]], (X.abs(), X * 3)[guard.origin.pass_number]
    guard.origin.save(tmp_path / "fault")
    recording = open_recording(tmp_path / "fault", verify=True)
    again = recording.recompute(rnet, "noisy")["noisy"]
    assert again.isnan().any()
    assert same(again, seen[0])
    assert same(recording["noisy"][:], seen[0])
    assert torch.equal(recording.inputs["noisy"][0].args[0], net.first(x))
    # Inside it, and in another precision, by hand.
    inner = recording.recompute(rnet, "noisy.linear")["noisy.linear"]
    assert torch.equal(inner, net.noisy.linear(net.first(x) * 2))


def test_a_structure_is_kept_by_its_call(tmp_path: Path) -> None:
    net, _ = forward_faults()["in a structure"]
    rnet = recorder(net)
    with rnet.guard(action="record", keep_inputs=True) as guard:
        net(X)
    guard.origin.save(tmp_path / "fault")
    recording = open_recording(tmp_path / "fault")
    (found,) = recording.recompute_batches(rnet, "1")
    assert same(found["1"]["pair"][1][0], net(X)["pair"][1][0])


def test_what_was_not_kept_is_not_saved(tmp_path: Path) -> None:
    net = nn.Sequential(linear(), sqrt_at_zero())
    rnet = recorder(net)
    with rnet.guard(action="record", keep_inputs=True) as guard:
        loss_of(net(X)).backward()
    assert guard.origin is not None
    with pytest.raises(RecorderError, match="backward pass"):
        guard.origin.save(tmp_path / "fault")
    with rnet.guard(action="record") as guard:
        net[1][1](-X.abs() - 1)
    assert guard.origin is not None
    with pytest.raises(RecorderError, match="keep_inputs=True"):
        guard.origin.save(tmp_path / "fault")
    assert not (tmp_path / "fault").exists()


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))

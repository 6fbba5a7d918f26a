"""Sequentials, where modules vouch for one another and are called without torch in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from scio_recorder import NonFiniteError, Recorder
from scio_recorder.analysis.guarding.vouching import traits_of
from scio_recorder.capture.brackets import Bracket
from scio_recorder.tensors.finite import look
from tests.analysis.guarding.nonfinite import INF, NAN, Do, linear
from tests.analysis.guarding.test_vouching import MODULES, input_of, zero_half

LARGE = 1e25


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def recorder(net: nn.Module, x: Tensor) -> Recorder:
    return Recorder(net, input_data=x, force_static_flow=False, verbose=0)


# -- what the gradients of a module show -----------------------------------------------------------


def vouches(module: nn.Module) -> bool:
    operations = traits_of(module).operations
    return operations is not None and operations.vouch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_each_gradient_shows_what_came_in(
    kind: type[nn.Module], training: bool, dtype: torch.dtype
) -> None:
    module = MODULES[kind]().to(dtype).train(training)
    if kind is nn.Conv2d:
        # The other one has windows in its padding, and does not vouch.
        assert not vouches(module)
        module = nn.Conv2d(4, 2, (3, 2), stride=2, padding=(2, 1)).to(dtype)
    assert vouches(module)
    zero_half(module)
    x = input_of(kind).to(dtype)
    with torch.no_grad():
        x.flatten()[::3] = 0
    x.requires_grad_()
    output = module(x)
    leaves = [x, *module.parameters()]
    for place in range(0, output.numel(), max(1, output.numel() // 9)):
        for value in (NAN, INF, -INF):
            received = torch.zeros_like(output)
            received.view(-1)[place] = value
            for gradient in torch.autograd.grad(output, leaves, received, retain_graph=True):
                assert look(gradient) is not None


def test_some_gradients_show_nothing() -> None:
    class Own(nn.Linear):
        pass

    convolutions = nn.Conv2d(1, 1, 2, padding=2), nn.Conv1d(1, 1, 2, dilation=2)
    empty = nn.Linear(1, 2)
    empty.in_features = 0
    for module in (Own(2, 2), nn.ReLU(), empty, *convolutions):
        assert not vouches(module)


def test_what_goes_to_the_padding_is_found() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 1, 1, bias=False),
        # Its corners see nothing but zeros.
        nn.Conv2d(1, 1, 2, padding=2, bias=False),
        nn.Conv2d(1, 1, 1, bias=False),
    )
    with torch.no_grad():
        net[2].weight.fill_(LARGE)
    x = torch.full((1, 1, 3, 3), 1e-20)
    received = torch.zeros(1, 1, 6, 6)
    received[0, 0, 0, 0] = 1e20
    with recorder(net, x).guard(action="record") as guard:
        net(x).backward(received)
    assert net[0].weight.grad.isfinite().all()
    assert guard.origin is not None
    assert guard.origin.layer.name == "2"


# -- the maker in a chain --------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    return [
        *(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4, bias=False), nn.Tanh()),
        *(nn.Linear(4, 4), nn.GELU(), nn.GELU(), nn.GELU(), nn.Linear(4, 4), nn.ReLU()),
        *(nn.Linear(4, 4), nn.Flatten(0, 1), nn.LayerNorm(4)),
    ]


def makers(net: nn.Sequential, x: Tensor, received: Tensor) -> list[tuple[str, str | None]]:
    """Return who makes gradients that are not finite, and of which parameter, layer by layer."""
    values = [x]
    for module in net:
        values.append(module(values[-1].detach().requires_grad_()))
    inputs = [value.detach().requires_grad_() for value in values[:-1]]
    found: list[tuple[str, str | None]] = []
    for index in reversed(range(len(net))):
        module, given = net[index], inputs[index]
        names = [None, *(name for name, _ in module.named_parameters())]
        leaves = [given, *module.parameters()]
        gradients = torch.autograd.grad(module(given), leaves, received)
        if received.isfinite().all():
            bad = zip(names, gradients, strict=True)
            found += [(str(index), name) for name, one in bad if not one.isfinite().all()]
        received = gradients[0]
    return found


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e20])
@pytest.mark.parametrize(
    "at", [index for index, one in enumerate(layers()) if len([*one.parameters()])]
)
def test_the_maker_of_a_gradient_is_found(at: int, scale: float, nested: bool) -> None:
    chain = layers()
    if isinstance(chain[at], nn.Linear):
        with torch.no_grad():
            # Its output stays small, while the gradient of its input overflows.
            chain[at].weight.mul_(LARGE if at else 1)
            chain[at].weight[1:].zero_()
    flat = nn.Sequential(*chain)
    net = (
        nn.Sequential(nn.Sequential(*chain[:4]), *chain[4:6], nn.Sequential(*chain[6:]))
        if nested
        else flat
    )
    x = torch.randn(3, 2, 4) * (1e-30 if at == 1 else 1)
    received = torch.randn(6, 4) * scale
    expected = makers(flat, x, received)
    with recorder(net, x).guard(action="record") as guard:
        net(x).backward(received)
    origin = guard.origin
    if not expected:
        assert origin is None
        return
    assert origin is not None
    module = dict(net.named_modules())[origin.layer.name]
    assert (str(chain.index(module)), origin.parameter) in expected
    assert chain.index(module) == max(int(name) for name, _ in expected)
    assert origin.inputs_finite
    with pytest.raises(NonFiniteError) as caught, recorder(net, x).guard():
        net(x).backward(received)
    assert caught.value.origin.layer.name == origin.layer.name


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_a_gradient_of_a_parameter_is_described_as_that_has_it(parameter: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    x = torch.ones(5, 2, 4)
    received = torch.zeros(5, 2, 3)
    if parameter == "weight":
        # In row 2 and column 1, a product overflows.
        received[0, 0, 2], x[0, 0, 1] = 1e30, 1e30
        x[0, 0, 0] = x[0, 0, 2] = x[0, 0, 3] = 0
    else:
        received[:, :, 1] = 1e38
        x *= 1e-10
    net = net[:1]
    with recorder(net, x).guard(action="record") as guard:
        net(x).backward(received)
    origin, gradient = guard.origin, getattr(net[0], parameter).grad
    assert origin is not None
    assert (origin.layer.name, origin.parameter) == ("0", parameter)
    assert origin.num_values == gradient.numel()
    assert origin.index == tuple(gradient.isfinite().logical_not().nonzero()[0].tolist())
    assert gradient[origin.index].isinf()


def test_the_input_of_a_linear_is_described_as_it_is() -> None:
    net = nn.Sequential(nn.Tanh(), nn.Linear(4, 3), nn.GELU())
    with torch.no_grad():
        net[1].weight.mul_(LARGE)
    x = torch.full((5, 2, 4), 1e-27).requires_grad_()
    received = torch.zeros(5, 2, 3)
    received[3, 1] = 1e20
    with recorder(net, x).guard(action="record") as guard:
        net(x).backward(received)
    assert guard.origin is not None
    assert (guard.origin.layer.name, guard.origin.parameter) == ("1", None)
    assert guard.origin.index == (3, 1, 0)
    assert guard.origin.num_values == 5 * 2 * 4
    assert guard.origin.sample == 3


# -- gradients that wait ---------------------------------------------------------------------------


def overflowing() -> tuple[nn.Sequential, Tensor]:
    """Return a net of which the last module makes infinite gradients, and an input."""
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with torch.no_grad():
        net[2].weight.mul_(LARGE)
    return net, torch.randn(3, 4) * 1e-3


def node_of(output: Tensor, kind: str) -> Any:
    node: Any = output.grad_fn
    while node.name() != kind:
        node = next(one for one, _ in node.next_functions if one is not None and one.next_functions)
    return node


def test_what_nobody_receives_is_examined_at_the_end() -> None:
    net, x = overflowing()
    with recorder(net, x).guard(action="record") as guard:
        output = net(x)
        edge = GradientEdge(node_of(output, "GeluBackward0"), 0)
        # Nothing runs that could vouch for the gradient.
        (gradient,) = torch.autograd.grad((output * 1e20).sum(), edge)
    assert not gradient.isfinite().all()
    assert guard.origin is not None
    assert (guard.origin.layer.name, guard.origin.parameter) == ("2", None)


def test_what_waits_in_two_branches_is_examined() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (overflowing()[0] for _ in range(2))
            with torch.no_grad():
                self.first[2].weight.div_(LARGE)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    net, x = Branches(), torch.randn(3, 4) * 1e-3
    with recorder(net, x).guard(action="record") as guard:
        outputs = net(x)
        edges = [GradientEdge(node_of(output, "GeluBackward0"), 0) for output in outputs]
        torch.autograd.grad((outputs[0] + outputs[1]).sum() * 1e20, edges)
    assert guard.origin is not None
    assert guard.origin.layer.name == "second.2"


@pytest.mark.parametrize("then", ["another end", "nothing vouches", "nothing"])
def test_a_backward_pass_that_fails_leaves_nothing_behind(then: str) -> None:
    net, x = overflowing()
    held: list[weakref.ref[Tensor]] = []

    def fails(gradients: Any) -> None:
        held.append(weakref.ref(gradients[0]))
        raise ValueError("broken off")

    with recorder(net, x).guard(action="record") as guard:
        output = net(x)
        node: Any = node_of(output, "GeluBackward0")
        handle = node.register_prehook(fails)
        with pytest.raises(ValueError, match="broken off"):
            (output * 1e20).sum().backward(retain_graph=True)
        handle.remove()
        assert guard.origin is None
        if then == "another end":
            # The gradient that waited belongs to the pass before, and not to this one.
            received = torch.full((3, 4), INF)
            torch.autograd.backward(GradientEdge(node, 0), received, retain_graph=True)
            assert guard.origin is None or guard.origin.layer.name != "2"
        elif then == "nothing vouches":
            torch.autograd.grad((output * 1e20).sum(), GradientEdge(node, 0), retain_graph=True)
            assert guard.origin is not None
            assert guard.origin.layer.name == "2"
        del output, node, handle
        gc.collect()
        assert all(one() is None for one in held)


def test_the_first_of_a_chain_is_judged_by_what_it_received() -> None:
    net, x = nn.Sequential(nn.LayerNorm(4), nn.GELU()), torch.randn(3, 4)
    with (
        pytest.warns(UserWarning, match="the loss made them"),
        recorder(net, x).guard(kinds=("inf",)) as guard,
    ):
        (net(x) * INF).sum().backward()
    assert guard.origin is None


def test_who_changes_gradients_between_two_calls_is_no_voucher() -> None:
    class Cleans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            output = self.inner(x)
            if output.requires_grad:
                output.register_hook(torch.zeros_like)
            return output

    net = nn.Sequential(Cleans(), nn.Linear(4, 4))
    with torch.no_grad():
        net[1].weight.mul_(LARGE)
    x = torch.randn(3, 4) * 1e-3
    with recorder(net, x).guard(action="record") as guard:
        (net(x) * 1e20).sum().backward()
    assert net[0].inner[0].weight.grad.isfinite().all()
    assert guard.origin is not None
    assert (guard.origin.layer.name, guard.origin.parameter) == ("1", None)


def test_a_module_of_several_operations_is_judged_where_it_ends() -> None:
    norm = nn.RMSNorm(4)
    net, x = nn.Sequential(nn.Linear(4, 4), norm), torch.randn(3, 4)
    with torch.no_grad():
        norm.weight[2] = 1e10
    received = torch.zeros(3, 4)
    received[1, 2] = 1e30
    with recorder(net, x).guard(action="record") as guard:
        net(x).backward(received)
    assert guard.origin is not None
    assert (guard.origin.layer.name, guard.origin.parameter) == ("1", None)
    # Its first operation does not give this on as it is: the last one does.
    assert (guard.origin.num_inf, guard.origin.index) == (1, (1, 2))


def test_a_call_is_not_blamed_for_what_a_penalty_sends_it() -> None:
    """A second backward pass enters a chain in its middle."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(linear(), nn.GELU(), nn.SiLU())

        def forward(self, x: Tensor) -> Any:
            output = self.inner(x)
            weight = self.inner[0].weight
            (gradient,) = torch.autograd.grad(output.sum(), weight, create_graph=True)
            return output + (gradient * 0).sqrt().sum()

    net = nn.Sequential(Penalised())
    x = torch.randn(3, 4)
    with recorder(net, x).guard(action="record") as guard:
        net(x).sum().backward()
    assert guard.origin is not None
    # Its own code takes a root at zero.
    assert guard.origin.layer.name == "0"


def test_a_module_that_differentiates_reaches_the_calls_before_it() -> None:
    class Differentiates(nn.Module):
        def __init__(self, *before: nn.Module) -> None:
            super().__init__()
            self.before = list(before)

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                weights = [module.weight for module in self.before]
                torch.autograd.grad((x * 1e20).sum(), weights, retain_graph=True)
            return x

    first = nn.Linear(4, 4)
    net = nn.Sequential(nn.Tanh(), first, nn.Linear(4, 4), Differentiates(first))
    with torch.no_grad():
        net[2].weight.mul_(LARGE)
    x = torch.full((3, 4), 1e-27)
    with recorder(net, x).guard(action="record") as guard:
        net(x)
    assert guard.origin is not None
    assert (guard.origin.layer.name, guard.origin.direction) == ("2", "gradient")


def test_a_chain_in_place_is_judged_by_what_it_received() -> None:
    # The ReLU replaces the view that the Linear returned in the graph.
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 2, 4)
    rnet = recorder(net, x)
    with (
        pytest.warns(UserWarning, match="the loss made them"),
        rnet.guard(kinds=("inf",)) as guard,
    ):
        (net(x) * INF).sum().backward()
    assert guard.origin is None
    assert net[0].bias.grad.isinf().any()


# -- calls without torch in between ----------------------------------------------------------------


class Own(nn.Linear):
    """Has a call of its own."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2)


def test_calls_of_their_own_are_made() -> None:
    net = nn.Sequential(Own(4, 4), nn.ReLU(), Own(4, 4))
    x = torch.randn(3, 4)
    with recorder(net, x).guard() as guard:
        assert torch.equal(net(x), nn.Linear.forward(net[2], 2 * net[0](x).relu()))
    assert guard.origin is None


def test_who_replaces_the_call_of_all_modules_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    x, seen = torch.randn(3, 4), []
    usual = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return usual(module, *args, **kwargs)

    with recorder(net, x).guard():
        monkeypatch.setattr(nn.Module, "__call__", call)
        net(x)
        monkeypatch.undo()
    assert seen == list(net.modules())


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((), {"x": 1})])
def test_a_wrong_call_of_a_sequential_fails_as_ever(args: Any, kwargs: Any) -> None:
    net = nn.Sequential(nn.ReLU())
    with pytest.raises(TypeError) as plain:
        net(*args, **kwargs)
    with recorder(net, torch.ones(1, 4)).guard():
        with pytest.raises(TypeError) as guarded:
            net(*args, **kwargs)
        net(torch.ones(1))
    assert str(guarded.value) == str(plain.value)


@pytest.mark.parametrize("gradients", [True, False])
def test_only_what_has_other_hooks_gets_two_of_ours(gradients: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x, numbers = torch.randn(3, 4), []
    handle = net[1].register_forward_hook(lambda *call: None)
    with recorder(net, x).guard(gradients=gradients):
        late = net[2].register_forward_hook(lambda *call: None)
        net(x)
        numbers = [(len(one._forward_pre_hooks), len(one._forward_hooks)) for one in net]
    assert numbers == [(1, 0), (2, 2), (2, 2)]
    handle.remove()
    late.remove()
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in net.modules())


def test_what_a_post_processor_does_is_nobodys_fault_if_it_comes_late() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Do(torch.nan_to_num))
    x = torch.randn(3, 4)
    rnet = recorder(net, x)
    with rnet.guard() as guard:
        net(x)
        rnet.record("0", "1")
        rnet(x, activation_postproc=lambda value: value * NAN)
    assert guard.origin is None


def test_what_a_hook_hides_later_is_found() -> None:
    def cleaned(output: Tensor) -> None:
        output.nan_to_num_()

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        net[0].weight.fill_(NAN)
    x = torch.randn(3, 4)
    rnet = recorder(net, x)
    handles = [net[0].register_forward_hook(lambda *call: None)]
    with rnet.guard(action="record") as guard, torch.no_grad():
        handles += [net[0].register_forward_hook(lambda *call: cleaned(call[-1]))]
        net(x)
    for handle in handles:
        handle.remove()
    assert guard.origin is not None
    assert guard.origin.layer.name == "0"


def test_two_guards_around_each_other_see_the_same() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Do(torch.log))
    x = torch.zeros(3, 4) - 1
    one, two = recorder(net, x), recorder(net, x)
    with one.guard(action="record") as outer, two.guard(action="record") as inner:
        net(x)
        assert isinstance(vars(net[0])["_compiled_call_impl"], Bracket)
    for guard in (outer, inner):
        assert guard.origin is None or guard.origin.layer.name == "2"
        assert guard.num_passes == 1
    assert (outer.origin is None) == (inner.origin is None)


def test_shared_modules_wait_only_where_the_next_one_vouches() -> None:
    shared = nn.Linear(4, 4)
    makes: list[Callable[[], nn.Module]] = [nn.ReLU, lambda: nn.Linear(4, 4), nn.Tanh]
    for make in makes:
        net = nn.Sequential(shared, nn.Linear(4, 4), shared, make(), Do(torch.nan_to_num))
        x = torch.ones(2, 4)
        rnet = recorder(net, x)
        with torch.no_grad():
            before = shared.weight.clone()
            shared.weight.fill_(INF)
        with rnet.guard(action="record") as guard:
            net(x)
        with torch.no_grad():
            shared.weight.copy_(before)
        assert guard.origin is not None
        assert guard.origin.layer.module is shared
        assert guard.origin.layer.call == 0

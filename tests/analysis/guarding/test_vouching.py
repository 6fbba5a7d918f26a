"""What need not be looked at: whether modules do what the tables say of them, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import NonFiniteError, Recorder
from scio_recorder.analysis.guarding import vouching
from scio_recorder.tensors.finite import look
from tests.analysis.guarding.nonfinite import INF, NAN, Do, first_maker

MODULES: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.Linear: lambda: nn.Linear(6, 2),
    nn.GELU: lambda: nn.GELU("tanh"),
    nn.LayerNorm: lambda: nn.LayerNorm(6),
    nn.BatchNorm1d: lambda: nn.BatchNorm1d(4),
    nn.BatchNorm2d: lambda: nn.BatchNorm2d(4),
    nn.BatchNorm3d: lambda: nn.BatchNorm3d(4),
    nn.Conv1d: lambda: nn.Conv1d(4, 2, 3),
    nn.Conv2d: lambda: nn.Conv2d(4, 2, (3, 2), padding=2),
    nn.Conv3d: lambda: nn.Conv3d(4, 2, 1),
}
DIMENSIONS = {"1d": 3, "2d": 4, "3d": 5}
SHAPE = (2, 4, 6, 5, 3)


def input_of(kind: type[nn.Module]) -> Tensor:
    return torch.randn(SHAPE[: DIMENSIONS.get(kind.__name__[-2:], 3)])


def zero_half(module: nn.Module) -> None:
    """Set half of a module's parameters to zero: what is multiplied by that must not vanish."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.flatten()[::2] = 0


def test_every_kind_that_tells_is_tried() -> None:
    assert set(MODULES) == vouching._TELLING


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_what_tells_hands_on_whatever_is_not_finite(
    kind: type[nn.Module], training: bool, dtype: torch.dtype
) -> None:
    modules = [MODULES[kind]().to(dtype).train(training)]
    modules += [nn.GELU()] if kind is nn.GELU else []
    with torch.no_grad():
        for module in modules:
            assert vouching.traits_of(module).tells
            zero_half(module)
            x = input_of(kind).to(dtype)
            for place in range(0, x.numel(), 7):
                for value in (NAN, INF, -INF):
                    bad = x.clone()
                    bad.view(-1)[place] = value
                    assert look(module(bad)) is not None


@pytest.mark.parametrize("kind", sorted(vouching._HARMLESS, key=lambda kind: kind.__name__))
def test_what_is_harmless_makes_nothing(kind: type[nn.Module]) -> None:
    for largest in (3.4e38, 1e-45, 100.0):
        x = torch.tensor([[-largest, 0.0, largest, 1.0]])
        assert look(kind()(x)) is None


def test_some_do_not_tell() -> None:
    class Own(nn.Linear):
        pass

    linear = nn.Linear(2, 2)
    linear.forward = lambda x: x  # type: ignore[method-assign]  # as some libraries do
    convolutions = nn.Conv2d(1, 1, 1, stride=2), nn.Conv1d(1, 1, 2, dilation=2)
    for module in (Own(2, 2), linear, nn.ReLU(), *convolutions):
        assert not vouching.traits_of(module).tells


def test_what_a_dilated_convolution_passes_over_is_found() -> None:
    net = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 2, dilation=2))
    rnet = Recorder(net, input_size=(1, 1, 3), verbose=0)
    with torch.no_grad():
        net[0].weight.fill_(3e38)
    with rnet.guard(action="record") as guard:
        assert net(torch.tensor([[[0.0, 10.0, 0.0]]])).isfinite().all()
    assert guard.origin is not None
    assert guard.origin.layer.name == "0"


@pytest.mark.parametrize("where", ["module", "class"])
@pytest.mark.parametrize("when", ["before", "in"])
@pytest.mark.parametrize(
    ("second", "maker", "change"),
    [
        (nn.ReLU, "1", lambda x: x * NAN),  # no longer harmless
        (nn.GELU, "0", Tensor.nan_to_num),  # no longer tells of its input
    ],
)
def test_modules_whose_forward_is_replaced_vouch_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
    second: type[nn.Module],
    maker: str,
    change: Any,
    when: str,
    where: str,
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), second(), nn.Linear(4, 4))
    rnet = Recorder(net, input_size=(1, 4), verbose=0)
    with torch.no_grad():
        net[0].weight.fill_(NAN if maker == "0" else 1)

    def replace() -> None:
        if where == "module":
            monkeypatch.setattr(net[1], "forward", change)
        else:
            monkeypatch.setattr(second, "forward", lambda module, x: change(x))

    if when == "before":
        replace()
    with rnet.guard(action="record") as guard:
        if when == "in":
            replace()
        net(torch.ones(1, 4))
    assert guard.origin is not None
    assert guard.origin.layer.name == maker


CHAIN: list[Callable[[], nn.Module]] = [
    *(lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4), nn.GELU, lambda: nn.Linear(4, 4)),
    *(lambda: nn.Linear(4, 4), nn.ReLU, lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4)),
]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 6, 7])
def test_the_maker_in_a_chain_is_found(at: int, value: float, mode: Any) -> None:
    net = nn.Sequential(*(make() for make in CHAIN))
    rnet = Recorder(net, input_size=(1, 4), verbose=0)
    with torch.no_grad():
        net[at].weight.flatten()[1] = value
    x = torch.randn(3, 4)
    with mode():
        seen = first_maker(net, lambda: net(x))
        with rnet.guard(action="record") as guard:
            net(x)
        with pytest.raises(NonFiniteError), rnet.guard():
            net(x)
    assert seen is not None
    assert guard.origin is not None
    assert guard.origin.layer.name == seen.name == str(at)
    assert (guard.origin.num_nan, guard.origin.num_inf) == (seen.num_nan, seen.num_inf)
    assert guard.origin.inputs_finite


@pytest.mark.parametrize("hooked", [True, False])
def test_a_chain_that_is_broken_off_is_judged(hooked: bool) -> None:
    def fails(*call: Any) -> None:
        raise ValueError("broken off")

    def broken_off() -> None:
        # Either a hook fails, or the network without any: its second module takes fewer values.
        handle = net[1].register_forward_hook(fails) if hooked else None
        with pytest.raises((ValueError, RuntimeError), match=r"broken off|shapes"):
            net(torch.ones(1, 4))
        if handle is not None:
            handle.remove()

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rnet = Recorder(net, input_size=(1, 4), verbose=0)
    with torch.no_grad():
        net[0].weight.fill_(NAN)
    if not hooked:
        net[1].weight = nn.Parameter(torch.ones(4, 3))
    with rnet.guard(action="record") as guard:
        broken_off()
    assert guard.origin is not None
    assert guard.origin.layer.name == "0"


def test_others_may_change_what_goes_on() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Do(lambda x: x))
    rnet = Recorder(net, input_size=(1, 4), verbose=0)
    rnet.record("0")
    with rnet.guard(action="record") as guard:
        # Neither layer makes what a post-processor puts in, be it in place.
        rnet(torch.ones(1, 4), activation_postproc=lambda x: x * NAN)
        rnet(torch.ones(1, 4), activation_postproc=lambda x: x.mul_(NAN))
    assert guard.origin is None or guard.origin.layer.name == ""
    with torch.no_grad():
        net[0].weight.fill_(NAN)
    with rnet.guard(action="record") as guard:
        rnet(torch.ones(1, 4), activation_postproc=lambda x: torch.zeros_like(x))
    assert guard.origin is not None
    assert guard.origin.layer.name == "0"


@pytest.mark.parametrize("where", ["before the block", "in the block", "on all modules"])
@pytest.mark.parametrize(
    ("second", "maker", "change"),
    [
        (nn.ReLU(), "1", lambda value: value * NAN),  # no longer harmless
        (nn.Linear(4, 4), "0", Tensor.nan_to_num),  # no longer tells of its input
    ],
)
def test_modules_that_others_have_hooked_vouch_for_nothing(
    second: nn.Module, maker: str, change: Any, where: str
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), second, nn.Linear(4, 4))
    rnet = Recorder(net, input_size=(1, 4), verbose=0)
    with torch.no_grad():
        net[0].weight.fill_(NAN if maker == "0" else 1)

    def changed(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if module is net[1] else None

    def add() -> Any:
        if where == "on all modules":
            return nn.modules.module.register_module_forward_hook(changed)
        return net[1].register_forward_hook(changed, prepend=True)

    handle = add() if where == "before the block" else None
    with rnet.guard(action="record") as guard:
        handle = handle or add()
        net(torch.ones(1, 4))
    handle.remove()
    assert guard.origin is not None
    assert guard.origin.layer.name == maker

"""A third run says what counts as noise: two draws of it are equal, and a fault is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from scio_recorder import Recorder, compare
from scio_recorder.analysis.comparing.comparison import Noise, exceeds
from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.analysis.comparing.measures import Figures
from scio_recorder.errors import ComparisonError

BATCHES = [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Reordered(nn.Module):
    """A linear layer that adds up in another order: another draw of rounding noise."""

    def __init__(self, linear: nn.Linear, seed: int) -> None:
        super().__init__()
        order = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(seed))
        self.order = order
        self.weight = nn.Parameter(linear.weight.detach()[:, order].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x[..., self.order], self.weight, self.bias)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU()
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return mixed


def original() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(4)), nn.Linear(32, 3)).eval()


def drawn(net: nn.Module, seed: int) -> nn.Module:
    twin = copy.deepcopy(net)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.Linear):
            twin.set_submodule(name, Reordered(module, seed))
    return twin


def recorder(net: nn.Module) -> Recorder:
    dtype = next(net.parameters()).dtype
    return Recorder(net, input_data=BATCHES[0].to(dtype))


def compared(one: nn.Module, two: nn.Module, floor: nn.Module, **options: Any) -> Difference:
    sides = [recorder(net) for net in (one, two, floor)]
    dtypes = [next(net.parameters()).dtype for net in (one, two, floor)]
    return compare(
        sides[0],
        sides[1],
        BATCHES,
        floor=sides[2],
        to_inputs=[lambda x, to=to: x.to(to) for to in dtypes],
        progress=False,
        **options,
    )


def halved(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net).bfloat16()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 5))]
)
def test_two_draws_of_noise_are_no_difference(seed: int) -> None:
    net = original()
    difference = compared(net, drawn(net, seed), drawn(net, seed + 100))
    assert difference.first is None
    assert not any(layer.differs for layer in difference.values())
    # There is noise, and it is shown.
    last = difference["4"]
    assert last.num_different > 0
    assert last.noise is not None
    assert 0 < last.noise < 1e-5


def test_another_precision_is_noise() -> None:
    net = original()
    assert compared(net, halved(net), halved(net)).first is None
    assert compared(net, halved(drawn(net, 1)), halved(net)).first is None
    assert compared(net, net, halved(net)).first is None


FAULTS = {
    "sign": ("2.up", lambda net: net[2].up.weight[5].neg_()),
    "permuted": ("1.down", lambda net: net[1].down.weight.copy_(net[1].down.weight.flip(0))),
    "scale": ("0.norm", lambda net: net[0].norm.weight.mul_(1.5)),
    "bias": ("3.down", lambda net: net[3].down.bias[7].add_(1.0)),
    "activation": ("1.act", lambda net: setattr(net[1], "act", nn.ReLU())),
}


KINDS = ("bfloat16", "other order")
# By default each fault meets one kind of noise.
ROTATED = [
    pytest.param(fault, kind, marks=[pytest.mark.campaign] * ((number + place) % 2))
    for number, fault in enumerate(FAULTS)
    for place, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("fault", "floor"), ROTATED)
def test_a_fault_is_named_in_noise(fault: str, floor: str) -> None:
    net, faulty = original(), original()
    with torch.no_grad():
        FAULTS[fault][1](faulty)
    if floor == "bfloat16":
        difference = compared(net, halved(faulty), halved(net))
    else:
        difference = compared(net, drawn(faulty, 1), drawn(net, 2))
    first = difference.first
    assert first is not None
    assert (first.layer.name, first.inputs_equal) == (FAULTS[fault][0], True)
    assert first.index is not None
    assert abs(float(first.reference or 0) - float(first.candidate or 0)) > 0.05


def test_a_floor_without_noise_tolerates_nothing() -> None:
    net, other = original(), original()
    with torch.no_grad():
        other[2].up.weight[0, 0] = torch.nextafter(other[2].up.weight[0, 0], torch.tensor(9.0))
    first = compared(net, other, copy.deepcopy(net)).first
    assert first is not None
    assert first.layer.name == "2.up"


def test_a_floor_can_be_a_recording() -> None:
    net = original()
    floor = recorder(drawn(net, 1))
    floor.record("*")
    recording = floor.collect(BATCHES, progress=False)
    sides = recorder(net), recorder(drawn(net, 2))
    assert compare(*sides, BATCHES, floor=recording, progress=False).first is None


def test_a_floor_goes_by_the_names_of_the_reference_or_of_the_candidate() -> None:
    net = original()
    ported = nn.Sequential()
    for name, module in drawn(net, 1).named_children():
        ported.add_module(f"h{name}", module)
    match = {"?": "h?", "?.*": "h?.*"}
    for floor in (drawn(net, 2), copy.deepcopy(net), ported):
        sides = recorder(net), recorder(ported)
        difference = compare(*sides, BATCHES, match, floor=recorder(floor), progress=False)
        has_noise = floor is not net and difference["4"].noise
        assert bool(has_noise) == (difference.first is None)


def test_a_floor_that_is_the_reference_goes_by_its_own_names() -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("a", nn.Linear(32, 32))
    net.add_module("b", nn.Linear(32, 32))
    faulty = drawn(net, 1)
    faulty.b.bias.data[3] += 0.1
    swapped = nn.Sequential()
    swapped.add_module("b", faulty.a)
    swapped.add_module("a", faulty.b)
    floor = recorder(copy.deepcopy(net))
    match = {"a": "b", "b": "a"}
    sides = recorder(net), recorder(swapped)
    difference = compare(*sides, BATCHES, match, floor=floor, rtol=1e-3, atol=1e-3, progress=False)
    assert difference.first is not None
    assert difference.first.layer.name == "b"


class Shifted(nn.Module):
    """Adds a little to the first or to the second number."""

    def __init__(self, *shift: float) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] + self.shift


class Second(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


def test_a_layer_may_pass_on_noise_where_the_floor_by_luck_has_none() -> None:
    shifts = (0.0, 0.0), (0.0, 1e-5), (1e-5, 0.0)
    nets = (nn.Sequential(Shifted(*shift), Second()) for shift in shifts)
    sides = [Recorder(net, input_data=BATCHES[0]) for net in nets]
    difference = compare(*sides[:2], BATCHES, floor=sides[2], progress=False)
    assert difference["1"].num_different > 0
    assert difference["1"].noise == 0.0
    assert difference.first is None


def test_what_exceeds_noise() -> None:
    def figures(norm: float, largest: float, numbers: int = 8000) -> Figures:
        return Figures(numbers, 1, max_abs=largest, squares=norm**2, own=1.0)

    noise = Noise(0.1, 0.2)
    assert not exceeds(figures(0.39, 1.5), noise)
    assert exceeds(figures(0.41, 1.5), noise)
    assert exceeds(figures(0.39, 1.7), noise)
    # Four numbers vary more: three times as much is granted.
    assert not exceeds(figures(1.19, 4.7, numbers=4), noise)
    assert exceeds(figures(1.21, 4.7, numbers=4), noise)
    assert exceeds(figures(1.19, 4.9, numbers=4), noise)
    assert exceeds(figures(1e-9, 1e-9), Noise())
    assert exceeds(figures(1e-9, 1e-9), None)
    assert not exceeds(Figures(9), None)


def test_a_floor_that_is_none() -> None:
    net = recorder(original())
    with pytest.raises(ComparisonError, match="the floor is a Sequential"):
        compare(net, net, BATCHES, floor=original())  # type: ignore[arg-type]  # a slip

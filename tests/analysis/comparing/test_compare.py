"""Two networks side by side: the layer that makes the difference, and how far others are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from scio_recorder.errors import ComparisonError
from scio_recorder.tensors.structures import tensors
from tests.analysis.comparing.faults import FAULTS, batches, make_net, planted
from tests.zoo.base import Net


def recorder(net: nn.Module) -> Recorder:
    return Recorder(net, input_size=(2, 8))


Call = tuple[str, Any, Any]


def calls_of(net: nn.Module, x: Tensor) -> list[Call]:
    """Return the name, inputs and outputs of every call, in order of return, by plain hooks."""
    found: list[Call] = []
    pending: dict[str, list[Any]] = {}

    def copied(value: Any) -> list[Tensor]:
        return [leaf.clone() for leaf in tensors(value)]

    def before(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: pending.setdefault(name, []).append(copied((args, kwargs)))

    def after(name: str) -> Callable[..., None]:
        return lambda _, args, out: found.append((name, pending[name].pop(), copied(out)))

    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    return found


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_maker_of_a_difference_is_named(fault: str) -> None:
    net = make_net()
    other = planted(net, fault)
    difference = compare(recorder(net), recorder(other), batches(), progress=False)
    first = difference.first
    assert first.layer.name == FAULTS[fault][0]
    assert first.inputs_equal is True
    # The same by hooks: of all calls of a batch, the first to return that differs by itself.
    for start, x in enumerate(batches()):
        torch.manual_seed(7)
        pairs = list(zip(calls_of(net, x), calls_of(other, x), strict=True))
        made = [a for a, b in pairs if same(a[1], b[1]) and not same(a[2], b[2])]
        if made and fault != "dropout left on":
            assert first.layer.name == made[0][0]
            assert first.sample_id in range(5 * start, 5 * start + 5)
            break


def test_nothing_differs_from_a_copy() -> None:
    net = make_net()
    difference = compare(recorder(net), recorder(copy.deepcopy(net)), batches(), progress=False)
    assert difference.first is None
    # The list of blocks does not run, and one module does twice.
    assert len(difference) == len(list(net.modules()))
    assert not any(layer.differs for layer in difference.values())
    assert all(layer.max_abs == 0 and layer.cosine == 1 for layer in difference.values())


def test_figures_are_those_of_float64() -> None:
    net, other = make_net(), planted(make_net(), "sign")
    difference = compare(recorder(net), recorder(other), batches(), progress=False)
    own: dict[str, list[Tensor]] = {}
    others: dict[str, list[Tensor]] = {}
    for x in batches():
        for kept, one in ((own, net), (others, other)):
            for name, _, out in calls_of(one, x):
                if name != "shared":
                    kept.setdefault(name, []).extend(out)
    for name in own:
        a = torch.cat([leaf.double().reshape(-1) for leaf in own[name]])
        b = torch.cat([leaf.double().reshape(-1) for leaf in others[name]])
        layer = difference[name]
        assert layer.num_elements == a.numel()
        assert layer.max_abs == float((a - b).abs().max())
        assert layer.num_different == int((a != b).sum())
        apart = torch.where(a == b, 0.0, (a - b).abs() / a.abs())
        assert layer.max_rel == pytest.approx(float(apart.max()), rel=1e-12)
        norms = float((a - b).norm()), float(a.norm())
        assert layer.relative_error == pytest.approx(norms[0] / norms[1], rel=1e-12)
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0)
        assert layer.cosine == pytest.approx(float(cosine), rel=1e-12)


def loop(net: Any, x: Tensor) -> dict[str, Any]:
    """Returns a dictionary that holds itself."""
    made: dict[str, Any] = {"value": net.layer(x)}
    made["whole"] = made
    return made


def test_containers_that_hold_themselves_are_compared() -> None:
    net = nn.Sequential(Net(loop, layer=nn.Linear(4, 4)), Net(lambda _, given: given["value"] * 2))
    other = copy.deepcopy(net)
    x = torch.randn(2, 4)
    sides = [Recorder(one, input_data=x, verbose=0) for one in (net, other)]
    for side in sides:
        side.record("*")
    assert compare(*sides, [x]).first is None
    with torch.no_grad():
        other[0].layer.bias += 1
    first = compare(*sides, [x]).first
    assert first.layer.name == "0.layer"


@pytest.mark.parametrize(
    ("own", "others", "distance"),
    [
        (3, 5, 2.0),
        (0.5, 0.25, 0.25),
        ("a", "b", float("inf")),
        (True, False, 1.0),
        ("a", 1, None),
        (1 << 80, 0.5, None),
    ],
)
def test_plain_values_that_a_layer_returns_are_compared(
    own: Any, others: Any, distance: float | None, tmp_path: Path
) -> None:
    nets = (Net(lambda net, x: (x, {"plain": ["same", net.value]}), value=v) for v in (own, others))
    sides = [Recorder(net, input_size=(2, 3)) for net in nets]
    difference = compare(*sides, [torch.ones(2, 3)])
    first = difference.first
    assert (first.layer.name, first.inputs_equal) == ("", True)
    assert (first.reference, first.candidate, first.index) == (own, others, ())
    if distance is not None:
        assert difference[""].max_abs == distance
    assert (difference[""].num_different, difference[""].num_elements) == (1, 8)
    assert repr(own).strip("'") in str(difference)
    difference.report(tmp_path / "page.html")


def test_a_compiled_recorder_that_records_nothing_is_refused() -> None:
    one, two = (recorder(make_net()) for _ in range(2))
    with pytest.raises(ComparisonError, match=r"the candidate .* records no layer.*record\("):
        compare(one, torch.compile(two, backend="eager"), batches())


@pytest.mark.campaign
def test_layers_that_a_compiled_recorder_records_are_compared() -> None:
    one, two = (recorder(make_net()) for _ in range(2))
    two.record(lambda layer: layer.name != "")
    difference = compare(one, torch.compile(two, backend="eager"), batches())
    assert difference.first is None
    assert "1 of the reference, (root)" in str(difference)


class Told(nn.Module):
    """Tells the module inside it what to do, which that module may follow or not."""

    def __init__(self, told: Any) -> None:
        super().__init__()
        self.inner, self.told = Obeying(), told

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, told=self.told)


class Obeying(nn.Module):
    def forward(self, x: Tensor, *, told: Any = None) -> Tensor:
        return x.to(told).to(x.dtype) if isinstance(told, torch.dtype) else x * len(str(told))


class Way(Enum):
    SUM = "sum"
    PRODUCT = "product"


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (torch.float32, torch.bfloat16),
        (slice(0, 2), slice(0, 13)),
        (Way.SUM, Way.PRODUCT),
        (b"a", b"bc"),
        (np.array(["a"]), np.array(["bc"])),
        (1 << 80, 1j),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_tells_a_layer_otherwise_makes_the_difference(own: Any, others: Any) -> None:
    x = torch.rand(2, 3)
    sides = [Recorder(Told(told), input_size=(2, 3)) for told in (own, others)]
    difference = compare(*sides, [x])
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("", True)
    assert difference["inner"].inputs_equal is False
    assert compare(sides[0], sides[0], [x])["inner"].inputs_equal is True


def test_a_tolerance_is_one_for_precisions_too() -> None:
    sides = [Recorder(Told(told), input_size=(2, 3)) for told in (torch.float32, torch.bfloat16)]
    assert compare(*sides, [torch.rand(2, 3)], rtol=1e-9)["inner"].inputs_equal is True


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_compared(layout: torch.layout) -> None:
    def ragged(net: Any, x: Tensor) -> list[Tensor]:
        parts = [row[: 2 + number] for number, row in enumerate(x)]
        nested = torch.nested.nested_tensor(parts, layout=layout)
        return list(net.two(net.one(nested)).unbind())

    net, x = Net(ragged, one=nn.Linear(4, 4), two=nn.Linear(4, 4)), torch.randn(3, 5, 4)
    x[:2, :, 3] = 0

    def compared(other: nn.Module) -> Any:
        both = (Recorder(one, input_data=x) for one in (net, other))
        return compare(*both, [x], progress=False)

    other = copy.deepcopy(net)
    assert compared(other).first is None
    with torch.no_grad():
        other.two.weight[1, 3] += 1
    first = compared(other).first
    assert (first.layer.name, first.sample_id, first.inputs_equal) == ("two", 0, True)
    with torch.no_grad():
        other.one.weight[2, 3] += 1
    first = compared(other).first
    # The others have a zero there.
    assert (first.layer.name, first.sample_id, first.index) == ("one", 2, (0, 2))
    assert first.reference == net.one(x)[2, 0, 2].item()

"""Which layers of two sides belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from scio_recorder.errors import ComparisonError
from tests.zoo.base import Net

X = [torch.randn(3, 4)]


def named(*names: str, **modules: nn.Module) -> nn.Sequential:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, nn.Linear(4, 4))
    for name, module in modules.items():
        net.add_module(name, module)
    for number, parameter in enumerate(net.parameters()):
        torch.manual_seed(number)
        nn.init.normal_(parameter)
    return net


def recorder(net: nn.Module) -> Recorder:
    return Recorder(net, input_size=(1, 4))


def deep(layers: str, inner: str) -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in getattr(net, layers):
            x = layer(x)
        return x

    return Net(forward, **{layers: nn.ModuleList(named(inner) for _ in range(3))})


PAIRS = [
    ({"layers.*": "h.*"}, "fc", "fc", "layers.1.fc", "h.1.fc"),
    ({"layers.*.fc": "h.*.linear", "layers.*": "h.*"}, "fc", "linear", "layers.2.fc", "h.2.linear"),
    ({"layers.*": "h.*", "layers.*.fc": "h.*.linear"}, "fc", "linear", "layers.0", "h.0"),
    ({"layers.?.fc": "h.?.linear"}, "fc", "linear", "layers.0.fc", "h.0.linear"),
]


@pytest.mark.parametrize(("match", "one", "two", "name", "partner"), PAIRS)
def test_globs(match: dict[str, str], one: str, two: str, name: str, partner: str) -> None:
    reference, candidate = recorder(deep("layers", one)), recorder(deep("h", two))
    difference = compare(reference, candidate, X, match=match)
    assert difference[name].candidate_name == partner
    assert difference.first is None
    assert difference[""].name == difference[""].candidate_name == ""


def test_names_that_are_not_mentioned_match_themselves() -> None:
    difference = compare(
        recorder(named("a", "b", "c")), recorder(named("a", "x", "c")), X, match={"b": "x"}
    )
    partners = [layer.candidate_name for layer in difference.values()]
    assert partners == ["a", "x", "c", ""]
    assert difference.unmatched == ((), ())


def test_names_can_be_swapped() -> None:
    one, two = named("a", "b"), named("a", "b")
    two.a, two.b = one.b, one.a
    swapped = compare(recorder(one), recorder(two), X, match={"a": "b", "b": "a"})
    assert [layer.candidate_name for layer in swapped.values()] == ["b", "a", ""]


def test_what_has_no_partner_is_said() -> None:
    difference = compare(recorder(named("a", "b")), recorder(named("a", "c", "d")), X)
    assert difference.unmatched.reference == ("b",)
    assert difference.unmatched.candidate == ("c", "d")
    assert [layer.name for layer in difference.values()] == ["a", ""]


def test_layers_that_were_not_recorded_are_not_alone() -> None:
    reference = recorder(named("a", "b"))
    reference.record("a")
    difference = compare(reference, recorder(named("a", "b")), X)
    assert list(difference) == [(1, 1)]
    assert difference.unmatched == ((), ())


@pytest.mark.parametrize("match", [None, {"a": "y"}])
def test_nothing_in_common(match: dict[str, str] | None) -> None:
    reference, candidate = recorder(named("a", "b")), recorder(named("x1", "x2"))
    with pytest.raises(ComparisonError) as caught:
        compare(reference, candidate, X, match=match)
    for part in ("no layer in common", "'a', 'b'", "'x1', 'x2'", "match={'a': 'x1'}"):
        assert part in str(caught.value)


def test_a_partner_that_the_candidate_does_not_have() -> None:
    reference, candidate = recorder(named("a", "b")), recorder(named("a", "b"))
    with pytest.raises(ComparisonError, match=r"'bb', which matches no name of the candidate.*'b'"):
        compare(reference, candidate, X, match={"a": "bb"})


@pytest.mark.parametrize(
    ("match", "parts"),
    [
        ({"aa": "x"}, ["'aa'", "matches no name", "'a'"]),
        ({"a.*": "x"}, ["the same number of * on both"]),
        ({1: "x"}, ["qualified names or globs"]),
        ([("a", "x")], ["mapping", "list"]),
    ],
)
def test_a_match_that_is_none(match: Any, parts: list[str]) -> None:
    with pytest.raises(ComparisonError) as caught:
        compare(recorder(named("a")), recorder(named("a")), X, match=match)
    assert all(part in str(caught.value) for part in parts)


def repeats(times: int) -> Recorder:
    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = net.fc(x)
        return x

    return recorder(Net(forward, fc=named("fc").fc))


def test_calls_pair_in_their_order() -> None:
    difference = compare(repeats(2), repeats(2), X)
    pairs = [(layer.label, layer.candidate_label) for layer in difference.values()]
    assert pairs == [((1, 1), (1, 1)), ((1, 2), (1, 2)), ((0, 1), (0, 1))]
    assert difference.first is None


def test_another_number_of_calls_is_an_error_of_the_layer() -> None:
    difference = compare(repeats(2), repeats(3), X)
    for label in ((1, 1), (1, 2)):
        assert "called 2 times in the reference and 3 times" in str(difference[label].error)
        assert difference[label].differs
    # The module that calls it another number of times is what makes the difference.
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("", True)


def test_other_shapes_are_an_error_of_the_layer() -> None:
    wide = named("a", b=nn.Linear(4, 5), c=nn.Linear(5, 4))
    difference = compare(recorder(named("a", "b", "c")), recorder(wide), X)
    assert not difference["a"].differs
    assert difference["b"].error == "shape (3, 4) in the reference and (3, 5) in the candidate"
    assert difference["b"].differs
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("b", True)
    assert difference.first.error == difference["b"].error
    assert difference["c"].inputs_equal is False

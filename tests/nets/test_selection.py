"""Selectors: each kind finds what it names, and says what is wrong where it finds nothing."""

from __future__ import annotations

import fnmatch
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import LayerNotFoundError, SelectorTypeError
from scio_recorder.layer import Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.labelling.label import label_net
from scio_recorder.nets.selection import select
from scio_recorder.reductions import Mean
from tests.harness import recorder
from tests.zoo.base import Net, linear


def _forward(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(net.act(net.stem(x)) + net.act(net.blocks[1](net.blocks[0](x))))


NET = Net(
    _forward,
    stem=nn.Sequential(linear(), nn.Tanh()),
    act=nn.ReLU(),
    blocks=nn.ModuleList([linear(), nn.Sequential(linear(), nn.ReLU())]),
    alias=None,
    head=linear(),
    unused=nn.Conv1d(1, 1, 1),
)
NET.alias = NET.stem[0]
ARCHITECTURE = label_net(NET, input_size=(2, 4))[1]
LAYERS = tuple(ARCHITECTURE.values())
RAN = tuple(layer for layer in LAYERS if layer.executed)
NAMES = tuple(name for name, _ in NET.named_modules(remove_duplicate=False))


def by_hand(keep: Callable[[Layer], Any]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(layer.label for layer in RAN if keep(layer)))


def names_of(layer: Layer) -> list[str]:
    return [n for n, m in NET.named_modules(remove_duplicate=False) if m is layer.module]


@pytest.mark.parametrize(
    ("selector", "keep"),
    [
        ((1, 2), lambda layer: layer.label == (1, 2)),
        ("1-2", lambda layer: layer.label == (1, 2)),
        (" 1 - 2 ", lambda layer: layer.label == (1, 2)),
        ((np.int64(1), torch.tensor(2)), lambda layer: layer.label == (1, 2)),
        (LAYERS[1].label, lambda layer: layer is LAYERS[1]),
        ("", lambda layer: layer.module is NET),
        ("act", lambda layer: layer.module is NET.act),
        ("stem.0", lambda layer: layer.module is NET.stem[0]),
        ("alias", lambda layer: layer.module is NET.stem[0]),
        ("blocks.*", lambda layer: layer.name.startswith("blocks.")),
        ("*.0", lambda layer: any(name.endswith(".0") for name in names_of(layer))),
        ("a*s", lambda layer: layer.module is NET.alias),
        ("stem.[01]", lambda layer: {"stem.0", "stem.1"} & {*names_of(layer)}),
        ("hea?", lambda layer: layer.name == "head"),
        ("*", lambda layer: True),
        (re.compile(r"^blocks\.\d$"), lambda layer: layer.name in ("blocks.0", "blocks.1")),
        (re.compile("ALIAS", re.IGNORECASE), lambda layer: layer.module is NET.alias),
        (nn.ReLU, lambda layer: isinstance(layer.module, nn.ReLU)),
        (nn.Module, lambda layer: True),
        (NET.act, lambda layer: layer.module is NET.act),
        (NET, lambda layer: layer.module is NET),
        (lambda layer: layer.depth == 2, lambda layer: layer.depth == 2),
        (lambda layer: np.bool_(layer.num_params > 0), lambda layer: layer.num_params > 0),
    ],
)
def test_each_kind_of_selector(selector, keep):
    expected = by_hand(keep)
    assert expected
    assert select(ARCHITECTURE, [selector]) == expected


def test_nothing_selects_nothing():
    assert select(ARCHITECTURE, []) == ()


def test_the_result_is_made_of_plain_tuples():
    chosen = select(ARCHITECTURE, ["*"])
    assert {type(label) for label in chosen} == {tuple}


_LABELS = st.sampled_from([layer.label for layer in RAN])
_EXACT_NAMES = st.sampled_from([name for name in NAMES if ARCHITECTURE.labels_of(name)])
_SELECTORS = st.one_of(
    _LABELS,
    _LABELS.map(str),
    _EXACT_NAMES,
    _EXACT_NAMES.map(lambda name: re.compile(re.escape(name))),
    st.sampled_from([layer.module for layer in RAN]),
    st.sampled_from([type(layer.module) for layer in RAN]),
    st.sampled_from(["*", "stem*", "*.0", "[a-h]*"]),
)


@given(st.lists(_SELECTORS, max_size=6))
def test_a_selection_is_the_sorted_union_of_its_parts(selectors):
    union = {label for selector in selectors for label in select(ARCHITECTURE, [selector])}
    assert select(ARCHITECTURE, selectors) == tuple(sorted(union))
    assert all(ARCHITECTURE[label].executed for label in union)


@given(st.lists(_SELECTORS, max_size=5))
def test_a_selection_selects_itself(selectors):
    chosen = select(ARCHITECTURE, selectors)
    assert select(ARCHITECTURE, chosen) == chosen
    assert select(ARCHITECTURE, [f"{depth}-{index}" for depth, index in chosen]) == chosen


@given(st.text(alphabet="abcehklmst.*?[01]!", max_size=8))
def test_globs_are_those_of_fnmatch(pattern):
    matching = [
        layer.label
        for layer in RAN
        if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in names_of(layer))
    ]
    if matching:
        assert select(ARCHITECTURE, [pattern]) == tuple(sorted(matching))
    else:
        with pytest.raises(LayerNotFoundError):
            select(ARCHITECTURE, [pattern])


@given(st.one_of(st.integers(), st.floats(), st.binary(), st.none(), st.lists(st.integers())))
def test_anything_else_is_an_error_of_ours(selector):
    with pytest.raises(SelectorTypeError):
        select(ARCHITECTURE, [selector])


@given(st.tuples(st.integers(-3, 9), st.integers(-3, 9)))
def test_a_label_is_found_or_is_an_error_of_ours(label):
    if label in [layer.label for layer in RAN]:
        assert select(ARCHITECTURE, [label]) == (label,)
    else:
        with pytest.raises(LayerNotFoundError):
            select(ARCHITECTURE, [label])


@pytest.mark.parametrize(
    ("selector", "parts"),
    [
        (3, ["record((1, 3))", "record(1, 3)"]),
        ([(1, 2)], ["unpack it with *"]),
        ({"act"}, ["unpack it with *"]),
        ((1, 2, 3), ["no label", "in its own parentheses"]),
        ([1, 3], ["record((1, 2), (1, 3))"]),
        ({"act": 1}, ["unpack it with *"]),
        (int, ["int", "module type"]),
        (1.5, ["1.5", "qualified name"]),
        (re.compile(b"act"), ["drop the b"]),
        (lambda layer: "yes", ["'yes'", "0-1 (root) (Net)", "True or False"]),
        (lambda layer: None, ["None", "True or False"]),
        (RAN[1], ["is a Layer", "layer.label", str(tuple(RAN[1].label))]),
    ],
)
def test_what_can_not_select(selector, parts):
    with pytest.raises(SelectorTypeError) as caught:
        select(ARCHITECTURE, [selector])
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_a_layer_is_no_key() -> None:
    with pytest.raises(LayerNotFoundError, match=r"is a Layer: .* layer\.label"):
        ARCHITECTURE[RAN[1]]


@pytest.mark.parametrize(
    ("selector", "parts"),
    [
        ((1, 99), ["1-99", "from 1-1 to 1-"]),
        ("1-99", ["1-99", "from 1-1 to 1-"]),
        ((7, 1), ["7-1", "depths go from 0 to"]),
        ("stem.O", ["'stem.O'", "'stem.0'"]),
        ("stme", ["'stem'"]),
        ("step*", ["'step*'", "'stem'"]),
        (re.compile("xyz"), ["xyz", "no name matches"]),
        (nn.Conv3d, ["Conv3d", "Linear"]),
        (nn.ReLU(), ["ReLU", "not a module of this net"]),
        (lambda layer: False, ["matches no layer"]),
        (lambda layer: layer.nothing, ["AttributeError", "0-1 (root) (Net)"]),
        ("blocks", ["'blocks'", "did not run at labelling", "record(*rnet.net.blocks)"]),
        ("unused", ["'unused'", "did not run at labelling"]),
        (NET.blocks, ["ModuleList", "did not run at labelling"]),
        (nn.ModuleList, ["ModuleList", "only layers that did not run"]),
        (re.compile("^blocks$"), ["blocks", "only layers that did not run"]),
        ("block[s]", ["block[s]", "only layers that did not run"]),
        (ARCHITECTURE["blocks"].label, ["did not run at labelling"]),
        ("layer4.*", ["'stem'"]),
        ("stems.*", ["'stem'"]),
        ("block.*", ["'blocks'"]),
        ("*.nothing.*", ["there are '"]),
        (re.compile("layer4"), ["'stem'"]),
        ("cat", ["'"]),
    ],
)
def test_what_selects_nothing(selector, parts):
    with pytest.raises(LayerNotFoundError) as caught:
        select(ARCHITECTURE, [selector])
    for part in parts:
        assert part in str(caught.value)


def test_predicates_never_see_layers_that_did_not_run():
    seen = []
    select(ARCHITECTURE, [lambda layer: seen.append(layer) or True])
    assert seen == list(RAN)


def test_an_exact_name_with_the_characters_of_a_glob():
    net = nn.Sequential()
    net.add_module("a[0]", nn.ReLU())
    net.add_module("a0", nn.ReLU())
    architecture = label_net(net, input_size=(2, 4))[1]
    assert select(architecture, ["a[0]"]) == ((1, 1),)
    assert select(architecture, ["a[[]0]"]) == ((1, 1),)
    assert select(architecture, ["a*"]) == ((1, 1), (1, 2))


@pytest.mark.parametrize(
    "use",
    [
        lambda rnet: rnet.record("1-2"),
        lambda rnet: rnet.record((1, 1), "1-2"),
        lambda rnet: rnet.record("1-2/linear"),
        lambda rnet: rnet.operations("1-2"),
        lambda rnet: rnet.activations["1-2"],
        lambda rnet: rnet(torch.ones(2, 3), activation_postproc={"1-2": torch.neg}),
        lambda rnet: rnet.collect([torch.ones(2, 3)], reduce={"1-2": Mean()}),
    ],
)
def test_a_name_that_is_the_label_of_another_layer(use: Callable[[Recorder], Any]) -> None:
    names = ["0-1", "1-1", "1-2", "1-3"]
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()]
    net = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))
    rnet = recorder(net, "*", input_size=(1, 3))
    # The root is 0-1, and a child has that name.
    for ambiguous, label in (("1-2", (1, 2)), ("0-1", (0, 1))):
        with pytest.raises(LayerNotFoundError, match=re.escape(f"write {label}, for the name")):
            rnet.architecture.resolve(ambiguous)
    with pytest.raises(LayerNotFoundError, match=re.escape("'[1]-2'")):
        use(rnet)
    output = rnet(torch.ones(2, 3))
    assert torch.equal(rnet.activations[net.get_submodule("1-3")], output)
    assert rnet.activations[(1, 2)] is not None
    rnet.record("[1]-2")
    assert rnet.recording == ((1, 3),)
    rnet.record("1-4")
    assert rnet.recording == ((1, 4),)


def test_a_name_that_is_the_label_of_its_own_layer():
    net = nn.Sequential(OrderedDict([("1-1", nn.ReLU()), ("1-2", nn.Tanh())]))
    rnet = recorder(net, "1-2", input_size=(1, 3))
    assert rnet.recording == ((1, 2),)


def test_without_modules_names_and_labels_still_select():
    read = Architecture.from_dict(ARCHITECTURE.to_dict())
    assert select(read, ["alias", "*.1", (0, 1)]) == select(ARCHITECTURE, ["alias", "*.1", (0, 1)])
    assert select(read, [nn.ReLU]) == select(ARCHITECTURE, [nn.ReLU])
    with pytest.raises(LayerNotFoundError, match="read from disk"):
        select(read, [NET.act])


def test_the_name_of_a_type_is_told_from_the_type() -> None:
    with pytest.raises(LayerNotFoundError, match="give the class Linear and not its name"):
        select(ARCHITECTURE, ["Linear"])
    with pytest.raises(LayerNotFoundError) as caught:
        select(ARCHITECTURE, ["Linera"])
    assert "give the class" not in str(caught.value)


def test_a_glob_that_lacks_its_beginning_is_offered_with_it() -> None:
    net = nn.Sequential(OrderedDict(body=nn.Sequential(OrderedDict(h=nn.Sequential(nn.ReLU())))))
    _, architecture = label_net(net, input_size=(1, 2))
    with pytest.raises(LayerNotFoundError, match=r"closest name is 'body\.h\.0'"):
        select(architecture, ["h.*"])
    with pytest.raises(LayerNotFoundError, match=r"closest name is 'body\.h'"):
        select(architecture, ["hh"])
    with pytest.raises(LayerNotFoundError, match=r"closest name is 'body\.h'"):
        select(architecture, ["g.*.hh"])


def test_the_closest_names_come_first() -> None:
    net = nn.Sequential(OrderedDict((f"layer{i}", nn.Sequential(nn.ReLU())) for i in range(1, 7)))
    _, architecture = label_net(net, input_size=(1, 2))
    for wanted, offered in {
        "layers.*": "'layer6', 'layer5', 'layer4', 'layer3'",
        "layr4.*": "'layer4', 'layer4.0', 'layer6', 'layer5'",
        "laayer5": "'layer5', 'layer5.0', 'layer6', 'layer4'",
    }.items():
        with pytest.raises(LayerNotFoundError) as caught:
            select(architecture, [wanted])
        assert str(caught.value).endswith(f"the closest names are {offered}")


class Conv1D(nn.Module):
    """A linear layer of a class of its own, whose weight is transposed, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def resembling() -> nn.Sequential:
    layers = [Conv1D(4, 6), nn.LayerNorm(6), Conv1D(6, 6), nn.Linear(6, 3)]
    return nn.Sequential(nn.Embedding(9, 4), *layers)


@pytest.mark.parametrize("selectors", [[nn.Linear], [nn.Linear, nn.LayerNorm], ["4", nn.Linear]])
@pytest.mark.parametrize("calls", ["labelled", "any"])
def test_linear_layers_of_other_classes_are_pointed_out(selectors: Any, calls: Any) -> None:
    rnet = Recorder(resembling(), input_data=torch.ones(2, 5).long(), verbose=0)
    with pytest.warns(UserWarning, match=r"misses 2 layers .* 1-2 1 \(Conv1D\)") as said:
        rnet.record(*selectors, calls=calls)
    assert "4" in [rnet.architecture[label].name for label in rnet.recording]
    # What the warning says to write has them all.
    written = re.findall(r"record\((.*?)\)(?:,|$)", str(said[0].message))
    rnet.record(*eval(f"[{written[0]}]"), calls=calls)
    assert {"1", "3", "4"} == {rnet.architecture[label].name for label in rnet.recording}
    assert written[1] == "'1'"


@pytest.mark.parametrize(
    "selectors",
    [[nn.LayerNorm], [nn.Linear, Conv1D], [nn.Linear, "1", "3"], ["4"], ["*"], [nn.Embedding]],
)
def test_a_choice_that_misses_no_linear_layers_is_silent(selectors: Any) -> None:
    Recorder(resembling(), input_data=torch.ones(2, 5).long(), verbose=0).record(*selectors)


def test_one_other_matrix_among_many_linear_layers_is_no_surprise() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 4), nn.Linear(4, 4), nn.Conv1d(1, 1, 1))
    Recorder(net, input_size=(1, 1, 4), verbose=0).record(nn.Linear)


def long(blocks: int) -> Recorder:
    net = nn.Sequential(OrderedDict(h=nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))))
    return Recorder(net, input_size=(1, 4), verbose=0)


def test_a_question_mark_that_leaves_out_later_blocks_is_pointed_out() -> None:
    rnet = long(12)
    with pytest.warns(UserWarning, match=r"'h\.\?' misses h\.10, h\.11, since \? stands for one"):
        rnet.record("h.?")
    assert len(rnet.recording) == 10


def test_a_question_mark_that_leaves_out_operations_of_later_blocks_is_pointed_out() -> None:
    rnet = long(12)
    with pytest.warns(UserWarning, match=r"'h\.\?/linear' misses h\.10/linear, h\.11/linear,"):
        rnet.record("h.?/linear")
    rnet.record("h.?/linear", "h.??/linear:0")
    rnet.record("h.?/linear", "h.??/linear", calls="any")
    assert len(rnet.recording) == 12


def test_a_question_mark_that_leaves_recorded_layers_unchanged_is_pointed_out() -> None:
    rnet, x = long(12), torch.ones(1, 4)
    rnet.record("h.*")
    with pytest.warns(UserWarning, match=r"'h\.\?' misses h\.10, h\.11, .* add 'h\.\?\?'"):
        rnet(x, activation_postproc={"h.?": torch.zeros_like})
    with pytest.warns(UserWarning, match=r"'h\.\?' misses h\.10, h\.11"):
        rnet.collect([x], transform={"h.?": lambda activation, batch: activation}, progress=False)
    rnet(x, activation_postproc={"h.?": torch.zeros_like, "h.??": torch.ones_like})
    rnet.record("h.?", "h.10", "h.11", "h.9")
    rnet(x, activation_postproc={"h.?": torch.zeros_like, "h.10": abs, "h.11": abs})
    rnet.record("h.9")
    rnet(x, activation_postproc={"h.?": torch.zeros_like})


@pytest.mark.parametrize("selectors", [["h.?", "h.1?"], ["h.?", "h.??"], ["h.*"], ["h.1?"]])
def test_globs_that_take_numbers_of_two_digits_are_silent(selectors: Any) -> None:
    long(12).record(*selectors)


def test_a_question_mark_is_right_for_ten_blocks() -> None:
    long(10).record("h.?")

"""Labels, keys, fingerprints, copies, and reading an architecture that someone else wrote."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.layer import Label, Layer, TensorSpec, describe, shapes_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.labelling.label import label_net
from tests.rotation import one_in
from tests.zoo import CASES
from tests.zoo.base import Net, linear

Pair = namedtuple("Pair", "left right")


def build() -> Net:
    return Net(
        lambda net, x: net.head(net.act(net.stem(x)) + net.act(x)),
        stem=nn.Sequential(linear(), nn.BatchNorm1d(4)),
        act=nn.ReLU(),
        idle=nn.ModuleList([linear()]),
        head=linear(),
    )


def label(net: nn.Module, batch: int = 2) -> Architecture:
    return label_net(net, input_size=(batch, 4))[1]


NET = build()
ARCHITECTURE = label(NET)


@given(st.integers(0, 99), st.integers(1, 99), st.integers(0, 99), st.integers(1, 99))
def test_a_label_is_the_tuple_and_its_printed_form(depth, index, other_depth, other_index):
    label, other = Label((depth, index)), (other_depth, other_index)
    assert label == (depth, index)
    assert (depth, index) == label
    assert label == f"{depth}-{index}" == str(label)
    assert (label == other) == ((depth, index) == other)
    assert (label != other) == ((depth, index) != other)
    assert (label < other) == ((depth, index) < other)
    assert hash(label) == hash((depth, index))
    assert repr(label) == repr((depth, index))
    assert pickle.loads(pickle.dumps(label)) == label
    assert type(copy.deepcopy(label)) is Label
    assert label != "something"


@pytest.mark.parametrize("key", [(1, 2), "1-2", "act2", (np.int32(1), np.int32(2))])
def test_keys_of_a_layer(key):
    architecture = label(nn.Sequential(nn.Tanh(), nn.ReLU()))
    if key == "act2":
        key = "1"
    assert architecture[key] is architecture.get(key)
    assert key in architecture
    assert architecture[key].type_name == "ReLU"
    assert architecture.resolve(key) == (1, 2)


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ((1, 42), ["1-42", "1-1 to 1-"]),
        ("9-1", ["9-1", "depths go from 0 to 2"]),
        ("haed", ["'haed'", "'head'"]),
        ("act", ["ambiguous", "2 calls", "1-2", "1-3"]),
        (1, ["1 names no layer", "write (1, 3)"]),
        (("1", 2), ["'1'"]),
        ((1, 2, 3), ["(1, 2, 3)"]),
        (None, ["None"]),
        ([1, 2], ["[1, 2]"]),
        ("idle.0", ["'idle.0'", "did not run"]),
    ],
)
def test_keys_that_name_no_layer(key, parts):
    with pytest.raises(LayerNotFoundError) as caught:
        ARCHITECTURE[key]
    for part in parts:
        assert part in str(caught.value)
    assert key not in ARCHITECTURE
    assert ARCHITECTURE.get(key) is None


def test_a_name_that_looks_like_a_label():
    net = nn.Sequential()
    net.add_module("7-7", nn.ReLU())
    net.add_module("1-1", nn.Tanh())
    architecture = label(net)
    assert architecture["7-7"].type_name == "ReLU"
    assert architecture[1, 1].type_name == "ReLU"
    with pytest.raises(LayerNotFoundError, match=r"label of .*ReLU.* the name of .*Tanh"):
        architecture["1-1"]


def test_calls_and_names_of_modules():
    assert ARCHITECTURE.labels_of("act") == ((1, 2), (1, 3))
    assert ARCHITECTURE.calls(NET.act) == ((1, 2), (1, 3))
    assert ARCHITECTURE.labels_of("idle") == ()
    assert ARCHITECTURE.labels_of("nothing") == ()
    assert ARCHITECTURE.calls(nn.ReLU()) == ()
    assert ARCHITECTURE.names == tuple(name for name, _ in NET.named_modules())


def test_printed_it_shows_labels_names_types_and_shapes():
    lines = str(ARCHITECTURE).splitlines()
    assert len(lines) == len(ARCHITECTURE)
    for layer, line in zip(ARCHITECTURE.values(), lines, strict=True):
        assert f"{layer.label} {layer.type_name}" in line
        assert layer.name in line
        assert str(layer.output_shape) in line or "did not run" in line


def test_the_fingerprint_is_a_hash_over_what_gives_labels_their_meaning():
    rows = [
        [str(x.label), x.name, x.type_name, x.call, x.executed, x.num_params]
        for x in ARCHITECTURE.values()
    ]
    text = json.dumps(rows, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == ARCHITECTURE.fingerprint


def test_the_batch_size_does_not_matter_to_the_fingerprint():
    assert label(build(), 3) == ARCHITECTURE
    assert label(build(), 3).fingerprint == ARCHITECTURE.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"type_name": "Other"},
        {"call": 7},
        {"executed": False, "completion": None},
        {"num_params": 1},
        {"label": Label((1, 9))},
    ],
)
def test_anything_else_does(change):
    first, *others = ARCHITECTURE.values()
    changed = Architecture([dataclasses.replace(first, **change), *others], {})
    assert changed.fingerprint != ARCHITECTURE.fingerprint
    assert changed != ARCHITECTURE


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_find_the_calls_of_their_own_modules(duplicate):
    net = nn.Sequential(linear(), nn.ReLU())
    copied_net, copied = duplicate((net, label(net)))
    assert copied.fingerprint == label(net).fingerprint
    assert copied.calls(copied_net[1]) == ((1, 2),)
    assert copied.calls(net[1]) == ()


@pytest.mark.parametrize("case", one_in(6, CASES), ids=repr)
def test_it_survives_json(case):
    args, kwargs = case.inputs(0)
    architecture = label_net(
        case.fresh(), input_data=list(args), force_static_flow=False, **kwargs
    )[1]
    data = json.loads(json.dumps(architecture.to_dict()))
    read = Architecture.from_dict(data)
    assert read.fingerprint == architecture.fingerprint
    assert read.names == architecture.names
    for ours, theirs in zip(architecture.values(), read.values(), strict=True):
        for field in dataclasses.fields(Layer):
            if field.name not in ("module", "input_shape", "output_spec", "called_as"):
                assert getattr(ours, field.name) == getattr(theirs, field.name)
        # A named tuple comes back as the tuple that it equals.
        assert theirs.output_shape == ours.output_shape
        assert theirs.output_spec == ours.output_spec
        assert theirs.input_shape == ours.input_shape
        assert theirs.module is None
    assert read.to_dict() == architecture.to_dict()


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = data.items() if isinstance(data, dict) else enumerate(data)
    nested = [(*path, key) for key, _ in children]
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        if isinstance(value, dict | list):
            nested += paths(value, (*path, key))
    return nested


WRITTEN = json.loads(json.dumps(ARCHITECTURE.to_dict()))
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


# In place of a value: the value is missing.
MISSING = object()


@given(st.sampled_from(paths(WRITTEN)), _JUNK | st.just(MISSING))
@settings(max_examples=40)
def test_whatever_is_written_over_a_value_is_refused_or_harmless(path, junk):
    data = copy.deepcopy(WRITTEN)
    *outer, last = path
    place = data
    for key in outer:
        place = place[key]
    place[last] = junk
    if junk is MISSING:
        del place[last]
    try:
        read = Architecture.from_dict(data)
    except RecordingError:
        return
    # Shapes and aliases are not part of the fingerprint; what is must be intact.
    assert read.fingerprint == ARCHITECTURE.fingerprint
    assert str(read)


@given(_JUNK)
def test_junk_is_refused(junk):
    with pytest.raises(RecordingError):
        Architecture.from_dict(junk)


def deeply_nested(depth: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"shape": [1], "dtype": "float32"}
    for _ in range(depth):
        spec = {"list": [spec]}
    return spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=2), "format 2 is unknown"),
        (lambda data: data.update(fingerprint="0" * 64), "was changed"),
        (lambda data: data["layers"][0].update(num_params=True), "of type int, not True"),
        (lambda data: data["layers"][0].update(num_params=-1), "was changed"),
        (lambda data: data["layers"][0].update(label=[0, 1, 2]), "too many values"),
        (lambda data: data["layers"][1].update(label=[0, 1]), "same label"),
        (lambda data: data["layers"][0].update(completion=0), "not an order"),
        (lambda data: data["layers"][0].update(executed=False), "has a completion"),
        (lambda data: data["names"].update(x=[[5, 5]]), "which no layer has"),
        (lambda data: data["layers"][0].update(output_spec=deeply_nested(9999)), "deep"),
        (
            lambda data: data["layers"][0].update(output_spec={"shape": [1], "dtype": "save"}),
            "unknown dtype 'save'",
        ),
        (
            lambda data: data["layers"][0].update(output_spec={"shape": [2**80], "dtype": "int8"}),
            "out of range",
        ),
    ],
)
def test_damage_is_named(change, message):
    data = copy.deepcopy(WRITTEN)
    change(data)
    with pytest.raises(RecordingError, match=message):
        Architecture.from_dict(data)


_SPECS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.bool, torch.complex64]),
)
_STRUCTURES = st.recursive(
    _SPECS | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


@given(_STRUCTURES)
def test_structures_of_any_kind_survive_json(spec):
    layer = dataclasses.replace(ARCHITECTURE[0, 1], output_spec=spec, completion=0)
    data = json.loads(json.dumps(Architecture([layer], {}).to_dict()))
    assert Architecture.from_dict(data)[0, 1].output_spec == spec


def test_descriptions_hold_no_tensors_and_nothing_alive():
    described = describe({"a": Pair(torch.ones(2, 3), object()), "b": [torch.ones(1).long(), "x"]})
    assert described == {
        "a": (TensorSpec((2, 3), torch.float32), None),
        "b": [TensorSpec((1,), torch.int64), None],
    }
    assert described["a"].left.nbytes == 24
    assert shapes_of(described) == {"a": ((2, 3), None), "b": [(1,), None]}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_dimensions_without_a_length(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    assert describe(nested).shape == (2, -1, 4)
    assert describe(nested).nbytes == 0

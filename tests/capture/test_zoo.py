"""The zoo is what it says, the oracle can fail, and every net can be labelled without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.harness import MODES, make_recorder, run_pass, trace
from tests.oracle import Leaf, Node, Watch, differences, freeze, leaves, same_bits, tensors
from tests.zoo import transformers as transformers_zoo
from tests.zoo.base import Case, Net, linear

ALL = (*zoo.CASES, *transformers_zoo.CASES)
TRANSFORMERS = {case.name for case in transformers_zoo.CASES}


def each_case(first: int = 0) -> pytest.MarkDecorator:
    """Take every eighth net, from the first one on, and all of them in a campaign."""
    marks = [[] if index % 8 == first else [pytest.mark.campaign] for index in range(len(ALL))]
    cases = zip(ALL, marks, strict=True)
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=repr(case), marks=own) for case, own in cases]
    )


def test_names_are_unique() -> None:
    assert len({case.name for case in ALL}) == len(ALL)
    assert len(zoo.CASES) >= 60
    assert len(transformers_zoo.CASES) >= 25


@each_case(1)
def test_builds_are_equal_and_inputs_differ(case: Case) -> None:
    one, two = freeze(case.fresh().state_dict()), freeze(case.fresh().state_dict())
    assert not differences(one, two)
    first, second = tensors(case.inputs(1)), tensors(case.inputs(2))
    assert [value.shape for value in first] == [value.shape for value in second]
    assert all(not same_bits(a, b) for a, b in zip(first, second, strict=True) if a.numel())


@each_case(3)
def test_labels_mean_the_same_thing_every_time(case: Case) -> None:
    rows = []
    for training in (False, True):
        rnet = make_recorder(case.fresh(), case, training=training, force_static_flow=False)
        layers = rnet.architecture.values()
        rows.append([(layer.label, layer.name, layer.call, layer.executed) for layer in layers])
        rows.append(rnet.architecture.fingerprint)
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]


def _naive_records(case: Case) -> list[str]:
    """What a recorder that merely keeps references gets wrong, by the oracle's count."""
    watched, net = case.fresh().eval(), case.fresh().eval()
    kept = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda _m, _a, output, name=name: kept.update({name: output}))
    mode = next(mode for mode in MODES if str(mode) == "eval-no_grad")
    with Watch(watched) as watch:
        run_pass(watched, case, mode, 1)
    run_pass(net, case, mode, 1)
    return [
        name
        for (name, call), truth in watch.calls.items()
        if call == 0 and differences(freeze(kept[name]), truth)
    ]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("inplace_relu", {"0"}),
        ("mlp", set()),
        ("change_of_slice", {"first"}),
        ("assigns_into_returned_container", {"inner", "rows", "record"}),
        ("cached_output_changed_later", {"inner", "inner.linear"}),
    ],
)
def test_oracle_convicts_a_recorder_that_keeps_references(name: str, wrong: set[str]) -> None:
    assert set(_naive_records(zoo.BY_NAME[name])) == wrong


def test_most_inplace_nets_convict_it_too() -> None:
    from tests.zoo import inplace

    convicted = {case.name for case in inplace.CASES if _naive_records(case)}
    assert {case.name for case in inplace.CASES} - convicted == {"expanded_output"}


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2), [torch.ones(2), None]),
        [torch.ones(2), [torch.ones(2), None]],
        (torch.ones(2), [torch.ones(2), 0]),
        (torch.ones(2), [torch.ones(2)]),
        (torch.ones(2, dtype=torch.float64), [torch.ones(2), None]),
        (torch.ones(1, 2), [torch.ones(2), None]),
        (torch.ones(2), [{"a": torch.ones(2)}, None]),
    ],
)
def test_comparison_sees_every_kind_of_difference(other: object) -> None:
    truth = (torch.ones(2), [torch.ones(2), None])
    assert not differences(freeze(truth), freeze((torch.ones(2), [torch.ones(2), None])))
    assert len(differences(freeze(other), freeze(truth))) == 1


def test_bits_are_compared_as_bits() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]))
    assert not same_bits(torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse())
    assert not same_bits(torch.tensor([1.0]).bfloat16(), torch.tensor([1.5]).bfloat16())
    assert not same_bits(torch.tensor([True]), torch.tensor([False]))


def test_oracle_numbers_calls_by_their_start_and_keeps_gradients() -> None:
    net = Net(lambda net, x: net.relu(net.step(net.step(x))), step=linear(), relu=nn.ReLU(True))
    x = torch.randn(3, 4)
    with Watch(net) as watch:
        output = net(x)
    assert list(watch.calls) == [("step", 0), ("step", 1), ("relu", 0), ("", 0)]
    once = net.step(x)
    (first,), (second,) = (list(leaves(watch.calls["step", call])) for call in (0, 1))
    assert same_bits(first.value, once)
    assert same_bits(second.value, net.step(once))
    output.sum().backward()
    assert second.gradient is not None
    assert same_bits(second.gradient, (second.value > 0).float())
    assert isinstance(watch.calls["relu", 0], Leaf)
    assert watch.calls["relu", 0].aliased
    assert not isinstance(watch.calls["relu", 0], Node)


def test_oracle_leaves_no_hooks() -> None:
    net, x = linear(), torch.randn(3, 4)
    before = trace(net)
    with Watch(net):
        net(x)
    assert not differences(trace(net), before)


class _Unseen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_oracle_passes_over_modules_that_are_not_of_the_net() -> None:
    stranger = _Unseen()
    net = Net(lambda net, x: stranger(net.inner(x)), inner=linear())
    with Watch(net) as watch:
        net(torch.randn(3, 4))
    assert set(watch.calls) == {("inner", 0), ("", 0)}

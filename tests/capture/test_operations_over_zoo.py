"""Every operation of the zoo, with its inputs and gradients, against a function mode by hand."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from scio_recorder import OperationIdx, Recorder
from tests import zoo
from tests.harness import MODES, Mode, attribute_names, hook_state, make_recorder, run_pass
from tests.operation_oracle import UNINITIALISED, Key, Operations
from tests.oracle import Leaf, differences, freeze, leaves, same_bits, scalar_loss, tensors
from tests.zoo import transformers as transformers_zoo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.zoo.base import Case

# Their own code calls other functions from pass to pass.
UNFIT = {
    "data_dependent_branch",
    "data_dependent_loop",
    "energy_gradient",
}
# Their own code calls other functions if gradients are on.
OTHERWISE_WITH_GRADIENTS = {
    "overwritten_through_out_argument",
    "overwritten_only_without_gradients",
}
# The net differentiates inside its forward, or a function of torch does.
DIFFERENTIATES = {"leaf_made_inside"}
CHOSEN = {"gpt2", "llama", "bert", "mixtral", "vit", "resnet", "t5"}


def _rows() -> Iterator[Any]:
    for index, case in enumerate((*zoo.CASES, *transformers_zoo.CASES)):
        modes = [mode for mode in MODES if _allows(case, mode)]
        start = 3 * index % len(modes) if modes else 0
        is_default = case.name in CHOSEN or (index < len(zoo.CASES) and index % 5 == 0)
        for number, mode in enumerate(modes[start:] + modes[:start]):
            marks = [] if number == 0 and is_default else [pytest.mark.campaign]
            yield pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks)


def _allows(case: Case, mode: Mode) -> bool:
    can = not (mode.builds_graph and case.name in OTHERWISE_WITH_GRADIENTS)
    return mode.allows(case) and can and case.name not in UNFIT


def _by_key(rnet: Recorder) -> dict[Key, Any]:
    found = {}
    for label in rnet.recording:
        assert isinstance(label, OperationIdx)
        layer = rnet.architecture[label[:2]]
        found[Key(layer.name, layer.call, label.function, label.index)] = label
    return found


def _assert_true(rnet: Recorder, truth: Operations) -> dict[Key, Any]:
    labels = _by_key(rnet)
    # Under autocast a net may call more than at labelling.
    assert set(labels) <= set(truth.calls)
    for key, label in labels.items():
        called = truth.calls[key]
        if key.function not in UNINITIALISED:
            assert not differences(freeze(rnet.activations[label]), called.output, str(key))
        inputs = rnet.inputs[label]
        received = [*tensors(tuple(inputs.args)), *tensors(dict(inputs.kwargs))]
        expected = [*leaves(called.args), *leaves(called.kwargs)]
        for mine, theirs in zip(received, expected, strict=True):
            assert same_bits(mine, theirs.value), key
    return labels


def _judged(case: Case, labels: dict[Key, Any], truth: Operations) -> Iterator[tuple[Any, Leaf]]:
    """Yield the labels of operations that returned one tensor on the graph."""
    for key, label in labels.items():
        output = truth.calls[key].output
        is_cut = isinstance(output, Leaf) and output.is_view and output.gradient is None
        is_judged = key.name not in case.unjudged and not is_cut
        if isinstance(output, Leaf) and output.requires_grad and is_judged:
            # Where a region runs again in the backward pass, the mode by hand sees no graph.
            yield label, output


@pytest.mark.parametrize(("case", "mode"), list(_rows()))
def test_every_operation_is_recorded_truly(case: Case, mode: Mode) -> None:
    bare, net = (case.fresh().train(mode.training) for _ in range(2))
    rnet = make_recorder(net, case, training=mode.training, force_static_flow=False)
    rnet.record("*/*", inputs=True)
    for seed in (1, 2):
        with Operations(bare) as truth:
            expected = run_pass(bare, case, mode, seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "layer .* runs without torch's fused kernel")
            mine = run_pass(rnet, case, mode, seed)
        assert not differences(mine.frozen, expected.frozen, "output")
        assert not differences(mine.random_state, expected.random_state, "random state")
        labels = _assert_true(rnet, truth)
        if mode.builds_graph and case.backward:
            wanted = expected.gradients(bare)
            if case.partial_backward and case.name not in DIFFERENTIATES:
                _assert_gradients_of_records(rnet, list(_judged(case, labels, truth)), mine.output)
            assert not differences(mine.gradients(net), wanted, "gradients")
            _assert_true(rnet, truth)
    rnet.remove()
    # Nets of transformers add hooks of their own in their first pass.
    assert (hook_state(net), attribute_names(net)) == (hook_state(bare), attribute_names(bare))


def _assert_gradients_of_records(
    rnet: Recorder, judged: list[tuple[Any, Leaf]], output: Any
) -> None:
    loss = scalar_loss(output)
    records = [rnet.activations[label] for label, _ in judged]
    if not records or not loss.requires_grad:
        return
    found = torch.autograd.grad(loss, records, retain_graph=True, allow_unused=True)
    for (label, truth), gradient in zip(judged, found, strict=True):
        if truth.value.layout == torch.strided:
            assert (gradient is None) == (truth.gradient is None), label
            assert gradient is None or same_bits(gradient, truth.gradient), label


@pytest.mark.parametrize(("case", "mode"), [row for row in _rows() if row.values[1].builds_graph])
def test_every_gradient_of_an_operation_is_recorded_truly(case: Case, mode: Mode) -> None:
    if not case.backward or not case.partial_backward or case.name in DIFFERENTIATES:
        return
    bare, net = (case.fresh().train(mode.training) for _ in range(2))
    rnet = make_recorder(net, case, training=mode.training, force_static_flow=False)
    rnet.record("*/*", gradients=True)
    with Operations(bare) as truth:
        expected = run_pass(bare, case, mode, 1)
    mine = run_pass(rnet, case, mode, 1)
    wanted, found = expected.gradients(bare), mine.gradients(net)
    # Under autocast, nets that share a module add its gradients up in another order now and then,
    # also where gradients of layers are recorded.
    assert mode.context == "autocast" or not differences(found, wanted, "gradients")
    for label, output in _judged(case, _by_key(rnet), truth):
        if label in rnet.gradients.reasons or output.value.layout != torch.strided:
            continue
        assert (output.gradient is not None) == (label in rnet.gradients), label
        if output.gradient is not None:
            assert same_bits(rnet.gradients[label], output.gradient), label

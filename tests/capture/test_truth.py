"""T1, T2, T3 and T8 over the whole zoo: every layer at once, three passes, in every mode.

Hand-written nets run in all modes; nets from `transformers` in a rotating subset of them, unless
the environment variable `SCIO_RECORDER_FULL_CAMPAIGN` is set to something other than `0`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import zoo
from tests.harness import (
    MODES,
    Mode,
    attribute_names,
    executed,
    hook_state,
    make_recorder,
    run_pass,
    training_flags,
)
from tests.oracle import Leaf, Watch, differences, freeze, leaves, same_bits, scalar_loss, tensors
from tests.zoo import inplace
from tests.zoo import transformers as transformers_zoo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scio_recorder import Recorder
    from tests.zoo.base import Case

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
PASSES = 3
MODES_OF_A_TRANSFORMER = 3


def _rows() -> Iterator[Any]:
    for case in zoo.CASES:
        yield from (_row(case, mode) for mode in MODES if mode.allows(case))
    for index, case in enumerate(transformers_zoo.CASES):
        allowed = [mode for mode in MODES if mode.allows(case)]
        # Three neighbours, stepping on from net to net, so that each mode meets many nets.
        chosen = allowed if FULL else (allowed * 6)[index % 8 :][:MODES_OF_A_TRANSFORMER]
        yield from (_row(case, mode) for mode in chosen)


def _row(case: Case, mode: Mode) -> Any:
    return pytest.param(case, mode, id=f"{case.name}-{mode}")


@contextlib.contextmanager
def _kernel_warning(case: Case) -> Iterator[None]:
    with warnings.catch_warnings():
        if case.hooks_change_kernel:
            warnings.simplefilter("ignore", UserWarning)
        yield


def _canonical_calls(rnet: Recorder) -> dict[tuple[int, int], tuple[str, int]]:
    """Label -> (first name of the module, call), as the oracle names calls."""
    names = {id(module): name for name, module in rnet.net.named_modules()}
    rows = ((label, rnet.architecture[label]) for label in executed(rnet))
    return {label: (names[id(layer.module)], layer.call) for label, layer in rows}


def _assert_records_true(rnet: Recorder, watch: Watch) -> None:
    calls = _canonical_calls(rnet)
    assert sorted(calls.values()) == sorted(watch.calls)
    wrong = []
    for label in rnet.recording:
        key = calls[label]
        record = freeze(rnet.activations[label])
        wrong += differences(record, watch.calls[key], f"{label} {key}")
    assert not wrong, "\n".join(wrong[:5])


def _pairs(
    rnet: Recorder, watch: Watch, unjudged: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor, Leaf]]:
    """Yield the records that the on-graph promise covers, each beside the truth."""
    calls = _canonical_calls(rnet)
    for label in rnet.recording:
        key = calls[label]
        records = tensors(rnet.activations[label])
        for record, truth in zip(records, leaves(watch.calls[key]), strict=True):
            if truth.requires_grad and not truth.aliased and key[0] not in unjudged:
                yield f"{label} {key}", record, truth


def _assert_gradients_of_records(rnet: Recorder, watch: Watch, output: Any, case: Case) -> None:
    """`autograd.grad` to each record gives the gradient of the value that the module returned."""
    rows = list(_pairs(rnet, watch, case.unjudged))
    off_graph = [where for where, record, _ in rows if not record.requires_grad]
    assert not off_graph
    loss = scalar_loss(output)
    if not rows or not loss.requires_grad:
        return
    records = [record for _, record, _ in rows]
    found = torch.autograd.grad(loss, records, retain_graph=True, allow_unused=True)
    for (where, record, truth), gradient in zip(rows, found, strict=True):
        # An in-place change of a view cuts its old node out of the graph, and the hook with it.
        if record.layout != torch.strided or (truth.is_view and truth.gradient is None):
            continue
        assert (gradient is None) == (truth.gradient is None), f"{where}: {truth.gradient}"
        if gradient is not None and truth.gradient is not None:
            assert same_bits(gradient, truth.gradient), where


def _assert_same(mine: Any, bare: Any, what: str) -> None:
    wrong = differences(freeze(mine), freeze(bare), what)
    assert not wrong, "\n".join(wrong[:5])


def _one_pass(rnet: Recorder, bare: Any, watched: Any, case: Case, mode: Mode, seed: int) -> None:
    expected = run_pass(bare, case, mode, seed)
    with Watch(watched) as watch:
        seen = run_pass(watched, case, mode, seed)
    with _kernel_warning(case):
        mine = run_pass(rnet, case, mode, seed)
    reference = seen if case.hooks_change_kernel else expected
    assert not differences(mine.frozen, reference.frozen, "output")
    assert not differences(mine.random_state, reference.random_state, "random state")
    _assert_records_true(rnet, watch)
    if mode.builds_graph and case.backward:
        truth = seen.gradients(watched)
        if case.partial_backward:
            _assert_gradients_of_records(rnet, watch, mine.output, case)
        assert not differences(mine.gradients(rnet.net), truth, "gradients")
        expected.gradients(bare)
        _assert_records_true(rnet, watch)
    _assert_same(dict(rnet.net.named_buffers()), dict(watched.named_buffers()), "buffers")
    assert training_flags(rnet.net) == training_flags(bare)


@pytest.mark.parametrize(("case", "mode"), list(_rows()))
def test_every_record_is_true_and_the_net_is_as_bare(case: Case, mode: Mode) -> None:
    bare, watched, net = (case.fresh().train(mode.training) for _ in range(3))
    rnet = make_recorder(net, case, training=mode.training, force_static_flow=False)
    rnet.record(*executed(rnet))
    for seed in range(1, PASSES + 1):
        _one_pass(rnet, bare, watched, case, mode, seed)
    rnet.remove()
    assert hook_state(net) == hook_state(bare)
    assert attribute_names(net) == attribute_names(bare)


@pytest.mark.parametrize("context", ["no_grad", "grad"])
@pytest.mark.parametrize("case", inplace.CASES, ids=repr)
def test_each_layer_alone_is_recorded_truly(case: Case, context: str) -> None:
    """What is kept for one layer must not lean on the others' being recorded too."""
    mode = Mode(training=False, context=context)
    bare, watched, net = (case.fresh().eval() for _ in range(3))
    rnet = make_recorder(net, case, force_static_flow=False)
    for label in executed(rnet):
        rnet.record(label)
        for seed in range(2):
            _one_pass(rnet, bare, watched, case, mode, seed)


def test_every_mode_meets_nets_from_transformers() -> None:
    names = {case.name for case in transformers_zoo.CASES}
    rows = [row.values for row in _rows() if row.values[0].name in names]
    assert {mode for _, mode in rows} == set(MODES)
    assert {case.name for case, _ in rows} == names


def test_records_stay_true_when_the_mode_changes_between_passes() -> None:
    """What the first pass proved in one mode holds for that mode alone."""
    for name in ("residual_cnn", "overwritten_only_without_gradients", "dropout", "checkpointed"):
        case = zoo.BY_NAME[name]
        bare, watched, net = (case.fresh() for _ in range(3))
        rnet = make_recorder(net, case, force_static_flow=False)
        rnet.record(*executed(rnet))
        order = [mode for mode in MODES if mode.allows(case)]
        for seed, mode in enumerate(order * 2 + order[::-1]):
            for each in (bare, watched, net):
                each.train(mode.training)
            _one_pass(rnet, bare, watched, case, mode, seed)


def test_records_stay_true_when_the_batch_size_changes() -> None:
    for name in ("residual_cnn", "inplace_relu", "change_of_slice"):
        case = zoo.BY_NAME[name]
        watched, net = case.fresh().eval(), case.fresh().eval()
        rnet = make_recorder(net, case)
        rnet.record(*executed(rnet))
        for size in (3, 7, 2, 7):
            (sample,), _ = case.inputs(size)
            x = sample[:1].repeat(size, *[1] * (sample.dim() - 1))
            with Watch(watched) as watch, torch.no_grad():
                watched(x.clone())
            with torch.no_grad():
                rnet(x.clone())
            _assert_records_true(rnet, watch)


def test_changed_kernel_is_said_once() -> None:
    case = zoo.BY_NAME["transformer_encoder"]
    net = case.fresh().eval()
    rnet = make_recorder(net, case, force_static_flow=False)
    rnet.record("layers.0.linear1")
    (x,), _ = case.inputs(1)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"(?i)encoder"):
            rnet(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rnet(x)

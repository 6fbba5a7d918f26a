"""T1, T2, T3 and T8 over the whole zoo: every layer at once, three passes, in every mode.

By default a hand-written net runs in one mode, which rotates from net to net, and every other net
from `transformers`. In a campaign, hand-written nets run in all modes and those from
`transformers` in three, or in all if `SCIO_RECORDER_FULL_CAMPAIGN` is not `0` in the environment.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from scio_recorder import Recorder
from tests import zoo
from tests.harness import (
    MODES,
    Mode,
    attribute_names,
    executed,
    hook_state,
    make_recorder,
    recorder,
    run_pass,
    training_flags,
)
from tests.oracle import Leaf, Watch, differences, freeze, leaves, same_bits, scalar_loss, tensors
from tests.zoo import inplace
from tests.zoo import transformers as transformers_zoo
from tests.zoo.base import Net, linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.zoo.base import Case

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
PASSES = 3


def _rows() -> Iterator[Any]:
    for index, case in enumerate(zoo.CASES):
        yield from _rows_of(case, index, num_default=1, num_all=len(MODES))
    for index, case in enumerate(transformers_zoo.CASES):
        yield from _rows_of(
            case, index // 2, num_default=index % 2, num_all=len(MODES) if FULL else 3
        )


def _rows_of(case: Case, start: int, num_default: int, num_all: int) -> Iterator[Any]:
    """Yield a net's modes, beginning with one of them."""
    allowed = [mode for mode in MODES if mode.allows(case)]
    # Modes that are alike are neighbours.
    stepped = allowed[::3] + allowed[1::3] + allowed[2::3]
    start %= len(allowed)
    for number, mode in enumerate((stepped[start:] + stepped[:start])[:num_all]):
        marks = [pytest.mark.campaign] if number >= num_default else []
        yield pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks)


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


@pytest.mark.parametrize(
    ("case", "context"),
    [
        pytest.param(
            case,
            context,
            id=f"{case!r}-{context}",
            marks=[pytest.mark.campaign] if (index + number) % 4 else [],
        )
        for index, case in enumerate(inplace.CASES)
        for number, context in enumerate(("no_grad", "grad"))
    ],
)
def test_each_layer_alone_is_recorded_truly(case: Case, context: str) -> None:
    """What is kept for one layer must not lean on the others' being recorded too."""
    mode = Mode(training=False, context=context)
    bare, watched, net = (case.fresh().eval() for _ in range(3))
    rnet = make_recorder(net, case, force_static_flow=False)
    for label in executed(rnet):
        rnet.record(label)
        for seed in range(2):
            _one_pass(rnet, bare, watched, case, mode, seed)


def test_every_mode_meets_nets_of_both_kinds() -> None:
    names = {case.name for case in transformers_zoo.CASES}
    rows = [row for row in _rows() if not row.marks]
    for is_transformer in (False, True):
        kind = [row.values for row in rows if (row.values[0].name in names) == is_transformer]
        assert {mode for _, mode in kind} == set(MODES)
    assert {row.values[0].name for row in _rows()} == names | {case.name for case in zoo.CASES}


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


def test_records_are_those_of_their_layers_when_modules_return_in_another_order() -> None:
    def forward(net: Any, x: torch.Tensor) -> Any:
        return net.first(net.second(x)) if net.is_swapped else net.second(net.first(x))

    net = Net(forward, first=linear(), second=linear(), is_swapped=False)
    rnet = recorder(net, "first", "second")
    for is_swapped in (False, False, True, True, False):
        net.is_swapped = is_swapped
        x = torch.rand(3, 4)
        with torch.no_grad():
            rnet(x)
            order = ("second", "first") if is_swapped else ("first", "second")
            for name in order:
                x = getattr(net, name).forward(x)
                assert same_bits(rnet.activations[name], x)

"""Gradients with saved tensors moved or shrunk, against the bare net's, or composed by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scio_recorder import LayerNotFoundError, MutationError, Recorder, SelectorTypeError
from scio_recorder.recompute.saved_tensors import SavedTensors
from scio_recorder.tensors.copies import StridedCopy
from tests.harness import MODES, by_default, executed, hook_state, make_recorder, run_pass
from tests.oracle import differences, freeze, same_bits, tensors
from tests.zoo import CASES, Case
from tests.zoo.base import Net
from tests.zoo.graphs import Mark, marked_graphs

DIFFERENTIABLE = [case for case in CASES if case.backward and case.train and case.static_flow]
# Those that share, change or return memory, or whose backward pass is not a plain one.
TELLING = {
    *("mlp", "shared_module", "recursive_module", "residual_cnn", "change_of_slice"),
    *("change_after_flatten", "parameter_and_buffer_returned", "lstm_packed", "batch_norm"),
    *("weight_norm_parametrized", "multihead_attention", "embedding", "complex_numbers"),
    *("sparse_rows_output", "tensor_subclass_output", "checkpointed", "checkpointed_reentrant"),
    *("checkpointed_nested", "energy_gradient", "own_function", "leaf_made_inside"),
}
TRAINING = next(mode for mode in MODES if mode.training and mode.context == "grad")
HALF = torch.bfloat16


def active_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.fixture(autouse=True)
def _no_hooks_stay() -> Iterator[None]:
    yield
    assert active_hooks() is None


def recorder(net: nn.Module, *shape: int) -> Recorder:
    return Recorder(net, input_size=shape or (2, 3), verbose=0)


def always_copy(_self: SavedTensors, tensor: Tensor) -> StridedCopy:
    return StridedCopy(tensor)


@pytest.mark.parametrize("copies", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize("case", by_default(DIFFERENTIABLE, TELLING))
def test_gradients_are_bit_for_bit_the_same(
    case: Case, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if copies:
        # As if everything moved to another device and back.
        monkeypatch.setattr(SavedTensors, "shrink", always_copy)
    wanted = run_pass(net := case.fresh().train(), case, TRAINING, 5).gradients(net)
    net = case.fresh().train()
    rnet = make_recorder(net, case, training=True)
    before = hook_state(net)
    with rnet.saved_tensors(*executed(rnet)):
        passed = run_pass(net, case, TRAINING, 5)
    assert hook_state(net) == before
    assert not differences(passed.gradients(net), wanted)


@pytest.mark.parametrize("case", by_default(DIFFERENTIABLE, TELLING))
def test_recording_is_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is known of a tensor here must not make it seem held by somebody else there.
    monkeypatch.setattr(SavedTensors, "shrink", always_copy)
    seen = []
    for is_inside in (False, True):
        net = case.fresh().train()
        rnet = make_recorder(net, case, training=True)
        rnet.record(*executed(rnet), gradients=True)
        for _ in range(2):
            block = rnet.saved_tensors(*executed(rnet)) if is_inside else nullcontext()
            with block:
                passed = run_pass(rnet, case, TRAINING, 5)
            on_graph = {
                label: [tensor.requires_grad for tensor in tensors(activation)]
                for label, activation in rnet.activations.items()
            }
            passed.gradients(net)
        seen.append((on_graph, freeze(dict(rnet.gradients))))
    assert seen[0][0] == seen[1][0]
    assert not differences(seen[1][1], seen[0][1])


def test_only_chosen_layers_shrink_and_parameters_stay() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    x = torch.randn(2, 3, requires_grad=True)
    gradient = torch.randn(2, 2)
    rnet = recorder(net)
    with rnet.saved_tensors("2", dtype=HALF):
        net(x).backward(gradient)
    hidden = torch.sigmoid(x @ net[0].weight.T + net[0].bias).detach()
    # The sum of two products: the order of the sums is the kernel's.
    narrow = gradient.T @ hidden.to(HALF).float()
    torch.testing.assert_close(net[2].weight.grad, narrow, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(net[2].weight.grad, gradient.T @ hidden, rtol=1e-5)
    back = gradient @ net[2].weight.detach() * hidden * (1 - hidden)
    torch.testing.assert_close(x.grad, back @ net[0].weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "view",
    [lambda w: w, lambda w: w.t(), lambda w: w[:2].expand(4, 2, 3), lambda w: w.detach().t()],
)
def test_views_of_parameters_stay(view: Any) -> None:
    packed: list[Any] = []
    net = Net(
        lambda net, x: view(net.weight) * x.exp().sum(), weight=nn.Parameter(torch.randn(2, 3))
    )
    with saved_tensors_hooks(lambda t: packed.append((t.data_ptr(), t.dtype)) or t, lambda t: t):  # type: ignore[func-returns-value]
        x = torch.ones(2, 3, requires_grad=True)
        with recorder(net).saved_tensors((0, 1), dtype=HALF):
            net(x)
    assert (net.weight.data_ptr(), torch.float32) in packed
    assert HALF in [dtype for _, dtype in packed]


def test_wider_numbers_shrink_and_no_others() -> None:
    seen: list[torch.dtype] = []

    def forward(_: Any, x: Tensor) -> Tensor:
        for dtype in (torch.float64, torch.float32, torch.float16, torch.complex64):
            x = x.to(dtype).exp()
        return x.real[torch.tensor([0])]

    net = Net(forward)
    rnet = recorder(net)
    with (
        saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, lambda t: t),  # type: ignore[func-returns-value]
        rnet.saved_tensors("0-1", dtype=torch.float32),
    ):
        net(torch.ones(2, 3, requires_grad=True))
    assert seen == [torch.float32, torch.float32, torch.float16, torch.complex64, torch.int64]


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_the_user_go_on_working(inside: bool) -> None:
    log: list[str] = []
    hooks = saved_tensors_hooks(
        lambda t: log.append("pack") or ("mine", t.detach()),  # type: ignore[func-returns-value]
        lambda packed: log.append("unpack") or packed[1],  # type: ignore[func-returns-value]
    )

    def forward(net: Any, x: Tensor) -> Tensor:
        if not inside:
            return net.inner(x).exp()  # type: ignore[no-any-return]
        with hooks:
            return net.inner(x).exp()  # type: ignore[no-any-return]

    net = Net(forward, inner=Net(lambda _, x: x.exp()))
    rnet = recorder(net)
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    with rnet.saved_tensors("inner", dtype=HALF):
        if inside:
            net(x).sum().backward()
        else:
            with hooks:
                output = net(x)
            output.sum().backward()
    assert log == ["pack"] * 2 + ["unpack"] * 2
    narrow = x.exp().to(HALF).float()
    torch.testing.assert_close(x.grad, x.exp().exp() * narrow, rtol=1e-6, atol=0)


def test_two_blocks_nest() -> None:
    net = nn.Sequential(Net(lambda _, x: x.exp()), Net(lambda _, x: x.exp()))
    rnet = recorder(net)
    x = torch.tensor([[0.3, 0.7]], requires_grad=True)
    with rnet.saved_tensors("0-1", dtype=HALF), rnet.saved_tensors("0", dtype=torch.float16):
        net(x).sum().backward()
    # The inner block comes first; the outer one finds nothing left to narrow.
    first = x.exp().half().float()
    second = x.exp().exp().to(HALF).float()
    assert same_bits(x.grad, second * first)


def test_changes_in_place_are_noticed_inside_two_blocks() -> None:
    net = nn.Sequential(Net(lambda _, x: x.exp()), Net(lambda _, x: x.add_(1)))
    rnet = recorder(net)
    with rnet.saved_tensors("0-1", dtype=HALF), rnet.saved_tensors("0", dtype=HALF):
        loss = net(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chosen", ["inner.0", "inner", "0-1"])
def test_regions_under_checkpointing_are_left_alone(reentrant: bool, chosen: str) -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3))
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=reentrant), inner=inner)
    rnet = recorder(net)
    inputs = [torch.randn(2, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    gradients = []
    for x in inputs:
        x.requires_grad_()
        net.zero_grad()
        if x is inputs[0]:
            net(x).sum().backward()
        else:
            with rnet.saved_tensors(chosen, dtype=HALF):
                net(x).sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [None, HALF])
def test_autograds_error_for_what_changed_in_place_is_kept(dtype: Any) -> None:
    net = nn.Sequential(nn.Sigmoid(), Net(lambda _, x: x * 2))
    rnet = recorder(net)
    x = torch.ones(2, 3, requires_grad=True)

    def run() -> None:
        hidden = net[0](x)
        hidden.add_(1)
        net[1](hidden).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run()
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation") as caught,
        rnet.saved_tensors("0", dtype=dtype),
    ):
        run()
    assert isinstance(caught.value, MutationError)
    assert "allow_mutation_on_saved_tensors" in str(caught.value)
    with allow_mutation_on_saved_tensors(), rnet.saved_tensors("0", dtype=dtype):
        run()
    sigmoid = torch.sigmoid(x.detach())
    kept = sigmoid if dtype is None else sigmoid.to(dtype).float()
    torch.testing.assert_close(x.grad, 2 * kept * (1 - kept), rtol=1e-6, atol=0)


def test_parameters_changed_before_backward_are_an_error() -> None:
    net = nn.Linear(3, 3)
    with recorder(net).saved_tensors("0-1", dtype=HALF):
        loss = net(torch.ones(2, 3, requires_grad=True)).sum()
        with torch.no_grad():
            net.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_all_calls_of_a_module_or_none() -> None:
    shared = Net(lambda _, x: x.exp())
    net = Net(lambda net, x: net.shared(net.shared(x)), shared=shared)
    rnet = recorder(net)
    with pytest.raises(SelectorTypeError, match=r'1-2.*write saved_tensors\("shared", \.\.\.\)'):
        rnet.saved_tensors((1, 2), dtype=HALF)
    for chosen in (["shared"], [(1, 1), (1, 2)]):
        x = torch.tensor([[0.3, 0.7]], requires_grad=True)
        with rnet.saved_tensors(*chosen, dtype=HALF):
            for _ in range(2):
                x.grad = None
                net(x).sum().backward()
        first, second = x.exp().detach(), x.exp().exp().detach()
        assert same_bits(x.grad, second.to(HALF).float() * first.to(HALF).float())


def test_a_tensor_that_is_saved_several_times_is_copied_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[StridedCopy] = []

    class Counted(StridedCopy):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            copies.append(self)

    monkeypatch.setattr("scio_recorder.recompute.saved_tensors.StridedCopy", Counted)
    net = Net(lambda _, x: x.sin() + x.cos() + x.log())
    rnet = recorder(net)
    x = torch.ones(2, 3, requires_grad=True)
    with rnet.saved_tensors("0-1", dtype=HALF):
        loss = net(x).sum()
        assert len(copies) == 1
        with torch.no_grad():
            x.add_(1)
        net(x)
        assert len(copies) == 2
    del loss
    alive = weakref.ref(copies.pop())
    gc.collect()
    assert alive() is None


def test_second_derivatives_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedTensors, "shrink", always_copy)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    rnet = recorder(net)
    found = []
    x = torch.randn(2, 3, requires_grad=True)
    for block in (torch.enable_grad(), rnet.saved_tensors("*")):
        net.zero_grad()
        with block:
            (force,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            force.square().sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or same_bits(one, other)


class Interruption(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("error", [ValueError, Interruption])
@pytest.mark.parametrize("place", ["forward", "before", "after"])
def test_nothing_stays_after_an_error(error: type[BaseException], place: str) -> None:
    def fail(*_: Any) -> None:
        raise error

    inner = Net(fail) if place == "forward" else nn.Linear(3, 3)
    if place == "before":
        inner.register_forward_pre_hook(fail)
    elif place == "after":
        inner.register_forward_hook(fail)
    rnet = recorder(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))))
    rnet.net[1][0] = inner
    labels = rnet.architecture
    block = SavedTensors(labels, ["*"], "cpu", False, HALF)
    before = hook_state(rnet.net)
    with pytest.raises(error), block:
        rnet.net(torch.ones(2, 3))
    assert hook_state(rnet.net) == before
    assert active_hooks() is None


def test_no_graph_is_kept() -> None:
    net = Net(lambda net, x: Mark.apply(net.inner(x)).exp(), inner=nn.Sigmoid())
    rnet = recorder(net)
    with rnet.saved_tensors("*", dtype=HALF):
        for _ in range(3):
            output = net(torch.ones(2, 3, requires_grad=True))
        assert marked_graphs() == 1
        output.sum().backward()
        del output
        assert marked_graphs() == 0


def test_many_steps_leave_nothing_behind() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    rnet = recorder(net)
    rnet.record("*", gradients=True)
    rnet.on_gradients(lambda gradients: None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        rnet(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    with rnet.saved_tensors("*", dtype=HALF):
        for _ in range(20):
            step()
        before = count()
        for _ in range(200):
            step()
        # A step that left one object behind would leave 200.
        assert count() - before < 100


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": torch.int8}, "floating-point"),
        ({"dtype": "bfloat16"}, "floating-point"),
        ({"device": "nowhere"}, "nowhere"),
        ({"device": "meta"}, "keeps no numbers"),
        ({"device": "cuda:77"}, "cuda:77"),
    ],
)
def test_what_can_not_be_used_is_refused(options: dict[str, Any], text: str) -> None:
    rnet = recorder(nn.Linear(3, 3))
    with pytest.raises(SelectorTypeError, match=text):
        rnet.saved_tensors("0-1", **options)


def test_layers_must_be_named() -> None:
    rnet = recorder(nn.Linear(3, 3))
    with pytest.raises(SelectorTypeError, match="no layers are named"):
        rnet.saved_tensors()
    with pytest.raises(LayerNotFoundError):
        rnet.saved_tensors("layer3.*")
    with rnet.saved_tensors("0-1") as block, pytest.raises(RuntimeError, match="entered already"):
        block.__enter__()

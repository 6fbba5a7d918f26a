"""Passes that others run: `watch` against plain hooks on the bare network."""

from __future__ import annotations

import copy
import io
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import (
    ArgumentError,
    CollectError,
    FlowError,
    LayerNotFoundError,
    PostprocessorError,
    SelectorTypeError,
    UnsupportedNetError,
)
from scio_recorder.postprocessors import Scale
from tests.capture.test_watch_libraries import passes_by_hooks
from tests.harness import recorder, run_in_threads
from tests.zoo.base import Net


class Residual(nn.Module):
    """Works in place, and returns what an inner layer returned, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.act(self.first(x))
        return self.second(hidden).add_(x) * scale


class Remembering(nn.Module):
    """Returns memory that the next call writes to, as a static key-value cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.state = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.state += x
        return self.inner(self.state)


def watched(net: nn.Module, *names: str, **options: Any) -> Recorder:
    torch.manual_seed(0)
    return recorder(net, *(names or ("*",)), input_size=(2, 4), **options)


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 4) for _ in range(4)]


@pytest.mark.parametrize("copy_policy", ["auto", "always"])
@pytest.mark.parametrize("grad", [True, False])
def test_each_call_by_others_is_a_pass(copy_policy: Any, grad: bool) -> None:
    net = Residual()
    rnet = watched(net, copy=copy_policy)

    def run() -> list[Tensor]:
        return [net(x) if number % 2 else rnet.net(x, scale=2.0) for number, x in enumerate(data)]

    data = batches()
    with torch.set_grad_enabled(grad):
        expected, outputs = passes_by_hooks(rnet, run)
        with rnet.watch() as passes:
            mine = run()
    assert all(map(torch.equal, outputs, mine))
    assert len(passes) == len(expected) == 4
    for records, truth in zip(passes, expected, strict=True):
        assert list(truth) == [(1, 1), (1, 2), (1, 3), (0, 1)]
        assert all(torch.equal(records[label], value) for label, value in truth.items())
    assert torch.equal(rnet.activations["second"], expected[-1][1, 3])
    assert torch.equal(passes.cat("second", dim=1), torch.cat([t[1, 3] for t in expected], 1))


def test_outside_the_block_a_call_is_nobodys_business() -> None:
    net = Residual()
    rnet = watched(net)
    before = dict(vars(net))
    with rnet.watch() as passes:
        net(torch.ones(2, 4))
    assert vars(net) == before
    net(torch.zeros(2, 4))
    assert len(passes) == 1
    assert torch.equal(rnet.activations[(0, 1)], passes[0][(0, 1)])


def test_calls_of_the_recorder_are_passes_too_and_those_that_record_nothing_are_not() -> None:
    rnet = watched(Residual())
    with rnet.watch() as passes:
        rnet(torch.ones(2, 4))
        rnet.extract(torch.ones(2, 4))
        rnet(torch.ones(2, 4), dont_record=True)
    assert len(passes) == 2


def test_records_hold_whatever_later_passes_write() -> None:
    rnet = recorder(Remembering(), "*", input_size=(4,))
    with rnet.watch() as passes:
        for number in range(1, 5):
            rnet.net(torch.full((2, 4), float(number))[0])
    sums = [1.0, 3.0, 6.0, 10.0]
    assert [records["inner"][0].item() for records in passes] == sums
    assert [records[(0, 1)][0].item() for records in passes] == sums


@pytest.mark.parametrize("copy_policy", ["auto", "always"])
def test_inputs_of_each_pass_are_those_that_forward_received(copy_policy: Any) -> None:
    net, given = Residual(), batches()
    rnet = watched(net, "act", "second", inputs=True, copy=copy_policy)
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        net.act.register_forward_pre_hook(lambda module, args: seen.append((args[0].clone(),))),
        net.second.register_forward_pre_hook(lambda module, args: seen.append((args[0].clone(),))),
    ]
    with torch.no_grad(), rnet.watch() as passes, rnet.watch(last=2) as latest:
        for x in given:
            net(x)
    for handle in handles:
        handle.remove()
    assert len(passes.inputs) == len(passes) == len(given)
    for number, inputs in enumerate(passes.inputs):
        # What ReLU received it has overwritten: that record is lost, or was copied.
        assert torch.equal(inputs["second"].args[0], seen[2 * number + 1][0])
        assert torch.equal(passes[number]["act"], inputs["second"].args[0])
        if copy_policy == "always" or number == 0:
            assert torch.equal(inputs["act"].args[0], seen[2 * number][0])
    assert len(latest.inputs) == 2
    assert torch.equal(latest.inputs[0]["second"].args[0], seen[-3][0])
    assert [one["second"].args[0].shape for one in passes.inputs[1:3]] == [(2, 4)] * 2


def test_inputs_hold_whatever_later_passes_and_the_caller_write() -> None:
    net = Remembering()
    net.inner = nn.Linear(4, 4)
    rnet = recorder(net, "inner", "", input_size=(4,), inputs=True)
    buffer = torch.zeros(4)
    net.state.zero_()
    with torch.no_grad(), rnet.watch() as passes:
        for number in range(4):
            buffer.fill_(number)
            net(buffer)
    for name, expected in (("inner", [0.0, 1.0, 3.0, 6.0]), ("", [0.0, 1.0, 2.0, 3.0])):
        found = [inputs[name].args[0].tolist() for inputs in passes.inputs]
        assert found == [[number] * 4 for number in expected]


def test_without_inputs_the_message_says_what_to_write() -> None:
    rnet = watched(Residual(), "first")
    with rnet.watch() as passes:
        rnet.net(torch.ones(2, 4))
    assert len(passes.inputs) == 1
    with pytest.raises(LayerNotFoundError, match=r"no input of layer"):
        passes.inputs[0]["first"]
    rnet.record("first", inputs=True)
    with rnet.watch() as passes:
        rnet.net(torch.ones(2, 4))
    with pytest.raises(ArgumentError, match="only tensors can be joined"):
        passes.inputs.cat("first")


def test_training_by_others_goes_on_as_without_a_block() -> None:
    seen: list[list[Tensor]] = []

    def train(net: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for x in batches():
            optimizer.zero_grad()
            nn.functional.dropout(net(x), 0.3).square().sum().backward()
            seen.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    net = Residual()
    twin = copy.deepcopy(net)
    rnet = watched(net, gradients=True)
    with rnet.watch() as passes:
        weights = train(net)
    assert all(map(torch.equal, weights, train(twin)))
    assert len(passes) == 4
    # What the last layer's weight got, from the gradient at what that layer returned.
    by_hand = rnet.gradients["second"].sum(0)
    torch.testing.assert_close(seen[3][3], by_hand)


def test_a_pass_that_fails_loses_nothing_that_ended_before() -> None:
    net = Residual()
    rnet = watched(net)
    with rnet.watch() as passes:
        net(torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.ones(2, 5))
    assert len(passes) == 1
    assert passes[0][(0, 1)].shape == (2, 4)
    assert "_compiled_call_impl" not in vars(net) or vars(net)["_compiled_call_impl"] is None
    with rnet.watch() as again:
        net(torch.ones(2, 4))
    assert torch.equal(again[0][(0, 1)], passes[0][(0, 1)])


def test_every_check_is_made_in_calls_by_others() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(net.times):
            x = net.layer(x)
        return x

    net = Net(forward, layer=nn.Linear(4, 4), times=1)
    rnet = watched(net, "layer")
    net.times = 2
    with rnet.watch() as passes, pytest.raises(FlowError, match="layer"):
        net(torch.ones(2, 4))
    assert len(passes) == 0
    rnet.record("layer", calls="any")
    with rnet.watch() as passes:
        net(torch.ones(2, 4))
    assert len(passes[0]["layer"]) == 2


@pytest.mark.parametrize("first_out", [0, 1])
def test_blocks_of_two_recorders_nest_and_end_in_any_order(first_out: int) -> None:
    net = Residual()
    recorders = [watched(net, "first"), watched(net, "second")]
    blocks = [rnet.watch() for rnet in recorders]
    both = [block.__enter__() for block in blocks]
    net(torch.ones(2, 4))
    blocks[first_out].__exit__(None, None, None)
    net(torch.zeros(2, 4))
    blocks[1 - first_out].__exit__(None, None, None)
    net(torch.zeros(2, 4))
    assert (len(both[first_out]), len(both[1 - first_out])) == (1, 2)
    assert torch.equal(both[0][0]["first"], net.first(torch.ones(2, 4)))
    assert not vars(net).get("_compiled_call_impl")


def test_inner_blocks_of_one_recorder_see_their_passes_and_outer_ones_all() -> None:
    net = Residual()
    rnet = watched(net, "first")
    with rnet.watch() as outer:
        net(torch.ones(2, 4))
        with rnet.watch(last=1) as inner:
            net(torch.ones(2, 4))
            net(torch.zeros(2, 4))
        net(torch.ones(2, 4))
    assert len(outer) == 4
    assert len(inner) == 1
    assert torch.equal(inner[0]["first"], outer[2]["first"])


def test_a_block_that_ends_while_a_pass_is_handed_out_takes_it_from_no_other() -> None:
    net = Residual()
    rnet = watched(net, "first")
    leaving, staying = rnet.watch(), rnet.watch()
    first, second = leaving.__enter__(), staying.__enter__()

    def leave(*left: Any) -> None:
        del first.add
        leaving.__exit__(None, None, None)

    first.add = leave  # type: ignore[method-assign]
    net(torch.ones(2, 4))
    staying.__exit__(None, None, None)
    assert len(second) == 1


def test_blocks_that_begin_and_end_in_threads_lose_no_pass() -> None:
    net = Residual()
    recorders = [watched(net, "first") for _ in range(4)]
    counts: list[int] = []

    def work(rnet: Recorder) -> None:
        for _ in range(100):
            with rnet.watch() as passes:
                net(torch.ones(1, 4))
            counts.append(len(passes))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_in_threads(work, recorders)
    finally:
        sys.setswitchinterval(interval)
    assert len(counts) == 400
    assert min(counts) >= 1
    assert not vars(net).get("_compiled_call_impl")


def test_a_new_selection_in_the_block_holds_from_the_next_pass_on() -> None:
    net = Residual()
    rnet = watched(net, "first")
    with rnet.watch() as passes:
        net(torch.ones(2, 4))
        rnet.record("second")
        net(torch.ones(2, 4))
        rnet.remove()
        net(torch.ones(2, 4))
    assert [list(records) for records in passes] == [[(1, 1)], [(1, 3)]]


def test_copies_and_files_made_in_the_block_know_nothing_of_it() -> None:
    net = Residual()
    rnet = watched(net, "first")
    with rnet.watch() as passes:
        twin = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(net, file)
        twin(torch.ones(2, 4))
        file.seek(0)
        torch.load(file, weights_only=False)(torch.ones(2, 4))
        assert len(passes) == 0
        other = recorder(net, "second", input_size=(2, 4))
        other(torch.ones(2, 4))
    assert len(passes) == 1
    assert torch.equal(other.activations["second"], net.second(torch.relu(passes[0]["first"])))


def test_a_recorder_that_is_dropped_in_the_block_leaves_the_network_alone() -> None:
    net = Residual()
    rnet = watched(net, "first")
    block = rnet.watch()
    block.__enter__()
    del rnet
    net(torch.ones(2, 4))
    block.__exit__(None, None, None)
    assert not vars(net).get("_compiled_call_impl")
    assert not any(module._forward_hooks for module in net.modules())


def test_what_cannot_be_watched_is_refused() -> None:
    net = Residual()
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    with pytest.raises(SelectorTypeError, match=r"record\(\.\.\.\)"), rnet.watch():
        pass
    rnet.record("first")
    with pytest.raises(ArgumentError, match="last"), rnet.watch(last=0):
        pass
    with pytest.warns(UserWarning, match="not called in the block"), rnet.watch() as passes:
        pass
    with pytest.raises(ArgumentError, match="not called"):
        passes.cat("first")
    with pytest.raises(IndexError, match="0 are kept"):
        passes[0]
    with pytest.raises(SelectorTypeError, match=r"passes\[-1\]\['first'\]"):
        passes["first"]  # type: ignore[call-overload]  # the slip
    with rnet.watch() as passes:
        net(torch.ones(2, 4))
        net(torch.ones(3, 4))
    with pytest.raises(LayerNotFoundError):
        passes.cat("nothing")
    with pytest.raises(ArgumentError, match=r"\(2, 4\), \(3, 4\)"):
        passes.cat("first", dim=1)
    assert passes.cat("first").shape == (5, 4)
    net.compile(backend="eager")
    with pytest.raises(UnsupportedNetError, match="compiled"), rnet.watch():
        pass


def test_a_replica_of_the_network_runs_its_own_weights() -> None:
    net = nn.Linear(4, 4)
    rnet = recorder(net, "*", input_size=(1, 4))
    x = torch.randn(2, 4)
    with rnet.watch() as passes:
        replica: Any = net._replicate_for_data_parallel()
        replica.weight, replica.bias = net.weight * 2, net.bias * 3
        assert torch.equal(replica(x), nn.functional.linear(x, replica.weight, replica.bias))
        net(x)
    assert len(passes) == 1


def test_postprocessors_of_nested_blocks_act_together() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    rnet, x = watched(net, "0", "1", "2"), torch.randn(2, 4)

    def by(first: float, second: float, third: float) -> Tensor:
        hidden = torch.tanh(net[0].forward(x) * first) * second
        return net[2].forward(hidden) * third

    double: Any = {"0": lambda output: output * 2}
    with rnet.watch({"1": lambda output: output * 3}) as outer:
        with rnet.watch(double) as inner:
            assert torch.equal(net(x), by(2, 3, 1))
            assert torch.equal(rnet(x, activation_postproc={"2": lambda t: t * 5}), by(2, 3, 5))
            with rnet.watch():
                assert torch.equal(net(x), by(2, 3, 1))
        assert torch.equal(net(x), by(1, 3, 1))
    assert torch.equal(net(x), by(1, 1, 1))
    assert (len(outer), len(inner)) == (4, 3)
    torch.testing.assert_close(inner[1]["2"], by(2, 3, 1))


def test_what_is_collected_in_a_block_is_changed_by_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    rnet, x = watched(net, "0", "2"), torch.randn(6, 4)
    with rnet.watch({"0": Scale(3.0)}):
        recording = rnet.collect(x.split(3), activation_postproc={"2": torch.neg}, progress=False)
        with pytest.raises(PostprocessorError, match=r"factor=3.0.*factor=2.0"):
            rnet.collect([x], activation_postproc={"0": Scale(2.0)}, progress=False)
    expected = net[2].forward(torch.tanh(net[0].forward(x) * 3))
    torch.testing.assert_close(recording["2"], expected.detach())
    assert recording.settings["postprocessors"] == ["1-1", "1-3"]


@pytest.mark.parametrize(
    "again", [Scale(2.0), {"1": Scale(2.0)}, {"*": Scale(2.0)}, [torch.neg, Scale(2.0)]]
)
def test_two_postprocessors_for_one_layer_are_refused(again: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    rnet, x = watched(net, "0", "1"), torch.randn(2, 4)
    refused = pytest.raises(PostprocessorError, match=r"Tanh.*factor=3.0.*factor=2.0")
    with rnet.watch({"1": Scale(3.0)}) as passes:
        with refused:
            rnet(x, activation_postproc=again)
        with rnet.watch(again), refused:
            net(x)
        with refused, rnet.collecting(activation_postproc=again):
            net(x)
        assert torch.equal(net(x), torch.tanh(net[0].forward(x)) * 3)
    assert len(passes) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiling_the_network_in_the_block_is_refused() -> None:
    net = Residual()
    rnet = watched(net, "first")
    # Dynamo of torch 2.8 shows the type of what was raised while it traced, and not the message.
    is_old = torch.__version__.startswith("2.8.")
    shown = "UnsupportedNetError" if is_old else "compiled inside a block"
    with pytest.raises(Exception, match=shown), rnet.watch() as passes:
        torch.compile(net, backend="eager", fullgraph=True)(torch.ones(2, 4))
    assert len(passes) == 0


@pytest.mark.parametrize("kind", ["watch", "collecting"])
def test_a_compiled_call_in_the_block_is_refused_where_dynamo_breaks_the_graph(kind: str) -> None:
    net = Residual()
    rnet = watched(net, "first")
    compiled = torch.compile(net, backend="eager")
    refused = pytest.raises(UnsupportedNetError, match="compiled inside a block")
    with refused, getattr(rnet, kind)():
        compiled(torch.ones(2, 4))
    with torch.compiler.set_stance("force_eager"), rnet.watch() as passes:
        compiled(torch.ones(2, 4))
    assert torch.equal(passes[0]["first"], net.first(torch.ones(2, 4)))


@pytest.mark.parametrize("kind", ["watch", "collecting"])
def test_a_network_that_compiles_itself_in_the_block_is_refused(kind: str) -> None:
    net, x = Residual(), torch.ones(2, 4)
    rnet = watched(net, "first")
    refused = pytest.raises(UnsupportedNetError, match="compiled inside a block")
    with refused, getattr(rnet, kind)() as passes:
        net(x)
        net.compile(backend="eager")
        assert torch.equal(net(x), net.forward(x))
    if kind == "collecting":
        assert not passes.recording.complete
        assert len(passes.recording["first"]) == 2
    else:
        assert len(passes) == 1


def test_what_only_the_network_has_is_found_by_the_message() -> None:
    class Generator(Residual):
        steps = 3

        def generate(self, x: Tensor) -> Tensor:
            for _ in range(self.steps):
                x = self(x)
            return x

    net = Generator()
    rnet = watched(net, "second")
    with pytest.raises(AttributeError, match=r"rnet\.net\.generate(.|\n)*rnet\.watch\(\)"):
        rnet.generate(torch.ones(2, 4))
    with pytest.raises(AttributeError, match="'Recorder' object has no attribute 'nothing'"):
        _ = rnet.nothing
    with pytest.raises(UnsupportedNetError, match=r"rnet\.watch\(\)"):
        hasattr(rnet, "accepts_loss_kwargs")
    x = torch.ones(2, 4)
    with rnet.watch() as passes:
        net.generate(x)
    for records in passes:
        act = torch.relu(net.first(x))
        assert torch.equal(records["second"], net.second(act))
        x = net.second(act) + x
    assert len(passes) == 3


class Adapted(nn.Module):
    """Generates by the model inside it, as a ``PeftModel`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Residual()

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, x: Tensor) -> Any:
        return self.base_model(x)

    def generate(self, x: Tensor) -> Any:
        return self.base_model(x)


def test_a_network_that_generates_by_the_model_inside_it_is_told_what_to_wrap() -> None:
    net, x = Adapted(), torch.ones(2, 4)
    rnet = watched(net, "base_model")
    advice = r"Recorder\(net.get_base_model\(\)\)"
    with pytest.warns(UserWarning, match=advice) as caught, rnet.watch() as passes:
        net.generate(x)
    assert not passes
    assert all(re.search(advice, str(one.message)) for one in caught)
    # Passes that the block has seen don't hide those that it has not.
    with pytest.warns(UserWarning, match=advice), rnet.watch() as passes:  # noqa: PT031 - its end
        net(x)
        net.generate(x)
    assert len(passes) == 1
    with (
        pytest.warns(UserWarning, match="without the network"),
        pytest.raises(CollectError, match=advice),
        rnet.collecting(),
    ):
        net.generate(x)
    rnet = watched(net.get_base_model(), "first")
    with rnet.watch() as passes:
        net.generate(x)
    assert len(passes) == 1


def test_parts_that_the_block_calls_without_the_network_are_named() -> None:
    net = Residual()
    rnet = watched(net, "first", "second", calls="any")
    x = torch.ones(2, 4)
    net.first(x)  # ahead of the block, it is nobody's business

    def block() -> Any:
        with rnet.watch(activation_postproc=lambda t: t * 2) as passes:
            net.first(x)
            net(x)
        return passes

    with pytest.warns(UserWarning, match="called 1-1 first .Linear. without the network"):
        passes = block()
    assert [len(passes[0][name]) for name in ("first", "second")] == [1, 1]
    # Neither a pass nor its backward pass is outside, whether anything is recorded or not.
    with rnet.watch():
        net(x).sum().backward()
        rnet(x, dont_record=True)


def test_operations_are_seen_after_a_pass_that_failed():
    net = Net(lambda _, x: torch.flatten(x, 1) + 1)
    rnet = recorder(net, "/flatten", input_size=(2, 3, 4))
    with rnet.watch() as passes:
        with pytest.raises(IndexError):
            net(torch.tensor(1.0))
        x = torch.arange(24.0).view(2, 3, 4)
        net(x)
    assert torch.equal(passes[-1]["/flatten"], x.flatten(1))

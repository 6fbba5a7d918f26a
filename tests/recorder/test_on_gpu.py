"""What is promised, on a GPU: ``SCIO_RECORDER_GPU=cpu pytest -m gpu`` tries these tests without.

Truth is what hooks copy at the call, what the bare network does, or float64.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from scio_recorder import (
    FlowError,
    MutationError,
    NonFiniteError,
    Recorder,
    UnsupportedNetError,
    compare,
    open_recording,
    reductions,
)
from scio_recorder.postprocessors import Knockout
from tests.capture.test_compile import DYNAMO_READS_GRAD
from tests.harness import hook_state, run_in_threads
from tests.oracle import Watch, same_bits
from tests.recorder.test_lifecycle import live_tensors
from tests.zoo.base import Net

DEVICE = os.environ.get("SCIO_RECORDER_GPU", "cuda")
IS_CUDA = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_CUDA = pytest.mark.skipif(not IS_CUDA, reason="has no stand-in on a CPU")


def residual() -> Net:
    """Return a net that overwrites what its layers return."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.last(net.drop(net.act(net.norm(net.first(x)))))
        y += x
        return y

    parts = {"first": nn.Linear(16, 16), "norm": nn.BatchNorm1d(16), "act": nn.ReLU(inplace=True)}
    return Net(forward, **parts, drop=nn.Dropout(0.5), last=nn.Linear(16, 16))


def attending() -> Net:
    """Return attention with fewer heads for keys and values, by torch's fused kernels."""

    def forward(net: Any, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query = net.queries(x).view(rows, length, 4, 16).transpose(1, 2)
        key = net.keys(x).view(rows, length, 2, 16).transpose(1, 2)
        mixed = scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, length, 64)

    return Net(forward, queries=nn.Linear(64, 64), keys=nn.Linear(64, 32))


def network(kind: Callable[[], nn.Module] = residual, **to: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(DEVICE, **to).eval()


def recorded(net: nn.Module, x: Tensor, *selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*selectors, **options)
    return rnet


def batch(*shape: int, **to: Any) -> Tensor:
    return torch.randn(*(shape or (8, 16))).to(DEVICE, **to)


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


@pytest.fixture
def never_waits() -> Callable[[], AbstractContextManager[Any]]:
    """Make asking the device for a value an error."""

    class NeverWaits:
        def __enter__(self) -> None:
            if IS_CUDA:
                torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *exception: object) -> None:
            if IS_CUDA:
                torch.cuda.set_sync_debug_mode("default")

    return NeverWaits


# -- T1 to T10 ------------------------------------------------------------------------------------

MODES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "float32": ({}, nullcontext),
    "bfloat16": ({"dtype": torch.bfloat16}, torch.no_grad),
    "float16": ({"dtype": torch.float16}, torch.inference_mode),
    "autocast": ({}, lambda: torch.autocast(DEVICE, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
def test_t1_records_are_what_the_layers_returned(mode: str, training: bool) -> None:
    to, block = MODES[mode]
    net, names = network(**to).train(training), ("", "first", "norm", "act", "drop", "last")
    rnet = recorded(net, batch(**to), "*", inputs=True)
    for _ in range(3):
        with Watch(net) as watch, block():
            rnet(batch(**to))
        for name in names:
            assert same_bits(rnet.activations[name], watch.calls[name, 0].value)
            assert rnet.activations[name].device.type == DEVICE


def test_t1_what_was_read_stays_and_what_was_lost_is_an_error() -> None:
    net, x = network(), batch()
    rnet = recorded(net, x, "last", "", inputs=True)
    with torch.no_grad():
        for _ in range(2):
            output = rnet(x)
        received = rnet.inputs[""].args[0]
        before = received.clone()
        x.fill_(0.0)
        assert same_bits(received, before)
        rnet(x)
        output = rnet(x)
        output.add_(1)
    with pytest.raises(MutationError, match="changed in place"):
        rnet.activations[""]


def test_t1_records_are_on_the_graph() -> None:
    net, x = network(), batch()
    rnet, twin = recorded(net, x, "first"), copy.deepcopy(net)
    for _ in range(2):
        output = rnet(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), rnet.activations["first"])
    hidden = twin.first(x)
    y = twin.last(twin.act(twin.norm(hidden * 1)))
    (expected,) = torch.autograd.grad((y + x).square().sum(), hidden)
    torch.testing.assert_close(gradient, expected)


def test_t2_the_net_behaves_as_the_bare_one() -> None:
    net, x = network().train(), batch()
    bare = copy.deepcopy(net)
    rnet = recorded(net, x, "*", inputs=True, gradients=True)
    ends = []
    for call, module in ((bare, bare), (rnet, net)):
        torch.manual_seed(3)
        outputs = [call(x), call(x)]
        outputs[1].square().mean().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        ends.append([*outputs, *gradients, *module.buffers(), torch.rand(3, device=DEVICE)])
    assert all(map(same_bits, *ends))
    rnet.check(x)


def test_t3_labels_are_those_of_the_cpu() -> None:
    here = Recorder(network(), input_data=batch(), verbose=0).architecture
    there = Recorder(network().cpu(), input_size=(8, 16), verbose=0).architecture
    assert [str(row) for row in here.values()] == [str(row) for row in there.values()]
    assert here.fingerprint == there.fingerprint


@pytest.mark.parametrize("num_calls", [0, 2])
def test_t4_and_t5_other_calls_than_at_labelling_are_errors(num_calls: int) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(net.num_calls):
            x = net.inner(x)
        return x

    net = Net(forward, inner=nn.Linear(16, 16)).to(DEVICE)
    net.num_calls = 1
    rnet = recorded(net, batch(), "inner")
    net.num_calls = num_calls
    with pytest.raises(FlowError, match="inner"):
        rnet(batch())


def test_t5_torch_s_fused_encoder_is_left_with_a_warning() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net, x = encoder.to(DEVICE).eval(), batch(2, 5, 16)
    rnet = recorded(net, x, "linear1")
    with torch.no_grad(), pytest.warns(UserWarning, match="fused kernel"):
        rnet(x)
    # The hooks of the watch would cost the encoder its fast path, too.
    with torch.no_grad(), Watch(net) as watch:
        net(x)
    assert same_bits(rnet.activations["linear1"], watch.calls["linear1", 0].value)


@pytest.mark.parametrize("home", [DEVICE, "cpu"])
def test_t6_construction_leaves_no_trace(home: str) -> None:
    net = network().train().to(home)
    net.drop.eval()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    flags = [module.training for module in net.modules()]
    random = torch.get_rng_state(), torch.cuda.get_rng_state() if IS_CUDA else torch.empty(0)
    Recorder(net, input_size=(8, 16), mode="train", verbose=0)
    after = torch.get_rng_state(), torch.cuda.get_rng_state() if IS_CUDA else torch.empty(0)
    assert all(map(same_bits, random, after))
    assert [module.training for module in net.modules()] == flags
    assert {parameter.device.type for parameter in net.parameters()} == {home}
    for name, value in net.state_dict().items():
        assert same_bits(value, state[name])


def test_t7_nothing_stays_after_an_exception_or_the_recorder() -> None:
    net, x = network(), batch()
    hooks = hook_state(net)
    # Libraries keep memory from their first use on.
    net(x).sum().backward()
    net.zero_grad(set_to_none=True)
    gc.collect()
    before = live_tensors(), torch.cuda.memory_allocated() if IS_CUDA else 0
    rnet = recorded(net, x, "*", gradients=True)
    rnet(x).sum().backward()
    with pytest.raises(RuntimeError):
        rnet(batch(8, 7))
    assert hook_state(net) == hooks
    assert len(rnet.activations) == 0
    rnet(x)
    net.zero_grad(set_to_none=True)
    del rnet
    gc.collect()
    assert (live_tensors(), torch.cuda.memory_allocated() if IS_CUDA else 0) == before
    assert hook_state(net) == hooks


def test_t8_outputs_keep_their_structure() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        return {"pair": net.inner(x).max(dim=1), "parts": [x, (x + 1,)]}

    net = Net(forward, inner=nn.Linear(16, 16)).to(DEVICE)
    rnet, x = recorded(net, batch(), ""), batch()
    for _ in range(3):
        output = rnet(x)
        record = rnet.activations[""]
        assert type(record["pair"]) is type(output["pair"])
        assert same_bits(record["pair"].indices, output["pair"].indices)
        assert same_bits(record["parts"][1][0], x + 1)


def test_t9_threads_and_recorders_do_not_mix() -> None:
    net = network()
    outer, inner = recorded(net, batch(), "last"), recorded(net, batch(), "first")
    inputs = [batch() for _ in range(4)]
    with torch.no_grad():
        expected = [net.first(x).clone() for x in inputs]

    def run(number: int) -> None:
        stream = torch.cuda.Stream() if IS_CUDA else None
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            for _ in range(10):
                inner(inputs[number])
                assert same_bits(inner.activations["first"], expected[number])
                assert len(outer.activations) == 0

    run_in_threads(run, range(4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_t10_regions_that_run_again_are_recorded_once(reentrant: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return checkpoint(net.inner, x, use_reentrant=reentrant).square().sum()

    ends = []
    for doubles in (False, True):
        torch.manual_seed(0)
        net = Net(forward, inner=nn.Linear(16, 16)).to(DEVICE)
        x = torch.ones(8, 16, device=DEVICE, requires_grad=True)
        if doubles:
            rnet = recorded(net, x, "inner")
            loss = rnet(x, activation_postproc={"inner": lambda value: value * 2})
            recorded_once = rnet.activations["inner"].detach().clone()
            rnet(x)
            loss.backward()
            assert same_bits(recorded_once, net.inner(x))
        else:
            (net.inner(x) * 2).square().sum().backward()
        ends.append([net.inner.weight.grad, net.inner.bias.grad, x.grad])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


# -- graphs, captures and streams -----------------------------------------------------------------


@DYNAMO_READS_GRAD
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_records_of_a_graph_stay() -> None:
    net = network()
    rnet = recorded(net, batch(), "first", "act", "last")
    rnet.compile(**({"mode": "reduce-overhead"} if IS_CUDA else {"backend": "eager"}))
    kept = []
    for _ in range(8):
        with Watch(net) as watch:
            net(x := batch())
        rnet(x)
        kept.append((rnet.activations, rnet.activations["first"], watch))
    for records, read, watch in kept:
        # Compiled kernels may round differently.
        torch.testing.assert_close(read, watch.calls["first", 0].value)
        for name in ("first", "act"):
            torch.testing.assert_close(records[name], watch.calls[name, 0].value)


@ON_CUDA
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_an_explicit_capture_is_refused() -> None:
    net, x = network(), batch()
    rnet = recorded(net, x, "first")
    rnet(x)
    with (
        pytest.raises(UnsupportedNetError, match="reduce-overhead"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        rnet(x)
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedNetError, match="reduce-overhead"):
        torch.cuda.make_graphed_callables(rnet, (x,))
    torch.cuda.synchronize()
    assert same_bits(rnet(x), net(x))


@ON_CUDA
@torch.no_grad()
def test_reading_on_another_stream_waits() -> None:
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(20)]).cuda()
    x = torch.randn(4096, 2048, device="cuda")
    rnet = recorded(net, x, "19")
    for _ in range(2):
        rnet(x)
    expected = rnet.activations["19"].clone()
    for _ in range(5):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            rnet(x)
        records = rnet.activations
        read = records["19"]
        assert same_bits(read, expected)


# -- what does not wait, and what upper rooms do --------------------------------------------------

SELECTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all layers": (("*",), {}),
    "inputs": (("*",), {"inputs": True}),
    "operations": (("*/*",), {}),
    "attention": (("",), {"attention": True}),
    "host": (("*",), {"offload": True}),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("selection", SELECTIONS)
@torch.no_grad()
def test_a_pass_never_waits_for_the_device(
    selection: str, never_waits: Callable[[], AbstractContextManager[Any]]
) -> None:
    selectors, options = SELECTIONS[selection]
    net, x = network(attending), batch(2, 5, 64)
    rnet = recorded(net, x, *selectors, **options)
    for _ in range(2):
        rnet(x)
    with never_waits():
        rnet(x)
    with Watch(net) as watch:
        net(x)
    if selection in ("all layers", "host"):
        assert same_bits(rnet.activations["keys"].to(DEVICE), watch.calls["keys", 0].value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_attention_is_that_of_float64_and_can_be_cut(dtype: torch.dtype) -> None:
    net, x = network(attending, dtype=dtype), batch(2, 12, 64, dtype=dtype)
    rnet = recorded(net, x, "", attention=True)
    rnet(x)
    attention = rnet.attention[""]
    query, key = attention.query.double(), attention.key.double().repeat_interleave(2, dim=1)
    scores = query @ key.mT / 4.0
    causal = torch.ones(12, 12, dtype=torch.bool, device=DEVICE).tril()
    expected = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    torch.testing.assert_close(attention.weights().double(), expected, rtol=1e-4, atol=1e-5)
    assert attention.error < {torch.float32: 1e-4}.get(dtype, 2e-2)
    cut = rnet(x, activation_postproc={"": Knockout(queries=[-1], keys=[0, 3], heads=[1])})
    causal = causal.expand(4, 12, 12).clone()
    causal[1, -1, [0, 3]] = False
    by_hand = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ key
    by_hand = by_hand.transpose(1, 2).reshape(2, 12, 64)
    bound = {torch.float32: 1e-4}.get(dtype, 2e-2)
    torch.testing.assert_close(cut.double(), by_hand, rtol=bound, atol=bound)


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_every_store_keeps_the_same_bits(store: str, tmp_path: Path) -> None:
    net, data = network(dtype=torch.bfloat16), [batch(n, 16, dtype=torch.bfloat16) for n in (8, 3)]
    rnet = recorded(net, data[0], "first", "last")
    with Watch(net) as watch, torch.no_grad():
        for x in data:
            net(x)
    path = tmp_path / "run"
    recording = rnet.collect(data, store=f"disk:{path}" if store == "disk" else store)
    if store == "disk":
        recording = open_recording(path, verify=True)
    for name in ("first", "last"):
        expected = torch.cat([watch.calls[name, number].value for number in range(2)])
        assert recording[name].device.type == (DEVICE if store == "device" else "cpu")
        assert same_bits(recording[name][:].to(DEVICE), expected)


def test_reductions_run_where_the_rows_are() -> None:
    net, data = network(), [batch() for _ in range(3)]
    rnet = recorded(net, data[0], "first")
    recording = rnet.collect(data, store=None, reduce=reductions.Moments())
    with torch.no_grad():
        rows = torch.cat([net.first(x) for x in data]).double()
    assert recording["first"].mean.device.type == DEVICE
    mean, variance = recording["first"].mean, recording["first"].variance
    torch.testing.assert_close(mean.double(), rows.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(variance.double(), rows.var(0), rtol=1e-5, atol=1e-6)


def test_comparing_and_sweeping_on_the_device() -> None:
    net, x = network(), batch()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.norm.weight[3] += 0.5
    sides = [recorded(side, x, "first", "norm", "last") for side in (net, other)]
    first = compare(*sides, [x]).first
    assert first.layer.name == "norm"
    swept = sides[0].sweep(x, x.flip(0), lambda output: output[0, 0])
    with torch.no_grad():
        # All other layers follow from the patched one: only the residual sum is corrupted.
        y = net.last(net.act(net.norm(net.first(x)))) + x.flip(0)
    for name in ("first", "norm", "last"):
        assert float(swept[name]) == pytest.approx(float(y[0, 0]), abs=1e-4)


def test_a_guard_names_the_call_that_made_the_first_nan() -> None:
    net, x = network(), batch()
    rnet = recorded(net, x)
    with torch.no_grad():
        net.norm.weight[2] = torch.inf
    with pytest.raises(NonFiniteError, match="norm"), rnet.guard():
        net(x).sum().backward()


def test_a_guard_is_told_how_the_loss_was_scaled() -> None:
    net, x = network(), batch()
    rnet, scaler = recorded(net, x), torch.amp.GradScaler(DEVICE)
    optimizer = torch.optim.SGD(net.parameters())

    def step() -> None:
        scaler.scale((net(x) * 1e34).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with rnet.guard(scaler=scaler) as guard:
        step()
    assert guard.origin is None
    assert guard.num_skipped_steps == 1
    with pytest.raises(NonFiniteError), rnet.guard():
        step()


def test_networks_on_two_devices_leave_records_where_they_were_made() -> None:
    net = Net(
        lambda net, x: net.there(net.here(x).to(DEVICE)),
        here=nn.Linear(16, 16),
        there=nn.Linear(16, 16).to(DEVICE),
    )
    x = torch.randn(8, 16)
    rnet = recorded(net, x, "*")
    for _ in range(3):
        with Watch(net) as watch:
            rnet(x)
        for name, home in (("here", "cpu"), ("there", DEVICE)):
            assert rnet.activations[name].device.type == home
            assert same_bits(rnet.activations[name], watch.calls[name, 0].value)

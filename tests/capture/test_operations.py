"""Operations in all the circumstances in which layers are recorded, composed by hand."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scio_recorder import FlowError, LayerNotFoundError, PostprocessorError, Recorder
from scio_recorder.postprocessors import OnInput
from scio_recorder.tensors import private
from tests.garbage import garbage_left
from tests.harness import (
    Interrupt,
    attribute_names,
    hook_state,
    in_a_thread,
    no_default_device,
    one_process,
    recorder,
)
from tests.oracle import same_bits
from tests.zoo.base import Net

X = torch.linspace(-1, 1, 12).view(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x)) + x


class Body(nn.Module):
    """A block, run again in the backward pass or not, as a module or as a function."""

    def __init__(self, reentrant: bool | None = None, *, is_module: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last = Block(), nn.Linear(4, 2)
        self.reentrant, self.is_module = reentrant, is_module

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1
        function = self.block if self.is_module else lambda y: self.block.forward(y)
        if self.reentrant is None:
            hidden = function(hidden)
        else:
            hidden = checkpoint(function, hidden, use_reentrant=self.reentrant)
        return self.last(hidden.tanh())  # type: ignore[no-any-return]


def wrap(net: nn.Module, *selectors: Any, **options: Any) -> Recorder:
    return recorder(net, *(selectors or ("*/*",)), input_data=X, **options)


def gelu_by_hand(net: Any, x: Tensor = X) -> Tensor:
    return nn.functional.gelu(net.block.linear(x * 1))


def assert_true(rnet: Recorder, net: Any, x: Tensor = X) -> None:
    hidden = gelu_by_hand(net, x)
    assert same_bits(rnet.activations["block/gelu"], hidden)
    assert same_bits(rnet.activations["block/add"], hidden + x * 1)
    assert same_bits(rnet.activations["/tanh"], (hidden + x * 1).tanh())


def double(value: Tensor) -> Tensor:
    return value * 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("post", [double, OnInput(double)])
@pytest.mark.parametrize("function", ["gelu", "add"])
def test_checkpointed_modules_run_again_as_they_ran(
    reentrant: bool, post: Callable[..., Any], function: str
) -> None:
    found = []
    for net in (Body(reentrant), Body()):
        # Not "*/*": on PyTorch 2.8, checkpoint itself calls empty in the network's own code.
        selected = ("/mul", "/tanh", "*/linear", "*/gelu", "*/add")
        rnet = wrap(net, *selected, inputs=True, gradients=True)
        rnet(X.clone().requires_grad_(), activation_postproc={f"block/{function}": post})
        outputs = rnet(X.clone().requires_grad_(), activation_postproc={f"block/{function}": post})
        before = {at: value.clone() for at, value in rnet.activations.items()}
        outputs.square().sum().backward()
        assert all(map(same_bits, rnet.activations.values(), before.values()))
        gradients = [parameter.grad for parameter in net.parameters()]
        found.append((outputs, *before.values(), *gradients, *rnet.gradients.values()))
    assert len(found[0]) == len(found[1]) > 15
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_module_that_a_checkpointed_one_calls_again_and_again(call: int, reentrant: bool) -> None:
    weight = nn.Parameter(torch.tensor(1.5))
    part = Net(lambda net, x: x.sin() * net.weight, weight=weight)
    body = Net(lambda net, x: net.part(net.part(net.part(x))), part=part)
    net = Net(lambda net, x: checkpoint(net.body, x, use_reentrant=reentrant), body=body)
    rnet = recorder(net, f"2-{call + 1}/sin", input_data=X)
    x = X.clone().requires_grad_()
    rnet(x, activation_postproc=double).sum().backward()
    by_hand = X.clone().requires_grad_()
    result = by_hand
    for number in range(3):
        result = result.sin() * (2 if number == call else 1) * 1.5
    result.sum().backward()
    torch.testing.assert_close(x.grad, by_hand.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_are_recorded_and_not_changed(reentrant: bool) -> None:
    net = Body(reentrant, is_module=False)
    rnet = wrap(net)
    for _ in range(2):
        rnet(X.clone().requires_grad_()).sum().backward()
        assert same_bits(rnet.activations["/gelu"], gelu_by_hand(net))
    for post in (double, OnInput(double)):
        with pytest.raises(PostprocessorError, match="checkpointed function that is no module"):
            rnet(X.clone().requires_grad_(), activation_postproc={"/gelu": post})
    rnet(X.clone().requires_grad_(), activation_postproc={"/mul": double})


def test_own_code_in_a_worker_thread_is_not_seen() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return in_a_thread(net.block, x) if net.is_threaded else net.block(x)  # type: ignore[no-any-return]

    net = Net(forward, block=Block(), is_threaded=False)
    rnet = Recorder(net, input_data=X, verbose=0, force_static_flow=False)
    rnet.record("block/*")
    net.is_threaded = True  # type: ignore[assignment]
    with pytest.raises(FlowError, match="another thread called"):
        rnet(X)


def test_recorders_do_not_see_each_other() -> None:
    net = Body()
    first, second = wrap(net, inputs=True), wrap(net, "*/*", "*", inputs=True, gradients=True)
    inner = recorder(net.block, "/gelu", "/add", input_data=X, inputs=True)
    for one, other in ((first, second), (second, first)):
        with other.watch() as passes, inner.watch() as inner_passes:
            for _ in range(2):
                one(X.clone().requires_grad_()).sum().backward()
        assert_true(one, net)
        for kept in passes:
            assert same_bits(kept["block/gelu"], gelu_by_hand(net))
        for kept in inner_passes:
            assert same_bits(kept["/gelu"], gelu_by_hand(net))
    outer = recorder(nn.Sequential(first, nn.ReLU()), "*/*", input_data=X)
    names = {row.function for row in outer.operations().values()}
    assert names == {"mul", "linear", "gelu", "add", "tanh", "relu"}
    for _ in range(2):
        outer(X)
        assert same_bits(outer.activations["0._net.block/gelu"], gelu_by_hand(net))
        assert_true(first, net)


def test_hooks_of_others_are_no_own_code() -> None:
    net = Body()
    net.block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.block.register_forward_hook(lambda module, args, output: output.add(1))
    rnet = wrap(net, "block/*", inputs=True)
    net.block.register_forward_pre_hook(lambda module, args: (args[0].add(2),))
    net.block.register_forward_hook(lambda module, args, output: output + 2)
    net.block.linear.register_forward_hook(lambda module, args, output: output.add(3))
    assert [at.function for at in rnet.operations("block")] == ["gelu", "add"]
    for _ in range(2):
        rnet(X)
        x = (X * 1 + 1).add(2)
        hidden = nn.functional.gelu(nn.functional.linear(x, *net.block.linear.parameters()).add(3))
        assert same_bits(rnet.activations["block/gelu"], hidden)
        assert same_bits(rnet.activations["block/add"], hidden + x)


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_other_modes_around_and_inside() -> None:
    mode = Counting()

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x + 1
        with torch.device("cpu"), mode:
            hidden = net.block(torch.ones(3, 4) * x)
            hidden = hidden.sin()
        return hidden - torch.zeros(4)

    net = Net(forward, block=Block())
    rnet = wrap(net)
    functions = [at.function for at in rnet.operations()]
    assert functions == ["add", "ones", "mul", "linear", "gelu", "add", "sin", "zeros", "sub"]
    for around in (contextlib.nullcontext, lambda: torch.device("cpu"), Dispatching, Counting):
        for _ in range(2):
            mode.seen.clear()
            with around():
                rnet(X)
            count = torch._C._len_torch_function_stack()
            assert count == 0
            called = [name for name in mode.seen if name in functions]
            assert called == ["ones", "mul", "linear", "gelu", "add", "sin"]
            assert same_bits(rnet.activations["/sin"], net.block(torch.ones(3, 4) * (X + 1)).sin())
    torch.use_deterministic_algorithms(True)
    try:
        rnet(X)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits(rnet.activations["/sin"], net.block(torch.ones(3, 4) * (X + 1)).sin())


def test_the_calls_of_a_module_may_call_different_functions() -> None:
    either = Net(lambda _, x, is_first: x.sin() + 1 if is_first else x.cos())
    net = Net(lambda net, x: net.either(net.either(x, True), False), either=either)
    rnet = wrap(net, "either/*")
    for _ in range(3):
        rnet(X)
        assert same_bits(rnet.activations["1-1/sin"], X.sin())
        assert same_bits(rnet.activations["1-2/cos"], (X.sin() + 1).cos())


class Shifting(TorchFunctionMode):
    """Changes what every function returns that is called inside it, also of who only copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output + 1 if isinstance(output, Tensor) and output.dim() == 2 else output


class ShiftingSines(TorchDispatchMode):
    """Changes what sines and copies return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output + 1 if func._opname in ("sin", "clone") else output


def test_a_dispatch_mode_that_changes_copies_changes_no_record() -> None:
    rnet = wrap(Net(lambda _, x: x.sin().exp_() * 2))
    for _ in range(2):
        with ShiftingSines():
            rnet(X)
            # What lives on is copied when it is read.
            output = rnet.activations["/mul"]
        assert same_bits(rnet.activations["/sin"], X.sin() + 1)
        assert same_bits(output, (X.sin() + 1).exp() * 2)


@pytest.mark.parametrize(
    "options", [{}, {"copy": "always", "inputs": True}, {"offload": True}, {"gradients": True}]
)
def test_a_mode_that_changes_every_result_changes_no_record(options: dict[str, Any]) -> None:
    # Where a view is overwritten, the network gets a copy.
    net = Net(lambda net, x: net.block(x).view(4, 3).relu_() * 2, block=Block())
    rnet = wrap(net, "*/*", "block.linear", **options)
    weight, bias = net.block.linear.parameters()
    for _ in range(3):
        with Shifting():
            output = rnet(X)
            shape = rnet.activations["/view"].shape
        # Own code runs inside the mode, and a layer returns what the mode made of it.
        linear = nn.functional.linear(X, weight, bias) + 1
        view = (nn.functional.gelu(linear) + 1 + X + 1).view(shape) + 1
        assert same_bits(rnet.activations["block.linear"], linear)
        assert same_bits(rnet.activations["block.linear/linear"], linear)
        assert same_bits(rnet.activations["/view"], view)
        assert same_bits(output, (view.relu() + 1) * 2 + 1)
        if options.get("inputs"):
            assert same_bits(rnet.inputs["block/gelu"].args[0], linear)


class Doubling(TorchFunctionMode):
    """Computes something of its own with what a linear layer returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output.mul(2) if func is nn.functional.linear else output


def test_what_a_mode_around_a_module_computes_is_no_operation_of_it() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with Doubling():
            hidden = net.block(x)
            inside = nn.functional.linear(hidden, net.block.linear.weight)
        with contextlib.suppress(RuntimeError), Doubling():
            net.block(x[:, :1])
        return net.block(inside.exp())

    net = Net(forward, block=Block())
    rnet = wrap(net)
    names = [f"{row.layer.name}/{row.function}:{row.index}" for row in rnet.operations().values()]
    assert names == [
        *("block.linear/linear:0", "block/gelu:0", "block/add:0", "/linear:0", "/mul:0"),
        *("/getitem:0", "/exp:0", "block.linear/linear:0", "block/gelu:0", "block/add:0"),
    ]
    rnet.record("*/*")
    block = net.block
    for _ in range(2):
        rnet(X)
        assert torch._C._len_torch_function_stack() == 0
        doubled = nn.functional.linear(X, block.linear.weight, block.linear.bias) * 2
        assert same_bits(rnet.activations["2-1/linear:0"], doubled)
        hidden = nn.functional.gelu(doubled) + X
        expected = nn.functional.linear(hidden, block.linear.weight) * 2
        assert same_bits(rnet.activations["/mul"], expected)


def test_a_default_device_does_not_reach_copies() -> None:
    net = Body()
    rnet = wrap(net)
    torch.set_default_device("meta")
    try:
        for _ in range(2):
            rnet(X)
    finally:
        no_default_device()
    assert_true(rnet, net)


class Tagged(Tensor):
    pass


def test_tensors_of_other_classes() -> None:
    net = Body()
    rnet = wrap(net)
    for _ in range(2):
        rnet(X.clone().as_subclass(Tagged))
        assert type(rnet.activations["block/gelu"]) is Tagged
        assert same_bits(rnet.activations["block/gelu"].as_subclass(Tensor), gelu_by_hand(net))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        rnet(fake.from_tensor(X))
        assert type(rnet.activations["block/gelu"]).__name__ == "FakeTensor"
    rnet(X)
    assert_true(rnet, net)


def test_distributed_tensors_and_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        net, plain = Body(), Body()
        rnet = wrap(net, inputs=True)
        distribute_module(net, mesh)
        for _ in range(2):
            rnet(distribute_tensor(X, mesh, [Shard(0)]))
            found: Any = rnet.activations["block/gelu"]
            assert same_bits(found.full_tensor(), gelu_by_hand(plain))
        net = Body()
        before = wrap(net)
        fully_shard(net.block, mesh=mesh)  # type: ignore[call-overload]
        fully_shard(net, mesh=mesh)  # type: ignore[call-overload]
        for rnet in (before, wrap(net)):
            for _ in range(2):
                rnet(X).sum().backward()
                assert_true(rnet, plain)


def test_what_is_made_inside_a_forward_and_other_ways_to_forward() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        made = nn.GELU()(x) + sum(part * 2 for part in net.parts(x))
        try:
            net.failing(made)
        except ValueError:
            made = made + 7
        return made

    def failing(net: Any, x: Tensor) -> Tensor:
        x * 3
        raise ValueError

    def parts(net: Any, x: Tensor) -> Any:
        for number in range(2):
            yield x + number

    net = Net(forward, failing=Net(failing), parts=Net(parts))
    rnet = wrap(net, "*/*", inputs=True, gradients=True)
    # The code of a generator runs between its module's calls.
    functions = [at.function for at in rnet.operations("")]
    assert functions == ["gelu", "add", "mul", "add", "add", "mul", "add", "add", "add"]
    for _ in range(2):
        output = rnet(X.clone().requires_grad_())
        output.sum().backward()
        expected = nn.functional.gelu(X) + (0 + (X + 0) * 2 + (X + 1) * 2)
        assert same_bits(rnet.activations["/add:4"], expected)
        assert same_bits(rnet.activations["/add:5"], expected + 7)
    copying = Net(lambda net, x: copy.deepcopy(net.block)(x).sin() + net.block(x), block=Block())
    rnet = wrap(copying)
    functions = [at.function for at in rnet.operations("") if at.function not in ("data", "clone")]
    # The code of the copy, which has no name.
    assert functions == ["linear", "gelu", "add", "sin", "add"]
    for _ in range(2):
        rnet(X)
        assert same_bits(rnet.activations["/sin"], copying.block(X).sin())
    old = Body()
    plain = old.block.forward
    old.block.forward = lambda x: plain(x + 1).mul(2)  # type: ignore[method-assign]
    rnet = wrap(old)
    rnet(X)
    assert same_bits(rnet.activations["block/mul"], old.block(X * 1))


def test_a_pass_that_fails_leaves_nothing() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.block(x)
        if net.error is not None:
            raise net.error
        return hidden + 1  # type: ignore[no-any-return]

    net = Net(forward, block=Block(), error=None)
    before = hook_state(net), attribute_names(net)
    rnet = wrap(net)
    with torch.device("cpu"):
        count = torch._C._len_torch_function_stack()
        for error in (KeyboardInterrupt(), ValueError()):
            rnet(X)
            net.error = error
            with pytest.raises(type(error)):
                rnet(X)
            net.error = None
            assert torch._C._len_torch_function_stack() == count
            assert (hook_state(net), attribute_names(net)) == before
            assert not rnet.activations
            assert vars(net.block).get("_compiled_call_impl") is None
        rnet(X)
    assert same_bits(rnet.activations["block/add"], net.block(X))
    rnet.remove()
    assert (hook_state(net), attribute_names(net)) == before
    assert all(vars(module).get("_compiled_call_impl") is None for module in net.modules())
    rnet.record("*/*")
    rnet(X)
    held = weakref.ref(rnet.activations["block/gelu"])
    # The error's traceback holds frames of the pass that failed.
    del rnet, error
    gc.collect()
    assert held() is None
    assert (hook_state(net), attribute_names(net)) == before


@pytest.mark.parametrize("call", range(1, 7))
def test_an_interruption_between_modules_leaves_no_mode(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(lambda net, x: net.block(x) * 2, block=Block())
    rnet = wrap(net)
    replace, calls = private.replace_function_mode, itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return replace(*args)

    monkeypatch.setattr(private, "replace_function_mode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rnet(X)
    monkeypatch.undo()
    assert private.function_modes() == []
    rnet(X)
    assert same_bits(rnet.activations["/mul"], net.block(X) * 2)


def test_an_interruption_loses_no_mode_of_the_user() -> None:
    modes, unwanted = [Counting(), Counting()], Interrupt("set_function_modes", 0)
    outer = sys.gettrace()
    for bytecode in range(1, 40):
        unwanted.remaining = bytecode
        with modes[0], modes[1]:
            sys._getframe().f_trace_opcodes = True
            sys.settrace(unwanted)
            try:
                private.set_function_modes(modes[::-1])
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(outer)
            assert set(private.function_modes()) == set(modes)
    assert unwanted.remaining > 0


@pytest.mark.parametrize("options", [{}, {"inputs": True}])
def test_passes_leave_nothing_that_only_garbage_collection_ends(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    rnet = wrap(Body(), "*/*", "*", **options)
    for _ in range(3):
        rnet(X)
    # As torch built for CUDA, which looks for a library that is missing.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: type("Garbage", (), {}) is None)
    with garbage_left():
        rnet(X)
        assert gc.collect() == 0


def test_copies_and_files() -> None:
    net = Body()
    rnet = wrap(net, "*/*", "last", inputs=True)
    rnet(X)
    stored = io.BytesIO()
    torch.save(rnet, stored)
    stored.seek(0)
    copies = [
        copy.deepcopy(rnet),
        pickle.loads(pickle.dumps(rnet)),
        torch.load(stored, weights_only=False),
    ]
    for other in copies:
        assert other.recording == rnet.recording
        assert [str(at) for at in other.operations()] == [str(at) for at in rnet.operations()]
        other(X)
        assert_true(other, other.net)
        other.record("block/gelu:0")
        other(X)
        assert len(other.activations) == 1
    for bare in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net)):
        assert same_bits(bare(X), net(X))
        if not isinstance(bare, Recorder) and bare.block is not net.block:
            assert not any(hooks for hooks in hook_state(bare).values())
    assert_true(rnet, net)
    records = pickle.loads(pickle.dumps(dict(rnet.activations)))
    assert list(records) == list(rnet.activations)


def test_copy_of_a_recorder_that_has_listed_nothing_says_so() -> None:
    rnet = copy.deepcopy(Recorder(Body(), input_data=X, verbose=0))
    rnet.record("block")
    with pytest.raises(Exception, match="no longer has the inputs"):
        rnet.operations()


def test_options_of_record() -> None:
    net = Body()
    for options in ({"offload": True}, {"copy": "always"}, {"copy": "never"}):
        rnet = wrap(net, inputs=True, **options)
        for _ in range(2):
            rnet(X)
            assert_true(rnet, net)
            assert same_bits(rnet.inputs["block/gelu"].args[0], net.block.linear(X * 1))
    rnet = wrap(net, "block/gelu", "/mul")
    ran: list[int] = []
    net.last.register_forward_hook(lambda *call: ran.append(1))
    records = rnet.extract(X)
    assert not ran
    assert same_bits(records["block/gelu"], gelu_by_hand(net))
    with rnet.watch() as passes:
        net(X)
    assert same_bits(passes[0]["block/gelu"], gelu_by_hand(net))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_that_others_compiled_are_left_alone(backend: str) -> None:
    compiled = torch.compile(lambda y: nn.functional.gelu(y) * 2 + 1, backend=backend)
    net = Net(lambda net, x: compiled(net.first(x) + 1).sub(3), first=nn.Linear(4, 4))
    rnet = wrap(net)
    assert [at.function for at in rnet.operations()] == ["linear", "add", "sub"]
    with torch.no_grad():
        bare = net(X)
        for _ in range(3):
            assert same_bits(rnet(X), bare)
            assert same_bits(rnet.activations["/sub"], bare)
            assert same_bits(rnet.activations["/add"], net.first(X) + 1)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_recorders_record_layers_and_say_so_of_operations(fullgraph: bool) -> None:
    net = Body().eval()
    rnet = wrap(net, "block/*", "block", "last")
    rnet.compile(backend="eager", fullgraph=fullgraph)
    with torch.no_grad():
        assert same_bits(rnet(X), net(X))
        assert same_bits(rnet.activations["block"], net.block(X * 1))
        for key in ("block/gelu", "block/gelu:0", (1, 1, "gelu", 0)):
            with pytest.raises(LayerNotFoundError, match="the pass was compiled"):
                rnet.activations[key]
        # Up to PyTorch 2.9, dynamo hands on only the kind of an error.
        is_quoted = torch.__version__ >= "2.10" or not fullgraph
        told = "can't act on an operation in a compiled pass" if is_quoted else "PostprocessorError"
        with pytest.raises(Exception, match=told):
            rnet(X, activation_postproc={"block/gelu:0": double})
        rnet(X, activation_postproc={"last": double})


@pytest.mark.usefixtures("fresh_compiler")
def test_own_code_of_a_compiled_module_is_an_error() -> None:
    net = Body().eval()
    rnet = wrap(net, "block/*")
    net.block.compile(backend="eager")
    with torch.no_grad(), pytest.raises(FlowError, match=r"block/gelu:0 .* 0 now"):
        rnet(X)
    rnet.record("/tanh")
    with torch.no_grad():
        rnet(X)
        assert same_bits(rnet.activations["/tanh"], net.block(X * 1).tanh())


def test_a_mode_that_a_forward_enters_for_good_stays() -> None:
    def setting(net: Any, x: Tensor) -> Any:
        y = net.inner(x) * 2
        torch.set_default_device("cpu")
        return y + 1

    inside = Net(setting, inner=nn.Linear(4, 4))
    rnet = Recorder(Net(lambda net, x: net.setting(x) * 3, setting=inside), input_size=(2, 4))
    rnet.record("setting/add", "/mul")
    # Labelling and listing have run it, too.
    no_default_device()
    assert private.function_modes() == []
    try:
        x = torch.randn(2, 4)
        out = rnet(x)
        assert len(private.function_modes()) == 1
        assert torch.equal(out, (rnet.net.setting.inner(x) * 2 + 1) * 3)
        assert torch.equal(rnet.activations["/mul"], out)
    finally:
        no_default_device()
    assert private.function_modes() == []

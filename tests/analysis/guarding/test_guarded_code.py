"""The line that made the first NaN or infinity, in networks whose lines are changed for it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from scio_recorder import NonFiniteError, Recorder
from scio_recorder.analysis.guarding.guard import Guard, Origin
from scio_recorder.tensors import private
from tests.analysis.comparing.forwards import NETS, inputs_of
from tests.analysis.comparing.planted_lines import LineFault, nets
from tests.analysis.guarding.nonfinite import INF, NAN, Do

MASK_WHOLE = LineFault("GPT", "hidden = ~self.mask", "hidden = self.mask", "", False)
# What is changed, the line that makes the fault, and its function.
FAULTS = [
    (MASK_WHOLE, "weights = scores.softmax(-1)", "softmax"),
    (LineFault("GPT", "F.gelu(inner)", "torch.log(inner)"), "", "log"),
    (LineFault("GPT", "(hidden, -torch.inf)", "(hidden, torch.nan)"), "", None),
    (LineFault("Llama", "mean + 1e-6", "mean - mean"), "", "rsqrt"),
    (
        LineFault(
            "Llama", "x + self.down(inner)\n\n\nclass Llama(", "(x - x) / (x - x)\n\n\nclass Llama("
        ),
        "",
        "div",
    ),
    (LineFault("ResNet", "(variance + 1e-5)", "(-variance)"), "", "sqrt"),
    (
        LineFault("ResNet", "out * self.weight[:, None, None]", "(out.half() * 1e6).float()"),
        "",
        "mul",
    ),
    (LineFault("DenseNet", "(high - low)", "(low - low)"), "", "div"),
    (LineFault("DenseNet", "torch.tanh(x)", "torch.log(-x)"), "", "log"),
    (LineFault("ViT", "key.mT * 8**-0.5", "key.mT * 1e30 * 1e30"), "", "mul"),
    (LineFault("ViT", "(spread + 1e-6)", "(spread - spread - mean.relu()).sqrt()"), "", "sqrt"),
    (LineFault("LSTM", "torch.tanh(g)", "torch.acosh(torch.tanh(g))"), "", "acosh"),
    (LineFault("LSTM", "best - mean", "(best - best) / (mean - mean)"), "", "div"),
    (LineFault("UNet", "out.clamp(-1.0, 1.0)", "(out - 9).sqrt_()"), "", "sqrt_"),
    (LineFault("UNet", "2 * x - 1", "(-x).sqrt()"), "", "sqrt"),
    (LineFault("MoE", "(load + 1e-9).log()", "(load * 0).log()"), "", "log"),
    (LineFault("MoE", "best / best.sum", "best / 0 * best.sum"), "", "div"),
    (LineFault("Encoder", "total / count", "total / (count * 0)"), "", "div"),
    (LineFault("Encoder", "real = ids != 0", "real = ids < 0"), "mean = total / count", "div"),
    (LineFault("Graph", "degree.sqrt()", "(-degree).sqrt()"), "", "sqrt"),
]


def guarded(net: nn.Module, x: Any, **options: Any) -> Guard:
    rnet = Recorder(net, input_data=x, force_static_flow=False)
    with rnet.guard(action="record", **options) as guard:
        net(x)
    return guard


def origin_of(net: nn.Module, x: Any, **options: Any) -> Origin:
    origin = guarded(net, x, operations=True, **options).origin
    assert origin is not None
    return origin


def function_of(function: Callable[..., Tensor], x: Tensor | None = None) -> str | None:
    """Return the operation that is named for a function of a tensor, in a module of its own."""
    operation = origin_of(
        nn.Sequential(Do(function)), torch.ones(3, 4) if x is None else x
    ).operation
    return None if operation is None else str(operation.label).partition("/")[2]


@pytest.mark.parametrize(("fault", "line", "function"), FAULTS, ids=str)
def test_the_line_of_a_fault_is_named(fault: LineFault, line: str, function: str | None) -> None:
    net, x = nets(fault)[1], inputs_of(fault.net, 1)
    origin, plain = origin_of(net, x), guarded(net, x).origin
    assert plain.operation is None
    for name in ("layer", "num_nan", "num_inf", "index", "inputs_finite"):
        assert str(getattr(origin, name)) == str(getattr(plain, name))
    if function is None:
        # A number that somebody wrote: the softmax is given it, and makes nothing.
        assert origin.operation is None
        return
    operation = origin.operation
    assert operation.function.startswith(function)
    assert (line or fault.new.partition("\n")[0]) in operation.source
    assert operation.file == f"<{fault}>"
    assert operation.layer is origin.layer
    assert f"{operation.file}:{operation.line}: {operation.source}" in str(origin)


@pytest.mark.parametrize("name", NETS)
def test_a_network_with_masks_of_infinities_is_no_fault_and_is_as_without(name: str) -> None:
    net, _ = nets(LineFault(name, "import math\n", "import math\n"))
    x = inputs_of(name, 1)
    rnet = Recorder(net, input_data=x)
    before = net(x)
    with rnet.guard(operations=True) as guard:
        inside = net(x)
    assert guard.origin is None
    assert torch.equal(before, inside)
    assert inside.grad_fn.name() == before.grad_fn.name()
    assert not private.function_modes()
    for module in net.modules():
        assert private.compiled_call(module) is None
        assert not any(map(len, private.forward_hooks(module)))


def test_what_counts_as_given() -> None:
    zero = torch.zeros(3, 4)
    assert function_of(lambda x: torch.full((2,), INF) * x[0, 0] * 0) == "mul:1"
    assert function_of(lambda x: torch.tensor([INF, 1.0]) - INF) == "sub:0"
    assert function_of(lambda x: x.masked_fill(x > 0, -INF).softmax(-1)) == "softmax:0"
    assert function_of(lambda x: x + NAN) is None
    assert function_of(lambda x: torch.div(x, zero, out=torch.full((3, 4), NAN))) == "div:0"


def test_the_operation_where_it_began_is_named() -> None:
    def through_infinity(x: Tensor) -> Tensor:
        return (x - 1).log() * 0

    def beside_a_mask(x: Tensor) -> Tensor:
        mask = (torch.eye(4)[0] * 1.0).log()
        y = (x + mask).softmax(-1)
        return y + (x - x) / (x - x)

    def assigned(x: Tensor) -> Tensor:
        y = torch.zeros(4, dtype=torch.half)
        y[1] = x[0, 0] * 1e6
        return y

    assert function_of(through_infinity) == "log:0"
    assert function_of(beside_a_mask) == "div:0"
    assert function_of(assigned) == "setitem:0"
    assert function_of(lambda x: torch.empty(9).fill_(1.0)[0] / (x - x)) == "div:0"


def test_a_fault_in_a_module_of_torch_is_named_there() -> None:
    net = nn.Sequential(nn.ReLU(), nn.LayerNorm(4, eps=0.0))
    operation = origin_of(net, torch.ones(2, 4)).operation
    assert operation.function == "layer_norm"
    assert operation.file.endswith("normalization.py")


def test_a_gradient_has_no_operation() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Do(lambda x: (x - x.detach()).sqrt()))
    rnet = Recorder(net, input_size=(1, 4))
    with rnet.guard(action="record", operations=True) as guard:
        net(torch.ones(2, 4)).sum().backward()
    assert (guard.origin.direction, guard.origin.operation) == ("gradient", None)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_modules_are_guarded(use_reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / (x - x)))
    net = nn.Sequential(Do(lambda x: checkpoint(inner, x, use_reentrant=use_reentrant)), inner)
    x = torch.ones(2, 4, requires_grad=True)
    operation = origin_of(net, x).operation
    assert (operation.function, operation.layer.name) == ("div", "1.1")


def test_each_thread_has_its_own_code() -> None:
    made = Do(lambda x: x / x)
    rnet = Recorder(nn.Sequential(made), input_size=(1, 4))
    with rnet.guard(action="record", operations=True) as guard:
        thread = threading.Thread(target=rnet.net, args=(torch.zeros(2, 4),))
        thread.start()
        thread.join()
    assert guard.origin.operation.function == "div"


def test_an_error_names_the_line_and_leaves_nothing_behind() -> None:
    net = nn.Sequential(Do(lambda x: x.log()))
    rnet = Recorder(net, input_size=(1, 4))
    with (
        pytest.raises(NonFiniteError, match=r"log:0 made it at .*test_guarded_code.py:\d+: net"),
        rnet.guard(operations=True),
    ):
        net(torch.zeros(1, 4))
    assert not private.function_modes()
    assert private.compiled_call(net[0]) is None


class _Counting(TorchFunctionMode):
    """Another mode, which the own code enters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_other_modes_and_inner_modules() -> None:
    inner = Do(lambda x: x - x)

    def outer(x: Tensor) -> Tensor:
        with _Counting():
            return x / inner(x)

    net = nn.Sequential(Do(outer), inner)
    operation = origin_of(net, torch.ones(2, 4)).operation
    assert (operation.function, operation.layer.name) == ("div", "0")
    with torch.inference_mode():
        assert origin_of(net, torch.ones(2, 4)).operation is not None


def test_compiled_functions_are_left_alone(fresh_compiler: None) -> None:
    compiled = torch.compile(lambda x: x.log() * 2, backend="eager")
    operation = origin_of(nn.Sequential(Do(lambda x: compiled(x) + 1)), torch.zeros(2, 4)).operation
    assert operation is None or operation.function == "log"


def test_attention_of_torch_is_warned_of() -> None:
    net = nn.Sequential(Do(lambda x: attention(x, x, x, need_weights=False)[0])).eval()
    attention = net[0].attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    rnet, x = Recorder(net, input_size=(2, 3, 4)), torch.rand(2, 3, 4)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="fused kernel"), rnet.guard(operations=True):
            net(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with rnet.guard():
                net(x)

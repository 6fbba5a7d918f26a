"""Running a net of the zoo bare, watched by the oracle, or recorded, in every mode alike."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from scio_recorder import Recorder
from tests.oracle import freeze, generator_states, scalar_loss, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from tests.zoo.base import Case

CONTEXTS = ("no_grad", "grad", "inference", "autocast")


@dataclass(frozen=True)
class Mode:
    """Training flag and grad mode of a pass."""

    training: bool
    context: str

    @property
    def builds_graph(self) -> bool:
        return self.context == "grad" or (self.context == "autocast" and self.training)

    def allows(self, case: Case) -> bool:
        unable = {"inference": not case.inference, "autocast": not case.autocast}
        return not unable.get(self.context, False) and (case.train or not self.training)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.context == "inference":
                stack.enter_context(torch.inference_mode())
            elif not self.builds_graph:
                stack.enter_context(torch.no_grad())
            if self.context == "autocast":
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield

    def __str__(self) -> str:
        return f"{'train' if self.training else 'eval'}-{self.context}"


MODES = tuple(Mode(training, context) for training in (False, True) for context in CONTEXTS)


def run_in_threads(function: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Call a function with each argument on a thread that belongs to the caller's blocks."""
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(function, argument))
        for argument in arguments
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns on a thread that belongs to nobody's blocks."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Make this process the only one of a distributed group inside the block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def no_default_device() -> None:
    """Leave no default device, and nothing of one: PyTorch 2.8 can't be asked for it then."""
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def by_default(cases: Iterable[Case], names: Iterable[str]) -> list[Any]:
    """Return parameters for a test: named cases, and for the campaign all others."""
    chosen = set(names)
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.campaign] * (case.name not in chosen))
        for case in cases
    ]


def recorder(
    net: nn.Module,
    *selectors: Any,
    input_size: tuple[int, ...] = (3, 4),
    input_data: Any = None,
    **options: Any,
) -> Recorder:
    """Label a net, by data or by a size, and record what is selected, or all its layers."""
    labelled: Any = {"input_size": input_size} if input_data is None else {"input_data": input_data}
    rnet = Recorder(net, **labelled)
    rnet.record(*(selectors or ("*",)), **options)
    return rnet


def make_recorder(
    net: nn.Module, case: Case, *, training: bool = False, **settings: Any
) -> Recorder:
    """Label a net of the zoo with its own inputs."""
    args, kwargs = case.inputs(0)
    data: Any = list(args) if args else kwargs
    mode = "train" if training else "eval"
    extra = kwargs if args else {}
    return Recorder(net, input_data=data, mode=mode, verbose=0, **extra, **settings)


def executed(rnet: Recorder) -> list[tuple[int, int]]:
    return [label for label, layer in rnet.architecture.items() if layer.executed]


@dataclass
class Passed:
    """A forward pass, and what it left."""

    output: Any
    frozen: Any
    random_state: Any
    leaves: list[Tensor] = field(repr=False)

    def gradients(self, net: nn.Module) -> Any:
        """Differentiate; return every gradient that a user would look at."""
        net.zero_grad(set_to_none=True)
        loss = scalar_loss(self.output)
        if loss.requires_grad:
            loss.backward()
        parameters = {name: value.grad for name, value in net.named_parameters()}
        return freeze({"parameters": parameters, "inputs": [leaf.grad for leaf in self.leaves]})


def prepare(value: Any, requires_grad: bool, leaves: list[Tensor]) -> Any:
    """Copy inputs; what can be differentiated goes in as non-leaf tensors, as nets may write."""
    if isinstance(value, Tensor):
        if not requires_grad or not (value.is_floating_point() or value.is_complex()):
            return value.clone()
        leaves.append(value.clone().requires_grad_())
        return leaves[-1].clone()
    if isinstance(value, dict):
        return {key: prepare(item, requires_grad, leaves) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(prepare(item, requires_grad, leaves) for item in value)
    return value


def run_pass(net: nn.Module, case: Case, mode: Mode, seed: int, **extra: Any) -> Passed:
    leaves: list[Tensor] = []
    args, kwargs = prepare(case.inputs(seed), mode.builds_graph and case.input_gradients, leaves)
    seed_everything(seed)
    with mode.entered():
        output = net(*args, **kwargs, **extra)
    return Passed(output, freeze(output), generator_states(), leaves)


def hook_state(net: nn.Module) -> dict[str, list[str]]:
    """Every hook of every module, and those that are global, by the function's name."""
    found = {
        f"{name}.{key}": [
            getattr(hook, "__qualname__", type(hook).__qualname__) for hook in value.values()
        ]
        for name, module in net.named_modules()
        for key, value in vars(module).items()
        if "hooks" in key and isinstance(value, dict)
    }
    shared = vars(torch_module).items()
    found |= {
        key: [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in value.values()]
        for key, value in shared
        if key.startswith("_global") and isinstance(value, dict)
    }
    return found


def attribute_names(net: nn.Module) -> dict[str, list[str]]:
    return {name: sorted(vars(module)) for name, module in net.named_modules()}


def training_flags(net: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in net.named_modules()}


def trace(net: nn.Module) -> Any:
    """Everything about a net that recording must leave alone."""
    return freeze(
        {
            "flags": training_flags(net),
            "hooks": hook_state(net),
            "attributes": attribute_names(net),
            "classes": [type(module).__qualname__ for module in net.modules()],
            "requires_grad": [value.requires_grad for value in net.parameters()],
            "identities": [id(value) for value in net.parameters()],
            "gradients": [value.grad for value in net.parameters()],
            "state": dict(net.state_dict()),
            "buffers": dict(net.named_buffers()),
            "random": generator_states(),
        }
    )


class Interrupt:
    """Raises KeyboardInterrupt in a function of the recorder, ahead of its n-th bytecode."""

    def __init__(self, function: str, bytecode: int) -> None:
        self.function = function
        self.remaining = bytecode

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "scio_recorder" not in frame.f_code.co_filename:
            return None
        if frame.f_code.co_qualname == self.function:
            frame.f_trace_opcodes = True
            self.remaining -= event == "opcode"
            if self.remaining == 0:
                raise KeyboardInterrupt
        return self

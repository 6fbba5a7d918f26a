"""The values that recorders return, compared with the modules' outputs: right, wrong or refused.

Run ``python benchmarks/comparison.py``. Every recorder is used as its documentation shows, without
an extra copy. The right values come from a bare network with one hook that clones at once, those of
an operation from a function mode that does. "Wrong" is a value that differs, returned without an
error; "refused" is an exception, by its name; "to rounding" is a value that differs by no more than
rounding; "modules only" is a library that names no operations in code as it is. The last rows are
time, with one layer or one operation of 48 recorded, set up once if the interface allows it: the
median of 50 passes, compared with bare passes in turn. torchextractor, captum, nnsight, torchlens
and transformer-lens are in no extra: install those that you want to compare.

TransformerLens records GPT-2 through its `TransformerBridge`, which computes attention with code of
its own. In other networks it records values that pass its `HookPoint`s: one is put behind the
layer.
"""

from __future__ import annotations

import copy
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder import Recorder

# Sets up, and returns a function that runs a pass and returns the module's output at its first
# call.
Record = Callable[[nn.Module, "Case"], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    title: str
    net: nn.Module
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # The measured pass comes after one with these inputs, if there are any.
    first: tuple[Any, ...] | None = None
    # The function whose output is recorded, if it is not the module's.
    operation: str = ""


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        y += x
        return y


class Inside(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        y += x
        return y


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).sin())


class Assigned(nn.Module):
    """Writes into the container that a module returned, as some of transformers' networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = _Part()

    def forward(self, x: Tensor) -> Tensor:
        out = self.part(x)
        out["hidden"] = out["hidden"] * 2
        return out["hidden"]


class _Part(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x.sin()}


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x if skip else self.layer(x)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    # TransformerLens turns this kind of attention on, which differs from others in the last bits.
    return GPT2Model(
        GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            attn_implementation="eager",
            **ids,
        )
    )


def cases() -> list[Case]:
    x, ids = torch.randn(2, 4), torch.randint(64, (2, 8))
    image = torch.randn(2, 3, 8, 8)
    return [
        Case("a layer before `ReLU(inplace=True)`", InPlace(), "conv", (image,)),
        Case("a layer before a residual `+=`", Residual(), "block", (x,)),
        Case("the first call of a module called twice", Twice(), "layer", (x,)),
        Case("a dictionary that the net assigns into", Assigned(), "part", (x,)),
        Case(
            "a block of GPT-2 (transformers), keywords only", gpt2(), "h.0", (), {"input_ids": ids}
        ),
        Case("a tuple: GPT-2's attention", gpt2(), "h.1.attn", (), {"input_ids": ids}),
        Case("a layer that this pass skipped", Skipping(), "layer", (x, True), {}, (x, False)),
        Case(
            "an operation inside a forward, before an in-place one",
            nn.Sequential(Inside()),
            "0",
            (x,),
            operation="tanh",
        ),
    ]


def ours(net: nn.Module, case: Case) -> Callable[[], Any]:
    example = case.kwargs or list(case.first or case.args)
    rnet = Recorder(net, input_data=example, force_static_flow=case.first is None)
    rnet.record(f"{case.name}/{case.operation}" if case.operation else case.name)
    label = rnet.recording[0]
    if case.first:
        rnet(*case.first)

    def run() -> Any:
        rnet(*case.args, **case.kwargs)
        return rnet.activations[label]

    return run


def torchextractor(net: nn.Module, case: Case) -> Callable[[], Any]:
    import torchextractor as peer

    extractor = peer.Extractor(net, [case.name])
    if case.first:
        extractor(*case.first)
    return lambda: extractor(*case.args, **case.kwargs)[1][case.name]


def captum(net: nn.Module, case: Case) -> Callable[[], Any]:
    from captum.attr import LayerActivation

    peer = LayerActivation(net, net.get_submodule(case.name))
    inputs = case.args or tuple(case.kwargs.values())
    return lambda: peer.attribute(inputs[0], additional_forward_args=inputs[1:] or None)


def nnsight(net: nn.Module, case: Case) -> Callable[[], Any]:
    from nnsight import NNsight

    peer = NNsight(net)
    name = f"{case.name}.source.torch_{case.operation}_0" if case.operation else case.name

    def run() -> Any:
        with peer.trace(*case.args, **case.kwargs):
            output = operator.attrgetter(name)(peer).output.save()
        return output  # noqa: RET504 - nnsight reads the source of its block

    return run


def torchlens(net: nn.Module, case: Case) -> Callable[[], Any]:
    import torchlens as peer

    def run() -> Any:
        trace = peer.trace(net, case.args or None, case.kwargs or None)
        if case.operation:
            within = (f"{case.name}:1",)
            own = [one for one in trace.layer_list if one.modules == within]
            return [one.out for one in own if one.func_name == case.operation]
        call = trace.modules[case.name].calls[0]
        # They come in the order of computing: weights of an attention before its output.
        return sorted(call.outs, key=Tensor.dim)

    return run


class _WithHookPoint(nn.Module):
    def __init__(self, module: nn.Module, hook: nn.Module) -> None:
        super().__init__()
        self.module, self.hook = module, hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(self.module(*args, **kwargs))


def transformer_lens(net: nn.Module, case: Case) -> Callable[[], Any]:
    from transformer_lens import HookedRootModule
    from transformer_lens.hook_points import HookPoint

    if case.kwargs:
        return bridged(net, case)
    parent, _, name = case.name.rpartition(".")
    layer = net.get_submodule(case.name)
    setattr(net.get_submodule(parent), name, _WithHookPoint(layer, HookPoint()))
    peer = type("Hooked", (HookedRootModule,), {"forward": lambda self, *args: self.net(*args)})()
    peer.net = net
    peer.setup()
    hook = f"net.{case.name}.hook"

    def run() -> Any:
        return peer.run_with_cache(*case.args, names_filter=hook)[1][hook]

    if case.first:
        peer.run_with_cache(*case.first, names_filter=hook)
    return run


def bridged(net: nn.Module, case: Case) -> Callable[[], Any]:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2LMHeadModel

    whole = GPT2LMHeadModel(net.config).eval()
    whole.transformer = net
    peer = build_bridge_from_module(whole, "GPT2LMHeadModel", hf_config=net.config)
    name = case.name.replace("h.", "blocks.")
    # The bridge has two entries for the tuple that GPT-2's attention returns.
    hooks = [f"{name}.hook_out"] + ([f"{name}.hook_pattern"] if name.endswith("attn") else [])

    def run() -> Any:
        cache = peer.run_with_cache(case.kwargs["input_ids"])[1]
        return [cache[hook] for hook in hooks]

    return run


PEERS: dict[str, Record] = {
    "scio-recorder": ours,
    "torchextractor": torchextractor,
    "captum": captum,
    "nnsight": nnsight,
    "torchlens": torchlens,
    "transformer-lens": transformer_lens,
}


# They name modules, or points that somebody has put into the code.
MODULES_ONLY = (torchextractor, captum, transformer_lens)


class Cloning(TorchFunctionMode):
    """Keeps copies of what a function returns."""

    def __init__(self, name: str, kept: list[list[Tensor]]) -> None:
        super().__init__()
        self.name, self.kept = name, kept

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == self.name:
            self.kept.append([output.clone()])
        return output


def expected(case: Case) -> list[Tensor]:
    """Return the tensors that the first call of the module or function returned, cloned at once."""
    net, kept = copy.deepcopy(case.net).eval(), list[list[Tensor]]()
    if case.operation:
        with Cloning(case.operation, kept):
            net(*case.args, **case.kwargs)
        return kept[0]
    module = net.get_submodule(case.name)
    module.register_forward_hook(lambda *call: kept.append([t.clone() for t in found(call[2])]))
    net(*case.args, **case.kwargs)
    return kept[0] if kept else []


def found(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [t for item in items for t in found(item)] if isinstance(value, dict | list | tuple) else []
    )


def verdict(record: Record, case: Case) -> str:
    net = copy.deepcopy(case.net).eval()
    if case.operation and record in MODULES_ONLY:
        return "modules only"
    try:
        got = found(record(net, case)())
    except ImportError:
        return "not installed"
    except Exception as error:
        # A layer that did not run has no value: an error is the right answer.
        return "right: error" if case.first else f"refused ({type(error).__name__})"
    right = expected(case)
    if [one.shape for one in got] != [one.shape for one in right]:
        return "**wrong**"
    if all(map(torch.equal, got, right)):
        return "right"
    return "to rounding" if all(map(torch.allclose, got, right)) else "**wrong**"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ours, *others = PEERS
    print(f"| what is recorded | {ours} {released(ours)} | the others |")
    print("| --- | --- | --- |")
    with torch.no_grad():
        for case in cases():
            verdicts = {name: verdict(record, case) for name, record in PEERS.items()}
            print(f"| {case.title} | {verdicts.pop(ours)} | {grouped(verdicts)} |")
        for title, operation in (("", ""), (", an operation", "tanh")):
            times = {name: slowdown(record, operation) for name, record in PEERS.items()}
            text = ", ".join(f"{name} {times[name]}" for name in others if times[name])
            print(f"| time of a pass / bare{title} | {times[ours]} | {text} |")
    print(*(f"{name} {released(name)}" for name in others), sep=", ")


def grouped(verdicts: dict[str, str]) -> str:
    """Return a text that names each verdict once, wrong ones first: a phone shows it."""
    names: dict[str, list[str]] = {}
    for name, text in sorted(verdicts.items(), key=lambda item: item[1] != "**wrong**"):
        names.setdefault(text, []).append(name)
    return "; ".join(f"{text}: {', '.join(peers)}" for text, peers in names.items())


def slowdown(record: Record, operation: str = "") -> str:
    block = Inside if operation else lambda size: nn.Linear(size, size)
    net = nn.Sequential(*(block(256) for _ in range(48))).eval()
    case = Case("", net, "20", (torch.randn(64, 256),), operation=operation)
    if operation and record in MODULES_ONLY:
        return ""
    try:
        run = record(copy.deepcopy(net), case)
        run()
    except Exception:
        return ""
    ratios = []
    for _ in range(50):
        bare, seen = timed(lambda: net(*case.args)), timed(run)
        ratios.append(seen / bare)
    return f"{statistics.median(ratios):.1f}"


def timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def released(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "(not installed)"


if __name__ == "__main__":
    main()

"""What a residual stream must be: plain hooks, sums by hand, and gradients between positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Recorder

BRANCHES = ("attn_out", "mixer_out", "mlp_out")


def first_tensor(value: Any) -> Tensor:
    """Return the first floating tensor in what a module receives or returns."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value
    return next(first_tensor(part) for part in parts if isinstance(part, Tensor | tuple | list))


def blocks_of(net: nn.Module, count: int, inputs: Mapping[str, Tensor]) -> nn.ModuleList:
    """Return the least deep list of that many modules that all run."""
    ran: set[nn.Module] = set()
    handles = [
        module.register_forward_hook(lambda module, *_: ran.add(module)) for module in net.modules()
    ]
    with torch.no_grad():
        net(**inputs)
    for handle in handles:
        handle.remove()
    lists = [(name, x) for name, x in net.named_modules() if isinstance(x, nn.ModuleList)]
    fitting = [(name.count("."), x) for name, x in lists if len(x) == count and ran >= {*x}]
    return min(fitting, key=lambda pair: pair[0])[1]


def run_by_hand(
    net: nn.Module, blocks: nn.ModuleList, inputs: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Return copies of what each block received and returned, and the output, by plain hooks."""
    received: list[Tensor] = []
    returned: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        received.append(first_tensor([*args, *kwargs.values()]).detach().clone())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        returned.append(first_tensor(output).detach().clone())

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        with torch.no_grad():
            return received, returned, net(**inputs)
    finally:
        for handle in handles:
            handle.remove()


def assert_stream(rnet: Recorder, stream: Any, inputs: Mapping[str, Tensor]) -> None:
    """Compare the rows of a stream with plain hooks and with sums by hand, on other inputs."""
    count = 1 + max(int(name.split(".")[1]) for name in stream if name.startswith("blocks."))
    blocks = blocks_of(rnet.net, count, inputs)
    received, returned, output = run_by_hand(rnet.net, blocks, inputs)
    rnet.record(*stream.values())
    with torch.no_grad():
        rnet(**inputs)
    values = {name: rnet.activations[label] for name, label in stream.items()}
    for number in range(count):
        block = {kind: values.get(f"blocks.{number}.{kind}") for kind in BRANCHES}
        pre, post, middle = (
            values.get(f"blocks.{number}.resid_{at}") for at in ("pre", "post", "mid")
        )
        assert_same(pre, received[number])
        assert_same(post, returned[number])
        known = [x for x in block.values() if x is not None]
        if any("several" in str(stream.entries[f"blocks.{number}.{kind}"]) for kind in BRANCHES):
            continue
        assert_sum(post, pre, *known)
        if middle is not None:
            # What comes behind it is one branch, which is left out of the sum.
            behind = block["mlp_out"] if block["mlp_out"] is not None else block["mixer_out"]
            assert_sum(middle, pre, *(x for x in known if x is not behind))
    if "logits" in stream:
        assert_same(values["logits"], output.logits)


def assert_same(value: Tensor, expected: Tensor) -> None:
    """Compare bits of numbers, whatever the shape."""
    assert torch.equal(value.flatten(), expected.flatten().to(value.dtype))


def assert_sum(total: Tensor, *parts: Tensor) -> None:
    """Add by hand in float64."""
    by_hand = sum(part.double().flatten() for part in parts)
    torch.testing.assert_close(total.double().flatten(), by_hand, rtol=1e-5, atol=1e-5)


def assert_mixing(rnet: Recorder, stream: Any, inputs: Mapping[str, Tensor]) -> int:
    """Compare which branches mix positions with gradients, and return how many were compared."""
    rnet.record(*stream.values())
    rnet(**inputs)
    values = {name: rnet.activations[label] for name, label in stream.items()}
    shape = inputs["input_ids"].shape
    compared = 0
    for name, value in values.items():
        prefix, _, kind = name.rpartition(".")
        if kind not in BRANCHES:
            continue
        state = values[f"{prefix}.resid_pre"]
        if kind == "mlp_out":
            state = values.get(f"{prefix}.resid_mid", state)
        if not (value.requires_grad and state.requires_grad):
            continue
        last = value.reshape(*shape, -1)[:, -1]
        weights = torch.arange(last.numel()).reshape(last.shape) % 7 + 1.0
        (gradient,) = torch.autograd.grad(
            (last * weights).sum(), state, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            continue
        gradient = gradient.reshape(*shape, -1)
        reaches_back = bool(gradient[:, :-1].abs().max() > 1e-5 * gradient.abs().max())
        assert reaches_back == (kind != "mlp_out"), name
        compared += 1
    return compared

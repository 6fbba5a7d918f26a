"""A program: a network in which memory is gone between calls, in a function that reads tensors.

Called with how memory is lost, where, the function, and a file for mapped memory. It ends with
status 0 if outputs are those of the network and anything else is right or one of our errors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Recorder, RecorderError, compare, reductions

# Tests import this file as well.
HOW, WHERE, WAY, PATH = (*sys.argv[1:], *[""] * 4)[:4]
OF_WEIGHTS = ("parameter", "buffer", "attribute", "container")


def lose(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if HOW != "mapped":
        storage.resize_(0 if HOW == "freed" else storage.nbytes() // 2)


def made(values: Tensor) -> Tensor:
    if HOW != "mapped":
        return values.clone()
    size = values.numel()
    return torch.from_file(PATH, shared=True, size=size).view_as(values).copy_(values)


class Offloaded(nn.Module):
    """Has the memory of its weight only while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.host = torch.randn(8, 8)
        weight = made(self.host)
        self.num_bytes = weight.untyped_storage().nbytes()
        self.held = {"weight": [weight if WHERE == "container" else None]}
        if WHERE == "parameter":
            self.weight = nn.Parameter(weight)
        elif WHERE == "buffer":
            self.register_buffer("weight", weight)
        elif WHERE == "attribute":
            self.weight = weight  # type: ignore[assignment]  # a plain tensor
        if WHERE in OF_WEIGHTS:
            lose(self.own())

    def own(self) -> Any:
        return self.held["weight"][0] if WHERE == "container" else self.weight

    @torch.no_grad()
    def forward(self, x: Tensor, unused: Any = None) -> Tensor:
        if WHERE not in OF_WEIGHTS:
            return x @ self.host
        weight = self.own()
        if HOW != "mapped":
            weight.untyped_storage().resize_(self.num_bytes)
        output = x @ weight.copy_(self.host)
        lose(weight)
        return output  # type: ignore[no-any-return]


class Returning(nn.Module):
    """Returns a tensor whose memory may be gone, beside one that has its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.clone()
        if WHERE == "output":
            lose(first)
        return first, x.tanh()


class Second(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[1] * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.second = Offloaded(), Returning(), Second()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, unused: Any = None) -> Any:
        return self.last(self.second(self.pair(self.first(x, unused))))


def read(records: Mapping[Any, Any]) -> None:
    for label in records:
        try:
            float(sum(float(part.sum()) for part in parts(records[label])))
        except RecorderError as error:
            print(error)


def parts(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [part for item in value if isinstance(item, Tensor | tuple) for part in parts(item)]


def run_pass(rnet: Recorder, call: Any, **options: Any) -> None:
    rnet.record("*", **options)
    rnet(*call)
    rnet(*call)
    read(rnet.activations)
    read(rnet.inputs)


def collect(rnet: Recorder, call: Any, *selectors: str, **options: Any) -> Any:
    rnet.record(*selectors)
    return rnet.collect([call], to_inputs=lambda batch: batch, progress=False, **options)


def guarded(rnet: Recorder, call: Any, **options: Any) -> None:
    with rnet.guard(**options):
        rnet.net(*call).sum().backward()


def tracked(rnet: Recorder, call: Any) -> None:
    with rnet.track() as log:
        rnet.net(*call).sum().backward()
    str(log)


def watched(rnet: Recorder, call: Any) -> None:
    with rnet.watch() as passes:
        rnet.net(*call)
    read(passes[-1])


def compared(rnet: Recorder, call: Any, *selectors: str, **options: Any) -> None:
    rnet.record(*selectors)
    batches = [call]
    assert compare(rnet, rnet, batches, to_inputs=lambda batch: batch, **options).first is None


WAYS: dict[str, Any] = {
    "record": run_pass,
    "inputs": lambda rnet, call: run_pass(rnet, call, inputs=True),
    "always": lambda rnet, call: run_pass(rnet, call, copy="always", inputs=True),
    "offload": lambda rnet, call: run_pass(rnet, call, offload=True),
    "collect": lambda rnet, call: collect(rnet, call, "first", "last"),
    "collect pair": lambda rnet, call: collect(
        rnet, call, "pair", transform=lambda pair, batch: pair[0]
    ),
    "disk": lambda rnet, call: collect(rnet, call, "last", store=f"disk:{PATH}.d"),
    "page": lambda rnet, call: collect(rnet, call, "last").report(f"{PATH}.html"),
    "digest": lambda rnet, call: collect(rnet, call, "last", reduce=reductions.Digest()),
    "compare": lambda rnet, call: compared(rnet, call, "first", "last"),
    "compare pair": lambda rnet, call: compared(rnet, call, "*"),
    "compare operations": lambda rnet, call: compared(rnet, call, "*", operations=True),
    "sweep": lambda rnet, call: rnet.sweep(call, (call[0] + 1, *call[1:]), lambda out: out.sum()),
    "recompute": lambda rnet, call: rnet.recompute("first", "last"),
    "guard": guarded,
    "guard operations": lambda rnet, call: guarded(rnet, call, operations=True),
    "check": lambda rnet, call: rnet.check(*call),
    "track": tracked,
    "watch": watched,
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net, x, unused = Net().eval(), torch.randn(6, 8), torch.randn(6, 8)
    if WHERE == "input":
        lose(unused)
    call = (x, unused) if WHERE == "input" else (x,)
    expected = net.last(2 * (x @ net.first.host).tanh())
    rnet = Recorder(net, input_data=call)
    for way in WAYS if WAY == "all" else [WAY]:
        rnet.record("*", inputs=True)
        assert torch.equal(rnet(*call), expected), way
        try:
            WAYS[way](rnet, call)
        except RecorderError as error:
            print(way, error)
        assert torch.equal(net(*call), expected), way
    if HOW != "mapped" and WHERE in OF_WEIGHTS:
        assert net.first.own().untyped_storage().nbytes() < net.first.num_bytes


if __name__ == "__main__":
    main()

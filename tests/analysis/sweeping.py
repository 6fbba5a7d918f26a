"""The loop that a sweep stands for, written by hand: plain hooks on a new net for every run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import seed_everything, tensors

Key = tuple[str, int]


def weighed(output: Any) -> float:
    """Weigh every number of an output differently, and add them up."""
    total = 0.0
    for tensor in tensors(output):
        dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        flat = real.detach().reshape(-1).double()
        total += float((flat * torch.linspace(-1, 1.5, len(flat), dtype=torch.float64)).sum())
    return total


class ByHand:
    """Runs of nets that `build` makes alike, each with the same random numbers.

    A key is the name of a module and the number of its call, in the order in which calls start.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        metric: Callable[[Any], Any],
        *,
        training: bool = False,
        seed: int = 5,
    ) -> None:
        self._build = build
        self._metric = metric
        self._training = training
        self._seed = seed

    def run(
        self, inputs: tuple[Any, Any], change: Mapping[Key, Callable[[Any], Any]] | None = None
    ) -> tuple[float, dict[Key, Any]]:
        """Return the metric, and copies of what the modules returned."""
        net, found = self._build().train(self._training), dict[Key, Any]()
        for name, module in net.named_modules():
            self._hook(module, name, found, change or {})
        args, kwargs = copy.deepcopy(inputs)
        seed_everything(self._seed)
        with torch.no_grad():
            return float(self._metric(net(*args, **kwargs))), found

    @staticmethod
    def _hook(
        module: nn.Module,
        name: str,
        found: dict[Key, Any],
        change: Mapping[Key, Callable[[Any], Any]],
    ) -> None:
        running, started = list[int](), [0]

        def before(_module: nn.Module, _args: Any) -> None:
            running.append(started[0])
            started[0] += 1

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            key = name, running.pop()
            found[key] = duplicate(output)
            return change[key](output) if key in change else None

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def patched(
        self, corrupted: tuple[Any, Any], key: Key, clean: Any, position: int | None = None
    ) -> float:
        """Return the metric of a run in which a call returns what it did in the clean run."""

        def change(output: Any) -> Any:
            if position is None:
                return duplicate(clean)
            return mixed(output, clean, position)

        return self.run(corrupted, {key: change})[0]


def duplicate(value: Any) -> Any:
    """Copy a structure, off the graph, which nets may build without being asked."""
    odd = [one for one in tensors(value) if one.requires_grad or one.layout != torch.strided]
    odd += [one for one in tensors(value) if type(one) is not Tensor]
    return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in odd})


def mixed(output: Any, clean: Any, position: int) -> Any:
    """Put a position of dimension 1 of every tensor into a copy of what was returned."""
    if isinstance(output, Tensor):
        result = output.clone()
        result[:, position] = clean[:, position]
        return result
    if isinstance(output, dict):
        new = copy.copy(output)
        for key in output:
            new[key] = mixed(output[key], clean[key], position)
        return new
    if isinstance(output, (tuple, list)):
        return type(output)(
            mixed(own, other, position) for own, other in zip(output, clean, strict=True)
        )
    return output

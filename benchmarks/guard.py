"""The cost of a guard, compared with the bare pass and the bare training step.

Run ``python benchmarks/guard.py [--rounds 40] [--full-size]``; with the last option, the networks
are as large as those that people use. All arms run in turn, in random order and in one
thread, whose processor time counts, since other programs make it wait. "whole block" also times the
block, which adds hooks to all modules and removes them. "inside" times only the code in the block,
as in a block around a training run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from recompute import BLOCKS, block
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2Model,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from scio_recorder import Recorder


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(channels, channels), *convolution(channels, channels)[:2]
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += x
        return self.relu(y)  # type: ignore[no-any-return]  # a module's call


class Only(nn.Module):
    """A network that returns nothing but the last tensor of another one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).last_hidden_state  # type: ignore[no-any-return]  # a module's call


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--full-size", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nets = full_size() if given.full_size else small()
    title = f"guard / bare, one thread, {given.rounds} rounds, torch {torch.__version__}"
    table = Table(title=title)
    for heading in ("what", "minima, whole block", "minima, inside", "median, inside", "bar"):
        table.add_column(heading)
    for name, (net, x) in nets.items():
        for what, training in (("pass", False), ("training step", True)):
            row = measured(net.train(training), x, training, given.rounds)
            table.add_row(f"{name}: {what}", *row)
    Console(width=120).print(table)


def small() -> dict[str, tuple[nn.Module, Tensor]]:
    transformer = nn.Sequential(*(block() for _ in range(BLOCKS)))
    stages = ([*convolution(a, b, 2), Residual(b), Residual(b)] for a, b in ((32, 64), (64, 128)))
    convolutional = nn.Sequential(
        *convolution(3, 32), Residual(32), *(layer for stage in stages for layer in stage)
    )
    vision = ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=64,
        patch_size=8,
    )
    return {
        f"transformer, {BLOCKS} blocks": (transformer, torch.randn(8, 64, 128)),
        "convolutional, 7 blocks": (convolutional, torch.randn(8, 3, 32, 32)),
        "ViT, 4 blocks of 192": (Only(ViTModel(vision)), torch.randn(4, 3, 64, 64)),
        "ResNet-18, 64 pixels": (residual_net(), torch.randn(4, 3, 64, 64)),
    }


def full_size() -> dict[str, tuple[nn.Module, Tensor]]:
    language = GPT2Config(use_cache=False)
    return {
        "ResNet-18": (residual_net(), torch.randn(8, 3, 224, 224)),
        "ResNet-50": (Only(ResNetModel(ResNetConfig())), torch.randn(4, 3, 224, 224)),
        "ViT-B/16": (Only(ViTModel(ViTConfig())), torch.randn(2, 3, 224, 224)),
        "GPT-2": (Only(GPT2Model(language)), torch.randint(0, 1000, (2, 128))),
    }


def residual_net() -> nn.Module:
    widths = [64, 128, 256, 512]
    config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=widths)
    return Only(ResNetModel(config))


def measured(net: nn.Module, x: Tensor, training: bool, rounds: int) -> tuple[str, ...]:
    rnet = Recorder(net, input_data=x[:2], verbose=0)
    inside: list[float] = []

    def bare() -> None:
        with torch.set_grad_enabled(training):
            output = net(x)
        if training:
            net.zero_grad()
            output.square().mean().backward()

    def guarded() -> None:
        with rnet.guard():
            start = time.thread_time()
            bare()
            inside.append(time.thread_time() - start)

    arms: dict[str, Callable[[], object]] = {"bare": bare, "guarded": guarded}
    spent = interleaved(arms, rounds, clock=time.thread_time)
    pairs = zip(inside[1:], spent["bare"], strict=True)
    least = min(spent["bare"])
    return (
        f"{min(spent['guarded']) / least:.3f}",
        f"{min(inside) / least:.3f}",
        f"{statistics.median(a / b for a, b in pairs):.3f}",
        "1.15",
    )


if __name__ == "__main__":
    main()

"""What recording costs on a GPU, each line beside an arm that is written by hand.

Run ``python benchmarks/gpu.py [--seconds 2.5] [--only TEXT]`` where there is a GPU: it takes less
than four minutes. ``--small`` runs the same lines with small networks on the processor, in less
than one, which shows that the program works and nothing about a GPU. The arms of a line run in
turn, in random order, each until the device is done; a figure is the median of the ratios of the
rounds, with quartiles. If a line has two arms by hand that can run side by side, the longer counts.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compiled import Returning
from operations import Keeping
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from timing import interleaved
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from scio_recorder import Recorder, compare, reductions

Arm = Callable[[], object]


class Line(NamedTuple):
    """One line of the table: ours, and what it is compared with."""

    name: str
    ours: Arm
    by_hand: Sequence[Arm]
    bar: str


class Scale(NamedTuple):
    """The sizes of a run, on a GPU or in small."""

    device: str
    is_small: bool
    dtype: torch.dtype = torch.bfloat16

    def gpt2(self, blocks: int = 12) -> nn.Module:
        width = 32 if self.is_small else 768
        config = GPT2Config(
            n_layer=2 if self.is_small else blocks,
            n_embd=width,
            n_head=2 if self.is_small else 12,
            vocab_size=256,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        return self.on_device(GPT2Model(config))

    def llama(self) -> nn.Module:
        width = 32 if self.is_small else 2048
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=6 if self.is_small else 16,
            num_attention_heads=2 if self.is_small else 32,
            num_key_value_heads=2 if self.is_small else 8,
            vocab_size=256,
            use_cache=False,
        )
        return self.on_device(LlamaModel(config)).to(self.dtype)

    def resnet(self) -> nn.Module:
        sizes = {"hidden_sizes": [8, 16], "depths": [1, 1]} if self.is_small else {}
        return self.on_device(ResNetModel(ResNetConfig(**sizes)))

    def vit(self) -> nn.Module:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return self.on_device(ViTModel(ViTConfig(**(sizes if self.is_small else {}))))

    def on_device(self, net: nn.Module) -> nn.Module:
        return net.to(self.device).eval()

    def ids(self, rows: int, length: int) -> Tensor:
        if self.is_small:
            rows, length = min(rows, 2), min(length, 16)
        return torch.randint(0, 256, (rows, length), device=self.device)

    def images(self, rows: int) -> Tensor:
        return torch.randn(2 if self.is_small else rows, 3, 224, 224, device=self.device)

    def rows(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (count // 64, 64) if self.is_small else (count, 2048)
        return torch.randn(shape, device=self.device).to(dtype)

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def recorder(net: nn.Module, x: Tensor, *selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*selectors, **options)
    for _ in range(2 if rnet.recording else 0):
        rnet(x)
    return rnet


def hooked(net: nn.Module, modules: Sequence[nn.Module], keeps: bool, x: Tensor) -> Arm:
    """Return passes under hooks that are there only for them."""
    kept: dict[nn.Module, Any] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if keeps:
            kept[module] = output

    def run() -> None:
        handles = [module.register_forward_hook(hook) for module in modules]
        net(x)
        for handle in handles:
            handle.remove()

    return run


def blocks_of(net: nn.Module) -> list[str]:
    pattern = r"(h|layers|encoder\.layer|encoder\.stages\.\d+\.layers)\.\d+"
    return [name for name, _ in net.named_modules() if re.fullmatch(pattern, name)]


# -- recording -------------------------------------------------------------------------------------


def recording(scale: Scale) -> Iterator[Line]:
    nets = {
        "GPT-2, 8 x 512": (scale.gpt2(), scale.ids(8, 512)),
        "Llama-1B, 4 x 512": (scale.llama(), scale.ids(4, 512)),
        "ResNet-50, 64": (scale.resnet(), scale.images(64)),
        "ViT, 64": (scale.vit(), scale.images(64)),
    }
    for name, (net, x) in nets.items():
        modules = dict(net.named_modules())
        leaves = [at for at, module in modules.items() if not [*module.children()]]
        probe = Recorder(net, input_data=x, verbose=0)
        ran = {row.name for row in probe.architecture.values() if row.executed}
        for what, chosen in (("blocks", blocks_of(net)), ("leaf layers", leaves)):
            layers = [at for at in chosen if at in ran]
            rnet = recorder(net, x, *layers)
            bare = hooked(net, [], False, x)
            keeping = hooked(net, [modules[at] for at in layers], True, x)
            yield Line(f"{len(layers)} {what} of {name} / bare", partial(rnet, x), [bare], "1.05")
            yield Line("  the same / hooks that keep", partial(rnet, x), [keeping], "1.05")


def tiny_layers(scale: Scale) -> Iterator[Line]:
    net = scale.on_device(nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))))
    x = torch.randn(4, 8, device=scale.device)
    rnet = recorder(net, x, *(str(i) for i in range(24)))
    nothing, keeping = (hooked(net, [*net], keeps, x) for keeps in (False, True))
    yield Line("24 tiny layers / hooks that do nothing", partial(rnet, x), [nothing], "")
    yield Line("  the same / hooks that keep", partial(rnet, x), [keeping], "")


def operations(scale: Scale) -> Iterator[Line]:
    net = scale.gpt2()
    for rows, length, bar in ((8, 512, "1.15"), (1, 64, "1.5")):
        x = scale.ids(rows, length)
        every = recorder(net, x, "*/*")

        def under_mode(x: Tensor = x) -> None:
            with Keeping([]):
                net(x)

        name = f"every operation, {rows} x {length} / a mode that keeps all"
        yield Line(name, partial(every, x), [under_mode], bar)
        single = recorder(net, x, "h.1/add:1")
        yield Line(
            f"one operation, {rows} x {length} / bare",
            partial(single, x),
            [partial(net, x)],
            "1.04",
        )
        attending = recorder(net, x, re.compile(r"h\.\d\.attn$"), attention=True)
        yield Line(
            f"attention of ten, {rows} x {length} / bare",
            partial(attending, x),
            [partial(net, x)],
            "1.20",
        )


def compiled(scale: Scale) -> Iterator[Line]:
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU(inplace=True))]
    net = scale.on_device(nn.Sequential(*layers))
    x = torch.randn(16, 64, device=scale.device)
    for mode, bar in (("default", "1.10"), ("reduce-overhead", "1.25")):
        options: dict[str, Any] = {"backend": "eager"} if scale.is_small else {"mode": mode}
        torch.compiler.reset()
        rnet = recorder(net, x, *(str(i) for i in range(12)))
        rnet.compile(**options)
        returning = torch.compile(Returning(net), **options)
        for _ in range(4):
            rnet(x)
        name = f"compiled, {mode} / a compiled net that returns the same"
        yield Line(name, partial(rnet, x), [partial(returning, x)], bar)
        rnet.remove()


# -- upper rooms -----------------------------------------------------------------------------------


def guard(scale: Scale) -> Iterator[Line]:
    net = scale.gpt2()
    modules = [*net.modules()]
    for rows, length, bar in ((8, 512, "1.20"), (1, 64, "1.9")):
        x, rnet = scale.ids(rows, length), recorder(net, scale.ids(rows, length))

        def guarded(x: Tensor = x, rnet: Recorder = rnet) -> None:
            with rnet.guard(gradients=False):
                for _ in range(5):
                    net(x)

        def by_hand(x: Tensor = x) -> None:
            flags: list[Tensor] = []

            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    flags.append(torch.linalg.vector_norm(output, torch.inf))

            handles = [module.register_forward_hook(hook) for module in modules]
            for _ in range(5):
                flags.clear()
                net(x)
                torch.stack(flags).isfinite().all().item()
            for handle in handles:
                handle.remove()

        five = lambda x=x: [net(x) for _ in range(5)]  # noqa: E731
        yield Line(f"guard of five passes, {rows} x {length} / bare", guarded, [five], bar)
        yield Line("  the same / one reduction a tensor, read once a pass", guarded, [by_hand], "")


def comparing(scale: Scale) -> Iterator[Line]:
    x, sides = scale.ids(8, 512), [scale.gpt2() for _ in range(2)]
    sides[1].load_state_dict(sides[0].state_dict())
    rnets = [recorder(side, x) for side in sides]
    two_passes = lambda: [side(x) for side in sides]  # noqa: E731
    for what, selector, bar in (("all layers", "*", "2.5"), ("12 blocks", "h.?", "")):
        for rnet in rnets:
            rnet.record(selector)
        yield Line(
            f"compare {what} of GPT-2 / two passes", lambda: compare(*rnets, [x]), [two_passes], bar
        )


def sweeping(scale: Scale) -> Iterator[Line]:
    net, clean = scale.gpt2(), scale.ids(1, 64)
    corrupted, names = clean.flip(1), blocks_of(net)
    rnet = recorder(net, clean, *names)
    modules = dict(net.named_modules())

    def by_hand() -> None:
        kept: dict[str, Any] = {}
        handles = [
            modules[name].register_forward_hook(
                lambda module, args, output, name=name: kept.update({name: output})
            )
            for name in names
        ]
        net(clean)
        for handle in handles:
            handle.remove()
        for name in (None, *names):
            if name is not None:
                handle = modules[name].register_forward_hook(lambda *call, name=name: kept[name])
            float(net(corrupted).last_hidden_state[0, -1, 0])
            if name is not None:
                handle.remove()

    def ours() -> object:
        return rnet.sweep(clean, corrupted, lambda output: output.last_hidden_state[0, -1, 0])

    yield Line("sweep of 12 blocks / the loop by hand", ours, [by_hand], "1.10")


def watching(scale: Scale) -> Iterator[Line]:
    net, x = scale.gpt2(), scale.ids(8, 512)
    rnet = recorder(net, x, "h.?")

    def step() -> None:
        with torch.enable_grad():
            net(x).last_hidden_state.square().mean().backward()
        net.zero_grad(set_to_none=True)

    with rnet.watch(last=1):
        step()

    def watched_step() -> None:
        with rnet.watch(last=1):
            step()

    def watched() -> None:
        with rnet.watch(last=2):
            net(x)

    yield Line("watch(last=1) of a training step / bare", watched_step, [step], "1.05")
    yield Line("watch(last=2) of a pass / bare", watched, [partial(net, x)], "1.10")


# -- datasets --------------------------------------------------------------------------------------


def datasets(scale: Scale) -> Iterator[Line]:
    net, data = scale.llama(), [scale.ids(8, 512) for _ in range(4)]
    names = blocks_of(net)[:6]
    rnet = recorder(net, data[0], *names)
    modules = [module for name, module in net.named_modules() if name in names]
    kept: dict[int, Tensor] = {}

    def hooks(keep: Callable[[int, Tensor], None]) -> Arm:
        def run() -> None:
            count = iter(range(len(data) * len(modules)))
            handles = [
                module.register_forward_hook(lambda m, a, output: keep(next(count), output))
                for module in modules
            ]
            for batch in data:
                net(batch)
            for handle in handles:
                handle.remove()

        return run

    with torch.no_grad():
        example = net(data[0]).last_hidden_state
    total = len(data) * len(modules)
    pinned = [
        torch.empty_like(example, device="cpu", pin_memory=scale.device == "cuda")
        for _ in range(total)
    ]

    def to_host(at: int, output: Tensor) -> None:
        pinned[at].copy_(output, non_blocking=True)

    def on_device(at: int, output: Tensor) -> None:
        kept[at] = output.clone()

    def collect(**options: Any) -> Arm:
        return lambda: rnet.collect(data, progress=False, **options)

    yield Line(
        "six layers to the host / hooks into pinned memory",
        collect(store="host"),
        [hooks(to_host)],
        "1.05",
    )
    yield Line(
        "six layers on the device / by hand", collect(store="device"), [hooks(on_device)], "1.05"
    )
    with tempfile.TemporaryDirectory() as folder:
        yield from on_disk(rnet, data, pinned, lambda: [net(x) for x in data], Path(folder))


def on_disk(
    rnet: Recorder, data: list[Tensor], pinned: list[Tensor], passes: Arm, folder: Path
) -> Iterator[Line]:
    names = iter(range(1 << 30))

    def written() -> None:
        with (folder / "raw").open("wb") as file:
            for array in pinned:
                file.write(array.view(torch.uint8).numpy())
            file.flush()
            os.fsync(file.fileno())

    def ours() -> None:
        path = folder / f"run{next(names)}"
        rnet.collect(data, store=f"disk:{path}", progress=False)

    yield Line(
        "six layers to disk / raw write and sync, or the passes", ours, [written, passes], "1.18"
    )
    recording = rnet.collect(data, store=f"disk:{folder / 'read'}", progress=False)
    label, device = next(iter(recording)), data[0].device
    (folder / "plain").write_bytes(recording[label][:].view(torch.uint8).numpy())

    def plain() -> Tensor:
        return torch.frombuffer(bytearray((folder / "plain").read_bytes()), dtype=torch.uint8).to(
            device
        )

    def loaded() -> list[Tensor]:
        return [rows.to(device) for rows in recording.loader(label, batch_size=8)]

    yield Line("loader, onto the device / a plain read", loaded, [plain], "1.5")
    yield Line(
        "recording[layer].to(device) / a plain read",
        lambda: recording[label].to(device),
        [plain],
        "1.5",
    )


def reducing(scale: Scale) -> Iterator[Line]:
    rows, short = scale.rows(8192), scale.rows(512, torch.bfloat16)
    whole = rows.flatten()

    def covariance(x: Tensor = rows) -> Tensor:
        centred = x.float() - x.float().mean(0)
        return centred.T @ centred

    by_hand: dict[str, tuple[Any, Arm, str]] = {
        "Mean": (reductions.Mean(), lambda: rows.mean(0), "1.15"),
        "Max": (reductions.Max(), lambda: rows.amax(0), "1.15"),
        "Moments": (reductions.Moments(), lambda: torch.var_mean(rows, 0), "1.15"),
        "Covariance": (reductions.Covariance(), covariance, "1.15"),
        "Histogram": (
            reductions.Histogram(64, range=(-4.0, 4.0)),
            lambda: torch.histc(rows, 64, -4.0, 4.0),
            "1.5",
        ),
        "Quantiles, beside a sort": (reductions.Quantiles([0.5]), lambda: whole.sort(), "1.15"),
    }
    for name, (reduction, arm, bar) in by_hand.items():
        yield Line(f"{name} of [8192, 2048] / by hand", partial(reduction.update, rows), [arm], bar)
    ours = reductions.Covariance()
    arm = lambda: covariance(short)  # noqa: E731
    yield Line(
        "Covariance of 512 rows of bf16 / by hand", partial(ours.update, short), [arm], "1.5"
    )


# -- the table -------------------------------------------------------------------------------------

GROUPS = (
    *(recording, tiny_layers, operations, guard, comparing, sweeping, watching),
    *(datasets, reducing, compiled),
)


def measured(line: Line, scale: Scale, seconds: float) -> list[str]:
    """Return the cells of a line."""
    arms = {"ours": line.ours} | {f"by hand {i}": arm for i, arm in enumerate(line.by_hand)}

    def until_done(arm: Arm) -> Arm:
        return lambda: (arm(), scale.synchronise())

    waiting = {name: until_done(arm) for name, arm in arms.items()}
    for arm in waiting.values():
        arm()
    start = time.perf_counter()
    for arm in waiting.values():
        arm()
    each = time.perf_counter() - start
    rounds = max(3, min(100, int(seconds / max(each, 1e-6))))
    spent = interleaved(waiting, rounds)
    ours, *others = spent.values()
    bases = [max(times) for times in zip(*others, strict=True)]
    ratios = [a / b for a, b in zip(ours, bases, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    base = statistics.median(bases)
    return [
        line.name,
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        line.bar,
        f"{base * 1e3:.2f} ms",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.5, help="for each line")
    parser.add_argument("--only", default="", help="a part of the names of groups")
    asked = parser.parse_args()
    scale = Scale("cpu" if asked.small else "cuda", asked.small)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    card = f"{torch.get_num_threads()} threads of a CPU, in small"
    if not asked.small:
        card = torch.cuda.get_device_name()
    table = Table(title=f"ours / by hand on {card}, torch {torch.__version__}")
    for heading in ("line", "median", "quartiles", "bar", "by hand"):
        table.add_column(heading)
    for group in GROUPS:
        for line in group(scale) if asked.only in group.__name__ else ():
            cells = measured(line, scale, asked.seconds / (20 if asked.small else 1))
            print(" | ".join(cells), flush=True)
            table.add_row(*map(escape, cells))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

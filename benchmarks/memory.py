"""What each step of the work with a large network needs beside its weights, in bytes.

Run ``python benchmarks/memory.py [--size small|1b|7b] [--device cuda] [--tokens 200]``. A Llama
with random weights in bfloat16 is wrapped, recorded, guarded, collected, compared and patched. On a
GPU the peak is that of torch's allocator; on a processor the allocations that the profiler sees are
added up, so that arrays which NumPy or the system hold are left out. "small" takes seconds and
"1b" 3 GB.
"""

from __future__ import annotations

import argparse
import gc
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from scio_recorder import Recorder, Tokens, compare, reductions

# Hidden and inner width, blocks, heads, heads of keys, words.
SIZES = {
    "small": (256, 688, 6, 8, 4, 512),
    "1b": (2048, 8192, 16, 32, 8, 128_256),
    "7b": (4096, 11_008, 32, 32, 32, 32_000),
}
BLOCKS, ATTENTION = re.compile(r"layers\.\d+$"), re.compile("self_attn$")


def network(size: str, device: str) -> nn.Module:
    width, inner, blocks, heads, of_keys, words = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=of_keys,
        vocab_size=words,
        use_cache=False,
        tie_word_embeddings=size == "1b",
    )
    with torch.device("meta"):
        net = LlamaForCausalLM(config).bfloat16()
    # The rotary frequencies are the only buffers that are computed.
    whole = net.to_empty(device=device).eval().requires_grad_(False)
    row = torch.randn(1 << 16, device=device).mul_(0.02).bfloat16()
    for parameter in whole.parameters():
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), len(row)):
            flat[start : start + len(row)] = row[: flat.numel() - start]
    whole.model.rotary_emb = type(whole.model.rotary_emb)(config).to(device)
    return whole


def peak(step: Callable[[], object], device: str) -> int:
    """Return the bytes that a step needs at most, beyond those held before."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = highest = 0
    for _, change in sorted(changes):
        held += change
        highest = max(highest, held)
    return highest


def steps(net: nn.Module, ids: Tensor, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is measured, each in turn, since some begin with passes that are not."""
    rnet, other = (Recorder(net, input_data=ids, verbose=0) for _ in range(2))
    # Attention needs the list.
    rnet.operations()

    def recorded() -> None:
        rnet(ids)

    def later(selector: object, **options: object) -> Callable[[], object]:
        rnet.record(selector, **options)  # type: ignore[arg-type]  # options of any kind
        for _ in range(2):
            rnet(ids)
        # The records of a pass go when the next one begins.
        rnet(ids, dont_record=True)
        return recorded

    def guarded() -> None:
        with rnet.guard(gradients=False):
            net(ids)

    def collected(**options: object) -> Callable[[], object]:
        def run() -> None:
            rnet.record(BLOCKS)
            rnet.collect([ids] * 2, rows=Tokens(), progress=False, **options)  # type: ignore[arg-type]  # the same
            rnet.record()

        return run

    def compared() -> None:
        for side in (rnet, other):
            side.record(BLOCKS)
        compare(rnet, other, [ids])
        rnet.record()
        other.record()

    def patched() -> None:
        rnet.record(BLOCKS)
        rnet.sweep(ids, ids.flip(1), lambda output: output.logits[0, -1, 0])
        rnet.record()

    yield "the bare pass", lambda: net(ids)
    yield "Recorder(net)", lambda: Recorder(net, input_data=ids, verbose=0)
    fresh = Recorder(net, input_data=ids, verbose=0)
    yield "operations()", lambda: fresh.operations() and None
    rnet.record(BLOCKS)
    yield "blocks, first pass", recorded
    yield "blocks, later passes", later(BLOCKS)
    yield "blocks, offload=True", later(BLOCKS, offload=True)
    rnet.record("*")
    yield "all layers, first pass", recorded
    yield "all layers, later passes", later("*")
    yield "attention=True, later passes", later(ATTENTION, attention=True)
    rnet.record()
    yield "guard", guarded
    yield "collect on the device", collected(store="device")
    yield "collect to disk", collected(store=f"disk:{folder / 'run'}")
    yield "collect a mean", collected(store=None, reduce=reductions.Mean())
    yield "compare with itself", compared
    yield "sweep", patched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=200)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    net = network(asked.size, asked.device)
    width, _, blocks, *_ = SIZES[asked.size]
    ids = torch.arange(asked.tokens, device=asked.device)[None]
    weights = sum(parameter.nbytes for parameter in net.parameters())
    output = asked.tokens * width * 2
    card = torch.cuda.get_device_name() if asked.device == "cuda" else "the processor"
    title = (
        f"{weights / 1e9:.2f} GB of weights, {blocks} blocks, whose outputs of {asked.tokens} "
        f"tokens take {output / 1e6:.2f} MB each, on {card}"
    )
    table = Table(title=title)
    for heading in ("step", "peak, MB", "beyond the pass, MB", "of the weights", "in outputs"):
        table.add_column(heading)
    bare = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, step in steps(net, ids, Path(folder)):
            needed = peak(step, asked.device)
            bare = bare or needed
            beyond = needed - bare
            shares = f"{beyond / weights:.3f}", f"{beyond / output:.1f}"
            cells = name, f"{needed / 1e6:.1f}", f"{beyond / 1e6:.1f}", *shares
            print(" | ".join(cells), flush=True)
            table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

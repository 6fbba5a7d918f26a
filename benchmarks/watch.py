"""Watching and collecting around ``generate``, compared with the bare call.

Run ``python benchmarks/watch.py [--rounds 15]``. The network is GPT-2 in its published size with
random weights, every block recorded, one torch thread. All arms run the same prompt greedily, in
turn and in random order. Their results are compared before.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from transformers import GPT2Config, GPT2LMHeadModel

from scio_recorder import Recorder, Tokens

PROMPT, NEW = 16, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net: Any = GPT2LMHeadModel(GPT2Config()).eval()
    ids = torch.randint(50000, (1, PROMPT))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rnet = Recorder(net, input_data=prompt, verbose=0)
    rnet.record(*(f"transformer.h.{number}" for number in range(12)))

    def bare() -> torch.Tensor:
        made: torch.Tensor = net.generate(
            **prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        return made

    def watched() -> torch.Tensor:
        with rnet.watch():
            return bare()

    def collected() -> torch.Tensor:
        first = lambda output, batch: output if isinstance(output, torch.Tensor) else output[0]  # noqa: E731
        with rnet.collecting(rows=Tokens(), transform=first):
            return bare()

    text = bare()
    arms = {"bare": bare, "watch": watched, "collecting, rows=Tokens()": collected}
    for name, arm in arms.items():
        if not torch.equal(arm(), text):
            raise SystemExit(f"{name} gives another text")
    spent = interleaved(arms, rounds)
    table = Table(title=f"around generate / bare, {NEW} tokens of GPT-2's size; {rounds} rounds")
    for heading in ("arm", "of the minima", "median", "quartiles", "bar"):
        table.add_column(heading)
    for name in list(arms)[1:]:
        shares = [a / b for a, b in zip(spent[name], spent["bare"], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        least = min(spent[name]) / min(spent["bare"])
        bar = "1.05" if name == "watch" else ""
        table.add_row(name, f"{least:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", bar)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Libraries that run the network themselves: what is collected is what plain hooks saw."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Tokens, reductions
from tests.capture.test_watch_libraries import (
    PROMPT,
    gpt2,
    passes_by_hooks,
)
from tests.recording.nets import recorder_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.campaign

ROWS = [{"input_ids": [11, 12, 13, 14, 15][: 2 + n], "labels": [5] * (2 + n)} for n in range(4)]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Put rows of a data set together, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    found: dict[str, Any] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        missing = longest - len(row["input_ids"])
        found["input_ids"].append(row["input_ids"] + [0] * missing)
        found["attention_mask"].append([1] * len(row["input_ids"]) + [0] * missing)
        found["labels"].append(row["labels"] + [-100] * missing)
    return {name: torch.tensor(value) for name, value in found.items()}


# Its new name is unknown to version 5.0.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    def train(net: nn.Module) -> None:
        transformers.set_seed(3)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", **options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=net, args=arguments, train_dataset=ROWS, data_collator=padded
        )
        trainer.train()

    net = gpt2().train()
    bare, twin = copy.deepcopy(net), copy.deepcopy(net)
    rnet = recorder_of(net, "transformer.h.*.mlp", input_data=PROMPT, mode="train")
    other = recorder_of(twin, "transformer.h.*.mlp", input_data=PROMPT, mode="train")
    train(bare)
    expected, _ = passes_by_hooks(other, lambda: train(twin))
    masks: list[Tensor] = []
    watching = net.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"].bool()), with_kwargs=True
    )
    reduce = {"transformer.h.0.mlp": reductions.Mean()}
    with rnet.collecting(rows=Tokens(fields=("input_ids", "labels")), reduce=reduce) as collection:
        train(net)
    watching.remove()
    assert all(map(torch.equal, bare.parameters(), net.parameters()))
    recording = collection.recording
    first, second = rnet.recording
    real = torch.cat([mask.flatten() for mask in masks])
    whole = {label: [each[label].detach() for each in expected] for label in rnet.recording}
    kept = {label: torch.cat([x.flatten(0, 1) for x in of])[real] for label, of in whole.items()}
    assert torch.equal(recording[second], kept[second])
    torch.testing.assert_close(recording[first].float(), kept[first].float().mean(0))
    assert (recording.rows["labels"] == 5).all()
    assert recording.num_samples == 8

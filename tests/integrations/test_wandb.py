"""What an offline run of W&B holds of the statistics that transformers' Trainer logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from scio_recorder.integrations.transformers import LayerStatsMonitor

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.campaign


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


def histories(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what a file of W&B has of each step: records in blocks, as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := 2**15 - at % 2**15) < 7:
            at += rest
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            history = Record.FromString(whole).history.item
            yield {
                one.nested_key[0]: json.loads(one.value_json) for one in history if one.nested_key
            }
            whole = b""


@pytest.mark.filterwarnings("ignore")
def test_an_offline_run_has_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "use_cpu": True}
    arguments = TrainingArguments("out", report_to="wandb", disable_tqdm=True, **options)
    data = [{"x": row} for row in torch.randn(8, 4)]
    trainer = Trainer(Model(), arguments, train_dataset=data)
    trainer.add_callback(monitor := LayerStatsMonitor(trainer, "layer", statistics=["norm"]))
    trainer.train()
    wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in histories(file) if "train/activations_norm/layer" in row]
    assert [row["train/global_step"] for row in rows] == [2, 4]
    for key, value in monitor.latest.items():
        assert rows[-1][f"train/{key}"] == pytest.approx(value)

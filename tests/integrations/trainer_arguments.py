"""Arguments of a training by transformers' Trainer that is short, quiet and in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments


def quiet_arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **(defaults | options))

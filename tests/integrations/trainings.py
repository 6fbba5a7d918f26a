"""What tests of trainings share: quiet arguments, and statistics by NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from transformers import TrainingArguments


def quiet_arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return those of a training by transformers' Trainer that is short and in order."""
    defaults: dict[str, Any] = {
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **(defaults | options))


def quiet_trainer(*callbacks: Any, **options: Any) -> LightningTrainer:
    """Return Lightning's trainer of one epoch that writes nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return LightningTrainer(callbacks=list(callbacks), **(defaults | options))


def by_hand(*parts: Tensor) -> dict[str, float]:
    """Return the usual statistics over all values of some tensors."""
    values = np.concatenate([part.detach().numpy().ravel() for part in parts]).astype(np.float64)
    finite = values[np.isfinite(values)]
    return {
        "mean": finite.mean(),
        "std": finite.std(ddof=1),
        "norm": np.linalg.norm(finite),
        "zeros": np.mean(values == 0),
        "nonfinite": np.sum(~np.isfinite(values)),
    }


def scalars_by_hand(kept: dict[str, list[Tensor]]) -> dict[str, float]:
    """Return what is logged of a step in which modules returned these tensors, by name."""
    return {
        f"{kind}_{statistic}/{name}": value
        for name, tensors in kept.items()
        for kind, values in (("activations", tensors), ("gradients", [x.grad for x in tensors]))
        for statistic, value in by_hand(*values).items()
    }


def hooks(net: nn.Module) -> int:
    """Return how many hooks all modules have."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"
    return sum(len(getattr(module, kind)) for module in net.modules() for kind in kinds)

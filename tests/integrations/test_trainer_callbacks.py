"""LayerStatsMonitor in real trainings of transformers' Trainer, against loops by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from scio_recorder.errors import ArgumentError, LayerNotFoundError
from scio_recorder.integrations.transformers import LayerStatsMonitor
from tests.integrations.trainings import hooks, quiet_arguments, scalars_by_hand


class Model(nn.Module):
    """An encoder with an in-place operation, and a step that fails."""

    def __init__(self, raises_at: int | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 1)
        self.raises_at = raises_at
        self.step = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.head(self.encoder(x) + 1)
        self.step += 1
        if self.step == self.raises_at:
            raise ArithmeticError("as asked")
        return {"loss": (out - 1).square().mean()}


@pytest.fixture
def data() -> Tensor:
    return torch.randn(24, 4)


def trainer(model: nn.Module, data: Tensor, folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    arguments = quiet_arguments(folder, **(defaults | options))
    return Trainer(model, arguments, train_dataset=[{"x": row} for row in data])


def rows(fitted: Trainer) -> list[dict[str, Any]]:
    """Return what was logged of layers, without the trainer's own values."""
    history = fitted.state.log_history
    return [row for row in history if any("/" in key for key in row)]


def steps_by_hand(model: Model, data: Tensor, accumulate: int) -> list[dict[str, float]]:
    """Train without a trainer, hooks or in-place operations; return each step's statistics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for batches in data.split(4 * accumulate):
        kept: dict[str, list[Tensor]] = {name: [] for name in ("encoder.0", "encoder.1", "head")}
        for batch in batches.split(4):
            first = model.encoder[0](batch)
            second = first.relu()
            out = model.head(second + 1)
            for name, tensor in zip(kept, (first, second, out), strict=True):
                tensor.retain_grad()
                kept[name].append(tensor)
            ((out - 1).square().mean() / accumulate).backward()
        steps.append(scalars_by_hand(kept))
        optimizer.step()
        optimizer.zero_grad()
    return steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_step_is_as_by_hand(accumulate: int, data: Tensor, tmp_path: Path) -> None:
    model = Model()
    expected = steps_by_hand(copy.deepcopy(model), data, accumulate)
    fitted = trainer(model, data, tmp_path, gradient_accumulation_steps=accumulate)
    monitor = LayerStatsMonitor(fitted, "encoder.?", "head")
    fitted.add_callback(monitor)
    fitted.train()
    logged = rows(fitted)
    assert [row["step"] for row in logged] == list(range(1, 6 // accumulate + 1))
    for row, step in zip(logged, expected, strict=True):
        assert set(row) - {"step", "epoch"} == set(step)
        for key, value in step.items():
            # Two orders of summation in float32.
            assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert monitor.latest == {key: logged[-1][key] for key in monitor.latest}
    # The trainer has logged its own values beside them.
    assert sum("loss" in row for row in fitted.state.log_history) == 6 // accumulate
    assert not hooks(model)


def test_training_is_bit_for_bit_the_same(data: Tensor, tmp_path: Path) -> None:
    model = Model()
    bare = copy.deepcopy(model)
    trainer(bare, data, tmp_path / "bare").train()
    seen = trainer(model, data, tmp_path / "seen")
    seen.add_callback(LayerStatsMonitor(seen))
    seen.train()
    for one, other in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


class Seen(TrainerCallback):
    """Looks at the model's hooks while a step runs."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.counts.append(hooks(others["model"]))


@pytest.mark.parametrize(
    ("options", "every", "steps"),
    [
        ({"logging_steps": 3}, None, [3, 6]),
        ({"logging_steps": 4, "logging_first_step": True}, None, [1, 4]),
        ({"logging_steps": 1}, 2, [2, 4, 6]),
        ({"logging_strategy": "epoch"}, 5, [5]),
        ({"logging_strategy": "no", "logging_first_step": True}, 4, [4]),
    ],
)
def test_modules_are_observed_on_logged_steps_only(
    options: dict[str, Any], every: int | None, steps: list[int], data: Tensor, tmp_path: Path
) -> None:
    seen, fitted = Seen(), trainer(Model(), data, tmp_path, **options)
    fitted.add_callback(LayerStatsMonitor(fitted, "head", every_n_steps=every))
    fitted.add_callback(seen)
    fitted.train()
    assert [row["step"] for row in rows(fitted)] == steps
    assert [step for step, count in enumerate(seen.counts, 1) if count] == steps


def test_a_trainer_that_logs_at_no_step_is_refused(data: Tensor, tmp_path: Path) -> None:
    fitted = trainer(Model(), data, tmp_path, logging_strategy="epoch")
    with pytest.raises(ArgumentError, match=r"logging_strategy.*every_n_steps=100"):
        LayerStatsMonitor(fitted)


@pytest.mark.parametrize("wrong", ["head", None, nn.Linear])
def test_what_is_no_trainer_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"trainer\.add_callback\(LayerStatsMonitor\(trainer"):
        LayerStatsMonitor(wrong)


def test_a_wrong_selector_is_noticed_before_the_first_step(data: Tensor, tmp_path: Path) -> None:
    model = Model()
    fitted = trainer(model, data, tmp_path)
    fitted.add_callback(LayerStatsMonitor(fitted, "haed"))
    with pytest.raises(LayerNotFoundError, match="head"):
        fitted.train()
    assert model.step == 0


def test_values_reach_tensorboard(data: Tensor, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    fitted = trainer(Model(), data, tmp_path, report_to="tensorboard")
    statistics = ["max_abs", "dead", "exploding"]
    monitor = LayerStatsMonitor(fitted, "encoder.?", statistics=statistics, gradients=False)
    fitted.add_callback(monitor)
    fitted.train()
    (folder,) = {file.parent for file in (tmp_path / "runs").rglob("events*")}
    written = EventAccumulator(str(folder)).Reload()
    for key, value in monitor.latest.items():
        scalars = written.Scalars(f"train/{key}")
        assert [one.step for one in scalars] == [1, 2, 3, 4, 5, 6]
        assert scalars[-1].value == pytest.approx(value)
    assert {key.partition("/")[0].partition("_")[2] for key in monitor.latest} == set(statistics)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 16, bias=False)
        with torch.no_grad():
            self.layer.weight[3] *= 1000

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).mean()}


def test_exploding_units_are_a_share_of_all(data: Tensor, tmp_path: Path) -> None:
    model = Wide()
    largest = (data[:4] @ model.layer.weight.detach().T).abs().amax(0)
    fitted = trainer(model, data, tmp_path, max_steps=1)
    fitted.add_callback(monitor := LayerStatsMonitor(fitted, "layer", statistics=["exploding"]))
    fitted.train()
    assert (largest > 20 * largest.median()).sum() == 1
    assert monitor.latest == {"activations_exploding/layer": 1 / 16}


def test_hooks_of_a_failed_step_go_when_asked_and_with_the_next_training(
    data: Tensor, tmp_path: Path
) -> None:
    model = Model(raises_at=3)
    fitted = trainer(model, data, tmp_path)
    monitor = LayerStatsMonitor(fitted, "head", statistics=["mean"])
    fitted.add_callback(monitor)
    with pytest.raises(ArithmeticError):
        fitted.train()
    monitor.close()
    assert not hooks(model)
    model.raises_at = None
    fitted.train()
    assert [row["step"] for row in rows(fitted)] == [1, 2, 3, 4, 5, 6]
    assert not hooks(model)

"""GuardCallback in real trainings of both trainers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

from scio_recorder import FlowError, NonFiniteError, Recorder, open_recording
from scio_recorder.errors import ArgumentError
from scio_recorder.integrations import lightning, transformers
from tests.integrations.trainings import hooks, quiet_arguments, quiet_trainer

# Lightning's advice on loops of validation and the like.
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


class Sqrt(nn.Module):
    """The root of what is negative in one step."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += self.training
        factor = -1.0 if self.step == self.fails_at else 1.0
        return (x.square() * factor + 0.1 * factor).sqrt()


class Model(LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), Sqrt(fails_at), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).float().square().mean() * 1.0}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])["loss"]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit_by_lightning(model: Model, callback: Any, folder: Path, **options: Any) -> None:
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    quiet_trainer(callback, **options).fit(model, data)


def fit_by_transformers(model: Model, callback: Any, folder: Path, **options: Any) -> None:
    arguments = quiet_arguments(
        folder, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-3, **options
    )
    trainer = Trainer(model, arguments, train_dataset=[{"x": row} for row in torch.randn(24, 4)])
    trainer.add_callback(callback)
    trainer.train()


Fit = Callable[..., None]
BOTH = pytest.mark.parametrize(
    ("fit", "library"),
    [(fit_by_lightning, lightning), (fit_by_transformers, transformers)],
    ids=["lightning", "transformers"],
)


def recorder(model: Model) -> Recorder:
    return Recorder(model.net, input_size=(1, 4), verbose=0)


@pytest.mark.parametrize(
    ("fit", "library", "options"),
    [
        pytest.param(fit_by_lightning, lightning, {"precision": "32-true"}, id="lightning"),
        pytest.param(fit_by_lightning, lightning, {"precision": "bf16-mixed"}, id="bf16"),
        pytest.param(fit_by_transformers, transformers, {}, id="transformers"),
    ],
)
def test_a_training_ends_where_a_nan_is_made(
    fit: Fit, library: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    model = Model(fails_at=3)
    callback = library.GuardCallback(recorder(model), keep_inputs=True)
    with pytest.raises(NonFiniteError, match=r"1-2 1 \(Sqrt\) made 24 NaN"):
        fit(model, callback, tmp_path, **options)
    assert callback.guard.origin.pass_number == 2
    if library is transformers:
        # Its trainer tells callbacks of no exception.
        callback.close()
    assert not hooks(model)
    callback.guard.origin.save(tmp_path / "fault")
    assert open_recording(tmp_path / "fault")["1"].isnan().all()


@BOTH
def test_a_good_training_goes_through_and_leaves_nothing(
    fit: Fit, library: Any, tmp_path: Path
) -> None:
    model = Model()
    callback = library.GuardCallback(recorder(model), action="record")
    assert callback.guard is None
    fit(model, callback, tmp_path)
    fit(model, callback, tmp_path)
    assert callback.guard.num_passes == 6
    assert not hooks(model)


@BOTH
def test_another_network_is_no_training_of_this_one(fit: Fit, library: Any, tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="not called"):
        fit(Model(), library.GuardCallback(recorder(Model())), tmp_path)


@pytest.mark.parametrize("wrong", [nn.Linear(4, 1), None, "net"])
@pytest.mark.parametrize("library", [lightning, transformers])
def test_what_is_no_recorder_is_refused_at_once(library: Any, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"write GuardCallback\(Recorder\(net, \.\.\.\)\)"):
        library.GuardCallback(wrong)
    with pytest.raises(ArgumentError, match="write gradients="):
        library.GuardCallback(recorder(Model()), grads=True)


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model = Model()
    callback = lightning.GuardCallback(recorder(model))
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    fit_by_lightning(model, callback, tmp_path, plugins=plugins)
    assert callback.guard.num_skipped_steps == 40 - torch.tensor(scaler.get_scale()).log2() > 0


def test_a_scaler_is_found_that_is_made_after_the_guard_was_entered(tmp_path: Path) -> None:
    class Later(Callback):
        def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
            trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    model = Model()
    callback = lightning.GuardCallback(recorder(model))
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    quiet_trainer(callback, Later(), plugins=[plugin]).fit(model, data)
    assert callback.guard.num_skipped_steps == 40 - torch.tensor(plugin.scaler.get_scale()).log2()


def test_the_trainer_gives_its_scaler(tmp_path: Path) -> None:
    model = Model()
    callback = transformers.GuardCallback(recorder(model))
    arguments = quiet_arguments(tmp_path, per_device_train_batch_size=4, num_train_epochs=1)
    data = [{"x": row} for row in torch.randn(24, 4) * 1e4]
    trainer = Trainer(model, arguments, train_dataset=data)
    # As under fp16=True, which accelerate refuses on a CPU.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.guard is not None
    scale = trainer.accelerator.scaler.get_scale()
    assert callback.guard.num_skipped_steps == 120 - torch.tensor(scale).log2() > 0


@pytest.mark.campaign
def test_a_program_that_the_nan_ends_says_nothing_more() -> None:
    program = """
from torch import nn, ones
from scio_recorder import Recorder
from scio_recorder.integrations.training import GuardedTraining

net = nn.Linear(2, 2)
guarded = GuardedTraining(Recorder(net, input_size=(1, 2)))
guarded.begin_guard()
net.weight.data.fill_(float("nan"))
net(ones(1, 2))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].startswith("scio_recorder.errors.NonFiniteError: layer")
    assert "Exception ignored" not in run.stderr

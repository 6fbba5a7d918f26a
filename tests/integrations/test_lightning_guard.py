"""GuardCallback in real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scio_recorder import FlowError, NonFiniteError, Recorder, open_recording
from scio_recorder.errors import ArgumentError
from scio_recorder.integrations.lightning import GuardCallback

# Lightning's advice on loops of validation and the like.
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


class Sqrt(nn.Module):
    """The root of what is zero from some step on."""

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

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().square().mean() * 1.0  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(model: Model, callback: GuardCallback, **options: Any) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    Trainer(
        callbacks=[callback],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    ).fit(model, data)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_training_ends_where_a_nan_is_made(precision: Any, tmp_path: Path) -> None:
    model = Model(fails_at=3)
    rnet = Recorder(model.net, input_size=(1, 4), verbose=0)
    callback = GuardCallback(rnet, keep_inputs=True)
    with pytest.raises(NonFiniteError, match=r"1-2 1 \(Sqrt\) made 24 NaN"):
        fit(model, callback, precision=precision)
    assert callback.guard is not None
    assert callback.guard.origin is not None
    assert callback.guard.origin.pass_number == 2
    assert not any(module._forward_hooks for module in model.modules())
    callback.guard.origin.save(tmp_path / "fault")
    assert open_recording(tmp_path / "fault")["1"].isnan().all()


def test_a_good_training_goes_through_and_leaves_nothing() -> None:
    model = Model()
    callback = GuardCallback(Recorder(model.net, input_size=(1, 4), verbose=0))
    fit(model, callback)
    fit(model, callback)
    assert callback.guard is not None
    assert callback.guard.num_passes == 6
    assert not any(module._forward_hooks for module in model.modules())


def test_skipped_steps_are_counted() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model = Model()
    callback = GuardCallback(Recorder(model.net, input_size=(1, 4), verbose=0))
    fit(model, callback, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert callback.guard is not None
    assert callback.guard.num_skipped_steps == 40 - torch.tensor(scaler.get_scale()).log2() > 0


def test_another_network_is_no_training_of_this_one() -> None:
    callback = GuardCallback(Recorder(Model().net, input_size=(1, 4), verbose=0))
    with pytest.raises(FlowError, match="not called"):
        fit(Model(), callback)


@pytest.mark.parametrize("wrong", [nn.Linear(4, 1), None, "net"])
def test_what_is_no_recorder_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"write GuardCallback\(Recorder\(net, \.\.\.\)\)"):
        GuardCallback(wrong)

"""LayerStatsMonitor in real trainings, against a loop written out by hand."""

from __future__ import annotations

import copy
import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scio_recorder.errors import ArgumentError, LayerNotFoundError, SelectorTypeError
from scio_recorder.integrations.lightning import LayerStatsMonitor
from tests.integrations.trainings import by_hand, hooks, quiet_trainer, scalars_by_hand

# Lightning's advice on loops of validation and the like.
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


class Model(LightningModule):
    """An encoder with an in-place operation, and an activation that is called twice."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 6)
        self.act = nn.Tanh()
        self.fails_at = fails_at

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.head(self.act(self.encoder(x))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            self(batch[0])
            raise ArithmeticError("as asked")
        return (self(batch[0]) - 1).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data() -> Tensor:
    return torch.randn(24, 4)


def loader(data: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data), batch_size=4)


def trainer(tmp_path: Path, *callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "logger": CSVLogger(str(tmp_path), version="log"),
        "log_every_n_steps": 1,
        "default_root_dir": str(tmp_path),
    }
    return quiet_trainer(*callbacks, **(defaults | options))


def rows(tmp_path: Path) -> list[dict[str, str]]:
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        return list(csv.DictReader(lines))


def steps_by_hand(model: Model, data: Tensor, accumulate: int = 1) -> Iterator[dict[str, Any]]:
    """Train without Lightning, hooks or in-place operations; yield each step's statistics."""
    optimizer = model.configure_optimizers()
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, tensor: Tensor) -> Tensor:
        kept.setdefault(name, []).append(tensor)
        tensor.retain_grad()
        return tensor

    for number, batch in enumerate(data.split(4), 1):
        first = keep("encoder.0", model.encoder[0](batch))
        hidden = keep("act", model.act(keep("encoder.1", first.relu())))
        out = keep("act", model.act(keep("head", model.head(hidden))))
        ((out - 1).square().mean() / accumulate).backward()
        if number % accumulate == 0:
            yield scalars_by_hand(kept)
            kept.clear()
            optimizer.step()
            optimizer.zero_grad()


def assert_same(row: dict[str, str], expected: dict[str, float]) -> None:
    assert set(row) - {"step", "epoch"} == set(expected)
    for key, value in expected.items():
        # Two orders of summation in float32.
        assert float(row[key]) == pytest.approx(value, rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_every_step_is_as_by_hand(accumulate: int, data: Tensor, tmp_path: Path) -> None:
    model = Model()
    expected = list(steps_by_hand(copy.deepcopy(model), data, accumulate))
    monitor = LayerStatsMonitor()
    trainer(tmp_path, monitor, accumulate_grad_batches=accumulate).fit(
        model, loader(data), loader(data)
    )
    logged = rows(tmp_path)
    assert len(logged) == len(expected) == 6 // accumulate
    for row, step in zip(logged, expected, strict=True):
        assert_same(row, step)
    assert [int(row["step"]) for row in logged] == list(range(6 // accumulate))
    assert set(monitor.latest) == set(expected[-1])
    assert not hooks(model)
    assert not monitor._observer._modules
    assert not monitor._observer._running


class Skipping(Model):
    """Runs every batch, and trains on every other."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step([batch[0] + batch_idx], batch_idx)
        return loss if batch_idx % 2 == 0 else None


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.campaign
def test_steps_that_return_nothing_count(accumulate: int, data: Tensor, tmp_path: Path) -> None:
    model = Skipping()
    bare = copy.deepcopy(model)
    expected, returned = [], []
    optimizer = bare.configure_optimizers()
    for index, batch in enumerate(data.split(4)):
        returned.append(bare.encoder[0](batch + index))
        if index % 2 == 0:
            ((bare(batch + index) - 1).square().mean() / accumulate).backward()
        if (index + 1) % accumulate == 0:
            expected.append(by_hand(*returned)["mean"])
            returned = []
            optimizer.step()
            optimizer.zero_grad()
    trainer(tmp_path, LayerStatsMonitor(), accumulate_grad_batches=accumulate).fit(
        model, loader(data)
    )
    means = [float(row["activations_mean/encoder.0"]) for row in rows(tmp_path)]
    assert means == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.campaign
def test_training_is_bit_for_bit_the_same(data: Tensor, tmp_path: Path) -> None:
    model = Model()
    bare = copy.deepcopy(model)
    trainer(tmp_path / "bare").fit(bare, loader(data), loader(data))
    trainer(tmp_path / "seen", LayerStatsMonitor()).fit(model, loader(data), loader(data))
    for one, other in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.campaign)])
def test_no_trace_after_an_exception(accumulate: int, data: Tensor, tmp_path: Path) -> None:
    model, monitor = Model(fails_at=4), LayerStatsMonitor()
    with pytest.raises(ArithmeticError):
        trainer(tmp_path, monitor, accumulate_grad_batches=accumulate).fit(model, loader(data))
    assert hooks(model) == 0
    model.fails_at = None
    expected = list(steps_by_hand(copy.deepcopy(model), data))
    trainer(tmp_path / "again", monitor).fit(model, loader(data))
    assert_same(rows(tmp_path / "again")[0], expected[0])


def test_modules_are_observed_on_logged_steps_only(data: Tensor, tmp_path: Path) -> None:
    seen = []

    class Watching(Model):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append(hooks(self))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            assert hooks(self) == 0

    fitted = trainer(tmp_path, LayerStatsMonitor("head", every_n_steps=3), log_every_n_steps=1)
    fitted.fit(Watching(), loader(data), loader(data))
    assert [count > 0 for count in seen] == [False, False, True, False, False, True]
    assert [row["step"] for row in rows(tmp_path)] == ["2", "5"]


@pytest.mark.campaign
def test_steps_go_on_after_a_checkpoint(data: Tensor, tmp_path: Path) -> None:
    model = Model()
    first = trainer(tmp_path / "one", LayerStatsMonitor(), max_epochs=1)
    first.fit(model, loader(data))
    first.save_checkpoint(tmp_path / "middle.ckpt")
    keys = set(torch.load(tmp_path / "middle.ckpt")["state_dict"])
    assert keys == set(Model().state_dict())
    second = trainer(tmp_path / "two", LayerStatsMonitor(), max_epochs=2)
    second.fit(Model(), loader(data), ckpt_path=tmp_path / "middle.ckpt")
    assert [int(row["step"]) for row in rows(tmp_path / "two")] == list(range(6, 12))
    expected = list(steps_by_hand(copy.deepcopy(model), data))
    for row, step in zip(rows(tmp_path / "two"), expected, strict=True):
        assert_same(row, step)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.campaign
def test_manual_optimisation_of_two_networks(wrapped: bool, data: Tensor, tmp_path: Path) -> None:
    class Pair(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            # Lightning is not told of the steps of optimizers that it has not wrapped.
            optimizers = self.optimizers(use_pl_optimizer=wrapped)
            for net, optimizer in zip((self.one, self.other), optimizers, strict=True):
                optimizer.zero_grad()
                self.manual_backward(net(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            nets = (self.one, self.other)
            return [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]

    model, monitor = Pair(), LayerStatsMonitor(nn.Linear)
    trainer(tmp_path, monitor).fit(model, loader(data))
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(6))
    for batch, row in zip(data.split(4), rows(tmp_path), strict=True):
        for name in ("one", "other"):
            expected = by_hand(model.get_submodule(name)(batch))["mean"]
            assert float(row[f"activations_mean/{name}"]) == pytest.approx(expected, rel=1e-4)


def test_nan_is_counted_and_training_goes_on(data: Tensor, tmp_path: Path) -> None:
    data[5, 2] = torch.nan
    monitor = LayerStatsMonitor("encoder.0", statistics=["mean", "nonfinite"], gradients=False)
    trainer(tmp_path, monitor).fit(Model(), loader(data))
    logged = rows(tmp_path)
    assert [float(row["activations_nonfinite/encoder.0"]) for row in logged[:2]] == [0, 6]
    assert math.isfinite(float(logged[1]["activations_mean/encoder.0"]))
    # One step with NaN gradients later, all is NaN: there is no mean to log.
    assert [row["activations_mean/encoder.0"] for row in logged[2:]] == [""] * 4
    assert float(logged[-1]["activations_nonfinite/encoder.0"]) == 24


@pytest.mark.parametrize(
    ("selectors_of", "names"),
    [
        (lambda model: ("encoder.*",), {"encoder.0", "encoder.1"}),
        (lambda model: (nn.Linear, "act"), {"encoder.0", "head", "act"}),
        (lambda model: ("",), {"Model"}),
        (lambda model: (), {"encoder.0", "encoder.1", "head", "act"}),
        (lambda model: (model.head, re.compile(r"^enc.*1$")), {"head", "encoder.1"}),
    ],
)
@pytest.mark.campaign
def test_selectors(selectors_of: Any, names: set[str], data: Tensor, tmp_path: Path) -> None:
    model = Model()
    monitor = LayerStatsMonitor(*selectors_of(model), statistics="mean", gradients=False)
    trainer(tmp_path, monitor).fit(model, loader(data))
    assert {key.partition("/")[2] for key in monitor.latest} == names


@pytest.mark.parametrize(
    ("selector", "error", "message"),
    [
        ("encodr", LayerNotFoundError, "'encoder'"),
        (nn.LSTM, LayerNotFoundError, "LSTM"),
        ((1, 3), SelectorTypeError, "write the name"),
    ],
)
@pytest.mark.campaign
def test_slips_are_noticed_when_fitting_starts(
    selector: Any, error: type[Exception], message: str, data: Tensor, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path, LayerStatsMonitor(selector)).fit(Model(), loader(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"every_n_steps": n}, f"every_n_steps={n!r}: give") for n in (0, -1, 1.5, "3", True)),
        ({"statistics": ["median"]}, r"'median'.*'zeros'"),
        ({"statistics": None}, r"None.*'zeros'"),
        ({"gradients": "no"}, "gradients='no': write True or False"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LayerStatsMonitor(**options)


@pytest.mark.campaign
def test_modules_that_do_not_run_are_told(data: Tensor, tmp_path: Path) -> None:
    model = Model()
    model.spare = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="saw no call"):
        trainer(tmp_path, LayerStatsMonitor("spare")).fit(model, loader(data))


@pytest.mark.campaign
def test_early_stopping_can_watch_a_layer(data: Tensor, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    key = "activations_zeros/encoder.1"
    stopping = EarlyStopping(key, mode="max", stopping_threshold=-1, check_on_train_epoch_end=True)
    fitted = trainer(tmp_path, LayerStatsMonitor("encoder.1"), stopping, max_epochs=3)
    fitted.fit(Model(), loader(data))
    assert fitted.current_epoch == 1


@pytest.mark.campaign
def test_without_a_logger_the_latest_is_kept(data: Tensor, tmp_path: Path) -> None:
    monitor = LayerStatsMonitor("head")
    trainer(tmp_path, monitor, logger=False).fit(Model(), loader(data))
    assert len(monitor.latest) == 2 * 5, "five statistics of activations, and of gradients"


def test_dead_and_saturated_units(data: Tensor, tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad():
        model.encoder[0].weight[:2] = 0
        model.encoder[0].bias[:2] = -1
        model.head.bias[0] = 100
    monitor = LayerStatsMonitor(
        "encoder.1", "act", statistics=["max_abs", "dead", "saturated"], every_n_steps=1
    )
    seen: list[Tensor] = []
    model.encoder[1].register_forward_hook(
        lambda m, a, output: seen.append(output.detach().clone())
    )
    trainer(tmp_path, monitor, limit_train_batches=1).fit(model, loader(data))
    latest = monitor.latest
    (relu,) = seen
    dead = (relu == relu[:1]).all(0)
    assert dead[:2].all()
    assert latest["activations_dead/encoder.1"] == pytest.approx(float(dead.double().mean()))
    assert latest["activations_max_abs/encoder.1"] == float(relu.abs().max())
    assert "activations_saturated/encoder.1" not in latest
    assert latest["activations_saturated/act"] == 0
    assert "gradients_dead/act" not in latest
    assert latest["gradients_max_abs/act"] > 0

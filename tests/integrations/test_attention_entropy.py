"""Attention entropies that trainers log, against weights that transformers' eager code returns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from scio_recorder.integrations import lightning
from scio_recorder.integrations.transformers import LayerStatsMonitor
from scio_recorder.nets.attention import Attention, kernel
from tests.integrations.trainings import quiet_arguments, quiet_trainer

STATISTICS = ["attention_entropy"]


def gpt2(implementation: str, dropout: float) -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50}
    dropouts = {"attn_pdrop": dropout, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, attn_implementation=implementation))
    with torch.no_grad():
        # Otherwise all keys have nearly the same weight.
        net.transformer.wte.weight *= 40
        for number, block in enumerate(net.transformer.h):
            block.attn.c_attn.weight *= 10 + 10 * number
    return net


def by_hand(net: GPT2LMHeadModel, ids: Tensor) -> list[float]:
    """Return the mean entropy of each layer, from the weights that eager code returns."""
    chosen, was_training = net.config._attn_implementation, net.training
    net.set_attn_implementation("eager")
    with torch.no_grad():
        weights = net.eval()(ids, output_attentions=True).attentions
    net.set_attn_implementation(chosen)
    net.train(was_training)
    return [-(one * one.clamp_min(1e-38).log()).sum(-1).double().mean().item() for one in weights]


def trained(
    net: nn.Module, ids: Tensor, folder: Path, statistics: Any = STATISTICS, **options: Any
) -> LayerStatsMonitor:
    """Return the monitor of a training of one step."""
    defaults: dict[str, Any] = {"per_device_train_batch_size": len(ids), "max_steps": 1}
    arguments = quiet_arguments(folder, **(defaults | options))
    trainer = Trainer(net, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in ids])
    monitor = LayerStatsMonitor(trainer, "*.attn", statistics=statistics)
    trainer.add_callback(monitor)
    trainer.train()
    return monitor


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(50, (6, 10))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_entropies_are_those_of_eager_weights(
    implementation: str, dropout: float, ids: Tensor, tmp_path: Path
) -> None:
    net = gpt2(implementation, dropout)
    first, second = by_hand(net, ids)
    assert 0.1 < second < first - 0.1
    latest = trained(net, ids, tmp_path).latest
    names = [f"attention_entropy/transformer.h.{layer}.attn" for layer in range(2)]
    assert list(latest) == names
    # Sums of float32. Dropout in the first layer changes what the second one receives.
    assert latest[names[0]] == pytest.approx(first, rel=1e-5)
    assert latest[names[1]] == pytest.approx(second, rel=1e-5 if dropout == 0 else 0.5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_a_step_of_several_batches_counts_them_all_once(
    ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []
    entropy = Attention.entropy
    monkeypatch.setattr(Attention, "entropy", lambda one: measured.append(one) or entropy(one))
    net = gpt2("sdpa", 0.0)
    expected = by_hand(net, ids)
    net.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    latest = trained(net, ids, tmp_path, **options).latest
    assert list(latest.values()) == pytest.approx(expected, rel=1e-5)
    assert len(measured) == 3 * 2  # batches and layers, and none when checkpointing repeats them


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_training_is_bit_for_bit_the_same(
    ids: Tensor, tmp_path: Path, is_checkpointed: bool
) -> None:
    nets = []
    for number, statistics in enumerate((STATISTICS, ["norm"])):
        torch.manual_seed(0)
        nets.append(gpt2("sdpa", 0.4))
        if is_checkpointed:
            nets[-1].gradient_checkpointing_enable({"use_reentrant": False})
        trained(nets[-1], ids, tmp_path / str(number), statistics, max_steps=2)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(one, other)
    assert all(module._compiled_call_impl is None for module in nets[0].modules())


def test_attention_that_can_not_be_read_is_a_warning(
    ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the kernel computed something else than its arguments say.
    monkeypatch.setattr(kernel, "bias_of", lambda *arguments: None)
    with pytest.warns(UserWarning, match=r"no entropy of attention in transformer\.h\.[01]\.attn"):
        assert not trained(gpt2("sdpa", 0.4), ids, tmp_path).latest


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return self.head(self.attend(batch, batch, batch)[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("selectors", [("attend", "head"), ("head",)])
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_lightning(selectors: tuple[str, ...], tmp_path: Path) -> None:
    model, batch = Model(), torch.randn(4, 5, 8)
    model.attend.in_proj_weight.data *= 3
    _, weights = model.eval().attend(batch, batch, batch, average_attn_weights=False)
    expected = torch.distributions.Categorical(weights.detach()).entropy().mean().item()
    monitor = lightning.LayerStatsMonitor(*selectors, statistics=STATISTICS, every_n_steps=1)
    trainer = quiet_trainer(monitor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model.train(), DataLoader(batch, batch_size=4))
    saw_none = any("saw no attention" in str(one.message) for one in caught)
    assert saw_none == ("attend" not in selectors)
    entropies = {"attention_entropy/attend": pytest.approx(expected, rel=1e-5)}
    assert monitor.latest == ({} if saw_none else entropies)

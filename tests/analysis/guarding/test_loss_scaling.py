"""Guards around training with a scaled loss, beside what torch's scaler does."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import NonFiniteError, Recorder
from tests.analysis.guarding.nonfinite import Do


class Training:
    """A small network in half precision, whose loss is scaled."""

    def __init__(self, *layers: nn.Module, scale: float, enabled: bool = True) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *layers, nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=1000, enabled=enabled
        )
        self.x = torch.randn(6, 4)
        self.rnet = Recorder(self.net, input_data=self.x, verbose=0)

    def loss(self) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.net(self.x).float().square().mean() * 1.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_overflows_of_a_scaled_loss_are_expected_and_counted() -> None:
    training = Training(scale=2.0**24)
    with training.rnet.guard() as guard:
        for _ in range(20):
            training.step()
    skipped = round(24 - torch.tensor(training.scaler.get_scale()).log2().item())
    assert guard.origin is None
    assert guard.num_skipped_steps == skipped > 0
    assert f"has skipped {skipped} steps" in str(guard)


def test_a_step_outside_the_block_counts_as_well() -> None:
    training = Training(scale=2.0**40)
    with training.rnet.guard() as guard:
        training.scaler.scale(training.loss()).backward()
    assert guard.num_skipped_steps == 0
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert guard.num_skipped_steps == 1
    assert guard.origin is None


def test_several_backward_passes_of_a_step_count_once() -> None:
    training = Training(scale=2.0**40)
    with training.rnet.guard() as guard:
        for _ in range(3):
            training.scaler.scale(training.loss()).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
    assert guard.num_skipped_steps == 1


def test_what_no_smaller_scale_mends_is_found() -> None:
    sqrt = nn.Sequential(Do(lambda x: x * 0), Do(lambda x: x.float().sqrt()))
    training = Training(sqrt, scale=8.0)
    with training.rnet.guard() as guard:
        for _ in range(3):
            training.step()
        with pytest.raises(NonFiniteError) as caught:
            training.step()
    assert caught.value.origin.layer.name == "2.1"
    assert training.scaler.get_scale() == 1
    assert guard.num_skipped_steps == 3


def test_a_loss_that_is_not_scaled_has_no_excuse() -> None:
    sqrt = nn.Sequential(Do(lambda x: x * 0), Do(lambda x: x.float().sqrt()))
    training = Training(sqrt, scale=2.0**16)
    training.scaler.scale(torch.ones(()))
    with training.rnet.guard(), pytest.raises(NonFiniteError):
        training.net(training.x).sum().backward()
    training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with training.rnet.guard(), pytest.raises(NonFiniteError):
        training.step()


def test_forward_passes_have_no_excuse() -> None:
    training = Training(Do(torch.log), scale=2.0**16)
    with training.rnet.guard(), pytest.raises(NonFiniteError) as caught:
        training.step()
    assert caught.value.origin.direction == "forward"


def test_a_guard_keeps_no_scaler() -> None:
    training = Training(scale=2.0**40)
    with training.rnet.guard() as guard:
        training.scaler.scale(training.loss()).backward()
    del training
    gc.collect()
    assert guard.num_skipped_steps == 0

"""Guards around training with a scaled loss, beside what torch's scaler does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

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

    def guard(self) -> Any:
        return self.rnet.guard(scaler=self.scaler)

    def backward(self, times: int = 1) -> None:
        for _ in range(times):
            with torch.autocast("cpu", torch.float16):
                loss = self.net(self.x).float().square().mean() * 1.0
            self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, times: int = 1) -> None:
        """Accumulate gradients of several passes, and take a step."""
        self.optimizer.zero_grad()
        self.backward(times)
        self.update()


def test_overflows_of_a_scaled_loss_are_expected_and_counted() -> None:
    training = Training(scale=2.0**24)
    with training.guard() as guard:
        for _ in range(20):
            training.step()
    skipped = round(24 - torch.tensor(training.scaler.get_scale()).log2().item())
    assert guard.origin is None
    assert guard.num_skipped_steps == skipped > 0
    assert f"has skipped {skipped} steps" in str(guard)


def test_a_step_outside_the_block_counts_as_well() -> None:
    training = Training(scale=2.0**40)
    with training.guard() as guard:
        training.backward()
    assert guard.num_skipped_steps == 0
    training.update()
    assert guard.num_skipped_steps == 1
    assert guard.origin is None


def test_several_backward_passes_of_a_step_count_once() -> None:
    training = Training(scale=2.0**40)
    with training.guard() as guard:
        training.step(times=3)
    assert guard.num_skipped_steps == 1


def test_what_no_smaller_scale_mends_is_found() -> None:
    sqrt = nn.Sequential(Do(lambda x: x * 0), Do(lambda x: x.float().sqrt()))
    training = Training(sqrt, scale=8.0)
    with training.guard() as guard:
        for _ in range(3):
            training.step()
        with pytest.raises(NonFiniteError) as caught:
            training.step()
    assert caught.value.origin.layer.name == "2.1"
    assert training.scaler.get_scale() == 1
    assert guard.num_skipped_steps == 3


def test_who_gives_no_scaler_is_told_of_the_first_overflow() -> None:
    # The gradients of the last module's output just fit.
    layers = Do(lambda x: x / 300), Do(lambda x: x * 300)
    training = Training(*layers, scale=2.0**16)
    with (
        training.rnet.guard() as guard,
        pytest.raises(NonFiniteError, match=r"GradScaler.*write guard\(scaler=scaler\)") as caught,
    ):
        training.step()
    assert (caught.value.origin.direction, caught.value.origin.layer.name) == ("gradient", "3")
    assert guard.num_skipped_steps == 0
    # With the larger one, those of the network's output overflow already.
    for scale in (2.0**16, 2.0**24):
        training = Training(*layers, scale=scale)
        with (
            training.rnet.guard(action="warn"),
            pytest.warns(UserWarning, match=r"write guard\(scaler=scaler\)"),
        ):
            training.step()


def test_a_scaler_that_does_not_scale_excuses_nothing() -> None:
    sqrt = nn.Sequential(Do(lambda x: x * 0), Do(lambda x: x.float().sqrt()))
    training = Training(sqrt, scale=1.0)
    with training.guard(), pytest.raises(NonFiniteError) as caught:
        training.step()
    # Who has given a scaler needs no advice.
    assert "scaler" not in str(caught.value)
    training = Training(sqrt, scale=2.0**16, enabled=False)
    with training.guard(), pytest.raises(NonFiniteError):
        training.step()


def test_steps_of_accumulated_gradients_are_as_without_a_guard() -> None:
    training = Training(scale=2.0**20)
    twin = copy.deepcopy(training.net)
    with training.guard() as guard:
        for _ in range(12):
            training.step(times=2)
    bare = Training(scale=2.0**20)
    bare.net.load_state_dict(twin.state_dict())
    for _ in range(12):
        bare.step(times=2)
    assert training.scaler.get_scale() == bare.scaler.get_scale()
    assert guard.num_skipped_steps == 20 - torch.tensor(bare.scaler.get_scale()).log2() > 0
    for ours, plain in zip(training.net.parameters(), bare.net.parameters(), strict=True):
        assert torch.equal(ours, plain)


def test_forward_passes_have_no_excuse() -> None:
    training = Training(Do(torch.log), scale=2.0**16)
    with training.guard(), pytest.raises(NonFiniteError) as caught:
        training.step()
    assert caught.value.origin.direction == "forward"

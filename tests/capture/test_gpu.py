"""Saved tensors that leave the GPU and come back, and recomputing with the GPU's random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import RecomputeError, Recorder, track
from tests.harness import recorder
from tests.oracle import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(layers, nn.Conv2d(8, 4, 3)).cuda()


def gradients(pin_memory: bool | None) -> list[Tensor]:
    net = convolutions()
    rnet = Recorder(net, input_data=torch.zeros(1, 3, 8, 8, device="cuda"), verbose=0)
    x = torch.randn(4, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    if pin_memory is None:
        net(x).square().sum().backward()
    else:
        with rnet.saved_tensors("*", device="cpu", pin_memory=pin_memory):
            loss = net(x).square().sum()
        loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def test_gradients_are_bit_for_bit_the_same_from_the_host() -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        torch.manual_seed(3)
        wanted = gradients(None)
        for pin_memory in (False, True):
            torch.manual_seed(3)
            for one, other in zip(gradients(pin_memory), wanted, strict=True):
                assert same_bits(one, other)


def test_recomputing_draws_the_same_numbers_and_notices_a_move() -> None:
    net = convolutions().train()
    rnet = recorder(net, "0", input_data=torch.zeros(1, 3, 8, 8, device="cuda"), inputs=True)
    seen: list[Tensor] = []
    net[0][3].register_forward_hook(lambda _module, _args, output: seen.append(output.clone()))
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        rnet(torch.randn(4, 3, 8, 8, device="cuda"))
        torch.rand(5, device="cuda")
        assert same_bits(rnet.recompute("0.3")["0.3"], seen[0])
    net.cpu()
    with pytest.raises(RecomputeError, match="another device"):
        rnet.recompute("0.3")


def test_events_are_copied_to_the_host() -> None:
    net = convolutions()
    with track(net) as events:
        net(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
    assert {event.first_value.device.type for event in events} == {"cpu"}

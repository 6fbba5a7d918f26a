"""Recomputing a dataset that a GPU has run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scio_recorder import RecomputeError, Recorder, open_recording
from tests.oracle import Watch, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Dropout and running statistics are what is tested.
@pytest.mark.filterwarnings("ignore:the net is in training mode")
@pytest.mark.parametrize("store", ["host", "device", "disk"])
def test_bit_for_bit_with_dropout_and_statistics(store: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    net = nn.Sequential(inner, nn.Linear(16, 2)).cuda().train()
    rnet = Recorder(net, input_size=(2, 16), verbose=0)
    rnet.record("0", inputs=True)
    data = [torch.randn(rows, 16, device="cuda") for rows in (8, 8, 3)]
    path = tmp_path / "run"
    with Watch(net) as watch:
        recording = rnet.collect(data, store=f"disk:{path}" if store == "disk" else store)
    if store == "disk":
        recording = open_recording(path, verify=True)
    state = torch.cuda.get_rng_state()
    found = recording.recompute(rnet, "0.0", "0.1", "0.2")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for name in ("0.0", "0.1", "0.2"):
        wanted = torch.cat([watch.calls[name, number].value for number in range(3)])
        assert found[name].device.type == "cpu"
        assert same_bits(found[name], wanted.cpu())
    assert recording.inputs["0"][2].args[0].device.type == "cpu"
    net.cpu()
    with pytest.raises(RecomputeError, match=r"were on cuda:0, now on cpu"):
        recording.recompute(rnet, "0.1")

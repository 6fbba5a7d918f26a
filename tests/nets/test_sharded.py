"""Nets that are sharded before they are labelled, or after, work as in one process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import is_available

from scio_recorder import Recorder

SCRIPT = Path(__file__).with_name("sharded.py")

pytestmark = pytest.mark.skipif(not is_available(), reason="needs torch.distributed")


def test_a_sharded_net_in_this_process_is_left_as_it_was(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        net = copy.deepcopy(plain)
        fully_shard(net, mesh=mesh)
        rnet = Recorder(net, input_size=(2, 4), mode="train")
        assert torch.equal(net[1].running_mean, torch.zeros(4))
        assert not net[1].num_batches_tracked
        rnet.record("0")
        x = torch.randn(3, 4)
        rnet(x)
        assert torch.equal(rnet.activations["0"], plain[0](x))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.campaign
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_sharded(processes: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(processes), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(processes)
    ]
    ended = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, ended
    assert all(output.endswith("done\n") for output, _ in ended)

"""One process of a sharded net, which `test_sharded.py` runs."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from scio_recorder import Recorder, UnsupportedNetError


def main(kind: str, rank: int, processes: int, store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=processes, init_method=f"file://{store}")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    data = hidden = torch.ones(3, 4)
    truth = [hidden := layer(hidden).detach() for layer in net]

    rnet = Recorder(net, input_size=(3, 4))
    rnet.record("0", "1", "2")
    if kind == "fully_shard":
        mesh = init_device_mesh("cpu", (processes,))
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)
        call: nn.Module = rnet
    else:
        call = FullyShardedDataParallel(rnet, device_id=torch.device("cpu"))

    def step() -> None:
        output = call(data)
        for name, expected in zip(("0", "1", "2"), truth, strict=True):
            assert torch.equal(rnet.activations[name], expected)
        output.sum().backward()

    step()
    # What follows a forward pass without a backward pass is another state of the shards.
    call(data)
    with pytest.raises(UnsupportedNetError, match="label first and shard after"):
        Recorder(net if kind == "fully_shard" else call, input_size=(3, 4))
    step()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

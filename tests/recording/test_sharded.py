"""Activations that are spread over several processes, collected and reduced as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import is_available

ROOT = Path(__file__).parents[2]
WORLD = 2

pytestmark = pytest.mark.skipif(not is_available(), reason="needs torch.distributed")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).eval()


def make_data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator) for size in (4, 4, 3)]


def run_rank(rank: int, folder: Path) -> None:
    """Collect a net whose first layer gives its features by shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    from scio_recorder import Recorder
    from scio_recorder.reductions import Covariance, Max, Mean

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    net = make_net()
    rnet = Recorder(net, input_size=(2, 4))
    mesh = init_device_mesh("cpu", (WORLD,))
    styles = {
        "0": ColwiseParallel(use_local_output=False),
        "1": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
    }
    parallelize(net, mesh, styles)
    rnet.record("0", "1")
    seen: list[type] = []
    net[0].register_forward_hook(lambda module, args, output: seen.append(type(output)))
    data = make_data()
    found = {"host": rnet.collect(data, store="host")["0"].clone()}
    assert set(seen) == {DTensor}
    reduce = [Mean(), Max(), Covariance()]
    mean, most, covariance = rnet.collect(data, reduce={"0": reduce})["0"]
    spread = DTensor.from_local(data[0][:, 2 * rank : 2 * rank + 2], mesh, [Shard(1)])
    alone = Mean()
    alone.update(spread)
    found |= {"mean": mean, "max": most, "covariance": covariance.covariance}
    found |= {"alone": alone.compute()}
    assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
    torch.save(found, folder / f"found-{rank}")
    dist.destroy_process_group()


def test_sharded_activations(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = "import sys; from pathlib import Path; from tests.recording.test_sharded import run_rank"
    code += "; run_rank(int(sys.argv[1]), Path(sys.argv[2]))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path)], env=environment)
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * WORLD
    net, data = make_net(), make_data()
    with torch.no_grad():
        wanted = torch.cat([net[0](x) for x in data])
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"found-{rank}")
        # Kernels are those of half a layer, so that last bits may differ.
        torch.testing.assert_close(found["host"], wanted)
        torch.testing.assert_close(found["mean"], wanted.double().mean(0).float())
        assert torch.equal(found["max"], found["host"].amax(0))
        torch.testing.assert_close(found["covariance"], wanted.double().T.cov().float())
        torch.testing.assert_close(found["alone"], data[0].mean(0))

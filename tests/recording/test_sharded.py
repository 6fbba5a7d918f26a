"""Activations that are spread over several processes, collected and reduced as a whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


def ids_of(batch: Tensor) -> list[str]:
    return [f"{first:.4f}" for first in batch[:, 0].tolist()]


def broken_off(batches: list[Tensor]) -> Iterator[Tensor]:
    yield from batches
    raise InterruptedError


class Fused(nn.Module):
    """Attention with two heads, whose queries, keys and values one layer makes."""

    # By heads, as tensor parallelism needs the rows of that layer, and not by kinds.
    ORDER = torch.tensor([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11])

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        hidden = nn.functional.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.out(hidden.transpose(1, 2).flatten(2))
        return projected


def make_fused() -> tuple[Fused, list[Tensor]]:
    torch.manual_seed(0)
    return Fused().eval(), [torch.randn(size, 3, 4) for size in (2, 1)]


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
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=300),
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
    collect_shards(rank, folder, mesh)
    go_on_in_step(rank, folder, mesh)
    collect_a_fused_layer(rank, folder, mesh)
    collect_what_all_have(rank, folder, mesh)
    refuse_together(rank, folder)
    dist.destroy_process_group()


def collect_shards(rank: int, folder: Path, mesh: object) -> None:
    """Collect layers of which each process has a shard only."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    from scio_recorder import CollectError, Recorder
    from scio_recorder.errors import ShardWarning
    from scio_recorder.reductions import Mean
    from scio_recorder.stores import Disk

    net = nn.Sequential(*make_net(), nn.Tanh(), nn.Linear(3, 4), nn.Unflatten(1, (2, -1)))
    styles = {
        "0": ColwiseParallel(),
        "1": RowwiseParallel(output_layouts=Replicate()),
        "3": ColwiseParallel(),
    }
    rnet = Recorder(net, input_size=(2, 4))
    parallelize(net, mesh, styles)
    data = make_data()
    rnet.record("0", "1")

    def disk(name: str) -> Disk:
        return Disk(folder / name, rank=rank, world_size=WORLD, chunk_bytes=64)

    # Before a pass has shown that there are shards, ids have to be given.
    with pytest.warns(ShardWarning, match=f"1-1 0 .Linear.: the record is shard {rank} of 2"):
        own = rnet.collect(data, store=disk("run"), sample_ids=ids_of)
    assert own["0"].shape == (11, 3)
    again = rnet.collect(data, store=disk("index"))
    assert torch.equal(again["0"][:], own["0"][:])
    # Now that it is known, what can't be kept is refused before anything runs.
    net.register_forward_pre_hook(lambda *call: pytest.fail("ran"))
    with pytest.raises(CollectError, match="work on shards alone"):
        rnet.collect(data, store=disk("mean"), reduce={"0": Mean()})
    with pytest.raises(CollectError, match="write as many parts"):
        rnet.collect(data, store=Disk(folder / "three", rank=rank, world_size=3))
    rnet.record("4")
    with pytest.raises(CollectError, match="can't be put together"):
        rnet.collect(data, store=disk("unknown"))


def go_on_in_step(rank: int, folder: Path, mesh: Any) -> None:
    """Resume where one process has what the other has not: both have to run the same passes."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    from scio_recorder import CollectError, Recorder
    from scio_recorder.stores import Disk

    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Replicate())}
    ran: list[object] = []
    for kind, net, shift in (
        ("tensor", parallelize(make_net(), mesh, styles), 0),
        ("data", fully_shard(make_net()), rank),
        ("data1", FullyShardedDataParallel(make_net(), device_id=torch.device("cpu")), rank),
    ):
        data = [batch + shift for batch in make_data()]
        rnet = Recorder(net, input_size=(2, 4))
        net.register_forward_pre_hook(lambda *call: ran.append(call))
        rnet.record("*0", "*1")
        with pytest.raises(CollectError, match="each would take other parts"):
            rnet.collect_parts(lambda part, data=data: data, 2, store=f"disk:{folder}/parts")
        shared = Disk(folder / kind, rank=rank, world_size=WORLD, chunk_bytes=1)
        own = Disk(folder / f"{kind}-{rank}", chunk_bytes=1)
        for store, at_last in ((shared, 0), (own, 3)):
            with contextlib.suppress(InterruptedError):
                if rank == 0:
                    rnet.collect(broken_off(data[:2]), store=store, sample_ids=ids_of)
                else:
                    rnet.collect(data[:2], store="host")
            for num_passes in (3, at_last):
                ran.clear()
                rnet.collect(data, store=store, sample_ids=ids_of, resume=True)
                assert len(ran) == num_passes


def collect_a_fused_layer(rank: int, folder: Path, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    from scio_recorder import Recorder
    from scio_recorder.errors import ShardWarning
    from scio_recorder.stores import Disk

    net, data = make_fused()
    with torch.no_grad():
        for parameter in net.qkv.parameters():
            parameter.copy_(parameter[Fused.ORDER])
    parallelize(net, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    rnet = Recorder(net, input_size=(2, 3, 4))
    rnet.record("qkv", "out")
    with pytest.warns(ShardWarning, match="qkv"):
        rnet.collect(data, store=Disk(folder / "fused", rank=rank, world_size=WORLD))


def collect_what_all_have(rank: int, folder: Path, mesh: Any) -> None:
    """No row is written twice where each process has it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    from scio_recorder import CollectError, Recorder
    from scio_recorder.stores import Disk

    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Replicate())}
    for is_sharded_first in (True, False):
        net, data, ran = make_net(), make_data(), []
        if is_sharded_first:
            parallelize(net, mesh, styles)
        rnet = Recorder(net, input_size=(2, 4))
        if not is_sharded_first:
            parallelize(net, mesh, styles)
        rnet.record("1")
        net.register_forward_pre_hook(lambda *call, ran=ran: ran.append(call))
        store = Disk(folder / "doubled", rank=rank, world_size=WORLD)
        for ids in (ids_of, None)[: 1 + is_sharded_first]:
            with pytest.raises(CollectError, match="there would be 2 of each row"):
                rnet.collect(data, store=store, sample_ids=ids)
        assert len(ran) == (0 if is_sharded_first else 1)
        assert not (folder / "doubled").exists()
    one = Disk(folder / "once") if rank == 0 else "host"
    rnet.collect(data, store=one)


def refuse_together(rank: int, folder: Path) -> None:
    """What one process refuses is refused by all: a pass of the others would wait for it."""
    from torch.distributed.fsdp import fully_shard

    from scio_recorder import CollectError, Recorder

    rnet, data = Recorder(fully_shard(make_net()), input_size=(2, 4)), make_data()
    rnet.record("1")
    rnet.net.register_forward_pre_hook(lambda *call: ran.append(call))
    ran: list[object] = []
    for refuses in range(WORLD):
        store = "dsik:run" if rank == refuses else f"disk:{folder}/refused-{rank}"
        words = "store='dsik:run'" if rank == refuses else "another process.* has refused"
        with pytest.raises(CollectError, match=words):
            rnet.collect(data, store=store)
    assert not ran
    assert not list(folder.glob("refused*"))
    assert rnet.collect(data, store=f"disk:{folder}/refused-{rank}").num_samples == 11


def test_a_process_by_itself_keeps_a_shard_of_any_kind(tmp_path: Path) -> None:
    from scio_recorder import Recorder, open_recording
    from scio_recorder.layer import Shard

    rnet, data = Recorder(make_net(), input_size=(2, 4)), make_data()
    rnet.record("0")
    unknown = Shard(None, None, 0)
    rnet.architecture.mark({(1, 1): unknown}, 2)
    rnet.collect(data, store=f"disk:{tmp_path}/run")
    recording = open_recording(tmp_path / "run", verify=True)
    assert recording.architecture["0"].shard == unknown
    with torch.no_grad():
        assert torch.equal(recording["0"][:], torch.cat([make_net()[0](x) for x in data]))


def check_shards(folder: Path) -> None:
    from scio_recorder import open_recording
    from scio_recorder.command_line import main

    net, data = make_net(), make_data()
    with torch.no_grad():
        wanted = [torch.cat([net[: last + 1](x) for x in data]) for last in range(2)]
    for name, ids in (
        ("run", ids_of(torch.cat(data))),
        ("index", list(range(11))),
        ("tensor", ids_of(torch.cat(data))),
    ):
        recording = open_recording(folder / name, verify=True)
        assert recording.complete
        assert list(recording.sample_ids) == ids
        assert recording["0"].shape == (11, 6)
        # Each process has the same ids, and no sample is there twice.
        assert main(["verify", str(folder / name)]) == 0
        assert recording.architecture["0"].shard is None
        for layer, whole in zip(("0", "1"), wanted, strict=True):
            torch.testing.assert_close(recording[layer][:], whole)
            torch.testing.assert_close(recording[layer][[7, 2, 9]], whole[[7, 2, 9]])
            batches = recording.loader(layer, batch_size=4)
            torch.testing.assert_close(torch.cat(list(batches)), whole)


def check_what_was_gone_on_with(folder: Path) -> None:
    from scio_recorder import open_recording

    net, data = make_net(), torch.cat(make_data())
    with torch.no_grad():
        wanted = [net(data + rank) for rank in range(WORLD)]
    for name, whole in {
        "once": wanted[0],
        "tensor-0": wanted[0],
        "tensor-1": wanted[0],
        "data-0": wanted[0],
        "data-1": wanted[1],
        "data": torch.cat(wanted),
        "data1": torch.cat(wanted),
    }.items():
        recording = open_recording(folder / name, verify=True)
        assert recording.complete
        torch.testing.assert_close(recording[max(recording)][:], whole)
    fused, batches = make_fused()
    recording = open_recording(folder / "fused")
    with torch.no_grad():
        torch.testing.assert_close(recording["out"][:], torch.cat([fused(x) for x in batches]))
        made = torch.cat([fused.qkv(x) for x in batches])[..., Fused.ORDER]
    torch.testing.assert_close(recording["qkv"][:], made)


@pytest.mark.campaign
def test_sharded_activations(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = "import sys; from pathlib import Path; from tests.recording.test_sharded import run_rank"
    code += "; run_rank(int(sys.argv[1]), Path(sys.argv[2]))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path)], env=environment)
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0] * WORLD
    check_shards(tmp_path)
    check_what_was_gone_on_with(tmp_path)
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

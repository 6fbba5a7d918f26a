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

from scio_recorder import CollectError, Recorder, open_recording
from scio_recorder.errors import RecordingError, ShardWarning
from scio_recorder.layer import Shard
from scio_recorder.reductions import Covariance, Max, Mean
from scio_recorder.stores import Disk
from tests.recording.nets import recorder_of

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


def run_rank(rank: int, folder: Path) -> None:
    """Collect a net whose first layer gives its features by shards."""
    import torch.distributed as dist
    from torch.distributed import tensor as placed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

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
        "1": RowwiseParallel(input_layouts=placed.Shard(-1), output_layouts=placed.Replicate()),
    }
    parallelize(net, mesh, styles)
    rnet.record("0", "1")
    seen: list[type] = []
    net[0].register_forward_hook(lambda module, args, output: seen.append(type(output)))
    data = make_data()
    found = {"host": rnet.collect(data, store="host")["0"].clone()}
    assert set(seen) == {placed.DTensor}
    reduce = [Mean(), Max(), Covariance()]
    mean, most, covariance = rnet.collect(data, reduce={"0": reduce})["0"]
    spread = placed.DTensor.from_local(data[0][:, 2 * rank : 2 * rank + 2], mesh, [placed.Shard(1)])
    alone = Mean()
    alone.update(spread)
    found |= {"mean": mean, "max": most, "covariance": covariance.covariance}
    found |= {"alone": alone.compute()}
    assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
    torch.save(found, folder / f"found-{rank}")
    collect_shards(rank, folder, mesh)
    go_on_in_step(rank, folder, mesh)
    collect_what_all_have(rank, folder, mesh)
    refuse_together(rank, folder)
    dist.destroy_process_group()


def collect_shards(rank: int, folder: Path, mesh: object) -> None:
    """Collect layers of which each process has a shard only."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

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

    def refused(name: str) -> Any:
        match = rf"{name}\b.*: each process has only a shard.*use_local_output=False"
        return pytest.raises(CollectError, match=match)

    # The first pass shows that there are shards, in all processes.
    first = pytest.warns(ShardWarning, match=f"1-1 0 .Linear.: the record is shard {rank} of 2")
    with first, refused("1-1 0"):
        rnet.collect(data, store="host")
    # Now that it is known, they are refused before anything runs.
    net.register_forward_pre_hook(lambda *call: pytest.fail("ran"))
    store = Disk(folder / "run", rank=rank, world_size=WORLD)
    with refused("1-1 0"):
        rnet.collect(data, store=store, sample_ids=ids_of)
    with refused("1-1 0"):
        rnet.collect(data, store=None, reduce=Mean())
    rnet.record("4")
    with refused("1-5 4"):
        rnet.collect(data)
    assert not (folder / "run").exists()


def go_on_in_step(rank: int, folder: Path, mesh: Any) -> None:
    """Resume where one process has what the other has not: both have to run the same passes."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    # What the first layer returns is gathered, by all processes together.
    gathered = ColwiseParallel(use_local_output=False)
    styles = {"0": gathered, "1": RowwiseParallel(output_layouts=Replicate())}
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
        # Under tensor parallelism all processes have the same rows.
        for store, at_last in ((shared, 0), (own, 3))[kind == "tensor" :]:
            with contextlib.suppress(InterruptedError):
                if rank == 0:
                    rnet.collect(broken_off(data[:2]), store=store, sample_ids=ids_of)
                else:
                    rnet.collect(data[:2], store="host")
            for num_passes in (3, at_last):
                ran.clear()
                rnet.collect(data, store=store, sample_ids=ids_of, resume=True)
                assert len(ran) == num_passes


def collect_what_all_have(rank: int, folder: Path, mesh: Any) -> None:
    """No row is written twice where each process has it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

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


def marked(shard: Any, num_sharing: int) -> Any:

    rnet = recorder_of(make_net(), "0", input_size=(2, 4))
    rnet.architecture.mark({(1, 1): shard}, num_sharing)
    return rnet


@pytest.mark.parametrize("options", [{}, {"store": "disk:run"}, {"store": None, "reduce": Mean()}])
def test_a_shard_is_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rnet = marked(Shard(None, None, 0), 2)
    with pytest.raises(CollectError, match=r"1-1 0 .Linear.: each process has only a shard"):
        rnet.collect(make_data(), **options)
    assert not list(tmp_path.iterdir())


def test_shards_of_earlier_versions_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    # Where no process sees the samples of another one, marks are not looked at.
    for rank in range(WORLD):
        rnet, data = marked(Shard(1, rank, WORLD), 1), [batch + rank for batch in make_data()]
        store = Disk(tmp_path, rank=rank, world_size=WORLD)
        rnet.collect(data, store=store, sample_ids=ids_of)
    with pytest.raises(RecordingError, match=r"shard of 1-1 0 .Linear.*scio-recorder 0.3"):
        open_recording(tmp_path)


def check_what_was_gone_on_with(folder: Path) -> None:

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

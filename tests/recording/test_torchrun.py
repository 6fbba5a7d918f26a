"""Processes as ``torchrun`` starts them: samplers say who has what, also where one comes back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from scio_recorder import CollectError, Recorder, RecordingError, open_recording
from scio_recorder.stores import Disk
from tests.recording.nets import recorder_of

SIZE, BATCH, WORLD = 11, 2, 2

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    # Forked processes need not import everything again.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def make_data() -> TensorDataset:
    numbers = torch.arange(SIZE).float()
    return TensorDataset(torch.stack([numbers, numbers.square(), numbers.sin()], 1))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval()


def make_recorder(net: nn.Module | None = None) -> Recorder:
    return recorder_of(net or make_net(), nn.Linear, input_size=(2, 3))


def make_loader(**options: Any) -> DataLoader[Any]:
    data = make_data()
    return DataLoader(data, BATCH, sampler=DistributedSampler(data), **options)


def check(path: Path, own: Any) -> None:
    """Compare the recording of all processes with what a plain net returns."""
    dist.barrier()
    recording = open_recording(path, verify=True)
    ids = [int(each) for each in recording.sample_ids]
    assert recording.complete
    assert sorted(ids) == list(range(SIZE))
    with torch.no_grad():
        wanted = make_net()[0](make_data().tensors[0])
    (values,) = recording.values()
    torch.testing.assert_close(values[:], wanted[ids])
    start = 0 if dist.get_rank() == 0 else SIZE - own.num_samples
    assert ids[start : start + own.num_samples] == list(own.sample_ids)
    dist.barrier()


def run(work: Callable[[Path], None], folder: Path, attempt: int = 0) -> set[int | None]:
    """Run as many processes as there are ranks; where one dies, end the others."""
    context = multiprocessing.get_context("fork")
    meeting = f"file://{folder}/meeting-{attempt}"

    def begin(rank: int) -> None:
        os.setsid()
        torch.set_num_threads(1)
        # Other libraries ask for what torchrun says.
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
        os.environ |= dict(zip(names, map(str, (rank, rank, WORLD, WORLD, 0)), strict=True))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
        work(folder)
        dist.destroy_process_group()

    workers = [context.Process(target=begin, args=(rank,)) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    waiting, codes, until = list(workers), set(), time.monotonic() + 300
    while waiting:
        time.sleep(0.02)
        if time.monotonic() > until:
            for worker in waiting:
                worker.kill()
            pytest.fail("processes wait for each other")
        # Not by sentinels, which are as open as what a process has started lives.
        for worker in [each for each in waiting if each.exitcode is not None]:
            waiting.remove(worker)
            codes.add(worker.exitcode)
            # A loader's worker whose process dies before it looks for that one would wait forever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            if worker.exitcode != 0:
                for other in waiting:
                    other.terminate()
    return codes


@pytest.mark.campaign
def test_a_process_that_dies_and_comes_back_loses_nothing(tmp_path):
    def work(folder: Path, *, dies: bool = False) -> None:
        rnet, passes = make_recorder(), []

        def die(*call: Any) -> None:
            passes.append(call)
            if dies and dist.get_rank() == 1 and len(passes) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        rnet.net.register_forward_hook(die)
        store = Disk(folder / "run", chunk_bytes=8)
        own = rnet.collect(make_loader(num_workers=1), store=store, resume=True)
        # The first of three batches was durable before the third one ran.
        assert dies or dist.get_rank() == 0 or len(passes) <= 2
        check(folder / "run", own)

    codes = run(lambda folder: work(folder, dies=True), tmp_path)
    assert -signal.SIGKILL in codes
    assert run(work, tmp_path, attempt=1) == {0}


class Stream(IterableDataset):  # type: ignore[type-arg]  # of pairs
    """Splits itself between processes."""

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        samples = make_data().tensors[0]
        return ((i, samples[i]) for i in range(dist.get_rank(), SIZE, WORLD))


@pytest.mark.campaign
def test_every_library_splits_in_its_way(tmp_path):
    def work(folder: Path) -> None:
        # Nothing that other tests have left in the process that was forked.
        AcceleratorState._reset_state(reset_partial_state=True)
        loader = Accelerator(cpu=True).prepare(DataLoader(make_data(), BATCH, shuffle=True))
        with pytest.raises(CollectError, match="Accelerate deals out samples"):
            make_recorder().collect(loader, store=f"disk:{folder}/accelerate")
        fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
        fabric.launch()
        loader = fabric.setup_dataloaders(DataLoader(make_data(), BATCH, shuffle=True))
        own = make_recorder().collect(loader, store=f"disk:{folder}/fabric")
        check(folder / "fabric", own)

    assert run(work, tmp_path) == {0}


def test_a_sampler_and_a_stream_that_split(tmp_path):
    def work(folder: Path) -> None:
        own = make_recorder().collect(make_loader(), store=f"disk:{folder}/torch")
        check(folder / "torch", own)
        stream = {"sample_ids": lambda batch: batch[0], "to_inputs": lambda batch: batch[1]}
        own = make_recorder().collect(
            DataLoader(Stream(), BATCH), store=f"disk:{folder}/stream", **stream
        )
        check(folder / "stream", own)

    assert run(work, tmp_path) == {0}


@pytest.mark.campaign
def test_a_net_that_synchronises_makes_all_passes(tmp_path):
    def work(folder: Path) -> None:
        net = DistributedDataParallel(make_net())
        rank, store = dist.get_rank(), f"disk:{folder}/run"
        rnet, passes = make_recorder(net), []

        def fail(*call: Any) -> None:
            passes.append(call)
            if rank == 1 and len(passes) == 3:
                raise InterruptedError

        hook = net.register_forward_hook(fail)
        if rank == 0:
            rnet.collect(make_loader(), store=store)
        else:
            with pytest.raises(InterruptedError):
                rnet.collect(make_loader(), store=store)
        hook.remove()
        # One process has all, and the other lacks a batch; each pass waits for the other one.
        dist.barrier()
        check(folder / "run", rnet.collect(make_loader(), store=store, resume=True))

    assert run(work, tmp_path) == {0}


@pytest.mark.campaign
def test_one_folder_without_a_sampler_that_splits(tmp_path):
    def work(folder: Path) -> None:
        rank, rnet, data = dist.get_rank(), make_recorder(), DataLoader(make_data(), BATCH)
        own = rnet.collect(data, store=f"disk:{folder}/{rank}")
        assert own.num_samples == SIZE
        assert rnet.collect(data, store=f"disk:{folder}/{rank}", resume=True).complete
        if rank == 1:
            dist.barrier()
            with pytest.raises(RecordingError, match=r"DistributedSampler.*collect_parts"):
                rnet.collect(data, store=f"disk:{folder}/same")
            # All that is there is another's: nothing of this process's own is done.
            both = r"rank 0 of 2.*rank 1 of 2.*DistributedSampler"
            with pytest.raises(RecordingError, match=both):
                rnet.collect(data, store=f"disk:{folder}/same", resume=True)
        else:
            assert rnet.collect(data, store=f"disk:{folder}/same").complete
            dist.barrier()
        # A stream that splits itself can't be told from one that does not, where ids are given.
        alone = Disk(folder / f"alone-{rank}", rank=0, world_size=1)
        ids = {"sample_ids": lambda batch: batch[0], "to_inputs": lambda batch: batch[1]}
        rnet.collect(DataLoader(Stream(), BATCH), store=alone, **ids)
        assert open_recording(folder / f"alone-{rank}").complete

    assert run(work, tmp_path) == {0}


@pytest.mark.campaign
def test_a_sampler_of_other_processes(tmp_path):
    def work(folder: Path) -> None:
        data = make_data()
        sampler = DistributedSampler(data, num_replicas=4, rank=dist.get_rank())
        loader = DataLoader(data, BATCH, sampler=sampler)
        with pytest.raises(CollectError, match=r"of 4, and this process is rank \d of 2"):
            make_recorder().collect(loader, store=f"disk:{folder}/run")

    assert run(work, tmp_path) == {0}

"""Loaders whose samplers split a dataset, as torch, Accelerate and Lightning make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.wrappers import _FabricDataLoader
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    _IndexBatchSamplerWrapper,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)


class Numbers(Dataset):  # type: ignore[type-arg]  # of nothing in particular
    """Sample i is (i, i + 0.5)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index + 0.5])


class Stream(IterableDataset):  # type: ignore[type-arg]  # of nothing in particular
    """The same samples, without indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([index, index + 0.5]) for index in range(self.size))


def distributed(data: Any, rank: int, world: int, batch: int, **options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(data, world, rank, **{"shuffle": True, "seed": 3, **options})
    return DataLoader(data, batch, sampler=sampler)


class Batched(Numbers):
    """Takes lists of indices."""

    def __init__(self, data: Numbers) -> None:
        super().__init__(len(data))

    def __getitem__(self, index: Any) -> Tensor:
        return torch.stack([super(Batched, self).__getitem__(each) for each in index])


def without_batches(data: Any, rank: int, world: int, batch: int) -> DataLoader[Any]:
    sampler = BatchSampler(DistributedSampler(data, world, rank), batch, drop_last=False)
    return DataLoader(Batched(data), None, sampler=sampler)


def accelerated(data: Any, rank: int, world: int, batch: int, **options: Any) -> Any:
    order = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    inner = BatchSampler(order, batch, options.pop("drop_last", False))
    return DataLoaderShard(data, batch_sampler=BatchSamplerShard(inner, world, rank, **options))


def of_lightning(data: Any, rank: int, world: int, batch: int) -> Any:
    order = SequentialSampler(range(len(data) - 1, -1, -1))
    sampler = DistributedSamplerWrapper(order, num_replicas=world, rank=rank, shuffle=False)
    return _FabricDataLoader(DataLoader(data, batch, sampler=sampler))


def predicting(data: Any, rank: int, world: int, batch: int) -> Any:
    sampler = UnrepeatedDistributedSampler(data, world, rank, shuffle=False)
    batches = _IndexBatchSamplerWrapper(BatchSampler(sampler, batch, drop_last=False))
    return DataLoader(data, batch_sampler=batches)


LOADERS = (distributed, without_batches)

"""A recording that is complete, and data that is given for it once more: the same, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from scio_recorder import CollectError, Tokens, open_recording
from tests.recording.nets import batches, recorder

X = batches(24)[0]


class Items(list[Any]):
    """A dataset, and no list of batches for a loader."""


def loader(number: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Items(X[:number]), batch_size, **options)


def listed(number: int) -> list[torch.Tensor]:
    return list(X[:number].split(3))


def unknown(number: int) -> Iterator[torch.Tensor]:
    return iter(listed(number))


def fingerprint(path: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


@pytest.mark.parametrize(
    ("given", "came"),
    [
        (loader(24), "24"),
        # As many batches, the last of another size.
        (loader(9), "9"),
        (loader(8, drop_last=True), "8"),
        (loader(10, sampler=SubsetRandomSampler(range(9))), "9"),
        (listed(24), "24"),
        ([X[:3]] * 5, "15"),
        # Nobody knows where it ends.
        (unknown(24), "12 or more"),
        (unknown(6), "6"),
    ],
)
def test_data_of_another_length_is_refused(tmp_path, given, came):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect(loader(10), store=f"disk:{path}")
    before = fingerprint(path)
    with pytest.raises(CollectError, match=rf"complete: it holds 10 samples .* {came} came now"):
        rnet.collect(given, store=f"disk:{path}", resume=True)
    with pytest.raises(CollectError, match="open_recording"):
        rnet.collect(loader(24), store=f"disk:{path}", resume=True)
    assert fingerprint(path) == before


@pytest.mark.parametrize(
    "given",
    [
        loader(10),
        loader(10, 5),
        loader(11, 5, drop_last=True),
        listed(10),
        unknown(10),
    ],
)
def test_data_of_the_same_length_is_not(tmp_path, given):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect(loader(10), store=f"disk:{path}")
    assert rnet.collect(given, store=f"disk:{path}", resume=True).num_samples == 10


def test_the_same_loader_is_not_read(tmp_path):
    class Read(Items):
        count = 0

        def __getitem__(self, at: Any) -> Any:
            Read.count += 1
            return super().__getitem__(at)

    rnet, given = recorder("0"), DataLoader(Read(X[:9]), 2, sampler=SubsetRandomSampler(range(9)))
    for _ in range(2):
        # Ids that are counted don't show another order, and those of a generator cost a pass.
        rnet.collect(given, store=f"disk:{tmp_path}/run", resume=True)
        assert Read.count == 9


def test_fewer_and_more_batches_by_max_batches(tmp_path):
    rnet, store = recorder("0"), f"disk:{tmp_path}/run"
    rnet.collect(unknown(24), store=store, max_batches=3)
    for given in (unknown(24), loader(24, 3), loader(9, 3)):
        assert rnet.collect(given, store=store, max_batches=3, resume=True).num_samples == 9
    with pytest.raises(CollectError, match="9 samples already, and 12 or more came"):
        rnet.collect(unknown(24), store=store, max_batches=4, resume=True)
    assert rnet.collect(loader(9), store=store, resume=True).num_samples == 9


def test_a_sampler_that_fails_to_give_its_length(tmp_path):
    class Endless(SubsetRandomSampler):
        def __len__(self) -> int:
            raise AttributeError("nobody knows")

    rnet, store = recorder("0"), f"disk:{tmp_path}/run"
    for _ in range(2):
        given = loader(10, sampler=Endless(range(9)))
        assert rnet.collect(given, store=store, resume=True).num_samples == 9


def test_other_samples_are_refused_where_the_length_differs(tmp_path):
    rnet, store, ids = recorder("0"), f"disk:{tmp_path}/run", {"sample_ids": lambda b: b[1]}
    data = [(X[at : at + 2], [f"{at}", f"{at + 1}"]) for at in range(0, 8, 2)]
    rnet.collect(iter(data), store=store, **ids)
    with pytest.raises(CollectError, match="sample 0 of the loader is '6', but was '0'"):
        rnet.collect(data[::-1], store=store, resume=True, **ids)


def test_rows(tmp_path):
    rnet, store = recorder("0"), f"disk:{tmp_path}/run"

    def texts(*lengths: int) -> list[dict[str, torch.Tensor]]:
        mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(1)
        return [{"input": X[: len(lengths)].unsqueeze(1).repeat(1, 4, 1), "mask": mask}]

    options: dict[str, Any] = {
        "rows": Tokens(mask="mask"),
        "to_inputs": lambda batch: batch["input"],
        "store": store,
    }
    rnet.collect(iter(texts(2, 4)), **options)
    assert rnet.collect(texts(2, 4), resume=True, **options).num_rows == 6
    with pytest.raises(CollectError, match="2 samples in 6 rows already, and 2 in 5 rows came"):
        rnet.collect(texts(1, 4), resume=True, **options)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_share_of_a_rank(tmp_path, rank):
    store = f"disk:{tmp_path}/run"

    def share(size: int, of: int) -> DataLoader[Any]:
        data = Items(X[:size])
        return DataLoader(data, 2, sampler=DistributedSampler(data, 3, of, shuffle=False))

    rnet = recorder("0")
    for each in range(3):
        rnet.collect(share(10, each), store=store)
    assert rnet.collect(share(10, rank), store=store, resume=True).num_samples == 3 + (rank == 0)
    with pytest.raises(OSError, match="sampler"):
        rnet.collect(share(11, rank), store=store, resume=True)


def parts_of(size: int) -> Callable[[int], list[torch.Tensor]]:
    return lambda part: list(X[part * size : (part + 1) * size].split(2))


def test_parts_of_another_length_are_refused(tmp_path):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect_parts(parts_of(4), 3, store=f"disk:{path}")
    before = fingerprint(path)
    assert rnet.collect_parts(parts_of(4), 3, store=f"disk:{path}").num_samples == 12
    with pytest.raises(CollectError, match=r"part 0: .* 4 samples already, and 6 came now"):
        rnet.collect_parts(parts_of(6), 3, store=f"disk:{path}")

    def longer_at_the_end(part: int) -> list[torch.Tensor]:
        return parts_of(4)(part) + [X[:5]] * (part == 2)

    with pytest.raises(CollectError, match=r"part 2: .* 4 samples already, and 9 came now"):
        rnet.collect_parts(longer_at_the_end, 3, store=f"disk:{path}")

    def gone(part: int) -> Any:
        raise FileNotFoundError

    assert rnet.collect_parts(gone, 3, store=f"disk:{path}").num_samples == 12
    assert fingerprint(path) == before


def test_one_part_in_the_place_of_what_collect_wrote(tmp_path):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect(loader(10), store=f"disk:{path}")
    before = fingerprint(path)
    with pytest.raises(CollectError, match=r"10 samples already, and 24 came now"):
        rnet.collect_parts(lambda part: loader(24), 1, store=f"disk:{path}")
    assert fingerprint(path) == before
    assert rnet.collect_parts(lambda part: loader(10), 1, store=f"disk:{path}").complete
    assert open_recording(path).num_samples == 10

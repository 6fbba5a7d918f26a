"""What fails in one of many parts says in which one, and in which batch of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scio_recorder import CollectError, RecordingError, open_recording
from scio_recorder.stores import Disk
from tests.recording.nets import batches, recorder

BAD = 2


class Broken(Exception):  # noqa: N818 - it is thrown by no fault of anybody
    pass


def good(part: int) -> list[torch.Tensor]:
    return batches(2, 2, seed=part)


def no_batches(part: int) -> list[torch.Tensor]:
    return good(part) if part != BAD else [][part]


def iterator(part: int) -> Iterator[torch.Tensor]:
    yield good(part)[0]
    if part == BAD:
        raise Broken("boom")
    yield good(part)[1]


def too_wide(part: int) -> list[torch.Tensor]:
    return good(part) if part != BAD else [good(part)[0], torch.zeros(2, 5)]


def no_batch(part: int) -> Any:
    return good(part) if part != BAD else [good(part)[0], 7]


def in_this_part(activation: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return activation[:, :2] if torch.equal(batch, good(BAD)[1]) else activation


def in_all_of_it(activation: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return activation[:, :2] if any(torch.equal(batch, one) for one in good(BAD)) else activation


@pytest.mark.parametrize(
    ("make_batches", "options", "kinds", "words"),
    [
        (no_batches, {}, (CollectError, IndexError), [f"make_batches({BAD})", "IndexError"]),
        (iterator, {}, (CollectError, Broken), ["batch 1", "Broken: boom"]),
        (too_wide, {}, (CollectError, RuntimeError), ["batch 1", "1-1 0 (Linear)", "[2, 5]"]),
        (no_batch, {}, (CollectError,), ["batch 1", "to_inputs"]),
        (
            good,
            {"transform": in_this_part},
            (CollectError,),
            ["batch 1", "1-1 0 (Linear)", "(6,)", "(2,)", "transform"],
        ),
        (
            good,
            {"transform": in_all_of_it},
            (CollectError, RecordingError),
            ["batch 0", "1-1 0 (Linear)", "(6,)", "(2,)", "transform"],
        ),
        (good, {"sample_ids": lambda batch: ["a", "a"]}, (CollectError,), ["batch 0", "'a'"]),
    ],
)
def test_what_fails_names_the_part_and_the_batch(tmp_path, make_batches, options, kinds, words):
    # One after the other: of the first two parts, the shape of samples is known.
    rnet, store = recorder("0"), Disk(tmp_path, chunk_bytes=1)
    with pytest.raises(kinds[0]) as caught:
        rnet.collect_parts(make_batches, 5, store=store, **options)
    error = caught.value
    assert all(isinstance(error, kind) for kind in kinds)
    told = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert "part " in str(error).partition(":")[0]
    for word in words:
        assert word in told, told
    assert "resum" not in told
    # It goes from process to process as it is.
    assert str(pickle.loads(pickle.dumps(error))) == str(copy.copy(error)) == str(error)


def test_samples_that_differ_when_a_part_is_gone_on_with(tmp_path):
    rnet, store = recorder("0"), Disk(tmp_path, chunk_bytes=1)

    def named(part: int) -> Any:
        return [
            (batch, [f"{part}{at}{row}" for row in range(2)]) for at, batch in enumerate(good(part))
        ]

    def stops(part: int) -> Any:
        yield named(part)[0]
        raise Broken

    with pytest.raises(Broken):
        rnet.collect_parts(stops, 1, store=store, sample_ids=lambda batch: batch[1])
    with pytest.raises(CollectError, match=r"part 0: sample 0 .* '010', but was '000'") as caught:
        rnet.collect_parts(
            lambda part: named(part)[::-1], 1, store=store, sample_ids=lambda batch: batch[1]
        )
    assert "resum" not in str(caught.value)
    with pytest.raises(CollectError, match=r"part 0: .* holds 2 samples already, and 0 came"):
        rnet.collect_parts(lambda part: [], 1, store=store, sample_ids=lambda batch: batch[1])
    assert list(open_recording(tmp_path).sample_ids) == ["000", "001"]

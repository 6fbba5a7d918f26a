"""The largest values of each unit, beside NumPy's sort of all values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from scio_recorder import Tokens
from scio_recorder.errors import CollectError
from scio_recorder.reductions import TopK, TopKResult
from tests.recording.nets import recorder_of
from tests.reductions.parts import Plan, plans, reduce_in_parts

torch.manual_seed(0)
# Few different values, so that most are equal to others.
DATA = torch.randint(-2, 3, (24, 4, 3)).float()
IDS = torch.randperm(24) - 8


def second(batch: Any) -> Any:
    return batch[1]


def sorted_with_numpy(units: Tensor, ids: Tensor, k: int) -> TopKResult:
    """Return what is expected of values [units, samples, positions]."""
    positions = torch.arange(units.shape[2]).repeat(units.shape[1])
    each = ids.repeat_interleave(units.shape[2])
    flat = units.flatten(1)
    order = torch.tensor(np.array([np.lexsort((positions, each, -unit))[:k] for unit in flat]))
    return TopKResult(flat.gather(1, order), each[order], positions[order])


def assert_equal(result: TopKResult, expected: TopKResult) -> None:
    for part, wanted in zip(result, expected, strict=True):
        assert part.dtype == wanted.dtype
        assert torch.equal(part, wanted)


@settings(max_examples=8)
@given(plans(len(DATA)))
def test_of_equals_the_lowest_id_however_the_data_is_split(plan: Plan) -> None:
    for k in (1, 5, 100):
        channels = reduce_in_parts(lambda k=k: TopK(k, second, 1), DATA, plan, IDS.tolist())
        expected = sorted_with_numpy(DATA.movedim(1, 0), IDS, k)
        assert_equal(channels.compute(), expected)
        every_value = reduce_in_parts(lambda k=k: TopK(k, second), DATA, plan, IDS.tolist())
        expected = sorted_with_numpy(DATA.flatten(1).T[..., None], IDS, k)
        assert_equal(every_value.compute(), expected)


def test_a_batch_that_is_cut_into_portions() -> None:
    data, ids = torch.randint(0, 60, (70, 2, 64, 129)).short(), torch.randperm(70)
    top = TopK(7, second, 1)
    top.update(data, (data, ids))
    assert_equal(top.compute(), sorted_with_numpy(data.movedim(1, 0).flatten(2).float(), ids, 7))


def test_memory_does_not_grow_with_the_data() -> None:
    top = TopK(4, second)
    for start in range(0, 1000, 10):
        top.update(torch.randn(10, 6), (None, range(start, start + 10)))
    state = top.state_dict()
    sizes = {name: state[name].numel() for name in ("values", "ids", "positions")}
    assert set(sizes.values()) == {4 * 6}


def test_infinity_is_the_largest_and_nan_is_refused() -> None:
    data = torch.tensor([[1.0, torch.inf], [-torch.inf, 2.0], [3.0, torch.inf]])
    top, more = TopK(2, second), TopK(2, second)
    top.update(data, (None, [0, 1, 2]))
    assert top.compute().values.tolist() == [[3.0, 1.0], [torch.inf, torch.inf]]
    assert top.compute().ids.tolist() == [[2, 0], [0, 2]]
    # So many that they fill what is kept.
    more.update(torch.full((4, 2), torch.nan), (None, range(4)))
    more.update(data, (None, [4, 5, 6]))
    top.merge(more)
    for each in (more, top):
        with pytest.raises(CollectError, match=r"was given nan.*transform="):
            each.compute()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["a", "b", "c"], "ids= returned 'a'; give whole numbers"),
        ([0.0, 1.0, 2.0], "ids= returned 0.0; give whole numbers"),
        ([True, False, True], "ids= returned True; give whole numbers"),
        ([0, 1, 2**70], f"ids= returned {2**70}; give whole numbers"),
        ([0, 1], "ids= returned 2 labels for an activation of 3 samples"),
        (7, "ids= returned int, which is not a sequence"),
        ([None, 1, 2], "ids= returned the label None"),
    ],
)
def test_ids_that_are_none(ids: Any, said: str) -> None:
    top = TopK(2, second)
    with pytest.raises(CollectError, match=said.replace("*", "[*]")):
        top.update(torch.ones(3, 2), (None, ids))
    with pytest.raises(CollectError, match="no samples yet"):
        top.compute()


def test_arguments_that_can_not_be() -> None:
    with pytest.raises(CollectError, match=r"with ids= needs the batch.*update\(activation, batch"):
        TopK(2, second).update(torch.ones(3, 2))
    make: Callable[..., Any] = TopK
    with pytest.raises(CollectError, match=r"TopK\(ids='id'\): give a function"):
        make(2, "id")
    with pytest.raises(CollectError, match="k"):
        make(0, second)


def test_tokens_have_ids_of_their_own() -> None:
    words = torch.tensor([[0, 5, 6, 7], [1, 8, 9, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    rnet = recorder_of(nn.Embedding(10, 3), "0-1", input_data=words[:, :3], verbose=0)
    rows = Tokens(mask=lambda batch: batch["mask"])
    batch = {"input": words, "mask": mask, "text": [5, 6], "token": torch.arange(8).view(2, 4)}
    reduce = [TopK(2, lambda batch: batch["text"]), TopK(2, lambda batch: batch["token"])]
    recording = rnet.collect(
        [batch], reduce=reduce, rows=rows, store=None, to_inputs=lambda batch: batch["input"]
    )
    weight = rnet.net.weight.detach()
    real = mask.flatten().nonzero().flatten()
    order = real[weight[words.flatten()[real]].argsort(dim=0, descending=True)[:2].T]
    texts, tokens = recording["0-1"]
    assert torch.equal(tokens.ids, order)
    assert torch.equal(texts.ids, order // 4 + 5)
    assert torch.equal(texts.values, weight[words.flatten()[order], torch.arange(3)[:, None]])

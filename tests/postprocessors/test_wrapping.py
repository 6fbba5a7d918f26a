"""Post-processors on parts, against NumPy's indexing."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors import Ablate, Add, At, Heads, OnInput, Replace, Scale
from tests.harness import recorder
from tests.oracle import same_bits

SHAPE = (2, 5, 6)
MASK = np.arange(10).reshape(2, 5) % 3 == 0
INDICES = {
    "int": 1,
    "negative": -1,
    "numpy int": np.int64(1),
    "slice": slice(1, None),
    "strided": (slice(None), slice(0, 5, 2)),
    "int in a tuple": (slice(None), -1),
    "ellipsis": (..., 2),
    "ellipsis alone": ...,
    "new dimension": (0, None, slice(1, 3)),
    "list": [0, 1],
    "lists by pairs": ([0, 1], [4, 2]),
    "list behind a slice": (slice(None), [3, -5]),
    "range": (slice(None), range(3)),
    "list of booleans": [True, False],
    "mask": MASK,
    "mask of the rest": (slice(None), slice(None), np.array([True] * 3 + [False] * 3)),
    "nothing": [],
    "empty slice": slice(2, 2),
}


class Output(NamedTuple):
    hidden: Tensor
    mask: Tensor


def activation(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_numpy(index: Any) -> Any:
    """The index for NumPy, which takes a range and an empty list for something else."""
    items = index if isinstance(index, tuple) else (index,)
    lists = [list(item) if isinstance(item, range) else item for item in items]
    return tuple(
        np.array(item, dtype=int) if isinstance(item, list) and not item else item for item in lists
    )


def as_torch(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(as_torch, index))
    return torch.as_tensor(index) if isinstance(index, np.ndarray) else index


def times_three(x: np.ndarray, index: Any) -> np.ndarray:
    expected = x.copy()
    expected[as_numpy(index)] *= 3
    return expected


indices = pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)


@indices
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_at_acts_on_what_numpy_indexes(index: Any, dtype: torch.dtype) -> None:
    x = activation().mul(8).to(dtype)
    before = x.clone()
    for form in (index, as_torch(index)):
        result = At(form, lambda part: part * 3)(x)
        assert result.dtype == dtype
        assert np.array_equal(result.numpy(), times_three(x.numpy(), index))
        assert torch.equal(x, before), "worked in place"


@indices
def test_at_takes_what_works_in_place(index: Any) -> None:
    x = activation()
    before = x.clone()

    def in_place(part: Tensor) -> None:
        part.mul_(3)

    result = At(as_torch(index), in_place)(x)
    assert np.array_equal(result.numpy(), times_three(before.numpy(), index))
    assert torch.equal(x, before), "worked in place on the network's own tensor"


@indices
def test_gradients_of_at(index: Any) -> None:
    x = activation(torch.float64).requires_grad_()
    weights = activation(torch.float64, seed=1)
    # A square needs its argument in the backward pass.
    (At(as_torch(index), torch.square)(x) * weights).sum().backward()
    numbers = x.detach().numpy()
    slope = np.ones(SHAPE)
    slope[as_numpy(index)] = 2 * numbers[as_numpy(index)]
    np.testing.assert_allclose(x.grad.numpy(), weights.numpy() * slope, rtol=1e-15)


def test_gradients_reach_what_is_put_in() -> None:
    direction = torch.ones(6, requires_grad=True)
    At((slice(None), [0, 2]), Add(direction, 2.0))(activation()).sum().backward()
    assert torch.equal(direction.grad, torch.full((6,), 2.0 * 2 * 2))


def heads_by_hand(x: Tensor, num_heads: int, heads: list[int], factor: float) -> Tensor:
    size = x.shape[-1] // num_heads
    columns = [factor if column // size in heads else 1.0 for column in range(x.shape[-1])]
    return x * torch.tensor(columns, dtype=x.dtype)


@pytest.mark.parametrize("heads", [[0], [2], [0, 2], [2, 0], range(1, 3), torch.tensor([0, 1]), 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_heads(heads: Any, dtype: torch.dtype) -> None:
    chosen = [heads] if isinstance(heads, int) else [int(head) for head in heads]
    x = activation(dtype).requires_grad_()
    result = Heads(3, heads, Scale(4.0))(x)
    assert result.dtype == dtype
    assert torch.equal(result, heads_by_hand(x, 3, chosen, 4.0))
    result.sum().backward()
    assert torch.equal(x.grad, heads_by_hand(torch.ones(SHAPE, dtype=dtype), 3, chosen, 4.0))


def test_heads_count_from_the_end_and_fit_any_memory() -> None:
    x = torch.randn(6, 5, 2).permute(2, 1, 0)
    assert torch.equal(Heads(2, -1, Scale(0.0))(x), heads_by_hand(x, 2, [1], 0.0))
    assert Heads(2, 0, Scale(2.0))(torch.ones(0, 4)).shape == (0, 4)


def test_a_head_is_what_the_post_processor_sees() -> None:
    seen: list[Tensor] = []
    x = activation()
    Heads(3, [2, 0], seen.append)(x)
    assert torch.equal(seen[0], torch.stack([x[..., 4:], x[..., :2]], dim=-2))
    # A direction of the size of a head.
    steered = Heads(3, [2], Add(torch.tensor([1.0, -1.0])))(x)
    assert torch.equal(steered[..., 4:], x[..., 4:] + torch.tensor([1.0, -1.0]))


def test_they_nest() -> None:
    x = activation()
    expected = x.clone()
    expected[0, -1, 2:4] = 7.0
    for nested in (
        At(0, At(-1, Heads(3, [1], Ablate(value=7)))),
        At((0, -1), Heads(3, 1, Ablate(value=7))),
        Heads(3, 1, At((0, 4), Ablate(value=7))),
    ):
        assert torch.equal(nested(x), expected)


def test_structures_are_mapped_and_the_rest_kept() -> None:
    x, mask = activation(), torch.ones(2, dtype=torch.bool)
    result = At(0, Scale(3.0))(Output(x, mask))
    assert isinstance(result, Output)
    assert result.mask is mask
    assert np.array_equal(result.hidden.numpy(), times_three(x.numpy(), 0))


@pytest.mark.parametrize(
    "make", [lambda: At((slice(None), [0]), Scale(3)), lambda: Heads(3, 1, Ablate())]
)
def test_pickle_copy_and_hash(make: Any) -> None:
    x = activation()
    postprocessor = make()
    for clone in (pickle.loads(pickle.dumps(postprocessor)), copy.deepcopy(postprocessor)):
        assert torch.equal(clone(x), postprocessor(x))
    assert {postprocessor: 1}[postprocessor] == 1


def test_the_index_is_kept_as_it_was() -> None:
    index = torch.tensor([0])
    postprocessor = At(index, Ablate())
    index[0] = 1
    assert torch.equal(postprocessor(torch.ones(2)), torch.tensor([0.0, 1.0]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x * 2)) + 1


@pytest.mark.campaign
@pytest.mark.parametrize("index", ["negative", "strided", "list behind a slice", "new dimension"])
def test_they_compile_and_act_in_a_recorder(index: str) -> None:
    torch.compiler.reset()
    rnet = recorder(Block(), "inner", input_size=SHAPE)
    x, where = activation(), INDICES[index]
    expected = torch.tensor(times_three((x * 2).numpy(), where))
    expected = heads_by_hand(expected, 3, [1], 0.0).relu() + 1
    both = [At(where, Scale(3)), Heads(3, 1, Ablate())]

    def post(activation: Tensor) -> Tensor:
        return both[1](both[0](activation))

    for run in (rnet, torch.compile(rnet, fullgraph=True, backend="aot_eager")):
        assert torch.equal(run(x, activation_postproc=post), expected)
        assert torch.equal(rnet.activations["inner"], x * 2)


def test_a_head_is_replaced_by_the_part_of_a_record_that_the_error_names() -> None:
    x, record = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    for whole in (record, record[..., 2:4]):
        with pytest.raises(PostprocessorError) as caught:
            Heads(3, [1], Replace(whole))(x)
        text = "activation.unflatten(-1, (num_heads, -1))[..., heads, :]"
        assert text in str(caught.value)
        part = eval(text, {"activation": record, "num_heads": 3, "heads": [1]})
    expected = x.clone()
    expected[..., 2:4] = record[..., 2:4]
    assert same_bits(Heads(3, [1], Replace(part))(x), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ablate,
        lambda: [Ablate],
        lambda: {"0": Ablate},
        lambda: {"0": At(0, Ablate)},
        lambda: Heads(1, 0, Ablate),
        lambda: OnInput(Ablate),
    ],
)
def test_a_class_is_no_post_processor(make: Any) -> None:
    rnet = recorder(nn.Sequential(nn.ReLU()), "0", input_size=(1, 3))
    with pytest.raises(PostprocessorError, match=r"write Ablate\(\)"):
        rnet(torch.ones(1, 3), activation_postproc=make())


def test_a_class_that_makes_an_output_is_a_function_like_any_other() -> None:
    class Negative(Tensor):
        def __new__(cls, activation: Tensor) -> Tensor:
            return -activation  # type: ignore[misc]  # what is returned is all that counts here

    rnet = recorder(nn.Sequential(nn.Tanh()), "0", input_size=(1, 3))
    x = torch.rand(1, 3)
    for posts in (Negative, [Negative], {"0": Negative}, OnInput(Negative)):
        assert same_bits(rnet(x, activation_postproc=posts), -x.tanh())


@pytest.mark.campaign
def test_a_direction_fits_activations_of_varying_length_under_compile() -> None:
    torch.compiler.reset()
    rnet = recorder(Block(), "inner", input_size=SHAPE)
    run = torch.compile(rnet, fullgraph=True, backend="aot_eager")
    for shape in ((2, 5, 6), (2, 7, 8)):
        run(torch.randn(shape), activation_postproc=Scale(1.0))
    # The lengths of activations are taken to vary by now, that of a direction is not.
    x = torch.randn(2, 3, 4)
    result = run(x, activation_postproc=Add(torch.ones(4)))
    assert torch.equal(result, (x * 2 + 1).relu() + 1)

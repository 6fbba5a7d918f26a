"""Knocked-out attention against attention whose mask is written by hand."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from scio_recorder.errors import AttentionError, PostprocessorError
from scio_recorder.nets.attention.eager import Eager, Layout
from scio_recorder.nets.attention.kernel import Kernel, MultiHead
from scio_recorder.nets.records import Inputs
from scio_recorder.postprocessors import At, Knockout, OnInput
from tests.harness import recorder
from tests.nets.test_attention import MULTI_HEAD as MULTI_HEAD_CASES
from tests.nets.test_attention import Calls

KERNEL, MULTI_HEAD, SOFTMAX = Kernel(), MultiHead(), Eager()


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def knocked_out(scores: Tensor, knockout: Knockout) -> Tensor:
    """Return scores [batch, heads, queries, keys] changed one by one."""
    result = scores.clone()
    for head in range(scores.shape[1]) if knockout.heads is None else knockout.heads:
        for query in knockout.queries:
            for key in knockout.keys:
                result[:, head, query, key] = -math.inf
    return result


def as_numbers(mask: Tensor | None, is_causal: bool, like: Tensor) -> Tensor:
    """Return what masks of scaled_dot_product_attention add to scores of some shape."""
    bias = torch.zeros_like(like)
    if mask is not None and mask.dtype is torch.bool:
        bias = bias.masked_fill(~mask, -math.inf)
    elif mask is not None:
        bias = bias + mask
    return bias.masked_fill(torch.ones_like(like).triu(1).bool(), -math.inf) if is_causal else bias


def changed(knockout: Knockout, kind: Any, inputs: Inputs, layout: Any = None) -> Inputs:
    """Return the inputs with which a kind of attention is knocked out."""
    result = kind.changed(layout, inputs, knockout.take_out)
    assert isinstance(result, Inputs)
    return result


def run(knockout: Knockout, *args: Any, **kwargs: Any) -> Tensor:
    inputs = changed(knockout, KERNEL, Inputs(args, kwargs))
    return functional.scaled_dot_product_attention(*inputs.args, **inputs.kwargs)


positions = st.lists(st.integers(-4, 3), min_size=1, max_size=3)
masks = {
    "none": None,
    "boolean": torch.ones(2, 1, 4, 6).bool(),
    "of keys": torch.arange(6).reshape(1, 6) < 5,
    "numbers": torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6),
    "of heads": torch.linspace(-2, 2, 4 * 24, dtype=torch.float64).reshape(4, 4, 6),
}


@given(
    positions,
    positions,
    st.none() | positions,
    st.sampled_from(list(masks)),
    st.sampled_from([1, 2]),
)
@settings(max_examples=60)
def test_the_kernel_gives_what_it_gives_by_hand(
    queries: list[int], keys: list[int], heads: list[int] | None, kind: str, group: int
) -> None:
    torch.manual_seed(len(queries))
    knockout = Knockout(queries, keys, heads)
    query = torch.randn(2, 4, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 4 // group, 6, 8, dtype=torch.float64)
    every_key, every_value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = query @ every_key.mT * 0.3
    biased = scores + as_numbers(masks[kind], False, scores)
    expected = knocked_out(biased, knockout).softmax(-1) @ every_value
    output = run(knockout, query, key, value, masks[kind], scale=0.3, enable_gqa=group > 1)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("num_keys", [3, 4, 6])
def test_is_causal_becomes_a_mask(num_keys: int, kernel: SDPBackend) -> None:
    query = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 3, num_keys, 8, dtype=torch.float64)
    scores = query @ key.mT / math.sqrt(8)
    biased = scores + as_numbers(None, True, scores)
    knockout = Knockout([-1, 2], [1], heads=[0, -1])
    with sdpa_kernel(kernel):
        output = run(knockout, query, key, value, is_causal=True)
    torch.testing.assert_close(output, knocked_out(biased, knockout).softmax(-1) @ value)


def test_the_shape_of_the_mask() -> None:
    query, key, value = drawn(2, 3, 4, 8)
    before = Inputs((query, key, value), {"attn_mask": torch.zeros(1, 4, dtype=torch.float64)})
    every = changed(Knockout([0], [1]), KERNEL, before)
    assert every.args[:3] == (query, key, value)
    assert every.args[3].shape == (4, 4)
    assert changed(Knockout([0], [1], [2]), KERNEL, before).args[3].shape == (2, 3, 4, 4)
    assert not before.kwargs["attn_mask"].any(), "changed in place"


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8), (2, 3, 2, 4, 8)])
def test_queries_of_other_dimensions(shape: tuple[int, ...]) -> None:
    query, key, value = drawn(*shape)
    scores = query @ key.mT / math.sqrt(8)
    scores[..., 1, 2] = -math.inf
    expected = scores.softmax(-1) @ value
    torch.testing.assert_close(run(Knockout(1, 2), query, key, value), expected)
    if len(shape) < 4:
        with pytest.raises(PostprocessorError, match="no dimension of heads"):
            run(Knockout(1, 2, heads=0), query, key, value)
    else:
        torch.testing.assert_close(run(Knockout(1, 2, [0, 1]), query, key, value), expected)


# Those that give the module one sequence, with samples first.
CASES = [name for name, (options, _) in MULTI_HEAD_CASES.items() if not options]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("heads", [None, [1]])
@pytest.mark.parametrize("name", CASES)
def test_multi_head_attention(name: str, heads: list[int] | None, need_weights: bool) -> None:
    _, options = MULTI_HEAD_CASES[name]
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(3, 6, 8)
    knockout = Knockout(queries=[2, -1], keys=[0, 1], heads=heads)
    with Calls() as mode:
        module(x, x, x, **options, need_weights=need_weights, average_attn_weights=False)
    _, inputs, _ = mode.last(MULTI_HEAD.function)
    other = changed(knockout, MULTI_HEAD, inputs)
    output, weights = functional.multi_head_attention_forward(*other.args, **other.kwargs)
    # By hand: all masks as one of numbers.
    bias = torch.zeros(3, 2, 6, 6)
    for what, mask in options.items():
        if isinstance(mask, Tensor):
            shaped = mask[:, None, None] if what == "key_padding_mask" else mask
            shaped = shaped.reshape(3, 2, 6, 6) if len(shaped) == 6 and mask.dim() == 3 else shaped
            is_boolean = mask.dtype is torch.bool
            bias = bias.masked_fill(shaped, -math.inf) if is_boolean else bias + shaped
    by_hand = knocked_out(bias, knockout).flatten(0, 1)
    expected, expected_weights = module(x, x, x, attn_mask=by_hand, average_attn_weights=False)
    torch.testing.assert_close(output.transpose(0, 1), expected)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights)
    mask = other.kwargs.get("attn_mask", other.args[16])
    assert mask.shape == ((6, 6) if heads is None and mask.dim() == 2 else (6, 6, 6))


def test_a_sample_without_a_batch() -> None:
    module = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(6, 8)
    with Calls() as mode:
        module(x, x, x)
    other = changed(Knockout(1, 0, heads=1), MULTI_HEAD, mode.last(MULTI_HEAD.function)[1])
    output, _ = functional.multi_head_attention_forward(*other.args, **other.kwargs)
    by_hand = torch.zeros(2, 6, 6)
    by_hand[1, 1, 0] = -math.inf
    torch.testing.assert_close(output, module(x, x, x, attn_mask=by_hand)[0])


@pytest.mark.parametrize("by_name", [False, True])
def test_scores_of_a_softmax(by_name: bool) -> None:
    scores = torch.randn(2, 3, 4, 5, requires_grad=True)
    before = scores.detach().clone()
    inputs = Inputs((), {"input": scores, "dim": 3}) if by_name else Inputs((scores, -1), {})
    knockout = Knockout(queries=[0, -1], keys=[1, 4], heads=[-1])
    other = changed(knockout, SOFTMAX, inputs, Layout())
    weights = functional.softmax(*other.args, **other.kwargs)
    assert torch.equal(weights, knocked_out(before, knockout).softmax(-1))
    assert torch.equal(scores, before), "changed in place"
    weights.square().sum().backward()
    by_hand = before.clone().requires_grad_()
    knocked_out(by_hand, knockout).softmax(-1).square().sum().backward()
    torch.testing.assert_close(scores.grad, by_hand.grad)


def test_scores_without_heads() -> None:
    scores = torch.randn(6, 4, 5)
    other = changed(Knockout(0, 1), SOFTMAX, Inputs((scores,), {"dim": -1}), Layout())
    expected = scores.clone()
    expected[:, 0, 1] = -math.inf
    assert torch.equal(other.args[0], expected)
    with pytest.raises(PostprocessorError, match="no dimension of heads"):
        changed(Knockout(0, 1, 0), SOFTMAX, Inputs((scores,), {"dim": -1}), Layout())


@pytest.mark.parametrize("dim", [1, -2, None])
def test_a_softmax_over_something_else(dim: int | None) -> None:
    inputs = Inputs((torch.ones(2, 3, 4, 5), dim), {})
    with pytest.raises(AttentionError, match="last dimension of scores"):
        changed(Knockout(0, 1), SOFTMAX, inputs, Layout())


def masked(kind: str, dtype: torch.dtype, left_out: Sequence[int]) -> Tensor:
    """Return a mask of four queries and keys that leaves keys out for query 1."""
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1, list(left_out)] = False
    if kind == "boolean":
        return mask
    number = {"infinite": -math.inf, "large": -1e4}.get(kind, torch.finfo(dtype).min)
    return torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["boolean", "infinite", "lowest", "large", "scores"])
def test_a_query_that_is_left_without_a_key(kind: str, dtype: torch.dtype) -> None:
    query, key, value = drawn(2, 3, 4, 8, dtype=dtype)
    mask = masked(kind, dtype, [0, 2, 3])

    def act(knockout: Knockout) -> None:
        if kind == "scores":
            # In float16, such scores are not lost beside the lowest number.
            scores = 50 * query @ key.mT + mask
            changed(knockout, SOFTMAX, Inputs((scores, -1), {}), Layout())
        else:
            run(knockout, query, key, value, mask)

    act(Knockout(queries=[1], keys=[0, 2, 3]))
    with pytest.raises(PostprocessorError, match=r"leaves query 1 without a key"):
        act(Knockout(queries=[-3], keys=[1]))
    with pytest.raises(PostprocessorError, match=r"leaves query 1 of head 2 without a key"):
        act(Knockout(queries=[1], keys=[1], heads=[2]))


@pytest.mark.parametrize("kind", ["boolean", "infinite", "lowest"])
def test_a_query_that_had_no_key_before(kind: str) -> None:
    query, key, value = drawn(2, 3, 4, 8)
    mask = masked(kind, torch.float64, range(4))
    plain = functional.scaled_dot_product_attention(query, key, value, mask)
    output = run(Knockout(queries=[0, 1], keys=range(3)), query, key, value, mask)
    torch.testing.assert_close(output[:, :, 1], plain[:, :, 1])
    torch.testing.assert_close(output[:, :, 0], value[:, :, 3])


def test_positions_that_are_not_there() -> None:
    query, key, value = drawn(2, 3, 4, 8)
    for knockout, message in (
        (Knockout([0, 4], 1), r"queries \[4\].*has 4 queries"),
        (Knockout(0, [1, -5]), r"keys \[-5\].*has 4 keys"),
        (Knockout(0, 1, [3]), r"heads \[3\].*has 3 heads"),
    ):
        with pytest.raises(PostprocessorError, match=message):
            run(knockout, query, key, value)
    nested = torch.nested.nested_tensor([torch.ones(2, 8)] * 2, layout=torch.jagged)
    with pytest.raises(AttentionError, match="nested"):
        run(Knockout(0, 1), nested, nested, nested)


@pytest.mark.parametrize("positions", [0.5, "all", [], [True, False], None])
def test_arguments_that_are_no_positions(positions: Any) -> None:
    with pytest.raises(PostprocessorError, match="queries"):
        Knockout(positions, 0)
    if positions is not None:
        with pytest.raises(PostprocessorError, match="heads"):
            Knockout(0, 0, positions)


def test_where_it_belongs() -> None:
    knockout = Knockout(torch.tensor([0]), range(2), 1)
    assert repr(knockout) == "Knockout(queries=(0,), keys=(0, 1), heads=(1,))"
    assert pickle.loads(pickle.dumps(knockout)) == knockout
    rnet = recorder(nn.Sequential(nn.ReLU()), "0", input_size=(1, 2))
    for given_as in (At(0, knockout), OnInput(knockout), lambda x: knockout(x)):
        with pytest.raises(PostprocessorError, match="must be the outermost"):
            rnet(torch.ones(1, 2), activation_postproc={"0": given_as})

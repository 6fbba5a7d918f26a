"""Weights of attention against attention by hand, PyTorch's own weights, and transformers' code."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from scio_recorder.errors import ArgumentError, AttentionError
from scio_recorder.nets.attention import Attention, AttentionReader
from scio_recorder.nets.attention.eager import Eager, Layout
from scio_recorder.nets.records import Inputs

KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Calls(TorchFunctionMode):
    """Keeps every call of a torch function: its name, what it received and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Inputs, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        self.calls.append((name, Inputs(args, kwargs or {}), output))
        return output

    def last(self, *names: str) -> tuple[str, Inputs, Any]:
        return [call for call in self.calls if call[0] in names][-1]


def attention_of(*operations: tuple[str, Inputs, Any]) -> Attention:
    """Return the attention that operations complete."""
    reader = AttentionReader()
    read = [reader.read(*operation) for operation in operations]
    [attention] = [attention for attention in read if attention is not None]
    return attention


def of(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Attention:
    with Calls() as mode:
        functional.scaled_dot_product_attention(query, key, value, **options)
    return attention_of(mode.last("scaled_dot_product_attention"))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(3)]


def by_hand(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Weights [batch, heads, queries, keys], one after another in float64."""
    batch, heads, queries, size = query.shape
    keys, shared = key.shape[-2], key.shape[1]
    weights = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    whole = None if mask is None else mask.broadcast_to(weights.shape)
    for b, h, i in np.ndindex(batch, heads, queries):
        row = key[b, h // (heads // shared)].double() @ query[b, h, i].double()
        row = row * (1 / math.sqrt(size) if scale is None else scale)
        for j in range(keys):
            if is_causal and j > i:
                row[j] = -math.inf
            if whole is not None and whole.dtype is torch.bool:
                row[j] = row[j] if whole[b, h, i, j] else -math.inf
            elif whole is not None:
                row[j] += whole[b, h, i, j].double()
        exponents = (row - row.max()).exp() if row.max() > -math.inf else row.exp()
        weights[b, h, i] = exponents / (exponents.sum() or 1.0)
    return weights


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, i, j: None,
    "boolean": lambda b, h, i, j: torch.rand(b, 1, i, j) > 0.3,
    "of keys": lambda b, h, i, j: torch.rand(b, 1, 1, j) > 0.3,
    "of heads": lambda b, h, i, j: torch.randn(h, i, j, dtype=torch.float64),
    "numbers": lambda b, h, i, j: torch.randn(i, j, dtype=torch.float64),
    "infinities": lambda b, h, i, j: torch.where(torch.rand(b, h, i, j) > 0.3, 0.0, -math.inf),
    "of queries": lambda b, h, i, j: torch.rand(i, 1) > 0.3,
}


@given(
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 5)] * 2),
    st.integers(1, 2),
    st.sampled_from(list(MASKS)),
    st.booleans(),
    st.sampled_from([None, 0.3]),
)
@settings(max_examples=60)
def test_weights_are_those_by_hand(
    sizes: tuple[int, int, int, int], group: int, kind: str, is_causal: bool, scale: float | None
) -> None:
    torch.manual_seed(sum(sizes))
    batch, shared, queries, keys = sizes
    heads = shared * group
    query = torch.randn(batch, heads, queries, 4, dtype=torch.float64)
    key, value = torch.randn(2, batch, shared, keys, 4, dtype=torch.float64)
    mask = MASKS[kind](batch, heads, queries, keys)
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    # Not every kernel takes both.
    is_causal = is_causal and mask is None
    options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": group > 1}
    attention = of(query, key, value, **options)
    expected = by_hand(query, key, mask, is_causal, scale)
    torch.testing.assert_close(attention.weights(), expected, rtol=1e-12, atol=1e-13)
    assert attention.error < 1e-13
    some = attention.weights(heads=[-1, 0], queries=[queries - 1])
    torch.testing.assert_close(some, expected[:, [-1, 0]][:, :, [-1]], rtol=1e-12, atol=1e-13)


def test_a_mask_and_is_causal_together() -> None:
    query, key, value = drawn(2, 2, 5, 8, dtype=torch.float64)
    mask = torch.rand(5, 5) > 0.2
    mask[:, 0] = True
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attention = of(query, key, value, attn_mask=mask, is_causal=True)
    except RuntimeError:
        pytest.skip("this PyTorch refuses both")
    torch.testing.assert_close(attention.weights(), by_hand(query, key, mask, True, None))


def test_a_number_drops_its_dimension() -> None:
    attention = of(*drawn(2, 3, 5, 8))
    whole = attention.weights()
    assert torch.equal(attention.weights(heads=1), whole[:, 1])
    assert torch.equal(attention.weights(queries=-1), whole[:, :, -1])
    torch.testing.assert_close(attention.weights(1, 2), whole[:, 1, 2])
    torch.testing.assert_close(attention.weights([1], range(2, 4)), whole[:, [1], 2:4])
    torch.testing.assert_close(attention.weights(slice(1), (0, 4)), whole[:, :1, [0, 4]])
    assert attention.weights([], []).shape == (2, 0, 0, 5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["boolean", "infinite", "lowest"])
def test_rows_masked_whole(kernel: SDPBackend, dtype: torch.dtype, kind: str) -> None:
    query, key, value = drawn(1, 2, 4, 8, dtype=dtype)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    if kind != "boolean":
        number = torch.finfo(dtype).min if kind == "lowest" else -math.inf
        mask = torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, number)
    with sdpa_kernel(kernel):
        row = of(query, key, value, attn_mask=mask).weights(queries=2)
    # Minus infinity leaves nothing; added to the lowest number, scores are lost (but in float16).
    if kind != "lowest":
        assert not row.any()
    elif dtype is not torch.float16:
        torch.testing.assert_close(row, torch.full_like(row, 0.25))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["causal", "grouped", "masked", "without heads"])
def test_entropies_are_those_of_weights_by_hand(kind: str, dropout: float) -> None:
    has_mask, has_heads = kind in ("masked", "without heads"), kind != "without heads"
    query, key, value = drawn(2, 4 if has_heads else 1, 6, 8)
    if kind == "grouped":
        key, value = key[:, :2], value[:, :2]
    mask = torch.randn(2, 1, 6, 6) if has_mask else None
    if mask is not None:
        mask[:, :, 3] = -math.inf
    weights = by_hand(query, key, mask, kind == "causal", None)
    expected = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    parts = [
        part if has_heads or part is None else part[:, 0] for part in (query, key, value, mask)
    ]
    options = {"is_causal": kind == "causal", "enable_gqa": kind == "grouped"}
    entropy = of(*parts[:3], attn_mask=parts[3], dropout_p=dropout, **options).entropy()
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-5)  # of float32


def test_entropies_of_more_queries_than_are_looked_at_together() -> None:
    query, key, value = drawn(1, 2, 300, 8)
    entropy = of(query, key, value, dropout_p=0.1).entropy()
    probabilities = (query @ key.mT / math.sqrt(8)).softmax(-1)
    expected = torch.distributions.Categorical(probabilities).entropy()
    torch.testing.assert_close(entropy, expected)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 4, 5, 8)])
@pytest.mark.parametrize("has_mask", [False, True])
def test_queries_of_other_dimensions(shape: tuple[int, ...], has_mask: bool) -> None:
    query, key, value = drawn(*shape, dtype=torch.float64)
    mask = torch.rand(*shape[:-1], shape[-2]) > 0.3 if has_mask else None
    attention = of(query, key, value, attn_mask=mask)
    scores = query @ key.mT / math.sqrt(8)
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    expected = scores.softmax(-1).nan_to_num(0.0)
    # Less than three dimensions of batch and heads: one head.
    shown = (*[1] * (3 - len(shape)), *shape[:-2], 1)[:2] if len(shape) < 4 else shape[:-2]
    expected = expected.reshape(*shown, *expected.shape[-2:])
    torch.testing.assert_close(attention.weights(), expected)
    torch.testing.assert_close(attention.weights(0, 1), expected.select(-3, 0).select(-2, 1))
    assert attention.query is not None
    assert attention.query.shape == (*shown, *shape[-2:])


def test_what_was_received_is_shown() -> None:
    query, key, value = drawn(2, 3, 5, 8)
    attention = of(query, key, value)
    assert attention.query is query
    assert attention.key is key
    assert attention.value is value
    expected = functional.scaled_dot_product_attention(query, key, value)
    assert torch.equal(attention.output, expected)
    assert repr(attention) == (
        "Attention(query [2, 3, 5, 8], key [2, 3, 5, 8], value [2, 3, 5, 8] of float32)"
    )


def cut_lower(size: int) -> Tensor:
    return torch.ones(size, size).triu(1).bool()


PADDING = torch.arange(6) >= torch.tensor([[6], [4], [3]])
# Options of the module and of its call; three samples of six tokens and eight features.
MULTI_HEAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "sequence first": ({"batch_first": False}, {}),
    "others' sizes": ({"kdim": 5, "vdim": 7}, {}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "mask": ({}, {"attn_mask": cut_lower(6)}),
    "masks of heads": ({}, {"attn_mask": torch.linspace(-3, 3, 6 * 36).reshape(6, 6, 6)}),
    "both masks": ({}, {"key_padding_mask": PADDING, "attn_mask": cut_lower(6)}),
    "numbers and padding": (
        {},
        {
            "key_padding_mask": torch.zeros(3, 6).masked_fill(PADDING, -1.5),
            "attn_mask": torch.linspace(-3, 3, 36).reshape(6, 6),
        },
    ),
    "causal": ({}, {"attn_mask": cut_lower(6), "is_causal": True}),
}


def multi_head(
    options: dict[str, Any], masks: dict[str, Any], need_weights: bool = True, single: bool = False
) -> tuple[Attention, Tensor]:
    """Return the attention of a call, and the weights that PyTorch returns."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **({"batch_first": True} | options)).eval()
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    query = torch.randn(3, 6, 8)
    key = torch.randn(3, 6, 5) if "kdim" in options else query
    value = torch.randn(3, 6, 7) if "vdim" in options else query
    inputs = [query, key, value]
    if single:
        inputs = [sequence[0] for sequence in inputs]
    elif not options.get("batch_first", True):
        inputs = [sequence.transpose(0, 1) for sequence in inputs]
    _, weights = module(*inputs, **masks, average_attn_weights=False)
    with Calls() as mode:
        module(*inputs, **masks, need_weights=need_weights)
    return attention_of(mode.last("multi_head_attention_forward")), weights.detach()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", MULTI_HEAD)
def test_weights_are_those_that_pytorch_returns(name: str, need_weights: bool) -> None:
    attention, expected = multi_head(*MULTI_HEAD[name], need_weights=need_weights)
    torch.testing.assert_close(attention.weights(), expected, rtol=1e-5, atol=1e-6)
    some = attention.weights(heads=[1], queries=[2, -1])
    torch.testing.assert_close(some, expected[:, [1]][:, :, [2, -1]], rtol=1e-5, atol=1e-6)
    assert attention.error < 1e-6
    assert attention.query is not None
    assert attention.query.shape == (3, 2, 6, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_rounded_as_pytorch_rounds_them(dtype: torch.dtype) -> None:
    """Those of float32 by autocast."""
    module = nn.MultiheadAttention(32, 4, batch_first=True, dtype=dtype).eval()
    x = torch.randn(2, 9, 32, dtype=dtype) * 5
    with torch.autocast("cpu", enabled=dtype is torch.float32), Calls() as mode:
        _, expected = module(x, x, x, average_attn_weights=False)
    weights = attention_of(mode.last("multi_head_attention_forward")).weights()
    # But for a few, which lie in the middle between two numbers.
    assert (weights == expected).double().mean() > 0.9


def test_a_sample_without_a_batch() -> None:
    attention, expected = multi_head({}, {"attn_mask": cut_lower(6)}, single=True)
    torch.testing.assert_close(attention.weights()[0], expected, rtol=1e-5, atol=1e-6)


def test_the_mask_that_pytorch_leaves_out() -> None:
    # Without weights, is_causal counts and the mask is not looked at.
    masks = {"attn_mask": torch.zeros(6, 6), "is_causal": True}
    attention, _ = multi_head({}, masks, need_weights=False)
    _, expected = multi_head({}, {"attn_mask": cut_lower(6)})
    torch.testing.assert_close(attention.weights(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
def test_padding_of_a_whole_sample(need_weights: bool) -> None:
    padding = torch.tensor([[False] * 6, [True] * 6, [False] * 6])
    attention, weights = multi_head({}, {"key_padding_mask": padding}, need_weights)
    # Asked for weights, PyTorch computes NaN; fused kernels give zeros.
    expected = weights if need_weights else weights.nan_to_num(0.0)
    torch.testing.assert_close(attention.weights(), expected, equal_nan=True)


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_autocast() -> None:
    query, key, value = drawn(2, 4, 6, 8)
    mask = torch.zeros(6, 6)
    mask[:, 4:] = torch.finfo(torch.float32).min
    # In bfloat16 the lowest number of float32 is minus infinity.
    mask[3] = torch.finfo(torch.float32).min
    with torch.autocast("cpu"):
        attention = of(query * 8, key, value, attn_mask=mask)
    assert attention.query is not None
    assert attention.query.dtype == torch.float32
    assert attention.output.dtype == torch.bfloat16
    weights = attention.weights()
    expected = by_hand((query * 8).bfloat16(), key.bfloat16(), mask.bfloat16(), False, None)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-4, atol=1e-5)
    assert not weights[:, :, 3].any()


def test_modes_of_the_reader_change_nothing() -> None:
    attention, expected = of(*drawn(1, 2, 64, 32)), None
    for mode in (contextlib.nullcontext(), torch.autocast("cpu"), torch.inference_mode()):
        with mode:
            weights = attention.weights()
        assert not weights.is_inference()
        expected = weights if expected is None else expected
        assert torch.equal(weights, expected)


def test_products_that_are_not_exact() -> None:
    query, key, value = drawn(1, 2, 64, 32)
    with float32_precision("medium"):
        weights = of(query, key, value).weights()
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, by_hand(query, key, None, False, None))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [0.1, 1, 256])
def test_kernels_round_within_the_bound(
    kernel: SDPBackend, dtype: torch.dtype, gain: float
) -> None:
    query, key, value = drawn(1, 2, 64, 64)
    keys = [torch.cat([part] * 16, -2) + torch.randn(1024, 64) for part in (key, value)]
    with sdpa_kernel(kernel):
        attention = of(*(part.to(dtype) for part in (query * gain, *keys)))
    for at in (None, [0], [-1]):
        attention.weights(queries=at)


FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another scale": lambda parts: {"scale": 1.1 / 8},
    "mask off by one": lambda parts: {
        "is_causal": False,
        "attn_mask": ~torch.ones(128, 128).triu(2).bool(),
    },
    "no mask": lambda parts: {"is_causal": False},
    "heads swapped": lambda parts: {"key": parts["key"][:, [1, 0, 2]]},
    "values shifted": lambda parts: {"value": parts["value"].roll(1, -2)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_weights_that_do_not_explain_the_output(name: str, dtype: torch.dtype) -> None:
    names = ("query", "key", "value")
    arguments: dict[str, Any] = dict(zip(names, drawn(1, 3, 128, 64, dtype=dtype), strict=True))
    arguments["is_causal"] = True
    output = functional.scaled_dot_product_attention(**arguments)
    kind = "scaled_dot_product_attention"
    right = attention_of((kind, Inputs((), arguments), output))
    wrong = attention_of((kind, Inputs((), arguments | FAULTS[name](arguments)), output))
    assert right.weights().shape == (1, 3, 128, 128)
    assert wrong.error > max(0.05, 10 * right.error)
    with pytest.raises(AttentionError, match="don't explain"):
        wrong.weights()


def test_an_output_of_the_projection_that_is_another() -> None:
    attention, _ = multi_head({}, {})
    attention.output = attention.output * 1.01
    assert attention.error == pytest.approx(0.0099, rel=0.01)
    with pytest.raises(AttentionError, match="float32 explains"):
        attention.weights(0, 0)


def test_the_error_is_that_of_the_worst_query() -> None:
    query, key, value = drawn(1, 1, 600, 4, dtype=torch.float64)
    output = functional.scaled_dot_product_attention(query, key, value)
    output[0, 0, 400, 1] += 2.0
    inputs = Inputs((query, key, value), {})
    attention = attention_of(("scaled_dot_product_attention", inputs, output))
    assert attention.error == pytest.approx(2.0 / output.abs().max().item())
    attention.weights(queries=[399, 401])


def test_numbers_that_are_none() -> None:
    query, key, value = drawn(2, 2, 4, 8)
    query[0, 0, 1] = math.nan
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention = of(query, key, value)
    # This kernel returns zeros there, which the weights do not explain.
    attention.weights(queries=[0, 2, 3])
    with pytest.raises(AttentionError, match="returned NaN"):
        attention.weights(queries=1)
    with sdpa_kernel(SDPBackend.MATH):
        attention = of(query, key, value)
    assert attention.weights()[0, 0, 1].isnan().all()
    assert attention.error < 1e-6
    attention = of(query, key, value)
    attention.output[1, 1, 2] = math.nan
    assert math.isnan(attention.error)
    with pytest.raises(AttentionError):
        attention.weights()


def test_what_cannot_be_read() -> None:
    query, key, value = drawn(2, 2, 4, 8)
    dropped = of(query, key, value, dropout_p=0.5)
    assert repr(dropped).startswith("Attention")
    with pytest.raises(AttentionError, match="call eval"):
        dropped.weights()
    with pytest.raises(AttentionError, match="call eval"):
        _ = dropped.error
    nested = torch.nested.nested_tensor([torch.ones(2, 8)] * 2, layout=torch.jagged)
    kind = "scaled_dot_product_attention"
    with pytest.raises(AttentionError, match="nested"):
        attention_of((kind, Inputs((nested, nested, nested), {}), nested))
    with pytest.raises(AttentionError, match="dimensions"):
        of(query[0], key, value)
    with pytest.raises(ArgumentError, match=r"no head 2 of 2"):
        of(query, key, value).weights(heads=2)
    with pytest.raises(ArgumentError, match=r"no query \[-5\] of 4"):
        of(query, key, value).weights(queries=[-5])
    with pytest.raises(ArgumentError, match="no head 'all'"):
        of(query, key, value).weights("all")  # type: ignore[arg-type]


# Eager code


def eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Attention, Any]:
    """Return the attention of eager code."""
    with Calls() as mode:
        returned = function(*args, **kwargs)
    return attention_of(*mode.calls), returned


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_eager_code_of_transformers(model: str, dtype: torch.dtype, dropout: float) -> None:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    layer = nn.Module().train()
    layer.num_key_value_groups = 2 if model == "llama" else 1
    layer.scale_attn_weights = layer.is_cross_attention = False
    layer.scale_attn_by_inverse_layer_idx, layer.is_causal = False, True
    query, (key, value) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 4, 5, 8)
    if model == "llama":
        key, value = key[:, :2], value[:, :2]
    mask = torch.zeros(1, 1, 5, 5).masked_fill(cut_lower(5), torch.finfo(dtype).min)
    parts = [part.to(dtype) for part in (query, key, value, mask)]
    attention, (output, weights) = eager(
        module.eager_attention_forward, layer, *parts, scaling=0.3, dropout=dropout
    )
    assert attention.query is None
    assert attention.key is None
    assert attention.weights().dtype == torch.float32
    assert torch.equal(attention.weights(), weights.float())
    assert torch.equal(attention.weights(heads=[2], queries=-1), weights[:, [2], -1].float())
    assert torch.equal(attention.output.transpose(1, 2), output)
    assert bool((weights == 0).tril().any()) == (dropout > 0)


def test_eager_code_of_three_dimensions() -> None:
    query, key, value = drawn(6, 5, 8)
    attention, _ = eager(lambda: torch.bmm((query @ key.mT).softmax(-1), value))
    expected = (query @ key.mT).softmax(-1)
    assert torch.equal(attention.weights(), expected[:, None])


# The order of dimensions in each part, and whether weights come first.
EQUATIONS = [
    ("bhqk,bhkd->bhqd", True),
    ("bhkd,bhqk->bhqd", False),
    ("bqhk,bkhd->bqhd", True),
    ("bnij,jbnd->ibnd", True),  # XLNet's
    ("...qk,...kd->...qd", True),
    ("b h q k, b k h d -> b q h d", True),
    ("bhqk,bdhk->bhdq", True),
]


@pytest.mark.parametrize(("equation", "is_first"), EQUATIONS)
def test_products_in_any_order_of_dimensions(equation: str, is_first: bool) -> None:
    sizes = dict(zip("bnhqijkd", [2, 3, 3, 5, 5, 4, 6, 8], strict=True))
    sizes["k"] = 6
    terms = equation.replace("...", "bh").replace(" ", "").partition("->")[0].split(",")
    first, second = (torch.randn([sizes[name] for name in term]).double() for term in terms)
    scores, value = (first, second) if is_first else (second, first)

    def run() -> Tensor:
        weights = scores.softmax(-1)
        return torch.einsum(equation, *((weights, value) if is_first else (value, weights)))

    attention, _ = eager(run)
    expected = scores.exp() / scores.exp().sum(-1, keepdim=True)
    expected = expected.transpose(1, 2) if "bqhk" in equation else expected
    torch.testing.assert_close(attention.weights(), expected)
    torch.testing.assert_close(attention.weights(heads=[2]), expected[:, [2]])
    assert attention.error < 1e-14


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda weights: functional.dropout(weights, 0.5),
    "a cast and back": lambda weights: weights.to(torch.float32).double(),
    "a mask": lambda weights: torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5]).double() * weights,
    "a mask in place": lambda weights: weights.mul_(torch.rand(3, 5, 5) > 0.5),
    "a mask of heads": lambda weights: weights * torch.rand(3, 1, 1),
    "filled": lambda weights: weights.masked_fill(torch.rand(5, 5) > 0.5, 0.0),
    "folded and back": lambda weights: weights.flatten(0, 1).unflatten(0, (2, 3)),
    "its first keys": lambda weights: weights[..., :4].contiguous(),
    "numbers for NaN": lambda weights: weights.clone().nan_to_num(0.0),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_becomes_of_weights_on_their_way(name: str) -> None:
    query, key, value = drawn(2, 3, 5, 8, dtype=torch.float64)
    multiplied: list[Tensor] = []

    def run() -> Tensor:
        multiplied.append(KEPT[name]((query @ key.mT).softmax(-1)))
        return multiplied[0] @ value[:, :, : multiplied[0].shape[-1]]

    attention, output = eager(run)
    assert torch.equal(attention.weights(), multiplied[0])
    by_hand = (multiplied[0][..., None] * value[:, :, None, : multiplied[0].shape[-1]]).sum(-2)
    torch.testing.assert_close(output, by_hand)


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "values first": lambda scores, value: value.mT @ scores.softmax(-1).mT,
    "some heads": lambda scores, value: scores.softmax(-1)[:, :1] @ value,
    "later keys": lambda scores, value: scores.softmax(-1)[..., 1:] @ value[:, :, 1:],
    "chosen keys": lambda scores, value: scores.softmax(-1)[..., [1, 0]] @ value[:, :, :2],
    "transposed heads": lambda scores, value: (
        scores.softmax(-1).transpose(0, 1) @ value[:1].transpose(0, 1)
    ),
    "two softmaxes": lambda scores, value: (
        (scores.softmax(-1) - 0.5 * scores.sin().softmax(-1)) @ value
    ),
    "a product of softmaxes": lambda scores, value: (
        (scores.softmax(-1) * scores.sin().softmax(-1)) @ value
    ),
    "overwritten": lambda scores, value: scores.softmax(-1).add_(0.1) @ value,
    "linear attention of other keys": lambda scores, value: (
        scores.softmax(-1) @ (scores.exp().mT @ value)
    ),
    "divided": lambda scores, value: (1 / scores.softmax(-1)) @ value,
    "over queries": lambda scores, value: scores.softmax(-2) @ value,
    "over heads": lambda scores, value: scores.softmax(1) @ value,
    "over samples": lambda scores, value: scores.softmax(0) @ value,
    "linear attention": lambda scores, value: scores.softmax(-1) @ (scores.softmax(-2).mT @ value),
    "of keys alone": lambda scores, value: scores @ (scores.softmax(-2).mT @ value),
    "shared queries": lambda scores, value: torch.einsum(
        "bhqk,bkd->bhqd", scores.softmax(-1), value[:, 0]
    ),
    "scores of a window": lambda scores, value: torch.einsum(
        "bhqk,bhqkd->bhqd", scores.softmax(-1), value[:, :, None].expand(2, 3, 5, 5, 8)
    ),
    "one batch of values for all": lambda scores, value: torch.einsum(
        "...qk,...kd->...qd", scores.softmax(-1), value[0]
    ),
    "padded": lambda scores, value: functional.pad(scores.softmax(-1), (0, 0, 0, 2)) @ value,
}


@pytest.mark.parametrize("name", REFUSED)
def test_products_that_are_no_attention(name: str) -> None:
    query, key, value = drawn(2, 3, 5, 8)
    with pytest.raises(
        AttentionError, match=r"multiplied|no product of weights|come out of|lacks dim"
    ):
        eager(REFUSED[name], query @ key.mT, value)


def test_weights_that_were_overwritten() -> None:
    query, key, value = drawn(2, 3, 5, 8)
    weights = (query @ key.mT).softmax(-1)
    output = weights @ value
    weights[0, 0, 0, 0] += 0.5
    attention = Eager().attention(Layout(), (weights, Inputs((weights, value), {}), output))
    with pytest.raises(AttentionError, match="don't explain"):
        attention.weights()


# Figures


def test_maps_show_the_weights() -> None:
    pytest.importorskip("matplotlib")
    attention = of(*drawn(2, 5, 4, 8), is_causal=True)
    tokens = ["The", " cat\n", "$sat$", "."]
    figure = attention.plot(tokens=tokens, sample=-1)
    *maps, _ = figure.axes
    assert [axis.get_title() for axis in maps] == [f"head {at}" for at in range(5)]
    for head, axis in enumerate(maps):
        (image,) = axis.images
        np.testing.assert_allclose(image.get_array(), attention.weights(head)[1], atol=1e-7)
        assert axis.get_ylim() == (3.5, -0.5), "the first query is at the top"
    shown = [tick.get_text() for tick in maps[0].get_yticklabels()]
    assert shown == ["The", " cat\\n", "$sat$", "."]
    assert not maps[1].get_yticklabels()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_one_map_of_one_head() -> None:
    pytest.importorskip("matplotlib")
    query, key, value = drawn(1, 3, 7, 8)
    attention = of(query[:, :, :2], key, value)
    axis, _ = attention.plot(-1, tokens=list("abcdefg")).axes
    assert axis.get_title() == "head 2"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == list("abcdefg")
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["0", "1"]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 33, 2, 2), (1, 2, 300, 3)])
def test_any_size_can_be_drawn(shape: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    width, height = of(*drawn(*shape)).plot().get_size_inches()
    assert width <= 18
    assert height <= 16


def test_what_cannot_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    attention = of(*drawn(2, 3, 4, 8))
    with pytest.raises(ArgumentError, match="2 tokens for 4 keys"):
        attention.plot(tokens=["a", "b"])
    with pytest.raises(ArgumentError, match="no sample 2 of 2"):
        attention.plot(sample=2)
    with pytest.raises(ArgumentError, match="no head 3 of 3"):
        attention.plot(3)

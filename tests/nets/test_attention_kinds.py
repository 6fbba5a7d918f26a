"""Which attention of a network is recognised, and that what is not can be neither read nor cut."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import handle_torch_function, has_torch_function_unary

from scio_recorder import Recorder
from scio_recorder.errors import (
    AttentionError,
    LabellingError,
    LayerNotFoundError,
    PostprocessorError,
)
from scio_recorder.nets import attention as kinds
from scio_recorder.nets.attention.eager import Eager
from scio_recorder.postprocessors import Knockout
from tests.harness import recorder
from tests.rotation import one_in
from tests.zoo.base import Net

attend = functional.scaled_dot_product_attention


def recorded(function: Callable[..., Tensor], *inputs: Tensor) -> Recorder:
    code = Net(lambda _, *inputs: function(*inputs))
    return recorder(nn.Sequential(code), "0", input_data=inputs, attention=True)


def softmax_by_hand(scores: Tensor) -> Tensor:
    """Return weights, one row after another in float64."""
    weights = torch.zeros_like(scores, dtype=torch.float64)
    for at in np.ndindex(*scores.shape[:-1]):
        row = [math.exp(score) for score in scores[at].double().tolist()]
        weights[at] = torch.tensor(row, dtype=torch.float64) / sum(row)
    return weights


# -- the order of batch and heads ------------------------------------------------------------------


def kernel(query: Tensor) -> Tensor:
    return attend(query, query, query)


def eager(query: Tensor) -> Tensor:
    return (query @ query.mT).softmax(-1) @ query


def windows_of(x: Tensor) -> Tensor:
    """Take samples [batch, 2 * positions, heads, size] apart into two windows each."""
    return x.unflatten(1, (2, -1)).flatten(0, 1).transpose(1, 2)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "[batch, heads]": lambda x: x.transpose(1, 2),
    "[batch x windows, heads]": windows_of,
    "[batch, windows, heads]": lambda x: x.unflatten(1, (2, -1)).transpose(2, 3),
}
OTHER_ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "[heads, batch]": lambda x: x.permute(2, 0, 1, 3),
    "[heads, batch x windows]": lambda x: windows_of(x).transpose(0, 1),
    "[heads, windows, batch]": lambda x: x.unflatten(1, (2, -1)).permute(3, 1, 0, 2, 4),
}


@pytest.mark.parametrize(
    ("code", "num_samples", "num_heads", "name"),
    one_in(5, product([kernel, eager], [1, 2, 4], [1, 2, 4], [*ORDERS, *OTHER_ORDERS])),
)
def test_samples_come_first(
    code: Callable[[Tensor], Tensor], num_samples: int, num_heads: int, name: str
) -> None:
    order = {**ORDERS, **OTHER_ORDERS}[name]
    x = torch.randn(num_samples, 6, num_heads, 4)
    if name in OTHER_ORDERS and not (num_heads == num_samples and "batch x" in name):
        with pytest.raises(LayerNotFoundError, match=r"neither read nor changed.*\*/softmax"):
            recorded(lambda x: code(order(x)), x)
        return
    rnet = recorded(lambda x: code(order(x)), x)
    rnet(x := torch.randn(3, 6, num_heads, 4))
    if name in OTHER_ORDERS:
        # As many heads as samples at labelling; now there are more samples.
        with pytest.raises(AttentionError, match=r"heads at labelling.*\*/softmax"):
            _ = rnet.attention["0"]
        with pytest.raises(PostprocessorError, match="heads at labelling"):
            rnet(x, activation_postproc={"0": Knockout(0, 0)})
        return
    query = order(x)
    scale = 0.5 if code is kernel else 1.0
    expected = softmax_by_hand(query @ query.mT * scale)
    torch.testing.assert_close(rnet.attention["0"].weights().double(), expected)


@pytest.mark.parametrize("num_samples", [2, 3])
def test_inputs_with_heads_second(num_samples: int) -> None:
    x = torch.randn(num_samples, 3, 5, 4)
    with pytest.raises(LayerNotFoundError, match="nothing shows"):
        recorded(lambda x: eager(x.transpose(0, 1)), x)
    rnet = recorded(lambda x: eager(x) + 0, x)
    rnet(x)
    expected = softmax_by_hand(x @ x.mT)
    torch.testing.assert_close(rnet.attention["0"].weights().double(), expected)


def test_a_network_with_positions_first() -> None:
    def run(x: Tensor) -> Tensor:
        return kernel(x.permute(1, 2, 0, 3)) + 0

    x = torch.randn(5, 3, 2, 4)
    rnet = recorded(run, x)
    rnet(x)
    query = x.permute(1, 2, 0, 3)
    expected = softmax_by_hand(query @ query.mT / 2)
    torch.testing.assert_close(rnet.attention["0"].weights().double(), expected)


# -- kinds, by hand --------------------------------------------------------------------------------


def entmax(scores: Tensor, dim: int) -> Tensor:
    """Return the 1.5-entmax of scores, as a function that modes see."""
    if has_torch_function_unary(scores):
        return handle_torch_function(entmax, (scores,), scores, dim)
    ordered = (scores.clamp(min=-1e6) / 2).sort(dim, descending=True).values
    counts = torch.arange(1, scores.shape[dim] + 1, dtype=scores.dtype)
    mean, square = ordered.cumsum(dim) / counts, ordered.square().cumsum(dim) / counts
    threshold = mean - ((1 - counts * (square - mean.square())) / counts).clamp(min=0).sqrt()
    size = (threshold <= ordered).sum(dim, keepdim=True)
    return (scores / 2 - threshold.gather(dim, size - 1)).clamp(min=0).square()


def entmax_by_hand(scores: Tensor) -> Tensor:
    """Return weights by bisecting the threshold of each row in float64."""
    weights = torch.zeros_like(scores, dtype=torch.float64)
    for at in np.ndindex(*scores.shape[:-1]):
        row = scores[at].double() / 2
        low, high = row.max() - 1, row.max()
        for _ in range(80):
            middle = (low + high) / 2
            is_low = (row - middle).clamp(min=0).square().sum() > 1
            low, high = (middle, high) if is_low else (low, middle)
        weights[at] = (row - low).clamp(min=0).square()
    return weights


class Entmax(Eager):
    """Attention by 1.5-entmax in place of a softmax."""

    def __init__(self) -> None:
        super().__init__("entmax")


def by_positions(normalise: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return code whose scores are [batch, queries, heads, keys]."""

    def run(x: Tensor) -> Tensor:
        weights = normalise(torch.einsum("bqhd,bkhd->bqhk", x, x), -1)
        return torch.einsum("bqhk,bkhd->bqhd", weights, x)

    return run


def relative(x: Tensor) -> Tensor:
    """Return what XLNet computes, of samples [batch, positions, heads, size]."""
    x = x.transpose(0, 1)
    weights = functional.softmax(torch.einsum("ibnd,jbnd->bnij", x, x), dim=3)
    return torch.einsum("bnij,jbnd->ibnd", weights, x).transpose(0, 1)


def folded(x: Tensor) -> Tensor:
    """Return the attention whose product is one of matrices, as in DeBERTa."""
    query = x.transpose(1, 2)
    weights = (query @ query.mT).softmax(-1)
    mixed = torch.bmm(weights.view(-1, 5, 5), query.flatten(0, 1))
    return mixed.view(query.shape).transpose(1, 2)


MEMBERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "kernel": (lambda x: kernel(x.transpose(1, 2)).transpose(1, 2), softmax_by_hand),
    "eager": (lambda x: eager(x.transpose(1, 2)).transpose(1, 2), softmax_by_hand),
    "folded": (folded, softmax_by_hand),
    "positions before heads": (by_positions(torch.softmax), softmax_by_hand),
    "XLNet": (relative, softmax_by_hand),
    "entmax": (by_positions(entmax), entmax_by_hand),
}


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("heads", [None, [-1]])
def test_weights_and_knockout_by_hand(
    name: str, heads: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "KINDS", [*kinds.KINDS, Entmax()])
    code, normalise = MEMBERS[name]
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    rnet = recorded(code, x)
    query = x.transpose(1, 2)
    scores = query @ query.mT * (0.5 if name == "kernel" else 1.0)
    for knockout in (None, Knockout(queries=[-1, 1], keys=[0, 2], heads=heads)):
        if knockout is not None:
            at = slice(None) if heads is None else slice(2, 3)
            scores[:, at, [[1], [4]], [[0, 2]]] = -math.inf
        posts = {} if knockout is None else {"activation_postproc": {"0": knockout}}
        output = rnet(x, **posts)
        weights = normalise(scores)
        torch.testing.assert_close(rnet.attention["0"].weights(), weights)
        torch.testing.assert_close(output, (weights @ query).transpose(1, 2))


def test_a_kind_that_nobody_knows_is_no_attention() -> None:
    with pytest.raises(LayerNotFoundError, match="no layer of this network does"):
        recorded(by_positions(entmax), torch.randn(2, 5, 3, 4))


# -- queries for several heads, and masks ----------------------------------------------------------


@pytest.mark.parametrize("mask", [None, torch.zeros(4, 1, 5), torch.ones(2, 1, 1, 5).bool()])
def test_one_query_for_all_heads(mask: Tensor | None) -> None:
    x = torch.randn(2, 4, 5, 8)
    rnet = recorded(lambda x: attend(x[:, :1, :1], x, x, mask), x)
    knockout = Knockout(queries=[0], keys=[2], heads=[1])
    output = rnet(x, activation_postproc={"0": knockout})
    scores = x[:, :1, :1] @ x.mT / math.sqrt(8)
    scores[:, 1, :, 2] = -math.inf
    expected = softmax_by_hand(scores)
    torch.testing.assert_close(rnet.attention["0"].weights().double(), expected)
    torch.testing.assert_close(output.double(), expected @ x.double(), rtol=1e-5, atol=1e-6)


def test_heads_that_only_the_mask_has() -> None:
    x, mask = torch.randn(2, 1, 5, 8), torch.randn(4, 5, 5)
    rnet = recorded(lambda x: eager_with_mask(x, mask), x)
    rnet(x)
    expected = softmax_by_hand(x @ x.mT + mask)
    torch.testing.assert_close(rnet.attention["0"].weights().double(), expected)


def eager_with_mask(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT + mask).softmax(-1) @ x


def test_entropy_of_one_query_for_all_heads_under_dropout() -> None:
    x = torch.randn(2, 4, 5, 8)
    rnet = recorded(lambda x: attend(x[:, :1, :1], x, x, dropout_p=0.5), x)
    rnet(x)
    weights = softmax_by_hand(x[:, :1, :1] @ x.mT / math.sqrt(8))
    expected = -(weights * weights.log()).sum(-1)
    torch.testing.assert_close(rnet.attention["0"].entropy().double(), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("fused", [False, True])
def test_entropy_of_queries_that_are_nan(dropout: float, fused: bool) -> None:
    x = torch.randn(2, 4, 5, 8)
    rnet = recorded(lambda x: attend(x * 1, x.nan_to_num(), x.nan_to_num(), dropout_p=dropout), x)
    x[0, 1, 2, 3] = math.nan
    kernel = SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH
    # With dropout, PyTorch computes step by step, and the entropy calls the kernel again.
    with contextlib.nullcontext() if dropout else sdpa_kernel(kernel):
        rnet(x)
    with sdpa_kernel(kernel):
        attention = rnet.attention["0"]
        if fused:
            # This kernel returns zeros there.
            with pytest.raises(AttentionError, match="NaN"):
                attention.entropy()
        else:
            is_nan = attention.entropy().isnan().any(-1)
            assert is_nan.nonzero().tolist() == [[0, 1]]


def causal_bias(x: Tensor) -> Tensor:
    return attend(x[:, :, :3], x, x, causal_lower_right(3, x.shape[2]))


def written_into(x: Tensor) -> Tensor:
    weights = (x @ x.mT).softmax(-1)
    weights[0].fill_(0.1)
    return weights @ x


def twice(x: Tensor) -> Tensor:
    return eager(x) + eager(x.sin())


@pytest.mark.parametrize("code", [causal_bias, written_into, twice])
def test_what_can_be_neither_read_nor_changed(code: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 5, 5)
    with pytest.raises(LayerNotFoundError, match=r"\*/softmax"):
        recorded(code, x)


def test_keys_that_masks_know_nothing_of_are_refused_at_once() -> None:
    x = torch.randn(2, 5, 8)
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        rnet = Recorder(nn.MultiheadAttention(8, 2, **options), input_data=(x, x, x))
        with pytest.raises(LayerNotFoundError, match="bias_k, add_zero_attn"):
            rnet.record("", attention=True)


def test_a_recorder_that_an_earlier_version_has_pickled() -> None:
    x = torch.randn(2, 3, 5, 4)
    rnet = Recorder(nn.Sequential(nn.ReLU(), nested(kernel)), input_data=x)
    rnet.record("1.inner", "1/matmul", attention="1.inner")
    for row in [*rnet._operations, *rnet.architecture.operations.values()]:  # type: ignore[misc]
        vars(row).pop("attention", None)
    with pytest.warns(UserWarning, match="attention that it recorded is left out"):
        other = copy.deepcopy(rnet)
    output = other(x)
    assert other.recording == rnet.recording
    assert torch.equal(other.activations["1/matmul:1"], output)
    assert not other.attention
    with pytest.raises(LabellingError, match="construct the Recorder again"):
        other.record("1.inner", attention=True)


def nested(inner: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a net that multiplies its weights with what another attention returned meanwhile."""

    def forward(net: Any, x: Tensor) -> Any:
        weights = torch.softmax(x @ x.mT, -1)
        return weights @ net.inner(x)

    return Net(forward, inner=Net(lambda _, x: inner(x)))


@pytest.mark.parametrize("inner", [kernel, eager])
def test_attention_inside_another_is_collected(inner: Callable[[Tensor], Tensor]) -> None:
    net, x = nn.Sequential(nested(inner)), torch.randn(2, 3, 5, 4)
    rnet = recorder(net, "0", "0.inner", input_data=x, attention=True)
    collected: Any = rnet.collect(
        [x, x + 1], transform=lambda attention, batch: attention.weights(), progress=False
    )
    x = torch.cat([x, x + 1])
    outer = softmax_by_hand(x @ x.mT)
    inside = softmax_by_hand(x @ x.mT / 2) if inner is kernel else outer
    torch.testing.assert_close(collected["0"].double(), outer)
    torch.testing.assert_close(collected["0.inner"].double(), inside)

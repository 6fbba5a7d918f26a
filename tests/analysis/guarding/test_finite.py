"""Whether tensors are finite, beside torch's own tests of every element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from scio_recorder.analysis.guarding.finite import Known, NonFinite, examine

NAN, INF = torch.nan, torch.inf

VALUES = {
    "finite": [1.0, -2.0, 0.0],
    "nan": [1.0, NAN, 0.0, NAN],
    "infinities": [INF, 1.0, -INF, 2.0],
    "that sum to nan": [INF, -INF],
    "negative": [0.0, -INF],
    "both": [NAN, 1.0, INF],
    "empty": [],
    "whose sum overflows": [6e4, 6e4],
}
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_counts_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    tensor = torch.tensor(VALUES[name]).to(dtype)
    wide = tensor if dtype.is_complex else tensor.double()
    nan, inf = int(wide.isnan().sum()), int(wide.isinf().sum())
    found = examine(tensor)
    if not nan + inf:
        assert found is None
        return
    assert found is not None
    assert (found.nan, found.inf) == (nan, inf)
    firsts = [int(mask.nonzero()[0]) for mask in (wide.isnan(), wide.isinf()) if mask.any()]
    assert min(found.first_nan, found.first_inf) == min(firsts)


@pytest.mark.parametrize("largest", [3e38, 1.7e308])
def test_a_sum_that_overflows_is_no_infinity(largest: float) -> None:
    dtype = torch.float32 if largest < 1e39 else torch.float64
    assert examine(torch.full((4,), largest, dtype=dtype)) is None


def kinds_of_tensors() -> dict[str, tuple[Any, bool]]:
    bad = torch.tensor([[1.0, NAN], [0.0, 2.0]])
    return {
        "strided": (torch.arange(6.0).view(2, 3).t()[::2], False),
        "expanded": (torch.tensor(NAN).expand(3, 4), True),
        "parameter": (nn.Parameter(bad), True),
        "sparse": (bad.to_sparse(), True),
        "jagged": (torch.nested.nested_tensor([bad[0], bad[1, :1]], layout=torch.jagged), True),
        "integers": (torch.tensor([2**62, 2**62]), False),
        "booleans": (torch.tensor([True]), False),
        "meta": (torch.ones(2, device="meta"), False),
        "scalar": (torch.tensor(INF), True),
        "conjugate": (torch.tensor([complex(1, INF)]).conj(), True),
        "awaited": (AsyncCollectiveTensor(bad), True),
    }


@pytest.mark.filterwarnings("ignore")  # torch's own, of kinds that are to change
@pytest.mark.parametrize("name", list(kinds_of_tensors()))
def test_every_kind_of_tensor_is_looked_at(name: str) -> None:
    tensor, is_bad = kinds_of_tensors()[name]
    assert (examine(tensor) is not None) == is_bad


def test_no_graph_is_made() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu"):
        assert examine(x * 3) is None
    assert x.grad_fn is None


def test_what_is_written_to_is_looked_at_again() -> None:
    known, x = Known(), torch.ones(3)
    assert known.examine(x) is None
    x[1] = NAN
    assert known.examine(x) == NonFinite(1, 0, 1, 3, (3,))
    with torch.inference_mode():
        y = torch.ones(2)
        assert known.examine(y) is None
        y[0] = INF
        assert known.examine(y) is not None


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known, x = Known(), torch.ones(3)
    known.examine(x)

    def no_sum(self: Tensor) -> None:
        raise AssertionError

    monkeypatch.setattr(Tensor, "sum", no_sum)
    assert known.examine(x) is None

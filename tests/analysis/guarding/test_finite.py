"""Whether tensors are finite, beside torch's own tests of every element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from scio_recorder.analysis.guarding.finite import Flags, NonFinite, are_finite, count

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
    found = count(tensor)
    assert (found.nan, found.inf) == (nan, inf)
    # A NaN hides infinities until they are counted. Small, large and larger tensors are examined in
    # other ways.
    for values in (tensor, tensor.repeat(5000), tensor.repeat(40_000)):
        flags = Flags()
        (flag,) = flags.of([values]) or [None]
        assert flags.read() == (not nan + inf)
        if flag is not None:
            assert flag.kinds == ({"nan"} if nan else {"inf"} if inf else set())
    if not nan + inf:
        return
    firsts = [int(mask.nonzero()[0]) for mask in (wide.isnan(), wide.isinf()) if mask.any()]
    assert min(found.first_nan, found.first_inf) == min(firsts)


@pytest.mark.parametrize("number", [4, 40_000])
@pytest.mark.parametrize("largest", [3e38, 1.7e308])
def test_a_sum_that_overflows_is_no_infinity(largest: float, number: int) -> None:
    dtype = torch.float32 if largest < 1e39 else torch.float64
    assert are_finite([torch.full((number,), largest, dtype=dtype)])
    assert are_finite([torch.full((9000,), largest, dtype=dtype)])


def without_memory(num_bytes: int) -> Tensor:
    """Return a view behind the start of a memory that was cut."""
    view = torch.full((8,), NAN)[4:]
    view.untyped_storage().resize_(num_bytes)
    return view


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
        "freed": (without_memory(0), False),
        "cut": (without_memory(28), False),
        "with a gradient": (bad.clone().requires_grad_() * 1, True),
    }


@pytest.mark.filterwarnings("ignore")  # torch's own, of kinds that are to change
@pytest.mark.parametrize("name", list(kinds_of_tensors()))
def test_every_kind_of_tensor_is_looked_at(name: str) -> None:
    tensor, is_bad = kinds_of_tensors()[name]
    assert are_finite([tensor]) == (not is_bad)
    assert bool(count(tensor).kinds) == is_bad


def test_no_graph_is_made() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu"):
        flags = Flags()
        flags.of([x, x * 3, (x * 3).expand(9000, 2)])
        assert not any(magnitude.requires_grad for _, magnitude in flags._unread)
        assert flags.read()


def test_what_is_written_to_is_looked_at_again() -> None:
    flags, x = Flags(), torch.ones(3)
    (before,) = flags.of([x])
    x[1] = NAN
    (after,) = flags.of([x])
    with torch.inference_mode():
        y = torch.ones(2)
        (first,) = flags.of([y], keeps=True)
        y[0] = INF
        (second,) = flags.of([y], keeps=True)
    assert not flags.read()
    assert [flag.kinds for flag in (before, after, first, second)] == [
        set(),
        {"nan"},
        set(),
        {"inf"},
    ]
    assert before.counted() is None
    assert after.counted() == NonFinite(1, 0, 1, 3, (3,))
    assert second.counted() == NonFinite(0, 1, 2, 0, (2,))


def test_a_tensor_is_looked_at_once() -> None:
    flags, x = Flags(), torch.ones(3)
    assert flags.of([x, [x, {"more": x}]]) == flags.of([x]) * 2
    assert len(flags._unread) == 1


def test_values_are_kept_within_limits() -> None:
    flags = Flags()
    # A view of a large memory would keep all of it.
    small, view = torch.full((4,), NAN), torch.full((18 << 20,), NAN)[:2]
    found = flags.of([small, view], keeps=True)
    flags.read()
    del small, view
    assert found[0].counted() == NonFinite(4, 0, 0, 4, (4,))
    assert found[1].counted() is None
    flags.forget()
    assert found[0].counted() is None


def test_many_are_read_together() -> None:
    flags = Flags()
    shapes = [(), (3,), (1,), (2, 2)]
    values = [torch.ones(shape, dtype=d) for d in (torch.half, torch.float32) for shape in shapes]
    values[5][1] = -INF
    found = flags.of(values)
    transfers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda x: transfers.append(x.dtype) or x.numpy().tolist())
        assert not flags.read()
    assert transfers == [torch.half, torch.float32]
    assert [bool(flag.kinds) for flag in found] == [number == 5 for number in range(8)]

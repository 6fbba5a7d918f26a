"""Reductions stay on the device of what they are given, and follow it to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scio_recorder.reductions import Alive, Covariance, Digest, Histogram, Max, Quantiles
from tests.reductions.test_interface import DATA, LABELS, by, every

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def assert_near(result: object, expected: object, device: str) -> None:
    found, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    for one, two in zip(found, wanted, strict=True):
        if isinstance(two, Tensor):
            assert one.device.type == device
            # Kernels add in another order; the data are 1e4 times as large as their spread.
            torch.testing.assert_close(one.cpu(), two, rtol=1e-5, atol=1e-6)
        else:
            assert one == two


@every
@pytest.mark.parametrize("options", [{}, {"by": by}], ids=["all", "by class"])
def test_on_the_device_and_from_one_to_another(make: Any, options: dict[str, Any]) -> None:
    on_cpu, on_gpu, moving = make(**options), make(**options), make(**options)
    if "Fold" in repr(on_cpu):
        pytest.skip("where an accumulator lies is for the user's function to say")
    for start in (0, 6):
        part, labels = DATA[start : start + 6], LABELS[start : start + 6]
        on_cpu.update(part, labels)
        on_gpu.update(part.cuda(), labels)
        moving.update(part.cuda() if start else part, labels)
    assert_near(on_gpu.compute(), on_cpu.compute(), "cuda")
    assert_near(moving.compute(), on_cpu.compute(), "cuda")
    twice = on_cpu.fresh()
    for _ in range(2):
        twice.merge(on_cpu)
    on_gpu.merge(on_cpu)
    assert_near(on_gpu.compute(), twice.compute(), "cuda")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Quantiles([0.1, 0.5]),
        lambda: Quantiles([0.1, 0.5], 1),
        lambda: Histogram(50, (-3.0, 3.0)),
        lambda: Histogram(50),
        lambda: Histogram(10**5, (-3.0, 3.0)),
        Alive,
        Digest,
        Max,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_counted_and_ordered_is_that_of_the_cpu(make: Any, dtype: torch.dtype) -> None:
    on_cpu, on_gpu = make(), make()
    for rows in (700, 699, 4096):
        data = torch.randn(rows, 77).to(dtype)
        on_cpu.update(data)
        on_gpu.update(data.cuda())
    results = (pytree.tree_leaves(each.compute()) for each in (on_cpu, on_gpu))
    for one, two in zip(*results, strict=True):
        assert two.cpu().equal(one) if isinstance(one, Tensor) else one == two


def test_a_digest_is_that_of_the_values_at_the_call() -> None:
    digest, expected, x = Digest(), Digest(), torch.zeros(4, 1000, device="cuda")
    for value in range(5):
        digest.update(x.fill_(value))
        expected.update(torch.full((4, 1000), float(value)))
        x.fill_(-1)
    assert digest.compute().is_cuda
    assert digest.compute().cpu().equal(expected.compute())


def test_a_state_is_as_exact_as_a_result_under_autocast() -> None:
    data = torch.randn(600, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    covariance = Covariance()
    with torch.autocast("cuda", dtype=torch.float16):
        covariance.update(data)
        # Rows that wait in a buffer are multiplied here.
        state = covariance.state_dict()
    restored = Covariance()
    restored.load_state_dict(state)
    found = restored.compute().covariance.double()
    torch.testing.assert_close(found, data.double().T.cov(), rtol=0.0, atol=1e-6)

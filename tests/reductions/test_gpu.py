"""Reductions stay on the device of what they are given, and follow it to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scio_recorder.reductions import Covariance
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

"""Whether two tensors have the same bits, wherever in memory they lie."""

from __future__ import annotations

import pytest
import torch

from scio_recorder.tensors import properties
from scio_recorder.tensors.properties import same_bits

DTYPES = (torch.float32, torch.float16, torch.uint8, torch.bool, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("offset", "few"), [(0, 0), (1, 0), (3, 0), (0, 100), (3, 100)])
def test_each_byte_counts(
    dtype: torch.dtype, offset: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(properties, "_FEW", few)
    for number in (0, 1, 7, 8, 9, 17):
        tensor = torch.randint(0, 2, (number + offset,)).to(dtype)[offset:]
        assert same_bits(tensor, tensor.clone())
        for place in range(tensor.nbytes):
            other = tensor.clone()
            other.view(torch.uint8)[place] ^= 1
            assert not same_bits(tensor, other)
            assert not same_bits(other, tensor)


def test_bits_are_compared_in_the_order_of_the_elements() -> None:
    tensor = torch.randn(6, 5)
    assert same_bits(tensor.T, tensor.T.contiguous())
    assert not same_bits(tensor.T, tensor.T.flip(0))
    assert not same_bits(torch.zeros(()), -torch.zeros(()))


def test_a_part_of_one_complex_number_has_bits() -> None:
    real = torch.tensor([1 + 2j]).real
    assert same_bits(real, torch.ones(1))
    assert not same_bits(real, torch.tensor([1 + 2j]).imag)

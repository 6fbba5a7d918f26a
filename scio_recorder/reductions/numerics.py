"""In which modes and precision reductions compute, and how what two of them saw is joined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# float32 represents every value of these types; of anything wider float64 does, or nearly.
_FITS_FLOAT32 = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that results have and differences are taken in."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return torch.float32 if dtype in _FITS_FLOAT32 else torch.float64


def portions(samples: Tensor) -> Iterator[Tensor]:
    """Cut samples [batch, ...] so that temporaries stay small beside a large batch."""
    per_sample = max(1, samples[0].numel())
    return iter(torch.split(samples, max(64, 2**20 // per_sample)))


def join_means(count: Any, mean: Any, other_count: Any, other_mean: Any) -> tuple[Any, Any]:
    """Return the mean of two groups together, and by how much they lie apart.

    The square of the latter, and the squares about the mean of each group, add up to the squares
    about the common mean (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979). Nothing waits for a device.

    Parameters
    ----------
    count, other_count : number or Tensor
        Sizes of the groups, tensors as floats. Both may be 0, where the means are finite.
    mean, other_mean : number or Tensor
        Their means.

    Examples
    --------
    >>> join_means(1, 0.0, 1, 2.0)
    (1.0, 1.4142135623730951)
    """
    total = count + other_count
    total = total + (total == 0)
    share = other_count / total
    # A weighted mean and not "mean + delta * share": an infinite mean stays infinite.
    joined = mean * (count / total) + other_mean * share
    return joined, (other_mean - mean) * (count * share) ** 0.5


def float32_products_are_exact(device: torch.device) -> bool:
    """Tell whether matrix products of float32 tensors keep float32's precision here.

    Users may allow TensorFloat32 or bfloat16 inside products, which is fine for a network
    and ruins a covariance.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return precision in ("none", "ieee")


@contextlib.contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """Compute as if the caller had set no mode.

    State made under ``inference_mode`` could never be updated outside it, and autocast would
    multiply matrices in half precision.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield

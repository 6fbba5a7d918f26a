"""Arithmetic whose precision the caller's modes don't change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def float32_products_are_exact(device: torch.device) -> bool:
    """Return whether matrix products of float32 tensors keep float32's precision here.

    Users may allow TensorFloat32 or bfloat16 inside products. That is fine for a network, but
    ruins a covariance.
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
    is_mixed = torch.is_autocast_enabled(device_type)
    autocast = torch.autocast(device_type, enabled=False) if is_mixed else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), autocast:
        yield

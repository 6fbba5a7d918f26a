"""Arithmetic whose precision no mode, lazy sign or device changes, and with how many threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


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


def without_lazy_sign(tensor: Tensor) -> Tensor:
    """Return a tensor without a sign that torch applies only where numbers are read.

    Torch forgets such a sign where it copies from float32 to float16 or back.

    Examples
    --------
    >>> parts = torch.tensor([1 + 2j]).conj().imag
    >>> parts.is_neg(), without_lazy_sign(parts).is_neg()
    (True, False)
    """
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def with_float64(tensor: Tensor) -> Tensor:
    """Return a tensor on a device that has float64: from one of Apple's GPUs, a copy on the CPU.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> with_float64(x) is x
    True
    """
    return tensor.cpu() if tensor.device.type == "mps" else tensor


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside the block.

    On small tensors, threads spend their time waiting for one another. If other processes want the
    same cores, they wait a hundred times longer than they compute.

    Examples
    --------
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

"""Properties of tensors: what they consist of, memory, bits, versions and dtypes; arithmetic."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from operator import mul
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from scio_recorder.tensors import private

# A number; of a wrapper, a tuple of its own and those of the tensors inside.
Version: TypeAlias = Any
_PLAIN = (Tensor, torch.nn.Parameter)
# By the number of their bytes.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Less than this many elements are compared by words of their own size.
_FEW = 1 << 12


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with the memory of one that may be a wrapper without memory of its own.

    Parameters
    ----------
    tensor : torch.Tensor
        Any. Wrappers are ``DTensor``, ``MaskedTensor`` and other subclasses, also of each other.

    Returns
    -------
    list of Tensor
        The tensor alone if it is no wrapper, or doesn't say what is inside.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> inner_tensors(x)[0] is x
    True
    """
    if type(tensor) in _PLAIN or (names := _names_inside(tensor)) is None:
        return [tensor]
    # Other values, such as a mesh of devices, may be among them.
    values = [getattr(tensor, name) for name in names]
    parts = [value for value in values if isinstance(value, Tensor)]
    return [inner for part in parts for inner in inner_tensors(part)] or [tensor]


def _names_inside(tensor: Tensor) -> Iterable[str] | None:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names: list[str] = flatten()[0]
        return names
    try:
        memory = tensor.untyped_storage()
        if memory.device.type == "meta" or memory.nbytes() == 0 or memory.data_ptr():
            return None
    except RuntimeError:
        # The memory that a wrapper seems to have can't be asked for.
        pass
    return list(getattr(tensor, "__dict__", ()))


def version_of(tensor: Tensor) -> Version:
    """Return the version counter, or -1 if there is none.

    Parameters
    ----------
    tensor : torch.Tensor
        One made in inference mode has no counter. A wrapper does not count what happens to the
        tensors inside, so its version consists of several.

    Examples
    --------
    >>> version_of(torch.zeros(1).add_(1))
    1
    """
    if tensor.is_inference():
        return -1
    # Jagged tensors share the counter of their values.
    inner = [tensor] if type(tensor) in _PLAIN or tensor.is_nested else inner_tensors(tensor)
    if inner[0] is tensor:
        return tensor._version
    versions = [(id(part), version_of(part)) for part in inner]
    return -1 if any(version == -1 for _, version in versions) else (tensor._version, *versions)


def version_counter(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that shares another one's version counter.

    Parameters
    ----------
    tensor : torch.Tensor
        Any but one made in inference mode, which has no counter.

    Returns
    -------
    torch.Tensor
        Its ``_version`` is that of the other from then on.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> counter = version_counter(x)
    >>> before = counter._version
    >>> _ = x.add_(1)
    >>> counter._version - before, counter.numel()
    (1, 0)
    """
    # A subclass would make a view of the result, whose base keeps the memory.
    counter: Tensor = private.run_without_overrides(Tensor.detach, (tensor,), {})
    shape = (0,) * max(tensor.dim(), 1)  # compressed rows have two dimensions
    with contextlib.suppress(
        RuntimeError
    ):  # there are no empty nested tensors: it keeps the memory
        counter.data = private.run_without_overrides(Tensor.new_empty, (tensor, shape), {})
    return counter


def memories_of(tensor: Tensor) -> set[int]:
    """Return ids of the memories of a tensor, valid while it lives; a wrapper has several."""
    return {private.memory_of(inner) for inner in inner_tensors(tensor)}


def has_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor, which may have been freed or resized, holds all of it.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> before = has_memory(x)
    >>> _ = x.untyped_storage().resize_(0)
    >>> before, has_memory(x)
    (True, False)
    """
    # Most are, and this is asked often.
    if type(tensor) in _PLAIN and not tensor.is_nested and tensor.layout is torch.strided:
        return not _bytes_lacking(tensor)
    return not any(map(_bytes_lacking, inner_tensors(tensor)))


def regain_memory(tensor: Tensor) -> None:
    """Give a tensor whose memory was freed or shrunk enough of it again, of any content."""
    for inner in inner_tensors(tensor):
        needed = _bytes_lacking(inner)
        if needed:
            inner.untyped_storage().resize_(needed)


def _bytes_lacking(tensor: Tensor) -> Any:
    """Return the size that the storage of a tensor lacks, which may be a symbol; 0 if none."""
    try:
        num_bytes = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        # Sparse and other layouts, and tensors of transforms, have none of their own.
        return 0
    is_gapless = tensor.is_nested or tensor.is_contiguous()
    extent = tensor.numel() if is_gapless else extent_of(tensor)
    start = 0 if tensor.is_nested else tensor.storage_offset()
    needed = (start + extent) * tensor.itemsize if extent else 0
    return 0 if needed <= num_bytes else needed


def extent_of(tensor: Tensor) -> int:
    """Return the number of elements in memory from a tensor's first to its last."""
    strides = tensor.stride()
    return 1 + sum(map(mul, tensor.shape, strides)) - sum(strides) if tensor.numel() else 0


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor consists only of strided numbers in memory.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Returns
    -------
    bool
        False for subclasses, sparse, quantised, nested, lazily conjugated and data-less tensors.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a number at every place of a regular array.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Returns
    -------
    bool
        False for sparse, nested and quantised tensors.

    Examples
    --------
    >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits: NaN is NaN, 0.0 is not -0.0.

    Parameters
    ----------
    left, right : torch.Tensor
        The tensors to compare, on one device.

    Returns
    -------
    bool
        Compared by value if tensors are not strided. False if one has no data, or its memory was
        freed.

    Examples
    --------
    >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    >>> same_bits(torch.zeros(1), -torch.zeros(1))
    False
    """
    try:
        return _same_bits(left, right)
    except RuntimeError:
        return False


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if (left.dtype, left.layout, left.is_nested) != (right.dtype, right.layout, right.is_nested):
        return False
    # Nested tensors have no shape, or one with a symbol that only they have.
    if not left.is_nested and left.shape != right.shape:
        return False
    if left.numel() < _FEW and _lies_together(left) and _lies_together(right):
        # What follows takes four times as long for few elements.
        word = _WORDS[left.itemsize]
        return torch.equal(left.detach().view(word), right.detach().view(word))
    inner, inner_of_right = inner_tensors(left), inner_tensors(right)
    if inner[0] is not left:
        return len(inner) == len(inner_of_right) and all(map(_same_bits, inner, inner_of_right))
    if not (has_memory(left) and has_memory(right)):
        return False
    if not is_dense(left):
        return _same_parts(left.detach(), right.detach())
    of_left, of_right = as_bytes(left), as_bytes(right)
    # Torch compares eight bytes in the time of one.
    width = math.gcd(8, len(of_left), of_left.storage_offset(), of_right.storage_offset())
    return torch.equal(of_left.view(_WORDS[width]), of_right.view(_WORDS[width]))


def _lies_together(tensor: Tensor) -> bool:
    """Whether a tensor is plain, its elements lie in their order, and its memory is there."""
    return (
        is_plain(tensor)
        and tensor.is_contiguous()
        and tensor.itemsize in _WORDS
        and has_memory(tensor)
    )


def _same_parts(left: Tensor, right: Tensor) -> bool:
    parts: list[Any]
    if left.layout is torch.sparse_coo:
        parts = [(part.indices(), part.values()) for part in (left.coalesce(), right.coalesce())]
    elif left.is_nested:
        parts = [left.unbind(), right.unbind()]
    else:
        return torch.equal(left, right)
    return len(parts[0]) == len(parts[1]) and all(map(same_bits, *parts))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor's elements in their order, copied if they lie apart."""
    dense = tensor.detach()
    if not is_plain(dense):
        dense = dense.as_subclass(Tensor).resolve_conj().resolve_neg()
    # A view of one element may have any stride, and count as contiguous.
    return dense.contiguous().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def has_samples(tensor: Tensor) -> bool:
    """Whether a tensor can be kept or reduced sample by sample: a dense one without a mask.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Examples
    --------
    >>> has_samples(torch.ones(2)), has_samples(torch.ones(2).to_sparse())
    (True, False)
    """
    return is_dense(tensor) and not isinstance(tensor, MaskedTensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    Parameters
    ----------
    dtype : torch.dtype
        Any.

    Returns
    -------
    str
        A key of `DTYPES`.

    Examples
    --------
    >>> dtype_name(torch.float), DTYPES["float32"]
    ('float32', torch.float32)
    """
    return str(dtype).removeprefix("torch.")


# Every dtype of this version of torch, by name.
DTYPES = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


# -- arithmetic whose precision no mode, lazy sign or device changes -------------------------------


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

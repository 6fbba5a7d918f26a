"""Copies of tensors: of those of several processes, with their strides, and as arrays."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import MutationError
from scio_recorder.tensors import private
from scio_recorder.tensors.properties import (
    Version,
    extent_of,
    has_memory,
    is_plain,
    same_bits,
    version_of,
)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is spread over several processes; others unchanged.

    Parameters
    ----------
    tensor : torch.Tensor
        A ``DTensor``, with which all processes of its mesh call this, or any other.

    Returns
    -------
    torch.Tensor
        Detached if it was gathered.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> gathered(x) is x
    True
    """
    # DTensors are recognised by their method: importing their class takes long, and few users have
    # any.
    gather = None if type(tensor) is Tensor else getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with torch.no_grad():
        whole: Tensor = gather()
    return whole.detach()


class StridedCopy:
    """A copy of a plain tensor, perhaps elsewhere or narrower, that comes back with its strides.

    Strides decide which kernel runs, and so the last bits of its result. Elements that share
    memory, as in an expanded tensor, also share it in the copy.

    Parameters
    ----------
    tensor : torch.Tensor
        The tensor to copy, see :func:`is_plain`.
    device : torch.device, optional
        The device of the copy; the tensor's own by default.
    dtype : torch.dtype, optional
        The dtype of the copy; the tensor's own by default.
    pin_memory : bool, default False
        Whether the copy goes to pinned host memory.

    Examples
    --------
    >>> x = torch.arange(6.0).view(2, 3).t()
    >>> again = StridedCopy(x, dtype=torch.bfloat16).restored()
    >>> torch.equal(again, x), again.stride(), again.dtype
    (True, (1, 3), torch.float32)
    """

    __slots__ = ("__weakref__", "_device", "_dtype", "_shape", "_strides", "kept")

    def __init__(
        self,
        tensor: Tensor,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._device = tensor.device
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._strides = tensor.stride()
        with torch.no_grad():
            memory = tensor.detach().as_strided((extent_of(tensor),), (1,))
            self.kept: Tensor = torch.empty(
                memory.shape,
                dtype=dtype or tensor.dtype,
                device=device or tensor.device,
                pin_memory=pin_memory,
            ).copy_(memory)

    def restored(self, kept: Tensor | None = None) -> Tensor:
        """Return the tensor on its own device, in its own dtype.

        Parameters
        ----------
        kept : torch.Tensor, optional
            Used in place of the kept tensor.

        Returns
        -------
        torch.Tensor
            Detached; it may share memory with the kept tensor.
        """
        memory = self.kept if kept is None else kept
        back = memory.to(self._device, self._dtype, non_blocking=memory.is_pinned())
        return back.as_strided(self._shape, self._strides)


def refuse_lost(*tensors: Tensor) -> None:
    """Refuse tensors whose memory was freed or shrunk: whoever read them would end the process.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> _ = x.untyped_storage().resize_(0)
    >>> refuse_lost(x)
    Traceback (most recent call last):
    ...
    scio_recorder.errors.MutationError: the memory of a tensor of shape (2,) was freed or ...
    """
    for tensor in tensors:
        if not has_memory(tensor):
            raise MutationError(
                f"the memory of a tensor of shape {tuple(tensor.shape)} was freed or shrunk, as by "
                "offloading, so its numbers can't be read: give it its memory back first, or leave "
                "out the layer that receives or returns it"
            )


@private.without_modes
def twin(tensor: Tensor) -> Tensor:
    """Return a detached copy in new memory, with the same strides if possible.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Returns
    -------
    torch.Tensor
        The copy.

    Raises
    ------
    MutationError
        Its memory is gone.

    Examples
    --------
    >>> twin(torch.zeros(2, 6)[:, ::2]).stride()
    (6, 2)
    """
    refuse_lost(tensor)
    has_graph = tensor.requires_grad and torch.is_grad_enabled()
    copy = (tensor.detach() if has_graph else tensor).clone()
    if is_plain(tensor) and copy.stride() != tensor.stride():
        copy = StridedCopy(tensor).restored()
    return copy


class Copies:
    """Copies of tensors as they were when they were asked for, of each one until it is written to.

    Tensors that were copied stay alive, so that no others take their ids.

    Examples
    --------
    >>> copies, x = Copies(), torch.zeros(1)
    >>> first = copies.of(x)
    >>> copies.of(x) is first, copies.of(x.add_(1)) is first, first
    (True, False, tensor([0.]))
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Version, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor, in its present state."""
        if id(tensor) not in self._known or self.is_written(tensor):
            self._known[id(tensor)] = tensor, version_of(tensor), twin(tensor)
        return self._known[id(tensor)][2]

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a tensor was copied and has been written to since, counted by torch or not."""
        if id(tensor) not in self._known:
            return False
        _, version, copy = self._known[id(tensor)]
        return version_of(tensor) != version or not same_bits(tensor, copy)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch says that memory could not be had.

    Examples
    --------
    >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(RuntimeError("other shapes"))
    (True, False)
    """
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def to_array(samples: Tensor) -> NDArray[Any]:
    """Return samples as an array; dtypes that NumPy lacks are widened."""
    tensor = samples[:].detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        return tensor.to(wide).numpy()

"""Digests of tensors of any kind, of the samples in a tensor, and of the weights of modules.

NOTE [Tensors are read through copies]

An array over the memory of a tensor prevents the tensor's storage from being resized, which sharded
networks do in every pass. So the data is copied first, a piece at a time: memory stays bounded, and
the tensor stays as it was. A tensor that holds others is digested through those. If there is no
data, as on the meta device, only dtype and shape count.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from scio_recorder.tensors import private
from scio_recorder.tensors.properties import as_bytes, has_memory, is_plain, version_of
from scio_recorder.tensors.structures import tensors

# A piece of host memory stays in the cache of the processor. Other devices transfer large pieces
# faster than small ones.
_PIECE_BYTES = {"cpu": 1 << 20}
_OTHER_PIECE_BYTES = 1 << 25


def digest_of(value: Any) -> str:
    """Return a digest of every tensor in a structure: dtypes, shapes and bits.

    Parameters
    ----------
    value : Any
        A tensor, or any nesting of containers.

    Returns
    -------
    str
        XXH3 of 128 bits, in hexadecimal.

    Examples
    --------
    >>> zero, minus_zero = digest_of(torch.zeros(2)), digest_of(-torch.zeros(2))
    >>> zero == minus_zero, zero == digest_of((torch.zeros(2), "anything"))
    (False, True)
    """
    digest = xxhash.xxh3_128()
    for leaf in tensors(value):
        _add(digest, leaf)
    return digest.hexdigest()


def sample_digests(samples: Tensor) -> Tensor:
    """Return a digest of each sample: of dtype, shape and bits, with all NaNs equal.

    The bits of a NaN differ from machine to machine, but mean the same.

    Parameters
    ----------
    samples : torch.Tensor
        Dense, [samples, ...].

    Returns
    -------
    torch.Tensor
        XXH3 of 64 bits, int64 [samples], in host memory.

    Examples
    --------
    >>> zero, minus_zero = sample_digests(torch.tensor([[0.0], [-0.0]])).tolist()
    >>> zero == minus_zero, zero == sample_digests(torch.zeros(3, 1))[2]
    (False, tensor(True))
    """
    with torch.no_grad():
        parts = samples.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        parts = torch.view_as_real(parts) if parts.is_complex() else parts
    # It distinguishes samples of one dtype and shape from others.
    seed = xxhash.xxh3_64_intdigest(f"{samples.dtype}{list(samples.shape[1:])}".encode())
    sample_bytes = parts.nbytes // max(1, len(parts))
    piece_bytes = _PIECE_BYTES.get(parts.device.type, _OTHER_PIECE_BYTES)
    digests: list[int] = []
    step = max(1, piece_bytes // max(1, sample_bytes))
    for start in range(0, len(parts), step):
        piece = parts[start : start + step].cpu().contiguous()
        # A sum is NaN if a number is, and costs less than a mask. The smallest dtypes have no sum.
        if piece.is_floating_point() and np.isnan(piece.sum(dtype=torch.float32).numpy()):
            # `math.nan` has the same bits on every machine. The smallest dtypes can't be filled.
            nan = torch.tensor(math.nan, dtype=piece.dtype, device="cpu")
            piece = piece.where(~piece.isnan(), nan)
        # By address: an array of torch's would prevent resizing the storage from then on.
        memory = (ctypes.c_char * piece.nbytes).from_address(piece.data_ptr())
        rows = np.ndarray((len(piece), sample_bytes), np.uint8, memoryview(memory))
        digests.extend(xxhash.xxh3_64_intdigest(row.data, seed) for row in rows)
    # The same bits, as torch has hardly any operation for unsigned ones.
    return torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64))


def weights_digest(net: nn.Module) -> str:
    """Return a digest of all parameters and buffers of a net, in hexadecimal.

    Running statistics of normalisations in training mode are left out: every pass changes them, and
    the outputs of these layers do not depend on them.

    Parameters
    ----------
    net : torch.nn.Module
        The network, on any device, sharded or not.

    Returns
    -------
    str
        XXH3 of 128 bits. The digest of a sharded network covers this process's shards, and begins
        with ``local-``.

    Examples
    --------
    >>> net = nn.Linear(2, 2)
    >>> before = weights_digest(net)
    >>> _ = net.bias.data.add_(1)
    >>> weights_digest(net) == before
    False
    """
    moving = {
        f"{name}.{key}".removeprefix(".")
        for name, module in net.named_modules()
        if getattr(module, "track_running_stats", False) and module.training
        for key in ("running_mean", "running_var", "num_batches_tracked")
    }
    fsdp = private.fsdp_modules(net)
    for module in fsdp:
        # Whole parameters that a pass left in place are the same weights.
        private.take_whole_parameters(module)
    digest, is_local = xxhash.xxh3_128(), bool(fsdp)
    for name, value in _named_weights(net):
        if name not in moving:
            digest.update(f"{name!r} ".encode())
            _add(digest, value)
            is_local |= hasattr(value, "to_local")
    return ("local-" if is_local else "") + digest.hexdigest()


def _named_weights(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters(remove_duplicate=False)
    for prefix, module in net.named_modules(remove_duplicate=False):
        for key, buffer in module.named_buffers(recurse=False):
            if private.is_saved(module, key):
                yield f"{prefix}.{key}".removeprefix("."), buffer


class WeightDigests:
    """Digests of modules' parameters, taken again only if these seem to have changed.

    Examples
    --------
    >>> digests, linear = WeightDigests(), torch.nn.Linear(1, 1)
    >>> before = digests.digest(linear)
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> digests.digest(linear) == before
    False
    """

    def __init__(self) -> None:
        self._known: dict[nn.Module, tuple[list[tuple[int, int]], str]] = {}
        self._is_watching = False

    def digest(self, module: nn.Module) -> str:
        """Return the digest of a module's parameters."""
        parameters = list(module.parameters())
        if not all(map(is_plain, parameters)):
            # A tensor inside a wrapper may change without a trace on the wrapper.
            return digest_of(parameters)
        if not self._is_watching:
            self._watch_optimizers()
        versions = [(p.data_ptr(), version_of(p)) for p in parameters]
        known = self._known.get(module)
        if known is None or known[0] != versions:
            known = self._known[module] = versions, digest_of(parameters)
        return known[1]

    def _watch_optimizers(self) -> None:
        """Forget all digests at each step: fused optimizers don't count it as a change.

        Until there is a digest to forget, the optimizers of others are left alone.
        """
        known = self._known
        handle = register_optimizer_step_post_hook(lambda *of_step: known.clear())
        weakref.finalize(self, handle.remove)
        # This is set last: another thread's digest must not miss a step.
        self._is_watching = True


def _add(digest: xxhash.xxh3_128, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
    with torch.no_grad():
        for part in plain_parts(tensor.detach()):
            num_bytes = _PIECE_BYTES.get(part.device.type, _OTHER_PIECE_BYTES)
            for piece in torch.split(as_bytes(part), num_bytes):
                digest.update(piece.to("cpu", copy=True).numpy().data)


def plain_parts(tensor: Any) -> Iterator[Tensor]:
    """Yield plain tensors with all the numbers of one that may not be plain.

    Parameters
    ----------
    tensor : torch.Tensor
        Any that is off the graph. Of one that is spread over processes, this process's part counts.
    """
    if hasattr(tensor, "trigger_wait"):
        # The result of an operation with other processes, which may not have ended.
        tensor = tensor.wait()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if tensor.is_meta:
        return
    if flatten is not None:
        for inner in (getattr(tensor, name) for name in flatten()[0]):
            # Other values, such as a mesh of devices, may be among them.
            if isinstance(inner, Tensor):
                yield from plain_parts(inner.detach())
    elif tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.is_quantized:
        yield tensor.dequantize()
    elif tensor.layout is not torch.strided:
        yield tensor.to_dense()
    elif has_memory(tensor):
        # A wrapper that does not say what it holds gives its values as a view. Torch 2.8 can't make
        # such a wrapper plain by itself.
        yield tensor.view_as(tensor).as_subclass(Tensor).resolve_conj().resolve_neg()

"""All that decides, besides weights and inputs, what a module returns: noted, and brought back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.random_state import RandomState
from scio_recorder.tree import tensors

__all__ = ["Moment"]

_SMALL_BYTES = 1 << 18


class Moment:
    """The state in which a module was about to run.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    inputs : Any
        What its forward was about to receive.

    Examples
    --------
    >>> dropout = nn.Dropout()
    >>> moment = Moment(dropout, torch.ones(8))
    >>> first = dropout(torch.ones(8))
    >>> _ = dropout.eval()
    >>> with moment.entered(dropout):
    ...     again = dropout(torch.ones(8))
    >>> torch.equal(first, again)
    True
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self._random = RandomState()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _autocast_state()
        modules = list(module.modules())
        self._training = [inner.training for inner in modules]
        self._buffers = [
            (name, buffer, _version(buffer), _copied(buffer, inner.training))
            for inner in modules
            for name, buffer in inner.named_buffers(recurse=False)
        ]
        self._parameters = [(name, p, _version(p)) for name, p in module.named_parameters()]
        leaves = tensors(inputs)
        self.requires_grad = [leaf.requires_grad for leaf in leaves]
        self.devices = [leaf.device for leaf in leaves]
        self._own_devices = [p.device for _, p, _ in self._parameters]

    def explain_change(self, module: nn.Module) -> str | None:
        """Say what of the module is known to have changed since; None if nothing is."""
        now = dict(module.named_parameters())
        for (name, parameter, version), device in zip(
            self._parameters, self._own_devices, strict=True
        ):
            if name in now and now[name].device != device:
                return f"the net is on another device: {name} was on {device}"
            if now.get(name) is not parameter or _version(parameter) != version:
                return f"weights have changed since that pass: {name}"
        for name, buffer, version, copied in self._buffers:
            if copied is None and _version(buffer) != version:
                return f"the buffer {name} has changed since that pass"
        return None

    @contextlib.contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        """Bring the state back for the length of the block; the module is left in it.

        The caller puts the module and the generators of random numbers back.
        """
        for inner, training in zip(module.modules(), self._training, strict=True):
            inner.training = training
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device_type, enabled, dtype, caches in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype, enabled, caches))
            with torch.no_grad():
                for _, buffer, _, copied in self._buffers:
                    if copied is not None:
                        # Behind the version counter's back: a graph may hold the buffer.
                        buffer.data.copy_(copied)
            self._random.restore()
            yield


def _autocast_state() -> list[tuple[str, bool, torch.dtype, bool]]:
    caches = torch.is_autocast_cache_enabled()
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches)
        for kind in kinds
    ]


def _copied(buffer: Tensor, training: bool) -> Tensor | None:
    """Copy what a pass may change; of large buffers out of training, the version has to do."""
    is_small = buffer.numel() * buffer.element_size() <= _SMALL_BYTES
    return buffer.detach().clone() if training or is_small else None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

"""All that decides, besides weights and inputs, what a module returns: noted, and brought back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.nets.state.random import RandomState
from scio_recorder.tensors.copies import is_plain, same_bits
from scio_recorder.tensors.structures import tensors as leaves_of

_SMALL_BYTES = 1 << 18
# Numbers of each parameter that are compared.
_SAMPLED = 64


class Moment:
    """The state in which a module was about to run.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    inputs : Any
        What its forward was about to receive.
    copy : callable, optional
        How buffers are copied; by default each is cloned.
    places : list of (torch.nn.Module, str), optional
        The buffers of the module, where they are known already.

    Attributes
    ----------
    requires_grad : list of bool
        Of each tensor in the inputs.
    devices : list of torch.device
        Of each tensor in the inputs.
    random : RandomState
        The generators of random numbers.

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

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        copy: Callable[[Tensor], Tensor] | None = None,
        *,
        places: list[tuple[nn.Module, str]] | None = None,
    ) -> None:
        self.random = RandomState()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _autocast_state()
        self._training = [inner.training for inner in module.modules()]
        self._buffers = [
            _copied(inner, name, copy or _clone) for inner, name in places or _buffers(module)
        ]
        leaves = leaves_of(inputs)
        self.requires_grad = [leaf.requires_grad for leaf in leaves]
        self.devices = [leaf.device for leaf in leaves]
        self._homes = _homes(module)

    def explain_change(self, module: nn.Module) -> str | None:
        """Say what of the module differs so that it can't be run again; None if nothing does.

        Parameters
        ----------
        module : torch.nn.Module
            The module, maybe of another process.

        Returns
        -------
        str or None
            Part of a sentence.
        """
        if len(list(module.modules())) != len(self._training):
            return "it has gained or lost modules since that pass"
        if len(_buffers(module)) != len(self._buffers):
            return "it has gained or lost buffers since that pass"
        homes = _homes(module)
        if homes != self._homes:
            here, there = ", ".join(homes) or "none", ", ".join(self._homes) or "none"
            return f"the net is on another device: its parameters were on {there}, now on {here}"
        return None

    @contextlib.contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        """Bring the state back for the length of the block; the module is left in it.

        The caller puts the module and the generators of random numbers back.

        Parameters
        ----------
        module : torch.nn.Module
            One of which `explain_change` says nothing.
        """
        for inner, training in zip(module.modules(), self._training, strict=True):
            inner.training = training
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device_type, enabled, dtype, caches in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype, enabled, caches))
            with torch.no_grad():
                for (inner, name), copied in zip(_buffers(module), self._buffers, strict=True):
                    if copied is not None:
                        _put(inner, name, copied)
            self.random.restore()
            yield

    @property
    def tensors(self) -> list[Tensor]:
        """What takes memory in this."""
        return [buffer for buffer in self._buffers if buffer is not None] + self.random.tensors

    def to_tree(self) -> dict[str, Any]:
        """Return this as dicts, lists, plain values and tensors.

        Returns
        -------
        dict
            For `from_tree`.
        """
        return {
            "random": self.random.to_tree(),
            "grad": self._grad,
            "inference": self._inference,
            "autocast": [list(kind) for kind in self._autocast],
            "training": self._training,
            "buffers": self._buffers,
            "requires_grad": self.requires_grad,
            "devices": self.devices,
            "homes": self._homes,
        }

    @classmethod
    def from_tree(cls, tree: Any) -> Moment:
        """Return the moment that `to_tree` was asked of.

        Parameters
        ----------
        tree : dict
            What it returned.

        Raises
        ------
        ValueError, TypeError, LookupError, AttributeError
            If it is no such moment.

        Examples
        --------
        >>> norm = nn.BatchNorm1d(2)
        >>> moment = Moment.from_tree(Moment(norm, torch.ones(3, 2)).to_tree())
        >>> moment.explain_change(norm) is None
        True
        """
        moment = cls.__new__(cls)
        moment.random = RandomState.from_tree(tree["random"])
        moment._grad, moment._inference = bool(tree["grad"]), bool(tree["inference"])
        moment._autocast = [
            (str(kind), bool(enabled), dtype, bool(caches))
            for kind, enabled, dtype, caches in tree["autocast"]
        ]
        moment._training = [bool(training) for training in tree["training"]]
        moment._buffers = list(tree["buffers"])
        moment.requires_grad = [bool(value) for value in tree["requires_grad"]]
        moment.devices = [torch.device(device) for device in tree["devices"]]
        moment._homes = [str(home) for home in tree["homes"]]
        return moment


class LiveMoment(Moment):
    """A moment of this process, which knows the weights that the module had.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    inputs : Any
        What its forward was about to receive.

    Examples
    --------
    >>> linear = nn.Linear(1, 1)
    >>> moment = LiveMoment(linear, torch.ones(1, 1))
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> moment.explain_change(linear)
    'weights have changed since that pass: bias'
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        places = _buffers(module)
        super().__init__(module, inputs, places=places)
        named = [(inner, name, inner._buffers[name]) for inner, name in places]
        self._then = [
            (inner, name, buffer, _version(buffer))
            for inner, name, buffer in named
            if buffer is not None
        ]
        self._parameters = [
            (name, p, _version(p), p.device) for name, p in module.named_parameters()
        ]
        self._samples = self._sampled()

    @property
    def tensors(self) -> list[Tensor]:
        """What takes memory in this."""
        return super().tensors + list(self._samples.values())

    def explain_change(self, module: nn.Module) -> str | None:
        """Say what of the module is known to have changed since; None if nothing is."""
        now = dict(module.named_parameters())
        for name, parameter, version, device in self._parameters:
            if name in now and now[name].device != device:
                return f"the net is on another device: {name} was on {device}"
            if now.get(name) is not parameter or _version(parameter) != version:
                return f"weights have changed since that pass: {name}"
        for (_, name, buffer, version), copied in zip(self._then, self._buffers, strict=True):
            if copied is None and _version(buffer) != version:
                return f"the buffer {name} has changed since that pass"
        # Writes through `.data` and by fused optimisers are not counted.
        samples = self._sampled()
        if samples.keys() != self._samples.keys() or not all(
            same_bits(samples[kind], then) for kind, then in self._samples.items()
        ):
            return "weights have changed since that pass, or large buffers"
        return super().explain_change(module)

    @contextlib.contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        """Bring the state back for the length of the block; the module is left in it."""
        for inner, name, buffer, _ in self._then:
            # A forward may have put another tensor in its place.
            inner._buffers[name] = buffer
        with super().entered(module):
            yield

    def _sampled(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        """Return some numbers of what is not copied."""
        buffers = zip(self._then, self._buffers, strict=True)
        large = [buffer for (_, _, buffer, _), copied in buffers if copied is None]
        return _samples([parameter for _, parameter, _, _ in self._parameters] + large)


def _samples(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """Return some numbers of each tensor: all of them would take as long as small passes do."""
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if is_plain(tensor) and _is_gapless(tensor) and tensor.numel():
                step = -(-tensor.numel() // _SAMPLED)
                count = -(-tensor.numel() // step)
                kind = tensor.device, tensor.dtype
                parts.setdefault(kind, []).append(tensor.as_strided((count,), (step,)))
        return {kind: torch.cat(some) for kind, some in parts.items()}


def _is_gapless(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _autocast_state() -> list[tuple[str, bool, torch.dtype, bool]]:
    caches = torch.is_autocast_cache_enabled()
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches)
        for kind in kinds
    ]


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (inner, name)
        for inner in module.modules()
        for name, _ in inner.named_buffers(recurse=False)
    ]


def _put(module: nn.Module, name: str, copied: Tensor) -> None:
    buffer = module._buffers[name]
    assert buffer is not None
    if buffer.shape == copied.shape and buffer.dtype == copied.dtype:
        # Behind the version counter's back: a graph may hold the buffer.
        buffer.data.copy_(copied)
    else:
        module._buffers[name] = copied.to(buffer.device, copy=True)


def _homes(module: nn.Module) -> list[str]:
    return sorted(map(str, {parameter.device for parameter in module.parameters()}))


def _copied(module: nn.Module, name: str, copy: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Copy what a pass may change; of large buffers out of training, the version has to do."""
    buffer = module._buffers[name]
    assert buffer is not None
    is_small = buffer.numel() * buffer.element_size() <= _SMALL_BYTES
    return copy(buffer) if module.training or is_small else None


def _clone(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

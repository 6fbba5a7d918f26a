"""The state that decides a module's output besides weights and inputs: noting and restoring it."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.tensors.properties import has_memory, is_plain, same_bits, version_of
from scio_recorder.tensors.structures import tensors

_SMALL_BYTES = 1 << 18
# The number of values of each parameter that are compared.
_SAMPLED = 64
# NumPy reads past the end of its words if the position says so.
_MERSENNE_WORDS = 624


def random_state() -> dict[str, Any]:
    """Return the state of every global random number generator, as plain values and tensors.

    Returns
    -------
    dict
        The states of torch, NumPy and Python, for :func:`restore_random`.

    Examples
    --------
    >>> state = random_state()
    >>> first = torch.rand(2), np.random.rand(), random.random()
    >>> restore_random(state)
    >>> torch.equal(torch.rand(2), first[0]), np.random.rand() == first[1]
    (True, True)
    >>> random.random() == first[2]
    True
    """
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].view(np.int32))
    version, words, gauss = random.getstate()
    # Words are signed: tensors of unsigned ones can't be pickled.
    # Asking a device that is not in use would initialise it.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    return {
        "cpu": torch.get_rng_state(),
        "numpy": numpy,
        "python": [version, torch.frombuffer(array("I", words), dtype=torch.int32), gauss],
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else None,
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore the generators; an invalid state raises before its generator changes."""
    numpy, (version, words, gauss) = state["numpy"], state["python"]
    if numpy["bit_generator"] == "MT19937":
        if not 0 <= numpy["state"]["pos"] <= _MERSENNE_WORDS:
            raise ValueError("the state of a random number generator is out of bounds")
        key = numpy["state"]["key"].numpy().view(np.uint32)
        numpy = {**numpy, "state": {**numpy["state"], "key": key}}
    torch.set_rng_state(state["cpu"])
    np.random.set_state(numpy)
    random.setstate((version, tuple(words.numpy().view(np.uint32).tolist()), gauss))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every global random number generator after the block.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with preserved_rng():
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    before = random_state()
    try:
        yield
    finally:
        restore_random(before)


@dataclass
class Moment:
    """The state in which a module was about to run, as plain values and tensors.

    Parameters
    ----------
    random : dict
        The generators of random numbers, see :func:`random_state`.
    grad, inference : bool
        The modes of autograd.
    autocast : list
        Device type, whether it is on, dtype and whether it caches, each.
    training : list of bool
        The flag of each of ``module.modules()``.
    buffers : list of torch.Tensor or None
        The buffers of each of these; None if they are too large to keep outside of training.
    requires_grad : list of bool
        Of each tensor in the inputs.
    devices : list of torch.device
        Of each tensor in the inputs.
    homes : list of str
        The devices of the parameters.

    Examples
    --------
    >>> dropout = nn.Dropout()
    >>> moment = Moment.of(dropout, torch.ones(8))
    >>> first = dropout(torch.ones(8))
    >>> _ = dropout.eval()
    >>> with moment.entered(dropout):
    ...     again = dropout(torch.ones(8))
    >>> torch.equal(first, again)
    True
    """

    random: dict[str, Any]
    grad: bool
    inference: bool
    autocast: list[Any]
    training: list[bool]
    buffers: list[Tensor | None]
    requires_grad: list[bool]
    devices: list[torch.device]
    homes: list[str]

    @classmethod
    def of(cls, module: nn.Module, inputs: Any) -> Self:
        """Note the current state; buffers are the module's own, not copies.

        Parameters
        ----------
        module : torch.nn.Module
            The module.
        inputs : Any
            The inputs that its forward is about to receive.
        """
        leaves = tensors(inputs)
        return cls(
            random=random_state(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=_autocast_state(),
            training=[inner.training for inner in module.modules()],
            buffers=[
                buffer if _is_copied(inner, buffer) else None
                for inner, _, buffer in _buffers(module)
            ],
            requires_grad=[leaf.requires_grad for leaf in leaves],
            devices=[leaf.device for leaf in leaves],
            homes=_homes(module),
        )

    def explain_change(self, module: nn.Module) -> str | None:
        """Say which difference of the module prevents running it again; None if there is none.

        Parameters
        ----------
        module : torch.nn.Module
            The module, perhaps of another process.

        Returns
        -------
        str or None
            Part of a sentence.
        """
        counts = len(list(module.modules())), len(_buffers(module))
        if counts != (len(self.training), len(self.buffers)):
            return "it has gained or lost modules or buffers since that pass"
        homes = _homes(module)
        if homes != self.homes:
            here, there = ", ".join(homes) or "none", ", ".join(self.homes) or "none"
            return f"the net is on another device: its parameters were on {there}, now on {here}"
        return None

    @contextlib.contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        """Restore the state for the block; the module is left in it.

        The caller restores the module and the generators of random numbers.

        Parameters
        ----------
        module : torch.nn.Module
            A module for which `explain_change` returns None.
        """
        for inner, training in zip(module.modules(), self.training, strict=True):
            inner.training = training
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, enabled, dtype, caches in self.autocast:
                stack.enter_context(torch.autocast(device_type, dtype, enabled, caches))
            with torch.no_grad():
                for (inner, name, buffer), then in zip(_buffers(module), self.buffers, strict=True):
                    if then is not None and then is not buffer:
                        _put(inner, name, buffer, then)
            restore_random(self.random)
            yield


@dataclass
class LiveMoment(Moment):
    """A moment of this process, which knows the tensors that the module had.

    Parameters
    ----------
    referenced : list
        Name, tensor and version of each parameter, and of each buffer that is not copied.
    samples : dict
        Some numbers of all these.

    Examples
    --------
    >>> linear = nn.Linear(1, 1)
    >>> moment = LiveMoment.of(linear, torch.ones(1, 1))
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> moment.explain_change(linear)
    'weights have changed since that pass: bias'
    """

    referenced: list[tuple[str, Tensor, int]] = field(default_factory=list)
    samples: dict[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, inputs: Any) -> Self:
        """Note the current state, with copies of small buffers."""
        moment = super().of(module, inputs)
        named: list[tuple[str, Tensor]] = list(module.named_parameters())
        for at, (_, name, buffer) in enumerate(_buffers(module)):
            if moment.buffers[at] is None:
                named.append((name, buffer))
            is_copied = moment.buffers[at] is not None
            moment.buffers[at] = buffer.detach().clone() if is_copied else buffer
        moment.referenced = [(name, tensor, version_of(tensor)) for name, tensor in named]
        moment.samples = joined(sampled(tensor for _, tensor in named if is_plain(tensor)))
        return moment

    def explain_change(self, module: nn.Module) -> str | None:
        """Say what in the module has certainly changed since; None if nothing has."""
        difference = super().explain_change(module)
        if difference is not None:
            return difference
        present = {*map(id, module.parameters())}
        for name, tensor, version in self.referenced:
            is_weight = isinstance(tensor, nn.Parameter)
            if version_of(tensor) != version or (is_weight and id(tensor) not in present):
                what = "weights have changed" if is_weight else "a large buffer has changed"
                return f"{what} since that pass: {name}"
        # Writes through `.data` and by fused optimisers are not counted.
        watched = [tensor for _, tensor, _ in self.referenced if is_plain(tensor)]
        samples = joined(sampled(watched))
        is_same = same_samples(samples, self.samples)
        return None if is_same else "weights have changed since that pass, or large buffers"


def sampled(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Return a view of some values of each plain tensor, by device and dtype, if it has no gaps."""
    parts: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        is_gapless = tensor.is_contiguous() or (
            tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        if is_gapless and tensor.numel() and has_memory(tensor):
            step = -(-tensor.numel() // _SAMPLED)
            count = -(-tensor.numel() // step)
            kind = tensor.device, tensor.dtype
            parts.setdefault(kind, []).append(tensor.detach().as_strided((count,), (step,)))
    return parts


def joined(views: dict[Any, list[Tensor]]) -> dict[Any, Tensor]:
    """Return the values: reading all those of the tensors would take as long as a small pass."""
    with torch.no_grad():
        there = {kind: [*filter(has_memory, some)] for kind, some in views.items()}
        return {kind: torch.cat(some) for kind, some in there.items() if some}


def same_samples(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> bool:
    """Whether the same values were read."""
    return left.keys() == right.keys() and all(map(same_bits, left.values(), right.values()))


def _autocast_state() -> list[Any]:
    caches = torch.is_autocast_cache_enabled()
    # To ask whether there is a GPU takes long, and leaves garbage where there is none.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    kinds = ["cpu", *(["cuda"] if uses_cuda else [])]
    return [
        [kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches]
        for kind in kinds
    ]


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (inner, name, buffer)
        for inner in module.modules()
        for name, buffer in inner.named_buffers(recurse=False)
    ]


def _put(module: nn.Module, name: str, buffer: Tensor, then: Tensor) -> None:
    if buffer.shape == then.shape and buffer.dtype == then.dtype:
        # Without a new version: a graph may hold the buffer.
        buffer.data.copy_(then)
    else:
        module._buffers[name] = then.to(buffer.device, copy=True)


def _is_copied(module: nn.Module, buffer: Tensor) -> bool:
    return (module.training or buffer.nbytes <= _SMALL_BYTES) and has_memory(buffer)


def _homes(module: nn.Module) -> list[str]:
    return sorted(map(str, {parameter.device for parameter in module.parameters()}))

"""Copies of networks that compute exactly, on weights as they were rounded, or moved at random.

NOTE [What exact means]

A copy computes in a wider dtype than the candidate: float32 for half precisions, float64 for
float32. Its tensors are converted, and while it runs, functions that are told to return a narrower
dtype return the wide one. The reference's tensors are rounded first to the dtype that the
candidate's tensor of that name has, so that both copies have equal weights unless these differ.

Parameters that are too large to be cloned share the memory of the network. They are converted
whenever a function receives them, so that one at a time takes the memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder.lowlevel import reached
from scio_recorder.tensors import has_memory, is_plain

HALF = frozenset((torch.bfloat16, torch.float16))
_CASTS: Mapping[Any, torch.dtype] = {
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
    Tensor.float: torch.float32,
}
_SEED = 0
_NOTHING = contextlib.nullcontext()

# Returns what stands for a tensor of a copy, of which the original is given.
Convert = Callable[[Tensor], Tensor]


def main_dtype(net: nn.Module) -> torch.dtype:
    """Return the floating dtype of most of a network's numbers.

    Examples
    --------
    >>> main_dtype(nn.Linear(2, 2).half())
    torch.float16
    """
    counts = Counter[torch.dtype]()
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def narrowest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the narrowest floating dtype of some tensors; float64 if there is none."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float64)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a network of a dtype is computed exactly."""
    return torch.float32 if dtype in HALF else torch.float64


def device_type_of(net: nn.Module) -> str:
    """Return the type of device of a network's first tensor."""
    return next((x.device.type for x in [*net.parameters(), *net.buffers()]), "cpu")


def convert(original: nn.Module, twin: nn.Module, new: Convert) -> dict[int, Callable[[], Tensor]]:
    """Convert the floating-point tensors of a copy of a network.

    Parameters
    ----------
    original, twin : torch.nn.Module
        The network and its copy.
    new : callable
        Returns what stands for a tensor of the network, in another dtype or with other values.

    Returns
    -------
    dict
        What makes the others, for `ConvertingMode`: by ``id``, parameters with shared memory.
    """
    of_net = reached([original])
    tensors = (value for key, (value, _) in reached([twin]).items() if key not in of_net)
    own, others = ([*net.parameters(), *net.buffers()] for net in (twin, original))
    originals = {id(tensor): other for tensor, other in zip(own, others, strict=True)}
    later: dict[int, Callable[[], Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and _is_number(tensor):
            source = originals.get(id(tensor), tensor)
            if source is not tensor and source.data_ptr() == tensor.data_ptr():
                later[id(tensor)] = partial(new, source)
            else:
                tensor.data = new(source).detach()
    return later


def _is_number(tensor: Tensor) -> bool:
    is_wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return is_wide and is_plain(tensor) and has_memory(tensor)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype if it holds floating-point numbers."""
    return tensor.to(dtype) if _is_number(tensor) else tensor


def partners(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> dict[int, Tensor]:
    """Return the tensors of other modules that have the name of a tensor, by the ``id`` of each.

    Parameters
    ----------
    pairs : iterable of (Module, Module)
        Paired modules, the innermost first.
    """
    known: dict[int, Tensor] = {}
    for module, other in pairs:
        named = dict([*other.named_parameters(), *other.named_buffers()])
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in named:
                known.setdefault(id(tensor), named[name])
    return known


def rounded(tensor: Tensor, partner: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype of its partner, or else in another one."""
    known = partner is not None and _is_number(partner)
    return tensor.to(partner.dtype if known and partner is not None else dtype)


def moved(
    tensor: Tensor, partner: Tensor | None, dtype: torch.dtype, reference_dtype: torch.dtype
) -> Tensor:
    """Return a tensor in a dtype, moved at random within half a unit in its last place.

    The unit is that of the narrower dtype if the reference's tensor of that name has another. One
    that equals that, once rounded, stays as it is, and so does one that is not narrower than the
    dtype. If none has its name, as in a fused projection, the reference's numbers are taken to be
    these, rounded to its dtype.
    """
    exact, dtypes, as_rounded = tensor.to(dtype), [tensor.dtype], None
    if partner is not None and _is_number(partner):
        as_rounded = partner.detach().to(tensor.device, tensor.dtype)
        dtypes.append(partner.dtype)
    elif reference_dtype.itemsize < tensor.itemsize:
        as_rounded = tensor.to(reference_dtype).to(tensor.dtype)
        dtypes.append(reference_dtype)
    if as_rounded is not None and torch.equal(as_rounded, tensor):
        return exact
    epsilon = max(torch.finfo(kind).eps for kind in dtypes)
    if epsilon <= torch.finfo(dtype).eps:
        return exact
    generator = torch.Generator().manual_seed(_SEED + tensor.numel())
    shift = torch.rand(exact.shape, generator=generator, dtype=torch.float32).sub_(0.5)
    if epsilon > torch.finfo(tensor.dtype).eps:
        # The reference's numbers are rounded to it for sure.
        shift = shift.sign_().div_(2)
    # In place, since weights may be large.
    shift = shift.to(exact.device, dtype).mul_(epsilon)
    exponent = torch.frexp(exact).exponent.sub_(1)
    return shift.ldexp_(exponent).add_(exact)


class ConvertingMode(TorchFunctionMode):
    """Lets all functions receive the parameters of a copy converted.

    Parameters
    ----------
    later : mapping
        What makes them, by the ``id`` of each.
    """

    def __init__(self, later: Mapping[int, Callable[[], Tensor]]) -> None:
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        return func(*map(self._new, args), **{k: self._new(x) for k, x in (kwargs or {}).items()})

    def _new(self, value: Any) -> Any:
        # Recurrent layers give a list of them.
        if type(value) is list:
            return [*map(self._new, value)]
        new = self._later.get(id(value))
        return value if new is None else new()


class ExactMode(TorchFunctionMode):
    """Lets all functions compute in a wide dtype, whatever narrower one they are told.

    Parameters
    ----------
    dtype : torch.dtype
        The wide one.
    device_type : str
        Where the network runs. Autocast is off there.

    Examples
    --------
    >>> with ExactMode(torch.float64, "cpu"):
    ...     torch.ones(1).half().dtype
    torch.float64
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self._dtype, self._device_type = dtype, device_type
        self._narrow = HALF if dtype is torch.float32 else {*HALF, torch.float32}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        if _CASTS.get(func) in self._narrow:
            return args[0].to(self._dtype)
        args = tuple(map(self._wide, args))
        kwargs = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        casts = torch.is_autocast_enabled(self._device_type)
        with torch.autocast(self._device_type, enabled=False) if casts else _NOTHING:
            output = func(*args, **kwargs)
        is_narrow = type(output) is Tensor and output.dtype in self._narrow
        return output.to(self._dtype) if is_narrow else output

    def _wide(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value in self._narrow else value

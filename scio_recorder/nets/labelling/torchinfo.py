"""torchinfo without the cases in which it fails: the only place that imports it."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torchinfo import ModelStatistics as ModelStatistics
from torchinfo import summary as summary
from torchinfo import torchinfo as engine
from torchinfo.enums import Units
from torchinfo.layer_info import LayerInfo

from scio_recorder.layer import describe, shapes_of
from scio_recorder.tensors.private_distributed import FSDP, loaded, sizes_before_fsdp1
from scio_recorder.tensors.structures import map_tensors, tensors

_Function: TypeAlias = Callable[..., Any]
_Replacement: TypeAlias = Callable[[_Function], _Function]

# The patches are process-wide: two at a time would restore each other's.
_LOCK = threading.RLock()

_UNITS = re.compile(r"(?<=^Total mult-adds )\(Units\.(\w+)\)", re.MULTILINE)
_TIED = "(tied)"


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    """Make torchinfo accept any input, output and module inside the block.

    Sizes that it can't determine are left empty, and its global cache is restored.

    Examples
    --------
    >>> with forgiving():
    ...     LayerInfo.calculate_size(object(), None)
    ([], 0)
    """
    with _LOCK, contextlib.ExitStack() as stack:
        stack.callback(_restore_cache, dict(engine._cached_forward_pass))
        for (owner, name), replacement in _REPLACEMENTS.items():
            original = vars(owner)[name]
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _replaced(original, replacement))
        yield


class Statistics(ModelStatistics):
    """torchinfo's table, in which a parameter counts once, in the first row that has it.

    torchinfo counts a tied weight in each row, and subtracts it as often from the rows around,
    which then have a negative number of parameters of their own. It also misprints units.
    """

    @classmethod
    def of(cls, given: ModelStatistics, own: Collection[int]) -> Statistics:
        """Return torchinfo's table with correct figures, of the modules with given ids."""
        given.__class__ = cls
        assert isinstance(given, cls)
        # A network may copy one of its modules while it runs, hooks included, and call the copy.
        for info in given.summary_list:
            info.children = [child for child in info.children if id(child.module) in own]
        given.summary_list = [info for info in given.summary_list if id(info.module) in own]
        rows = [info for info in given.summary_list if not info.is_recursive]
        leaves = [info for info in rows if info.is_leaf_layer]
        # A parameter counts in the innermost of the rows around it.
        around = [info for info in reversed(rows) if not info.is_leaf_layer]
        counted: dict[int, tuple[Tensor, int]] = {}
        for info in (*leaves, *around):
            own = _parameters(info)
            new = {key: one for key, one in own.items() if key not in counted}
            counted |= new
            count = sum(number for _, number in new.values())
            if not info.is_leaf_layer:
                _say(info, "leftover_params", partial(int, count))
            elif len(new) < len(own):
                _say(info, "num_params_to_str", partial(_tied_count, count))
                _say(info, "params_percent", partial(_tied_percent, count))
        found = counted.values()
        given.total_params = sum(number for _, number in found)
        given.trainable_params = sum(number for one, number in found if one.requires_grad)
        given.total_param_bytes = sum(number * one.element_size() for one, number in found)
        return given

    def __repr__(self) -> str:
        # Since Python 3.11, formatting a member of an enumeration gives its name, no longer its
        # value.
        return _UNITS.sub(lambda found: f"({Units[found[1]].value})", super().__repr__())


def _say(info: LayerInfo, method: str, answer: partial[Any]) -> None:
    """Make a row give another answer. A summary is pickled with its recorder, so no lambdas."""
    setattr(info, method, answer)


def _parameters(info: LayerInfo) -> dict[int, tuple[Tensor, int]]:
    """Return a row's parameters with the numbers of elements that pruning has left."""
    found: dict[int, tuple[Tensor, int]] = {}
    for name, parameter in info.module.named_parameters():
        try:
            count, _ = info.get_param_count(info.module, name, parameter)
        except Exception:
            count = parameter.nelement()
        found[id(parameter)] = parameter, count
    return found


def _tied_count(count: int, reached_max_depth: bool) -> str:
    return f"{count:,}" if count else _TIED


def _tied_percent(count: int, total: int, reached_max_depth: bool) -> str:
    return f"{count / total:>7.2%}" if count else _TIED


def random_inputs(
    input_size: Any, batch_dim: int | None, dtypes: list[torch.dtype], device: torch.device
) -> list[Tensor]:
    """Return the inputs that torchinfo makes of sizes."""
    sizes = engine.get_correct_input_sizes(input_size)
    return engine.get_input_tensor(sizes, batch_dim, dtypes, device)


def point_to(rows: list[LayerInfo], originals: Mapping[int, nn.Module]) -> None:
    """Make rows of a copy's summary refer to the modules of the original.

    Rows count whole parameters, also those of which FSDP1 leaves another shard in each process.

    Parameters
    ----------
    rows : list of LayerInfo
        The rows, whose parents are changed too.
    originals : mapping of int to torch.nn.Module
        The original of each module of the copy, by the ``id`` of the latter.
    """
    # The first one is the net.
    sizes = sizes_before_fsdp1(next(iter(originals.values())))
    pending, seen = list(rows), set()
    while pending:
        info = pending.pop()
        if id(info) in seen or id(info.module) not in originals:
            continue
        seen.add(id(info))
        info.module = originals[id(info.module)]
        info.layer_id = id(info.module)
        if sizes:
            info.num_params = _num_before_fsdp1(info.module, sizes)
        if info.parent_info is not None:
            pending.append(info.parent_info)


def _num_before_fsdp1(module: nn.Module, sizes: dict[int, dict[str, tuple[object, int]]]) -> int:
    counted: dict[object, int] = {}
    flat = loaded(FSDP, "FlatParameter")
    for one in module.modules():
        known = sizes.get(id(one), {})
        counted |= dict(known.values())
        counted |= {
            id(parameter): parameter.nelement()
            for name, parameter in one.named_parameters(recurse=False)
            if name not in known and not isinstance(parameter, flat)
        }
    return sum(counted.values())


def _replaced(original: Any, replacement: _Replacement) -> Any:
    if isinstance(original, staticmethod):
        return staticmethod(replacement(original.__func__))
    return replacement(original)


def _guarded(fallback: _Function) -> _Replacement:
    """Return a decorator: if the function raises, the fallback gives the result."""

    def replacement(original: _Function) -> _Function:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception:
                return fallback(*args, **kwargs)

        return guarded

    return replacement


def _computed_once(name: str) -> _Replacement:
    """Return a decorator that makes a method of a row keep its result.

    torchinfo computes the parameters that a row has beside its descendants by recursion over these,
    which takes a time exponential in the depth, again for every print.
    """

    def replacement(original: _Function) -> _Function:
        def computed_once(info: LayerInfo) -> Any:
            result = original(info)
            _say(info, name, partial(int, result))
            return result

        return computed_once

    return replacement


def _flat(size_of: _Function) -> _Function:
    """Make a size a flat list: torchinfo's own arithmetic fails on nested ones."""

    def flat(inputs: Any, batch_dim: int | None) -> tuple[list[int], int]:
        try:
            size, element_bytes = size_of(inputs, batch_dim)
        except Exception:
            size, element_bytes = _first_size(inputs)
        flat_size = list(engine.flatten(size))
        # A jagged tensor has a dimension without a single length, and no size includes that.
        return flat_size if all(type(n) is int for n in flat_size) else [], element_bytes

    return flat


def _of_any_module(initialise: _Function) -> _Function:
    """Make a row for a module whose children have no truth value.

    A compiled module passes `len` on to its original, which may have none, and a TensorDict of
    parameters refuses the question.
    """

    def initialise_any(info: LayerInfo, name: str, module: nn.Module, *place: Any) -> None:
        try:
            initialise(info, name, module, *place)
        except Exception:
            initialise(info, name, nn.Sequential(nn.Identity()), *place)
            info.module, info.layer_id = module, id(module)
            info.class_name = type(module).__name__

    return initialise_any


def _restore_cache(saved: dict[str, Any]) -> None:
    engine._cached_forward_pass.clear()
    engine._cached_forward_pass.update(saved)


def _first_size(inputs: Any) -> tuple[list[int], int]:
    found = [leaf for leaf in tensors(inputs) if not leaf.is_nested]
    return (list(found[0].size()), found[0].element_size()) if found else ([], 0)


def _plain_counts(info: LayerInfo) -> None:
    parameters = list(info.module.parameters())
    info.num_params = sum(parameter.nelement() for parameter in parameters)
    info.param_bytes = sum(parameter.nbytes for parameter in parameters)
    info.trainable_params = sum(p.nelement() for p in parameters if p.requires_grad)
    info.inner_layers = {}


def _to_device(data: Any, device: torch.device | None) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), data)


def _data_sizes(data: Any) -> Any:
    return shapes_of(describe(data))


def _data_bytes(data: Any) -> int:
    arrays = data if isinstance(data, list | tuple) else [data]
    dense = [leaf for leaf in tensors(data) if leaf.layout is torch.strided and not leaf.is_nested]
    return sum(leaf.nbytes for leaf in dense) + sum(
        array.nbytes for array in arrays if isinstance(array, np.ndarray)
    )


def _none(*args: Any) -> None:
    return None


_REPLACEMENTS: dict[tuple[Any, str], _Replacement] = {
    (LayerInfo, "__init__"): _of_any_module,
    (LayerInfo, "calculate_size"): _flat,
    (LayerInfo, "calculate_num_params"): _guarded(_plain_counts),
    (LayerInfo, "calculate_macs"): _guarded(_none),
    (LayerInfo, "get_kernel_size"): _guarded(_none),
    (LayerInfo, "leftover_params"): _computed_once("leftover_params"),
    (LayerInfo, "leftover_trainable_params"): _computed_once("leftover_trainable_params"),
    (engine, "set_device"): _guarded(_to_device),
    (engine, "get_input_data_sizes"): _guarded(_data_sizes),
    (engine, "get_total_memory_used"): _guarded(_data_bytes),
}

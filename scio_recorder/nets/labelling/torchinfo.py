"""torchinfo's rows, labels and table, for any network: the only place that imports it.

torchinfo runs a network itself, and gives up on many. So only its parts are used: rows here are its
rows, made by hooks of our own as it makes them, and then numbered and printed by it.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torchinfo import ModelStatistics as ModelStatistics
from torchinfo import torchinfo as engine
from torchinfo.enums import ColumnSettings, RowSettings, Units
from torchinfo.formatting import FormattingOptions
from torchinfo.layer_info import LayerInfo

from scio_recorder.interpreter import names_called_by
from scio_recorder.layer import describe, shapes_of
from scio_recorder.nets.hookable import hooked
from scio_recorder.tensors import private
from scio_recorder.tensors.private import FSDP, loaded, sizes_before_fsdp1
from scio_recorder.tensors.properties import is_dense
from scio_recorder.tensors.structures import tensors

_UNITS = re.compile(r"(?<=^Total mult-adds )\(Units\.(\w+)\)", re.MULTILINE)
_TIED = "(tied)"


# -- the name by which a module is called ----------------------------------------------------------
# A module that a network holds under several names does not know by which one it is called. The
# stack of the interpreter shows which module calls it, and the instruction by which it does so
# where it found it. An instruction that calls a variable says nothing.


class CallingName(NamedTuple):
    """The module that calls another one, and the name that it has for that, empty if not shown."""

    around: str
    attribute: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))

    def agrees(self, other: CallingName) -> bool:
        """Whether both may stand for one name."""
        are_shown = self.attribute and other.attribute
        return self.around == other.around and not (are_shown and self != other)


def calling_name(names: Mapping[int, str]) -> CallingName:
    """Return the name under which the innermost running module was called in the network.

    Parameters
    ----------
    names : mapping of int to str
        The names of the network's modules, by ``id``.
    """
    module, caller, around = None, None, None
    for running, frame in private.running_modules():
        module = running if module is None else module
        if running is module:
            # Others may have put code around the call, which stands in between.
            caller = frame
        elif id(running) in names:
            around = running
            break
    shown = [] if caller is None or around is None else names_called_by(caller)
    # A list of its own or a property shows another name than that of the module.
    if _submodule(around, shown) is not module:
        shown = []
    return CallingName(names.get(id(around), ""), ".".join(shown))


def _submodule(around: Any, path: Sequence[str]) -> Any:
    for name in path:
        around = getattr(around, "_modules", {}).get(name)
    return around


# -- rows ------------------------------------------------------------------------------------------


class _Sized(NamedTuple):
    """A tensor, as the ``data`` of something else."""

    data: Tensor


class Row(LayerInfo):
    """A row of torchinfo's table: a call of a module, or a module that was not called.

    torchinfo's own rows fail on some modules, inputs and outputs. What they can't determine is left
    empty here.

    Attributes
    ----------
    call : int
        The number of calls of the module that started before.
    input_shape, output_spec : Any
        Of its inputs and its output, see ``Layer``; None if it did not return.
    completion : int or None
        The number of calls of all modules that returned before; None if it did not return.
    called_as : CallingName or None
        See ``Layer``.
    num_new : int
        The number of parameters that no earlier row has counted.
    """

    call = num_new = 0
    completion: int | None = None
    called_as: CallingName | None = None
    input_shape: Any = None
    output_spec: Any = None
    _is_tied = False

    def __init__(self, name: str, module: nn.Module, depth: int, parent: LayerInfo | None) -> None:
        try:
            super().__init__(name, module, depth, parent)
        except Exception:
            # The size of its kernel is of an unknown kind, or a child has no truth value: a
            # compiled module passes `len` on to its original, which may have none, and a TensorDict
            # of parameters refuses the question.
            super().__init__(name, nn.Identity(), depth, parent)
            self.module, self.layer_id = module, id(module)
            self.class_name = type(module).__name__
            self.is_leaf_layer = not module._modules

    @staticmethod
    def calculate_size(inputs: Any, batch_dim: int | None) -> tuple[list[int], int]:
        """Return a size as a flat list, with which torchinfo can compute, and bytes of elements."""
        sized = inputs
        if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], Tensor):
            # torchinfo reads `data` four times, and of a tensor each time is an operation.
            sized = [_Sized(inputs[0])]
        try:
            size, element_bytes = LayerInfo.calculate_size(sized, batch_dim)
        except Exception:
            leaves = [leaf for leaf in tensors(inputs) if not leaf.is_nested]
            size, element_bytes = (
                ([*leaves[0].size()], leaves[0].element_size()) if leaves else ([], 0)
            )
        flat = list(engine.flatten(size))
        # A jagged tensor has a dimension without a single length, and no size includes that.
        return flat if {*map(type, flat)} <= {int} else [], element_bytes

    def end(self, args: Any, output: Any, batch_dim: int | None) -> None:
        """Note what the call returned."""
        self.input_size, _ = self.calculate_size(args, batch_dim)
        self.output_size, element_bytes = self.calculate_size(output, batch_dim)
        self.output_bytes = element_bytes * math.prod(self.output_size)
        self.executed = True
        with contextlib.suppress(Exception):
            self.calculate_macs()
        self.output_spec = describe(output)

    def count_new(self, counted: dict[int, tuple[Tensor, int]]) -> None:
        """Count the parameters that are not among some, and add them there by ``id``."""
        parameters = {
            id(parameter): (parameter, self.get_param_count(self.module, name, parameter)[0])
            for name, parameter in self.module.named_parameters()
        }
        new = {key: entry for key, entry in parameters.items() if key not in counted}
        counted |= new
        self.num_new = sum(count for _, count in new.values())
        self._is_tied = self.is_leaf_layer and len(new) < len(parameters)

    # torchinfo finds these in a time exponential in the depth.
    def leftover_params(self) -> int:
        """Return the number of parameters that the rows inside have not counted."""
        return self.num_new

    def leftover_trainable_params(self) -> int:
        """Return nothing: `Statistics` counts."""
        return 0

    def num_params_to_str(self, reached_max_depth: bool) -> str:
        """Return the number of parameters as it is shown."""
        if self._is_tied:
            return f"{self.num_new:,}" if self.num_new else _TIED
        return super().num_params_to_str(reached_max_depth)

    def params_percent(self, total_params: int, reached_max_depth: bool, precision: int = 2) -> str:
        """Return the share of all parameters as it is shown."""
        if self._is_tied:
            return f"{self.num_new / total_params:>7.2%}" if self.num_new else _TIED
        return super().params_percent(total_params, reached_max_depth, precision)


class _OpenCall(NamedTuple):
    """A call that has not returned."""

    row: Row
    handled_error: BaseException | None


class CallTrace:
    """Makes the rows of one pass, in the order in which calls start.

    Parameters
    ----------
    net : torch.nn.Module
        The network to which the rows refer.
    twin : torch.nn.Module
        The copy of it that runs inside a block of `watched`, or itself.
    batch_dim : int, optional
        The batch dimension, of length 1 in sizes.

    Examples
    --------
    >>> net = nn.Sequential(nn.ReLU())
    >>> trace = CallTrace(net, net)
    >>> with trace.watched():
    ...     _ = net(torch.ones(2))
    >>> [(row.class_name, row.completion) for row in trace.labelled_rows()]
    [('Sequential', 1), ('ReLU', 0)]
    """

    def __init__(self, net: nn.Module, twin: nn.Module, batch_dim: int | None = None) -> None:
        self._net, self._twin, self._batch_dim = net, twin, batch_dim
        self._rows: list[Any] = []
        self._counts: dict[int, int] = {}
        self._completed = 0
        # For each module of the copy, the calls that have not returned, and errors handled then.
        self._open: dict[int, list[_OpenCall]] = {}
        names = dict(net.named_modules(remove_duplicate=False))
        copies = dict(twin.named_modules(remove_duplicate=False))
        self._originals = {id(module): names[name] for name, module in copies.items()}
        self._names = {id(module): name for name, module in twin.named_modules()}
        counts = Counter(map(id, copies.values()))
        # Modules that are held under several names.
        self._ambiguous = {key for key, count in counts.items() if count > 1}
        # For each module, as the network holds it last: that is how torchinfo shows its calls.
        self._uncalled: dict[int, Row] = {}
        waiting: list[tuple[str, nn.Module, int, Row | None]] = [(type(net).__name__, net, 0, None)]
        while waiting:
            name, module, depth, parent = waiting.pop()
            around = self._uncalled[id(module)] = Row(name, module, depth, parent)
            if isinstance(module, engine.WRAPPER_MODULES):
                # TorchScript takes no hooks.
                self._add(module)
            children = [*module._modules.items()][::-1]
            waiting += [
                (name, child, depth + 1, around) for name, child in children if child is not None
            ]

    def __deepcopy__(self, memo: Any) -> Self:
        # A network may copy one of its modules while it runs, hooks included.
        return self

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Take the calls inside a block."""
        before, after = (partial(_without_modes, hook) for hook in (self._start, self._end))
        return hooked(self._twin, before=before, after=after, always=True)

    def _add(self, module: nn.Module) -> Row:
        held = self._uncalled[id(module)]
        row = Row(held.var_name, module, held.depth, held.parent_info)
        row.calculate_num_params()
        number = self._counts.get(id(module), 0)
        row.call, row.is_recursive = number, number > 0
        self._counts[id(module)] = number + 1
        self._rows.append(row)
        return row

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy that the network makes of a module has no row.
        if id(module) in self._originals:
            row = self._add(self._originals[id(module)])
            row.input_shape = _input_shape(args, kwargs)
            if id(module) in self._ambiguous:
                row.called_as = calling_name(self._names)
            self._open.setdefault(id(module), []).append(_OpenCall(row, sys.exc_info()[1]))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) not in self._originals:
            return
        row, handled_error = self._open[id(module)].pop()
        # A hook that is always called is given None after an exception. A call that the net makes
        # while it handles an exception had that exception from its start.
        if sys.exc_info()[1] is handled_error:
            row.end(args, output, self._batch_dim)
            row.completion = self._completed
            self._completed += 1

    def labelled_rows(self) -> list[Any]:
        """Return the rows as torchinfo numbers them, with those of containers around them."""
        engine.add_missing_container_layers(self._rows)
        engine.set_children_layers(self._rows)
        sizes = sizes_before_fsdp1(self._net)
        for row in self._rows if sizes else ():
            row.num_params = _num_before_fsdp1(row.module, sizes)
        return self._rows


def _without_modes(hook: Callable[..., None], *call: Any) -> None:
    """Call a hook, whose own questions about tensors are not those of the network."""
    with private.no_function_modes():
        hook(*call)


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs:
        return shapes_of(args[0] if len(args) == 1 else args)
    named = shapes_of(kwargs)
    return (*shapes_of(args), named) if args else named


class Statistics(ModelStatistics):
    """torchinfo's table, in which a parameter counts once, in the first row that has it.

    torchinfo counts a tied weight in each row, and subtracts it as often from the rows around,
    which then have a negative number of parameters of their own. It also misprints units.

    Parameters
    ----------
    rows : list of Row
        The rows.
    input_size : Any
        The sizes of the inputs.
    inputs : Any
        The inputs.
    formatting : FormattingOptions
        See `formatting`.
    """

    def __init__(
        self, rows: list[Any], input_size: Any, inputs: Any, formatting: FormattingOptions
    ) -> None:
        first = [row for row in rows if not row.is_recursive]
        leaves = [row for row in first if row.is_leaf_layer]
        # A parameter counts in the innermost of the rows around it.
        around = [row for row in reversed(first) if not row.is_leaf_layer]
        counted: dict[int, tuple[Tensor, int]] = {}
        for row in (*leaves, *around):
            row.count_new(counted)
        dense = [tensor for tensor in tensors(inputs) if is_dense(tensor)]
        super().__init__(rows, input_size, sum(tensor.nbytes for tensor in dense), formatting)
        parameters = counted.values()
        self.total_params = sum(number for _, number in parameters)
        self.trainable_params = sum(number for tensor, number in parameters if tensor.requires_grad)
        self.total_param_bytes = sum(
            number * tensor.element_size() for tensor, number in parameters
        )

    def __repr__(self) -> str:
        # Since Python 3.11, formatting a member of an enumeration gives its name, no longer its
        # value.
        return _UNITS.sub(lambda unit: f"({Units[unit[1]].value})", super().__repr__())


def formatting(keywords: Mapping[str, Any]) -> FormattingOptions:
    """Return how the table is printed, from keywords of ``torchinfo.summary``."""
    columns = tuple(map(ColumnSettings, keywords["col_names"]))
    settings = set(map(RowSettings, keywords["row_settings"]))
    return FormattingOptions(
        keywords["depth"], keywords["verbose"], columns, keywords["col_width"], settings
    )


def random_inputs(
    input_size: Any, batch_dim: int | None, dtypes: list[torch.dtype], device: torch.device
) -> list[Tensor]:
    """Return the inputs that torchinfo makes of sizes."""
    sizes = engine.get_correct_input_sizes(input_size)
    return engine.get_input_tensor(sizes, batch_dim, dtypes, device)


def _num_before_fsdp1(module: nn.Module, sizes: dict[int, dict[str, tuple[object, int]]]) -> int:
    counted: dict[object, int] = {}
    flat = loaded(FSDP, "FlatParameter")
    for part in module.modules():
        known = sizes.get(id(part), {})
        counted |= dict(known.values())
        counted |= {
            id(parameter): parameter.nelement()
            for name, parameter in part.named_parameters(recurse=False)
            if name not in known and not isinstance(parameter, flat)
        }
    return sum(counted.values())

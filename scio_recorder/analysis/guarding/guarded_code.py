"""Examining what the own code of a call is given and makes, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from scio_recorder.analysis.guarding.finite import kinds_made, kinds_of
from scio_recorder.capture.own_code import ObservingMode
from scio_recorder.layer import Layer, Operation, describe
from scio_recorder.nets.operations import calling_line, is_unset


class _Fault(NamedTuple):
    """An operation that gave kinds which it was not given."""

    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name
    output_spec: Any
    line: tuple[str, int, str]
    given: frozenset[str]
    made: frozenset[str]


class GuardedCode(ObservingMode):
    """Finds the operations that make NaNs or infinities in one call of a module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    local : object
        The state of the pass, with the findings about its tensors.
    """

    def __init__(self, module: nn.Module, local: Any) -> None:
        super().__init__()
        self.module = module
        self._local = local
        self._faults: list[_Fault] = []

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[str]:
        """Return the kinds among the inputs, numbers included."""
        # What stands in the place of a result is none of them.
        values = *args, *(value for name, value in kwargs.items() if name != "out")
        return kinds_of(self._local.known.examine_all(values)) | frozenset(_numbers(values))

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Note an operation that has made something."""
        if is_unset(function):
            return
        made = kinds_made(given, kinds_of(self._local.known.examine_all((output,))))
        if made:
            line = calling_line()
            self._faults.append(_Fault(function, index, describe(output), line, given, made))

    def operation(self, layer: Layer, kinds: Collection[str]) -> Operation | None:
        """Return the operation with which some kinds that a layer has made began.

        It is the first that made one of them, or an infinity which that one was given.
        """
        fault = next((one for one in self._faults if one.made & set(kinds)), None)
        if fault is not None and "inf" in fault.given:
            fault = next(one for one in self._faults if one is fault or "inf" in one.made)
        if fault is None:
            return None
        return Operation(layer, fault.function, fault.index, fault.output_spec, fault.line)


def _numbers(values: Any) -> Iterator[str]:
    """Yield the kinds of the numbers among some values and in lists of them."""
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            yield "nan" if math.isnan(value) else "inf"
        elif isinstance(value, tuple | list):
            yield from _numbers(value)

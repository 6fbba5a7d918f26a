"""The entropy of attention, measured while a network trains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from scio_recorder.errors import AttentionError
from scio_recorder.lowlevel import (
    AttentionReader,
    CallWrapper,
    Inputs,
    ObservingMode,
    RunningCode,
    is_rerun,
    run_in_mode,
)

ATTENTION_ENTROPY = "attention_entropy"
_NOTHING = (
    "LayerStatsMonitor saw no attention: choose modules whose forward computes it, such as "
    '"*.attn" or "*.self_attn", uncompiled, with attn_implementation="sdpa" or "eager"'
)


class EntropyMeter:
    """Measures the attention of modules; what several contain counts for the innermost."""

    def __init__(self) -> None:
        self.local = RunningCode()
        self._wrappers: list[CallWrapper] = []
        # By name: the sum of entropies, how many there are, and why one can't be read.
        self._sums: dict[str, tuple[float, int]] = {}
        self._failures: dict[str, AttentionError] = {}

    def observe(self, modules: Mapping[str, nn.Module]) -> None:
        """Stand around the calls of modules."""
        runs = {
            name: partial(run_in_mode, self.local, partial(self._mode, name)) for name in modules
        }
        self._wrappers = [CallWrapper(module, runs[name]) for name, module in modules.items()]
        for wrapper in self._wrappers:
            wrapper.put_inside()

    def leave(self) -> None:
        """Leave the modules alone."""
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers = []

    def _mode(self, name: str) -> _Measuring | None:
        """Return the mode for a call, unless activation checkpointing repeats it."""
        return None if is_rerun() else _Measuring(name, self)

    def measure(self, name: str, reader: AttentionReader, *operation: Any) -> None:
        """Look at an operation of a module; training goes on if its attention can't be read."""
        try:
            if (attention := reader.read(*operation)) is not None:
                entropy = attention.entropy()
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + entropy.sum().item(), count + entropy.numel()
        except AttentionError as error:
            self._failures[name] = error

    def scalars(self) -> dict[str, float]:
        """Return the mean entropies so far, by keys such as ``attention_entropy/NAME``."""
        known = {name: sums for name, sums in self._sums.items() if name not in self._failures}
        return {f"{ATTENTION_ENTROPY}/{name}": total / n for name, (total, n) in known.items()}

    def problems(self) -> list[str]:
        """Return sentences on what could not be measured."""
        failures = self._failures.items()
        found = [f"there is no entropy of attention in {name}: {error}" for name, error in failures]
        return found if self._sums or found else [_NOTHING]

    def clear(self) -> None:
        """Begin the entropies of another step."""
        self._sums.clear()
        self._failures.clear()


class _Measuring(ObservingMode):
    """Reads the attention in the own code of one call of a module."""

    def __init__(self, name: str, meter: EntropyMeter) -> None:
        super().__init__()
        self.is_paused = False
        self._name, self._meter = name, meter
        self._reader = AttentionReader()

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """Return what a function receives."""
        return Inputs(tuple(args), dict(kwargs))

    def after(self, function: str, index: int, given: Inputs, output: Any) -> None:
        """Hand an operation over."""
        self.apart(self._meter.measure, self._name, self._reader, function, given, output)

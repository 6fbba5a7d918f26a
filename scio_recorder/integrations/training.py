"""What the callbacks of trainers share: statistics of layers step by step, and a guard of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from scio_recorder.errors import ArgumentError, AttentionError
from scio_recorder.events import Event, Tracker
from scio_recorder.integrations.tensorboard import check_names
from scio_recorder.lowlevel import (
    AttentionReader,
    CallWrapper,
    Inputs,
    ObservingMode,
    RunningCode,
    RunningStatistics,
    choose_modules,
    is_rerun,
    run_in_mode,
)
from scio_recorder.tensors import booleans, whole

if TYPE_CHECKING:
    from scio_recorder.analysis.guarding.guard import Guard

ATTENTION_ENTROPY = "attention_entropy"
_NO_ATTENTION = (
    "LayerStatsMonitor saw no attention: choose modules whose forward computes it, such as "
    '"*.attn" or "*.self_attn", uncompiled, with attn_implementation="sdpa" or "eager"'
)
_NO_CALLS = (
    "LayerStatsMonitor saw no call of the modules that it observes: they did not run "
    "in this step, or run inside a compiled module, where hooks are not called"
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
        for name, module in modules.items():
            self._wrappers.append(CallWrapper(module, partial(self._run, name)))
            self._wrappers[-1].put_inside()

    def leave(self) -> None:
        """Leave the modules alone."""
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers = []

    def _run(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module, in a mode unless activation checkpointing repeats the call."""
        mode = None if is_rerun() else _Measuring(name, self)
        return run_in_mode(self.local, mode, call, args, kwargs)

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
        if not (self._sums or self._failures):
            return [_NO_ATTENTION]
        failures = self._failures.items()
        return [f"there is no entropy of attention in {name}: {error}" for name, error in failures]


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

    def after(self, function: str, index: int, received: Inputs, output: Any) -> None:
        """Hand an operation over."""
        self.apart(self._meter.measure, self._name, self._reader, function, received, output)


class StepObserver:
    """Observes modules in some steps of a training; they have no hooks in the others.

    Parameters
    ----------
    selectors, every_n_steps, statistics, gradients
        As in ``LayerStatsMonitor``.
    """

    def __init__(
        self,
        selectors: Collection[Any],
        every_n_steps: int | None,
        statistics: Collection[str],
        gradients: bool,
    ) -> None:
        if every_n_steps is not None:
            every_n_steps = whole("every_n_steps", every_n_steps, 1, ArgumentError)
        self.every_n_steps = every_n_steps
        self._selectors = tuple(selectors)
        known = (*RunningStatistics.OF_VALUES, *RunningStatistics.OF_UNITS, ATTENTION_ENTROPY)
        self._statistics = check_names(statistics, known)
        booleans(ArgumentError, gradients=gradients)
        self._gradients = gradients
        self._modules: dict[str, nn.Module] = {}
        self._tracker: Tracker | None = None
        self._begin()

    def choose(self, root: nn.Module) -> None:
        """Choose the modules of a run, so that a wrong selector is noticed before its first step.

        Raises
        ------
        LayerNotFoundError
            A selector matches no module.
        """
        self.end()
        self._modules = choose_modules(root, self._selectors)

    def is_due(self, step: int, usual: int) -> bool:
        """Whether a step, the first of which is 1, is logged; usually every ``usual``-th one is."""
        every = self.every_n_steps or usual
        return every > 0 and step % every == 0

    def observe(self) -> None:
        """Put hooks on the modules."""
        self._tracker = Tracker(self._take)
        for name, module in self._modules.items():
            self._tracker.register(module, name, grad=self._gradients)
        if ATTENTION_ENTROPY in self._statistics:
            self._entropies.observe(self._modules)

    def leave(self) -> bool:
        """Remove the hooks; return whether there were any."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.unregister()
        self._entropies.leave()
        return tracker is not None

    def finish(self, tell: Callable[[str], object]) -> dict[str, float]:
        """Return the statistics of a step, tell what could not be observed, and begin another."""
        # By keys such as ``activations_mean/NAME``.
        scalars = {
            f"{'gradients' if grad else 'activations'}_{statistic}/{name}": value
            for (grad, name), running in self._running.items()
            for statistic, value in running.scalars().items()
            if statistic in self._statistics and not (grad and statistic in running.OF_STATES)
        }
        problems = [] if self._running else [_NO_CALLS]
        if self._running and ATTENTION_ENTROPY in self._statistics:
            problems = self._entropies.problems()
        for problem in problems:
            tell(problem)
        scalars |= self._entropies.scalars()
        self._begin()
        return scalars

    def _begin(self) -> None:
        """Begin the statistics of a step."""
        self._running: dict[tuple[bool, str], RunningStatistics] = {}
        self._entropies = EntropyMeter()

    def end(self) -> None:
        """Leave no trace of a run."""
        self.leave()
        self._begin()
        self._modules = {}

    def _take(self, event: Event) -> None:
        has_units = set(RunningStatistics.OF_UNITS) & set(self._statistics)
        empty = RunningStatistics(event.type.__name__ if has_units else None)
        self._running.setdefault((event.grad, event.name), empty).update(event.value)


class ScalerOfTrainer:
    """Stands for the ``GradScaler`` that a trainer has when it is asked, if it has one then.

    Parameters
    ----------
    owner : object
        What of the trainer has the attribute ``scaler``.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @property
    def _scaler(self) -> Any:
        return getattr(self._owner, "scaler", None)

    def is_enabled(self) -> bool:
        """Whether there is a scaler that scales."""
        return self._scaler is not None and self._scaler.is_enabled()

    def get_scale(self) -> float:
        """Return by what the loss is multiplied."""
        return float(self._scaler.get_scale()) if self.is_enabled() else 1.0


class GuardedTraining:
    """A guard that calls of a trainer begin and end, in place of a ``with`` statement.

    Parameters
    ----------
    rnet : Recorder
        A recorder.
    **options
        The keywords of :meth:`scio_recorder.Recorder.guard`.

    Attributes
    ----------
    guard : Guard or None
        The result so far, None before the first run.

    Raises
    ------
    ArgumentError
        This is no recorder.
    """

    def __init__(self, rnet: Any, **options: Any) -> None:
        if not callable(getattr(rnet, "guard", None)):
            raise ArgumentError(
                f"rnet is a {type(rnet).__name__}: write GuardCallback(Recorder(net, ...))"
            )
        # Refuses keywords that it doesn't know, and makes no block that must be entered.
        rnet.guard.__wrapped__(rnet, **options)
        self.guard: Guard | None = None
        self._rnet, self._options = rnet, options
        # Not every trainer tells of an exception: a block that is dropped ends by itself.
        self._block = ExitStack()

    def begin_guard(self, owner: Any = None) -> None:
        """Begin to guard.

        Parameters
        ----------
        owner : object, optional
            What of the trainer has the attribute ``scaler``.
        """
        options = {"scaler": ScalerOfTrainer(owner)} | self._options
        self.guard = self._block.enter_context(self._rnet.guard(**options))

    def end_guard(self, exception: BaseException | None = None) -> None:
        """End the guard, as a block does that an exception leaves, if there is one.

        Raises
        ------
        FlowError
            The recorder's network was not called.
        """
        if exception is None:
            self._block.close()
        else:
            self._block.__exit__(type(exception), exception, exception.__traceback__)

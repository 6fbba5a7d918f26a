"""Callbacks for the ``Trainer`` of transformers: statistics of layers, and a guard."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scio_recorder.errors import ArgumentError, FlowError
from scio_recorder.integrations.training import GuardedTraining, StepObserver
from scio_recorder.lowlevel import needing, warn

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


with needing("transformers", "the callback"):
    from transformers import TrainerCallback

__all__ = ["GuardCallback", "LayerStatsMonitor"]


class LayerStatsMonitor(TrainerCallback):
    """Log statistics of the outputs of layers, and of the gradients with respect to them.

    At the steps at which the trainer logs, each chosen module is observed, and
    ``activations_mean/NAME``, ``gradients_norm/NAME`` and so on go to ``trainer.log``. So they are
    in ``trainer.state.log_history`` and wherever the trainer reports to: W&B, TensorBoard, MLflow.
    Statistics are over all values that the module returned in that step: of all its calls, of all
    tensors in its outputs, and of all batches whose gradients are accumulated. Between these steps
    the modules have no hooks.

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer, to which the callback is then added.
    *selectors
        The modules: a qualified name in the model or a glob over names (``*`` crosses dots), a
        compiled pattern to be searched in the name, a module type, or a module. Without selectors,
        all modules that have no submodules.
    every_n_steps : int, optional
        Log at every n-th optimizer step instead, whatever the trainer's ``logging_steps``.
    statistics : collection of str
        Some of "mean", "std", "norm" (all three over finite values), "zeros" (the share of values
        that are exactly zero) and "nonfinite" (the number of values that are NaN or infinite).
        Four more are off by default: "max_abs" (the largest absolute value), "dead" (the share
        of units, channels or features, whose values in that step are all equal), "saturated"
        (the share of units with 95 % of their values at a bound of the activation function) and
        "exploding" (the share of units whose largest absolute value is more than 20 times that of
        the median unit, as on pages). The last three are for activations only, and all four for the
        first tensor that a module returns.
        "attention_entropy" is the mean entropy of weights of attention before dropout, in nats,
        over batches, heads and queries (also those of padding), as ``attention_entropy/NAME``, of
        modules whose own code computes attention.
    gradients : bool, default True
        Also log statistics of gradients. Under gradient scaling they are scaled. If batches are
        accumulated, they are gradients of the loss as the trainer divides it.

    Attributes
    ----------
    latest : dict
        The values logged last, by key.

    Raises
    ------
    ArgumentError
        The first argument is no trainer, the trainer doesn't log on steps and ``every_n_steps`` is
        not given, or another argument can't work.
    LayerNotFoundError
        When training starts: a selector matches no module.

    Warns
    -----
    UserWarning
        None of the chosen modules ran in a step, as inside a compiled module. Or no attention was
        seen that was asked for, or its weights don't explain what the kernel returned.

    Notes
    -----
    The callback reads the output of a layer at once, before anything overwrites it: in steps that
    are logged, it waits for the device. NaNs and infinities are counted; they don't stop the
    training. Each process observes its own batches, and the trainer reports those of the first.

    The trainer tells its callbacks nothing of an exception. If one ends a step that is observed,
    the hooks stay until the next training begins, or `close` is called.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> from transformers import Trainer, TrainingArguments
    >>> options = TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True)
    >>> trainer = Trainer(nn.Linear(4, 2), options)
    >>> trainer.add_callback(LayerStatsMonitor(trainer, nn.Linear, statistics=["norm"]))
    """

    def __init__(
        self,
        trainer: Trainer,
        *selectors: Any,
        every_n_steps: int | None = None,
        statistics: Collection[str] = ("mean", "std", "norm", "zeros", "nonfinite"),
        gradients: bool = True,
    ) -> None:
        if not (hasattr(trainer, "log") and hasattr(trainer, "add_callback")):
            raise ArgumentError(
                f"the first argument is a {type(trainer).__name__}: make the trainer first, then "
                "write trainer.add_callback(LayerStatsMonitor(trainer, ...))"
            )
        if every_n_steps is None and trainer.args.logging_strategy != "steps":
            raise ArgumentError(
                'the trainer logs at no step, since its logging_strategy is not "steps": write '
                "LayerStatsMonitor(trainer, ..., every_n_steps=100)"
            )
        self.latest: dict[str, float] = {}
        self._trainer = trainer
        self._observer = StepObserver(selectors, every_n_steps, statistics, gradients)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Find the modules, so that a wrong selector is noticed before the first step.

        Parameters
        ----------
        args : TrainingArguments
            The options of the trainer.
        state : TrainerState
            How far it is.
        control : TrainerControl
            What it does next.
        **others
            The model and others.

        Raises
        ------
        LayerNotFoundError
            A selector matches no module.
        """
        self._observer.choose(others["model"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Observe the modules if this step is logged.

        Parameters
        ----------
        args, state, control, **others : any
            As in `on_train_begin`.
        """
        step = state.global_step + 1
        is_first = self._observer.every_n_steps is None and args.logging_first_step and step == 1
        if is_first or self._observer.is_due(step, int(state.logging_steps)):
            self._observer.observe()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Leave the modules alone, and log.

        Parameters
        ----------
        args, state, control, **others : any
            As in `on_train_begin`.
        """
        if not self._observer.leave():
            return
        self.latest = self._observer.finish(warn)
        # To log takes back what the trainer means to do after this step: log its loss.
        should_log = control.should_log
        self._trainer.log(dict(self.latest))
        control.should_log = should_log

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Leave no trace.

        Parameters
        ----------
        args, state, control, **others : any
            As in `on_train_begin`.
        """
        self.close()

    def close(self) -> None:
        """Leave no trace of a training that an exception has ended."""
        self._observer.end()


class GuardCallback(GuardedTraining, TrainerCallback):
    """Find the layer that makes the first NaN or infinity of a training.

    Parameters
    ----------
    rnet : Recorder
        A recorder of the trainer's model.
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
    NonFiniteError
        During training: a layer has made a NaN or an infinity.

    Notes
    -----
    The trainer itself hides a loss that is not finite: with ``logging_nan_inf_filter``, its
    default, the mean of earlier losses is logged in its place. Evaluations during the training are
    guarded as well. The trainer's own ``GradScaler`` is given to the guard, unless ``scaler=`` says
    otherwise.

    The trainer tells its callbacks nothing of an exception, so the guard goes on after one, until
    the next training begins, or `close` is called. ``with rnet.guard(): trainer.train()`` does
    without a callback, and always ends.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> callback = GuardCallback(Recorder(nn.Linear(4, 2), input_size=(1, 4)))
    >>> callback.guard is None
    True
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begin to guard.

        Parameters
        ----------
        args : TrainingArguments
            The options of the trainer.
        state : TrainerState
            How far it is.
        control : TrainerControl
            What it does next.
        **others
            The model and others.
        """
        self.close()
        self.begin_guard(others.get("optimizer"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the guard.

        Parameters
        ----------
        args, state, control, **others : any
            As in `on_train_begin`.

        Raises
        ------
        FlowError
            The recorder's network was not called.
        """
        self.end_guard()

    def close(self) -> None:
        """End the guard of a training that an exception has ended."""
        # It may have ended before the network's first call.
        with suppress(FlowError):
            self.end_guard()

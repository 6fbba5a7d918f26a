"""A callback for Lightning: statistics of activations and gradients, layer by layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from scio_recorder.integrations.training import GuardedTraining, StepObserver
from scio_recorder.lowlevel import needing

with needing("lightning", "the callback"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["GuardCallback", "LayerStatsMonitor"]


class LayerStatsMonitor(Callback):
    """Log statistics of the outputs of layers, and of the gradients with respect to them.

    At the steps at which the trainer logs, each chosen module is observed, and
    ``activations_mean/NAME``, ``gradients_norm/NAME`` and so on go to the trainer's loggers and to
    ``trainer.callback_metrics``. Statistics are over all values that the module returned in that
    step: of all its calls, of all tensors in its outputs, and of all batches whose gradients are
    accumulated. Between these steps the modules have no hooks.

    Parameters
    ----------
    *selectors
        The modules: a qualified name in the LightningModule or a glob over names (``*`` crosses
        dots), a compiled pattern to be searched in the name, a module type, or a module. Without
        selectors, all modules that have no submodules.
    every_n_steps : int, optional
        Log at every n-th optimizer step instead, whatever the trainer's ``log_every_n_steps``.
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
        accumulated, they are gradients of the loss as Lightning divides it.

    Attributes
    ----------
    latest : dict
        The values logged last, by key, with or without a logger.

    Raises
    ------
    ArgumentError
        ``every_n_steps``, ``statistics`` or ``gradients`` has a value that can't work.
    LayerNotFoundError
        When fitting starts: a selector matches no module.

    Warns
    -----
    UserWarning
        None of the chosen modules ran in a step, as inside a compiled module. Or no attention was
        seen that was asked for, or its weights don't explain what the kernel returned.

    Notes
    -----
    The callback reads the output of a layer at once, before anything overwrites it: in steps that
    are logged, it waits for the device. NaNs and infinities are counted; they don't stop the
    training. Each process observes its own batches.

    Examples
    --------
    >>> from torch import nn
    >>> monitor = LayerStatsMonitor(nn.ReLU, "encoder.*", statistics=["mean", "zeros"])
    >>> Trainer(callbacks=[monitor], accelerator="cpu", logger=False).log_every_n_steps
    50
    """

    def __init__(
        self,
        *selectors: Any,
        every_n_steps: int | None = None,
        statistics: Collection[str] = ("mean", "std", "norm", "zeros", "nonfinite"),
        gradients: bool = True,
    ) -> None:
        self.latest: dict[str, float] = {}
        self._observer = StepObserver(selectors, every_n_steps, statistics, gradients)
        self._stepped = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the modules, so that a wrong selector is noticed before the first step.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.

        Raises
        ------
        LayerNotFoundError
            A selector matches no module.
        """
        self._observer.choose(pl_module)
        self._stepped = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Observe the modules if this batch belongs to a step that is logged.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        batch : any
            The batch.
        batch_idx : int
            Its number in the epoch.
        """
        usual: int = getattr(trainer, "log_every_n_steps", 0)  # the trainer sets it untyped
        if self._observer.is_due(_step(trainer) + 1, usual):
            self._observer.observe()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Note that the batches accumulated so far make a step.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        optimizer : torch.optim.Optimizer
            The optimizer that makes the step.
        """
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the modules alone, and log if the step is complete.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        outputs : any
            The return value of the training step.
        batch : any
            The batch.
        batch_idx : int
            Its number in the epoch.
        """
        was_observed = self._observer.leave()
        if self._stepped or not pl_module.automatic_optimization:
            if was_observed:
                self._log(trainer)
            self._stepped = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave no trace of a step that failed.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        exception : BaseException
            The exception.
        """
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        stage : str
            "fit", here.
        """
        self._observer.end()

    def _log(self, trainer: Trainer) -> None:
        self.latest = self._observer.finish(rank_zero_warn)
        trainer.callback_metrics.update(
            {key: torch.tensor(value) for key, value in self.latest.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(self.latest, step=_step(trainer))


class GuardCallback(GuardedTraining, Callback):
    """Find the layer that makes the first NaN or infinity of a training.

    Parameters
    ----------
    rnet : Recorder
        A recorder of the network that the LightningModule trains, or of the module itself.
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
    The trainer's own ``GradScaler`` is given to the guard, unless ``scaler=`` says otherwise:
    under ``precision="16-mixed"`` gradients that overflow are expected, and the steps that are
    skipped for them counted in ``guard.num_skipped_steps``. Validation, test and prediction are
    guarded as well.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.Linear(4, 2)), input_size=(1, 4))
    >>> callback = GuardCallback(rnet, keep_inputs=True)
    >>> trainer = Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    >>> callback.guard is None
    True
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to guard.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        stage : str
            "fit", "validate", "test" or "predict".
        """
        self.begin_guard(trainer.precision_plugin)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave no trace of a run that failed.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        exception : BaseException
            The exception.
        """
        self.end_guard(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the guard.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The model.
        stage : str
            As in `setup`.

        Raises
        ------
        FlowError
            The recorder's network was not called.
        """
        self.end_guard()


def _step(trainer: Trainer) -> int:
    # The axis that Lightning itself uses for values logged on steps; `global_step` counts the steps
    # of all optimizers.
    return trainer.fit_loop.epoch_loop._batches_that_stepped

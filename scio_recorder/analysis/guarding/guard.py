"""What a guard has found."""

from __future__ import annotations

from scio_recorder.analysis.guarding.checks import Action, Checks
from scio_recorder.analysis.guarding.origin import Origin
from scio_recorder.layer import counted

__all__ = ["Action", "Guard", "Origin"]


class Guard:
    """The findings of a guard so far.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> net = nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0))
    >>> with Recorder(net, input_size=(1, 2)).guard(action="record") as guard:
    ...     _ = net(torch.tensor([[1.0, 2.0], [3.0, 3.0]]))
    >>> print(guard)
    layer 1-2 1 (LayerNorm) made 2 NaN of 4 values in what it returned, in pass 0, the first at ...
    >>> guard.origin.layer.name, guard.origin.sample, guard.origin.inputs_finite
    ('1', 1, True)
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    @property
    def origin(self) -> Origin | None:
        """The first call that made a NaN or an infinity; None as long as there is none."""
        return self._checks.origin

    @property
    def num_passes(self) -> int:
        """The number of calls of the network."""
        return self._checks.num_passes

    @property
    def num_passed_on(self) -> int:
        """The passes in which the network only passed on NaNs of its inputs, or of the loss."""
        return self._checks.num_passed_on

    @property
    def num_skipped_steps(self) -> int:
        """The steps that a ``GradScaler`` skipped because gradients of a scaled loss overflowed."""
        return self._checks.scaling.num_skipped_steps

    def __str__(self) -> str:
        if self.origin is not None:
            return str(self.origin)
        said = f"no layer has made a NaN or an infinity in {counted(self.num_passes, 'pass')}"
        if self.num_passed_on:
            said += f"; {self.num_passed_on} only handed on NaNs or infinities"
        if self.num_skipped_steps:
            steps = counted(self.num_skipped_steps, "step")
            said += f"; the scaler of the loss has skipped {steps}"
        return said

    def __repr__(self) -> str:
        return f"Guard({self})"

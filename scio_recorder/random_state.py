"""The state of every global random number generator, to go back to."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["RandomState"]


class RandomState:
    """What the global generators of torch, NumPy and Python were at its construction.

    Examples
    --------
    >>> state = RandomState()
    >>> first = torch.rand(2)
    >>> state.restore()
    >>> torch.equal(torch.rand(2), first)
    True
    """

    __slots__ = ("_cpu", "_cuda", "_mps", "_numpy", "_python")

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()
        # Asking a device that is not in use would initialise it.
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if is_used else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)

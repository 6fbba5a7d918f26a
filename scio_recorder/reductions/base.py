"""What a reduction is."""

from __future__ import annotations

import abc
import copy
from typing import Any, Self

from torch import Tensor


class Reduction(abc.ABC):
    """A running summary of batches; derive from it to write your own.

    One object summarises one layer. ``collect`` makes the others with `fresh`. Keep no reference
    to what `update` is given: the network may overwrite it.

    Examples
    --------
    >>> import torch
    >>> class Count(Reduction):
    ...     def __init__(self): self.count = 0
    ...     def update(self, activation, batch=None): self.count += len(activation)
    ...     def merge(self, other): self.count += other.count
    ...     def compute(self): return self.count
    ...     def reset(self): self.count = 0
    ...     def state_dict(self): return {"count": self.count}
    ...     def load_state_dict(self, state): self.count = state["count"]
    >>> count = Count()
    >>> count.update(torch.zeros(5, 2))
    >>> count.compute()
    5
    """

    @abc.abstractmethod
    def update(self, activation: Tensor, batch: Any = None) -> None:
        """Take in an activation [batch, ...] and the loader's batch that it came from.

        Parameters
        ----------
        activation : torch.Tensor
            The samples of one batch along dimension 0.
        batch : any, optional
            What the loader gave, with labels for ``by`` among it.

        Raises
        ------
        CollectError
            The samples can't be reduced, or are not like those before.
        """

    @abc.abstractmethod
    def merge(self, other: Self) -> None:
        """Take in, in place, what another reduction of the same construction has seen.

        Parameters
        ----------
        other : Reduction
            Of the same class, made with the same arguments; it stays as it is.

        Raises
        ------
        CollectError
            It is of another construction, or saw samples of another shape.
        """

    @abc.abstractmethod
    def compute(self) -> Any:
        """Return the result for all that was seen so far."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all that was seen."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state: only tensors, numbers, strings, lists and dicts with string keys."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that a reduction of the same construction returned.

        Parameters
        ----------
        state : dict
            What its `state_dict` returned; another construction's is an error.
        """

    @property
    def reads_batch(self) -> bool:
        """Whether `update` looks at the loader's batch; one of your own may."""
        return True

    def overall(self, result: Any) -> dict[str, float]:
        """Say what a result tells of all values together, for tables and pages.

        Parameters
        ----------
        result : any
            What `compute` returned.

        Returns
        -------
        dict
            Some of "mean", "std", "low" and "high"; none by default.
        """
        return {}

    def fresh(self) -> Self:
        """Return a reduction of the same construction that has seen nothing."""
        twin = copy.deepcopy(self)
        twin.reset()
        return twin

"""The state of every global random number generator, to go back to."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MERSENNE_WORDS = 624


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
        self._python: Any = random.getstate()
        # Asking a device that is not in use would initialise it.
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if is_used else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self._cpu)
        if self._numpy is not None:
            np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)

    def share(self, other: RandomState) -> None:
        """Take over from another state what is the same in it, so that it is in memory once.

        Parameters
        ----------
        other : RandomState
            As a rule the one before: most generators stand still.
        """
        if torch.equal(self._cpu, other._cpu):
            self._cpu = other._cpu
        if _plain(self._numpy) == _plain(other._numpy):
            self._numpy = other._numpy
        if self._python == other._python:
            self._python = other._python

    @property
    def tensors(self) -> list[Tensor]:
        """The states that are tensors: torch's."""
        own = [self._cpu, *(self._cuda or ()), self._mps]
        return [state for state in own if state is not None]

    def to_tree(self) -> dict[str, Any]:
        """Return this as dicts, lists, numbers and tensors.

        Returns
        -------
        dict
            NumPy's generator is missing where it is not its default one.
        """
        version, words, gauss = self._python
        return {
            "cpu": self._cpu,
            "numpy": _numpy_tree(self._numpy),
            "python": [version, torch.frombuffer(array("I", words), dtype=torch.uint32), gauss],
            "cuda": self._cuda,
            "mps": self._mps,
        }

    @classmethod
    def from_tree(cls, tree: Any) -> RandomState:
        """Return the state that `to_tree` was asked of.

        Parameters
        ----------
        tree : dict
            What it returned.

        Raises
        ------
        ValueError, TypeError, LookupError
            If it is no such state.

        Examples
        --------
        >>> state = RandomState.from_tree(RandomState().to_tree())
        >>> first = torch.rand(2), np.random.rand(), random.random()
        >>> state.restore()
        >>> torch.equal(torch.rand(2), first[0]), np.random.rand() == first[1]
        (True, True)
        >>> random.random() == first[2]
        True
        """
        state = cls.__new__(cls)
        state._cpu, state._cuda, state._mps = tree["cpu"], tree["cuda"], tree["mps"]
        state._numpy = None if tree["numpy"] is None else _numpy_state(*tree["numpy"])
        version, words, gauss = tree["python"]
        state._python = version, tuple(words.tolist()), gauss
        for tensor in (state._cpu, words, *(state._cuda or ())):
            if not isinstance(tensor, Tensor):
                raise TypeError("the state of a random number generator is no tensor")
        return state


def _plain(state: Any) -> Any:
    """Return NumPy's state as something that compares with one word."""
    if not isinstance(state, tuple):
        return id(state)
    name, words, *rest = state
    return name, words.tobytes(), *rest


def _numpy_tree(state: Any) -> Any:
    if not isinstance(state, tuple) or state[0] != "MT19937":
        return None
    _, words, position, has_gauss, gauss = state
    return [torch.from_numpy(words), int(position), int(has_gauss), float(gauss)]


def _numpy_state(words: Tensor, position: int, has_gauss: int, gauss: float) -> Any:
    # NumPy does not check these, and reads past the end of its words.
    if not (0 <= position <= _MERSENNE_WORDS and words.shape == (_MERSENNE_WORDS,)):
        raise ValueError("the state of a random number generator is out of bounds")
    return "MT19937", words.numpy().astype(np.uint32), position, has_gauss, gauss

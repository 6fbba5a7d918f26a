"""The global generators of random numbers: noting and restoring their states."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# NumPy reads past the end of its words if the position says so.
_MERSENNE_WORDS = 624


def random_state() -> dict[str, Any]:
    """Return the state of every global random number generator, as plain values and tensors.

    Returns
    -------
    dict
        The states of torch, NumPy and Python, for :func:`restore_random`.

    Examples
    --------
    >>> state = random_state()
    >>> first = torch.rand(2), np.random.rand(), random.random()
    >>> restore_random(state)
    >>> torch.equal(torch.rand(2), first[0]), np.random.rand() == first[1]
    (True, True)
    >>> random.random() == first[2]
    True
    """
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].view(np.int32))
    version, words, gauss = random.getstate()
    # Words are signed: tensors of unsigned ones can't be pickled.
    # Asking a device that is not in use would initialise it.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    return {
        "cpu": torch.get_rng_state(),
        "numpy": numpy,
        "python": [version, torch.frombuffer(array("I", words), dtype=torch.int32), gauss],
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else None,
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore the generators; an invalid state raises before its generator changes."""
    numpy, (version, words, gauss) = state["numpy"], state["python"]
    if numpy["bit_generator"] == "MT19937":
        if not 0 <= numpy["state"]["pos"] <= _MERSENNE_WORDS:
            raise ValueError("the state of a random number generator is out of bounds")
        key = numpy["state"]["key"].numpy().view(np.uint32)
        numpy = {**numpy, "state": {**numpy["state"], "key": key}}
    torch.set_rng_state(state["cpu"])
    np.random.set_state(numpy)
    random.setstate((version, tuple(words.numpy().view(np.uint32).tolist()), gauss))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every global random number generator after the block.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with preserved_rng():
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    before = random_state()
    try:
        yield
    finally:
        restore_random(before)

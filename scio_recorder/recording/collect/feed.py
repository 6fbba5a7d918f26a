"""The loader's side: which batches are taken, what the net is given, how many samples there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.stores.disk_format.ids import Ids, to_ids
from scio_recorder.tensors.arguments import whole
from scio_recorder.tensors.structures import tensors

__all__ = ["Feed", "NetInputs"]

_WRITE = (
    "a batch must be a tensor, a tuple or list that begins with one, or a mapping of keywords: "
    "write to_inputs=lambda batch: ... to say what the net is given"
)


class NetInputs(NamedTuple):
    """What the net is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Feed:
    """The batches of one ``collect``.

    Parameters
    ----------
    batches : iterable
        The loader.
    every : int
        Take every n-th batch, the first included.
    max_batches : int or None
        Stop after so many taken ones.
    to_inputs, sample_ids : callable or None
        As given to ``collect``.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        every: int,
        max_batches: int | None,
        to_inputs: Callable[[Any], Any] | None,
        sample_ids: Callable[[Any], Any] | None,
    ) -> None:
        self.every = whole("every", every, 1)
        self._limit = None if max_batches is None else whole("max_batches", max_batches, 1)
        if isinstance(batches, Tensor):
            raise CollectError(
                "batches is a single tensor, whose rows would be taken for batches: write "
                "batches=[x] for one batch, or batches=x.split(32) for several"
            )
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise CollectError(
                f"batches is a {type(batches).__name__}, which can't be iterated over: give a "
                "DataLoader, a list of batches or a generator"
            )
        self._batches = batches
        self._to_inputs = to_inputs
        self._sample_ids = sample_ids

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield every batch and whether it is taken, and not one batch more than needed."""
        remaining = self._limit
        for number, batch in enumerate(self._batches):
            is_taken = number % self.every == 0
            yield batch, is_taken
            if is_taken and remaining is not None:
                remaining -= 1
                if remaining == 0:
                    return

    @property
    def num_batches(self) -> int | None:
        """How many batches will be taken, where the loader knows its length."""
        try:
            length = len(self._batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        taken = -(-length // self.every)
        return taken if self._limit is None else min(taken, self._limit)

    def inputs(self, batch: Any) -> NetInputs:
        """Return what the net is called with for a batch."""
        if self._to_inputs is None:
            return _default_inputs(batch)
        given = self._to_inputs(batch)
        if isinstance(given, Tensor):
            return NetInputs((given,), {})
        if isinstance(given, Mapping):
            return NetInputs((), _keywords(given))
        if isinstance(given, tuple | list):
            return NetInputs(tuple(given), {})
        raise CollectError(
            f"to_inputs returned a {type(given).__name__}: return a tensor, a tuple of positional "
            "inputs or a dict of keyword inputs"
        )

    def ids(self, batch: Any, inputs: NetInputs | None, first: int) -> Ids:
        """Return the ids of a batch's samples, which also say how many there are."""
        if self._sample_ids is None:
            rows = _num_samples(self.inputs(batch) if inputs is None else inputs)
            return range(first, first + rows)
        given = self._sample_ids(batch)
        values = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise CollectError(
                f"sample_ids returned {given!r}: return one integer or string for each sample"
            )
        try:
            return to_ids(list(values))
        except ValueError as error:
            raise CollectError(f"sample_ids: {error}") from None


def _default_inputs(batch: Any) -> NetInputs:
    value = batch
    if isinstance(batch, tuple | list):
        if not batch:
            raise CollectError(f"a batch is an empty {type(batch).__name__}; {_WRITE}")
        value = batch[0]
    if isinstance(value, Tensor):
        return NetInputs((value,), {})
    if isinstance(value, Mapping):
        return NetInputs((), _keywords(value))
    what = type(batch).__name__
    if value is not batch:
        what += f" that begins with a {type(value).__name__}"
    raise CollectError(f"a batch is a {what}; {_WRITE}")


def _keywords(given: Mapping[Any, Any]) -> dict[str, Any]:
    odd = [key for key in given if not isinstance(key, str)]
    if odd:
        raise CollectError(f"the key {odd[0]!r} of a batch can't be a keyword; {_WRITE}")
    return dict(given)


def _num_samples(inputs: NetInputs) -> int:
    first = inputs.args[0] if inputs.args else None
    if isinstance(first, Tensor) and first.ndim > 0:
        # So it mostly is, and there is no need to look through all of them.
        return first.shape[0]
    for tensor in tensors(tuple(inputs)):
        if tensor.ndim > 0:
            return tensor.shape[0]
    raise CollectError(
        "there is no tensor in what the net is given that would tell the number of samples: "
        "write sample_ids=lambda batch: ... with one id for each sample"
    )

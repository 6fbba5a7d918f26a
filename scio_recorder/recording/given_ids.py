"""Given ids, none of which may come twice."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import chain, pairwise
from typing import Any

from scio_recorder.errors import CollectError
from scio_recorder.stores.disk_format.description import complete_ranks, medium_at, read_description
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.stores.disk_format.reader import RunReader


class SeenIds:
    """Refuses an id that comes twice. While ids rise, only the last one must be compared.

    Otherwise all of them are kept in a set.
    """

    def __init__(self) -> None:
        self._rising: list[Ids] = []
        self._others: set[int | str] | None = None

    def add(self, ids: Ids, number: int) -> None:
        """Add the ids of the batch with this number; raise, and add none, if one came before."""
        if not len(ids):
            return
        if self._others is None:
            if self._goes_on_rising(ids):
                self._rising.append(ids)
                return
            self._others = set(chain.from_iterable(self._rising))
        given: Iterable[Any] = ids
        for place, value in enumerate(given):
            if value in self._others:
                self._others.difference_update(ids[:place])
                raise CollectError(
                    f"sample_ids: batch {number} has the id {value!r}, which an earlier sample "
                    "has already: give every sample an id of its own"
                )
            self._others.add(value)

    def remove(self, ids: Ids) -> None:
        """Forget the ids that were added last."""
        if self._others is not None:
            self._others.difference_update(ids)
        elif len(ids):
            self._rising.pop()

    def _goes_on_rising(self, ids: Ids) -> bool:
        before: Any = self._rising[-1][-1:] if self._rising else ()
        try:
            return all(one < other for one, other in pairwise([*before, *ids]))
        except TypeError:
            # Integers and strings are mixed: an error that is reported elsewhere.
            return False


def check_all(path: str) -> None:
    """Refuse samples that two processes have; the last one to end sees those of all.

    Parameters
    ----------
    path : str
        The recording that several processes fill, of which this one has ended.
    """
    with closing(medium_at(path)) as medium:
        if len(complete_ranks(medium)) < read_description(medium).world_size:
            return
    with RunReader(path) as whole:
        twice = whole.sample_ids.repeated()
    if twice is not None:
        raise CollectError(
            f"{path} has two samples with the id {twice!r}, of different processes: give each "
            "process samples of its own, and every sample an id of its own, and collect into "
            "another place"
        )

"""Which row of one recording is which of another: samples by id, tokens and nodes by position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scio_recorder.errors import ComparisonError
from scio_recorder.recording.readable import Readable

# So many ids are named in a message.
_FEW = 5


def paired_rows(first: Readable, second: Readable, names: tuple[str, str]) -> Tensor | None:
    """Return for each row of a recording the same row of another one.

    Parameters
    ----------
    first, second : Readable
        The recordings, of the same samples in any order.
    names : (str, str)
        What to call them in a message.

    Returns
    -------
    Tensor or None
        Numbers of rows of the second, [rows]; None where both have the same rows in one order.

    Raises
    ------
    ComparisonError
        A sample or a row of one is missing in the other, or only one of them has rows.
    """
    if first.has_rows != second.has_rows:
        kinds = ["parts of samples" if one.has_rows else "samples" for one in (first, second)]
        raise ComparisonError(
            f"the rows of {names[0]} are {kinds[0]}, those of {names[1]} are {kinds[1]}: collect "
            "both with the same rows="
        )
    places = paired_ids(first.sample_ids, second.sample_ids, names)
    if not first.has_rows:
        return places
    samples, positions = (first.rows[name][:].cpu() for name in ("sample", "position"))
    others, other_positions = (second.rows[name][:].cpu() for name in ("sample", "position"))
    if places is not None:
        samples = places[samples]
    # One number for each pair of a sample and a position.
    span = 1 + max((int(one.max()) for one in (positions, other_positions) if len(one)), default=0)
    keys, other_keys = samples * span + positions, others * span + other_positions
    if keys.equal(other_keys):
        return None
    _expect_rows(first, keys, other_keys, names)
    _expect_rows(second, other_keys, keys, names[::-1])
    order = torch.empty_like(keys)
    order[keys.argsort()] = other_keys.argsort()
    return order


def paired_ids(
    ids: Sequence[int | str], others: Sequence[int | str], names: tuple[str, str]
) -> Tensor | None:
    """Return the place of each id among the others; None where both are in one order.

    Raises
    ------
    ComparisonError
        One is missing on a side.
    """
    ids, others = list(ids), list(others)
    if ids == others:
        return None
    places = {one: place for place, one in enumerate(others)}
    _expect("samples", [one for one in ids if one not in places], len(ids), names)
    known = set(ids)
    _expect("samples", [one for one in others if one not in known], len(others), names[::-1])
    return torch.tensor([places[one] for one in ids], device="cpu")


def _expect_rows(own: Readable, keys: Tensor, others: Tensor, names: tuple[str, str]) -> None:
    lost = torch.isin(keys, others, invert=True).nonzero().squeeze(1).tolist()
    samples, positions = own.rows["sample"], own.rows["position"]
    pairs = [(own.sample_ids[int(samples[row])], int(positions[row])) for row in lost[:_FEW]]
    _expect("rows", pairs + [()] * (len(lost) - len(pairs)), len(keys), names)


def _expect(kind: str, lost: Sequence[object], total: int, names: tuple[str, str]) -> None:
    """Raise an error that counts and shows what of the first is not in the second."""
    if not lost:
        return
    shown = ", ".join(map(repr, lost[:_FEW])) + ", ..." * (len(lost) > _FEW)
    how_many = f"none of the {total:,}" if len(lost) == total else f"{len(lost):,} of {total:,}"
    verb = "is" if len(lost) == total else "are not"
    raise ComparisonError(
        f"{how_many} {kind} of {names[0]} {verb} in {names[1]}, by id: {shown}. Both have to be "
        "collected from the same data, with the same sample_ids= where these were given"
    )

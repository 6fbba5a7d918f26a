"""The function `compare`: two runs side by side, and where they begin to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from scio_recorder.errors import ComparisonError
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.recording import Recording
from scio_recorder.tensors import private

if TYPE_CHECKING:
    from scio_recorder.analysis.comparing.difference import Difference
    from scio_recorder.analysis.comparing.running import Side
    from scio_recorder.recording.feed import Feed
    from scio_recorder.recording.rows import Rows

ToInputs = Callable[[Any], Any]


def compare(
    reference: Recorder | Recording,
    candidate: Recorder | Recording,
    batches: Iterable[Any] | None = None,
    match: Mapping[str, str] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    *,
    floor: Recorder | Recording | None = None,
    max_batches: int | None = None,
    to_inputs: ToInputs | Sequence[ToInputs] | None = None,
    sample_ids: Callable[[Any], Any] | None = None,
    rows: Rows | None = None,
    progress: bool = True,
) -> Difference:
    """Find the layers in which two runs differ, and the one that makes the difference.

    The layers that the reference records are compared, or all layers if it records none. The
    candidate need not record anything. Networks run under ``no_grad`` in their current mode,
    and start each batch from the same state of random numbers. Afterwards their buffers are as
    before, and random numbers are as one pass over the batches leaves them.

    Parameters
    ----------
    reference, candidate : Recorder or Recording
        Networks that run on the batches, or recordings of samples or of
        :class:`~scio_recorder.reductions.Digest`.
    batches : iterable, optional
        As for ``collect``; needed if a network runs.
    match : mapping, optional
        Names or globs of the reference -> names of the candidate: ``{"layers.*": "h.*"}``, where
        ``*`` stands for the same text on both sides. Other names match themselves.
    rtol, atol : float, default 0
        Numbers are equal within ``atol + rtol * |reference|``. With both 0 they are equal bit for
        bit; other dtypes are compared as numbers. NaNs in the same places are equal.
    floor : Recorder or Recording, optional
        A third run, whose differences from the reference are noise: the reference in another
        precision, or on other hardware. A layer differs only if the candidate clearly exceeds
        the noise.
    max_batches : int, optional
        Stop after this number of batches.
    to_inputs : callable or sequence of callables, optional
        ``batch ->`` inputs of the net, as for ``collect``. Two functions are for the reference and
        for the candidate, if their inputs differ, for example in the device. A floor takes the
        inputs of the candidate, or has a third function.
    sample_ids : callable, optional
        ``batch ->`` one integer or string for each sample. Samples of recordings are looked up by
        these ids. By default samples are numbered from 0 on.
    rows : Tokens or Nodes, optional
        Compare tokens or nodes, without padding, if networks run.
    progress : bool, default True
        Show a progress bar, on a terminal.

    Returns
    -------
    Difference
        ``first`` is the layer that makes the difference, None if nothing differs.

    Raises
    ------
    ComparisonError
        There is no layer in common, samples are missing on one side, or something else can't be
        compared as asked.

    Examples
    --------
    >>> import copy
    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> other = copy.deepcopy(net)
    >>> _ = other[2].bias.data.add_(0.01)
    >>> one, two = Recorder(net, input_size=(1, 4)), Recorder(other, input_size=(1, 4))
    >>> difference = compare(one, two, [torch.rand(5, 4)])
    >>> difference.first.layer.name, difference.first.inputs_equal, difference["1"].max_abs
    ('2', True, 0.0)
    """
    from scio_recorder.analysis.comparing.matching import Match
    from scio_recorder.analysis.comparing.measures import Tolerance
    from scio_recorder.analysis.comparing.running import Sides, compare_sides
    from scio_recorder.recording.rows import rows_or_none

    rows = rows_or_none(rows, ComparisonError)
    feeds = _feeds(batches, max_batches, to_inputs, sample_ids)
    given = {"reference": reference, "candidate": candidate, "floor": floor}
    sides = {
        what: _side(one, what, feed)
        for (what, one), feed in zip(given.items(), feeds, strict=True)
        if what != "floor" or one is not None
    }
    together = Sides(**sides)
    feed = feeds[0] if together.networks else None
    if together.networks and batches is None:
        raise ComparisonError(
            "there are no batches, but a network needs some to run on: write compare(reference, "
            "candidate, batches)"
        )
    for side in together.recordings if together.networks else ():
        side.check_rows(rows is not None)
    return compare_sides(
        together, Match(match), Tolerance(rtol, atol), feed, rows, progress=progress
    )


def _feeds(
    batches: Iterable[Any] | None,
    max_batches: int | None,
    to_inputs: ToInputs | Sequence[ToInputs] | None,
    sample_ids: Callable[[Any], Any] | None,
) -> list[Feed]:
    """Return the feed of each side; the first one counts the samples."""
    from scio_recorder.recording.feed import Feed

    is_several = isinstance(to_inputs, Sequence)
    several: list[Any] = [*to_inputs] if is_several else [to_inputs] * 3  # type: ignore[misc]  # seen
    if len(several) == 2:
        several.append(several[1])
    if len(several) != 3 or not all(one is None or callable(one) for one in several):
        raise ComparisonError(
            f"to_inputs={to_inputs!r}: give one function of the batch, or two of them, for the "
            "reference and for the candidate"
        )
    given = () if batches is None else batches
    return [Feed(given, 1, max_batches, one, sample_ids) for one in several]


def _side(given: Any, what: str, feed: Feed) -> Side:
    from scio_recorder.analysis.comparing.network_side import NetworkSide
    from scio_recorder.analysis.comparing.recording_side import RecordingSide

    if isinstance(given, Recording):
        return RecordingSide(given, what)
    recorder = private.uncompiled(given) if isinstance(given, nn.Module) else given
    if isinstance(recorder, Recorder):
        is_compiled = recorder is not given or private.calls_compiled(recorder)
        if is_compiled and not recorder.recording:
            raise ComparisonError(
                f"the {what} is compiled and records no layer, but only recorded layers of "
                "compiled code can be compared: call record(...) before"
            )
        return NetworkSide(recorder.capture, given if is_compiled else None, feed)
    hint = "give a Recorder or a Recording"
    if isinstance(given, nn.Module):
        hint = f"write Recorder(net, input_size=...) around a network for the {what}"
    elif isinstance(given, str) or hasattr(given, "__fspath__"):
        hint = f"write scio_recorder.open_recording({str(given)!r})"
    raise ComparisonError(f"the {what} is a {type(given).__name__}: {hint}")

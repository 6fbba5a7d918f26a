"""The sides of a comparison: a network that runs on batches, or a recording that is read."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from scio_recorder.analysis.comparing.difference import SampleId
from scio_recorder.analysis.comparing.measures import dense
from scio_recorder.analysis.comparing.parting import Step, traced
from scio_recorder.capture.engine import Capture, fusable, warn_of_other_kernels
from scio_recorder.capture.program import RecordOptions
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import Layer, RowIdx, counted, few
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.refusals import refuse_unkeepable
from scio_recorder.recording import Recording
from scio_recorder.recording.advice import raise_for_batch
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.made_with import made_with
from scio_recorder.recording.rows import BatchRows
from scio_recorder.reductions import Digest
from scio_recorder.reductions.base import several
from scio_recorder.tensors.copies import Copies, gathered, is_plain, twin
from scio_recorder.tensors.digests import sample_digests
from scio_recorder.tensors.structures import map_tensors, taken_apart

_SHOWN, _MOST_POSITIONS = 5, 15


@dataclass
class SampleBlock:
    """Samples that are compared together.

    Parameters
    ----------
    ids : sequence of int or str
        The samples' ids.
    batch : any
        The loader's batch of these samples, if networks run.
    feed : Feed or None
        What made the inputs from it, for one network at least.
    inputs : Inputs or None
        These inputs.
    number : int
        The number of the batch, if networks run.
    rows : BatchRows or None
        Which rows of layers' outputs count, if a row is not a sample and networks run.
    received : BatchRows or None
        Which rows of their inputs count: all but padding.
    positions : sequence of Tensor or None
        The positions of each sample's rows, if a row is not a sample.
    """

    ids: Sequence[SampleId]
    batch: Any = None
    feed: Feed | None = None
    inputs: Inputs | None = None
    number: int = 0
    rows: BatchRows | None = None
    received: BatchRows | None = None
    positions: Sequence[Tensor] | None = None

    def place(self, shape: Sequence[int], flat: int) -> tuple[int, tuple[int, ...]]:
        """Return the sample to which an element of a layer belongs, and its index there.

        Parameters
        ----------
        shape : sequence of int
            The shape of the layer's tensor.
        flat : int
            The element's flat index. If dimension 0 does not count samples, it counts as one of the
            first sample.
        """
        # Torch takes twenty times as long.
        index = tuple(int(part) for part in np.unravel_index(flat, tuple(shape)))
        lengths = [1] * len(self.ids) if self.positions is None else list(map(len, self.positions))
        if not index or shape[0] != sum(lengths):
            return 0, index
        starts = list(accumulate(lengths, initial=0))
        sample = bisect_right(starts, index[0]) - 1
        inside = index[1:] if self.positions is None else (index[0] - starts[sample], *index[1:])
        return sample, inside


class NetworkSide:
    """A network that runs on the batches.

    Parameters
    ----------
    capture : Capture
        The capture of its recorder.
    compiled : callable or None
        The recorder, if it is compiled and runs in place of the net.
    feed : Feed
        Makes the network's inputs from a batch.
    """

    # All outputs of a network can be compared.
    digests: Collection[RowIdx] = ()
    left_out: tuple[str, ...] = ()

    def __init__(self, capture: Capture, compiled: Callable[..., Any] | None, feed: Feed) -> None:
        self.net = capture.net
        self.feed = feed
        self.architecture = capture.program.architecture
        self.made_with: Mapping[str, Any] = made_with(capture.net)
        # The layers that its recorder records, and whether that counts calls.
        self.recorded = capture.program.recording
        self.calls = capture.program.options.calls
        # Whether inputs of layers are known: not those of compiled code.
        self.knows_inputs = compiled is None
        self.is_compiled = compiled is not None
        # All layers that ran; for a compiled recorder, those that it records.
        ran = [row.label for row in self.architecture.values() if row.executed]
        self.labels = tuple(ran) if compiled is None else self.recorded
        self._capture = capture
        self._compiled = compiled
        self._keeps_digests = False
        # As a sink of the capture: what takes the output of each layer.
        self.receivers: dict[RowIdx, Callable[[Any], None]] = {}
        self._block = SampleBlock(())
        # Of the current batch: copies of what layers return and receive, or digests.
        self._outputs: dict[RowIdx, Any] = {}
        self._inputs: dict[RowIdx, Inputs] = {}
        self._copies = Copies()
        self._searched: set[object] = set()

    def has(self, label: RowIdx) -> bool:
        """Whether the output of a layer or of an operation can be known."""
        return label in self.labels or label in self.architecture.operations

    def open(
        self,
        stack: contextlib.ExitStack,
        labels: Iterable[RowIdx],
        options: RecordOptions,
        *,
        keeps_digests: bool,
    ) -> None:
        """Record some layers, or only digests of them, until a stack ends."""
        self._keeps_digests = keeps_digests
        if self._compiled is None:
            chosen = tuple(sorted(set(labels)))
            self._capture = Capture(self.net, self.architecture, chosen, options)
            stack.callback(self._capture.remove)
        recorded = self._capture.recording
        self.receivers = {label: partial(self._receive, label) for label in recorded}
        stack.callback(self._close)

    def _close(self) -> None:
        """Let go of all tensors, and of what would keep this object until garbage is collected."""
        self.receivers, self._outputs, self._inputs = {}, {}, {}

    def load(self, block: SampleBlock) -> None:
        """Run the network on a batch."""
        self._block, self._outputs, self._inputs = block, {}, {}
        self._run(block, self._load)
        # The network's own tensors go.
        self._copies = Copies()

    def _load(self, args: Any, kwargs: Any) -> None:
        if self._compiled is not None:
            self._capture.hand_on_compiled(partial(self._compiled, *args, **kwargs), self)
        else:
            self._capture.run(self.net, args, kwargs, records_outputs=False, sink=self)

    def _run(self, block: SampleBlock, run: Callable[[Any, Any], object]) -> None:
        """Let a function run the network on a batch."""
        given = block.inputs
        if given is None or block.feed is not self.feed:
            given = self.feed.inputs(block.batch)
        # Networks write into tensors, and fill caches.
        args, kwargs = map_tensors(twin, (given.args, given.kwargs))
        try:
            run(args, kwargs)
        except Exception as error:
            raise_for_batch(error, block.number, self.architecture, self.net, given)

    def trace(self, block: SampleBlock, layer: Layer) -> list[Step]:
        """Run the network on a batch again, and return what the own code of a layer does."""
        own = [row for row in fusable(self.architecture, of_functions=True) if row is layer]
        warn_of_other_kernels(own, [layer.module], "compared by operations")
        with traced(self.net, layer, all_calls=self.calls == "any") as steps:
            self._run(block, lambda args, kwargs: self.net(*args, **kwargs))
        return steps

    def output(self, label: RowIdx, as_digests: bool) -> Any:
        """Return a layer's output, or digests of it."""
        if self._keeps_digests:
            return self._outputs[label]
        value = _chosen(self._outputs[label], self._block.rows)
        return digests_of(value) if as_digests else value

    def inputs(self, label: RowIdx) -> Inputs | None:
        """Return a layer's inputs; None if they are not known."""
        inputs: Inputs | None = _chosen(self._inputs.get(label), self._block.received)
        return inputs

    def _receive(self, label: RowIdx, value: Any) -> None:
        """Copy an output at the hook, or take digests of it."""
        refuse_unkeepable(self.architecture[label], taken_apart(value), self._searched)
        if self._keeps_digests:
            self._outputs[label] = digests_of(_chosen(value, self._block.rows))
        else:
            self._outputs[label] = map_tensors(self._copies.of, value)

    def keep_inputs(self, row: Layer, inputs: Inputs) -> Inputs:
        """Copy what a module's forward, or a function, is about to receive."""
        kept: Inputs = map_tensors(self._copies.of, inputs)
        return kept

    def receive_inputs(self, label: RowIdx, kept: Inputs) -> None:
        """Take these copies, once it is known which layer's they are."""
        self._inputs[label] = kept


def _chosen(value: Any, rows: BatchRows | None) -> Any:
    """Return the chosen rows of each tensor that has rows: padding is not compared."""
    if rows is None:
        return value
    number = len(rows.shape)
    return map_tensors(
        lambda leaf: rows.choose(leaf) if tuple(leaf.shape[:number]) == rows.shape else leaf,
        value,
    )


class RecordingSide:
    """A recording that is read sample by sample.

    Parameters
    ----------
    recording : Recording
        Of samples, or of digests.
    what : str
        Which side it is, for messages.
    """

    recorded: tuple[RowIdx, ...] = ()

    def __init__(self, recording: Recording, what: str) -> None:
        self.recording = recording
        self.architecture = recording.architecture
        self.made_with = recording.made_with
        self.what = what
        self.knows_inputs = bool(recording.calls.labels)
        self._seen: set[SampleId] = set()
        # The places of the current samples, and of their rows.
        self._samples: list[int] = []
        self._rows: slice | list[int] = []
        digests = [(label, _digests_of(recording, label)) for label in recording.reductions]
        self.digests = {label: found for label, found in digests if found is not None}
        self.labels = (*recording.stored, *self.digests)
        # Layers without values by sample: reduced layers, and digests of others.
        left_out = (label for label in recording if label not in self.labels)
        self.left_out = tuple(self.architecture[label].name for label in left_out)
        if not self.labels:
            raise ComparisonError(
                f"the {what} holds no layer, or only summaries, which say nothing about single "
                "samples: collect samples, or reduce=scio_recorder.reductions.Digest() without by="
            )

    def has(self, label: RowIdx) -> bool:
        """Whether there is an output of a layer or of an operation."""
        return label in self.labels

    def load(self, block: SampleBlock) -> None:
        """Find the places of some samples; their values are read when they are used."""
        self._samples = [self._places[one] for one in block.ids]
        self._seen.update(block.ids)
        self._rows = self._rows_of(self._samples)
        if self.recording.has_rows:
            lengths = self.recording.rows_of_samples().lengths[self._samples].tolist()
            found = torch.split(self.recording.rows["position"][self._rows].cpu(), lengths)
            # The first side gives the positions that others must have.
            block.positions = block.positions or found
            self._check_positions(block.ids, found, block.positions)

    def output(self, label: RowIdx, as_digests: bool) -> Any:
        """Return a layer's output, or digests of it."""
        if label in self.digests:
            return self.digests[label][self._rows]
        value = self.recording[label][self._rows]
        return digests_of(value) if as_digests else value

    def inputs(self, label: RowIdx) -> Inputs | None:
        """Return a layer's inputs; None if they are not known, as for parts of batches."""
        if label not in self.recording.calls.labels:
            return None
        starts = list(accumulate(self.recording.calls.rows, initial=0))
        batch = bisect_right(starts, self._samples[0]) - 1
        is_whole = self._samples == list(range(starts[batch], starts[batch + 1]))
        return self.recording.inputs[label][batch] if is_whole else None

    def missing(self, ids: Sequence[SampleId]) -> list[SampleId]:
        """Return the ids that the recording lacks."""
        return [one for one in ids if one not in self._places]

    def unseen(self) -> list[SampleId]:
        """Return the ids that were not asked for."""
        return [one for one in self._places if one not in self._seen]

    def _rows_of(self, samples: list[int]) -> slice | list[int]:
        """Return the places of the rows of samples; consecutive ones as a slice, read at once."""
        places = samples
        if self.recording.has_rows:
            rows = self.recording.rows_of_samples()
            every = torch.arange(self.recording.num_rows, device="cpu")
            places = torch.cat([every[:0], *(every[rows[sample]] for sample in samples)]).tolist()
        start = places[0] if places else 0
        run = range(start, start + len(places))
        return slice(run.start, run.stop) if places == list(run) else places

    def _check_positions(
        self, ids: Sequence[SampleId], found: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Refuse samples of which the other side has other rows."""
        for one, own, other in zip(ids, found, others, strict=True):
            if not own.equal(other):
                shown = [few(positions.tolist(), _MOST_POSITIONS) for positions in (own, other)]
                raise ComparisonError(
                    f"sample {one!r} has rows at the positions {shown[0]} in the {self.what}, and "
                    f"{shown[1]} on the other side: give both sides the same rows="
                )

    @cached_property
    def _places(self) -> dict[SampleId, int]:
        """The place of each sample, by its id."""
        ids = self.recording.sample_ids
        places = {one: place for place, one in enumerate(ids)}
        if len(places) < len(ids):
            twice = next(one for place, one in enumerate(ids) if places[one] != place)
            raise ComparisonError(
                f"the {self.what} has {len(ids) - len(places)} repeated ids, such as {twice!r}: "
                "samples can't be paired by them"
            )
        return places


Side: TypeAlias = NetworkSide | RecordingSide


def digests_of(value: Any) -> Any:
    """Return a digest for each sample; others refuse outputs without samples."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return sample_digests(value if is_plain(value) else dense(gathered(value)))


def refuse_missing(keys: Sequence[object], where: str, who: str) -> None:
    """Raise an error that counts the samples, or the rows of samples, that one side lacks."""
    if keys:
        kind = "row" if isinstance(keys[0], tuple) else "sample"
        raise ComparisonError(
            f"{counted(len(keys), kind)} of those that {who} are missing from {where}: "
            f"{few(keys, _SHOWN, repr)}. Samples are paired by id: give the same ones to both, "
            "with sample_ids= if they have ids of their own"
        )


def _digests_of(recording: Recording, label: RowIdx) -> Tensor | None:
    """Return a layer's digests, if it has one for each row."""
    reductions, values = several(recording.reductions[label]), several(recording[label])
    for one, found in zip(reductions, values, strict=False):
        # Those by class have lost the order of samples. A layer's output need not have a row for
        # each sample: embeddings of positions don't.
        if isinstance(one, Digest) and one.keeps_rows and len(found) == recording.num_rows:
            return cast("Tensor", found)
    return None

"""The sides of a comparison: a network that runs on batches, or a recording that is read."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from scio_recorder import Recording
from scio_recorder.analysis.comparing.difference import SampleId
from scio_recorder.analysis.comparing.measures import Tolerance, dense, differ
from scio_recorder.analysis.comparing.pairing import Parts, comparable, parts_of, parts_of_inputs
from scio_recorder.analysis.comparing.parting import Step, traced
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import Layer, RowIdx, counted, few
from scio_recorder.lowlevel import (
    Advice,
    BatchRows,
    Capture,
    Feed,
    Inputs,
    RecordOptions,
    Source,
    made_with,
    raise_for_batch,
    refuse_unkeepable,
    several,
    warn_of_other_kernels,
)
from scio_recorder.reductions import Digest
from scio_recorder.stores.files import bytes_of_row
from scio_recorder.tensors import (
    Apart,
    Version,
    gathered,
    has_memory,
    is_plain,
    taken_apart,
    twin,
    version_of,
)

_SHOWN, _MOST_POSITIONS = 5, 15
# The bytes of a layer that are read at once from each recording.
_BLOCK_BYTES = 1 << 26


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
    inputs : Apart or None
        These inputs, taken apart once for all passes.
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
    inputs: Apart | None = None
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
    what : str
        Which side it is, for messages.
    """

    # All outputs of a network can be compared.
    digests: Collection[RowIdx] = ()
    # The layers of which digests are compared.
    digested: Collection[RowIdx] = ()
    left_out: tuple[str, ...] = ()

    def __init__(
        self, capture: Capture, compiled: Callable[..., Any] | None, feed: Feed, what: str
    ) -> None:
        self.what = what
        self.net = capture.net
        self.feed = feed
        self.architecture = capture.program.architecture
        self.made_with: Mapping[str, Any] = made_with(capture.net)
        # The layers that its recorder records, and whether that counts calls.
        self.recorded = capture.program.recording
        self.calls = capture.program.options.calls
        self.compiled = compiled
        # Whether inputs of layers are known: not those of compiled code.
        self.knows_inputs = compiled is None
        # All layers that ran; for a compiled recorder, those that it records.
        ran = [row.label for row in self.architecture.values() if row.executed]
        self.labels = dict.fromkeys(ran if compiled is None else self.recorded)
        self._capture = capture
        # As a sink of the capture: what takes the output of each layer.
        self.receivers: dict[RowIdx, Callable[[Any], None]] = {}
        self._block = SampleBlock(())
        # The inputs that its own feed has made of a block.
        self._own_inputs: tuple[SampleBlock, Apart] | None = None
        # Of the current batch: copies of what layers return and receive, or digests.
        self._outputs: dict[RowIdx, Parts] = {}
        self._inputs: dict[RowIdx, Inputs] = {}
        self._copies = _Copies()
        # Whether inputs share copies, and whether those of the current batch have been right.
        self.shares_copies = True
        self.copies_are_right = True
        self._searched: set[object] = set()

    def has(self, label: RowIdx) -> bool:
        """Whether the output of a layer or of an operation can be known."""
        return label in self.labels or label in self.architecture.operations

    def open(
        self, stack: contextlib.ExitStack, labels: Iterable[RowIdx], options: RecordOptions
    ) -> None:
        """Record some layers until a stack ends."""
        if self.compiled is None:
            chosen = tuple(sorted(set(labels)))
            self._capture = Capture(self.net, self.architecture, chosen, options)
            stack.callback(self._capture.remove)
        recorded = self._capture.recording
        self.receivers = {label: partial(self._receive, label) for label in recorded}
        stack.callback(self._close)

    def _close(self) -> None:
        """Let go of all tensors, and of what would keep this object until garbage is collected."""
        self.receivers, self._outputs, self._inputs = {}, {}, {}
        self._own_inputs = None

    def load(self, block: SampleBlock) -> None:
        """Run the network on a batch."""
        self._block, self._outputs, self._inputs = block, {}, {}
        self._copies = _Copies(is_shared=self.shares_copies)
        self._run(block, self._load)
        self.copies_are_right = self._copies.are_right()
        # The network's own tensors go.
        self._copies = _Copies()

    def _load(self, args: Any, kwargs: Any) -> None:
        if self.compiled is not None:
            self._capture.hand_on_compiled(partial(self.compiled, *args, **kwargs), self)
        else:
            self._capture.run(self.net, args, kwargs, records_outputs=False, sink=self)

    def _run(self, block: SampleBlock, run: Callable[[Any, Any], object]) -> None:
        """Let a function run the network on a batch."""
        args, kwargs = self.inputs_for(block)
        try:
            run(args, kwargs)
        except Exception as error:
            inputs = self._received(block).value
            raise_for_batch(error, block.number, self.architecture, self.net, inputs)

    def _received(self, block: SampleBlock) -> Apart:
        if block.inputs is not None and block.feed is self.feed:
            return block.inputs
        if self._own_inputs is None or self._own_inputs[0] is not block:
            self.feed.number = block.number
            self._own_inputs = block, taken_apart(self.feed.inputs(block.batch))
        return self._own_inputs[1]

    def inputs_for(self, block: SampleBlock) -> Inputs:
        """Return copies of the network's inputs: networks write into tensors, and fill caches."""
        inputs = self._received(block)
        copies: Inputs = inputs.rebuild([twin(leaf) for leaf in inputs.leaves])
        return copies

    def trace(self, block: SampleBlock, layer: Layer) -> list[Step]:
        """Run the network on a batch again, and return what the own code of a layer does."""
        what = "compared by operations"
        warn_of_other_kernels([layer], [layer.module], what, of_functions=True)
        assert layer.module is not None
        with traced(self.net, layer, layer.module, all_calls=self.calls == "any") as steps:
            self._run(block, lambda args, kwargs: self.net(*args, **kwargs))
        return steps

    def output(self, label: RowIdx) -> Parts:
        """Return a layer's output, or digests of it."""
        return self._outputs[label]

    def inputs(self, label: RowIdx) -> Inputs | None:
        """Return the parts of a layer's inputs; None if they are not known."""
        return self._inputs.get(label)

    def _receive(self, label: RowIdx, value: Any) -> None:
        """Copy an output at the hook, or take digests of it."""
        refuse_unkeepable(self.architecture[label], taken_apart(value), self._searched)
        rows = self._block.rows
        if label in self.digested:
            self._outputs[label] = parts_of(value, lambda leaf: _digests_of(chosen(leaf, rows)))
        else:
            copied = partial(self._copies.of, is_received=False)
            self._outputs[label] = parts_of(value, lambda leaf: chosen(copied(leaf), rows))

    def keep_inputs(self, row: Layer, inputs: Inputs) -> Inputs:
        """Copy what a module's forward, or a function, is about to receive."""
        rows, copied = self._block.received, partial(self._copies.of, is_received=True)
        return parts_of_inputs(inputs, lambda leaf: chosen(copied(leaf), rows))

    def forget_inputs(self) -> None:
        """Let the inputs in this block be unknown."""
        self._inputs = {}

    def receive_inputs(self, label: RowIdx, kept: Inputs) -> None:
        """Take these copies, once it is known which layer's they are."""
        self._inputs[label] = kept


@dataclass(slots=True)
class _Copy:
    """A copy, of a tensor in one version, and whether it stands for a later state as well."""

    tensor: Tensor
    version: Version
    copy: Tensor
    is_shared: bool = False


class _Copies:
    """Copies of what layers receive and return in a pass.

    What a layer returns is copied. What it receives has mostly been copied before: by another
    layer that returned it, or, if it is in a cache, by many that received it. Such a copy is shared
    while PyTorch counts no write to the tensor. At the end of the pass, bits show whether others
    have written to it. Tensors stay alive until then, so that no others take their ids.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._known: dict[int, _Copy] = {}
        # What must be equal.
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def of(self, tensor: Tensor, *, is_received: bool) -> Tensor:
        """Return a copy of a tensor; of one that is received, perhaps one made before."""
        known, version = self._known.get(id(tensor)), version_of(tensor)
        known = known if known is not None and known.version == version else None
        if known is not None and is_received and self._is_shared and version != -1:
            known.is_shared = True
            return known.copy
        copy = twin(tensor)
        if known is not None and known.is_shared:
            self._pairs.append((copy, known.copy))
        self._known[id(tensor)] = _Copy(tensor, version, copy)
        return copy

    def are_right(self) -> bool:
        """Whether nobody has written to tensors, uncounted, whose copies are shared."""
        for known in self._known.values():
            is_there = known.is_shared and has_memory(known.tensor)
            if is_there and known.version == version_of(known.tensor):
                self._pairs.append((known.tensor, known.copy))
        if not self._pairs:
            return True
        pairs = comparable(*map(list, zip(*self._pairs, strict=True)))
        return pairs is not None and not any(differ(pairs, Tolerance()))


def chosen(tensor: Tensor, rows: BatchRows | None) -> Tensor:
    """Return the chosen rows of a tensor that has rows: padding is not compared.

    Parameters
    ----------
    tensor : torch.Tensor
        What a layer receives or returns.
    rows : BatchRows or None
        The rows; None for all.
    """
    if rows is None or tuple(tensor.shape[: len(rows.shape)]) != rows.shape:
        return tensor
    return rows.choose(tensor)


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
    digested: Collection[RowIdx] = ()

    def __init__(self, recording: Recording, what: str) -> None:
        self.recording = recording
        self.architecture = recording.architecture
        # What is kept in results can be pickled, unlike a view.
        self.made_with = dict(recording.made_with)
        self.what = what
        self.knows_inputs = bool(recording.calls.labels)
        self._seen: set[SampleId] = set()
        # The number of each batch of which inputs are kept, by the places of its samples.
        starts = accumulate(recording.calls.rows, initial=0)
        self._batches = {range(*ends): number for number, ends in enumerate(pairwise(starts))}
        # The places of the rows of the current samples, and the batch that these are, if any.
        self._rows: slice | list[int] = []
        self._batch: int | None = None
        digests = [(label, _kept_digests(recording, label)) for label in recording.reductions]
        self.digests = {label: kept for label, kept in digests if kept is not None}
        self.labels = dict.fromkeys([*recording.stored, *self.digests])
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
        samples = [self._places[sample] for sample in block.ids]
        self._seen.update(block.ids)
        self._rows = self._rows_of(samples)
        run = _range_of(samples)
        self._batch = None if run is None else self._batches.get(run)
        if self.recording.has_rows:
            lengths = self.recording.rows_of_samples().lengths[samples].tolist()
            positions = torch.split(self.recording.rows["position"][self._rows].cpu(), lengths)
            # The first side gives the positions that others must have.
            block.positions = block.positions or positions
            self._check_positions(block.ids, positions, block.positions)

    def output(self, label: RowIdx) -> Parts:
        """Return a layer's output, or digests of it."""
        if label in self.digests:
            return parts_of(self.digests[label][self._rows])
        value = self.value(label)
        return parts_of(_digests_of(value) if label in self.digested else value)

    def value(self, label: RowIdx) -> Any:
        """Return a layer's output as it was collected."""
        return self.recording[label][self._rows]

    def inputs(self, label: RowIdx) -> Inputs | None:
        """Return the parts of a layer's inputs; None if they are not known."""
        received = self.received(label)
        return None if received is None else parts_of_inputs(received)

    def received(self, label: RowIdx) -> Inputs | None:
        """Return a layer's inputs; None if they are not known, as for parts of batches."""
        if self._batch is None or label not in self.recording.calls.labels:
            return None
        return self.recording.inputs[label][self._batch]

    def missing(self, ids: Sequence[SampleId]) -> list[SampleId]:
        """Return the ids that the recording lacks."""
        return [sample for sample in ids if sample not in self._places]

    def unseen(self) -> list[SampleId]:
        """Return the ids that were not asked for."""
        return [sample for sample in self._places if sample not in self._seen]

    def _rows_of(self, samples: list[int]) -> slice | list[int]:
        """Return the places of the rows of samples; consecutive ones as a slice, read at once."""
        places = samples
        if self.recording.has_rows:
            rows = map(self.recording.rows_of_samples().__getitem__, samples)
            places = [place for of_sample in rows for place in _places_in(of_sample)]
        run = _range_of(places)
        return places if run is None else slice(run.start, run.stop)

    def _check_positions(
        self, ids: Sequence[SampleId], positions: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Refuse samples of which the other side has other rows."""
        for sample, here, there in zip(ids, positions, others, strict=True):
            if not here.equal(there):
                shown = [few(places.tolist(), _MOST_POSITIONS) for places in (here, there)]
                raise ComparisonError(
                    f"sample {sample!r} has rows at the positions {shown[0]} in the {self.what}, "
                    f"and {shown[1]} on the other side: give both sides the same rows="
                )

    @cached_property
    def _places(self) -> dict[SampleId, int]:
        """The place of each sample, by its id."""
        ids = self.recording.sample_ids
        places = {sample: place for place, sample in enumerate(ids)}
        if len(places) < len(ids):
            twice = next(sample for place, sample in enumerate(ids) if places[sample] != place)
            raise ComparisonError(
                f"the {self.what} has {len(ids) - len(places)} repeated ids, such as {twice!r}: "
                "samples can't be paired by them"
            )
        return places


Side: TypeAlias = NetworkSide | RecordingSide


def _range_of(places: Sequence[int]) -> range | None:
    """Return consecutive places as a range; None for others."""
    start = places[0] if places else 0
    run = range(start, start + len(places))
    return run if places == [*run] else None


def _places_in(rows: slice | Tensor) -> Sequence[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()


def _digests_of(tensor: Tensor) -> Tensor:
    """Return a digest for each sample; others refuse outputs without samples."""
    if not tensor.ndim:
        return tensor
    digest = Digest()
    digest.update(tensor if is_plain(tensor) else dense(gathered(tensor)))
    digests: Tensor = digest.compute()
    return digests


def refuse_missing(keys: Sequence[object], where: str, who: str) -> None:
    """Raise an error that counts the samples, or the rows of samples, that one side lacks."""
    if keys:
        kind = "row" if isinstance(keys[0], tuple) else "sample"
        raise ComparisonError(
            f"{counted(len(keys), kind)} of those that {who} are missing from {where}: "
            f"{few(keys, _SHOWN, repr)}. Samples are paired by id: give the same ones to both, "
            "with sample_ids= if they have ids of their own"
        )


def _kept_digests(recording: Recording, label: RowIdx) -> Tensor | None:
    """Return a layer's digests, if it has one for each row."""
    reductions, values = several(recording.reductions[label]), several(recording[label])
    for reduction, digests in zip(reductions, values, strict=False):
        # Those by class have lost the order of samples. A layer's output need not have a row for
        # each sample: embeddings of positions don't.
        is_digest = isinstance(reduction, Digest) and reduction.keeps_rows
        if is_digest and len(digests) == recording.num_rows:
            return cast("Tensor", digests)
    return None


# -- the samples that are compared together --------------------------------------------------------


def sample_blocks(reference: Side, candidate: Side, feed: Feed) -> Iterator[SampleBlock]:
    """Yield the samples to compare, part by part: batches if a network runs on them.

    Parameters
    ----------
    reference, candidate : Side
        The reference and the candidate.
    feed : Feed
        The batches, and what a row is, if networks run and it is not a sample.
    """
    networks = [side for side in (reference, candidate) if isinstance(side, NetworkSide)]
    recordings = [side for side in (reference, candidate) if isinstance(side, RecordingSide)]
    if networks:
        return _batches(networks[0], recordings, feed)
    return _parts(*recordings)


def _batches(
    net: NetworkSide, recordings: Sequence[RecordingSide], feed: Feed
) -> Iterator[SampleBlock]:
    """Yield the batches, and check that a recording has just their samples."""
    block, missing, has_rows = None, list[SampleId](), dict[str, bool]()
    advice = Advice(net.net, feed.asked)
    root = net.architecture[0, 1]
    for batch, _ in feed:
        inputs = net.feed.inputs(batch)
        source = Source(net.net, batch, inputs, feed.number, root, root.input_shape, has_rows)
        if feed.number == 0:
            advice.look_at(source)
        block = _block(net, source, feed)
        feed.num_samples += len(block.ids)
        missing += [sample for side in recordings for sample in side.missing(block.ids)]
        if not missing:
            yield block
    if block is None:
        raise ComparisonError(
            "batches is empty: there are no batches, but a network needs some to run on: write "
            "compare(reference, candidate, batches)"
        )
    for side in recordings:
        refuse_missing(missing, f"the {side.what}", "the batches have")
        if feed.asked.max_batches is None:
            refuse_missing(side.unseen(), "the batches", f"the {side.what} has")


def _block(net: NetworkSide, source: Source, feed: Feed) -> SampleBlock:
    """Return the samples of a batch."""
    batch, inputs, rows = source.batch, source.inputs, feed.asked.rows
    if rows is None:
        ids, _ = feed.ids(batch, inputs)
        return SampleBlock(ids, batch, net.feed, taken_apart(inputs), feed.number)
    batch_rows = rows.of(source)
    ids, _ = feed.ids(batch, inputs, batch_rows.num_samples)
    lengths = torch.bincount(batch_rows.columns["sample"], minlength=len(ids)).tolist()
    positions = torch.split(batch_rows.columns["position"], lengths)
    received = rows.all_real(source, batch_rows)
    apart = taken_apart(inputs)
    return SampleBlock(ids, batch, net.feed, apart, feed.number, batch_rows, received, positions)


def _parts(reference: RecordingSide, candidate: RecordingSide) -> Iterator[SampleBlock]:
    """Yield the samples of recordings, in parts of bounded size or in the reference's batches."""
    ids = reference.recording.sample_ids
    refuse_missing(candidate.missing(ids), "the candidate", "the reference has")
    alone = reference.missing(candidate.recording.sample_ids)
    refuse_missing(alone, "the reference", "the candidate has")
    start = 0
    for length in _lengths(reference.recording, candidate.recording):
        yield SampleBlock(ids[start : start + length])
        start += length


def _lengths(reference: Recording, candidate: Recording) -> Iterable[int]:
    """Return the number of samples of each part."""
    if reference.calls.labels and candidate.calls.labels:
        # Inputs are kept batch by batch.
        return reference.calls.rows
    both = (reference, candidate)
    layers = [recording[label] for recording in both for label in recording.stored]
    largest = max(map(bytes_of_row, layers), default=8)
    per_sample = largest * max(1, reference.num_rows) / max(1, reference.num_samples)
    step = max(1, int(_BLOCK_BYTES // max(1, per_sample)))
    return (min(step, reference.num_samples - at) for at in range(0, reference.num_samples, step))

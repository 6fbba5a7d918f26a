"""The loader's side: which batches are taken, their inputs and samples, and what may be wrong."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from scio_recorder.errors import (
    CollectError,
    CollectWarning,
    RecorderError,
    raise_as,
    raise_of_caller,
    warn,
)
from scio_recorder.layer import few
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.refusals import cast_for, failing_layer, runs_without_gradients
from scio_recorder.recording.options import CollectOptions, LayerOptions
from scio_recorder.recording.rows import Source, advice_on_lists
from scio_recorder.stores import Store
from scio_recorder.stores.disk_format.reader import Ids, to_ids
from scio_recorder.tensors.arguments import ProcessRank, signature_of, this_process
from scio_recorder.tensors.properties import dtype_name
from scio_recorder.tensors.structures import tensors

_WRITE = (
    "a batch must be a tensor, a tuple or list that begins with one, or a mapping of keywords: "
    "write to_inputs=lambda batch: ... to say what the net is given"
)

_LABELS = {"label", "labels", "target", "targets", "y"}
# Layers that drop at random, including those of other libraries, by words in the names of their
# types.
_DROPPING = re.compile("Dropout|DropPath|StochasticDepth")
_SHOWN = 3
_POSITIONS = "position_ids"

# By default sample 5 of part 17 has the id 17_000_000_000_005, whichever process counts, and
# however many samples other parts have.
IDS_OF_A_PART = 10**12


class ChosenSamples(NamedTuple):
    """The samples of a batch that a sampler has chosen; repeats of others' samples come last.

    Parameters
    ----------
    indices : list
        Their indices in the dataset.
    num_own : int
        The number of those that are no repeats.
    """

    indices: list[Any]
    num_own: int


def gives_whole_dataset(loader: Any) -> bool:
    """Whether nothing about a loader can split a dataset between processes.

    Examples
    --------
    >>> gives_whole_dataset([]), gives_whole_dataset(DataLoader(range(3)))
    (True, True)
    """
    if getattr(loader, "dataset", None) is None:
        return True
    # Classes derived from these may do anything.
    if type(loader) is not DataLoader:
        return False
    batches: Any = loader.batch_sampler
    samples = loader.sampler if batches is None else getattr(batches, "sampler", None)
    is_plain = type(batches) in (BatchSampler, type(None))
    return is_plain and type(samples) in (SequentialSampler, RandomSampler)


@dataclass
class Share:
    """The share of this process in a dataset that a sampler splits; its repeats come last.

    Parameters
    ----------
    place : ProcessRank
        The rank of this process, and the number of processes.
    batches : callable, optional
        Makes an iterator over the samples of each batch; None if samples have no indices.
    num_repeats : int, default 0
        The number of repeats of all processes together.
    settings : dict, optional
        The settings that decide the shares, in which all processes must agree.
    problem : str, optional
        Why the shares can't be known.
    is_even : bool, default True
        Whether all processes have equally many batches.
    """

    place: ProcessRank
    batches: Callable[[], Iterator[ChosenSamples]] | None = None
    num_repeats: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    is_even: bool = True


@dataclass
class Feed:
    """The batches of one ``collect``, and the numbers and ids of their samples.

    Parameters
    ----------
    batches : iterable
        The loader.
    asked : CollectOptions, optional
        Which batches are taken, and how they are read.
    part : int, optional
        The part of a dataset that these are. It may be empty.
    share : Share, optional
        This process's share, if a sampler splits the data between several.
    """

    batches: Iterable[Any]
    asked: CollectOptions = field(default_factory=CollectOptions)
    part: int | None = None
    share: Share | None = None

    def __post_init__(self) -> None:
        # The number of the current batch, and that of samples before it.
        self.number, self.num_samples = 0, 0
        # The samples of the current batch, if a sampler chooses them.
        self._chosen: ChosenSamples | None = None
        self._seen: set[int | str] = set()
        self._check_batches()

    def _check_batches(self) -> None:
        """Refuse what gives no batches, and what would give other ones than were meant."""
        batches, to_inputs = self.batches, self.asked.to_inputs
        if isinstance(batches, Tensor | np.ndarray):
            is_array = isinstance(batches, np.ndarray)
            kind, x = ("array", "torch.from_numpy(x)") if is_array else ("tensor", "x")
            raise CollectError(
                f"batches is a single {kind}, so its rows would count as batches: write "
                f"batches=[{x}] for one batch, or batches={x}.split(32) for several"
            )
        if isinstance(batches, str):
            raise CollectError(
                "batches is a text, whose letters would count as batches: write "
                'batches=[tokenizer(texts, padding=True, return_tensors="pt")]'
            )
        if isinstance(batches, Mapping) and any(
            to_inputs is None or isinstance(value, Tensor) for value in batches.values()
        ):
            raise CollectError(
                "batches is a mapping, so its keys would count as batches: write batches=[x] if "
                "it is one batch, or batches=x.values() if its values are batches"
            )
        # The first dimension of a single sample would count as the number of samples.
        has_samples = isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
        if to_inputs is None and has_samples:
            raise CollectError(
                f"batches is a {type(batches).__name__}, whose items are samples and not batches: "
                "write DataLoader(dataset, batch_size=32), or batch_size=None if they are batches"
            )
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise CollectError(
                f"batches is a {type(batches).__name__}, which can't be iterated over: give a "
                "DataLoader, a list of batches or a generator"
            )

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield each batch that counts and whether it is taken; request no more than needed."""
        every, most = self.asked.every, self.asked.max_batches
        batches = iter(islice(self.batches, None if most is None else (most - 1) * every + 1))
        chosen = None
        if self.share is not None and self.share.batches is not None:
            chosen = self.share.batches()
        for self.number in count():
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RecorderError:
                raise
            except Exception as error:
                raise_of_caller(f"batch {self.number}: the loader", error)
            self._chosen = None if chosen is None else next(chosen, ChosenSamples([], 0))
            is_taken = self.is_taken
            # Only running numbers count the others.
            if is_taken or self.is_numbering:
                yield batch, is_taken

    @property
    def is_taken(self) -> bool:
        """Whether the current batch is one of those to take."""
        nth, remainder = divmod(self.number, self.asked.every)
        return remainder == 0 and (self.asked.max_batches is None or nth < self.asked.max_batches)

    @cached_property
    def num_batches(self) -> int | None:
        """The number of batches that will be taken, if the loader knows its length."""
        length = _length(self.batches)
        if length is None:
            return None
        taken, most = -(-length // self.asked.every), self.asked.max_batches
        return taken if most is None else min(taken, most)

    @cached_property
    def length(self) -> list[int | None]:
        """The expected numbers of batches to take, and of samples to choose from.

        If these are the same in a later run, the number of samples most likely is too.
        """
        taken, batches = self.num_batches, self.batches
        if isinstance(batches, list | tuple):
            firsts = map(_first, batches)
            sizes = [len(x) for x in firsts if isinstance(x, Tensor) and x.ndim]
            samples: int | None = sum(sizes)
        else:
            samples = _length(getattr(batches, "sampler", None))
        return [self.asked.max_batches if taken is None else taken, samples]

    def inputs(self, batch: Any) -> Inputs:
        """Return the net's inputs for a batch."""
        is_ours = self.asked.to_inputs is None
        fed = _first(batch) if is_ours else self._result_of("to_inputs", batch)
        if is_ours and not isinstance(fed, Tensor | Mapping):
            begins = "" if fed is batch else f" that begins with a {type(fed).__name__}"
            what = f"batch {self.number} is a {type(batch).__name__}{begins}"
            raise CollectError(f"{what}{_converted(fed, batch)}")
        inputs = Inputs.of(tuple(fed) if isinstance(fed, list) else fed)
        if inputs is not None:
            for key in inputs.kwargs:
                if not isinstance(key, str):
                    raise CollectError(f"the key {key!r} of a batch can't be a keyword; {_WRITE}")
            return inputs
        raise CollectError(
            f"to_inputs returned a {type(fed).__name__} for batch {self.number}: return a tensor, "
            "a tuple of positional inputs, a dict of keyword inputs, or a pair (tuple, dict)"
        )

    def _result_of(self, name: str, batch: Any) -> Any:
        """Return the result of the caller's function for a batch."""
        try:
            return getattr(self.asked, name)(batch)
        except Exception as error:
            raise_of_caller(f"batch {self.number}: {name}", error)

    def place_settings(self, *, is_shared: bool) -> dict[str, Any]:
        """Return the settings of this process's share, which must agree on resuming.

        If it is unknown whether a loader splits its dataset, a process must not mistake another
        one's recording for its own, nor the samples that it lacks for collected ones.
        """
        if self.share is not None:
            return {"sampler": self.share.settings}
        here = this_process()
        if here.world_size == 1 or is_shared or self.part is not None:
            return {}
        return {"process": f"rank {here.rank} of {here.world_size}"}

    def placed(self, store: Store, *, by_batches: bool) -> Store:
        """Return the store for these batches: this process's own if a sampler splits them.

        Parameters
        ----------
        store : Store
            The requested store.
        by_batches : bool
            Whether something is kept for whole batches.
        """
        if self.share is None:
            return store
        placed = store.placed(self.share.place, self.share.problem)
        if placed is None:
            # Each process has a store of its own, and need not know the shares of others.
            self.share = None
            return store
        if by_batches and self.share.num_repeats:
            raise CollectError(
                "the sampler repeats samples, but inputs are kept by whole batches: "
                "give it drop_last=True, or record without inputs=True"
            )
        return placed

    @property
    def is_numbering(self) -> bool:
        """Whether ids are running numbers, for which all batches must be counted."""
        has_indices = self.share is not None and self.share.batches is not None
        return self.asked.sample_ids is None and not has_indices

    def ids(self, batch: Any, inputs: Inputs, number: int | None = None) -> tuple[Ids, int]:
        """Return the ids of a batch's samples, and their number including repeats at the end.

        Parameters
        ----------
        batch : any
            The loader's batch.
        inputs : Inputs
            The net's inputs for it.
        number : int, optional
            The number of its samples, if known.
        """
        if self.asked.sample_ids is not None:
            all_ids = self._given_ids(batch, number)
        else:
            number = len(counting_tensor(inputs)) if number is None else number
            first = self.num_samples + (self.part or 0) * IDS_OF_A_PART
            if self._chosen is None:
                return range(first, first + number), number
            all_ids = self._chosen.indices
        num_own = self._num_own(len(all_ids) if number is None else number)
        try:
            ids = to_ids(all_ids[:num_own])
        except ValueError as error:
            raise CollectError(f"sample_ids of batch {self.number}: {error}") from None
        each: Iterable[Any] = ids
        for place, value in enumerate(each):
            if value in self._seen:
                self._seen.difference_update(ids[:place])
                raise CollectError(
                    f"sample_ids: batch {self.number} has the id {value!r}, which an earlier "
                    "sample has already: give every sample an id of its own"
                )
            self._seen.add(value)
        return ids, len(all_ids)

    def _num_own(self, number: int) -> int:
        """Return how many of a batch's samples, from the first on, are no repeats of a sampler."""
        if self._chosen is None:
            return number
        chosen, num_own = len(self._chosen.indices), self._chosen.num_own
        if number != chosen and (self.asked.sample_ids is None or 0 < num_own < chosen):
            raise CollectError(
                f"the sampler chose {chosen} samples for batch {self.number}, of which it repeats "
                f"{chosen - num_own}, but the batch has {number}: write sample_ids=lambda batch: "
                "... with one id for each, or give the sampler drop_last=True"
            )
        return number if num_own == chosen else num_own

    def _given_ids(self, batch: Any, number: int | None) -> list[Any]:
        result = self._result_of("sample_ids", batch)
        values = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise CollectError(
                f"sample_ids returned {result!r} for batch {self.number}: return one integer or "
                "string for each sample"
            )
        ids = list(values)
        if number is not None and len(ids) != number:
            raise CollectError(
                f"sample_ids returned {len(ids)} ids for batch {self.number}, which has {number} "
                "samples by rows=: return one for each"
            )
        return ids

    def forget(self, ids: Ids) -> None:
        """Let the ids of the latest batch come again, since it has failed."""
        self._seen.difference_update(ids)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:
        # Other libraries' samplers may raise anything, and need no length to be iterated over.
        return None


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def _converted(begin: Any, batch: Any) -> str:
    """Return how to make inputs of what a batch begins with."""
    x = "batch" if begin is batch else "batch[0]"
    if isinstance(begin, np.ndarray):
        return f": write to_inputs=lambda batch: torch.from_numpy({x})"
    texts = begin if isinstance(begin, list | tuple) else [begin]
    if not texts or not all(isinstance(text, str) for text in texts):
        return f"; {_WRITE}"
    # A list of texts begins with one.
    x = "batch" if isinstance(begin, str) else x
    return (
        ": texts must be tokenized, so write to_inputs=lambda batch: "
        f'tokenizer({x}, padding=True, return_tensors="pt")'
    )


def counting_tensor(inputs: Inputs) -> Tensor:
    """Return the input whose first dimension tells how many samples a batch has."""
    first = inputs.args[0] if inputs.args else None
    if isinstance(first, Tensor) and first.ndim:
        # Usually the first input decides, and the others need not be examined.
        return first
    for tensor in tensors(tuple(inputs)):
        if tensor.ndim:
            return tensor
    named = {f"input {place}": value for place, value in enumerate(inputs.args)} | inputs.kwargs
    raise CollectError(
        advice_on_lists(named)
        or "the net's input has no tensor that shows the number of samples: write "
        "sample_ids=lambda batch: ... with one id for each sample"
    )


class Advice:
    """Notices likely mistakes in feeding a net: it looks once at each batch, before that runs.

    Parameters
    ----------
    net : torch.nn.Module
        The net.
    asked : CollectOptions
        How batches are read.
    layers : LayerOptions, optional
        Those of a dataset that is collected: training mode and padding are likely mistakes as well.
    """

    def __init__(
        self, net: nn.Module, asked: CollectOptions, layers: LayerOptions | None = None
    ) -> None:
        self._is_dataset = layers is not None
        self._counts_samples = asked.rows is None and asked.sample_ids is None
        kinds = {
            _on_second_element: asked.to_inputs is None,
            _on_positions: layers is not None and _takes_positions(net),
            _on_padding: layers is not None and layers.keeps_padding,
        }
        # What was warned of once is not looked for again.
        self._kinds = [kind for kind, is_wanted in kinds.items() if is_wanted]

    def look_at(self, source: Source) -> None:
        """Look at a batch that is about to run.

        Parameters
        ----------
        source : Source
            The batch and the net's inputs.

        Raises
        ------
        CollectError
            It is a single sample, whose features would count as samples.
        """
        is_first = source.number == 0
        if is_first and self._is_dataset:
            _advise_evaluation(source.net)
        for kind in [*self._kinds]:
            if text := kind(source):
                self._kinds.remove(kind)
                warn(text, CollectWarning)
        if is_first and self._counts_samples:
            _refuse_sample(source)


def _advise_evaluation(net: nn.Module) -> None:
    """Warn if a net is in training mode and has layers that behave differently there."""
    if not net.training:
        return
    differing = [
        f"{name or 'the net itself'} ({type(module).__name__})"
        for name, module in net.named_modules()
        if module.training and _differs_in_training(module)
    ]
    if differing:
        warn(
            "the net is in training mode, which changes what some layers do, here "
            f"{few(differing, _SHOWN)}: call net.eval() before collect(...) unless you mean this",
            CollectWarning,
        )


def _on_second_element(source: Source) -> str:
    """Return advice if forward would accept the second element of a batch too.

    Only a tensor that looks like an input counts, as in ``(ids, mask)``, not labels; and mappings
    that look like samples.
    """
    batch = source.batch
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        return ""
    first, second = batch[0], batch[1]
    if all(isinstance(each, Mapping) and each.keys() == first.keys() for each in batch):
        return (
            f"a batch is a {type(batch).__name__} of {len(batch)} mappings with the same keys, and "
            "only the first of them goes into the net: if each is a sample, let the loader join "
            "them (DataLoader does so without collate_fn, and a tokenizer by tokenizer.pad)"
        )
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return ""
    parameter = _second_parameter(source.net)
    if parameter is None or first.shape[:1] != second.shape[:1]:
        return ""
    if parameter.default is not parameter.empty and second.ndim <= 1:
        # One number for each sample counts as a label if the net can do without it.
        return ""
    return (
        "only batch[0] goes into the net, but its forward would accept batch[1] as well, a "
        f"tensor of shape {tuple(second.shape)}: write to_inputs=lambda batch: tuple(batch[:2]) "
        "to give it both, or to_inputs=lambda batch: batch[0] for the first alone"
    )


def _takes_positions(net: nn.Module) -> bool:
    """Whether a net takes ``position_ids``, or hands them on."""
    parameters = signature_of(net.forward).parameters
    takes_any = inspect.Parameter.VAR_KEYWORD in [each.kind for each in parameters.values()]
    return _POSITIONS in parameters or (takes_any and any(map(_takes_positions, net.children())))


def _on_padding(source: Source) -> str:
    """Return advice if positions of padding would be kept."""
    mask = source.mask_on_host
    # Negative numbers are those of a mask that is added to scores, where zero is real.
    if mask is None or not ((mask >= 0).all() and (mask == 0).any()):
        return ""
    return (
        f"the attention_mask of batch {source.number} has zeros, and what the net computes for "
        "padding is kept and enters means like anything else: write rows=Tokens() to keep real "
        "positions only, or leave the others out in transform="
    )


def _on_positions(source: Source) -> str:
    """Return advice if a net counts padding on the left as positions."""
    mask = source.mask_on_host
    # Padding, and behind it something else.
    is_left = mask is not None and bool(((mask[:, :1] == 0) & (mask != 0)).any())
    if source.arguments.get(_POSITIONS) is not None or not is_left:
        return ""
    return (
        "a batch is padded on the left and has no position_ids, so the net counts positions from "
        "the padding on, unless it makes them from the mask itself, and its activations may not "
        "be those of the texts without padding: pad on the right, or give it position_ids, as in "
        "(attention_mask.cumsum(-1) - 1).clamp(min=0)"
    )


def _refuse_sample(source: Source) -> None:
    """Refuse a first batch that is a single sample, whose features would count as samples.

    A sample lacks the first dimension of what the net was labelled with. Many nets run on both, and
    nothing else would tell. If it is only similar to a sample, there is a warning.
    """
    counted, shapes = counting_tensor(source.inputs), source.labelled_shapes
    before = next((shapes[name] for name in shapes if source.tensors[name] is counted), ())
    # A length of 1 counts as one sample, and is one in any case.
    if len(before) != counted.ndim + 1 or len(counted) == 1 != before[1]:
        return
    text = (
        f"batch 0 has shape {tuple(counted.shape)}, but the net was labelled with {before}: if it "
        "is one sample, give batches, as DataLoader(samples, batch_size=32) or "
        f"torch.stack(samples) makes them; if it is {len(counted)} samples, label the net with a "
        "batch of such samples, "
        "or write sample_ids=lambda batch: ... with one id for each"
    )
    if len(counted) == before[1]:
        raise CollectError(text)
    warn(text, CollectWarning)


def _second_parameter(net: nn.Module) -> inspect.Parameter | None:
    """Return the second positional parameter of a net's forward, if it can be another input."""
    parameters = list(signature_of(net.forward).parameters.values())[:2]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < 2 or any(each.kind not in kinds for each in parameters):
        return None
    second = parameters[1]
    is_option = isinstance(second.default, bool | int | float | str) or second.name in _LABELS
    return None if is_option else second


def _differs_in_training(module: nn.Module) -> bool:
    # Without statistics of their own, batch norms do the same in both modes.
    if getattr(module, "track_running_stats", False) or isinstance(module, nn.RReLU):
        return True
    if _DROPPING.search(type(module).__name__):
        rates = (getattr(module, name, None) for name in ("p", "drop_prob"))
        return next((rate for rate in rates if isinstance(rate, int | float)), 1) > 0
    rate = getattr(module, "dropout", 0)
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and rate > 0


def raise_for_batch(
    error: Exception,
    number: int,
    architecture: Architecture,
    net: nn.Module,
    inputs: Inputs,
    batch: Any = None,
) -> NoReturn:
    """Raise an error of a pass again, so that it names the batch that failed, and the layer.

    It can also be caught as the original error.

    Parameters
    ----------
    error : Exception
        The error, which is being handled.
    number : int
        The number of the batch.
    architecture : Architecture
        The architecture of the net.
    net : torch.nn.Module
        The net.
    inputs : Inputs
        The net's inputs.
    batch : Any, optional
        The loader's batch, unless a function has chosen the inputs.
    """
    if isinstance(error, RecorderError):
        error.add_note(f"This happened in batch {number}.")
        raise error
    refused = _refused(net, inputs) if isinstance(error, TypeError) else ""
    text = refused or _failed(error, architecture, net, inputs, batch)
    raise_as(CollectError, error, f"batch {number}: {text}")


def _failed(
    error: Exception, architecture: Architecture, net: nn.Module, inputs: Inputs, batch: Any
) -> str:
    layer = failing_layer(error, architecture)
    text = f"layer {layer or '0-1 (root)'} raised {type(error).__name__}: {error}"
    if getattr(error, "__notes__", ()):
        # The cause is known, and it isn't the batch.
        return text
    shown = [*map(_described, inputs.args)]
    shown += [f"{name}={_described(value)}" for name, value in inputs.kwargs.items()]
    # A list of masks shows the number of samples, so this may come out only in the pass.
    advice = (
        runs_without_gradients(error)
        or advice_on_lists(inputs.kwargs)
        or _advice_on_dtype(error, net, inputs, batch)
        or f"the net was given {', '.join(shown) or 'nothing'}: write to_inputs=lambda batch: ... "
        "if it takes something else"
    )
    return f"{text}; {advice}"


def _advice_on_dtype(error: Exception, net: nn.Module, inputs: Inputs, batch: Any) -> str:
    """Return a sentence on an input with a wrong dtype; empty if the error is about another."""
    advised = cast_for(net, inputs, error)
    if advised is None:
        return ""
    cast, reason = advised
    if isinstance(batch, Mapping):
        name = next(name for name, value in inputs.kwargs.items() if isinstance(value, Tensor))
        converted = f'{{**batch, "{name}": batch["{name}"].{cast}}}'
    else:
        converted = f"{'batch' if isinstance(batch, Tensor) else 'batch[0]'}.{cast}"
    if batch is None:
        return f"{reason}: convert it in to_inputs, as x.{cast} does"
    return f"{reason}: write to_inputs=lambda batch: {converted}"


def _refused(net: nn.Module, inputs: Inputs) -> str:
    """Return a sentence on why a net's forward can't be called like this; empty if it can."""
    signature = signature_of(net.forward)
    unknown = [name for name in inputs.kwargs if name not in signature.parameters]
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as reason:
        if not unknown:
            return (
                f"the net's forward can't be called with it: {reason}. Only the first element of a "
                "tuple goes into the net: write to_inputs=tuple if the net takes all of them, or "
                "to_inputs=lambda batch: ... with inputs that forward takes"
            )
        taken = tuple(name for name in inputs.kwargs if name not in unknown)
        chosen = f"{{name: batch[name] for name in {taken}}}" if taken else f"batch[{unknown[0]!r}]"
        return (
            f"the net's forward takes no {', '.join(map(repr, unknown))}, which a batch has: write "
            f"to_inputs=lambda batch: {chosen}"
        )
    return ""


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {dtype_name(value.dtype)} {list(value.shape)}"
    return f"a {type(value).__name__}"

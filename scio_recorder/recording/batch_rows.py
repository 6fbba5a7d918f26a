"""The rows of one batch: the lines of layers' outputs that are kept, and what each of them is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.layer import DepthIdx, Layer, counted


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The lines of layers' outputs for one batch that are kept, and what each of them is.

    Parameters
    ----------
    dims : tuple of str
        The meanings of a layer's leading dimensions, such as ``("batch", "positions")``.
    shape : tuple of int
        Their lengths.
    num_samples : int
        The number of samples in the batch.
    index : torch.Tensor or None
        The kept lines as flat indices into the leading dimensions, int64 [rows], in the order in
        which they are kept. None if all are kept in their order.
    columns : mapping
        Names -> [rows], the facts about each row: "sample" (counted from 0 in the batch),
        "position" and so on. Empty if a row is a sample.
    lengths : torch.Tensor
        The number of real lines of each sample, kept or not.
    labelled : tuple of int or None
        The lengths of the leading dimensions at labelling, if known.
    are_scalars_doubtful : bool
        Whether a vector that seems to have a number for each line is more likely one of features.
    other_half : str, optional
        The half of the net, "encoder" or "decoder", that may have as many lines of its own.
    told : mapping
        For doubtful layers, whether these dimensions lead (`probing.py`).
    are_given : bool
        Whether ``sample_ids`` told the number of samples.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    num_samples: int
    index: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Tensor = field(default_factory=partial(torch.empty, 0))
    labelled: tuple[int, ...] | None = None
    are_scalars_doubtful: bool = False
    other_half: str | None = None
    told: Mapping[DepthIdx, bool] = field(default_factory=dict)
    are_given: bool = False
    _indices: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    @lru_cache(maxsize=16)  # most batches have the length of the one before
    def of_samples(cls, number: int, are_given: bool = False) -> BatchRows:
        """Return the rows of a batch of this many samples, in which each sample is a row."""
        return cls(("batch",), (number,), number, are_given=are_given)

    @property
    def are_samples(self) -> bool:
        """Whether each row is a sample."""
        return not self.columns

    @property
    def are_whole_batch(self) -> bool:
        """Whether each row is a sample and none is left out."""
        return self.index is None and self.are_samples

    @property
    def unit(self) -> str:
        """The word for one row."""
        return "sample" if self.are_samples else "row"

    @property
    def num_rows(self) -> int:
        """The number of kept rows."""
        return math.prod(self.shape) if self.index is None else len(self.index)

    def of_some(self, first: int, stop: int) -> BatchRows:
        """Return the rows of samples ``first`` to ``stop``; the others still count."""
        if first == 0 and stop >= self.num_samples:
            return self
        samples = self.columns.get("sample")
        if samples is not None:
            # Rows are in the order of their samples.
            first, stop = (int((samples < sample).sum()) for sample in (first, stop))
        lines = torch.arange(math.prod(self.shape), device="cpu")
        index = (lines if self.index is None else self.index)[first:stop]
        columns = {name: column[first:stop] for name, column in self.columns.items()}
        return replace(self, index=index, columns=columns, _indices={})

    def check(self, layer: Layer, values: Tensor, *, is_transformed: bool) -> None:
        """Refuse a layer's values unless their leading dimensions are those of the batch.

        Parameters
        ----------
        layer : Layer
            The layer.
        values : torch.Tensor
            Its output, or the result of a transform.
        is_transformed : bool
            Whether it is the result of a transform, whose author knows the shape.
        """
        shape, number = tuple(values.shape), len(self.shape)
        is_map = number == 2 and shape[2:] == (self.shape[1],) * 2
        fits = shape[:number] == self.shape
        if fits and (is_transformed or not (is_map or self._is_chance(layer))):
            return
        gave = f"layer {layer} gave a tensor of shape {shape}"
        if fits and self.other_half in layer.name.split("."):
            raise CollectError(
                f"{gave}, and belongs to the {self.other_half}, which has as many positions as "
                "mask=, but different ones: record it with the mask of its half"
            )
        if self.are_samples:
            raise CollectError(self._explain_samples(gave, shape))
        if fits and not is_map and shape == layer.output_shape and layer.label not in self.told:
            raise CollectError(
                f"{gave}, which may be one number for each position, or by chance as many "
                f'features as there are positions: in the first case, write transform={{"'
                f'{layer.label}": lambda activation, batch: activation}}; otherwise leave the '
                "layer out"
            )
        wanted = ", ".join([*map(str, self.shape), "..."])
        looks = ""
        if is_map:
            looks = ", which looks like an attention map [batch, heads, positions, positions]"
        elif fits:
            looks = f" (at labelling {layer.output_shape}), which fits by chance"
        raise CollectError(
            f"{gave}{looks}, but rows= needs [{', '.join(self.dims)}, ...], here "
            f'({wanted}): convert it with transform={{"{layer.label}": lambda activation, '
            "batch: ...}, or leave the layer out"
        )

    def _explain_samples(self, gave: str, shape: tuple[int, ...]) -> str:
        """Return why a layer's dimension 0 does not count the samples, and what to write."""
        rows = self.num_samples
        if self.are_given and shape:
            return (
                f"sample_ids gave {counted(rows, 'id')} for {counted(shape[0], 'sample')}: {gave}. "
                "Return one id for each sample; if dimension 0 of the layer does not count "
                "samples, rearrange it with transform="
            )
        return (
            f"{gave} for a batch of {counted(rows, 'sample')}, and dimension 0 must count them, as "
            f"in {(rows, *shape[1:])}: rearrange it with transform=, or give sample_ids= to say "
            "how many samples a batch has"
        )

    def _is_chance(self, layer: Layer) -> bool:
        """Whether dimensions have these lengths by chance, as the layer's name or shape shows."""
        if self.other_half in layer.name.split("."):
            return True
        was, labelled = layer.output_shape, self.labelled
        if layer.label in self.told:
            return not self.told[layer.label]
        if labelled is None or not isinstance(was, tuple):
            return False
        if self._was_shared(layer):
            # The only sample has what all share; otherwise only a run could tell.
            return self.shape[0] > 1
        is_scalar = was == labelled == self.shape
        return was[: len(labelled)] != labelled or (is_scalar and self.are_scalars_doubtful)

    def _was_shared(self, layer: Layer) -> bool:
        """Whether a layer gave all samples the same at labelling, as embeddings of positions do."""
        was, labelled = layer.output_shape, self.labelled
        if labelled is None or self.dims != ("batch", "positions") or not isinstance(was, tuple):
            return False
        return was[:2] == (1, labelled[1]) and labelled[0] > 1

    def may_be_shared(self, layer: Layer) -> bool:
        """Whether only a run can tell if a layer that was shared now has each sample's own."""
        return self._was_shared(layer) and min(self.shape) > 1

    def is_doubtful(self, layer: Layer, *, has_others: bool) -> bool:
        """Whether lengths do not distinguish positions from other dimensions.

        Parameters
        ----------
        layer : Layer
            A layer whose own output is kept.
        has_others : bool
            Whether the net also receives something with positions of its own, such as an image.
        """
        was, labelled = layer.output_shape, self.labelled or self.shape
        if self.dims != ("batch", "positions") or self.shape[1] < 2 or not isinstance(was, tuple):
            return False
        if was[:2] != labelled and not (self.shape[0] == 1 and self._was_shared(layer)):
            return False
        are_squares = self.shape[0] == self.shape[1] and labelled[0] == labelled[1]
        others = has_others or labelled[1] in was[2:] or len(was) == 2
        return are_squares or (others and self.shape[1] == labelled[1])

    def choose(self, values: Tensor) -> Tensor:
        """Return the rows, [rows, ...], of a layer's values."""
        lines = values.flatten(0, len(self.shape) - 1)
        return lines if self.index is None else lines.index_select(0, self._on(lines.device))

    def choose_into(self, place: Tensor, values: Tensor) -> None:
        """Write the rows of a layer's values to their place, if possible without another copy.

        Parameters
        ----------
        place : torch.Tensor
            The target, [rows, ...], on any device and of any dtype.
        values : torch.Tensor
            The layer's values.
        """
        if self.index is None or (place.dtype, place.device) != (values.dtype, values.device):
            place.copy_(self.choose(values), True)  # does not wait for a GPU
            return
        lines = values.flatten(0, len(self.shape) - 1)
        torch.index_select(lines, 0, self._on(lines.device), out=place)

    def labels(self, given: Any) -> list[Any]:
        """Return the label of each row, given those of a batch.

        Parameters
        ----------
        given : tensor, array or sequence
            One for each entry of all leading dimensions, of the first of them, or for each sample.

        Returns
        -------
        list
            One a row.

        Raises
        ------
        CollectError
            Their number is none of these.
        """
        values = given.tolist() if hasattr(given, "tolist") else list(given)
        lengths = {len(value) for value in values if isinstance(value, list | tuple)}
        if lengths and (len(values), *lengths) == self.shape:
            return self._picked(list(chain.from_iterable(values)), 1)
        if not lengths and len(values) == self.shape[0]:
            return self._picked(values, math.prod(self.shape[1:]))
        if not lengths and len(values) == self.num_samples:
            return [values[sample] for sample in self.columns["sample"].tolist()]
        found = (len(values), *lengths)
        raise CollectError(
            f"by= returned labels of shape {found} for a batch of {self.num_samples} samples: "
            f"return one label for each of the {self.shape[0]} entries of dimension 0, or labels "
            f"of shape {self.shape}"
        )

    def _picked(self, values: list[Any], lines: int) -> list[Any]:
        """Return the value of each row's line, if each value stands for this many lines."""
        places = range(math.prod(self.shape)) if self.index is None else self.index.tolist()
        return [values[place // lines] for place in places]

    def _on(self, device: torch.device) -> Tensor:
        assert self.index is not None
        if device not in self._indices:
            self._indices[device] = self.index.to(device, non_blocking=True)
        return self._indices[device]

"""The content of a recording, for showing and saving it and running its calls again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import ArgumentError
from scio_recorder.layer import RowIdx, counted
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs, LayerMapping
from scio_recorder.reductions.base import Reductions, of_each
from scio_recorder.stores import Held
from scio_recorder.stores.disk_format.ids import OnDemand, SampleIds
from scio_recorder.stores.files import DiskTensor, bytes_of_row
from scio_recorder.stores.kept_inputs import Calls
from scio_recorder.tensors.copies import to_array

# Bytes that are read together if all of a layer is read: few enough that the next ones get the same
# memory, and the number of such reads at once from a bucket.
_PART_BYTES, _PART_REQUESTS = 1 << 24, 4


class RowsOfSamples(OnDemand["slice | Tensor"]):
    """The rows of each sample, in the order in which they were collected.

    Parameters
    ----------
    samples : Tensor
        The sample of each row.
    num_samples : int
        The number of samples; some may have no rows.

    Examples
    --------
    >>> rows = RowsOfSamples(torch.tensor([0, 0, 2]), 3)
    >>> rows[0], rows[1], rows.lengths
    (slice(0, 2, None), slice(2, 2, None), tensor([2, 0, 1]))
    >>> RowsOfSamples(torch.tensor([0, 1, 0]), 2)[0]
    tensor([0, 2])
    """

    def __init__(self, samples: Tensor, num_samples: int) -> None:
        owners = samples[:].cpu()
        self.lengths = torch.bincount(owners, minlength=num_samples)
        self._starts = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        # If rows of a sample are not adjacent, each needs its index.
        is_rising = not bool((owners.diff() < 0).any())
        self._order = None if is_rising else owners.argsort(stable=True)

    def __len__(self) -> int:
        return len(self.lengths)

    def _read(self, number: int) -> slice | Tensor:
        start, stop = self._starts[number : number + 2].tolist()
        return slice(start, stop) if self._order is None else self._order[start:stop]


class SampleValues(OnDemand[Tensor]):
    """A layer's values by sample, [rows of the sample, ...] each, read on demand.

    Parameters
    ----------
    values : Tensor
        The values of all rows.
    rows : sequence
        The indices of each sample's rows.
    """

    def __init__(self, values: Tensor, rows: Sequence[slice | Tensor]) -> None:
        self._values = values
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, number: int) -> Tensor:
        return self._values[self._rows[number]]

    def __repr__(self) -> str:
        return f"<{counted(len(self), 'sample')}, {list(self._values.shape)} in all>"


class BatchInputs(OnDemand[Inputs]):
    """The inputs of a layer's forward, ``(args, kwargs)`` for each batch, read on demand.

    Parameters
    ----------
    calls : Calls
        The kept calls.
    label : (int, int)
        The layer.
    """

    def __init__(self, calls: Calls, label: RowIdx) -> None:
        self._calls = calls
        self._label = label

    def __len__(self) -> int:
        return len(self._calls.rows)

    def _read(self, number: int) -> Inputs:
        return self._calls.call(number, self._label).inputs

    def __repr__(self) -> str:
        return f"<inputs of {counted(len(self), 'batch')}>"


class Readable(LayerMapping[Any]):
    """The content of a recording; see `Recording`."""

    def __init__(
        self,
        architecture: Architecture,
        held: Held,
        *,
        reductions: Mapping[RowIdx, Reductions],
        relative_errors: Mapping[RowIdx, float],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(architecture, {**held.values, **reductions}, "recording")
        self.sample_ids: SampleIds = held.sample_ids
        self._rows = dict(held.rows)
        self._num_rows = held.num_rows
        self._rows_of_samples: RowsOfSamples | None = None
        self.complete = held.complete
        self.path = held.path
        self.calls: Calls = held.calls
        inputs = {label: BatchInputs(held.calls, label) for label in held.calls.labels}
        self.inputs = LayerMapping(architecture, inputs, "input")
        self.inputs.why_none = (
            "the recording has none of any layer. Choose layers with rnet.record(..., inputs=True) "
            "before rnet.collect(...)"
        )
        self.relative_errors = LayerMapping(architecture, relative_errors, "relative error")
        self.settings = dict(settings or {})
        known = self.settings.get("made_with", {})
        self._made_with = known if held.made_with is None else held.made_with
        self._reductions = dict(reductions)
        self._results: dict[RowIdx, Any] = {}

    @property
    def made_with(self) -> Mapping[str, Any]:
        """The versions, the net and the time with which the recording was begun.

        ``scio_recorder``, ``torch``, ``python``, ``numpy`` and the package that the net's class
        comes from give their versions. ``net`` is that class, ``dtypes`` and ``devices`` are those
        of its parameters, ``attention`` is the implementation that a net of transformers has
        chosen, ``training`` its flag, and ``time`` is in UTC. The mapping is empty for recordings
        of earlier versions.
        """
        return MappingProxyType(self._made_with)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.sample_ids)

    @property
    def has_rows(self) -> bool:
        """Whether a row of the arrays is a part of a sample, such as a token or a node."""
        return self._num_rows is not None

    @property
    def num_rows(self) -> int:
        """The number of rows of the layers' arrays. It is that of samples, unless `has_rows`."""
        return self.num_samples if self._num_rows is None else self._num_rows

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """The columns that say what each row is, [rows] each, by name.

        "sample" is a position in ``sample_ids``. The mapping is empty if a row is a sample. From
        disk, columns are read when they are used.
        """
        return MappingProxyType(self._rows)

    def rows_of_samples(self) -> RowsOfSamples:
        """Return the rows of each sample; the first call looks at all rows.

        Returns
        -------
        RowsOfSamples
            Indices of rows, as a slice if they are adjacent.
        """
        if self._rows_of_samples is None:
            samples = self._rows.get("sample", torch.arange(self.num_rows, device="cpu"))
            self._rows_of_samples = RowsOfSamples(samples, self.num_samples)
        return self._rows_of_samples

    def by_sample(self, key: RowIdx | str) -> Sequence[Tensor]:
        """Return the rows of a layer sample by sample.

        Parameters
        ----------
        key : (int, int) or str
            The layer.

        Returns
        -------
        sequence of Tensor
            Item i is [length of sample i, ...], in the order in which its rows were collected, and
            is read on demand. Lengths are 1, unless ``collect`` was given ``rows=``.

        Raises
        ------
        ArgumentError
            The layer was reduced.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, Tokens
        >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 3, 2))
        >>> rnet.record("0-1")
        >>> mask = torch.tensor([[True, True, True], [True, False, False]])
        >>> recording = rnet.collect([torch.ones(2, 3, 2)], rows=Tokens(mask=lambda batch: mask))
        >>> [tuple(tokens.shape) for tokens in recording.by_sample("0-1")]
        [(3, 2), (1, 2)]
        """
        label = self._label(key)
        if label in self._reductions:
            layer = self._architecture[label]
            raise ArgumentError(f"there are no rows of {layer}: collect without reduce= for it")
        return SampleValues(self[key], self.rows_of_samples())

    @property
    def stored(self) -> tuple[RowIdx, ...]:
        """The labels of the layers whose samples are stored, not only a summary."""
        return tuple(label for label in self._values if label not in self._reductions)

    @property
    def store(self) -> str | None:
        """Where the samples are, as given to ``collect`` or chosen by ``"auto"``.

        ``"device"``, ``"host"`` or ``"disk"``; on the CPU the first two are host memory. None if
        there are no samples.
        """
        if self.path is not None:
            return "disk"
        devices = {self._values[label].device.type for label in self.stored}
        return ("host" if devices == {"cpu"} else "device") if devices else None

    @cached_property
    def reductions(self) -> Mapping[RowIdx, Reductions]:
        """The reductions by layer, for merging them with others."""
        return LayerMapping(self.architecture, self._reductions, "reduction")

    def num_nans(self, key: RowIdx | str) -> int:
        """Count the NaNs among the values of a layer.

        Parameters
        ----------
        key : (int, int) or str
            The layer.

        Returns
        -------
        int
            Zero for dtypes without NaN.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Identity(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> rnet.collect([torch.tensor([[1.0, float("nan")]])]).num_nans("0-1")
        1
        """
        return sum(int(part.isnan().sum()) for part in self.parts(key))

    def parts(self, key: RowIdx | str) -> Iterator[Tensor]:
        """Iterate over a layer's rows in tensors [some, ...] of bounded size.

        Parameters
        ----------
        key : (int, int) or str
            The layer.

        Returns
        -------
        iterator of Tensor
            All rows in order.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Identity(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> [len(part) for part in rnet.collect([torch.ones(3, 2)]).parts("0-1")]
        [3]
        """
        samples: Tensor = self[key]
        num_bytes = _PART_BYTES
        if isinstance(samples, DiskTensor) and samples.reader.num_readers > 1:
            num_bytes = max(num_bytes, _PART_REQUESTS * samples.reader.span_bytes)
        step = max(1, num_bytes // max(1, bytes_of_row(samples)))
        return (samples[start : start + step] for start in range(0, len(samples), step))

    def to_numpy(self) -> dict[RowIdx, NDArray[Any]]:
        """Return the samples of every layer that was not reduced, as NumPy arrays.

        Returns
        -------
        dict
            Label -> array [samples, ...]. Arrays share the memory of tensors in host memory;
            dtypes that NumPy lacks, such as bfloat16, are widened to float32.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> rnet.collect([torch.ones(1, 2)], dtype=torch.bfloat16).to_numpy()
        {(0, 1): array([[1., 1.]], dtype=float32)}
        """
        return {label: to_array(self[label]) for label in self.stored}

    def _get(self, label: RowIdx) -> Any:
        if label not in self._reductions:
            return self._values[label]
        if label not in self._results:
            self._results[label] = of_each(
                lambda reduction: reduction.compute(), self._reductions[label]
            )
        return self._results[label]

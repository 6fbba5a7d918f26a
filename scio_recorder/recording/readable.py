"""The content of a recording, for showing and saving it and running its calls again.

This is the only file of the room that imports from upper rooms, inside functions that only call
these: without a call of them, nothing of theirs is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import ArgumentError, caught_as
from scio_recorder.layer import RowIdx, counted, few
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs, LayerMapping
from scio_recorder.reductions.base import Reductions, of_each
from scio_recorder.stores import Held
from scio_recorder.stores.disk_format.reader import OnDemand, SampleIds
from scio_recorder.stores.files import DiskTensor, bytes_of_row
from scio_recorder.stores.kept_inputs import Calls
from scio_recorder.tensors.arguments import names_arguments
from scio_recorder.tensors.copies import to_array

if TYPE_CHECKING:
    import os

    import datasets
    import pyarrow as pa
    import zarr
    from torch import nn

    from scio_recorder.analysis.auditing.finding import Audit
    from scio_recorder.postprocessors.assigning import Postprocessors
    from scio_recorder.recording.rows import Rows

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


class _Columns(dict[str, Tensor]):
    """The columns of a recording by name."""

    def __missing__(self, name: object) -> NoReturn:
        there = f"there are {', '.join(map(repr, self))}" if self else "it was made without rows="
        text = f"the recording has no column {name!r}: {there}; rows=Tokens(fields=...) adds some"
        raise caught_as(ArgumentError, KeyError(), text)


class _Arrays(dict[RowIdx, Any]):
    """Arrays by label."""

    def __missing__(self, key: object) -> NoReturn:
        text = f"{key!r} is no key of these arrays, which are labels: {few([*self], 4, repr)}"
        raise caught_as(ArgumentError, KeyError(), text)


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
        self._rows = _Columns(held.rows)
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
        return SampleValues(self._rows_of(key), self.rows_of_samples())

    def _rows_of(self, key: RowIdx | str) -> Tensor:
        """Return the rows of a layer; refuse one that was reduced."""
        label = self._label(key)
        if label in self._reductions:
            layer = self._architecture[label]
            raise ArgumentError(f"there are no rows of {layer}: collect without reduce= for it")
        rows: Tensor = self[key]
        return rows

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
        samples, num_bytes = self._rows_of(key), _PART_BYTES
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
        return _Arrays({label: to_array(self[label]) for label in self.stored})

    def recompute(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> LayerMapping[Any]:
        """Return activations of the whole dataset, recomputed from the inputs that were kept.

        After ``record(..., inputs=True)`` and ``collect``, the nearest module around each layer
        whose inputs were recorded, or the layer itself, runs again batch by batch. Its output is
        compared with a digest of its first output. The net does not change, nor do the generators
        of random numbers.

        Parameters
        ----------
        rnet : Recorder
            A recorder of the same net, with the same weights; its own selection does not matter.
        *selectors
            As for ``Recorder.record``.
        activation_postproc : callable, list or mapping, optional
            The post-processors that ``collect`` was given; they act again.

        Returns
        -------
        LayerMapping
            Tensors [samples, ...] in host memory, equal bit for bit to the layers' outputs: neither
            ``transform`` nor ``dtype`` has acted on them.

        Raises
        ------
        ArgumentError
            The first argument is not a recorder.
        RecomputeError
            No inputs around a layer were recorded. Or the net is another one, or its weights or
            something else have changed, so it returns other values now. Or samples of different
            batches have different shapes.
        LayerNotFoundError
            A selector matches no layer.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> x = torch.randn(6, 2)
        >>> recording = rnet.collect(x.split(3))
        >>> values = recording.recompute(rnet, "0.0")["0.0"]
        >>> torch.equal(values, torch.cat([net[0][0](part) for part in x.split(3)]))
        True
        """
        from scio_recorder.recompute.recomputing import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).whole()

    def recompute_batches(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> Iterator[LayerMapping[Any]]:
        """Recompute as `recompute` does, one batch after the other.

        Use it if the result does not fit into memory, if dimension 0 does not count samples, or if
        samples differ in shape.

        Parameters
        ----------
        rnet : Recorder
            As for `recompute`.
        *selectors
            As for `recompute`.
        activation_postproc : callable, list or mapping, optional
            As for `recompute`.

        Returns
        -------
        iterator of LayerMapping
            For each batch the outputs of the layers, on their device. Between batches the net is
            in its own state.

        Raises
        ------
        ArgumentError, RecomputeError, LayerNotFoundError
            As for `recompute`; errors of a batch are raised when it is requested.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Sequential(nn.ReLU())), input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> recording = rnet.collect(torch.ones(6, 2).split(4))
        >>> [len(batch["0.0"]) for batch in recording.recompute_batches(rnet, "0.0")]
        [4, 2]
        """
        from scio_recorder.recompute.recomputing import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).batches()

    @names_arguments
    def audit(
        self,
        rnet: nn.Module,
        batches: Iterable[Any],
        *,
        match: Mapping[str, str] | None = None,
        to_inputs: Callable[[Any], Any] | None = None,
        sample_ids: Callable[[Any], Any] | None = None,
        rows: Rows | None = None,
    ) -> Audit:
        """Find which layer of a net each column really is, of a recording that others have made.

        The net runs on samples of the recording under ``no_grad``, in its current mode, and is left
        as it was. A column is expected to be the layer that its name says: exactly, or by an ending
        that only one name has (``"layers.3"`` is ``model.layers.3``). ``"hidden_states.4"`` is
        what block 4 receives, as in transformers. What rounding explains is measured by a copy of
        the net in the precision that the numbers of a column show.

        Parameters
        ----------
        rnet : Recorder
            A recorder of the net; its own selection does not matter.
        batches : iterable
            Samples of the recording, as for ``collect``; they need not be all of them.
        match : mapping, optional
            Names or globs of columns -> names of the net, such as ``{"blocks.*": "h.*"}``.
        to_inputs : callable, optional
            As for ``collect``.
        sample_ids : callable, optional
            ``batch ->`` an id for each sample, by which samples are paired. By default samples are
            numbered from 0 on.
        rows : Tokens or Nodes, optional
            The rows that were recorded. By default tokens, unless rows are samples.

        Returns
        -------
        Audit
            Column -> finding: ``layer``, ``kind``, ``error``, ``rounding``, ``words``. It is
            printed as a table. ``absent`` are layers that no column holds.

        Raises
        ------
        ComparisonError
            The recording lacks samples of the batches, or has only reductions; there are no
            batches, or an argument is wrong.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> rnet = Recorder(net, input_size=(1, 4))
        >>> rnet.record("0")
        >>> x = torch.randn(6, 4)
        >>> recording = rnet.collect([x])
        >>> _ = recording["0"].copy_(net(x).detach())  # the layer behind it
        >>> finding = recording.audit(rnet, [x])["0"]
        >>> finding.kind, finding.layer.name
        ('other layer', '1')
        """
        from scio_recorder.analysis.auditing.audit import audit

        return audit(
            self,
            rnet,
            batches,
            match=match,
            to_inputs=to_inputs,
            sample_ids=sample_ids,
            rows=rows,
        )

    def to_arrow(self) -> pa.RecordBatchReader:
        """Return the samples of every layer that was not reduced, as Arrow record batches.

        This needs the extra ``arrow``. Each batch has at most about 64 MiB, and is read on demand;
        ``read_all()`` gives a table. A reader is for one pass over the data.

        Returns
        -------
        pyarrow.RecordBatchReader
            A column ``sample_id`` and one for each layer, ``"1-3_layer4.relu"``: fixed-shape
            tensors, or plain numbers if each sample is one. If rows are not samples, their columns
            are exported under their names. bfloat16 and float8 are widened to float32, bool is
            uint8, and complex numbers are pairs in a last dimension of 2. The metadata of the
            schema describe each column under ``scio_recorder``.

        Raises
        ------
        ArgumentError
            Every layer was reduced, or a dtype can't be widened.
        MissingPackageError
            The extra is missing.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> table = rnet.collect([torch.ones(3, 2)]).to_arrow().read_all()
        >>> table.column_names, table["sample_id"].to_pylist()
        (['sample_id', '1-1_0'], [0, 1, 2])
        >>> table["1-1_0"].combine_chunks().to_numpy_ndarray().shape
        (3, 2)
        """
        from scio_recorder.integrations import exporting

        return exporting.to_arrow(self)

    def to_datasets(self, path: str | os.PathLike[str]) -> datasets.Dataset:
        """Write the samples to a folder that ``datasets.load_from_disk`` of Hugging Face reads.

        This needs the extra ``datasets``. Columns and dtypes are those of :meth:`to_arrow`; its
        metadata are the ``info.description`` of the dataset.

        Parameters
        ----------
        path : str or path-like
            The folder, which must not exist yet; its parent folder must exist.

        Returns
        -------
        datasets.Dataset
            The dataset, on disk. Samples of one dimension and of more than five are lists of fixed
            length; the others are ``Array2D`` to ``Array5D``.

        Raises
        ------
        RecordingError
            The folder exists already, or the disk fails; no partial export is left.
        ArgumentError
            Every layer was reduced, a dtype can't be widened, or ``path`` names no folder.
        MissingPackageError
            The extra is missing.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> folder = tempfile.TemporaryDirectory()
        >>> rnet.collect([torch.ones(3, 2)]).to_datasets(folder.name + "/dataset")[0]
        {'sample_id': 0, '1-1_0': [1.0, 1.0]}
        >>> folder.cleanup()
        """
        from scio_recorder.integrations import exporting

        return exporting.to_datasets(self, path)

    def to_zarr(self, path: str | os.PathLike[str]) -> zarr.Group:
        """Write the samples to a folder with a Zarr array for each layer, and one of sample ids.

        This needs the extra ``zarr``. Arrays are the columns of :meth:`to_arrow`, under their
        names, with characters other than letters, digits and ``_.-~`` percent-encoded. bfloat16
        and float8 are widened to float32; bool and complex numbers keep their dtype.

        Parameters
        ----------
        path : str or path-like
            The folder, which must not exist yet; its parent folder must exist.

        Returns
        -------
        zarr.Group
            The group, open for reading. Its attribute ``scio_recorder`` describes each array.

        Raises
        ------
        RecordingError
            The folder exists already, or the disk fails; no partial export is left.
        ArgumentError
            Every layer was reduced, a dtype can't be widened, or ``path`` names no folder.
        MissingPackageError
            The extra is missing.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> folder = tempfile.TemporaryDirectory()
        >>> group = rnet.collect([torch.ones(3, 2)]).to_zarr(folder.name + "/arrays")
        >>> sorted(group.array_keys()), group["1-1_0"].shape
        (['1-1_0', 'sample_id'], (3, 2))
        >>> folder.cleanup()
        """
        from scio_recorder.integrations import exporting

        return exporting.to_zarr(self, path)

    def _get(self, label: RowIdx) -> Any:
        if label not in self._reductions:
            return self._values[label]
        if label not in self._results:
            self._results[label] = of_each(
                lambda reduction: reduction.compute(), self._reductions[label]
            )
        return self._results[label]

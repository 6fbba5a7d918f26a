"""The methods of a recording that upper rooms carry out: recomputing, and exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scio_recorder.recording.readable import Readable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import datasets
    import pyarrow as pa
    import zarr
    from torch import nn

    from scio_recorder.nets.records import LayerMapping
    from scio_recorder.postprocessors.assigning import Postprocessors


class FurtherMethods(Readable):
    """The part of a recording whose work is done by upper rooms."""

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
        >>> found = recording.recompute(rnet, "0.0")["0.0"]
        >>> torch.equal(found, torch.cat([net[0][0](part) for part in x.split(3)]))
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
        >>> [len(found["0.0"]) for found in recording.recompute_batches(rnet, "0.0")]
        [4, 2]
        """
        from scio_recorder.recompute.recomputing import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).batches()

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

"""What a whole dataset left behind: samples or summaries, by layer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scio_recorder.layer import text_of
from scio_recorder.recording.recomputing import RecomputingRecording
from scio_recorder.recording.saving import save
from scio_recorder.recording.showing import Showing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scio_recorder.layer import DepthIdx


class Recording(RecomputingRecording, Showing):
    """The activations of a dataset by label, read-only; made by ``collect`` and ``open_recording``.

    A key is ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name. The value is a tensor
    [samples, ...], which is read when it is used if it lies on disk; of a layer that was reduced it
    is the reduction's result, and a list of results where there was a list of reductions.

    Parameters
    ----------
    architecture : Architecture
        The labelled net, also where there is no net any more.
    held : Held
        What the store gave back.
    reductions : mapping
        The reductions of each layer that has some.
    relative_errors : mapping
        What rounding to ``dtype`` cost, by layer.
    settings : mapping, optional
        What the recording was made with, where that is known.

    Attributes
    ----------
    sample_ids : SampleIds
        One integer or string for each sample: a sequence.
    complete : bool
        Whether nothing is missing: False for what an interrupted run left on disk.
    path : str or None
        The folder of a recording on disk.
    inputs : LayerMapping
        After ``record(..., inputs=True)``: for each layer a sequence with ``(args, kwargs)`` of
        every batch, as copies in host memory.
    calls : Calls
        What :meth:`recompute` runs again: inputs, and the states in which modules ran.
    relative_errors : LayerMapping
        Where ``dtype`` loses precision: the norm of what rounding took away over the norm of
        everything, for each layer, over all finite values; one that became infinite was taken away
        whole.

    Examples
    --------
    >>> from torch import nn
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.Flatten(), nn.ReLU()), input_size=(1, 2, 2))
    >>> rnet.record("1")
    >>> recording = rnet.collect([torch.ones(3, 2, 2), -torch.ones(1, 2, 2)])
    >>> recording["1-2"].sum(1)
    tensor([4., 4., 4., 0.])
    >>> len(recording), recording.num_samples, list(recording.sample_ids)
    (1, 4, [0, 1, 2, 3])
    """

    def to_numpy(self) -> dict[DepthIdx, NDArray[Any]]:
        """Return the samples of every layer that has some as NumPy arrays.

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a folder, from which ``open_recording`` reads it.

        Parameters
        ----------
        path : str or path-like
            The folder: empty, or not there yet.

        Raises
        ------
        RecordingError
            The folder is not empty, or the disk fails.
        CollectError
            There are inputs of a type that can't be kept on disk.

        Examples
        --------
        >>> import tempfile
        >>> import torch
        >>> import scio_recorder
        >>> rnet = scio_recorder.Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> folder = tempfile.TemporaryDirectory()
        >>> rnet.collect([torch.ones(1, 2)]).save(folder.name + "/run")
        >>> scio_recorder.open_recording(folder.name + "/run")["0-1"][:]
        tensor([[1., 1.]])
        >>> folder.cleanup()
        """
        save(self, path)

    def __repr__(self) -> str:
        layers = ", ".join(map(text_of, self))
        state = "" if self.complete else ", interrupted"
        return f"<Recording of {self.num_samples} samples: {layers}{state}>"


def to_array(samples: Tensor) -> NDArray[Any]:
    """Return samples as an array; dtypes that NumPy lacks are widened."""
    tensor = samples[:].detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        return tensor.to(wide).numpy()

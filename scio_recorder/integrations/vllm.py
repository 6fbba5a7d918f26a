"""Read the hidden states that vLLM extracted as a recording whose rows are tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scio_recorder import Architecture, Recording
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.layer import DepthIdx, Label, Layer, label_of
from scio_recorder.stores import Calls, DiskTensor, Held, KeptCalls, SampleIds, to_ids
from scio_recorder.stores.files import SAMPLE, RowReader, TensorInfo, accessing, row_column

__all__ = ["open_hidden_states"]

_SUFFIX = ".safetensors"
_STATES, _TOKENS = "hidden_states", "token_ids"
_POSITION, _TOKEN = row_column("position"), row_column(_TOKENS)


def open_hidden_states(
    folder: str | os.PathLike[str], layers: Sequence[str | int | DepthIdx]
) -> Recording:
    """Open the files that vLLM's extraction of hidden states has written, one for each request.

    Its ``ExampleHiddenStatesConnector`` writes these files: ``REQUEST.safetensors`` with
    ``hidden_states`` [tokens, layers, features] and ``token_ids`` [tokens].

    Parameters
    ----------
    folder : str or path-like
        The connector's ``shared_storage_path``.
    layers : sequence
        The names of the entries along the dimension of layers, in order: names, labels such as
        ``"2-7"``, or numbers, which become names, such as vLLM's
        ``eagle_aux_hidden_state_layer_ids`` in rising order.

    Returns
    -------
    Recording
        A row is a token. A sample is a request, and its id is the name of its file. Samples are in
        the order of these names, and numbers in names are ordered as numbers. ``rows`` has
        "sample", "position" and "token_ids". Values are read when they are used. vLLM writes no
        checksums, so damage to the data goes unnoticed unless it changes a header.

    Raises
    ------
    RecordingError
        There are no such files, or one of them is damaged, still being written, or does not fit
        the others or ``layers``.
    ArgumentError
        ``layers`` is not a sequence of distinct names, labels or numbers.

    Examples
    --------
    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = tempfile.TemporaryDirectory()
    >>> for request, length in enumerate([3, 2]):
    ...     states, tokens = torch.ones(length, 2, 8), torch.arange(length)
    ...     file = f"{folder.name}/{request}.safetensors"
    ...     save_file({"hidden_states": states, "token_ids": tokens}, file)
    >>> recording = open_hidden_states(folder.name, ["model.layers.3", "model.layers.9"])
    >>> recording
    <Recording of 2 samples, 5 rows: 1-1, 1-2>
    >>> recording["model.layers.9"].shape, recording.rows["token_ids"][:]
    (torch.Size([5, 8]), tensor([0, 1, 2, 0, 1]))
    >>> folder.cleanup()
    """
    architecture = _architecture(layers)
    reader = _HiddenStates(os.fspath(folder), len(architecture))
    values = [DiskTensor(reader, str(at)) for at in range(len(architecture))]
    columns = {name[1:]: DiskTensor(reader, name) for name in (SAMPLE, _POSITION, _TOKEN)}
    return recording_of(architecture, values, reader.requests, columns, reader.path, made_by="vLLM")


class _HiddenStates(RowReader):
    """The files of a folder, one after the other: layers are named by their numbers."""

    def __init__(self, path: str, num_layers: int) -> None:
        self.path, self.requests = path, _requests(path)
        files = list(map(self._file_of, self.requests))
        _, states, token = files[0]
        for name, (_, *others) in zip(self.requests, files, strict=True):
            if others != [states, token]:
                raise RecordingError(
                    f"{self._path_of(name)} holds other shapes or dtypes than {self.requests[0]}"
                    f"{_SUFFIX}: keep the files of different nets in different folders"
                )
        num_held, features = states.shape
        if num_held != num_layers:
            raise RecordingError(
                f"the files in {path} hold {num_held} layers, and layers= names {num_layers}: give "
                "a name for each layer"
            )
        self.starts = list(accumulate((length for length, *_ in files), initial=0))
        layer, number = TensorInfo((features,), states.dtype), TensorInfo((), torch.int64)
        layers = dict.fromkeys(map(str, range(num_layers)), layer)
        self.table = {**layers, SAMPLE: number, _POSITION: number, _TOKEN: token}

    def _file_of(self, request: str) -> tuple[int, TensorInfo, TensorInfo]:
        """Return the number of tokens in a file, and what it has of each: states, and an id."""
        path = self._path_of(request)
        with _opened(path) as file:
            keys = sorted(file.keys())
            if not {_STATES, _TOKENS} <= set(keys):
                raise RecordingError(
                    f"{path} holds {', '.join(keys) or 'nothing'}, not {_STATES} and {_TOKENS}: "
                    "it is not a file of hidden states from vLLM"
                )
            states, tokens = file.get_slice(_STATES), file.get_slice(_TOKENS)
            shape, length = states.get_shape(), tokens.get_shape()
            dtypes = states[:0].dtype, tokens[:0].dtype
        if len(shape) != 3 or length != shape[:1]:
            raise RecordingError(
                f"{path}: {_STATES} {shape} must be [tokens, layers, features], and {_TOKENS} "
                f"{length} one for each token"
            )
        return shape[0], TensorInfo(tuple(shape[1:]), dtypes[0]), TensorInfo((), dtypes[1])

    def _fill(self, out: NDArray[numpy.uint8], number: int, name: str, start: int) -> None:
        spec = self.table[name]
        stop = start + len(out) // max(1, spec.nbytes)
        to = torch.from_numpy(out).view(spec.dtype).view(stop - start, *spec.shape)
        if name == SAMPLE:
            to.fill_(number)
            return
        if name == _POSITION:
            to.copy_(torch.arange(start, stop, device="cpu"))
            return
        with _opened(self._path_of(self.requests[number])) as file:
            # Only this layer's part of the mapped memory is read.
            states, tokens = file.get_slice(_STATES), file.get_slice(_TOKENS)
            part = slice(start, stop)
            values = tokens[part] if name == _TOKEN else states[part, int(name)]
            if (values.shape, values.dtype) != (to.shape, to.dtype):
                raise RecordingError(
                    f"{self.path} no longer has the files that it had when it was opened"
                )
            to.copy_(values)

    def _path_of(self, request: str) -> str:
        return os.path.join(self.path, request + _SUFFIX)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with accessing(path), safe_open(path, "pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise RecordingError(f"{path} is damaged: {error}") from error


def _requests(path: str) -> list[str]:
    """Return the names of requests, ordered by the numbers in them; all must be complete."""
    with accessing(path):
        files = sorted(os.listdir(path), key=_naturally)
    requests = [name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)]
    if not requests:
        raise RecordingError(
            f"{path} holds no hidden states of vLLM: there is no {_SUFFIX} file, and compressed "
            "files must be decompressed first"
        )
    for name in files:
        if name.endswith(f"{_SUFFIX}.lock") and _is_locked(os.path.join(path, name)):
            raise RecordingError(
                f"{path}/{name} is locked: vLLM is still writing this request. Wait until it is "
                "done"
            )
    return requests


def _naturally(name: str) -> list[str | int]:
    parts = re.split(r"(\d+)", name.removesuffix(_SUFFIX), flags=re.ASCII)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _is_locked(path: str) -> bool:
    # Systems without such locks have no vLLM.
    import fcntl

    # vLLM locks the file beside that of a request until the request's is complete.
    with accessing(path), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _architecture(layers: Sequence[str | int | DepthIdx]) -> Architecture:
    """Return an architecture of layers with these names or labels, side by side."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise ArgumentError(f"layers={layers!r}: give a list of names, labels or numbers")
    numbers = [key for key in layers if isinstance(key, int)]
    if numbers != sorted(numbers):
        raise ArgumentError(
            f"layers={layers!r}: numbers must rise, since networks gather layers from the first to "
            "the last, whatever the order of the request; give names if your network differs"
        )
    labels = [label_of(key) or Label((1, place + 1)) for place, key in enumerate(layers)]
    names = [str(label_of(key) or key) for key in layers]
    if not names or min(len(set(names)), len(set(labels))) < len(names):
        raise ArgumentError(f"layers={layers!r}: give each layer a name or a label of its own")
    return side_by_side(dict(zip(names, labels, strict=True)))


def side_by_side(labels: Mapping[str, DepthIdx]) -> Architecture:
    """Return an architecture of layers with these names and labels, side by side.

    Examples
    --------
    >>> [str(layer) for layer in side_by_side({"a": (1, 1)}).values()]
    ['1-1 a (HiddenStates)']
    """
    rows = [
        Layer(Label(label), name, None, "HiddenStates", 0, None, 0, True, place, None)
        for place, (name, label) in enumerate(labels.items())
    ]
    return Architecture(rows, {layer.name: (layer.label,) for layer in rows})


def recording_of(
    architecture: Architecture,
    values: Iterable[Tensor],
    sample_ids: Sequence[int | str],
    columns: Mapping[str, Tensor],
    path: str | None = None,
    **settings: str,
) -> Recording:
    """Return a recording of tensors that others have made, one for each layer of an architecture.

    Parameters
    ----------
    architecture : Architecture
        The layers.
    values : iterable of Tensor
        The rows of each.
    sample_ids : sequence of int or str
        One for each sample.
    columns : mapping
        "sample", "position" and so on of each row; empty if rows are samples.
    path : str, optional
        Their place, if they outlive the process.
    **settings : str
        What is known about the rows.
    """
    ids = SampleIds()
    ids.add(to_ids(sample_ids))
    held = Held(
        dict(zip(architecture, values, strict=True)),
        ids,
        Calls(KeptCalls(), architecture, ()),
        path=path,
        rows=columns,
        num_rows=len(columns["sample"]) if columns else None,
    )
    rows = {"rows": {"kind": "Tokens", **settings}} if columns else {}
    return Recording(architecture, held, reductions={}, relative_errors={}, settings=rows)

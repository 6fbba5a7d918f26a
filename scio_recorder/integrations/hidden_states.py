"""Read hidden states that other programs have computed as a recording in memory.

They may come from transformers, from a file of PyTorch or safetensors, or from a dump of sglang.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scio_recorder import Recording
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.integrations.vllm import recording_of, side_by_side
from scio_recorder.layer import few
from scio_recorder.stores.files import accessing

__all__ = ["recording_of_hidden_states", "recording_of_sglang"]

_ENDINGS = (".safetensors", ".pt", ".pth", ".bin")
_PASS = "Pass"
_INFO = ".forward_batch_info."


def recording_of_hidden_states(
    states: Any,
    *,
    mask: Tensor | None = None,
    lengths: Iterable[int] | None = None,
    sample_ids: Iterable[int | str] | None = None,
) -> Recording:
    """Return a recording in memory of hidden states by layer.

    Parameters
    ----------
    states : mapping, sequence, path, or an output of transformers
        Name -> tensor, or tensors in order, which are named ``"hidden_states.0"`` and so on. A
        path is of a file ``.safetensors``, or ``.pt`` with such a mapping or sequence. An output
        of transformers has ``hidden_states``, as after ``net(..., output_hidden_states=True)``.
        Tensors are [samples, ...].
    mask : Tensor, optional
        The real tokens of [samples, positions, features], [samples, positions]. Then a row of the
        recording is a token.
    lengths : iterable of int, optional
        The number of tokens of each sample, if tensors are [tokens, features], without padding.
    sample_ids : iterable of int or str, optional
        One for each sample. By default samples are numbered from 0 on.

    Returns
    -------
    Recording
        A column for each tensor, under its name.

    Raises
    ------
    ArgumentError
        There are no tensors, or their lengths are not those of the samples.
    RecordingError
        The file can't be read.

    Examples
    --------
    >>> states = [torch.randn(2, 3, 8) for _ in range(4)]
    >>> recording = recording_of_hidden_states(states, mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    >>> recording["hidden_states.3"].shape, recording.rows["position"]
    (torch.Size([5, 8]), tensor([0, 1, 0, 1, 2]))
    """
    tensors = _tensors(states)
    if mask is not None:
        real = mask.bool().cpu()
        lengths = real.sum(1).tolist()
        for name, tensor in tensors.items():
            if tensor.shape[:2] != real.shape:
                raise _misfit(name, tensor, f"[samples, positions] of mask= is {[*real.shape]}")
        # Older torch takes no rows of float8.
        tensors = {
            name: (x.view(torch.uint8) if x.itemsize == 1 else x)[real].view(x.dtype)
            for name, x in tensors.items()
        }
    counts = None if lengths is None else list(lengths)
    if counts is not None and min(counts, default=0) < 0:
        raise ArgumentError(f"lengths={counts!r}: give the number of tokens of each sample")
    num_rows = len(next(iter(tensors.values()))) if counts is None else sum(counts)
    for name, tensor in tensors.items():
        if len(tensor) != num_rows:
            raise _misfit(name, tensor, f"there are {num_rows} rows")
    num_samples = num_rows if counts is None else len(counts)
    ids = list(range(num_samples) if sample_ids is None else sample_ids)
    if len(ids) != num_samples:
        raise ArgumentError(f"sample_ids has {len(ids)} ids for {num_samples} samples")
    return _recording(tensors, ids, counts)


def recording_of_sglang(path: str | os.PathLike[str]) -> Recording:
    """Return a recording in memory of what sglang's ``--debug-tensor-dump-output-folder`` wrote.

    Parameters
    ----------
    path : str or path-like
        The folder of one process, ``TP0_PP0_Rank0_pid...``, with a file ``Pass00000.pt`` for each
        pass.

    Returns
    -------
    Recording
        A row is a token, and a sample is a prompt, in the order in which they ran. Passes that go
        on with a prompt (decoding, a cached prefix) are left out. Of a module that returns several
        tensors, the others than the first have names such as ``"model.norm.1"``. What sglang notes
        too late, outside of ``model``, is left out.

    Raises
    ------
    RecordingError
        There are no such files with whole prompts, or one is damaged.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> info = {"seq_lens": torch.tensor([2, 3]), "positions": torch.tensor([0, 1, 0, 1, 2])}
    >>> tensors = {f"model.forward_batch_info.{name}": x for name, x in info.items()}
    >>> torch.save({"model.norm": torch.ones(5, 8), **tensors}, f"{folder.name}/Pass00000.pt")
    >>> recording_of_sglang(folder.name).by_sample("model.norm")[1].shape
    torch.Size([3, 8])
    >>> folder.cleanup()
    """
    folder = os.fspath(path)
    with accessing(folder):
        names = sorted(name for name in os.listdir(folder) if name.startswith(_PASS))
    parts, lengths = list[dict[str, Tensor]](), list[int]()
    for name in names:
        content = _load(os.path.join(folder, name))
        info = {key.partition(_INFO)[2]: x for key, x in content.items() if _INFO in key}
        counts = info["seq_lens"].tolist() if "seq_lens" in info else []
        # Decoding has one row for each prompt, and a cached prefix has none.
        if not counts or sum(counts) != len(info.get("positions", ())):
            continue
        parts.append(_rows_of_pass(content, sum(counts)))
        lengths += counts
    if not parts or not parts[0]:
        raise RecordingError(
            f"{folder} has no whole prompts of sglang: give the folder of one process, such as "
            "TP0_PP0_Rank0_pid123, in which a Pass00000.pt holds a prompt"
        )
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    tensors = {name: torch.cat([part[name] for part in parts]) for name in shared}
    return _recording(tensors, range(len(lengths)), lengths)


def _rows_of_pass(content: Mapping[str, Any], num_rows: int) -> dict[str, Tensor]:
    """Return the tensors of a pass that have a row for each token."""
    rows = {}
    for name, value in content.items():
        # What runs after the model is in the file of the next pass.
        if "." in name and _INFO not in name:
            several = value if isinstance(value, list) else [value]
            for number, x in enumerate(several):
                if isinstance(x, Tensor) and x.ndim > 1 and len(x) == num_rows:
                    rows[f"{name}.{number}" if number else name] = x
    return rows


def _tensors(states: Any) -> dict[str, Tensor]:
    """Return tensors by name."""
    if isinstance(states, str | os.PathLike):
        states = _load(os.fspath(states))
    states = getattr(states, "hidden_states", states)
    named = states if isinstance(states, Mapping) else None
    if isinstance(states, Sequence):
        named = {f"hidden_states.{number}": x for number, x in enumerate(states)}
    if not named or not all(isinstance(x, Tensor) and x.ndim for x in named.values()):
        kind = type(states).__name__
        raise ArgumentError(
            f"the hidden states are a {kind}, not tensors by layer: give a mapping from names to "
            "tensors [samples, ...], or a list of these in the order of layers; after generate, "
            "give those of one step"
        )
    return {str(name): x.detach().cpu() for name, x in named.items()}


def _load(path: str) -> Any:
    """Return the content of a file; code in it does not run."""
    if not path.endswith(_ENDINGS):
        raise ArgumentError(f"{path} is no file that can be read: {few(_ENDINGS, 9)} can")
    try:
        with accessing(path):
            if path.endswith(".safetensors"):
                return load_file(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise RecordingError(f"{path} is damaged, or holds other things: {error}") from error


def _misfit(name: str, tensor: Tensor, why: str) -> ArgumentError:
    return ArgumentError(f"{name!r} is {list(tensor.shape)}, but {why}: give tensors that fit")


def _recording(
    tensors: Mapping[str, Tensor], sample_ids: Sequence[int | str], lengths: list[int] | None
) -> Recording:
    architecture = side_by_side({name: (1, at + 1) for at, name in enumerate(tensors)})
    columns = {}
    if lengths is not None:
        columns["sample"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        columns["position"] = torch.cat([torch.arange(length) for length in lengths])
    return recording_of(architecture, tensors.values(), sample_ids, columns)

"""A recording as NumPy arrays and as a pandas table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from scio_recorder.recording.readable import Readable

__all__ = ["layer_frame", "to_array"]


def to_array(samples: Tensor) -> NDArray[Any]:
    """Return samples as an array; dtypes that NumPy lacks are widened."""
    tensor = samples[:].detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        return tensor.to(wide).numpy()


def layer_frame(recording: Readable) -> pd.DataFrame:
    """Return one row a layer, with statistics over all values of those that are stored."""
    import pandas as pd

    rows = [_row(recording, label) for label in recording]
    columns = ["label", "name", "type", "samples", "shape", "dtype"]
    columns += ["mean", "std", "min", "max", "nan"]
    return pd.DataFrame(rows, columns=columns).set_index("label")


def _row(recording: Readable, label: Any) -> dict[str, Any]:
    layer = recording.architecture[label]
    row: dict[str, Any] = {
        "label": str(layer.label),
        "name": layer.name,
        "type": layer.type_name,
        "samples": recording.num_samples,
    }
    if label in recording.stored:
        samples = recording[label]
        row["shape"] = tuple(samples.shape[1:])
        row["dtype"] = str(samples.dtype).removeprefix("torch.")
        row.update(_statistics(recording, label))
    return row


def _statistics(recording: Readable, label: Any) -> dict[str, float]:
    count, missing, mean, squares = 0, 0, 0.0, 0.0
    low, high = math.inf, -math.inf
    for part in recording.parts(label):
        values = _real(part).double().flatten()
        present = values[~values.isnan()]
        missing += values.numel() - present.numel()
        if not present.numel():
            continue
        # Chan, Golub and LeVeque (1983): joins the sums of squares about two means.
        size = present.numel()
        own = float(present.mean())
        delta, total = own - mean, count + size
        squares += float((present - own).square().sum()) + delta * delta * count * size / total
        mean, count = mean + delta * size / total, total
        low, high = min(low, float(present.min())), max(high, float(present.max()))
    if not count:
        return {"nan": missing}
    std = math.sqrt(squares / (count - 1)) if count > 1 else math.nan
    return {"mean": mean, "std": std, "min": low, "max": high, "nan": missing}


def _real(part: Tensor) -> Tensor:
    return part.abs() if part.is_complex() else part

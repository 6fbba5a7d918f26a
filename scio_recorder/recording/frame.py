"""A recording as NumPy arrays and as a pandas table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scio_recorder.display.progress import Advance
from scio_recorder.recording.survey import Survey, for_each_layer, read
from scio_recorder.tensors.dtypes import dtype_name

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from scio_recorder.layer import DepthIdx
    from scio_recorder.recording.readable import Readable


FRAME_COLUMNS = (
    *("label", "name", "type", "samples", "shape", "dtype", "bytes"),
    *("mean", "std", "min", "max", "zeros", "nan", "inf"),
)


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

    frame = pd.DataFrame(layer_rows(recording), columns=list(FRAME_COLUMNS)).set_index("label")
    # Whole numbers stay such where others are missing.
    return frame.astype(dict.fromkeys(("bytes", "nan", "inf"), "Int64"))


def layer_rows(recording: Readable) -> list[dict[str, Any]]:
    """Return the rows of the table without pandas; what is not known is absent or None."""
    return for_each_layer(list(recording), lambda label, advance: _row(recording, label, advance))


def _row(recording: Readable, label: DepthIdx, advance: Advance) -> dict[str, Any]:
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
        row["dtype"] = dtype_name(samples.dtype)
        row["bytes"] = samples.nbytes
        row.update(_statistics(read(recording, label, advance)))
    return row


def _statistics(parts: Iterable[Tensor]) -> dict[str, float | None]:
    survey = Survey()
    for part in parts:
        survey.update(part)
    found = survey.values
    return {
        "mean": found.mean,
        "std": found.std,
        "min": found.low,
        "max": found.high,
        "zeros": found.zeros,
        "nan": found.nans,
        "inf": found.infinities,
    }

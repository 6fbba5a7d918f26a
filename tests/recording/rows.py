"""Recordings by rows, written through a store's writer as a collection writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.layer import TensorSpec
from scio_recorder.recording.recording import Recording
from scio_recorder.stores import Job, Store, as_store
from scio_recorder.stores.disk_format.reader import to_ids

WIDE, NARROW = (1, 1), (1, 2)
SETTINGS = {"rows": {"kind": "Tokens"}, "layers": ["1-1", "1-2"]}


class Pass(NamedTuple):
    """The ids of new samples, and of each row its sample and position."""

    ids: Sequence[int | str]
    rows: Sequence[tuple[int, int]]


# Samples one after the other, of different lengths, one of them without rows.
PADDED = (
    Pass(range(3), [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]),
    Pass(range(3, 5), [(4, 0), (4, 1)]),
    Pass(range(5, 6), [(5, 0)]),
)
# Prompts, and then a token for each sample in each pass; the second prompts begin anew.
GENERATED = (
    Pass(range(2), [(0, 0), (0, 1), (0, 2), (1, 0)]),
    Pass((), [(0, 3), (1, 1)]),
    Pass((), [(0, 4), (1, 2)]),
    Pass(range(2, 4), [(2, 0), (3, 0), (3, 1)]),
    Pass((), [(2, 1), (3, 2)]),
)
# Sixty samples of up to eight rows, seven a pass, and each pass goes on with a sample of before.
MANY = tuple(
    Pass(
        range(first, min(60, first + 7)),
        [(at, row) for at in range(first, min(60, first + 7)) for row in range(at * 5 % 9)]
        + [(first // 2, 9)] * (first > 0),
    )
    for first in range(0, 60, 7)
)
ALL_PASSES = {"padded": PADDED, "generated": GENERATED}


def recorder() -> Recorder:
    rnet = Recorder(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), input_size=(2, 3, 4))
    rnet.record("0", "1")
    return rnet


def tensors_of(rows: Sequence[tuple[int, int]]) -> dict[Any, Tensor]:
    """What is stored of rows: each value follows from the sample and the position."""
    pairs = torch.tensor(list(rows), dtype=torch.int64).view(-1, 2)
    number = (100 * pairs[:, 0] + pairs[:, 1]).float()
    return {
        WIDE: torch.stack([number, -number, number / 8, number * 0], 1),
        NARROW: torch.stack([number + 0.5, number * 2], 1).bfloat16(),
        "sample": pairs[:, 0].clone(),
        "position": pairs[:, 1].clone(),
        "token": (pairs[:, 0] * 7 + pairs[:, 1]).to(torch.int32),
    }


def expected(passes: Sequence[Pass]) -> dict[Any, Tensor]:
    return tensors_of([row for one in passes for row in one.rows])


def ids_of(passes: Sequence[Pass]) -> list[int | str]:
    return [value for one in passes for value in one.ids]


def write(
    store: str | Store,
    passes: Sequence[Pass],
    *,
    resume: bool = False,
    finish: bool = True,
) -> Any:
    """Collect passes, or leave off after them."""
    architecture = recorder().architecture
    job = Job(architecture, (WIDE, NARROW), None, lambda: SETTINGS, resume)
    writer = as_store(store).open(job)
    columns: dict[Any, Any] = {}
    for one in passes:
        tensors = tensors_of(one.rows)
        for key, tensor in tensors.items():
            if key not in columns:
                spec = TensorSpec(tuple(tensor.shape[1:]), tensor.dtype)
                columns[key] = writer.column(key, spec, tensor)
            columns[key].place(writer.start, len(tensor)).copy_(tensor)
        writer.commit(to_ids(one.ids), dict, rows=len(one.rows))
    if not finish:
        writer.abandon(dict)
        return None
    held = writer.finish(dict)
    return Recording(architecture, held, reductions={}, relative_errors={}, settings=SETTINGS)

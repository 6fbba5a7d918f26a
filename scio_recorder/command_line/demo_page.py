"""The page of the demonstration: scores of known and unknown digits, and some of both."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scio_recorder.display.page import rendered

_BINS = 32
_SHOWN = 12


class Score(NamedTuple):
    """How well one score of a ``layer`` tells both apart, and its values, float64 ``[images]``."""

    name: str
    layer: str
    auroc: float
    fpr_at_95_tpr: float
    known: Tensor
    unknown: Tensor


def detection_page(scores: list[Score], known: Tensor, unknown: Tensor, num_trained: int) -> str:
    """Return the page, which stands by itself.

    Parameters
    ----------
    scores : list of Score
        In the order in which they are shown.
    known, unknown : Tensor
        The images that were scored ``[images, 1, height, width]``, between 0 and 1.
    num_trained : int
        How many images the net was trained on.
    """
    best = max(scores, key=lambda score: score.auroc)
    threshold = _threshold(best)
    # The least certain ones say more than the first ones.
    doubtful = best.unknown.argsort(descending=True)[:_SHOWN]
    doubtful = doubtful[best.unknown[doubtful] >= threshold]
    rows = [
        ("Known digits, which the net was not trained on", known, torch.arange(_SHOWN)),
        ("Unknown digits", unknown, torch.arange(_SHOWN)),
        ("Unknown digits that pass as known ones, the most certain first", unknown, doubtful),
    ]
    values = {id(known): best.known, id(unknown): best.unknown}
    return rendered(
        "demo.html",
        title="Known and unknown digits",
        facts=[
            ("Trained on", f"{num_trained:,} images of known digits"),
            ("Known", f"{len(known):,} test images"),
            ("Unknown", f"{len(unknown):,} images"),
            ("Best score", f"{best.name} of {best.layer}"),
            ("Its AUROC", f"{best.auroc:.3f}"),
        ],
        best=best,
        scores=[(score, *_histograms(score)) for score in scores],
        digits=[
            (title, [(_pixels(images[i, 0]), values[id(images)][i].item()) for i in chosen])
            for title, images, chosen in rows
            if len(chosen)
        ],
        size=tuple(known.shape[2:]),
    )


def _threshold(score: Score) -> float:
    """Return the value that 95 % of the known images reach."""
    return score.known.sort(descending=True).values[-(-len(score.known) * 95 // 100) - 1].item()


def _histograms(score: Score) -> tuple[list[tuple[str, float]], float, list[list[float]]]:
    """Return marks of the axis, the threshold, and the bins of both kinds, in hundredths.

    The axis begins at the lowest hundredth: some values lie far below, and count in the first bin.
    """
    values = torch.cat([score.known, score.unknown])
    low, high = values.quantile(0.01).item(), values.max().item()
    kinds = [
        torch.histc(kind.clamp(min=low), _BINS, low, high) / len(kind)
        for kind in (score.known, score.unknown)
    ]
    top = max(kind.max().item() for kind in kinds)
    power = 10 ** math.floor(math.log10((high - low) / 3))
    step = max(part * power for part in (1, 2, 5) if part * power <= (high - low) / 3)
    numbers = [step * place for place in range(math.ceil(low / step), int(high // step) + 1)]

    def along(value: float) -> float:
        return (value - low) / (high - low) * 100

    marks = [(f"{number:g}", along(number)) for number in numbers]
    return marks, along(_threshold(score)), [(kind / top * 100).tolist() for kind in kinds]


def _pixels(image: Tensor) -> list[tuple[int, int, float]]:
    """Return column, row and darkness of the pixels that are not white."""
    return [(int(column), int(row), image[row, column].item()) for row, column in image.nonzero()]

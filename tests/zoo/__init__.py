"""The table of small nets that the truth tests run over.

Each row is a `Case`: a name, a seeded builder, inputs by seed, and marks for what the net can't do.
A new trap enters as a decorated builder in the file of its topic under `tests/zoo/`.
"""

from __future__ import annotations

from tests.zoo import flow, gradients, inplace, layers, structures
from tests.zoo.base import Case, Net

__all__ = ["BY_NAME", "CASES", "Case", "Net"]

CASES: tuple[Case, ...] = (
    *flow.CASES,
    *inplace.CASES,
    *structures.CASES,
    *layers.CASES,
    *gradients.CASES,
)
BY_NAME = {case.name: case for case in CASES}

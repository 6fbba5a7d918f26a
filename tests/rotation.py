"""Long tables of cases, of which a default run tries some and a campaign tries all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Return parameters of which all but one in so many are left to a campaign.

    Parameters
    ----------
    every : int
        The number of cases among which one runs by default.
    cases : iterable
        A case of several parameters is a tuple.
    first : int
        The first case that runs by default.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if number % every == first % every else [pytest.mark.campaign],
        )
        for number, case in enumerate(cases)
    ]

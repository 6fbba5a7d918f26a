"""Checks of arguments that are numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scio_recorder.errors import CollectError
from scio_recorder.tensors.arguments import whole


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3)])
def test_whole_numbers_of_all_kinds(value: object) -> None:
    assert whole("bins", value, 1) == 3


@pytest.mark.parametrize(
    "value", [0, True, None, 3.0, "3", [3], np.arange(3), torch.arange(3), torch.tensor(3.0)]
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(CollectError, match=r"bins=.*: give a whole number from 1 on"):
        whole("bins", value, 1)

"""Names of dtypes in files and messages: as in torch, without ``torch.``."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    Parameters
    ----------
    dtype : torch.dtype
        Any.

    Returns
    -------
    str
        A key of `DTYPES`.

    Examples
    --------
    >>> dtype_name(torch.float), DTYPES["float32"]
    ('float32', torch.float32)
    """
    return str(dtype).removeprefix("torch.")


# Every dtype of this version of torch, by name.
DTYPES = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}

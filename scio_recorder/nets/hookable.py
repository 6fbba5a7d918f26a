"""Which modules of a net take hooks."""

from __future__ import annotations

import torch
from torch import nn


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks can be registered on a module: TorchScript takes none.

    Examples
    --------
    >>> takes_hooks(nn.ReLU())
    True
    """
    return not isinstance(module, torch.jit.ScriptModule)

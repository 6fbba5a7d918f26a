"""Which modules of a net take hooks, and hooks on all of them for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

_Hook: TypeAlias = Callable[..., Any]


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks can be registered on a module: TorchScript takes none.

    Examples
    --------
    >>> takes_hooks(nn.ReLU())
    True
    """
    return not isinstance(module, torch.jit.ScriptModule)


@contextlib.contextmanager
def hooked(
    net: nn.Module, before: _Hook | None = None, after: _Hook | None = None, *, always: bool = False
) -> Iterator[None]:
    """Keep hooks around the forward of all modules of a net inside the block.

    Parameters
    ----------
    net : torch.nn.Module
        The net. Modules that take no hooks go without.
    before, after : callable, optional
        A pre-hook, ``before(module, args, kwargs)``, and a hook, ``after(module, args, kwargs,
        output)``.
    always : bool, default False
        Whether ``after`` is also called after exceptions, with None.

    Examples
    --------
    >>> net, outputs = nn.ReLU(), []
    >>> with hooked(net, after=lambda module, args, kwargs, output: outputs.append(output)):
    ...     _ = net(torch.tensor(-1.0))
    >>> _ = net(torch.tensor(2.0))
    >>> outputs
    [tensor(0.)]
    """
    with contextlib.ExitStack() as stack:
        for module in filter(takes_hooks, net.modules()):
            if before is not None:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(after, with_kwargs=True, always_call=always)
                stack.callback(handle.remove)
        yield

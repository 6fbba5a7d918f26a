"""Hooks of a net: which modules take them, which are a part of the net, and some for a block.

A network is labelled without the hooks of its user, which may have effects outside it. Some hooks
decide which modules run, or with what inputs. A network without these is another one, which may
run just as well, and has other layers.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from scio_recorder.tensors import private

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
    net: nn.Module,
    before: _Hook | None = None,
    after: _Hook | None = None,
    *,
    always: bool = False,
    first: bool = False,
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
    first : bool, default False
        Put them before other hooks rather than behind them.

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
        options: dict[str, Any] = {"with_kwargs": True, "prepend": first}
        for module in filter(takes_hooks, net.modules()):
            if before is not None:
                handle = module.register_forward_pre_hook(before, **options)
                stack.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(after, always_call=always, **options)
                stack.callback(handle.remove)
        yield


# Modules whose functions are a part of any network that has them as hooks. Those of transformers
# gather hidden states: a network adds them once, and remembers that it has them.
LIBRARIES = ("transformers.utils.output_capturing",)

_Hooks = tuple[nn.Module, str, "OrderedDict[int, Any]"]


def own_hooks(net: nn.Module, libraries: tuple[str, ...] = LIBRARIES) -> list[_Hooks]:
    """Return new dictionaries of hooks, which have only those that are a part of the network.

    Parameters
    ----------
    net : torch.nn.Module
        The network, which is not changed.
    libraries : tuple of str
        Beginnings of the names of Python modules: what these define is a part of a network.

    Returns
    -------
    list of tuple
        The module, the name of one of its dictionaries that are not empty, and what should take its
        place.

    Examples
    --------
    >>> class Net(nn.Linear):
    ...     def halve(self, module, args, output):
    ...         return output / 2
    >>> net = Net(2, 2)
    >>> _ = net.register_forward_hook(net.halve)
    >>> _ = net.register_forward_hook(lambda *_: None)
    >>> [hook == net.halve for *_, hooks in own_hooks(net) for hook in hooks.values()]
    [True]
    """
    modules = {id(module) for module in net.modules()}
    replacements: list[_Hooks] = []
    for module in net.modules():
        names = [name for name in private.HOOK_DICTIONARIES if vars(module).get(name)]
        # Other dictionaries say about the same hooks how to call them.
        kept_keys = {
            key
            for name in set(names).intersection(private.FORWARD_HOOKS)
            for key, hook in vars(module)[name].items()
            if _is_own(hook, modules, libraries)
        }
        for name in names:
            hooks = vars(module)[name].items()
            kept = OrderedDict((key, hook) for key, hook in hooks if key in kept_keys)
            replacements.append((module, name, kept))
    return replacements


def _is_own(hook: Any, modules: set[int], libraries: tuple[str, ...]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    if isinstance(hook, types.MethodType) and id(hook.__self__) in modules:
        return True
    defined_in = getattr(hook, "__module__", None) or type(hook).__module__
    return str(defined_in).startswith(libraries)

"""A post-processor that acts on what a module receives, instead of on what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors.base import describe
from scio_recorder.tensors.structures import flatten


@dataclass(frozen=True)
class OnInput:
    """Let another post-processor act on the first tensor that a module's forward receives.

    The first positional argument that is a tensor, or a list, tuple or dictionary with one in it,
    counts; then keyword arguments in the order in which they were given. The record of the layer
    is what it returned for the changed input, and recorded inputs are the changed ones.

    Parameters
    ----------
    postprocessor : callable
        ``Tensor -> Tensor or None``, such as another one of this module. None means that the
        tensor was changed in place.

    Raises
    ------
    PostprocessorError
        ``postprocessor`` can't be called; at a pass, the module receives no tensor.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> from scio_recorder.postprocessors import Scale
    >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Flatten()), input_size=(1, 2))
    >>> rnet.record("1")
    >>> rnet(torch.ones(1, 2), activation_postproc={"1": OnInput(Scale(3.0))})
    tensor([[3., 3.]])
    """

    postprocessor: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.postprocessor) or isinstance(self.postprocessor, OnInput):
            raise PostprocessorError(
                f"OnInput takes a post-processor, Tensor -> Tensor or None, not "
                f"{describe(self.postprocessor)}."
            )

    def __call__(self, activation: Any) -> NoReturn:
        """Refuse to act on an activation."""
        raise PostprocessorError(
            f"{self!r} was called with an activation: OnInput goes around all others, straight "
            "into activation_postproc, as in {selector: OnInput(At(0, Scale(2.0)))}."
        )


def change_input(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Change the first tensor among arguments.

    Parameters
    ----------
    args, kwargs
        What a forward is about to receive.
    change : callable
        ``Tensor -> Tensor``.

    Returns
    -------
    tuple or None
        The arguments with that tensor changed and all else as it was; None if there is no tensor.

    Examples
    --------
    >>> import torch
    >>> change_input((1,), {"x": torch.ones(1)}, torch.neg)
    ((1,), {'x': tensor([-1.])})
    """
    for at, value in enumerate(args):
        changed = _changed(value, change)
        if changed is not None:
            return (*args[:at], changed, *args[at + 1 :]), dict(kwargs)
    for name, value in kwargs.items():
        changed = _changed(value, change)
        if changed is not None:
            return args, {**kwargs, name: changed}
    return None


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    # Other objects, such as key-value caches, are shared with the network.
    if isinstance(value, (list, tuple, dict)):
        leaves, rebuild = flatten(value)
        if leaves:
            return rebuild([change(leaves[0]), *leaves[1:]])
    return None

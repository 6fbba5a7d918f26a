"""Passes that other code runs: every call of the network inside a block.

NOTE [How a call becomes a pass]

``generate``, a pipeline or a trainer calls the network itself, not the recorder. A module that was
compiled by its own ``compile`` calls the result in place of its hooks and its forward. Inside the
block, a function that runs a pass around hooks and forward takes that place. Nothing else of the
network changes: not its class, its forward or its hooks, and no copy or file of it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from scio_recorder.capture.around import CallWrapper, RunCall
from scio_recorder.errors import (
    ArgumentError,
    MutationError,
    SelectorTypeError,
    UnsupportedNetError,
)
from scio_recorder.layer import RowIdx
from scio_recorder.nets.records import Records
from scio_recorder.postprocessors.assigning import Postprocessors
from scio_recorder.tensors.arguments import whole


def why_not_called(net: nn.Module) -> str:
    """Return why no call of a network may have been seen, and what to write instead."""
    if hasattr(net, "get_base_model"):
        # Those of PEFT.
        return (
            "methods of the network, such as generate, call the model inside it: wrap that, as in "
            "Recorder(net.get_base_model()), which holds the adapters too"
        )
    return (
        "perhaps a copy of the network was called, or a compiled one (give rnet.net to the code "
        "that calls the network), or a method of the network, such as generate, called a network "
        "inside it (wrap that one)"
    )


class Passes(Sequence[Records]):
    """The records of the passes of a block, in the order in which they ended.

    Each is a mapping like ``rnet.activations``, and later passes don't change it.

    Parameters
    ----------
    last : int, optional
        How many of the latest passes to keep; by default all.

    Examples
    --------
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
    >>> rnet.record("0")
    >>> with rnet.watch() as passes:
    ...     for number in (1.0, 2.0):
    ...         _ = rnet.net(torch.full((1, 2), number))
    >>> len(passes), passes[-1]["0"]
    (2, tensor([[2., 2.]]))
    >>> passes.cat("0").shape
    torch.Size([2, 2])
    """

    def __init__(self, last: int | None = None) -> None:
        limit = None if last is None else whole("last", last, 1, ArgumentError)
        self._records: deque[Records] = deque(maxlen=limit)
        self._inputs: deque[Records] = deque(maxlen=limit)
        self._attention: deque[Any] = deque(maxlen=limit)

    @property
    def inputs(self) -> Passes:
        """The inputs of the recorded modules' forward, pass by pass, as ``rnet.inputs`` has them.

        They exist for passes of a selection with ``record(..., inputs=True)``.

        Examples
        --------
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> with rnet.watch() as passes:
        ...     _ = rnet.net(torch.full((1, 2), -1.0))
        >>> passes.inputs[-1]["0"].args
        (tensor([[-1., -1.]]),)
        """
        passes = Passes()
        passes._records = self._inputs
        return passes

    @property
    def attention(self) -> Sequence[Any]:
        """The attention of layers, pass by pass, as ``rnet.attention`` has it.

        It exists for passes of a selection with ``record(..., attention=...)``.
        """
        return tuple(self._attention)

    @overload
    def __getitem__(self, index: int) -> Records: ...
    @overload
    def __getitem__(self, index: slice) -> list[Records]: ...
    def __getitem__(self, index: int | slice) -> Records | list[Records]:
        records = list(self._records)
        if isinstance(index, slice):
            return records[index]
        try:
            return records[index]
        except IndexError:
            raise IndexError(f"there is no pass {index}: {len(records)} are kept") from None
        except TypeError:
            raise SelectorTypeError(
                f"{index!r} is not a number, and passes are numbered: write passes[-1][{index!r}] "
                f"for a layer in one pass, or passes.cat({index!r}) to join it over all"
            ) from None

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Passes({len(self)})"

    def cat(self, key: RowIdx | str, dim: int = 0) -> Tensor:
        """Join the outputs of a layer in all passes.

        Parameters
        ----------
        key : tuple or str
            A label or an unambiguous name.
        dim : int, default 0
            The dimension along which to join: 1 for the positions of a sequence.

        Returns
        -------
        torch.Tensor
            The records, in the order of the passes.

        Raises
        ------
        ArgumentError
            There is no pass, or the layer returns no tensors or tensors of other shapes.

        Examples
        --------
        >>> Passes().cat("0")
        Traceback (most recent call last):
        ...
        scio_recorder.errors.ArgumentError: there is no pass to join: the network was not called
        """
        values = [records[key] for records in self]
        if not values:
            raise ArgumentError("there is no pass to join: the network was not called")
        for number, value in enumerate(values):
            if not isinstance(value, Tensor):
                raise ArgumentError(
                    f"layer {key} has a {type(value).__name__} in pass {number}, but only "
                    "tensors can be joined: take what you need from each pass, as in "
                    f"torch.cat([records[{key!r}][0] for records in passes])"
                )
        try:
            return torch.cat(values, dim)
        except (RuntimeError, IndexError) as error:
            shapes = sorted({tuple(value.shape) for value in values})
            raise ArgumentError(
                f"the outputs of layer {key}, of shapes {shapes}, can't be joined along dimension "
                f"{dim}: write another dim=, or join what you need from each pass"
            ) from error

    def add(self, records: Records, inputs: Records, attention: Mapping[RowIdx, Any]) -> None:
        """Keep what a pass that has ended leaves, in memory of its own."""
        every: Any = (self._records, self._inputs, self._attention)
        for kept, values in zip(every, (records, inputs, attention), strict=True):
            for label in values:
                # A record that was lost in the pass raises when it is read.
                with contextlib.suppress(MutationError):
                    _ = values[label]
            kept.append(values)


@dataclass(eq=False)
class Watcher:
    """A block: the receiver of its passes, and the post-processors of calls without any."""

    passes: Passes | None
    posts: Postprocessors | None


class WatchedCalls:
    """Makes each call of a network a pass, by a wrapper around it.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    run : callable
        ``run(call, args, kwargs)`` runs a pass, or calls the network if that is part of one.

    Attributes
    ----------
    were_made : bool
        Whether there was a call.
    """

    def __init__(self, net: nn.Module, run: RunCall) -> None:
        # A call that dynamo follows is refused, too.
        self.wrapper = CallWrapper(net, self._make_pass, self._make_pass)
        self._run = run
        self.were_made = False

    def _make_pass(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise UnsupportedNetError(
                "the network is compiled inside a block that watches it, and a traced run is not "
                "a pass: leave it uncompiled there (for generate, disable_compile=True in its "
                "configuration), or compile the recorder and call that"
            )
        self.were_made = True
        return self._run(call, args, kwargs)

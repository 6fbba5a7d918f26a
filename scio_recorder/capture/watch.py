"""Passes that other code runs: every call of the network inside a block.

NOTE [How a call becomes a pass]

``generate``, a pipeline or a trainer calls the network itself, not the recorder. A module that was
compiled by its own ``compile`` calls the result in place of its hooks and its forward. Inside the
block, a function that runs a pass around hooks and forward takes that place. Nothing else of the
network changes: not its class, its forward or its hooks, and no copy or file of it.

NOTE [Whose block a call is in]

A server calls one network for many requests at once, each perhaps in a block of its own. So a block
belongs to the context that entered it (``contextvars``): to its thread or asyncio task, and to what
is started with a copy of that context. Other calls go on as without any block. Contexts outlive
blocks, and a block may be left in another one, so a block is open as long as its recorder says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from scio_recorder.capture.around import CallWrapper, RunCall, wrappers
from scio_recorder.errors import (
    ArgumentError,
    FlowError,
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
        self._ended: deque[Any] = deque(maxlen=limit)
        self._what = "activations"

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
        passes._ended, passes._what = self._ended, "inputs"
        return passes

    @property
    def attention(self) -> Sequence[Any]:
        """The attention of layers, pass by pass, as ``rnet.attention`` has it.

        It exists for passes of a selection with ``record(..., attention=...)``.
        """
        return tuple(ended.attention for ended in [*self._ended])

    @overload
    def __getitem__(self, index: int) -> Records: ...
    @overload
    def __getitem__(self, index: slice) -> list[Records]: ...
    def __getitem__(self, index: int | slice) -> Records | list[Records]:
        records: list[Records] = [getattr(ended, self._what) for ended in [*self._ended]]
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

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") else ": it holds passes, so write passes[-1][label]"
        text = f"'Passes' object has no attribute {name!r}{hint}"
        raise AttributeError(text, name=name, obj=self)

    def __len__(self) -> int:
        return len(self._ended)

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

    def add(self, ended: Sequence[Records]) -> None:
        """Keep what a pass leaves that has ended, in memory of its own."""
        for records in ended:
            records.read_all()
        self._ended.append(ended)


@dataclass(eq=False)
class Block:
    """What a block does with the passes in it, until it is left.

    Attributes
    ----------
    passes : Passes or None
        Receives the records of each pass.
    posts : callable, list, mapping or None
        The post-processors that act in each pass.
    collected : CollectedPasses or None
        Runs the passes, and collects them.
    num_calls : int
        The number of calls of the network in it.
    num_missed : int
        The number of calls outside of all blocks of the recorder when it was entered.
    """

    passes: Passes | None = None
    posts: Postprocessors | None = None
    collected: Any = None
    num_calls: int = 0
    num_missed: int = 0


# Those of all recorders around a piece of code, the innermost last.
_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("blocks of scio_recorder", default=())


class Blocks:
    """The blocks of one recorder, see NOTE [Whose block a call is in].

    Attributes
    ----------
    open : list of Block
        Those that were entered and not left, in any context.
    num_missed : int
        The number of calls of the network outside of all of them.
    has_compiled : bool
        Whether a compiled pass has run since the first of them was entered.
    """

    def __init__(self) -> None:
        self.open: list[Block] = []
        self.num_missed = 0
        self.has_compiled = False
        self._wrapper: CallWrapper | None = None
        self._lock = threading.Lock()

    def here(self) -> tuple[Block, ...]:
        """Return those that the caller is in, the innermost last."""
        return tuple(block for block in _BLOCKS.get() if block in self.open)

    def take_call(self) -> bool:
        """Count a call of the network, and return whether the caller is in a block."""
        around = self.here()
        for block in around:
            block.num_calls += 1
        self.num_missed += not around
        return bool(around)

    @contextlib.contextmanager
    def entered(self, block: Block, net: nn.Module, run: RunCall) -> Iterator[Block]:
        """Enter a block, and leave it whatever context that happens in.

        Parameters
        ----------
        block : Block
            A new one.
        net : torch.nn.Module
            The network, each call of which becomes a pass.
        run : callable
            ``run(call, args, kwargs)`` runs a pass if `take_call` allows, or calls the network. It
            is the same for all blocks.
        """
        try:
            self._open(block, net, run)
            _BLOCKS.set((*_BLOCKS.get(), block))
            yield block
            if all(wrapper is not self._wrapper for wrapper in wrappers(net)):
                raise UnsupportedNetError(
                    "the network was compiled inside a block that watches it, and its calls since "
                    "then were not seen: compile it behind the block, or compile the recorder and "
                    "call that"
                )
        finally:
            self._close(block)
            _BLOCKS.set(tuple(each for each in _BLOCKS.get() if each is not block))
        if not block.num_calls and self.num_missed > block.num_missed:
            raise FlowError(
                "the network was called, but by another thread or task than the one that entered "
                "the block, to which a block belongs. Enter it where the network is called, or "
                "start the thread in this context: Thread(target=contextvars.copy_context().run, "
                "args=(net.generate,), kwargs=...)"
            )

    def _open(self, block: Block, net: nn.Module, run: RunCall) -> None:
        with self._lock:
            if self._wrapper is None:
                # A call that dynamo follows is refused, too.
                self._wrapper = CallWrapper(net, run, run)
                self._wrapper.put_around()
                self.has_compiled = False
            block.num_missed = self.num_missed
            self.open.append(block)

    def _close(self, block: Block) -> None:
        with self._lock:
            # It may not be there yet if the block was interrupted.
            self.open[:] = [each for each in self.open if each is not block]
            if not self.open and self._wrapper is not None:
                self._wrapper.remove()
                self._wrapper = None
        # Contexts that were copied hold blocks for long.
        block.passes = block.posts = block.collected = None

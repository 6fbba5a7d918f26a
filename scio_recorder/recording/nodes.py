"""Rows that are nodes of graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.recording.rows import BatchRows, Fields, Name, Rows, Source


@dataclass(eq=False, repr=False)
class Nodes(Rows):
    """Makes each row of a recording a node of a graph; each graph of a batch is a sample.

    Layers must be ``[nodes, ...]``. Rows are in the order of samples, and keep the order of nodes
    within each.

    Parameters
    ----------
    sample : str, callable or None, default "batch"
        The graph of each node, counted from 0 within the batch: integers ``[nodes]``. None: each
        batch is one graph, as is a batch without an entry ``batch``.
    fields : sequence of str, or mapping from str to str or callable, optional
        The facts to keep about each row, ``[nodes]``.
    where : str or callable, optional
        The nodes to keep, ``[nodes]``. The others still count in ``position``.

    Notes
    -----
    A name is a key or an attribute of the batch, or an argument of the network's forward. A
    function receives the batch.

    Raises
    ------
    CollectError
        An argument is neither a name nor a function.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Nodes, Recorder
    >>> rnet = Recorder(torch.nn.Linear(4, 2), input_size=(3, 4))
    >>> rnet.record("0-1")
    >>> graphs = [{"input": torch.ones(5, 4), "batch": torch.tensor([0, 0, 0, 1, 1])}]
    >>> recording = rnet.collect(graphs, rows=Nodes(), to_inputs=lambda batch: batch["input"])
    >>> recording["0-1"].shape, recording.num_samples
    (torch.Size([5, 2]), 2)
    """

    sample: Name | None = "batch"
    fields: Fields | None = None
    where: Name | None = None

    def of(self, source: Source) -> BatchRows:
        """Return the rows of a batch.

        Parameters
        ----------
        source : Source
            The batch and the network's inputs.

        Returns
        -------
        BatchRows
            The kept nodes, and the facts about them.
        """
        if self.sample is None or (self.sample == "batch" and source.find("batch") is None):
            owners, number = torch.zeros(_num_nodes(source), dtype=torch.int64, device="cpu"), 1
        else:
            owners = self._owners(source)
            number = int(owners.max()) + 1 if len(owners) else 0
            given = source.find("num_graphs") if self.sample == "batch" else None
            # The last graphs may be without nodes.
            number = max(number, given) if isinstance(given, int) else number
        rows = self._rows(source, ("nodes",), (len(owners),), owners, number, self._pairs())
        nodes = next((name for name, size in _lines(source).items() if size == len(owners)), "")
        return replace(rows, labelled=source.labelled_as(nodes, 1))

    def _owners(self, source: Source) -> Tensor:
        """Return the graph of each node."""
        assert self.sample is not None
        owners = source.read("sample", self.sample)
        if owners.ndim != 1 or owners.is_floating_point() or owners.is_complex():
            raise CollectError(
                f"sample of rows=Nodes() is {owners.dtype} of shape {tuple(owners.shape)} in batch "
                f"{source.number}: give integers [nodes], the graph of each node"
            )
        owners = owners.long()
        if bool((owners < 0).any()):
            raise CollectError(
                f"sample of rows=Nodes() is negative in batch {source.number}: count the graphs of "
                "a batch from 0"
            )
        if len(owners) and int(owners.max()) >= len(owners):
            raise CollectError(
                f"sample of rows=Nodes() has the graph {int(owners.max())} in batch "
                f"{source.number} of {len(owners)} nodes: count the graphs of a batch from 0, "
                "and leave none out"
            )
        return owners


def _lines(source: Source) -> dict[str, int]:
    """Return the number of lines of each argument of forward, most likely nodes first."""
    given = source.tensors
    values = {"x": given["x"], **given} if "x" in given else given
    return {name: value.shape[0] for name, value in values.items() if value.ndim > 0}


def _num_nodes(source: Source) -> int:
    for number in _lines(source).values():
        return number
    raise CollectError(
        f"the net's input in batch {source.number} has no tensor that shows the number of "
        "nodes: write Nodes(sample=lambda batch: ...) with the graph of each node"
    )

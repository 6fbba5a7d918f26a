"""Activations of a dataset that were not kept, from the inputs that were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor, nn

from scio_recorder.nets.records import Inputs, LayerMapping
from scio_recorder.recompute.calls import Batches, enclosing_layers
from scio_recorder.stores import labelled_bytes

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.postprocessors.assigning import Postprocessors


class BatchInputs(Sequence[Inputs]):
    """What a layer's forward received, ``(args, kwargs)`` for each batch, read when it is used.

    Parameters
    ----------
    calls : Batches
        The calls that are kept.
    label : (int, int)
        The layer.
    """

    def __init__(self, calls: Batches, label: DepthIdx) -> None:
        self._calls = calls
        self._label = label

    def __len__(self) -> int:
        return len(self._calls.rows)

    @overload
    def __getitem__(self, index: int) -> Inputs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Inputs]: ...
    def __getitem__(self, index: int | slice) -> Inputs | Sequence[Inputs]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self._calls.call(numbers, self._label).inputs

    def __repr__(self) -> str:
        return f"<inputs of {len(self)} batches>"


class RecomputingRecording(LayerMapping[Any]):
    """The part of a recording that recomputes."""

    if TYPE_CHECKING:

        @property
        def stored(self) -> tuple[DepthIdx, ...]:  # noqa: D102  # the recording's own
            ...

    calls: Batches
    settings: dict[str, Any]

    def recompute(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> LayerMapping[Any]:
        """Return activations of the whole dataset that were not kept, from inputs that were.

        After ``record(..., inputs=True)`` and ``collect``: batch by batch the nearest module around
        each layer whose inputs were recorded, or the layer itself, runs again as it did then. What
        it returns is compared with a digest of what it returned then. Nothing of the net is
        changed, nor are the generators of random numbers.

        Parameters
        ----------
        rnet : Recorder
            A recorder of the same net, with the weights of then; what it records does not matter.
        *selectors
            What ``Recorder.record`` takes.
        activation_postproc : callable, list or mapping, optional
            What ``collect`` was given, which acts again.

        Returns
        -------
        LayerMapping
            Tensors [samples, ...] in host memory, bit for bit what the layers returned: neither
            ``transform`` nor ``dtype`` has acted on them.

        Raises
        ------
        ArgumentError
            The first argument is no recorder.
        RecomputeError
            No inputs around a layer were recorded; the net is another one, its weights or anything
            else have changed, so that it returns something else now; or samples of different
            batches have different shapes.
        LayerNotFoundError
            A selector matches no layer.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> x = torch.randn(6, 2)
        >>> recording = rnet.collect(x.split(3))
        >>> found = recording.recompute(rnet, "0.0")["0.0"]
        >>> torch.equal(found, torch.cat([net[0][0](part) for part in x.split(3)]))
        True
        """
        # Opening and reading a recording does not wait for what runs nets.
        from scio_recorder.recompute.collected import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).whole()

    def recompute_batches(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> Iterator[LayerMapping[Any]]:
        """Return what `recompute` does, one batch after the other.

        For more than fits into memory, and for layers whose dimension 0 does not count samples or
        whose samples differ in shape.

        Parameters
        ----------
        rnet : Recorder
            As for `recompute`.
        *selectors
            As for `recompute`.
        activation_postproc : callable, list or mapping, optional
            As for `recompute`.

        Returns
        -------
        iterator of LayerMapping
            For each batch what the layers returned, on the device where they did. Between batches
            the net is as it was.

        Raises
        ------
        ArgumentError, RecomputeError, LayerNotFoundError
            As `recompute`; what concerns a batch when it is asked for.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Sequential(nn.ReLU())), input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> recording = rnet.collect(torch.ones(6, 2).split(4))
        >>> [len(found["0.0"]) for found in recording.recompute_batches(rnet, "0.0")]
        [4, 2]
        """
        from scio_recorder.recompute.collected import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).batches()

    @property
    def memory_stored_bytes(self) -> int:
        """What samples, and inputs with the states of their calls, take."""
        samples: list[Tensor] = [self[label] for label in self.stored]
        return sum(tensor.nbytes for tensor in samples) + self.calls.num_bytes

    @property
    def memory_saved_bytes(self) -> int:
        """What the layers that can be recomputed, and are not kept, would take as samples.

        By their shapes at labelling.
        """
        architecture, kept = self.architecture, set(self.calls.labels)
        missing = [
            label
            for label, layer in architecture.items()
            if layer.executed
            and label not in self.stored
            and not kept.isdisjoint([label, *enclosing_layers(architecture, label)])
        ]
        return sum(labelled_bytes(architecture, missing).values()) * sum(self.calls.rows)

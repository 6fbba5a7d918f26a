"""The methods of a recording that recompute activations of a dataset from kept inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scio_recorder.recording.readable import Readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from scio_recorder.nets.records import LayerMapping
    from scio_recorder.postprocessors.assigning import Postprocessors


class RecomputeMethods(Readable):
    """The part of a recording that recomputes."""

    def recompute(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> LayerMapping[Any]:
        """Return activations of the whole dataset, recomputed from the inputs that were kept.

        After ``record(..., inputs=True)`` and ``collect``, the nearest module around each layer
        whose inputs were recorded, or the layer itself, runs again batch by batch. Its output is
        compared with a digest of its first output. The net does not change, nor do the generators
        of random numbers.

        Parameters
        ----------
        rnet : Recorder
            A recorder of the same net, with the same weights; its own selection does not matter.
        *selectors
            As for ``Recorder.record``.
        activation_postproc : callable, list or mapping, optional
            The post-processors that ``collect`` was given; they act again.

        Returns
        -------
        LayerMapping
            Tensors [samples, ...] in host memory, equal bit for bit to the layers' outputs: neither
            ``transform`` nor ``dtype`` has acted on them.

        Raises
        ------
        ArgumentError
            The first argument is not a recorder.
        RecomputeError
            No inputs around a layer were recorded. Or the net is another one, or its weights or
            something else have changed, so it returns other values now. Or samples of different
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
        from scio_recorder.recompute.recomputing import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).whole()

    def recompute_batches(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> Iterator[LayerMapping[Any]]:
        """Recompute as `recompute` does, one batch after the other.

        Use it if the result does not fit into memory, if dimension 0 does not count samples, or if
        samples differ in shape.

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
            For each batch the outputs of the layers, on their device. Between batches the net is
            in its own state.

        Raises
        ------
        ArgumentError, RecomputeError, LayerNotFoundError
            As for `recompute`; errors of a batch are raised when it is requested.

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
        from scio_recorder.recompute.recomputing import Recomputation

        return Recomputation(self, rnet, selectors, activation_postproc).batches()

"""Recompute activations that were not recorded: a recorded module around them runs again."""

from __future__ import annotations

from typing import Any

from scio_recorder.errors import RecomputeError, SelectorTypeError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import LayerMapping
from scio_recorder.nets.selection import select
from scio_recorder.recompute.run_again import Call, copied, rerun, untouched
from scio_recorder.recorder.reading import Reading
from scio_recorder.tensors.digests import digest_of
from scio_recorder.tensors.structures import map_tensors


class Recomputing(Reading):
    """The part of a recorder that recomputes."""

    def recompute(self, *selectors: Any) -> LayerMapping[Any]:
        """Return activations of the latest pass that were not recorded.

        After ``record(..., inputs=True)``: the nearest recorded module around each layer runs again
        as it did then, and its output is compared with the record. The net does not change.
        The user's hooks on inner modules are called again.

        Parameters
        ----------
        *selectors
            As for :meth:`record`; for recorded layers, the record is returned.

        Returns
        -------
        LayerMapping
            Detached copies, equal bit for bit to the layers' outputs; keys as in
            :attr:`activations`.

        Raises
        ------
        RecomputeError
            No module around a layer was recorded with its inputs in the latest pass. Or weights or
            something else have changed since, so the module returns other values now.
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
        >>> x = torch.ones(4, 2)
        >>> _ = rnet(x)
        >>> torch.equal(rnet.recompute("0.0")["0.0"], net[0][0](x))
        True
        """
        if not selectors:
            raise SelectorTypeError('no layers are named: write recompute("layer3.*")')
        found: dict[DepthIdx, Any] = {}
        wanted: dict[DepthIdx, set[DepthIdx]] = {}
        activations = self.activations
        for target in select(self.architecture, selectors):
            if target in activations:
                found[target] = map_tensors(copied, activations.peek(target))
            else:
                wanted.setdefault(self._enclosing(target), set()).add(target)
        with untouched(self.architecture, wanted):
            for label, targets in wanted.items():
                found.update(rerun(self.architecture, self._recorded_call(label), targets))
        return LayerMapping(self.architecture, found, "activation")

    def _enclosing(self, target: DepthIdx) -> DepthIdx:
        around = self.architecture.enclosing(target)
        recorded = self._capture.program.recording
        nearest = next((label for label in around if label in recorded), None)
        if not self._capture.program.counts_calls:
            raise RecomputeError(
                'after record(..., calls="any") it is unknown in which call a layer ran: record '
                "the module around it without calls="
            )
        if nearest is None:
            best = f'"{self.architecture[around[0]].name}"' if around else "around it"
            raise RecomputeError(
                f"no module around layer {self.architecture[target]} is recorded: write "
                f"record({best}, inputs=True) before the pass, or any module that contains that one"
            )
        if not self._capture.program.options.inputs:
            raise RecomputeError(
                f"layer {self.architecture[nearest]} is recorded without its inputs: write "
                "record(..., inputs=True) before the pass"
            )
        if nearest not in self.activations or nearest not in self.inputs:
            raise RecomputeError(
                f"the latest pass left no record of layer {self.architecture[nearest]}: run the "
                "recorder first, without dont_record"
            )
        return nearest

    def _recorded_call(self, label: DepthIdx) -> Call:
        moments, posts = self._capture.state
        inputs, output = self.inputs.peek(label), digest_of(self.activations.peek(label))
        moment = moments[label]
        return Call(label, inputs, output, moment, moment.explain_change, posts)

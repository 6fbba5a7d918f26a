"""Activations of a recorder's latest pass that were not recorded: a recorded module runs again."""

from __future__ import annotations

from typing import Any

from scio_recorder.capture.engine import Capture
from scio_recorder.errors import RecomputeError, SelectorTypeError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import LayerMapping
from scio_recorder.nets.selection import select
from scio_recorder.recompute.run_again import Call, copied, rerun, untouched
from scio_recorder.tensors.digests import digest_of
from scio_recorder.tensors.structures import map_tensors


def recompute(capture: Capture, selectors: tuple[Any, ...]) -> LayerMapping[Any]:
    """Return activations of the latest pass, by running recorded modules around them again.

    Parameters
    ----------
    capture : Capture
        What ran the latest pass.
    selectors : tuple
        Name the layers.

    Returns
    -------
    LayerMapping
        Detached copies.

    Raises
    ------
    RecomputeError
        No module around a layer was recorded, or it returns other values now.
    """
    if not selectors:
        raise SelectorTypeError('no layers are named: write recompute("layer3.*")')
    found: dict[DepthIdx, Any] = {}
    wanted: dict[DepthIdx, set[DepthIdx]] = {}
    architecture, activations = capture.architecture, capture.activations
    for target in select(architecture, selectors):
        if target in activations:
            found[target] = map_tensors(copied, activations.peek(target))
        else:
            wanted.setdefault(_enclosing(capture, target), set()).add(target)
    with untouched(architecture, wanted):
        for label, targets in wanted.items():
            found.update(rerun(architecture, _recorded_call(capture, label), targets))
    return LayerMapping(architecture, found, "activation")


def _enclosing(capture: Capture, target: DepthIdx) -> DepthIdx:
    around = capture.architecture.enclosing(target)
    recorded = capture.recording
    nearest = next((label for label in around if label in recorded), None)
    if capture.options.calls == "any":
        raise RecomputeError(
            'after record(..., calls="any") it is unknown in which call a layer ran: record '
            "the module around it without calls="
        )
    if nearest is None:
        best = f'"{capture.architecture[around[0]].name}"' if around else "around it"
        raise RecomputeError(
            f"no module around layer {capture.architecture[target]} is recorded: write "
            f"record({best}, inputs=True) before the pass, or any module that contains that one"
        )
    if not capture.options.inputs:
        raise RecomputeError(
            f"layer {capture.architecture[nearest]} is recorded without its inputs: write "
            "record(..., inputs=True) before the pass"
        )
    if nearest not in capture.activations or nearest not in capture.inputs:
        raise RecomputeError(
            f"the latest pass left no record of layer {capture.architecture[nearest]}: run the "
            "recorder first, without dont_record"
        )
    return nearest


def _recorded_call(capture: Capture, label: DepthIdx) -> Call:
    moments, posts = capture.state
    inputs, output = capture.inputs.peek(label), digest_of(capture.activations.peek(label))
    moment = moments[label]
    return Call(label, inputs, output, moment, moment.explain_change, posts)

"""A check on a user's own network of what recording promises.

NOTE [What is checked]

The network runs twice as it is, without a hook of the recorder, and is then recorded twice, each
time from the same state. The first recorded pass in a setting copies what layers return, and the
second refers to it, so both ways of keeping are seen. What a record must be is known from a hook
that shares no code with those of the recorder: it stands next to them and copies at once. What the
network must do is known from the first bare run. What the second bare run does differently is not
judged.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.analysis.comparing.measures import Tolerance, measure
from scio_recorder.analysis.comparing.pairing import paired_outputs, parts_of
from scio_recorder.errors import (
    ArgumentError,
    CheckError,
    MutationError,
    RecorderError,
)
from scio_recorder.layer import Layer, OperationIdx, RowIdx, counted, describe, few
from scio_recorder.lowlevel import (
    Capture,
    NetState,
    Uncopied,
    is_rerun,
    random_state,
    refuse_transforms,
    shown_shapes,
    untouched,
)
from scio_recorder.tensors import map_tensors, private, same_bits, tensors, twin

_NUM_RECORDED_PASSES, _SHOWN = 2, 2


@dataclass(frozen=True)
class CheckReport:
    """What a check has compared, all of it equal bit for bit.

    Parameters
    ----------
    layers : tuple of Layer
        The layers whose records are copies of what they returned.
    facts : tuple of str
        What is as in a bare run: the output, gradients, buffers and more.
    unrepeatable : tuple of str
        What two bare runs do differently, so that it was not judged.
    left_out : tuple of Layer
        The recorded operations. Their records were made, and not compared.
    gradients : str
        Why no gradients were compared; empty if they were.
    """

    layers: tuple[Layer, ...]
    facts: tuple[str, ...]
    unrepeatable: tuple[str, ...]
    left_out: tuple[Layer, ...]
    gradients: str

    def __str__(self) -> str:
        lines = [
            f"no difference in {_NUM_RECORDED_PASSES} recorded passes",
            f"equal to copies taken at the call: {counted(len(self.layers), 'layer')}, "
            f"{few(self.layers, _SHOWN)}",
            f"as in a bare run: {_in_few_words(self.facts)}",
        ]
        if self.gradients:
            lines.append(f"no gradients: {self.gradients}")
        if self.unrepeatable:
            lines.append(
                f"not judged, since two bare runs differ in it: {_in_few_words(self.unrepeatable)}"
            )
        if self.left_out:
            lines.append(f"recorded and not compared: {few(self.left_out, _SHOWN)}")
        return "\n".join(lines)


def _in_few_words(facts: Sequence[str]) -> str:
    """Return the names of facts, counting those of a kind."""
    kinds = Counter(name.split(" ")[0] for name in facts)
    counts = [counted(kinds[kind], kind) for kind in ("gradient", "buffer") if kinds[kind]]
    others = [name for name in facts if not name.startswith(("gradient", "buffer"))]
    return ", ".join([*others, *counts])


def check(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
    """Compare recorded passes of a network with bare runs and with copies, see NOTE.

    Parameters
    ----------
    capture : Capture
        Knows the network, and which layers are recorded. It runs nothing, and keeps its records.
    args, kwargs
        The inputs of the network.

    Raises
    ------
    CheckError
        Something differs.
    """
    _refuse(capture, kwargs)
    net = capture.net
    executed = tuple(row.label for row in capture.architecture.values() if row.executed)
    recording = capture.recording or tuple(sorted(executed))
    roots = net, *args, *kwargs.values()
    with capture.without_hooks():
        with untouched(*roots) as state:
            runs = _RunsFromOneState(net, (args, kwargs), state)
            bare, again = runs.run(net), runs.run(net)
        unrepeatable = [name for name in bare if _difference(bare[name], again.get(name))]
        judged = [name for name in bare if name not in unrepeatable]
        recorded = Capture(net, capture.architecture, recording, capture.options)
        try:
            # What stands around calls is part of the state that is put back.
            with untouched(*roots) as state:
                runs = _RunsFromOneState(net, (args, kwargs), state)
                _check_passes(recorded, runs, {name: bare[name] for name in judged})
        finally:
            recorded.remove()
    rows = [capture.architecture[label] for label in recorded.architecture.in_order(recording)]
    return CheckReport(
        tuple(row for row in rows if not isinstance(row.label, OperationIdx)),
        tuple(judged),
        tuple(unrepeatable),
        tuple(row for row in rows if isinstance(row.label, OperationIdx)),
        runs.why_no_gradients,
    )


def _check_passes(capture: Capture, runs: _RunsFromOneState, bare: Mapping[str, Any]) -> None:
    """Compare recorded passes with copies that are taken meanwhile, and with a bare run."""
    copies = _Copies(capture)
    for _ in range(_NUM_RECORDED_PASSES):
        with _explaining_failures():
            facts = runs.run(copies.run)
        copies.compare()
        for name, value in bare.items():
            _compare(name, value, facts.get(name))


def _refuse(capture: Capture, kwargs: Mapping[str, Any]) -> None:
    if "activation_postproc" in kwargs:
        raise ArgumentError(
            "a check compares with the bare network, which has no post-processors: leave "
            "activation_postproc= out"
        )
    refuse_transforms("checked")
    capture.refuse_side_runs("a check")


@contextlib.contextmanager
def _explaining_failures() -> Iterator[None]:
    try:
        yield
    except RecorderError:
        raise
    except Exception as error:
        raise CheckError(
            f"the recorded network raised {type(error).__name__}: {error}. The bare one does not"
        ) from error


# -- what the network does -------------------------------------------------------------------------


class _RunsFromOneState:
    """Runs of a network from one state, on copies of its inputs."""

    def __init__(self, net: nn.Module, inputs: Any, state: NetState) -> None:
        self.why_no_gradients = "gradient mode is off, or the output does not require any"
        self._net, self._inputs, self._state = net, inputs, state
        named = {id(tensor): f"gradient of {name}" for name, tensor in net.named_parameters()}
        leaves = [tensor for tensor in state.leaves if tensor.requires_grad]
        # By names; tensors that are no parameters have none.
        self._leaves = {
            named.get(id(leaf), f"gradient of tensor {at}"): leaf for at, leaf in enumerate(leaves)
        }

    def run(self, call: Callable[..., Any]) -> dict[str, Any]:
        """Run the network, and return copies of all that can be seen of it, by name."""
        self._state.put_back()
        args, kwargs = map_tensors(_leaf, self._inputs)
        output = call(*args, **kwargs)
        facts = {"output": map_tensors(twin, output)}
        received = {f"gradient of input {at}": x for at, x in enumerate(tensors((args, kwargs)))}
        leaves = self._leaves | {name: x for name, x in received.items() if x.requires_grad}
        facts |= self._gradients(output, leaves)
        for name, buffer in self._net.named_buffers():
            facts[f"buffer {name}"] = twin(buffer)
        facts["random numbers"] = random_state()
        modules = [*self._net.modules()]
        facts["training flags"] = [module.training for module in modules]
        facts["hooks"] = [[*map(_hooks, private.forward_hooks(module))] for module in modules]
        return facts

    def _gradients(self, output: Any, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the gradients of a sum over the output in which all numbers count differently."""
        ends = [end for end in tensors(output) if end.requires_grad and end.grad_fn is not None]
        if not (ends and leaves and torch.is_grad_enabled()):
            return {}
        try:
            # The sum over a softmax, for instance, does not depend on its inputs.
            weights = [torch.arange(end.numel(), device=end.device) % 7 + 1 for end in ends]
            seeds = [w.to(end).reshape(end.shape) for w, end in zip(weights, ends, strict=True)]
            gradients = torch.autograd.grad(ends, [*leaves.values()], seeds, allow_unused=True)
        except RuntimeError as error:
            # Reentrant checkpointing, for instance, allows no such gradients.
            self.why_no_gradients = f"{type(error).__name__}: {error}"
            return {"gradients": self.why_no_gradients}
        self.why_no_gradients = ""
        return dict(zip(leaves, gradients, strict=True))


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy of an input: passes write to inputs, and gradients end here."""
    wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return twin(tensor).requires_grad_(wants_gradient)


def _hooks(hooks: Mapping[int, Any]) -> list[int]:
    """Return the numbers of the hooks of others."""
    owners = {number: getattr(hook, "__self__", hook) for number, hook in hooks.items()}
    return [number for number, owner in owners.items() if not isinstance(owner, Uncopied)]


# -- what layers return ----------------------------------------------------------------------------


class _CopyingHook(Uncopied):
    """A hook that copies what a module returns, and shares no code with the recorder's."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_rerun():
            self._values.append(map_tensors(twin, output))


class _Copies:
    """Copies of what the recorded layers return, taken at each call."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._architecture = capture, capture.architecture
        self._labels = [at for at in capture.program.order if not isinstance(at, OperationIdx)]
        # By ``id`` of the module, in the order in which calls return.
        self._values: dict[int, list[Any]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a recorded pass, and take copies meanwhile."""
        modules = {id(self._module(label)): self._module(label) for label in self._labels}
        self._values = {key: [] for key in modules}
        handles = [
            module.register_forward_hook(_CopyingHook(self._values[key]))
            for key, module in modules.items()
        ]
        try:
            return self._capture.run(self._capture.net, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def compare(self) -> None:
        """Compare the records of the latest pass with the copies."""
        for label in self._labels:
            module = self._module(label)
            values, calls = self._values[id(module)], self._architecture.calls(module)
            counts_calls = self._capture.program.counts_calls
            self._compare(label, values[calls.index(label)] if counts_calls else tuple(values))

    def _compare(self, label: RowIdx, copy: Any) -> None:
        row = self._architecture[label]
        try:
            record = self._capture.activations[label]
        except MutationError as error:
            raise _failed(row, f"its record was lost, and reading it raised: {error}") from error
        different = _difference(copy, record)
        if different:
            raise _failed(row, f"its record is not what it returned: {different}")

    def _module(self, label: Any) -> Any:
        return self._architecture[label].module


# -- how they differ -------------------------------------------------------------------------------


def _failed(row: Layer | None, text: str) -> CheckError:
    error = CheckError(text if row is None else f"layer {row}: {text}")
    error.layer = row
    return error


def _compare(name: str, bare: Any, recorded: Any) -> None:
    different = _difference(bare, recorded)
    if different:
        raise _failed(
            None,
            f"the recorded network does something else than the bare one: {name} differs, "
            f"{different}. Code of the network that looks at hooks does this, and so does torch "
            "where it takes another kernel beside hooks, of which a warning tells",
        )


def _difference(expected: Any, value: Any) -> str:
    """Say how a value differs from the expected one; nothing if all bits are equal."""
    if describe(expected) != describe(value):
        return f"{shown_shapes(value)} in place of {shown_shapes(expected)}"
    pairs = paired_outputs(parts_of(expected), parts_of(value))
    if isinstance(pairs, str):
        return pairs
    for wanted, actual in pairs:
        if not isinstance(wanted, Tensor):
            if wanted != actual:
                return f"{actual!r} in place of {wanted!r}"
        elif not same_bits(wanted.detach(), actual.detach().to(wanted.device)):
            figures = measure(wanted, actual, Tolerance())
            return (
                f"{figures.num_different:,} of {figures.num_elements:,} numbers, by "
                f"{figures.max_abs:.4g} at most"
            )
    return ""

"""Whether a call leaves a network as the network's own call does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from scio_recorder.lowlevel import random_state, restore_random
from scio_recorder.tensors import map_tensors, same_bits, tensors

State: TypeAlias = dict[str, Any]


def assert_undisturbed(
    net: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> None:
    """Check that a call behaves as the bare network, and leaves behind what that leaves.

    A copy of the network, without the hooks of this library, runs on copies of the inputs. Then
    ``call(*args, **kwargs)`` runs, from the same states of random generators. Compared are, bit for
    bit: what both return, gradients of parameters and inputs (where gradients are on), inputs,
    parameters with their ``grad`` and ``requires_grad``, buffers, training flags, classes, names of
    attributes and their values if these are numbers or texts, and generators of torch, NumPy and
    ``random``. Hooks must be those that were there before, and so must the modes of torch.

    Parameters
    ----------
    net : torch.nn.Module
        The network, which can be copied.
    call : callable
        Calls the network in some way. Without inputs, ``call()`` must leave everything as it was,
        and may return anything.
    *args, **kwargs
        Inputs of the network.

    Raises
    ------
    AssertionError
        Something differs; the message names the first thing that does.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
    >>> rnet = Recorder(net, input_size=(1, 3), verbose=0)
    >>> rnet.record("0")
    >>> assert_undisturbed(net, rnet, torch.randn(2, 3))
    >>> assert_undisturbed(net, lambda: Recorder(net, input_size=(1, 3), verbose=0))
    >>> assert_undisturbed(net, lambda: net.eval())
    Traceback (most recent call last):
        ...
    AssertionError: training of '': False for True
    """
    process, before = _state_of_process(net), _frozen(_state(net))
    if not (args or kwargs):
        call()
        _assert_same(_state(net), before)
    else:
        twin = _copied(net)
        bare = _Run(twin, twin, args, kwargs)
        restore_random(before["generators"])
        examined = _Run(net, call, args, kwargs)
        _assert_same(_state_of_process(net), process)
        _assert_same(examined.left, bare.left)
        # Last, since a change of what they need would make them fail.
        _assert_same(examined.gradients(), bare.gradients())
    _assert_same(_state_of_process(net), process)


def differences(
    actual: Any, expected: Any, where: str = "", tolerance: float | None = None
) -> Iterator[str]:
    """Yield in words where two structures differ: bit for bit, or with a tolerance."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        yield from _tensor_difference(actual, expected, where, tolerance)
    elif type(actual) is not type(expected):
        yield f"{where}: {type(actual).__name__} for {type(expected).__name__}"
    elif isinstance(expected, Mapping):
        if list(actual) != list(expected):
            yield f"{where}: {list(actual)} for {list(expected)}"
            return
        for key, value in expected.items():
            yield from differences(actual[key], value, f"{where}[{key!r}]", tolerance)
    elif isinstance(expected, tuple | list):
        if len(actual) != len(expected):
            yield f"{where}: {len(actual)} parts for {len(expected)}"
            return
        for index, value in enumerate(expected):
            yield from differences(actual[index], value, f"{where}[{index}]", tolerance)
    elif inside := tensors(expected):
        yield from differences(tensors(actual), inside, where, tolerance)
    elif isinstance(expected, int | float | str | None) and not (
        # NaN is not even equal to itself.
        actual == expected or (actual != actual and expected != expected)
    ):
        yield f"{where}: {actual!r} for {expected!r}"


def _tensor_difference(
    actual: Tensor, expected: Tensor, where: str, tolerance: float | None
) -> Iterator[str]:
    shape, wanted = (actual.dtype, tuple(actual.shape)), (expected.dtype, tuple(expected.shape))
    if shape != wanted:
        yield f"{where}: {shape} for {wanted}"
    elif actual.requires_grad != expected.requires_grad:
        yield f"{where}: requires_grad is {actual.requires_grad}"
    elif tolerance is None:
        if not same_bits(actual, expected):
            yield f"{where}: other values\n{actual}\nfor\n{expected}"
    elif not torch.allclose(actual, expected, tolerance, tolerance, equal_nan=True):
        error = float((actual.double() - expected.double()).abs().max())
        yield f"{where}: off by up to {error:.3g}\n{actual}\nfor\n{expected}"


def assert_same(
    actual: Any, expected: Any, where: str = "", tolerance: float | None = None
) -> None:
    """Raise an AssertionError that names the first difference, if there is one."""
    first = next(differences(actual, expected, where, tolerance), None)
    if first is not None:
        raise AssertionError(first)


def _assert_same(actual: State, expected: State) -> None:
    for name, value in expected.items():
        assert_same(actual.get(name), value, name)
    new = sorted(actual.keys() - expected.keys())
    if new:
        raise AssertionError(f"there is {new[0]} that was not there")


class _Run:
    """One call on copies of inputs, and what it leaves.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    call : callable
        What calls it.
    args, kwargs : tuple, dict
        Inputs.
    """

    def __init__(self, net: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._net, self._inputs = net, list[Tensor]()
        args, kwargs = map_tensors(self._prepared, (args, kwargs))
        self._output = call(*args, **kwargs)
        inputs = [tensor.detach() for tensor in self._inputs]
        self.left = _frozen({"output": self._output, "inputs": inputs} | _state(net))

    def _prepared(self, tensor: Tensor) -> Tensor:
        self._inputs.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        # Networks may write into what they are given, but not into leaves of the graph.
        return self._inputs[-1].clone() if tensor.requires_grad else self._inputs[-1]

    def gradients(self) -> State:
        """Differentiate a weighted sum of the output; leave no gradient behind."""
        losses = [_weighted_sum(part) for part in tensors(self._output) if part.requires_grad]
        if not (losses and torch.is_grad_enabled()):
            return {}
        parameters = dict(self._net.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        self._net.zero_grad(set_to_none=True)
        try:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # as torch has it
        except RuntimeError as error:
            return {"failure of the backward pass": f"{error:.60}"}
        gradients = {f"gradient of {name!r}": value.grad for name, value in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = before[name]
        return _frozen(gradients | {"gradients of inputs": [leaf.grad for leaf in self._inputs]})


def _copied(net: nn.Module) -> nn.Module:
    # In inference mode, parameters would be copied without their gradients.
    with torch.inference_mode(False):
        twin = copy.deepcopy(net)
        for parameter, copied in zip(net.parameters(), twin.parameters(), strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.clone()
    return twin


def _weighted_sum(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    weights = torch.linspace(-1, 1.5, values.numel(), dtype=torch.float64, device=values.device)
    return (values.reshape(-1).double() * weights).sum().cpu()


def _frozen(value: State) -> State:
    """Return a structure with copies of its tensors, which still say whether they had gradients."""

    def copied(leaf: Tensor) -> Tensor:
        has_gradient = leaf.requires_grad and not leaf.is_inference()
        return leaf.detach().clone().requires_grad_(has_gradient)

    with torch.inference_mode(False), torch.no_grad():
        frozen: State = map_tensors(copied, value)
    return frozen


def _state(net: nn.Module) -> State:
    state: State = {"generators": random_state()}
    for name, module in net.named_modules():
        state[f"training of {name!r}"] = module.training
        state[f"class of {name!r}"] = type(module).__qualname__
        attributes = sorted(vars(module).items(), key=lambda item: item[0])
        state[f"attributes of {name!r}"] = {
            key: value if isinstance(value, int | float | str) else None
            for key, value in attributes
        }
    for name, parameter in net.named_parameters():
        state[f"parameter {name!r}"] = parameter
        state[f"grad of {name!r}"] = parameter.grad
    return state | {f"buffer {name!r}": buffer for name, buffer in net.named_buffers()}


def _state_of_process(net: nn.Module) -> State:
    """Return hooks by the names of their functions, and modes."""
    holders = {f"{name!r}": vars(module) for name, module in net.named_modules()}
    holders["all modules"] = {
        key: value for key, value in vars(torch_module).items() if key.startswith("_global")
    }
    hooks = {
        f"{key} of {name}": [
            getattr(hook, "__qualname__", type(hook).__qualname__) for hook in value.values()
        ]
        for name, attributes in holders.items()
        for key, value in attributes.items()
        if "hooks" in key and isinstance(value, dict)
    }
    modes = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": str(torch.get_default_dtype()),
    }
    return hooks | modes

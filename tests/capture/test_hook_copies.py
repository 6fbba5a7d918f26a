"""Copies of a recorded network, and files of it, have no hooks of ours, and all hooks of others."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scio_recorder import Recorder
from tests.harness import recorder
from tests.oracle import same_bits


def user_hook(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def recorded(net: nn.Module) -> Recorder:
    rnet = recorder(net, "*", input_size=(2, 3), inputs=True, gradients=True)
    rnet(torch.ones(2, 3))
    return rnet


def hooks_of(net: nn.Module) -> dict[str, list[Any]]:
    found = {
        f"{name}.{kind}": list(hooks.values())
        for name, module in net.named_modules()
        for kind, hooks in vars(module).items()
        if "hooks" in kind and isinstance(hooks, dict)
    }
    return {name: hooks for name, hooks in found.items() if hooks}


def test_a_file_of_a_recorded_net_needs_no_recorder(tmp_path: Path) -> None:
    net = small_net()
    rnet = recorded(net)
    with rnet.track():
        torch.save(rnet.net, tmp_path / "net.pt")
    # The parts of such a file are not compressed: what it needs is named in it.
    assert b"torch.nn" in (tmp_path / "net.pt").read_bytes()
    assert b"scio_recorder" not in (tmp_path / "net.pt").read_bytes()
    twin = torch.load(tmp_path / "net.pt", weights_only=False)
    assert not hooks_of(twin)
    assert same_bits(twin(torch.ones(2, 3)), net(torch.ones(2, 3)))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_keep_the_hooks_of_others_alone(way: Any) -> None:
    net = small_net()
    net[0].register_forward_hook(user_hook)
    net[1].register_forward_pre_hook(pre_hook, with_kwargs=True)
    before = hooks_of(net)
    rnet = recorded(net)
    late = net[0].register_forward_hook(user_hook)
    with rnet.track():
        twin = way(net)
    late.remove()
    assert sum(map(len, hooks_of(twin).values())) == sum(map(len, before.values())) + 1
    assert all(
        type(hook) in (type(user_hook), bool) for one in hooks_of(twin).values() for hook in one
    )
    record = rnet.activations["0"].clone()
    # The hook that was removed since doubles once more in the copy.
    assert same_bits(twin(torch.zeros(2, 3)), net[1](net[0](torch.zeros(2, 3)) * 2))
    assert same_bits(rnet.activations["0"], record)


def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
    return None


def test_dictionaries_of_hooks_stay_the_same_objects_and_come_out_as_they_were() -> None:
    net = small_net()
    handle = net[0].register_forward_hook(user_hook)
    dictionaries = [net[0]._forward_hooks, net[0]._forward_pre_hooks]
    rnet = recorded(net)
    assert [net[0]._forward_hooks, net[0]._forward_pre_hooks] == dictionaries
    assert net[0]._forward_hooks is dictionaries[0]
    handle.remove()
    rnet.remove()
    assert not hooks_of(net)
    for module in net.modules():
        for value in vars(module).values():
            assert not (isinstance(value, OrderedDict) and vars(value))

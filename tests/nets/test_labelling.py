"""Labels are torchinfo's, they name the calls that were made, and labelling leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import warnings
import weakref
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchinfo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torchinfo import torchinfo as engine

from scio_recorder.errors import LabellingError, MissingInputError, UnsupportedNetError
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.labelling.label import label_net
from scio_recorder.nets.selection import select
from scio_recorder.nets.state.untouched import copy_inputs, copy_net
from tests.garbage import garbage_left
from tests.harness import run_in_threads
from tests.rotation import one_in
from tests.zoo import BY_NAME, CASES
from tests.zoo.base import Net, linear
from tests.zoo.transformers import CASES as OF_TRANSFORMERS

# Outputs that torchinfo itself gives up on.
BEYOND_TORCHINFO = (
    "dataclass_output",
    "frozen_dataclass_output",
    "slotted_dataclass_output",
    "object_output",
    "namespace_output",
    "assigns_into_returned_container",
    "mapping_that_yields_rows",
    "scalars",
)
COMPARED = [case for case in CASES if case.name not in BEYOND_TORCHINFO]


def architecture_of(net: nn.Module, *args: Any, **kwargs: Any) -> Architecture:
    return label_net(net, input_data=list(args), force_static_flow=False, **kwargs)[1]


def label_case(name: str) -> Architecture:
    case = BY_NAME[name]
    args, kwargs = case.inputs(0)
    return architecture_of(case.fresh(), *args, **kwargs)


def snapshot(net: nn.Module) -> dict[str, Any]:
    """Everything about a net and the generators that labelling could change."""
    attributes = [dict(vars(module)) for module in net.modules()]
    tensors = net.state_dict(keep_vars=True)
    return {
        "attributes": [
            {k: v for k, v in each.items() if not k.startswith("_")} for each in attributes
        ],
        "containers": [
            {k: (id(v), list(v)) for k, v in each.items() if isinstance(v, dict | list | set)}
            for each in attributes
        ],
        "tensors": {
            k: (id(t), t.data_ptr(), t._version, t.requires_grad) for k, t in tensors.items()
        },
        "values": {k: t.detach().clone().tolist() for k, t in tensors.items()},
        "torch": torch.get_rng_state().tolist(),
        "numpy": [np.asarray(part).tolist() for part in np.random.get_state()],
        "random": random.getstate(),
        "cache": dict(engine._cached_forward_pass),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


@pytest.mark.parametrize("case", one_in(10, COMPARED), ids=repr)
def test_rows_and_labels_are_those_of_torchinfo(case):
    args, kwargs = case.inputs(0)
    summary, architecture = label_net(
        case.fresh(), input_data=list(args), force_static_flow=False, **kwargs
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torchinfo.summary(case.fresh(), input_data=list(args), verbose=0, **kwargs)
    rows = {(row.depth, row.depth_index): row for row in expected.summary_list}
    assert list(architecture) == list(rows)
    assert [layer.type_name for layer in architecture.values()] == [
        row.class_name for row in rows.values()
    ]
    assert [layer.num_params for layer in architecture.values()] == [
        row.num_params for row in rows.values()
    ]
    for ours, theirs in zip(summary.summary_list, expected.summary_list, strict=True):
        # It loses those of modules that call themselves.
        if theirs.input_size:
            assert (ours.input_size, ours.output_size) == (theirs.input_size, theirs.output_size)


@pytest.mark.parametrize("name", BEYOND_TORCHINFO)
def test_nets_that_torchinfo_gives_up_on_are_labelled(name):
    case = BY_NAME[name]
    args, kwargs = case.inputs(0)
    with pytest.raises(RuntimeError, match="Failed to run torchinfo"):
        torchinfo.summary(case.fresh(), input_data=list(args), verbose=0, **kwargs)
    architecture = label_case(name)
    assert architecture[0, 1].executed


@pytest.mark.parametrize("case", one_in(10, CASES, 3), ids=repr)
def test_calls_and_their_order_are_those_of_a_real_pass(case):
    net = case.fresh().eval()
    args, kwargs = case.inputs(0)
    architecture = architecture_of(net, *args, **kwargs)
    returned: list[tuple[int, Any]] = []
    for module in net.modules():
        module.register_forward_hook(lambda m, a, out: returned.append((id(m), shapes(out))))
    with torch.no_grad():
        net(*args, **kwargs)
    ran = [layer for layer in architecture.values() if layer.executed]
    ran.sort(key=lambda layer: layer.completion)
    assert [id(layer.module) for layer in ran] == [module for module, _ in returned]
    for layer, (_, shape) in zip(ran, returned, strict=True):
        if shape is not None:
            assert layer.output_shape == shape


def shapes(output: Any) -> Any:
    return tuple(output.shape) if isinstance(output, Tensor) else None


@pytest.mark.parametrize("case", one_in(10, (*CASES, *OF_TRANSFORMERS), 6), ids=repr)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_labelling_leaves_no_trace(case, mode):
    if mode == "train" and not case.train:
        pytest.skip("the net can't be trained")
    net = case.fresh()
    args, kwargs = case.inputs(0)
    before, inputs = snapshot(net), copy.deepcopy((args, kwargs))
    architecture_of(net, *args, mode=mode, **kwargs)
    assert str(snapshot(net)) == str(before)
    assert str((args, kwargs)) == str(inputs)


def test_training_flags_of_each_submodule_are_kept():
    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(4), linear()))
    net.train()
    net[1].eval()
    architecture_of(net, torch.ones(2, 4))
    assert [module.training for module in net.modules()] == [True, True, False, False, False]


def test_a_net_that_changes_its_own_state_and_draws_random_numbers_is_left_as_it_was():
    def forget(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.a.weight.mul_(0.5)
            net.steps.add_(1)
        net.cache.append(x)
        net.last = x
        return net.a(x) * random.random() * float(np.random.rand()) * torch.rand(())

    net = Net(forget, a=linear(), steps=torch.zeros(()))
    net.cache = []
    before = snapshot(net)
    label_net(net, input_size=(1, 4))
    assert str(snapshot(net)) == str(before)
    assert net.cache == []
    assert not hasattr(net, "last")


def test_parameters_of_a_large_net_are_not_cloned(monkeypatch):
    monkeypatch.setattr("scio_recorder.nets.state.untouched.CLONED_BYTES", 16)
    net = nn.Sequential(linear(), nn.BatchNorm1d(4))
    twin = copy_net(net)
    assert twin[0].weight is not net[0].weight
    assert twin[0].weight.data_ptr() == net[0].weight.data_ptr()
    assert twin[1].running_mean.data_ptr() != net[1].running_mean.data_ptr()
    before = snapshot(net)
    label_net(net, input_size=(2, 4), mode="train")
    assert str(snapshot(net)) == str(before)


def test_hooks_that_the_net_needs_are_run():
    def widen(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].repeat(1, 2),)

    net = nn.Sequential(nn.Linear(8, 3))
    net[0].register_forward_pre_hook(widen)
    architecture = label_net(net, input_size=(1, 4))[1]
    assert architecture[1, 1].output_shape == (1, 3)
    assert len(net[0]._forward_pre_hooks) == 1


class _Gathers(nn.Module):
    """Runs a norm for each feature that its own hooks, or hooks of a library, have gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), linear())
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.features: dict[str, Tensor] = {}

    def gather(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features[name] = output

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        x = self.layers(x)
        for norm, feature in zip(self.norms, self.features.values(), strict=False):
            x = x + norm(feature)
        return x


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_hooks_that_are_methods_of_the_net_are_a_part_of_it(can_be_copied: bool) -> None:
    net, calls = _Gathers(), []
    for name, layer in net.layers.named_children():
        layer.register_forward_hook(partial(net.gather, name))
        layer.register_forward_hook(lambda *_: calls.append("user"))
    if not can_be_copied:
        net.lock = threading.Lock()
    layers = label_net(net, input_size=(1, 4))[1].values()
    assert [layer.name for layer in layers if layer.executed][-2:] == ["norms.0", "norms.1"]
    assert (calls, net.features) == ([], {})
    assert [len(layer._forward_hooks) for layer in net.layers] == [2, 2]


def test_hooks_by_which_transformers_gathers_hidden_states_are_a_part_of_the_net() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_channels": 2}
    config = transformers.ConvNextConfig(num_stages=2, out_features=["stage1", "stage2"], **sizes)
    net = transformers.ConvNextBackbone(config).eval()
    inputs = {"pixel_values": torch.randn(1, 2, 16, 16)}
    fresh = label_net(net, input_data=inputs)[1]
    assert fresh["hidden_states_norms.stage2"].executed
    net(**inputs)  # adds the hooks
    again = label_net(net, input_data=inputs)[1]
    assert again.fingerprint == fresh.fingerprint


def test_what_can_not_be_copied_is_no_obstacle():
    net = nn.Sequential(linear(), nn.BatchNorm1d(4))
    net.lock = threading.Lock()
    net.unfinished = (x for x in range(3))
    net.inside_a_graph = {"x": net[0].weight * 2}
    with pytest.raises(TypeError):
        copy.deepcopy(nn.Sequential(net))
    before = snapshot(net)
    architecture = label_net(net, input_size=(2, 4))[1]
    assert [layer.name for layer in architecture.values()] == ["", "0", "1"]
    assert str(snapshot(net)) == str(before)
    label_net(net, input_size=(2, 4), mode="train")
    after = snapshot(net)
    # The net itself was run, and version counters can't be turned back.
    del before["tensors"], after["tensors"]
    assert str(after) == str(before)
    assert list(net.unfinished) == [0, 1, 2]


class _LeadsBack(nn.Module):
    """Its forward is a closure over the module itself, so that a copy of it runs the original."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.cache = {}
        self.forward = lambda x: self._keep(self.norm(x))

    def _keep(self, x: Tensor) -> Tensor:
        self.cache["x"] = x
        # A value that is asked for makes labelling run the net once more.
        return x / x.abs().max().item()


def test_a_net_whose_copy_leads_back_to_it_is_labelled_and_left_as_it_was():
    net = nn.Sequential(_LeadsBack())
    calls = []
    net[0].norm.register_forward_hook(lambda *_: calls.append("hook"))
    before = snapshot(net)
    architecture = label_net(net, input_size=(3, 4), mode="train")[1]
    assert [layer.name for layer in architecture.values()] == ["", "0", "0.norm"]
    assert all(layer.executed for layer in architecture.values())
    assert architecture["0.norm"].module is net[0].norm
    after = snapshot(net)
    # The net itself was run, and version counters can't be turned back.
    del before["tensors"], after["tensors"]
    assert str(after) == str(before)
    assert calls == []


def test_summary_and_architecture_hold_the_modules_of_the_net_and_no_copy():
    net = Net(
        lambda net, x: net.last(net.listed[0](net.first(x))),
        first=nn.Sequential(nn.Identity()),
        listed=nn.ModuleList([linear()]),
        last=linear(),
    )
    statistics, architecture = label_net(net, input_size=(1, 4))
    modules = {id(module) for module in net.modules()}
    rows = list(statistics.summary_list)
    rows += [row.parent_info for row in rows if row.parent_info is not None]
    assert {id(row.module) for row in rows} <= modules
    assert all(row.layer_id == id(row.module) for row in rows)
    assert {id(layer.module) for layer in architecture.values()} <= modules


def test_torchinfos_cache_is_not_used():
    torchinfo.summary(nn.Sequential(linear()), input_size=(1, 4), verbose=0)
    assert "Sequential" in engine._cached_forward_pass
    architecture = label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4), cache_forward_pass=True)[
        1
    ]
    assert architecture[1, 1].type_name == "ReLU"


def test_neither_size_nor_data():
    with pytest.raises(MissingInputError, match="input_size=") as caught:
        label_net(linear())
    assert isinstance(caught.value, ValueError)


def test_the_message_of_a_net_that_fails_is_passed_on():
    with pytest.raises(LabellingError) as caught:
        label_net(nn.Sequential(linear()), input_size=(1, 5))
    message = str(caught.value)
    assert "(1, 5)" in message
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_texts_in_place_of_tensors():
    with pytest.raises(LabellingError) as caught:
        label_net(nn.Embedding(5, 2), input_data="a text")
    message = str(caught.value)
    assert "input_data='a text' failed with TypeError" in message
    assert "tokenizer(" in message
    assert "input_size" not in message


def test_parameters_without_data_and_an_input_made_of_a_size():
    weight = nn.Parameter(torch.empty(4, device="meta"))
    net = Net(lambda net, x: x.to("cpu") * 2, weight=weight)
    with pytest.raises(LabellingError, match=r"no data here.* give input_data="):
        label_net(net, input_size=(1, 4))
    _, architecture = label_net(net, input_data=torch.ones(1, 4))
    assert architecture[0, 1].executed


NESTED = {
    "forward": (lambda module: Net(lambda net, x: net.inner(x), inner=module), 64),
    "Sequential": (nn.Sequential, 80),
    "residual": (lambda module: Net(lambda net, x: x + net.inner(x), inner=module), 64),
    "both": (lambda module: nn.Sequential(NESTED["forward"][0](module)), 36),
}


@pytest.mark.parametrize("name", one_in(2, NESTED))
def test_a_net_nested_deeper_than_python_lets_us_label_says_how_to_go_on(name):
    around, depth = NESTED[name]
    net, limit = linear(), sys.getrecursionlimit()
    for _ in range(depth):
        net = around(net)

    def label():
        try:
            # The least that the net alone needs, as the usual limit is for deeper ones.
            for least in range(100, 1000, 10):
                with contextlib.suppress(RecursionError):
                    sys.setrecursionlimit(least)
                    net(torch.ones(1, 4))
                    break
            with pytest.raises(LabellingError, match=r"sys\.setrecursionlimit\(10_000\)"):
                label_net(net, input_size=(1, 4))
            sys.setrecursionlimit(10_000)
            return label_net(net, input_size=(1, 4))[1]
        finally:
            sys.setrecursionlimit(limit)

    # A new thread has its whole depth before it.
    with ThreadPoolExecutor(1) as pool:
        architecture = pool.submit(label).result()
    assert len(architecture) == len(list(net.modules()))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.ReLU, r"write ReLU\(\.\.\.\)"),
        (len, "must be a torch.nn.Module"),
        (nn.DataParallel(nn.ReLU()), "DistributedDataParallel"),
        (nn.Sequential(nn.LazyLinear(3)), "run the net once"),
        (nn.LazyBatchNorm1d(), "run the net once"),
    ],
)
def test_nets_that_can_not_be_observed(net, message):
    with pytest.raises(UnsupportedNetError, match=message):
        label_net(net, input_size=(2, 4))


def test_compiled_nets_are_refused_with_the_order_that_works():
    compiled = nn.Sequential(nn.ReLU())
    compiled.compile(backend="eager")
    for net in (torch.compile(nn.Sequential(nn.ReLU()), backend="eager"), compiled):
        with pytest.raises(
            UnsupportedNetError, match=r"rnet = Recorder\(net, \.\.\.\); rnet\.compile\(\)"
        ):
            label_net(net, input_size=(2, 4))


def test_a_module_that_contains_itself_is_refused():
    net = nn.Sequential(nn.Sequential())
    net[0].parent = net
    with pytest.raises(UnsupportedNetError, match=r"'0\.parent\.0' contains itself"):
        label_net(net, input_size=(2, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_scripted_modules_inside_did_not_run_as_far_as_hooks_can_tell():
    scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(UnsupportedNetError, match="TorchScript"):
        label_net(scripted, input_size=(2, 4))
    architecture = label_net(nn.Sequential(linear(), scripted), input_size=(2, 4))[1]
    assert architecture["0"].executed
    assert not architecture["1"].executed


@dataclass
class _Batch:
    x: Tensor
    name: str = "first"


@pytest.mark.parametrize(
    ("data", "function"),
    [
        (torch.ones(2, 4), lambda net, x: net.a(x)),
        ((torch.ones(2, 4), torch.ones(2, 4)), lambda net, x, y: net.a(x + y)),
        ({"x": torch.ones(2, 4)}, lambda net, x: net.a(x)),
        (UserDict(x=torch.ones(2, 4), flag=True), lambda net, x, flag: net.a(x)),
        (_Batch(torch.ones(2, 4)), lambda net, batch: net.a(batch.x)),
        ([_Batch(torch.ones(2, 4)), {1, 2}], lambda net, batch, other: net.a(batch.x)),
        ([{"x": torch.ones(2, 4), "s": "text"}], lambda net, batch: net.a(batch["x"])),
        ([torch.ones(2, 4), None, range(3)], lambda net, x, y, z: net.a(x)),
        (np.ones((2, 4), dtype=np.float32), lambda net, x: net.a(torch.from_numpy(x))),
    ],
)
def test_inputs_of_every_kind(data, function):
    architecture = label_net(Net(function, a=linear()), input_data=data)[1]
    assert architecture["a"].input_shape == architecture["a"].output_shape == (2, 4)


def test_no_inputs_are_none():
    net = Net(lambda net: net.a(torch.ones(1, 4)), a=linear())
    assert label_net(net, input_data={})[1]["a"].executed
    assert label_net(net, input_data=())[1]["a"].executed


def test_further_keywords_go_to_the_net():
    net = Net(lambda net, x, scale, names=(): net.a(x) * scale, a=linear())
    architecture = label_net(net, input_size=(2, 4), scale=3.0, names={"a": object()})[1]
    assert architecture["a"].executed
    assert architecture[0, 1].input_shape == ((2, 4), {"scale": None, "names": {"a": None}})


def test_inputs_are_not_changed_by_a_net_that_works_in_place():
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    net = Net(lambda net, x, y: net.a(x.mul_(2)) + y.add_(1), a=linear())
    label_net(net, input_data=[x], y=y)
    assert (x._version, y._version) == (0, 0)


def test_a_call_that_failed_and_was_caught_did_not_run():
    def fall_back(net: nn.Module, x: Tensor) -> Tensor:
        try:
            return net.wrong(x)
        except RuntimeError:
            return net.right(x)

    net = Net(fall_back, wrong=nn.Linear(5, 1), right=linear())
    architecture = label_net(net, input_size=(2, 4))[1]
    assert [layer.executed for layer in architecture.values()] == [True, False, True]
    assert [layer.completion for layer in architecture.values()] == [1, None, 0]


def test_a_module_that_calls_itself_returns_in_another_order_than_it_starts():
    def recurse(net: nn.Module, x: Tensor, depth: int = 2) -> Tensor:
        return net.a(x) if depth == 0 else net(x, depth=depth - 1)

    net = Net(recurse, a=linear())
    architecture = label_net(net, input_size=(2, 4))[1]
    assert [(str(layer.label), layer.call) for layer in architecture.values()] == [
        ("0-1", 0),
        ("0-2", 1),
        ("0-3", 2),
        ("1-1", 0),
    ]
    assert architecture.calls(net) == ((0, 3), (0, 2), (0, 1))


def test_containers_that_are_not_called_have_a_row_and_did_not_run():
    net = Net(lambda net, x: net.items[0](x), items=nn.ModuleList([linear()]))
    architecture = label_net(net, input_size=(2, 4))[1]
    row = architecture["items"]
    assert (row.executed, row.completion, row.output_shape, row.output_spec) == (False,) + (
        None,
    ) * 3
    assert architecture["items.0"].executed


def test_a_container_listed_twice_has_one_layer():
    def interleave(net: nn.Module, x: Tensor) -> Tensor:
        return net.b[0](net.a[1](net.b[0](net.a[0](x))))

    build = {"a": nn.ModuleList([linear(), linear()]), "b": nn.ModuleList([linear()])}
    net = Net(interleave, **build)
    statistics, architecture = label_net(net, input_size=(2, 4))
    labels = [(row.depth, row.depth_index) for row in statistics.summary_list]
    assert len(set(labels)) < len(labels)
    assert list(architecture) == list(dict.fromkeys(labels))
    assert [layer.name for layer in architecture.values() if layer.executed] == [
        "",
        "a.0",
        "b.0",
        "a.1",
        "b.0",
    ]


def test_structures_and_types_are_described():
    net = Net(lambda net, x: {"out": (net.a(x), x.long()), "n": 3}, a=linear())
    layer = label_net(net, input_size=(2, 4))[1][0, 1]
    assert layer.output_shape == {"out": ((2, 4), (2, 4)), "n": None}
    assert layer.output_spec["out"][1].dtype is torch.int64
    assert layer.output_spec["out"][1].nbytes == 64


def test_nothing_is_printed_unless_asked_for(capsys):
    def warns(net: nn.Module, x: Tensor) -> Tensor:
        warnings.warn("inside", stacklevel=1)
        return net.a(x)

    statistics, _ = label_net(Net(warns, a=linear()), input_size=(1, 4))
    assert capsys.readouterr() == ("", "")
    label_net(Net(warns, a=linear()), input_size=(1, 4), verbose=1)
    assert capsys.readouterr().out == f"{statistics}\n"


def test_keywords_of_torchinfo_override_the_defaults():
    net = nn.Sequential(nn.Sequential(linear()))
    statistics, architecture = label_net(net, input_size=(4,), batch_dim=0, depth=1, col_names=())
    assert "2-1" not in str(statistics)
    assert architecture[2, 1].output_shape == (1, 4)


def test_a_net_without_parameters_stays_on_the_cpu():
    devices = []

    class Noting(nn.Module):
        def forward(self, x):
            devices.append(x.device.type)
            return x

    label_net(Noting(), input_size=(1, 4), force_static_flow=False)
    assert devices == ["cpu"]


def test_a_net_on_another_device_is_labelled_there():
    net = nn.Sequential(nn.Linear(4, 3, device="meta"))
    assert label_net(net, input_size=(2, 4))[1]["0"].output_shape == (2, 3)
    assert net[0].weight.device.type == "meta"


def test_sizes_are_flat_also_for_dictionaries_with_a_batch_dimension():
    net = Net(lambda net, x: {"out": net.a(x)}, a=linear())
    statistics, _ = label_net(net, input_size=(4,), batch_dim=0)
    assert statistics.summary_list[0].output_size == [1, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cpu_net_stays_on_the_cpu_where_there_is_a_gpu():
    net = nn.Sequential(nn.BatchNorm1d(4), linear())
    before = snapshot(net)
    statistics, _ = label_net(net, input_size=(2, 4))
    assert {row.module.training for row in statistics.summary_list} == {True}
    assert str(snapshot(net)) == str(before)


def test_deep_nets_are_summarised_in_time_linear_in_their_depth():
    net: nn.Module = linear()
    for _ in range(60):
        net = nn.Sequential(net)
    # Sixty levels are out of reach of anything exponential.
    statistics, architecture = label_net(net, input_size=(1, 4))
    assert len(architecture) == 61
    assert "60-1" in str(statistics)
    assert statistics.total_params == 20


def test_threads_label_side_by_side():
    nets = [nn.Sequential(*(linear() for _ in range(n + 1))) for n in range(6)]
    labelled, filters = dict[int, int](), list(warnings.filters)

    def label(n: int) -> None:
        labelled[n] = len(label_net(nets[n], input_size=(1, 4))[1])

    run_in_threads(label, range(6))
    assert labelled == {n: n + 2 for n in range(6)}
    assert list(warnings.filters) == filters


def test_buffers_that_share_memory_share_it_in_the_copy():
    net = linear()
    net.register_buffer("whole", torch.zeros(4))
    net.register_buffer("front", net.whole[:2])
    twin = copy_net(net)
    twin.front.fill_(1)
    assert twin.whole.tolist() == [1, 1, 0, 0]
    assert net.whole.tolist() == [0, 0, 0, 0]


def test_of_a_slice_of_a_dataset_only_the_slice_is_copied():
    dataset = torch.zeros(1000, 4)
    copied = copy_inputs([dataset[:2]])[0]
    assert copied.untyped_storage().nbytes() == 2 * 4 * 4


def test_a_compiled_submodule_runs_as_if_it_were_not():
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    net = nn.Sequential(torch.compile(nn.Sequential(linear()), backend=backend), nn.ReLU())
    architecture = label_net(net, input_size=(2, 4))[1]
    assert architecture["0"].executed
    assert compilations == []


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
)
def test_labelling_inside_contexts(context):
    net = nn.Sequential(linear(), nn.BatchNorm1d(4))
    expected = label_net(net, input_size=(2, 4))[1].fingerprint
    with context():
        before = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        assert label_net(net, input_size=(2, 4))[1].fingerprint == expected
        assert (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_input_size_gives_inputs_of_the_type_of_the_parameters(dtype):
    net = nn.Sequential(linear(), linear()).to(dtype)
    layer = label_net(net, input_size=(2, 4))[1][0, 1]
    assert layer.output_spec.dtype is dtype
    two = Net(lambda net, x, y: net.a(x) * y, a=linear()).to(dtype)
    assert label_net(two, input_size=[(2, 4), (2, 4)])[1][0, 1].output_spec.dtype is dtype


def test_dtypes_that_are_given_count():
    net = nn.Sequential(nn.Embedding(5, 4), linear()).double()
    layer = label_net(net, input_size=(2, 3), dtypes=[torch.long])[1]["1"]
    assert (layer.output_shape, layer.output_spec.dtype) == ((2, 3, 4), torch.float64)


def force(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(net.a(x).pow(2).sum(), x, create_graph=True)[0]


def differentiate_backward(net: nn.Module, x: Tensor) -> Tensor:
    energy = net.norm(net.a(x)).pow(2).sum()
    energy.backward()
    return energy.detach()


@pytest.mark.parametrize("forward", [force, differentiate_backward])
@pytest.mark.parametrize("leads_back", [False, True])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_nets_that_differentiate_in_their_forward(forward, leads_back, has_gradient):
    net = Net(forward, a=linear(), norm=nn.BatchNorm1d(4))
    if leads_back:
        net.forward = lambda x: forward(net, x)
    if has_gradient:
        net.a.weight.grad = torch.ones(4, 4)
    data = torch.ones(2, 4)
    before, generator = snapshot(net), torch.get_rng_state()
    architecture = label_net(net, input_data=data, mode="train", force_static_flow=True)[1]
    assert architecture["a"].executed
    after = snapshot(net)
    # What leads back to the net runs the net itself, and is put back.
    kinds = ["values", "containers"] if leads_back else list(before)
    assert [str(after[kind]) for kind in kinds] == [str(before[kind]) for kind in kinds]
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.is_grad_enabled()
    assert data.grad is None
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert list(gradients) == ["a.weight"] * has_gradient
    assert all(torch.equal(gradient, torch.ones(4, 4)) for gradient in gradients.values())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_inputs(convert):
    net = Net(lambda net, adjacency, x: torch.sparse.mm(adjacency, net.a(x)), a=linear())
    data = [convert(torch.eye(3)), torch.ones(3, 4)]
    architecture = label_net(net, input_data=data)[1]
    assert architecture[0, 1].input_shape == ((3, 3), (3, 4))
    assert architecture["a"].output_shape == (3, 4)


def test_jagged_inputs():
    parts = [torch.ones(2, 4), torch.ones(3, 4)]
    data = torch.nested.nested_tensor(parts, layout=torch.jagged)
    statistics, architecture = label_net(nn.Sequential(linear(), nn.ReLU()), input_data=data)
    assert [layer.output_shape for layer in architecture.values()] == [(2, -1, 4)] * 3
    assert "ReLU" in str(statistics)


def test_a_module_that_refuses_to_be_true_or_false():
    class Undecided(nn.Linear):
        def __bool__(self):
            raise RuntimeError("it has no truth value")

    net = nn.Sequential(nn.Sequential(Undecided(3, 2)), nn.ReLU())
    architecture = label_net(net, input_size=(1, 3))[1]
    assert [layer.name for layer in architecture.values()] == ["", "0", "0.0", "1"]
    assert [layer.num_params for layer in architecture.values()] == [8, 8, 8, 0]


def test_a_compiled_block_of_a_class_without_length_inside_a_net():
    block = Net(lambda net, x: net.a(x), a=linear())
    net = nn.Sequential(torch.compile(block, backend="eager"), nn.ReLU())
    architecture = label_net(net, input_size=(2, 4))[1]
    assert [layer.name for layer in architecture.values() if layer.executed] == [
        "",
        "0",
        "0._orig_mod",
        "0._orig_mod.a",
        "1",
    ]


def test_a_net_that_fails_while_its_operations_are_followed():
    def forward(net, x):
        # So do functions that compile themselves, such as `flex_attention`.
        if is_in_torch_dispatch_mode():
            raise NotImplementedError
        return net.a(x)

    architecture = label_net(Net(forward, a=linear()), input_size=(2, 4))[1]
    assert [layer.name for layer in architecture.values() if layer.executed] == ["", "a"]


@pytest.mark.campaign
def test_a_function_that_compiles_itself_runs_after_labelling_as_before():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        pytest.skip("this version of torch compiles nothing while operations are followed")

    def forward(net, x):
        return net.a(flex.flex_attention(x, x, x))

    torch.compiler.reset()
    net, x = Net(forward, a=linear()), torch.randn(2, 3, 5, 4)
    weights = (x.double() @ x.double().mT / 2).softmax(-1)
    with torch.no_grad(), warnings.catch_warnings():
        # It warns that it runs without a fused kernel.
        warnings.simplefilter("ignore")
        label_net(net, input_data=x)
        torch.testing.assert_close(net(x), net.a((weights @ x.double()).float()))


def test_a_shared_module_goes_by_its_first_name():
    shared = nn.Sequential(nn.ReLU())
    net = nn.Sequential(shared, linear(), shared)
    architecture = label_net(net, input_size=(2, 4))[1]
    names = [layer.name for layer in architecture.values()]
    assert names == ["", "0", "0.0", "1", "0", "0.0"]
    both = architecture.labels_of("0")
    assert both == architecture.labels_of("2") == select(architecture, [lambda x: x.name == "0"])
    assert select(architecture, ["0"]) == select(architecture, ["2"]) == both
    # The table shows torchinfo's name, which is the last.
    assert [architecture[label].call for label in both] == [0, 1]


def test_an_error_of_the_net_is_gone_once_it_is_handled():
    class OwnError(Exception):
        pass

    def fail(net, x):
        raise OwnError

    net = nn.Sequential(linear(), Net(fail))
    with garbage_left():
        try:
            label_net(net, input_size=(2, 4))
        except LabellingError as error:
            errors = [weakref.ref(raised) for raised in (error, error.__cause__)]
        # They would hold the frames that they have left, and with them what these had open.
        assert [error() for error in errors] == [None, None]


def test_an_input_that_a_network_differentiates_by_requires_a_gradient_in_labelling() -> None:
    """As networks of forces do, which ask for the gradient of an energy by positions."""

    def forward(net: Any, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(net.energy(x).sum(), x)
        return force

    x = torch.randn(3, 4, requires_grad=True)
    _, architecture = label_net(Net(forward, energy=linear()), input_data=x)
    assert [row.name for row in architecture.values() if row.executed] == ["", "energy"]
    assert x.grad is None


# The parts of a network that finds them by a global variable, as no copy can follow.
PARTS: dict[str, nn.Module] = {}


def test_a_network_that_finds_its_parts_by_a_global_variable_runs_itself() -> None:
    net = Net(lambda _, x: PARTS["norm"](x), norm=nn.BatchNorm1d(4))
    PARTS["norm"] = net.norm
    before = copy.deepcopy(net.state_dict())
    _, architecture = label_net(net, input_size=(3, 4), mode="train")
    assert [row.name for row in architecture.values() if row.executed] == ["", "norm"]
    assert architecture["norm"].module is net.norm
    assert all(map(torch.equal, net.state_dict().values(), before.values()))

"""Private names of torch and of the interpreter: one that has gone is an error of ours."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import FlowError, Recorder, UnsupportedTorchError
from scio_recorder.tensors import private
from tests.rotation import one_in
from tests.tensors.private_examples import EXAMPLES
from tests.zoo.base import Net


def untried() -> ModuleType:
    """Load the module once more, none of whose names have been used."""
    spec = importlib.util.spec_from_file_location("untried_private", Path(private.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRIED = [
    name
    for name, value in vars(untried()).items()
    if hasattr(value, "__wrapped__") and not name.startswith("_")
]


def in_own_thread(example: Callable[[Any], bool], function: Any) -> bool:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(example, function).result()


def nothing(*args: Any) -> Any:
    return None


def gone(*args: Any) -> Any:
    raise AttributeError("no such name")


@pytest.mark.parametrize("name", EXAMPLES)
def test_name_means_what_it_is_taken_for(name: str) -> None:
    assert in_own_thread(EXAMPLES[name], vars(untried())[name])


def test_each_function_with_a_private_name_has_an_example() -> None:
    functions = {
        node.name
        for node in ast.parse(Path(private.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name[0] != "_"
    }
    assert functions <= set(EXAMPLES)
    assert {"backward_pass", "is_any_autocast_on", *TRIED} <= set(EXAMPLES)


# Some examples are broken off in the middle of what torch does.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", one_in(4, EXAMPLES))
def test_example_finds_another_meaning(name: str) -> None:
    with contextlib.suppress(Exception):
        assert not in_own_thread(EXAMPLES[name], nothing)
    gc.collect()
    assert not torch.nn.modules.module._has_any_global_hook()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "other"), one_in(2, itertools.product(TRIED, (nothing, gone))))
def test_other_meaning_is_an_error_where_a_number_would_change(
    name: str, other: Callable[..., Any]
) -> None:
    function = vars(untried())[name]
    function.__wrapped__.__code__ = other.__code__
    needed = function.__wrapped__.__annotations__.keys() - {"return"}
    for _ in range(2):
        with pytest.raises(UnsupportedTorchError, match=torch.__version__.split("+")[0]) as error:
            function(*needed)
    assert " needs " in str(error.value)
    del error
    gc.collect()


@pytest.mark.parametrize("name", TRIED)
def test_example_runs_once(name: str) -> None:
    module = untried()
    function = vars(module)[name].__wrapped__
    with pytest.MonkeyPatch.context() as patch:
        # What the example says now must not matter, only that it is asked.
        patch.setattr(module, "_try_example", nothing)
        patch.setattr(function, "__code__", nothing.__code__)
        assert vars(module)[name]() is None
        assert vars(module)[name] is function


def test_examples_run_whatever_surrounds_the_first_use() -> None:
    module = untried()
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        assert module.storage_uses(torch.ones(1, device="cpu")) > 0
    torch.vmap(lambda x: x * module.storage_uses(torch.ones(1)))(torch.ones(2))


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [((2, 7), False), ((2, 8), True), ((2, 14), True), ((2, 15), False), ((3, 0), False)],
)
def test_untested_torch_warns(version: tuple[int, int], is_tested: bool) -> None:
    if is_tested:
        private.warn_if_untested(version)
        return
    with pytest.warns(UserWarning, match=r"tested with torch 2\.8 to 2\.14"):
        private.warn_if_untested(version)


def test_tested_versions_are_those_of_the_documentation() -> None:
    table = (Path(__file__).parents[2] / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d{4}-\d\d-\d\d \| [\d.]+ \| (\d+)\.(\d+)", table, re.MULTILINE)
    versions = {(int(major), int(minor)) for major, minor in rows}
    assert (min(versions), max(versions)) == (private.OLDEST, private.NEWEST)


def recorded(**options: Any) -> Recorder:
    net = nn.Sequential(
        Net(lambda net, x: net.linear(x) * 2, linear=nn.Linear(2, 2)),
        nn.ReLU(inplace=True),
        nn.Unflatten(1, (1, 2)),
        Net(lambda _, x: (x * 2, x * 3)),
    )
    rnet = Recorder(net, input_size=(1, 2), verbose=0, force_static_flow=False)
    rnet.record("*", **options)
    return rnet


def differentiate() -> None:
    a, b = recorded(gradients=True)(torch.ones(1, 2))
    (a + b).sum().backward()


def run() -> None:
    recorded()(torch.ones(1, 2))


def post_process() -> None:
    recorded()(torch.ones(1, 2), activation_postproc=lambda output: None)


def label() -> None:
    with contextlib.suppress(FlowError):
        branch = Net(lambda _, x: x if x.sum() > 0 else -x)
        Recorder(branch, input_size=(1, 2), verbose=0)


def run_checkpointed() -> None:
    inner = nn.Linear(2, 2)
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=inner)
    rnet = Recorder(net, input_size=(1, 2), verbose=0, force_static_flow=False)
    rnet.record("inner")
    rnet(torch.ones(1, 2), activation_postproc=lambda x: x * 2).sum().backward()


FEATURES: dict[str, tuple[Any, Callable[[], None]]] = {
    "_current_graph_task_id": (torch._C, differentiate),
    "_top_saved_tensors_default_hooks": (torch._C._autograd, post_process),
    "_storage_Use_Count": (torch._C, run),
    "peek_interpreter_stack": (torch._C._functorch, run),
    "_is_any_autocast_enabled": (torch._C, run),
    "_CheckpointFrame": (torch.utils.checkpoint, run_checkpointed),
    "TorchDispatchMode": (torch.utils._python_dispatch, label),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FEATURES)
def test_feature_says_what_it_misses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, feature = FEATURES[name]
    feature()
    if name == "_CheckpointFrame":
        # What torch's own functions use can't be gone: it has become a function here.
        kind = place._CheckpointFrame
        monkeypatch.setattr(place, name, lambda *args: kind(*args))
    else:
        monkeypatch.delattr(place, name)
    # Loaded again, in a torch without the name.
    fresh = untried()
    for function in EXAMPLES:
        monkeypatch.setattr(private, function, vars(fresh)[function])
    with pytest.raises(UnsupportedTorchError, match=r"needs .* which torch"):
        feature()
    # Torch's own generator of a region that was broken off complains here, and not in another test.
    gc.collect()

"""Operations that are collected: what torch gives by hand, whatever the store, and read back."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import scio_recorder
from scio_recorder import OperationIdx, Recorder, Tokens, compare, open_recording, similarity
from scio_recorder.errors import (
    CollectError,
    LayerNotFoundError,
    SelectorTypeError,
    UnsupportedNetError,
)
from scio_recorder.layer import text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.reductions import Covariance, Digest, Max, Mean, Moments
from scio_recorder.stores import Disk
from scio_recorder.stores.disk import check_copies
from scio_recorder.tensors.digests import sample_digests
from tests.capture.test_watch_libraries import PROMPT, gpt2
from tests.recording.nets import recorder_of

ROOT = Path(__file__).parents[2]
KEYS = "/mul", "h.0/relu_", "h.0/add:1", "h.1/relu_", "h.1/add:0", "h.1", "/softmax"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.first(x))
        x = x + h
        if not torch.is_grad_enabled():
            # Autograd has saved it, and would notice.
            h.zero_()
        return x + self.second(x).tanh()


class Text(nn.Module):
    """A net whose operations return rows of tokens, but for the mask and the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.h = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids) * 2
        x += torch.arange(input_ids.shape[1])[:, None]
        for block in self.h:
            x = block(x)
        return self.head(x).transpose(0, 1).softmax(-1).transpose(0, 1)


def ids(*sizes: int, length: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, (size, length), generator=generator) for size in sizes]


def text_recorder(*selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(Text().eval(), input_data=torch.zeros(2, 5, dtype=torch.long))
    rnet.record(*(selectors or KEYS), **options)
    return rnet


@torch.no_grad()
def by_hand(net: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Compute what the operations of KEYS return, without the net's own code."""
    found = {}
    x = net.embed(input_ids) * 2
    found["/mul"] = x
    x = x + torch.arange(input_ids.shape[1])[:, None]
    for at, block in enumerate(net.h):
        h = found[f"h.{at}/relu_"] = block.first(x).clamp(min=0)
        x = found[f"h.{at}/add:0"] = x + h
        t = found[f"h.{at}/tanh"] = torch.tanh(block.second(x))
        x = found[f"h.{at}"] = found[f"h.{at}/add:1"] = x + t
    found["/softmax"] = net.head(x).transpose(0, 1).softmax(-1)
    return found


def wanted(net: Any, data: list[Tensor]) -> dict[str, Tensor]:
    found = [by_hand(net, batch) for batch in data]
    for one in found:
        # As TURNED turns it.
        one["/softmax"] = one["/softmax"].transpose(0, 1)
    return {key: torch.cat([one[key] for one in found]) for key in found[0]}


# What is [positions, batch, ...] has to be turned.
TURNED = {"/softmax": lambda activation, batch: activation.transpose(0, 1)}


def check(recording: Any, net: Any, data: list[Tensor]) -> None:
    for key, tensor in wanted(net, data).items():
        if key in KEYS:
            assert torch.equal(recording[key][:], tensor), key
    assert list(map(text_of, recording)) == [
        *("0-1/mul:0", "2-1/relu_:0", "2-1/add:1", "2-2/relu_:0", "2-2/add:0", "2-2"),
        "0-1/softmax:0",
    ]


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_every_store_keeps_what_they_return(store, tmp_path):
    rnet, data = text_recorder(), ids(4, 3, 1)
    given = f"disk:{tmp_path}/run" if store == "disk" else store
    recording = rnet.collect(data, store=given, transform=TURNED)
    check(recording, rnet.net, data)
    for copied in (copy.deepcopy(recording), pickle.loads(pickle.dumps(recording))):
        check(copied, rnet.net, data)
    recording.save(tmp_path / "saved")
    check(open_recording(tmp_path / "saved", verify=True), rnet.net, data)
    if store == "disk":
        # Layers are named inside files.
        assert all("add" not in name for name in os.listdir(tmp_path / "run"))


def test_a_recording_needs_no_net_and_nothing_that_runs_one(tmp_path):
    rnet, data = text_recorder(), ids(4)
    rnet.collect(data, store=f"disk:{tmp_path}", transform=TURNED)
    there = open_recording(tmp_path)
    operation = there.architecture["h.1/add:0"]
    assert isinstance(operation, scio_recorder.Operation)
    assert operation.label == (2, 2, "add", 0) == OperationIdx(2, 2, "add", 0)
    assert (operation.source, operation.file) == ("x = x + h", __file__)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[operation.line - 1].strip() == operation.source
    assert operation.layer is there.architecture["h.1"]
    assert operation.module is None
    assert torch.equal(there[2, 2, "add", 0][:], there["2-2/add:0"][:])
    # add:1 is known, as a call that counts, but was not recorded.
    assert "h.1/add:1" not in there
    with pytest.raises(LayerNotFoundError, match="no recording of layer 2-2/add:1"):
        there["h.1/add:1"]
    with pytest.raises(LayerNotFoundError, match=r"no operation is 'h\.1/sub'"):
        there["h.1/sub"]
    other = f"""
        import sys, scio_recorder
        recording = scio_recorder.open_recording({os.fspath(tmp_path)!r}, verify=True)
        print(recording["h.0/add:1"].shape, recording.architecture["h.0/add:1"].source)
        names = [name.split(".") for name in sys.modules if name.startswith("scio_recorder.")]
        running = {{"capture", "recorder", "events", "integrations", "command_line"}}
        assert not running.intersection(name[1] for name in names), names
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(other)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "torch.Size([4, 5, 4]) return x + self.second(x).tanh()\n"


@pytest.mark.parametrize("store", ["disk", None])
def test_reductions_of_operations_are_those_of_all_samples(store, tmp_path):
    rnet, data = text_recorder("h.*/add:1", "h.1/tanh"), ids(4, 3, 1)
    reduce = {"h.*/add:1": [Mean(), Max(), Digest()], "h.1/tanh": [Moments(), Covariance(2)]}
    given = store and f"disk:{tmp_path}"
    recording = rnet.collect(data, store=given, reduce=reduce)
    recording = open_recording(tmp_path) if store else recording
    found = wanted(rnet.net, data)
    for key in ("h.0/add:1", "h.1/add:1"):
        mean, most, digest = recording[key]
        torch.testing.assert_close(mean, found[key].double().mean(0).float())
        assert torch.equal(most, found[key].amax(0))
        assert torch.equal(digest, sample_digests(found[key]))
    moments, covariance = recording["h.1/tanh"]
    torch.testing.assert_close(moments.variance, found["h.1/tanh"].double().var(0).float())
    rows = found["h.1/tanh"].double().flatten(0, 1)
    torch.testing.assert_close(covariance.covariance, torch.cov(rows.T), check_dtype=False)


def test_rows_are_tokens():
    rnet = text_recorder("h.*/add:1", "h.0/relu_")
    batch = {"input_ids": ids(3)[0], "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    batch["attention_mask"][0, 2:] = batch["attention_mask"][1, 4:] = 0
    recording = rnet.collect([batch], rows=Tokens(), reduce={"h.1/add:1": Mean()})
    found, real = by_hand(rnet.net, batch["input_ids"]), batch["attention_mask"].bool()
    assert torch.equal(recording["h.0/add:1"], found["h.0/add:1"][real])
    assert torch.equal(recording["h.0/relu_"], found["h.0/relu_"][real])
    mean = found["h.1/add:1"][real].double().mean(0).float()
    torch.testing.assert_close(recording["h.1/add:1"], mean)
    lengths = [len(one) for one in recording.by_sample("h.0/add:1")]
    assert lengths == real.sum(1).tolist()
    batches = list(recording.loader("h.0/*", batch_size=4, with_rows=True))
    joined = torch.cat([values[2, 1, "add", 1] for values, _ in batches])
    assert torch.equal(joined, found["h.0/add:1"][real])


def test_options_choose_operations_by_selectors():
    rnet, data = text_recorder("h.*/add:1", "h.1/tanh", "h.1"), ids(4, 3, 1, 2)
    recording = rnet.collect(
        data,
        every=2,
        transform={"*/add:1": lambda activation, batch: activation.sum(1)},
        dtype=torch.bfloat16,
    )
    found = wanted(rnet.net, [data[0], data[2]])
    assert torch.equal(recording["h.0/add:1"], found["h.0/add:1"].sum(1).bfloat16())
    assert torch.equal(recording["h.1/tanh"], found["h.1/tanh"].bfloat16())
    error = (found["h.1/tanh"].bfloat16().double() - found["h.1/tanh"].double()).norm()
    ratio = error / found["h.1/tanh"].double().norm()
    assert recording.relative_errors["h.1/tanh"] == pytest.approx(float(ratio))
    assert list(recording.sample_ids) == [0, 1, 2, 3, 7]
    with pytest.raises(LayerNotFoundError, match=r"'h\.1/sub'"):
        rnet.collect(data, transform={"h.1/sub": torch.abs})


def test_post_processors_and_an_early_stop():
    rnet, data = text_recorder("h.0/add:1", "h.1/add:0"), ids(3)
    ran = []
    rnet.net.head.register_forward_pre_hook(lambda *call: ran.append(call))
    recording = rnet.collect(
        data, activation_postproc={"h.0/add:1": lambda x: x * 0}, stop_early=True
    )
    assert not ran
    net = rnet.net
    with torch.no_grad():
        zero = torch.zeros(3, 5, 4)
        second = zero + torch.relu(net.h[1].first(zero))
    assert torch.equal(recording["h.0/add:1"], by_hand(net, data[0])["h.0/add:1"])
    assert torch.equal(recording["h.1/add:0"], second)


@pytest.mark.parametrize("key", ["/softmax", "/arange"])
def test_what_does_not_count_samples_is_refused(key):
    rnet = text_recorder(key)
    # The net has as many positions as samples, by chance: labelling tells them apart.
    with pytest.raises(CollectError, match=rf"layer 0-1{key}:0 {key}:0 .* dimension 0"):
        rnet.collect(ids(5))


def test_processes_that_may_have_shards_share_no_store(tmp_path):
    architecture = text_recorder("h.0/add:1").architecture
    architecture.num_sharing = 2
    store = Disk(tmp_path, rank=0, world_size=2)
    with (
        patch("torch.distributed.get_world_size", lambda: 4),
        pytest.raises(CollectError, match=r"2-1/add:1 .* it can't be known which part"),
    ):
        check_copies(architecture, ["2-1/add:1"], store)
    check_copies(architecture, ["2-1/add:1"], Disk(tmp_path))
    architecture.num_sharing = 1
    check_copies(architecture, ["2-1/add:1"], store)


def test_a_compiled_recorder_is_refused():
    rnet = text_recorder("h.0/add:1")
    rnet.compile(backend="eager")
    with pytest.raises(UnsupportedNetError, match="operations are seen in passes that are not"):
        rnet.collect(ids(2))


@pytest.mark.parametrize("store", ["host", "disk"])
def test_inputs_are_those_that_functions_received(store, tmp_path):
    rnet, data = (
        text_recorder("h.0/add:1", "/getitem", "h.0", "head/linear", inputs=True),
        ids(4, 3),
    )
    given = f"disk:{tmp_path}/run" if store == "disk" else store
    # getitem is a view without samples.
    recording = rnet.collect(
        data, store=given, transform={"/getitem": lambda x, batch: x.expand(len(batch), 5, 1)}
    )
    recording.save(tmp_path / "saved")
    for one in (recording, open_recording(tmp_path / "saved", verify=True)):
        for batch, number in zip(data, range(2), strict=True):
            found = by_hand(rnet.net, batch)
            args, kwargs = one.inputs["h.0/add:1"][number]
            assert torch.equal(args[0], found["h.0/add:0"])
            assert torch.equal(args[1], found["h.0/tanh"])
            assert not kwargs
            assert one.inputs["/getitem"][number].args[1] == (slice(None), None)
            weight = one.inputs["head/linear"][number].args[1]
            assert torch.equal(weight, rnet.net.head.weight)
            begun = found["/mul"] + torch.arange(5)[:, None]
            assert torch.equal(one.inputs["h.0"][number].args[0], begun)
        # The layers can run again, and the operations are left out of that.
        again = one.recompute(rnet, "h.0.second")["h.0.second"]
        assert torch.equal(again.tanh(), wanted(rnet.net, data)["h.0/tanh"])
        with pytest.raises(SelectorTypeError, match="recompute is for layers"):
            one.recompute(rnet, "h.0/add:1")


def test_an_input_that_no_file_can_hold_is_refused(tmp_path):
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(memory_format=torch.contiguous_format)

    rnet = Recorder(Odd(), input_size=(2, 3))
    rnet.record("/to", inputs=True)
    with pytest.raises(CollectError, match=r"layer 0-1/to:0 .* received a torch.memory_format"):
        rnet.collect([torch.ones(2, 3)], store=f"disk:{tmp_path}")


def test_what_is_kept_of_no_operation_is_not_copied():
    rnet, data = text_recorder("h.1/add:1", inputs=True), ids(4)
    recording = rnet.collect(data, store="host")
    assert list(recording.inputs) == [(2, 2, "add", 1)]
    # Neither the inputs of add:0 nor those of the layer around it.
    kept = recording.calls._source._tensors
    assert len(kept) == 2


def test_plans_modules_and_parameters_are_of_what_is_meant():
    rnet = text_recorder("h.0/add:1", "/softmax", "h.1")
    assert list(rnet.recorded_modules) == [(2, 2)]
    assert sorted(rnet.recorded_params) == [
        f"_net.h.1.{name}" for name, _ in sorted(rnet.net.h[1].named_parameters())
    ]
    assert rnet.plan(100).num_bytes == {
        (0, 1, "softmax", 0): 4 * 2 * 3 * 100,
        (2, 1, "add", 1): 4 * 5 * 4 * 100,
        (2, 2): 4 * 5 * 4 * 100,
    }
    for call in (rnet.recompute, rnet.saved_tensors):
        with pytest.raises(SelectorTypeError, match=r"is for layers, and 'h\.0/add:1'"):
            call("h.0/add:1")
    assert rnet.architecture["h.0/add:1"].source.startswith("return x + self.second")
    rnet.record("h.1")
    assert not rnet.architecture.operations
    # So recordings of layers are written as versions without operations did.
    assert "operations" not in rnet.architecture.to_dict()


def test_pages_tables_and_exports(tmp_path):
    rnet, data = text_recorder(), ids(4, 3)
    recording = rnet.collect(data, transform=TURNED)
    assert "2-2/add:0      h.1/add:0    add      [7, 5, 4] float32" in str(recording)
    frame = recording.to_frame()
    found = wanted(rnet.net, data)["h.1/relu_"]
    assert frame.loc["2-2/relu_:0", "mean"] == pytest.approx(float(found.mean()))
    # As of the module: a ReLU's units that are never active.
    dead = int((found.amax((0, 1)) == 0).sum())
    assert frame.loc["2-2/relu_:0", "dead"] == dead
    assert [axes.get_title() for axes in recording.plot(layers=["h.1/add:0"]).axes] == [
        "2-2 h.1/add:0"
    ]
    html = recording.report(tmp_path / "page.html").read_text(encoding="utf-8")
    tree = html[html.index('class="sn-tree"') :]
    places = [tree.index(f">{label}<") for label in ("2-2", "3-3", "2-2/relu_:0", "2-2/add:0")]
    assert places == sorted(places)
    assert places[-1] < tree.index(">3-4<")
    assert f"{__file__}:" in html
    assert "<dt>Recorded</dt><dd>1 of 10 layers and 6 operations</dd>" in html
    assert "x = x + h" in html
    assert 'id="layer-2-2/add:0"' in html
    assert 'href="#layer-2-2/add:0"' in html
    table = recording.to_arrow().read_all()
    name = "2-2/add:0_h.1/add:0"
    values = table[name].combine_chunks().to_numpy_ndarray()
    assert np.array_equal(values, wanted(rnet.net, data)["h.1/add:0"].numpy())
    group = recording.to_zarr(tmp_path / "zarr")
    assert np.array_equal(group["2-2%2Fadd%3A0_h.1%2Fadd%3A0"][:], values)


def test_the_tree_of_a_recorder_shows_what_is_recorded():
    rnet = text_recorder("h.1/add:0", "h.0")
    html = rnet._repr_html_()
    assert "1 of 10 layers and 1 operation recorded" in html
    assert "test_collected_operations.py:" in html
    assert "add:0" not in rnet.architecture._repr_html_()
    assert str(rnet).splitlines()[-2] == "Currently recording: 2-1, 2-2/add:0"


def test_names_from_a_file_can_disturb_no_page(tmp_path):
    rnet = text_recorder("h.1/add:0")
    described = rnet.architecture.to_dict()
    described["operations"] = [
        {**one, "label": [*one["label"][:2], "<script>\x1b[31m", 0], "source": '"><b>'}
        for one in described["operations"][:1]
    ]
    there = Architecture.from_dict(described)
    (label,) = there.operations
    held = rnet.collect(ids(2))
    held._architecture, held._values = there, {label: held["h.1/add:0"]}
    html = held.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>\\x1b" not in html
    assert '"><b>' not in html
    assert "\x1b" not in html + str(held)


def test_operations_are_listed_as_a_table():
    rnet = text_recorder()
    listed = rnet.operations("h.1")
    first = rnet.operations()["h.1.first/linear"]
    own = ("relu_", 0), ("add", 0), ("zero_", 0), ("tanh", 0), ("add", 1)
    assert list(listed) == [(2, 2, *one) for one in own]
    assert listed["h.1/add:1"] is listed[OperationIdx(2, 2, "add", 1)] is listed["2-2/add:1"]
    assert first.output_shape == (2, 5, 4)
    lines = str(listed).splitlines()
    assert lines[0] == "5 operations"
    assert lines[1].split() == ["Operation", "Output", "shape", "Line", "Source"]
    here = f"test_collected_operations.py:{listed['h.1/add:0'].line}"
    assert lines[3].split(maxsplit=5) == ["h.1/add:0", "(2,", "5,", "4)", here, "x = x + h"]
    html = listed._repr_html_()
    assert html.count("<tr>") == 6
    assert "x = x + h" in html
    with pytest.raises(LayerNotFoundError, match=r"'h\.1/add' is ambiguous"):
        listed["h.1/add"]


def test_operations_are_compared_and_their_similarity_is_measured():
    rnet, data = text_recorder("h.*/add:1", "h.1/tanh", "h.1", inputs=True), ids(4, 3)
    other = Recorder(copy.deepcopy(rnet.net), input_data=data[0])
    with torch.no_grad():
        other.net.h[1].second.bias += 0.25
    mine, changed = wanted(rnet.net, data), wanted(other.net, data)
    recording = rnet.collect(data)
    for one in (rnet, recording):
        difference = compare(one, other, data, progress=False)
        assert difference["h.0/add:1"].max_abs == 0
        for key in ("h.1/tanh", "h.1/add:1"):
            away = (mine[key].double() - changed[key].double()).abs().max()
            assert difference[key].max_abs == float(away)
        # The tanh is given what differs, and the layer around it is not.
        assert difference.first.layer.name == "h.1"
        assert difference["h.1/tanh"].inputs_equal is False
        assert difference["h.1/tanh"].candidate_label == (2, 2, "tanh", 0)
    assert compare(recording, recording).first is None
    assert "add:1" in difference._repr_html_()
    both = similarity(recording, recording)
    values = [mine[key].double().flatten(1) for key in ("h.0/add:1", "h.1/tanh")]
    own, their = (one - one.mean(0) for one in values)
    cka = (own.T @ their).norm() ** 2 / ((own.T @ own).norm() * (their.T @ their).norm())
    at = list(recording).index((2, 1, "add", 1)), list(recording).index((2, 2, "tanh", 0))
    assert both.values[at] == pytest.approx(float(cka))


def run_with(net: Any, values: dict[str, Any], input_ids: Tensor) -> Tensor:
    """Run a net by hand, with functions of what some operations return in their places."""

    def made(key: str, value: Tensor) -> Tensor:
        return values.get(key, lambda own: own)(value)

    x = net.embed(input_ids) * 2 + torch.arange(5)[:, None]
    for at, block in enumerate(net.h):
        x = made(f"h.{at}/add:0", x + made(f"h.{at}/relu_", block.first(x).clamp(min=0)))
        x = x + made(f"h.{at}/tanh", torch.tanh(block.second(x)))
    return net.head(x).softmax(-1)


def metric(output: Tensor) -> Tensor:
    return output[0, -1, 1]


SWEPT = "h.0/add:0", "h.1/relu_", "h.1/add:0", "h.1/tanh"


@pytest.mark.parametrize("positions", [None, "all"])
def test_a_sweep_patches_operations(positions):
    rnet = text_recorder("h.*/add:0", "h.1/tanh", "h.1/relu_")
    rnet(ids(2)[0])
    before = rnet.activations
    clean, corrupted = ids(1, 1)
    effects = rnet.sweep(clean, corrupted, metric, positions)
    true = by_hand(rnet.net, clean)
    for key in SWEPT:

        def patched(own: Tensor, at: int | None, true: Tensor = true[key]) -> Tensor:
            mixed = true.clone() if at is None else own.clone()
            mixed[:, at] = true[:, at]
            return mixed

        found = []
        for place in [None] if positions is None else range(5):
            with torch.no_grad():
                value = {key: partial(patched, at=place)}
                found.append(float(metric(run_with(rnet.net, value, corrupted))))
        torch.testing.assert_close(
            effects[key].flatten(), torch.tensor(found, dtype=torch.float64), atol=1e-6, rtol=1e-6
        )
    # What was recorded stays as it was, and hooks of the sweep are gone.
    assert rnet.activations is before
    assert not rnet.net.h[1].first._forward_hooks


class Outputs(TorchFunctionMode):
    """Copies of what a torch function returns, by any code."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function
        self.outputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is self._function:
            self.outputs.append(output.clone())
        return output


def generate(net: Any) -> Tensor:
    text: Tensor = net.generate(**PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return text


def test_generate_is_collected(tmp_path):
    net = gpt2()
    with Outputs(torch.tanh) as seen:
        text = generate(net)
    rnet = recorder_of(net, "transformer.h.*.mlp.act/tanh", input_data=PROMPT)
    with rnet.collecting(
        store=f"disk:{tmp_path}", rows=Tokens(fields=("input_ids",))
    ) as collection:
        assert torch.equal(generate(net), text)
    for recording in (collection.recording, open_recording(tmp_path, verify=True)):
        for layer in range(2):
            whole = torch.cat(seen.outputs[layer::2], 1)
            samples = recording.by_sample(f"transformer.h.{layer}.mlp.act/tanh")
            assert torch.equal(samples[0], whole[0, 2:])
            assert torch.equal(samples[1], whole[1])
        assert recording.rows["step"].max() == 3

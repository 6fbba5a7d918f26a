"""Slips of newcomers, each with the error that it gets and what the error says to write."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

import scio_recorder
from scio_recorder import (
    ActivationCheckpointer,
    CollectError,
    ComparisonError,
    FlowError,
    LabellingError,
    LayerNotFoundError,
    MissingInputError,
    Nodes,
    PostprocessorError,
    Recorder,
    RecordingError,
    Tokens,
    UnsupportedNetError,
    compare,
    open_recording,
    reductions,
    stores,
    track,
)
from scio_recorder.errors import ArgumentError, RecomputeError, RecorderError, SelectorTypeError
from scio_recorder.postprocessors import Ablate, At, Clip, Heads, Knockout  # noqa: F401 - in texts

X = torch.ones(6, 4)
IDS = torch.randint(5, 40, (2, 6), generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()


def recorder(*selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(net(), input_size=(1, 4))
    rnet.record(*selectors, **options)
    return rnet


def ran(*selectors: Any, **options: Any) -> Recorder:
    rnet = recorder(*selectors, **options)
    rnet(X)
    return rnet


@functools.cache
def gpt2() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50}
    made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    return made.eval()


def text(*selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(gpt2(), input_data=IDS)
    rnet.record(*selectors, **options)
    return rnet


def attended() -> Any:
    rnet = text("*.attn", attention=True)
    rnet(IDS)
    return rnet.attention["transformer.h.0.attn"]


def collect(rnet: Recorder | None = None, batches: Any = (X,), **options: Any) -> Any:
    return (rnet or recorder("0")).collect(batches, progress=False, **options)


def sweep(**options: Any) -> Any:
    return recorder("0").sweep(X, X + 1, **{"metric": lambda output: output.mean(), **options})


def watched() -> Any:
    rnet = recorder("0")
    with rnet.watch() as passes:
        rnet(X)
    return passes


def without_gradients() -> Any:
    rnet = recorder("0", gradients=True)
    with torch.no_grad():
        rnet(X)
    return rnet.gradients["0"]


def assigned() -> None:
    records: Any = ran("0").activations
    records["0"] = X


def closed() -> Any:
    with recorder("0") as rnet:
        pass
    rnet(X)
    return rnet.activations["0"]


def entered_twice() -> None:
    rnet = recorder("0")
    block = rnet.guard()
    for _ in range(2):
        with block:
            rnet(X)


def read_too_early() -> Any:
    rnet = recorder("0")
    with rnet.collecting() as collection:
        rnet(X)
        return collection.recording


def inside_with(read: Callable[[Recorder], Any]) -> Any:
    with recorder("0") as rnet:
        rnet.net(X)
        return read(rnet)


def collected_in_block() -> Any:
    with recorder("0").collecting() as collection:
        return collection["0"]


def replaced(calls: Any = "labelled") -> None:
    rnet = recorder("2", calls=calls)
    rnet.net[2] = nn.Linear(3, 2)  # type: ignore[operator]  # a Sequential
    rnet(X)


def post(function: Any, *selectors: str) -> Any:
    return recorder(*(selectors or ("0",)))(X, activation_postproc=function)


# What is written, the class of the error, and words that say what to write.
SLIPS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # -- constructing
    (lambda: Recorder(nn.Linear, input_size=(1, 4)), UnsupportedNetError, "write Linear(...)"),
    (lambda: Recorder(net().state_dict(), input_size=(1, 4)), UnsupportedNetError, "load weights"),
    (lambda: Recorder("gpt2", input_size=(1, 4)), UnsupportedNetError, "make the module"),
    (lambda: Recorder(net()), MissingInputError, "write input_size=(1, 4),"),
    (lambda: Recorder(net(), (1, 4)), MissingInputError, "write Recorder(net, input_size=(1, 4))"),
    (lambda: Recorder(net(), input_shape=(1, 4)), MissingInputError, "name is 'input_size'"),
    (lambda: Recorder(net(), input_data=X, static_flow=False), LabellingError, "static_flow'"),
    (lambda: Recorder(gpt2(), inputs_size=(1, 4)), MissingInputError, "'input_size'"),
    (lambda: Recorder(net(), input_data=X, force_static_flow="no"), LabellingError, "or False"),
    (lambda: Recorder(net(), input_data=X.tolist()), LabellingError, "by torch.tensor(x)"),
    (lambda: Recorder(net(), input_data=X.numpy()), LabellingError, "by torch.from_numpy(x)"),
    (lambda: Recorder(net(), input_data=DataLoader(X)), LabellingError, "next(iter(loader))"),
    (
        lambda: Recorder(net(), input_size=(1, 4), dtypes="float32"),
        LabellingError,
        "[torch.fl",
    ),
    (
        lambda: Recorder(net(), input_size=(1, 4), device="gpu"),
        LabellingError,
        'machine, such as "',
    ),
    (lambda: Recorder(gpt2(), input_data="a text"), LabellingError, "tokenizer(texts, return_ten"),
    (lambda: Recorder(gpt2(), input_size=(1, 4)), LabellingError, "dtypes=[torch.long]"),
    (lambda: Recorder(nn.DataParallel(net()), input_size=(1, 4)), UnsupportedNetError, ".module"),
    (lambda: recorder().load_state_dict(net().state_dict()), ArgumentError, "rnet.net.load_state"),
    (
        lambda: recorder().load_state_dict(net().state_dict(), strict=False),
        RuntimeError,
        "write rnet.net.load_state_dict(...)",
    ),
    (lambda: setattr(recorder(), "net", net()), AttributeError, "another Recorder(net, ...)"),
    (lambda: setattr(recorder(), "recording", ["0"]), ArgumentError, "by rnet.record(...)"),
    # -- choosing layers
    (lambda: recorder("layer1"), LayerNotFoundError, "there are '0', '1', '2'"),
    (lambda: recorder(1, 3), SelectorTypeError, "write record((1, 3))"),
    (lambda: recorder("1,3"), LayerNotFoundError, 'a label is written "1-3"'),
    (lambda: recorder("net.0"), LayerNotFoundError, "the closest name is '0'"),
    (lambda: recorder("2.weight"), LayerNotFoundError, "the closest name is '2'"),
    (lambda: recorder(["0", "1"]), SelectorTypeError, "unpack it with *"),
    (lambda: recorder("ReLU"), LayerNotFoundError, "give the class ReLU"),
    (lambda: recorder(r"^\d$"), LayerNotFoundError, "given compiled, as re.compile(...)"),
    (lambda: recorder(None), SelectorTypeError, "a selector is (1, 3)"),
    (lambda: recorder((1, 2, 3)), SelectorTypeError, "as in record((1, 2), (1, 3))"),
    (lambda: recorder([1, 3]), SelectorTypeError, "in its own parentheses"),
    (lambda: recorder("0", input_data=X), ArgumentError, "write Recorder(net, input_data=...)"),
    (lambda: recorder("0", input=True), TypeError, "write inputs="),
    (lambda: recorder("0", grads=True), ArgumentError, "write gradients="),
    (lambda: recorder("0", attn=True), ArgumentError, "write attention="),
    (lambda: recorder("0", copy=True), SelectorTypeError, 'write "auto", "always" or "never"'),
    (lambda: recorder("0", calls="all"), SelectorTypeError, 'write "labelled" or "any"'),
    (lambda: recorder("0/gelu"), LayerNotFoundError, "there are 'linear'"),
    # -- running and reading
    (lambda: ran().activations["0"], LayerNotFoundError, "Choose layers, as by rnet.record("),
    (lambda: recorder("0").activations["0"], LayerNotFoundError, "record(...), which chose 1-1"),
    (lambda: collect().gradients, AttributeError, "keep what rnet.on_gradients(...) gives"),
    (lambda: recorder("0", gradients=True).gradients["0"], LayerNotFoundError, "run the net"),
    (lambda: ran("0", gradients=True).gradients["0"], LayerNotFoundError, "call loss.backward()"),
    (lambda: recorder("0")(X.to("meta")), RuntimeError, 'convert it, as x.to("cpu") does'),
    (lambda: recorder("0").collect([X.to("meta")]), CollectError, 'batch: batch.to("cpu")'),
    (
        lambda: Recorder(net(), input_data=X.to("meta")),
        LabellingError,
        'convert it, as input_data=x.to("cpu") does',
    ),
    (lambda: Recorder(net(), input_size=(1, 8)), LabellingError, "that the network takes"),
    (lambda: recorder("0")(X, y=X), TypeError, "Its forward takes input."),
    (lambda: ran("0").outputs, AttributeError, "write rnet.activations"),
    (lambda: ran("0").cache, AttributeError, "write rnet.activations"),
    (lambda: ran("0").hooks, AttributeError, "write rnet.recording"),
    (lambda: ran("0").reset_hooks, AttributeError, "write rnet.remove()"),
    (
        lambda: ran("0").activations["2"],
        LayerNotFoundError,
        'rnet.record(*rnet.recording, "1-3"), and',
    ),
    (
        lambda: ran("0", inputs=True).inputs["2"],
        LayerNotFoundError,
        'rnet.record(*rnet.recording, "1-3", inputs=True)',
    ),
    (lambda: ran("0").activations["*"], LayerNotFoundError, "patterns are for record(...)"),
    (lambda: ran("0").activations[0], LayerNotFoundError, 'here "0"'),
    (lambda: ran("0").inputs["0"], LayerNotFoundError, "inputs=True), then run"),
    (lambda: ran("0", gradients=True).gradients["0"], LayerNotFoundError, "loss.backward()"),
    (without_gradients, LayerNotFoundError, "outside of torch.no_grad()"),
    (assigned, ArgumentError, "activation_postproc={'0': lambda output: ...}"),
    (closed, LayerNotFoundError, "write no such block"),
    (
        lambda: inside_with(lambda rnet: rnet.activations["0"]),
        LayerNotFoundError,
        "inside `with rnet.watch() as passes:`",
    ),
    (lambda: recorder("0").activation, AttributeError, "the closest name is 'activations'"),
    (lambda: ran("0").activations.shape, AttributeError, "write [label].shape"),
    (lambda: recorder("0").layers, AttributeError, "write rnet.architecture"),
    (lambda: recorder("0").close(), AttributeError, "write rnet.remove()"),
    (lambda: text("*.mlp").generate(IDS), AttributeError, "write rnet.net.generate"),
    (lambda: recorder("0")(X.numpy()), TypeError, "write rnet(torch.from_numpy(x))"),
    (lambda: recorder("0")(DataLoader(X)), TypeError, "write rnet.collect(loader)"),
    (lambda: recorder("0")(X.double()), RuntimeError, "as x.to(torch.float32) does"),
    (lambda: recorder("0")(X, dont_recrd=True), TypeError, "the closest name is 'dont_record'"),
    (lambda: text("*.mlp")({"input_ids": IDS}), AttributeError, "write rnet(**batch)"),
    (replaced, FlowError, "Label the changed network anew"),
    (lambda: replaced("any"), FlowError, "Label the changed network anew"),
    (lambda: recorder("0")(torch.ones(6, 5)), RuntimeError, "Layer 1-1 0 (Linear) raised this"),
    (lambda: recorder("0")("a text"), TypeError, "write rnet(**tokenizer(texts, return_tens"),
    (lambda: text("*.mlp")(["a", "b"]), AttributeError, "write rnet(**tokenizer(texts, ret"),
    (lambda: recorder("0")(X.tolist()), TypeError, "write rnet(torch.tensor(x))"),
    (lambda: recorder("0")(), TypeError, "was given no input: write one, as in rnet(x)"),
    (lambda: recorder("0").extract(), TypeError, "write one, as in rnet(x)"),
    (lambda: recorder("0").check(), TypeError, "write one, as in rnet(x)"),
    (lambda: attended().weights("all"), ArgumentError, "leave it out for all"),
    (lambda: attended().weights(head=0), TypeError, "write heads="),
    (lambda: attended().weights(heads=[9]), ArgumentError, "there is no head [9] of 2"),
    (lambda: attended()[0], TypeError, "write rnet.attention[layer].weights()"),
    (lambda: recorder().extract(X), SelectorTypeError, "choose layers with record(...) first"),
    # -- changing
    (lambda: post({"2": Clip(0.5)}), PostprocessorError, 'rnet.record(*rnet.recording, "2")'),
    (lambda: post({"two": Clip(0.5)}), LayerNotFoundError, "there are '0', '1', '2'"),
    (lambda: post({"clip": Clip(0.5)}), LayerNotFoundError, "Without keys, it is for all"),
    (lambda: recorder()(X, activation_postproc=torch.relu), UserWarning, "record(...) first"),
    (lambda: post(Clip), PostprocessorError, "write Clip()"),
    (lambda: post(torch.zeros(3)), PostprocessorError, "give a callable for all recorded layers"),
    (lambda: post([torch.relu], "0", "2"), PostprocessorError, "give one for each"),
    (lambda: post(lambda x: x.detach().numpy()), PostprocessorError, "return a Tensor, or None"),
    (lambda: post(lambda x: x[:, :2]), RuntimeError, "return a tensor of the same shape"),
    (lambda: post(lambda module, args, output: output), PostprocessorError, "lambda output: ..."),
    (lambda: post(Ablate(9)), PostprocessorError, "write Ablate(channels, dim=...)"),
    (lambda: post(Heads(2, [0], Ablate())), PostprocessorError, "does not divide into 2 heads"),
    # -- collecting
    (lambda: collect(recorder()), CollectError, "choose layers with record(...) first"),
    (lambda: collect(batches=X), CollectError, "write batches=[x] for one batch"),
    (lambda: collect(batches=TensorDataset(X)), CollectError, "DataLoader(dataset, batch_size=32)"),
    (lambda: collect(batches={"x": X}), CollectError, "write batches=[x] if it is one batch"),
    (lambda: collect(batches=[X.numpy()]), CollectError, "torch.from_numpy(batch)"),
    (lambda: collect(batches=[]), CollectError, "batches is empty"),
    (lambda: collect(batches=[{"image": X, "y": X}]), CollectError, "lambda batch: batch['image']"),
    (lambda: collect(batches=[X.double()]), CollectError, "batch.to(torch.float32)"),
    (lambda: collect(text("*.mlp"), ["a text"]), CollectError, 'return_tensors="pt"'),
    (
        lambda: collect(text("*.attn"), [IDS]),
        CollectError,
        "batch: activation[0]",
    ),
    (lambda: collect(text("*.mlp"), [IDS, IDS[:, :3]]), CollectError, "write rows=Tokens()"),
    (lambda: collect(sotre="host"), ArgumentError, "write store="),
    (lambda: collect(batch_size=4), ArgumentError, "write DataLoader(dataset, batch_size=...)"),
    (lambda: collect(layers=["0"]), ArgumentError, "its arguments are batches, store, reduce"),
    (lambda: collect(store="gpu"), CollectError, 'write store="device"'),
    (lambda: collect(store="ram"), CollectError, 'write store="host"'),
    (lambda: collect(store="a/run"), CollectError, 'write store="disk:a/run"'),
    (lambda: collect(store=Path("a/run")), CollectError, 'write store="disk:'),
    (lambda: collect(store=stores.Disk), CollectError, "write store=Disk(...)"),
    (lambda: collect(store=None), CollectError, "give reduce="),
    (lambda: collect(resume=True), CollectError, 'write store="disk:PATH"'),
    (lambda: collect(reduce="mean"), CollectError, "write reductions.Mean()"),
    (lambda: collect(reduce=reductions.Mean), CollectError, "write Mean()"),
    (lambda: collect(reduce={"2": reductions.Mean()}), CollectError, "record it too, by rnet."),
    (lambda: collect(reduce={"mean": reductions.Mean()}), LayerNotFoundError, "choose layers"),
    (lambda: collect(rows=Tokens(mask=X)), CollectError, "or a function of the batch, lambda"),
    (lambda: collect(rows="tokens"), CollectError, "give scio_recorder.Tokens(...)"),
    (lambda: collect(rows=Nodes), CollectError, "write rows=Nodes()"),
    (lambda: collect(rows=Tokens(fields="input_ids")), CollectError, '("input_ids",)'),
    (lambda: collect(transform=lambda x, batch: None), CollectError, "return a tensor [batch, ..."),
    (lambda: collect(transform=lambda x: x), CollectError, "such as lambda activation, batch:"),
    (lambda: collect(transform=lambda x, batch: x.mean()), CollectError, "let it return [batch"),
    (lambda: collect(to_inputs=X), CollectError, "write to_inputs=lambda batch: ..."),
    (lambda: collect(max_batches="2"), CollectError, "give a whole number from 1 on"),
    (lambda: collect(stop_early="no"), CollectError, "write True or False"),
    (lambda: collect(reduce=["mean"]), CollectError, "write reductions.Mean()"),
    (lambda: collect(dtype="float16"), CollectError, "such as torch.bfloat16"),
    # -- recordings
    (
        lambda: collect()["2"],
        LayerNotFoundError,
        'rnet.record(*rnet.recording, "1-3") before rnet.collect(...)',
    ),
    (lambda: collect().reductions["0"], LayerNotFoundError, "rnet.collect(batches, reduce=...)"),
    (lambda: collect().relative_errors["0"], LayerNotFoundError, "collect(batches, dtype=...)"),
    (
        lambda: collect(reduce=reductions.Moments()).reductions["0"].mean,
        AttributeError,
        "which recording[label] is too, is that of .compute()",
    ),
    (lambda: collect().loader("0", batch_size=2)["0"], TypeError, "write `for batch in loader:`"),
    (lambda: collect().activations, AttributeError, 'such as recording["1-1"]'),
    (lambda: collect().rows["position"], KeyError, "it was made without rows="),
    (lambda: collect().to_numpy()["0"], KeyError, "which are labels: (1, 1)"),
    (lambda: stores.Host("a/run"), CollectError, 'write store="disk:a/run"'),  # type: ignore[arg-type]  # a text
    (lambda: collect().plot("bars"), ArgumentError, 'write "histograms" or "depth"'),
    (lambda: collect().loader("0", batchsize=2), ArgumentError, "write batch_size="),
    (
        lambda: collect().recompute(recorder("0"), "0"),
        RecomputeError,
        'write record("", inputs=True)',
    ),
    (lambda: open_recording("no/folder"), RecordingError, "give the folder that collect"),
    (lambda: open_recording(Path(__file__).parent), RecordingError, "give the place to which"),
    (lambda: open_recording("x", verify="all"), ArgumentError, "write True or False"),
    (lambda: open_recording(__file__), RecordingError, "name a folder"),
    (lambda: reductions.Mean().compute(), CollectError, "call update() before compute()"),
    # -- comparing, watching, guarding, sweeping
    (lambda: compare(net(), net(), [X]), ComparisonError, "write Recorder(net, input_data=x)"),
    (
        lambda: compare(recorder(), recorder()),
        ComparisonError,
        "write compare(reference",
    ),
    (lambda: compare(recorder(), text("*.mlp"), [X]), ComparisonError, "Write match="),
    (lambda: compare("a", "b"), ComparisonError, "open_recording('a')"),
    (lambda: compare(recorder(), recorder(), [X], tol=0.1), ArgumentError, "write rtol= or atol="),
    (lambda: scio_recorder.similarity(X, X), ComparisonError, "write rnet.collect(batches)"),
    (lambda: recorder("0").guard(grad=True), ArgumentError, "write gradients="),
    (
        lambda: recorder("0").guard().origin,
        AttributeError,
        "write `with rnet.guard(...)",
    ),
    (entered_twice, RecorderError, "write rnet.guard(...) again"),
    (lambda: recorder("0").watch(postproc=torch.relu), ArgumentError, "write activation_postproc="),
    (lambda: recorder("0").watch()[0], TypeError, "write `with rnet.watch(...)"),
    (lambda: watched()["0"], SelectorTypeError, "write passes[-1]['0']"),
    (lambda: watched().activations, AttributeError, "so write passes[-1][label]"),
    (collected_in_block, TypeError, "write collection.recording['0'], after the block"),
    (lambda: watched()[-1]["2"], LayerNotFoundError, 'rnet.record(*rnet.recording, "1-3")'),
    (lambda: watched().cat("0", dim=7), ArgumentError, "write another dim="),
    (read_too_early, CollectError, "read `recording` after it"),
    (lambda: sweep(position=[0]), ArgumentError, "write positions="),
    (lambda: sweep(metric="loss"), ComparisonError, "such as lambda output: output.mean()"),
    (lambda: sweep(metric=print), ComparisonError, "it must return one real number"),
    (lambda: sweep(metric=lambda output: output.logits), AttributeError, "tensor of shape (6, 2)"),
    (lambda: sweep(metric=nn.MSELoss()), ComparisonError, "the metric, given the network's output"),
    (lambda: ActivationCheckpointer(4), ArgumentError, "write CheckpointConfig(every=...)"),  # type: ignore[arg-type]  # a number
    (lambda: sweep(metric=lambda output: output), ComparisonError, "such as output.mean()"),
    (lambda: recorder("0").sweep(X, X), ArgumentError, "arguments are clean, corrupted, metric"),
    (lambda: track(net(), gradients=True), ArgumentError, "write grad="),
    (lambda: recorder("0").on_gradients(print), SelectorTypeError, "record(..., gradients=True)"),
]


class AnyKeyword(nn.Module):
    """A network whose forward takes, and ignores, keywords of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


# What is written, the advice that the message gives, and what is true once that has run in place of
# the slip. The first line makes what both use.
ADVICE = [
    (
        "rnet = ran('0', inputs=True)",
        "rnet.activations['2']",
        'rnet.record(*rnet.recording, "1-3", inputs=True)',
        "rnet(X); assert rnet.inputs['2'].args[0].shape == (6, 3) and '0' in rnet.inputs",
    ),
    (
        "rnet = ran('0', gradients=True, copy='always')",
        "rnet.activations['2']",
        'rnet.record(*rnet.recording, "1-3", gradients=True, copy="always")',
        "rnet(X).sum().backward(); assert [*rnet.gradients] == [(1, 1), (1, 3)]",
    ),
    (
        "rnet = ran('0', inputs=True)",
        "rnet(X, activation_postproc={'2': Clip(0.5)})",
        'rnet.record(*rnet.recording, "2", inputs=True)',
        "rnet(X, activation_postproc={'2': Clip(0.5)}); assert [*rnet.inputs] == [(1, 1), (1, 3)]",
    ),
    (
        "rnet = ran()",
        "rnet.activations['0']",
        'rnet.record(*rnet.recording, "1-1")',
        "rnet(X); assert torch.equal(rnet.activations['0'], rnet.net[0](X))",
    ),
    (
        "rnet = ran('2')",
        "rnet.inputs['0']",
        'rnet.record(*rnet.recording, "1-1", inputs=True)',
        "rnet(X); assert torch.equal(rnet.inputs['0'].args[0], X) and '2' in rnet.activations",
    ),
    (
        "rnet = ran('2')",
        "rnet.gradients['0']",
        'rnet.record(*rnet.recording, "1-1", gradients=True)',
        "rnet(X).sum().backward(); assert [*rnet.gradients] == [(1, 1), (1, 3)]",
    ),
    (
        "rnet, x = recorder('0', gradients=True), X",
        "rnet.activations['0']",
        "rnet(x)",
        "rnet(x).sum().backward(); assert [*rnet.gradients] == [(1, 1)]",
    ),
    (
        "rnet = text('*.mlp'); rnet(IDS)",
        "rnet.attention['transformer.h.0.attn']",
        'rnet.record(*rnet.recording, "4-2", attention="4-2")',
        "rnet(IDS); assert rnet.attention['4-2'].weights().shape == (2, 2, 6, 6)",
    ),
    (
        "rnet = text('*.attn', attention=True); rnet(IDS)",
        "rnet.activations['*.mlp'.replace('*', 'transformer.h.0')]",
        'rnet.record(*rnet.recording, "4-4", attention=["4-2"])',
        "rnet(IDS); assert [*rnet.attention] == [(4, 2)] and len(rnet.activations) == 2",
    ),
    (
        "rnet = text()",
        "rnet.record('blocks.0.resid_post')",
        'rnet.residual_stream()["blocks.0.resid_post"]',
        "rnet.record(rnet.residual_stream()['blocks.0.resid_post']); assert rnet.recording",
    ),
    (
        "rnet = text(); x = rnet.residual_stream(); record = rnet.record",
        "rnet.record(x)",
        "record(*x.values())",
        "assert set(rnet.recording) == {*x.values()}",
    ),
    (
        "collect(store='disk:run')",
        "open_recording('disk:run')",
        'write the place here without "disk:"',
        "assert open_recording('run').num_samples == 6",
    ),
    (
        "recording = collect()",
        "recording.save('disk:run')",
        'write the place here without "disk:"',
        "recording.save('run'); assert open_recording('run').num_samples == 6",
    ),
    (
        "recording = collect(recorder('2'))",
        "recording.activations",
        'recording["1-3"]',
        "assert recording['1-3'].shape == (6, 2)",
    ),
    (
        "moments = collect(reduce=reductions.Moments()).reductions['0']",
        "moments.mean",
        "which has count, mean, variance",
        "assert moments.compute().count == 6",
    ),
    (
        "rnet, candidate, batches = recorder('0'), recorder('0'), [X]",
        "rnet.compare(candidate, batches)",
        "scio_recorder.compare(rnet, candidate, batches)",
        "",
    ),
    (
        "rnet, loader = recorder('0'), DataLoader(X, batch_size=2)",
        "rnet.check(loader)",
        "rnet.check(next(iter(loader)))",
        "",
    ),
    (
        "net = nn.ModuleList([nn.Linear(4, 3)])",
        "Recorder(net, input_size=(1, 4))",
        "nn.Sequential(*net)",
        "Recorder(nn.Sequential(*net), input_size=(1, 4))",
    ),
    (
        "net = nn.ModuleDict({'a': nn.Linear(4, 3)})",
        "Recorder(net, input_size=(1, 4))",
        "nn.Sequential(*net.values())",
        "Recorder(nn.Sequential(*net.values()), input_size=(1, 4))",
    ),
    ("", "from scio_recorder import Clip", "from scio_recorder.postprocessors import Clip", ""),
    ("", "from scio_recorder import Mean", "from scio_recorder.reductions import Mean", ""),
    ("", "stores.Host('a/run')", 'store="disk:a/run"', "collect(store='disk:a/run')"),
    ("", "Tokens(field=('mask',))", "fields=", "Tokens(fields=('mask',))"),
    ("", "Knockout(head=0)", "heads=", "Knockout(queries=[1], keys=[0], heads=[0])"),
    ("", "Knockout(query=[1], keys=[0])", "queries=", "Knockout(queries=[1], keys=[0])"),
    ("", "reductions.Mean(dim=0)", "its arguments are by", "reductions.Mean(by=len)"),
    ("", "collect().to_frame('0')", "it takes none", "collect().to_frame()"),
    ("", "attended().plot(heads=0)", "head=", "attended().plot(head=0)"),
    ("", "sweep().plot(tokens=['a'])", "its arguments are position_names", "sweep().plot()"),
    ("", "collect().audit([X])", "audit() missing a required argument: 'batches'", ""),
    ("", "open_recording(collect())", "read it as it is", "collect()['0']"),
    (
        "",
        "collect(transform=lambda x: x)",
        "takes 1 argument: it must be callable, transform(activation, batch)",
        "collect(transform=lambda activation, batch: activation[:, 0])",
    ),
    (
        "",
        "sweep(metric='output')",
        "lambda output: output.mean()",
        "sweep(metric=lambda output: output.mean())",
    ),
    (
        "texts, tokenizer = ['a'], lambda texts, **options: texts",
        "collect(batches='a text')",
        'batches=[tokenizer(texts, padding=True, return_tensors="pt")]',
        "",
    ),
    (
        "texts, tokenizer = ['a'], lambda texts, **options: texts",
        "text('*.mlp')(input_ids=IDS.tolist())",
        'tokenizer(texts, return_tensors="pt")',
        "text('*.mlp')(input_ids=IDS)",
    ),
    (
        "",
        "text('*.attn', attention='all')",
        "attention=True is for all recorded layers",
        "text('*.attn', attention=True)",
    ),
    (
        "positions = [2]",
        "post(At([9], torch.relu))",
        "(slice(None), positions)",
        "post(At((slice(None), positions), torch.relu))",
    ),
    (
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        "Recorder(net(), input_size=(1, 4), device='gpu')",
        'such as "',
        "Recorder(net(), input_size=(1, 4), device=device)",
    ),
]


@pytest.mark.parametrize(("first", "slip", "advice", "then"), ADVICE, ids=lambda part: None)
def test_advice_can_be_followed(
    first: str, slip: str, advice: str, then: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names = dict(globals())
    exec(first, names)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the class is that of each slip
        exec(slip, names)
    message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert advice in message
    # What is code, and not words or the name of an argument.
    with suppress(SyntaxError):
        exec(compile(advice, "advice", "exec"), names)
    exec(then, names)


@pytest.mark.parametrize(("write", "kind", "says"), SLIPS, ids=lambda part: None)
def test_slips_are_answered(
    write: Callable[[], Any], kind: type[Exception], says: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        write()
    error = caught.value
    notes = getattr(error, "__notes__", [])
    assert says in " ".join([str(error), *notes])
    # Torch's or Python's own error has a note of ours, or comes from an attribute that we look up.
    assert isinstance(error, RecorderError | AttributeError | UserWarning) or notes
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("method", ["guard", "watch", "collecting"])
def test_a_block_that_is_never_entered_says_so(method: str) -> None:
    rnet = recorder("0")

    def drop() -> None:
        getattr(rnet, method)()

    with pytest.warns(UserWarning, match=f"never entered: .*`with rnet.{method}") as caught:
        drop()
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    # One that was read has said it, and one that was entered need not.
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with pytest.raises(AttributeError, match=r"`with rnet.guard\("):
            rnet.guard().origin  # noqa: B018  # reading it is the slip
        with rnet.guard() as guard:
            rnet(X)
        assert guard.origin is None
    assert not others


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            lambda: Recorder(AnyKeyword(), input_size=(1, 4))(X, dont_recrd=True),
            "the closest name is 'dont_record'",
        ),
        (
            lambda: Recorder(AnyKeyword(), input_size=(1, 4))(X, attention=True),
            "write rnet.record(..., attention=True)",
        ),
        (
            lambda: Recorder(AnyKeyword(), input_size=(1, 4), forced_static_flow=True),
            "the closest name is 'force_static_flow'",
        ),
        (
            lambda: Recorder(AnyKeyword(), input_size=(1, 4), attention=True),
            "write rnet.record(..., attention=True)",
        ),
        (lambda: compare(collect(), collect(), [X]), "both sides are recordings: leave it out"),
    ],
)
def test_what_would_be_ignored_is_warned_of(write: Callable[[], Any], says: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(says)) as caught:
        write()
    assert [warning.filename for warning in caught] == [__file__]


def test_keywords_of_the_network_are_not_warned_of() -> None:
    class Takes(AnyKeyword):
        def forward(self, x: torch.Tensor, attention: bool = False, **others: Any) -> torch.Tensor:
            return super().forward(x)

    Recorder(Takes(), input_size=(1, 4), attention=True)(X, attention=True)
    Recorder(AnyKeyword(), input_size=(1, 4))(X, inputs=X, mask=None)


def test_names_of_other_modules_are_no_attributes_of_the_package() -> None:
    assert not hasattr(scio_recorder, "clip")
    assert not hasattr(scio_recorder, "__wrapped__")
    with pytest.raises(AttributeError):
        scio_recorder.NoSuchName  # noqa: B018  # reading it is the slip


@pytest.mark.parametrize(
    "write",
    [lambda: post({"clip": Clip(0.5)}), lambda: collect(reduce={"mean": reductions.Mean()})],
)
def test_keys_that_are_no_layers_are_not_taken_for_operations(write: Callable[[], Any]) -> None:
    with pytest.raises(LayerNotFoundError, match=r"there are '0', '1', '2'(\n|$)") as caught:
        write()
    assert "choose layers" in caught.value.__notes__[0]

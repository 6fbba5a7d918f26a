"""What a message says to write is written, and does what was meant."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from scio_recorder import Recorder, Recording, Tokens
from scio_recorder.errors import (
    CollectError,
    LabellingError,
    LayerNotFoundError,
    MissingInputError,
    PostprocessorError,
    SelectorTypeError,
)
from tests.zoo import Case, transformers
from tests.zoo.base import Net

IDS = torch.randint(5, 40, (4, 7), generator=torch.Generator().manual_seed(0))


def code_in(error: object, start: str) -> str:
    """Return the code in a message that begins like this, up to the bracket that closes it."""
    text = str(error)
    first = text.index(start)
    depth = 0
    for place in range(first, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if not depth and text[place] in ")]}":
            return text[first : place + 1]
    raise AssertionError(f"no code in {text}")


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50}
    net: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    return net.eval()


def returned(net: nn.Module, *args: Any, **kwargs: Any) -> dict[nn.Module, list[Tensor]]:
    """Return copies of what calls of the modules of a net return, kept by a global hook."""
    seen: dict[nn.Module, list[Any]] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        parts = output.values() if isinstance(output, Mapping) else output
        first = output if isinstance(output, Tensor) else next(iter(parts))
        seen.setdefault(module, []).append(first.clone() if isinstance(first, Tensor) else None)

    handle = nn.modules.module.register_module_forward_hook(keep)
    try:
        with torch.no_grad():
            net(*args, **kwargs)
    finally:
        handle.remove()
    return seen


def check(recording: Recording, expected: list[dict[Any, list[Tensor]]]) -> None:
    for label in recording:
        layer = recording.architecture[label]
        batches = [seen[layer.module][layer.call] for seen in expected]
        # Layers that have the tokens of all samples in one dimension are divided.
        assert torch.equal(recording[label].view_as(torch.cat(batches)), torch.cat(batches)), layer


def collected(rnet: Recorder, batches: list[Any]) -> Recording:
    """Collect what a recorder records, doing what errors say."""
    transform: dict[str, Any] = {}
    for _ in range(3):
        try:
            return rnet.collect(
                batches, to_inputs=lambda batch: batch, transform=transform, progress=False
            )
        except CollectError as error:
            if "rnet.record(" in str(error):
                eval(code_in(error, "rnet.record("), {"rnet": rnet})
            else:
                transform |= eval(code_in(error, "{"))
    raise AssertionError("errors say something else each time")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in ("llama", "t5") else pytest.mark.campaign)
        for case in transformers.CASES
    ],
    ids=repr,
)
def test_all_layers_of_a_network_that_can_be_kept_come_to_a_page(
    case: Case, tmp_path: Path
) -> None:
    net = case.fresh().eval()
    batches = [case.inputs(seed) for seed in (1, 2)]
    args, kwargs = batches[0]
    rnet = Recorder(net, input_data=kwargs or args, force_static_flow=case.static_flow)
    rnet.record("*")
    recording = collected(rnet, batches)
    check(recording, [returned(net, *args, **kwargs) for args, kwargs in batches])
    assert len(list(recording)) > len(rnet.architecture) / 3
    page = recording.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(recording.architecture[label].name in page for label in recording)


@pytest.mark.parametrize("labelled", [IDS, IDS[:1]], ids=["four", "one"])
def test_layers_that_can_not_be_kept_are_left_out_together(labelled: Tensor) -> None:
    net = gpt2()
    rnet = Recorder(net, input_data=labelled)
    rnet.record("*")
    before = len(rnet.recording)
    with pytest.raises(CollectError) as caught:
        rnet.collect([IDS], progress=False)
    eval(code_in(caught.value, "rnet.record("), {"rnet": rnet})
    recording = rnet.collect([IDS], progress=False)
    expected = returned(net, IDS)
    assert 20 < len(list(recording)) < before
    check(recording, [expected])


def test_a_transform_is_for_all_blocks() -> None:
    net = gpt2()
    rnet = Recorder(net, input_data=IDS)
    rnet.record("*.attn", "*.mlp")
    with pytest.raises(CollectError) as caught:
        rnet.collect([IDS], progress=False)
    transform = eval(code_in(caught.value, "{"))
    assert list(transform) == ["transformer.h.*.attn"]
    recording = rnet.collect([IDS], transform=transform, progress=False)
    expected = returned(net, IDS)
    check(recording, [expected])
    # The same function for all layers takes a sample instead, and the message tells them apart.
    with pytest.raises(CollectError, match=r"the transform of layer .*mlp.* only some layers"):
        rnet.collect([IDS], transform=lambda activation, batch: activation[0], progress=False)


@pytest.mark.parametrize("rows", [None, Tokens()])
def test_lines_of_several_samples_are_divided(rows: Tokens | None) -> None:
    def flattening(net: Any, input_ids: Tensor) -> Tensor:
        """Gives its layers tokens of all samples in one dimension, as mixtures of experts do."""
        x: Tensor = net.table(input_ids)
        for expert in net.experts:
            x = expert(x.flatten(0, 1)).view_as(x)
        return x

    experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    net = Net(flattening, table=nn.Embedding(50, 8), experts=experts)
    rnet = Recorder(net, input_data=IDS[:3, :5])
    rnet.record("experts.*")
    with pytest.raises(CollectError) as caught:
        rnet.collect([{"input_ids": IDS}], rows=rows, progress=False)
    transform = eval(code_in(caught.value, "{"))
    recording = rnet.collect([{"input_ids": IDS}], rows=rows, transform=transform, progress=False)
    first = net.experts[0](net.table(IDS))
    kept = recording["experts.0"].view_as(first)
    torch.testing.assert_close(kept, first.detach(), rtol=0, atol=1e-6)


def holding(net: Any, x: Tensor) -> Tensor:
    inner: Any = net.down[1]
    out: Tensor = net.up["b"](net.up["a"](inner[0](net.down[0](x))))
    return out


@pytest.mark.parametrize(("name", "names"), [("up", ["up.a", "up.b"]), ("down.1", ["down.1.0"])])
def test_containers_are_unpacked(name: str, names: list[str]) -> None:
    down = nn.ModuleList([nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])])
    up = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    rnet = Recorder(Net(holding, down=down, up=up), input_size=(1, 4))
    for selector in (name, rnet.net.get_submodule(name)):
        with pytest.raises(LayerNotFoundError) as caught:
            rnet.record(selector)
        eval(code_in(caught.value, "record("), {"rnet": rnet, "record": rnet.record})
        assert [rnet.architecture[label].name for label in rnet.recording] == names
    # One of those in the first is a container, too.
    for several, number in (("down", 2), ("*[pn]", 4)):
        with pytest.raises(LayerNotFoundError) as caught:
            rnet.record(several)
        eval(code_in(caught.value, "record("), {"record": rnet.record})
        assert len(rnet.recording) == number


def test_attention_is_recorded_where_it_is() -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    with pytest.raises(LayerNotFoundError) as caught:
        rnet.record("*.mlp", attention=True)
    eval(code_in(caught.value, "record("), {"record": rnet.record})
    rnet(IDS)
    assert len(rnet.attention) == 2
    with pytest.raises(CollectError) as refused:
        rnet.collect([IDS], progress=False)
    transform = eval(code_in(refused.value, "{"))
    recording = rnet.collect([IDS], transform=transform, progress=False)
    assert [tuple(recording[label].shape) for label in recording] == [(4, 4, 1, 7)] * 2


def test_keywords_that_are_inputs() -> None:
    net, mask = gpt2(), torch.ones_like(IDS)
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask}
    with pytest.raises(MissingInputError) as caught:
        Recorder(net, **given)
    data = eval(code_in(caught.value, "{"), given)
    assert Recorder(net, input_data=data).architecture[0, 1].executed
    with pytest.raises(MissingInputError, match="or input_data= a tensor"):
        Recorder(net, example=IDS)


def test_a_decoder_needs_an_input() -> None:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    config = AutoConfig.for_model("t5", **sizes, vocab_size=50)
    net = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(LabellingError) as caught:
        Recorder(net, input_data=IDS)
    data = eval(code_in(caught.value, "{"), {"x": IDS, "ids": IDS[:, :1]})
    assert Recorder(net, input_data=data).architecture["decoder"].executed


def test_what_a_network_takes_is_named() -> None:
    with pytest.raises(LabellingError, match=r"its forward takes input1, input2$"):
        Recorder(nn.Bilinear(2, 2, 3), input_size=(1, 2))
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(LabellingError) as caught:
        Recorder(nn.Linear(2, 3), input_data=loader)
    data = eval(code_in(caught.value, "next("), {"loader": loader})
    assert Recorder(nn.Linear(2, 3), input_data=data).architecture[0, 1].output_shape == (2, 3)
    with pytest.raises(LabellingError, match=r"next\(iter\(loader\)\)\[0\]$"):
        Recorder(nn.Linear(2, 3), input_data=[data, torch.zeros(2)])


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_of_keywords_is_unpacked(kind: Any) -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    batch = kind({"input_ids": IDS})
    with pytest.raises(AttributeError) as caught:
        rnet(batch)
    assert caught.value.__notes__[-1].endswith("write rnet(**batch).")
    rnet(**batch)


def test_a_post_processor_by_position() -> None:
    rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
    with pytest.raises(TypeError) as caught:
        rnet(torch.ones(1, 2), torch.relu)
    assert "write activation_postproc=" in caught.value.__notes__[-1]


@pytest.mark.parametrize("batch", ["a text", ["two", "texts"], (["two", "texts"], [0, 1])])
def test_texts_are_tokenized(batch: Any) -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    rnet.record("transformer.h.?")
    with pytest.raises(CollectError) as caught:
        rnet.collect([batch], progress=False)

    def tokenizer(texts: Any, padding: bool, return_tensors: str) -> dict[str, Tensor]:
        return {"input_ids": IDS[: 1 if isinstance(texts, str) else len(texts)]}

    written = str(caught.value).partition("to_inputs=")[2]
    to_inputs = eval(written, {"tokenizer": tokenizer})
    recording = rnet.collect([batch], to_inputs=to_inputs, progress=False)
    assert recording.num_samples == (1 if isinstance(batch, str) else 2)


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        (
            "*.self_attn",
            "the closest names are 'transformer.h.*.attn.c_attn', 'transformer.h.*.attn'",
        ),
        ("*.mlp.gate", "there are 'transformer', 'lm_head', 'transformer.wte'"),
        ("h.1", "the closest name is 'transformer.h.1'"),
        ("*.gelu", "the closest name is 'transformer.h.*.mlp.act'"),
        ("softmax", 'calls of the function are operations: record("*/softmax")'),
        ("blocks.0.hook_resid_post", "in docs/how-to/coming-from-transformerlens.md"),
        ("*.attn.hook_pattern", "in docs/how-to/coming-from-transformerlens.md"),
        ("nn.LayerNorm", 'or lambda layer: layer.type_name == "LayerNorm"'),
    ],
)
def test_names_of_blocks(selector: str, says: str) -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    with pytest.raises(LayerNotFoundError, match=re.escape(says)):
        rnet.record(selector)


def test_numbers_are_no_layers() -> None:
    rnet = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
    with pytest.raises(SelectorTypeError, match='or "0" for the layer of this name'):
        rnet.record(0)


def test_a_part_of_a_tuple_is_changed() -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    rnet.record("*.attn")
    with pytest.raises(ValueError, match="too many values") as caught:
        rnet(IDS, activation_postproc=lambda output: output * 2)
    assert "a tuple of 2 to one of 4: return a tuple like it" in caught.value.__notes__[-1]
    with pytest.raises(PostprocessorError) as refused:
        rnet(IDS, activation_postproc=lambda output: output[0] * 2)
    for error in (caught.value.__notes__[-1], refused.value):
        code = code_in(error, "(changed, ")

        def double(output: Any, code: str = code) -> Any:
            return eval(code, {"changed": output[0] * 2, "output": output})

        out = rnet(IDS, activation_postproc=double).logits
        with torch.no_grad():
            for block in rnet.net.transformer.h:
                block.attn.c_proj.weight *= 2
                block.attn.c_proj.bias *= 2
            torch.testing.assert_close(out, rnet.net(IDS).logits)


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        (lambda layer: "mlp" in layer, "as in lambda layer: layer.name.endswith"),
        ("h.1.add", 'calls of the function are operations: record("*/add")'),
        ("add:0", 'calls of the function are operations: record("*/add")'),
        (r"h\.\d+\.mlp", "a pattern is given compiled, as re.compile(...)"),
    ],
)
def test_selectors_of_other_kinds(selector: Any, says: str) -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    with pytest.raises(LayerNotFoundError, match=re.escape(says)):
        rnet.record(selector)


def test_attention_is_no_tensor() -> None:
    rnet = Recorder(gpt2(), input_data=IDS)
    rnet.record("*.attn", attention=True)
    rnet(IDS)
    attention: Any = rnet.attention["transformer.h.0.attn"]
    with pytest.raises(AttributeError, match=r"no attribute 'shape': its weights\(\)"):
        _ = attention.shape
    with pytest.raises(TypeError, match=r"write rnet\.attention\[layer\]\.weights\(\)$"):
        _ = attention[0]


@pytest.mark.parametrize("selector", ["1.convolution", "2.relu"])
def test_operations_are_thought_of_only_where_they_are_meant(selector: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Sequential(OrderedDict(relu=nn.ReLU())))
    rnet = Recorder(net, input_size=(1, 2))
    with pytest.raises(LayerNotFoundError) as caught:
        rnet.record(selector)
    assert "operations" not in str(caught.value)

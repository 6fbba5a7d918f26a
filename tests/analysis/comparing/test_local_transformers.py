"""Faults in ports of Llama, GPT-2 and a mixture of experts of transformers, by local errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scio_recorder import Recorder, compare
from scio_recorder.analysis.comparing.difference import Difference

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.campaign

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 99},
}
IDS = torch.randint(99, (3, 10), generator=torch.Generator().manual_seed(0))


def make(kind: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in made.parameters():
        # The usual ones are so small that attention hardly depends on its scores.
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1)
    return made.eval()


def judged(reference: Any, candidate: Any, batch: Any = IDS, **options: Any) -> Difference:
    both = [Recorder(net, input_data=batch) for net in (reference, candidate)]
    return compare(*both, [batch], local=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_clean_ports(kind: str, dtype: torch.dtype) -> None:
    difference = judged(make(kind, "eager"), make(kind, "sdpa").to(dtype))
    assert difference.faults == ()
    assert not difference.unjudged


def test_padding_and_a_cache_of_the_user() -> None:
    net, port = make("llama", "sdpa"), make("llama", "eager").bfloat16()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    assert judged(net, port, {"input_ids": IDS, "attention_mask": mask}).faults == ()

    def inputs(dtype: torch.dtype) -> Callable[[Tensor], dict[str, Any]]:
        def cached(ids: Tensor) -> dict[str, Any]:
            cache = net(ids[:, :4]).past_key_values
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
            return {"input_ids": ids[:, 4:], "past_key_values": cache}

        return cached

    both = inputs(torch.float32), inputs(torch.bfloat16)
    recorders = [
        Recorder(each, input_data=of(IDS)) for each, of in zip((net, port), both, strict=True)
    ]
    with torch.no_grad():
        assert compare(*recorders, [IDS], local=True, to_inputs=both).faults == ()


def in_llama(name: str, attribute: str, factor: float) -> Callable[[Any], str]:
    def plant(net: Any) -> str:
        module = net.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) * factor)
        return name

    return plant


def turned(net: Any) -> str:
    net.model.rotary_emb.inv_freq **= 1.1
    return "model.rotary_emb"


def one_row(net: Any) -> str:
    net.model.layers[1].mlp.up_proj.weight.data[7] *= 1.1
    return "model.layers.1.mlp.up_proj"


def narrow(net: Any) -> str:
    weight = net.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn).to(weight.dtype)
    return "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "plant",
    [
        in_llama("model.layers.1.self_attn", "scaling", 1.1),
        in_llama("model.layers.0.input_layernorm", "variance_epsilon", 1e4),
        turned,
        one_row,
        narrow,
    ],
)
def test_faults_of_a_llama(plant: Callable[[Any], str], dtype: torch.dtype) -> None:
    net, port = make("llama", "eager"), make("llama", "sdpa")
    name = plant(port)
    assert [fault.layer.name for fault in judged(net, port.to(dtype)).faults] == [name]

"""Fused experts of transformers: operations show routing, and what each expert returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from tests.rotation import one_in

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 99}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}


def _swiglu(experts: Any, number: int, x: Tensor) -> Tensor:
    gate, up = (x @ experts.gate_up_proj[number].T).chunk(2, -1)
    returned: Tensor = (nn.functional.silu(gate) * up) @ experts.down_proj[number].T
    return returned


def _gpt_oss(experts: Any, number: int, x: Tensor) -> Tensor:
    both = x @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    returned: Tensor = inner @ experts.down_proj[number] + experts.down_proj_bias[number]
    return returned


CASES = {
    "mixtral": ({"num_local_experts": 4}, "gate", _swiglu),
    "qwen3_moe": ({"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}, "gate", _swiglu),
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 8}, "router", _gpt_oss),
}


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_operations_show_routing_and_what_each_expert_returned(name: str) -> None:
    special, router, of_expert = CASES[name]
    options: dict[str, Any] = {**SIZES, **special}
    if name == "gpt_oss":
        options["layer_types"] = ["full_attention"]
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **options)
    ).eval()
    for parameter in net.parameters():
        # Biases begin at 0, and some weights of gpt-oss with memory as it is.
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 99, (2, 5))
    rnet = Recorder(net, input_data=ids)
    mlp = "model.layers.0.mlp"
    operations = (f"{mlp}.{router}/topk", f"{mlp}.{router}/linear", f"{mlp}.experts/view")
    rnet.record(*operations, f"{mlp}.experts", inputs=True)
    with torch.no_grad():
        rnet(ids)

    _, chosen = rnet.activations[operations[0]]
    logits = rnet.activations[operations[1]]
    assert torch.equal(chosen, logits.argsort(dim=-1, descending=True)[:, :2])
    tokens, numbers, weights = rnet.inputs[f"{mlp}.experts"].args
    assert torch.equal(numbers, chosen)
    returned = rnet.activations[operations[2]]
    assert torch.equal(returned.sum(1), rnet.activations[f"{mlp}.experts"])
    experts = net.get_submodule(f"{mlp}.experts")
    assert len(set(chosen.flatten().tolist())) > 2
    for token in range(len(tokens)):
        for place, number in enumerate(chosen[token].tolist()):
            by_hand = of_expert(experts, number, tokens[token : token + 1])[0]
            torch.testing.assert_close(
                returned[token, place], by_hand * weights[token, place], rtol=1e-4, atol=1e-5
            )

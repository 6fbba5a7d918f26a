"""A thousand honest columns of real architectures, by other kernels, and planted faults."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from scio_recorder import Recorder, Recording
from scio_recorder.integrations.hidden_states import recording_of_hidden_states

pytestmark = pytest.mark.campaign

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 48}
KINDS = {
    "gpt2": {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    **{name: {**WIDE, "num_key_value_heads": 2, "head_dim": 8} for name in ("gemma", "qwen3")},
    **{name: {**WIDE, "num_key_value_heads": 2} for name in ("llama", "mistral", "qwen2")},
    **dict.fromkeys(("gpt_neox", "phi", "bert"), WIDE),
}
BLOCKS = {"gpt2": "h", "opt": "decoder.layers", "bert": "encoder.layer"}
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def network(kind: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    net = AutoModel.from_config(config, attn_implementation=attention).eval()
    for parameter in net.parameters():
        # Biases, and weights of norms, that do something.
        parameter.data += 0.05 * torch.randn_like(parameter)
    return net


def padded(side: str) -> list[dict[str, Tensor]]:
    ids, lengths = torch.randint(3, 99, (6, 9)), torch.tensor([9, 5, 7, 9, 6, 8])
    real = torch.arange(9) < lengths[:, None]
    real = real.flip(1) if side == "left" else real
    ids = ids.masked_fill(~real, 1)
    return [
        {"input_ids": ids[some], "attention_mask": real[some].long()}
        for some in (slice(3), slice(3, 6))
    ]


def states(net: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors [samples, positions, ...] that modules return, by plain hooks."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, out: object) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.shape[:2] == (3, 9):
            seen.setdefault(name, []).append(first.detach().clone())

    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: note(name, out))
        for name, module in net.named_modules()
        if name
    ]
    with torch.no_grad():
        for batch in batches:
            net(**batch)
    for handle in handles:
        handle.remove()
    # Of modules that run once in a pass.
    return {name: torch.cat(x) for name, x in seen.items() if len(x) == len(batches)}


def tokens(columns: dict[str, Tensor], batches: list[dict[str, Tensor]]) -> Recording:
    mask = torch.cat([batch["attention_mask"] for batch in batches])
    return recording_of_hidden_states(columns, mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_honest_columns_of_other_kernels_and_precisions_are_not_accused(kind):
    # Left padding leaves rows that attend to nothing, which eager code fills with NaNs in float64.
    batches = padded("right" if len(kind) % 2 else "left")
    rnet, number = Recorder(network(kind), input_data=batches[0]), 0
    recordings = []
    for dtype in PRECISIONS:
        kernel = "sdpa" if dtype == torch.float64 else "eager"
        held = states(network(kind, kernel).to(dtype), batches)
        recordings.append(tokens(held, batches))
        if dtype == torch.bfloat16:
            wider = {name: value.float() for name, value in held.items()}
            recordings.append(recording_of_hidden_states(wider))
    for recording in recordings:
        audit = recording.audit(rnet, batches)
        number += len(audit)
        accused = {
            audit.architecture[column].name: finding
            for column, finding in audit.items()
            if finding.kind != "as named"
        }
        assert not accused
    assert number >= 100  # for each of ten networks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_named(kind, dtype):
    batches = padded("right")
    rnet = Recorder(network(kind), input_data=batches[0])
    held = states(network(kind, "eager").to(dtype), batches)
    first, second, third = (f"{BLOCKS.get(kind, 'layers')}.{number}" for number in range(3))
    value = held[second]
    columns = {
        first: value,
        second: value.roll(1, 1),
        third: held[third][[3, 1, 2, 0, 4, 5]],
        "one": held[first],
        "hidden_states.1": value,
        "hidden_states.2": copy.deepcopy(value)[..., torch.randperm(32)],
    }
    audit = recording_of_hidden_states(columns).audit(rnet, batches)
    answers = {
        audit.architecture[column].name: (finding.kind, finding.layer and finding.layer.name)
        for column, finding in audit.items()
    }
    assert answers == {
        first: ("other layer", second),
        second: ("shifted by a token", second),
        third: ("samples swapped", third),
        "one": ("no such name", first),
        "hidden_states.1": ("other layer", second),
        "hidden_states.2": ("features permuted", second),
    }

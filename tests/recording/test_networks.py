"""Tokens of real architectures from small random configurations, beside what plain hooks saw."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from scio_recorder import CollectError, Tokens
from scio_recorder.stores import Disk
from tests.recording.nets import recorder_of
from tests.recording.tables import (
    VOCABULARY,
    assert_tokens,
    batches,
    padded,
    run_all,
    seen,
    tokens,
)

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**TINY, "num_key_value_heads": 1, "head_dim": 8}
# Rows are found whatever the positions are that a network counts.
pytestmark = pytest.mark.filterwarnings("ignore:a batch is padded on the left")

NETWORKS: dict[str, dict[str, Any]] = {
    "GPT2": {**TINY, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "GPTNeo": {**TINY, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
    "GPTNeoX": TINY,
    "GPTJ": {**TINY, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "OPT": {**TINY, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "Bloom": {**TINY, "n_head": 2, "n_layer": 2},
    "Falcon": TINY,
    "Phi": TINY,
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 3},
    "Mixtral": {**GROUPED, "num_local_experts": 2},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "StableLm": GROUPED,
    "Mamba": {**TINY, "state_size": 4},
    "Bert": TINY,
    "Roberta": {**TINY, "max_position_embeddings": 40},
    "DistilBert": {**TINY, "dim": 16, "hidden_dim": 24, "n_heads": 2, "n_layers": 2},
    "Electra": {**TINY, "embedding_size": 16},
    "Albert": {**TINY, "embedding_size": 16},
    "DebertaV2": TINY,
    "MPNet": {**TINY, "max_position_embeddings": 40},
    "ModernBert": {**TINY, "cls_token_id": 1, "sep_token_id": 2},
}


def network(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**NETWORKS[name])
    net: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return net


def layers_by_position(net: nn.Module) -> list[str]:
    """Return the names of modules that run once and give [batch, positions, features]."""
    found: Counter[str] = Counter()

    def note(name: str, output: Any) -> None:
        fits = isinstance(output, torch.Tensor) and output.shape[:2] == (3, 7) and output.ndim == 3
        found[name] += 1 if fits else 100

    handles = [
        module.register_forward_hook(lambda m, args, output, name=name: note(name, output))
        for name, module in net.named_modules()
    ]
    with torch.no_grad():
        net(**padded(7, 6, 2))
    for handle in handles:
        handle.remove()
    return [name for name, count in found.items() if count == 1]


# Two in the default run: a decoder with a mask of its own, and an encoder.
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("GPT2", "Bert") else pytest.param(name, marks=pytest.mark.campaign)
        for name in NETWORKS
    ],
)
def test_rows_are_what_plain_hooks_saw(name, tmp_path):
    net = network(name)
    names = layers_by_position(net)
    assert len(names) > 3
    data = [*batches((3, 8, 1), (4, 4)), *batches((5, 2, 6), side="left")]
    rnet = recorder_of(net, *names, input_data=padded(9, 9))
    recording = rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=5000), rows=Tokens())
    assert_tokens(recording, net, data, *names)


def test_positions_that_come_before_the_batch_are_turned_by_a_transform():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24
    )
    net = transformers.XLNetModel(config).eval()
    names = ["layer.0.ff", "layer.1.ff"]
    data = [*batches((3, 8, 1)), *batches((5, 2), side="left")]
    rnet = recorder_of(net, *names, input_data=padded(9, 9))
    with pytest.raises(CollectError, match=r"layer\.0\.ff.*\(8, 3, 16\).*\(3, 8, \.\.\.\)"):
        rnet.collect(data, rows=Tokens())
    with pytest.raises(CollectError, match="by chance"):
        rnet.collect([padded(4, 4, 2, 3)], rows=Tokens())
    turned = rnet.collect(
        data, rows=Tokens(), transform=lambda activation, batch: activation.transpose(0, 1)
    )
    for layer, values in seen(net, names, run_all(net, data)).items():
        assert torch.equal(turned[layer], tokens([v.transpose(0, 1) for v in values], data))

"""Small networks, without weights of others, of the causal language models of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS: dict[str, Any] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, LENGTH = 64, 8
_WIDTH, _LAYERS, _HEADS = 32, 2, 4
_LARGEST = 20_000_000

# By the name of a setting; each configuration takes those that it knows.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_encoder_layers", "num_blocks"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("attention_heads", "num_decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "index_n_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "dff"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
}
_FOUR = {"num_hidden_layers": 4}
_BOTH = ["linear_attention", "full_attention"]
_HYBRID = {
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
# What some configurations need besides.
_OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lfm3", "qwen3_next"), _FOUR),
    **{key: {"layer_types": _BOTH} for key in ("bailing_hybrid", "kimi_linear")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _FOUR),
    **dict.fromkeys(("qwen3_5.text_config", "qwen3_5_moe.text_config"), _FOUR),
    **dict.fromkeys(("qwen4_exp.text_config",), _FOUR),
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}},
    "gemma4_assistant.text_config": {"hidden_size_per_layer_input": 0},
    "xlstm": {"num_heads": 2},
    **{key: {"rotary_dim": 4} for key in ("codegen", "gptj")},
    **{key: {"num_kv_shared_layers": 0} for key in ("gemma3n_text", "gemma4_unified_assistant")},
    "jamba": {**_FOUR, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "dots1": {"n_shared_experts": 1},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "feed_forward_size": 48,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(("zamba", "zamba2"), _HYBRID),
}


def make(kind: str) -> nn.Module:
    """Return a network of a kind, with random weights; any error if it can't be made small."""
    torch.manual_seed(0)
    config = _config(CONFIG_MAPPING[kind], kind)
    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size:,} parameters with the settings that are known here")
    net = AutoModelForCausalLM.from_config(config).eval()
    # Weights that begin as ones and zeros would hide what they do.
    with torch.no_grad():
        for x in (*net.parameters(), *net.buffers()):
            if x.is_floating_point():
                x += 0.02 * torch.randn_like(x)
    return net


def _config(kind: Any, name: str) -> Any:
    known = inspect.signature(kind.__init__).parameters
    chosen = {key: value for key, value in _SMALL.items() if key in known}
    if "kv_lora_rank" in known or name.startswith("dots3"):
        chosen["num_key_value_heads"] = _HEADS
    if "hidden_size_per_layer_input" in known:
        chosen |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    parts = getattr(kind, "sub_configs", {})
    if parts:
        whole = kind()
        for part in parts:
            inner = type(getattr(whole, part))
            if hasattr(inner, "to_dict"):
                chosen[part] = _config(inner, f"{name}.{part}").to_dict()
    return kind(**{**chosen, **_OTHERS.get(name, {})})


def example(seed: int = 1) -> dict[str, Tensor]:
    """Return tokens for such a network."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)}

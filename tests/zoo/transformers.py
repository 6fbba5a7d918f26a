"""Real architectures from tiny configurations of `transformers`; nothing is downloaded.

Layers are dropped at random (`layerdrop`) in none of them: a layer that runs only sometimes has no
label that always means the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.zoo.base import Case, Inputs, generator

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 50
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {**TEXT, "num_attention_heads": 2}
BODY = {**HEADS, "intermediate_size": 24}
GROUPED = {**BODY, "num_key_value_heads": 1, "max_position_embeddings": 32}
BERT = {**BODY, "max_position_embeddings": 32}
IMAGE = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2}
VISION = {**IMAGE, "num_attention_heads": 2, "intermediate_size": 24}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16]}
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_length": 2,
}
PAIRED = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
}


def token_ids(seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 5, (2, 7), generator=generator(seed))


def text(seed: int) -> Inputs:
    return (token_ids(seed),), {}


def text_with_labels(seed: int) -> Inputs:
    return (), {"input_ids": token_ids(seed), "labels": token_ids(seed + 100)}


def text_pair(seed: int) -> Inputs:
    return (), {"input_ids": token_ids(seed), "decoder_input_ids": token_ids(seed + 100)}


def pixels(size: int = 16) -> Callable[[int], Inputs]:
    def inputs(seed: int) -> Inputs:
        return (torch.randn(2, 3, size, size, generator=generator(seed)),), {}

    return inputs


def waveform(seed: int) -> Inputs:
    return (torch.randn(2, 400, generator=generator(seed)),), {}


def spectrogram(seed: int) -> Inputs:
    features = torch.randn(2, 8, 20, generator=generator(seed))
    return (), {"input_features": features, "decoder_input_ids": token_ids(seed + 100)}


def text_and_pixels(seed: int) -> Inputs:
    return (), {"input_ids": token_ids(seed), "pixel_values": pixels()(seed)[0][0]}


def _build(architecture: str, head: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        configuration = getattr(transformers, f"{architecture}Config")(**settings)
        for ours in ("pad_token_id", "bos_token_id", "eos_token_id"):
            # Defaults point past the small vocabulary.
            if (getattr(configuration, ours, None) or 0) > VOCABULARY:
                setattr(configuration, ours, 0)
        return getattr(transformers, f"{architecture}{head}")(configuration)

    return build


def _case(
    name: str,
    architecture: str,
    head: str,
    inputs: Callable[[int], Inputs],
    settings: dict[str, Any],
    **marks: Any,
) -> Case:
    return Case(name, _build(architecture, head, settings), inputs, **marks)


LM = "ForCausalLM"
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
OPT = {**HEADS, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16}
NEO = {**TEXT, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
MOE = {**GROUPED, "num_experts_per_tok": 1}
QWEN_MOE = {**MOE, "num_experts": 2, "moe_intermediate_size": 8}
MAMBA = {**TEXT, "state_size": 4}
MAMBA2 = {**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
DISTIL = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
WHISPER = {**PAIRED, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
SWIN = {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
CLIP = {
    "text_config": {**BERT, "projection_dim": 8},
    "vision_config": {**VISION, "projection_dim": 8},
    "projection_dim": 8,
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
}

CASES: tuple[Case, ...] = (
    _case("gpt2", "GPT2", "LMHeadModel", text, GPT2),
    _case("llama", "Llama", LM, text_with_labels, GROUPED),
    _case("mistral", "Mistral", LM, text, {**GROUPED, "sliding_window": 4}),
    _case("qwen2", "Qwen2", LM, text, GROUPED),
    _case("gemma", "Gemma", LM, text, {**GROUPED, "head_dim": 8}),
    _case("phi", "Phi", LM, text, {**BERT, "partial_rotary_factor": 0.5}),
    _case("opt", "OPT", LM, text, OPT),
    _case("bloom", "Bloom", LM, text, {**TEXT, "n_layer": 2, "n_head": 2}),
    _case("gpt_neo", "GPTNeo", LM, text, NEO),
    _case("gpt_neox", "GPTNeoX", LM, text, BERT),
    _case("falcon", "Falcon", LM, text, {**HEADS, "alibi": False}),
    _case("bert", "Bert", "ForMaskedLM", text, BERT),
    _case("roberta", "Roberta", "Model", text, BERT),
    _case("distilbert", "DistilBert", "Model", text, DISTIL),
    _case("albert", "Albert", "Model", text, {**BERT, "embedding_size": 8}),
    _case("electra", "Electra", "Model", text, {**BERT, "embedding_size": 8}),
    _case("deberta_v2", "DebertaV2", "Model", text, DEBERTA),
    _case("t5", "T5", "ForConditionalGeneration", text_pair, {**T5, "num_heads": 2}),
    _case("bart", "Bart", "ForConditionalGeneration", text_pair, PAIRED),
    _case("whisper", "Whisper", "Model", spectrogram, WHISPER),
    _case("mixtral", "Mixtral", LM, text, {**MOE, "num_local_experts": 2}, static_flow=False),
    _case("qwen2_moe", "Qwen2Moe", LM, text, QWEN_MOE, static_flow=False),
    _case("vit", "ViT", "ForImageClassification", pixels(), VISION),
    _case("deit", "DeiT", "ForImageClassification", pixels(), VISION),
    _case("beit", "Beit", "Model", pixels(), {**VISION, "vocab_size": VOCABULARY}),
    _case("swin", "Swin", "Model", pixels(), {**SWIN, "window_size": 2}),
    _case("convnext", "ConvNext", "Model", pixels(), {**STAGES, "num_stages": 2}),
    _case("resnet", "ResNet", "ForImageClassification", pixels(), {**STAGES, "embedding_size": 8}),
    _case("mobilenet_v2", "MobileNetV2", "Model", pixels(), {"depth_multiplier": 0.1}),
    _case("segformer", "Segformer", "ForSemanticSegmentation", pixels(), SEGFORMER),
    _case("wav2vec2", "Wav2Vec2", "ForCTC", waveform, SPEECH, input_gradients=False),
    _case("hubert", "Hubert", "Model", waveform, SPEECH, input_gradients=False),
    _case("mamba", "Mamba", LM, text, MAMBA),
    _case("mamba2", "Mamba2", LM, text, MAMBA2),
    _case("clip", "CLIP", "Model", text_and_pixels, CLIP),
)

"""Attention of layers in whole networks, against eager code and weights that PyTorch returns."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder import Recorder, compare
from scio_recorder.postprocessors import Knockout
from tests.harness import recorder

IDS = torch.tensor([[5, 17, 3, 44, 9, 21, 30], [8, 8, 41, 2, 33, 12, 7]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
TEXT = {"input_ids": IDS, "attention_mask": PADDING}
PAIR = {**TEXT, "decoder_input_ids": IDS[:, :4]}
IMAGES = {"pixel_values": torch.linspace(-2, 2, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).sin()}
SOUND = {"input_features": torch.linspace(-2, 2, 320).reshape(2, 8, 20).sin()}

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS = {**SIZES, "vocab_size": 50}
GROUPED = {**WORDS, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "head_dim": 8, "sliding_window": 3}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
PAIRED = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 50,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
ENCODER_AND_DECODER = {
    "encoder.*.self_attn": "encoder_attentions",
    "decoder.*.self_attn": "decoder_attentions",
    "decoder.*.encoder_attn": "cross_attentions",
}
BOTH = ("sdpa", "eager")


@dataclass
class Case:
    """A net of transformers, what it receives, and which output has the weights of which layers."""

    kind: str
    config: dict[str, Any]
    inputs: dict[str, Tensor]
    layers: Mapping[str, str]
    kernels: tuple[str, ...] = BOTH
    is_default: bool = False

    def make(self, kernel: str, dtype: torch.dtype) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        kind = getattr(transformers, f"{self.kind.removesuffix('Model')}Config")
        # Parts of a net may copy its configuration, and miss what is set later.
        config = kind(**self.config, attn_implementation=kernel)
        net = getattr(transformers, self.kind)(config).to(dtype).eval()
        assert isinstance(net, nn.Module)
        return net

    def received(self, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = self.inputs.items()
        return {name: one.to(dtype) if one.dtype.is_floating_point else one for name, one in inputs}


def of_all(layers: str) -> dict[str, str]:
    return {layers: "attentions"}


GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50}
CASES = [
    Case("GPT2Model", GPT2, TEXT, of_all("h.*.attn"), is_default=True),
    Case("LlamaModel", GROUPED, TEXT, of_all("*.self_attn"), is_default=True),
    Case("MistralModel", WINDOW, TEXT, of_all("*.self_attn")),
    Case("Gemma3TextModel", WINDOW, TEXT, of_all("*.self_attn")),
    Case(
        "Gemma2Model",
        {**WINDOW, "attn_logit_softcapping": 2.0},
        TEXT,
        of_all("*.self_attn"),
        ("eager",),
    ),
    Case(
        "GptOssModel",
        {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        TEXT,
        of_all("*.self_attn"),
        ("eager",),
    ),
    Case("BertModel", WORDS, TEXT, of_all("*.attention.self")),
    Case("DebertaV2Model", {**WORDS, **RELATIVE}, TEXT, of_all("*.attention.self"), ("eager",)),
    Case(
        "T5Model",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
        PAIR,
        {
            "encoder.*.SelfAttention": "encoder_attentions",
            "decoder.*.SelfAttention": "decoder_attentions",
            "*.EncDecAttention": "cross_attentions",
        },
        is_default=True,
    ),
    Case("BartModel", PAIRED, PAIR, ENCODER_AND_DECODER),
    Case(
        "WhisperModel",
        {**PAIRED, **TOKENS, "max_source_positions": 10, "num_mel_bins": 8},
        {**SOUND, "decoder_input_ids": IDS[:, :4]},
        ENCODER_AND_DECODER,
    ),
    Case(
        "ViTModel",
        {**SIZES, "image_size": 16, "patch_size": 4},
        IMAGES,
        of_all("layers.*.attention"),
    ),
]
# Eager code rounds scores and weights to its dtype, with 8 and 11 bits; scores reach about 2.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _rows() -> Iterator[Any]:
    for case in CASES:
        for kernel in case.kernels:
            for dtype in TOLERANCES:
                is_first = kernel == case.kernels[0] and dtype is torch.float32
                is_run = is_first or (case.is_default and dtype is not torch.float16)
                marks = [] if is_run else [pytest.mark.campaign]
                name = f"{case.kind}-{kernel}-{dtype}".replace("torch.", "")
                yield pytest.param(case, kernel, dtype, id=name, marks=marks)


@pytest.mark.parametrize(("case", "kernel", "dtype"), list(_rows()))
def test_weights_are_those_of_eager_code(case: Case, kernel: str, dtype: torch.dtype) -> None:
    net, inputs = case.make(kernel, dtype), case.received(dtype)
    # Some nets clamp in float16 if there are infinities.
    rnet = Recorder(net, input_data=inputs, force_static_flow=False)
    rnet.record(*case.layers, attention=True)
    having = [rnet.architecture[label].name for label in rnet.recording]
    plain = case.make("eager", dtype)
    with torch.no_grad():
        expected = plain(**inputs, output_attentions=True)
        bare = case.make(kernel, dtype)(**inputs)
        for _ in range(2):
            found = rnet(**inputs)
            assert torch.equal(found[0], bare[0])
            for glob, output in case.layers.items():
                names = [name for name in having if fnmatch.fnmatchcase(name, glob)]
                for name, weights in zip(names, expected[output], strict=True):
                    attention = rnet.attention[name]
                    difference = (attention.weights() - weights).abs().max()
                    assert difference < TOLERANCES[dtype], name
                    one = attention.weights(heads=[2], queries=[-1])
                    assert (one - weights[:, [2]][:, :, [-1]]).abs().max() < TOLERANCES[dtype]
                    assert (attention.query is None) == (kernel == "eager")


@pytest.mark.parametrize("fuses", [True, False])
def test_a_vision_transformer_of_timm(fuses: bool) -> None:
    timm = pytest.importorskip("timm")
    kinds = timm.models.vision_transformer.VisionTransformer
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    net = kinds(**sizes, qk_norm=True).eval()
    for block in net.blocks:
        block.attn.fused_attn = fuses
    images = IMAGES["pixel_values"]
    rnet = recorder(net, "blocks.*.attn", input_data=images, inputs=True, attention=True)
    with torch.no_grad():
        rnet(images)
        for name in ("blocks.0.attn", "blocks.1.attn"):
            attention, layer = rnet.attention[name], net.get_submodule(name)
            received = rnet.inputs[name].args[0].double()
            expected = by_hand_of_timm(copy.deepcopy(layer).double(), received)
            torch.testing.assert_close(attention.weights(), expected.float())


def by_hand_of_timm(layer: Any, x: Tensor) -> Tensor:
    query, key, _ = (
        one.reshape(*x.shape[:2], 4, 8).transpose(1, 2) for one in layer.qkv(x).chunk(3, -1)
    )
    weights = (layer.q_norm(query) @ layer.k_norm(key).mT / 8**0.5).softmax(-1)
    assert isinstance(weights, Tensor)
    return weights


def heads_of(attention: nn.MultiheadAttention, *inputs: Tensor, **masks: Any) -> Tensor:
    """Return the weights that PyTorch returns."""
    weights = attention(*inputs, **masks, average_attn_weights=False)[1]
    assert isinstance(weights, Tensor)
    return weights


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    net: Any = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([[6], [4], [3]])
    rnet = Recorder(net, input_data=x, src_key_padding_mask=padding)
    rnet.record("layers.*.self_attn", attention=True)
    with torch.no_grad():
        # Alone, the encoder makes nested tensors, which its attention does not take then.
        with pytest.warns(UserWarning, match="without torch's fused kernel"):
            out = rnet(x, src_key_padding_mask=padding)
        torch.testing.assert_close(
            out.masked_fill(padding[..., None], 0.0), net(x, src_key_padding_mask=padding)
        )
        for name, inner in zip(("layers.0", "layers.1"), net.layers, strict=True):
            weights = rnet.attention[f"{name}.self_attn"].weights()
            expected = heads_of(inner.self_attn, x, x, x, key_padding_mask=padding)
            torch.testing.assert_close(weights, expected)
            x = inner.norm1(x + inner.self_attn(x, x, x, key_padding_mask=padding)[0])
            x = inner.norm2(x + inner.linear2(inner.linear1(x).relu()))
    rnet.remove()
    assert all("_compiled_call_impl" not in vars(module) for module in net.modules())


@pytest.mark.parametrize("function", ["transpose", "linear", "norm"])
def test_own_code_of_modules_in_an_encoder_layer_runs(function: str) -> None:
    net: Any = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(3, 6, 16)
    attended = net.norm1(x + net.self_attn(x, x, x)[0])
    hidden = net.linear1(attended)
    name, expected = {
        "transpose": ("self_attn/transpose:0", x.transpose(0, 1)),
        "linear": ("linear1/linear", hidden),
        "norm": ("norm2/layer_norm", net.norm2(attended + net.linear2(hidden.relu()))),
    }[function]
    rnet = recorder(net, name, input_data=x)
    with torch.no_grad(), pytest.warns(UserWarning, match="without torch's fused kernel"):
        rnet(x)
    torch.testing.assert_close(rnet.activations[name], expected.detach())


def test_the_warning_where_torch_takes_another_kernel() -> None:
    net = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    rnet = recorder(net, "", input_data=(x, x, x), attention=True)
    with pytest.warns(UserWarning, match="without torch's fused kernel"), torch.no_grad():
        rnet(x, x, x)
    expected = heads_of(net, x, x, x)
    torch.testing.assert_close(rnet.attention[""].weights(), expected.detach())


def test_a_decoder_of_torch() -> None:
    net: Any = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
    target, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    rnet = Recorder(net, input_data=(target, memory), tgt_mask=mask)
    rnet.record("self_attn", "multihead_attn", attention=True)
    rnet(target, memory, tgt_mask=mask, tgt_is_causal=True)
    expected = heads_of(net.self_attn, target, target, target, attn_mask=mask)
    torch.testing.assert_close(rnet.attention["self_attn"].weights(), expected.detach())
    attended = net.self_attn(target, target, target, attn_mask=mask)[0]
    x = net.norm1(target + attended)
    expected = heads_of(net.multihead_attn, x, memory, memory)
    torch.testing.assert_close(rnet.attention["multihead_attn"].weights(), expected.detach())


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()


@pytest.mark.campaign
def test_the_cross_attention_of_a_diffusion_net() -> None:
    net, plain = unet(), unet()
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(2, 5, 12),
    }
    kept: dict[str, Tensor] = {}

    def keeping(name: str, scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            kept[name] = scores(*args, **kwargs)
            return kept[name]

        return run

    processors = pytest.importorskip("diffusers.models.attention_processor")
    plain.set_attn_processor(processors.AttnProcessor())
    for name, module in plain.named_modules():
        if name.endswith((".attn1", ".attn2")):
            module.get_attention_scores = keeping(name, module.get_attention_scores)
    rnet = recorder(net, "*.attn1", "*.attn2", input_data=inputs, attention=True)
    with torch.no_grad():
        plain(**inputs)
        rnet(**inputs)
    assert len(kept) == len(rnet.attention) == 8
    for name, weights in kept.items():
        found = rnet.attention[name].weights()
        torch.testing.assert_close(found.flatten(0, 1), weights, rtol=1e-4, atol=1e-6)
        assert found.shape[:2] == (2, 4)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["", "static"])
@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_attention_in_generate(kind: str, kernel: str, cache: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = GPT2 if kind == "GPT2" else GROUPED
    made = getattr(transformers, f"{kind}Config")(**config, pad_token_id=0, eos_token_id=49)
    net = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else "LlamaForCausalLM")(made)
    net.eval().set_attn_implementation(kernel)
    layers = "*.attn" if kind == "GPT2" else "*.self_attn"
    rnet = recorder(net, layers, input_data=dict(TEXT), attention=True)
    # Padded on the left, as generate wants it.
    prompt = {"input_ids": IDS, "attention_mask": PADDING.flip(1)}
    with rnet.watch() as passes:
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **cache}
        ids = net.generate(**prompt, **options, disable_compile=True)
    net.set_attn_implementation("eager")
    mask = torch.cat([PADDING.flip(1), torch.ones(2, 3, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = net(
            ids[:, :-1], attention_mask=mask, position_ids=positions, output_attentions=True
        )
    assert len(passes.attention) == len(passes) == 4
    for step, attention in enumerate(passes.attention):
        first, last = (0, 7) if step == 0 else (6 + step, 7 + step)
        for label, weights in zip(attention, whole.attentions, strict=True):
            expected = weights[:, :, first:last, :last]
            found = attention[label].weights()
            # Queries of padding have no key, and each kernel does as it likes.
            real = mask[:, None, first:last, None].bool()
            assert ((found[..., :last] - expected) * real).abs().max() < 1e-6
            # A static cache has room for later keys, and is overwritten by later passes.
            assert not (found[..., last:] * real).any()


class Masking(TorchFunctionMode):
    """Leaves out one key of one query in every attention, step by step."""

    def __init__(self, query: int, key: int) -> None:
        super().__init__()
        self._at = query, key
        self.has_masked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "softmax" and args[0].dim() == 4:
            return func(self._masked(args[0]), *args[1:], **kwargs)
        if name == "scaled_dot_product_attention":
            with torch._C.DisableTorchFunction():
                return self._attended(*args, **kwargs)
        return func(*args, **kwargs)

    def _masked(self, scores: Tensor) -> Tensor:
        self.has_masked += 1
        scores = scores.clone()
        scores[..., self._at[0], self._at[1]] = -torch.inf
        return scores

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        key, value = (
            one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value)
        )
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._masked(scores).softmax(-1).nan_to_num(0.0) @ value


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        pytest.param(
            case,
            kernel,
            id=f"{case.kind}-{kernel}",
            marks=[] if case.is_default else [pytest.mark.campaign],
        )
        for case in CASES
        for kernel in case.kernels
    ],
)
def test_knocked_out_attention_is_that_with_a_mask(case: Case, kernel: str) -> None:
    net, inputs = case.make(kernel, torch.float32), case.inputs
    rnet = recorder(net, *case.layers, input_data=inputs, attention=True)
    with torch.no_grad():
        found = rnet(**inputs, activation_postproc=Knockout(queries=1, keys=0))[0]
        with Masking(1, 0) as mode:
            expected = net(**inputs)[0]
        plain = net(**inputs)[0]
    assert mode.has_masked == len(rnet.recording)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - plain).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:layer .* runs without torch's fused kernel")
def test_operations_of_an_encoder_are_compared() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    net: Any = nn.TransformerEncoder(layer, 2).eval()
    other = copy.deepcopy(net)
    nn.init.zeros_(other.layers[1].self_attn.in_proj_bias)
    nn.init.ones_(other.layers[1].self_attn.out_proj.bias)
    x, padding = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([[6], [4], [3]])
    sides = [Recorder(one, input_data=x, src_key_padding_mask=padding) for one in (net, other)]
    for side in sides:
        side.record("layers.*.self_attn")
    batch = {"src": x, "src_key_padding_mask": padding}
    first = compare(*sides, [batch], operations=True).first
    assert first is not None
    assert first.layer.name == "layers.1.self_attn"

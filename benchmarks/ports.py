"""Small networks, ports of them in other precisions and with other kernels, and planted faults.

A fault is planted as it gets into real ports: a weight is loaded wrongly, a number of a module is
another one, or a line of code is. In the last case the source file of the module's class runs once
more with that line changed, and the module alone gets the new class.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import moe

Batch = dict[str, Tensor]
# Lines of files, one of which first gives a wrong value.
Lines = frozenset[tuple[str, int]]


class ConvNormAct(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.normalization = nn.BatchNorm2d(outputs)
        self.activation = nn.LeakyReLU(0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.conv(hidden_states)
        hidden_states = self.normalization(hidden_states)
        hidden_states = self.activation(hidden_states)
        return hidden_states  # noqa: RET504 - each line stands alone, so that one can be changed


class SoftcapAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scaling, self.softcap = heads, (size // heads) ** -0.5, 2.0
        self.mix, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed = self.mix(hidden_states).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT
        scores = scores * self.scaling
        scores = torch.tanh(scores / self.softcap) * self.softcap
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = SoftcapAttention(size, heads)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm_1(hidden_states)
        hidden_states = self.attention(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm_2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states  # noqa: RET504 - as above


class Hybrid(nn.Module):
    """Convolutions, then attention over what they return."""

    def __init__(self, size: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNormAct(3, size, 2), ConvNormAct(size, size, 2))
        self.blocks = nn.Sequential(Block(size, heads), Block(size, heads))
        self.head = nn.Linear(size, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        features = self.stem(pixel_values).flatten(2).transpose(1, 2)
        return self.head(self.blocks(features).mean(1))


_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "sliding_window": 6}
_VIT = {
    **{key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaModel", _GROUPED),
    "GPT-2": ("GPT2Model", {**_TEXT, "n_inner": 96}),
    "GPT-NeoX": ("GPTNeoXModel", {**_TEXT, "rotary_pct": 0.5}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        {
            **_GROUPED,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-MoE": (
        "Qwen3MoeModel",
        {
            **_EXPERTS,
            "use_sliding_window": True,
            "num_experts": 4,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "Mixtral": ("MixtralModel", {**_EXPERTS, "num_local_experts": 4}),
    "BERT": ("BertModel", _TEXT),
    "ViT": ("ViTModel", {**_VIT, "hidden_act": "leaky_relu"}),
    "ResNet": (
        "ResNetModel",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 2],
            "layer_type": "basic",
            "hidden_act": "leaky_relu",
        },
    ),
}
NETWORKS = (*_CONFIGS, "Hybrid")
_IMAGES = ("ViT", "ResNet", "Hybrid")


class Pair(NamedTuple):
    """What a reference and its port compute in."""

    title: str
    reference: torch.dtype
    candidate: torch.dtype
    has_other_kernels: bool = False


PAIRS = (
    Pair("float32, bfloat16", torch.float32, torch.bfloat16),
    Pair("float32, float16", torch.float32, torch.float16),
    Pair("bfloat16, other kernels", torch.bfloat16, torch.bfloat16, True),
    Pair("float32, other kernels", torch.float32, torch.float32, True),
    Pair("float32, float64", torch.float32, torch.float64),
)


@cache
def network(name: str, seed: int) -> tuple[nn.Module, Batch]:
    """Return a network with random weights, and a batch for it."""
    torch.manual_seed(seed)
    net = Hybrid() if name == "Hybrid" else _from_config(*_CONFIGS[name])
    for module in net.modules():
        _randomize(module)
    if name in _IMAGES:
        return net.eval(), {"pixel_values": torch.randn(4, 3, 32, 32)}
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[-1, 12:] = 0
    return net.eval(), {"input_ids": torch.randint(3, 96, (4, 16)), "attention_mask": mask}


def _from_config(name: str, sizes: dict[str, Any]) -> nn.Module:
    model = getattr(transformers, name)
    net: nn.Module = model(model.config_class(**sizes, attn_implementation="eager"))
    if hasattr(net, "set_experts_implementation"):
        net.set_experts_implementation("batched_mm")
    return net


@torch.no_grad()
def _randomize(module: nn.Module) -> None:
    """Give a module weights of which none is the default, as after training."""
    for name, tensor in module.named_parameters(recurse=False):
        if tensor.ndim > 1 and not isinstance(module, nn.Embedding):
            inputs = tensor.shape[0] if type(module).__name__ == "Conv1D" else tensor[0].numel()
            tensor.normal_(std=inputs**-0.5)
        elif tensor.ndim == 1:
            # Scales of Gemma are around zero.
            is_scale = name == "weight" and not type(module).__name__.startswith("Gemma")
            tensor.normal_(mean=float(is_scale), std=0.2)
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean.normal_(std=0.2)
        module.running_var.uniform_(0.5, 1.5)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}


def reference_of(net: nn.Module, pair: Pair) -> nn.Module:
    return copy.deepcopy(net).to(pair.reference)


def port_of(net: nn.Module, pair: Pair, fault: Fault | None = None) -> nn.Module:
    """Return a port of a network, which is right but for the fault."""
    port = copy.deepcopy(net)
    if fault is not None:
        with torch.no_grad():
            fault.plant(port)
    port.to(pair.candidate)
    if pair.has_other_kernels:
        _use_other_kernels(port)
    return port


def _use_other_kernels(net: nn.Module) -> None:
    """Compute the same with fused norms, attention and experts, and images in another layout."""
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in net.modules():
        forward = next((f for part, f in _FUSED.items() if part in type(module).__name__), None)
        if forward is not None:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    if isinstance(net, transformers.PreTrainedModel):
        if not hasattr(net.config, "attn_logit_softcapping") and net.config.model_type != "resnet":
            net.set_attn_implementation("sdpa")
        if "moe" in net.config.model_type or net.config.model_type == "mixtral":
            net.set_experts_implementation("grouped_mm")


def _fused_rms_norm(self: Any, x: Tensor) -> Tensor:
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    weight = self.weight + float(type(self).__name__.startswith("Gemma"))
    return F.rms_norm(x, weight.shape, weight, eps)


def _fused_layer_norm(self: Any, x: Tensor) -> Tensor:
    centred = x.float() - x.float().mean(-1, keepdim=True)
    scale = self.weight.float() * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
    return torch.addcmul(self.bias.float(), centred, scale).to(x.dtype)


def _folded_batch_norm(self: Any, x: Tensor) -> Tensor:
    scale = self.weight * torch.rsqrt(self.running_var + self.eps)
    shift = self.bias - self.running_mean * scale
    return torch.addcmul(shift[:, None, None], x, scale[:, None, None])


_FUSED = {
    "RMSNorm": _fused_rms_norm,
    "LayerNorm": _fused_layer_norm,
    "BatchNorm": _folded_batch_norm,
}


@dataclass(frozen=True)
class Fault:
    kind: str
    module: str  # the name of the module that makes the first wrong value, or hands it on
    lines: Lines  # the lines of its code that do
    plant: Callable[[nn.Module], None]


def faults_of(net: nn.Module) -> list[Fault]:
    """Return all faults that can be planted into a network."""
    return [
        Fault(kind, name, lines, _planted(name, change))
        for name, module in net.named_modules()
        for changes in (_weights, _numbers, _edits)
        for kind, lines, change in changes(module)
    ]


# A kind of fault, the lines at fault, and what is done to the module.
Change = tuple[str, Lines, Callable[[Any], object]]


def _planted(name: str, change: Callable[[Any], object]) -> Callable[[nn.Module], None]:
    def plant(net: nn.Module) -> None:
        change(net.get_submodule(name))

    return plant


def _weights(module: Any) -> Iterator[Change]:
    """Give the faults of what is loaded."""
    for name in ("weight", "gate_up_proj", "down_proj"):
        weight = getattr(module, name, None)
        if isinstance(weight, Tensor) and weight.ndim > 1:
            lines = _EXPERT_LINES if weight.ndim == 3 else _lines(module, rf"self\.{name}\b")
            for kind, change in _matrix_changes(module, weight):
                yield kind, lines, _changed(name, change)
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        yield "bias missing", _lines(module, r"self\.bias\b"), _changed("bias", torch.zeros_like)
    if isinstance(module, nn.BatchNorm2d):
        yield (
            "running statistics",
            _lines(module, ""),
            lambda norm: norm.reset_running_stats(),
        )
    if hasattr(module, "inv_freq"):
        # Those of 500,000 instead of 10,000.
        change = _changed("inv_freq", lambda frequencies: frequencies**1.425)
        yield "rope theta", _lines(module, r"self\.inv_freq"), change


def _matrix_changes(module: nn.Module, weight: Tensor) -> Iterator[tuple[str, Any]]:
    yield "weight by 1 %", lambda w: w * 1.01
    yield "rows swapped", lambda w: w[[1, 0, *range(2, len(w))]]
    yield "rounded to fp8", lambda w: w.to(torch.float8_e4m3fn).to(w.dtype)
    is_square = weight.shape[-1] == weight.shape[-2] > 1
    if is_square and not isinstance(module, nn.Embedding):
        yield "transposed", lambda w: w.mT.clone()


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], object]:
    return lambda module: getattr(module, name).copy_(change(getattr(module, name)))


_ACTIVATIONS = {
    "SiLUActivation": "gelu",
    "NewGELUActivation": "gelu",
    "GELUTanh": "gelu",
    "GELUActivation": "gelu_new",
    "GELU": "gelu_new",
    "LeakyReLU": "relu",
}
# An attribute, the kind of fault, another value, and the line that uses it.
_NUMBERS: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    ("negative_slope", "slope", lambda slope: 2 * slope, ""),
    ("variance_epsilon", "eps", lambda eps: 10 * eps, r"self\.variance_epsilon"),
    ("eps", "eps", lambda eps: 1e-5 if eps < 1e-5 else 100 * eps, r"self\.eps\b"),
    ("scaling", "attention scale", lambda scale: scale**2, r"\* (self\.)?scaling"),
    ("attn_logit_softcapping", "softcap", lambda cap: None, r"/ softcap"),
    ("softcap", "softcap", lambda cap: 1.5 * cap, r"/ self\.softcap"),
    ("use_parallel_residual", "norm order", lambda is_parallel: False, r"mlp_output = self\.mlp"),
    ("padding_mode", "padding mode", lambda mode: "replicate", ""),
)


def _numbers(module: Any) -> Iterator[Change]:
    """Give the faults of what is configured."""
    for name, kind, change, line in _NUMBERS:
        value = getattr(module, name, None)
        if value is not None and getattr(module, "padding", None) != (0, 0):
            yield kind, _lines(module, line), _set(name, change(value))
    if getattr(module, "config", None) is not None and hasattr(module, "set_attn_implementation"):
        window = getattr(module.config, "sliding_window", None)
        if window and hasattr(module, "layers"):
            change = _set("sliding_window", window + 1)
            lines = _lines(module, r"(mask_function|create_sliding_window_causal_mask)\(")
            yield "sliding window", lines | _MASKS, lambda model: change(model.config)
    other = _ACTIVATIONS.get(type(module).__name__)
    if other is not None:
        yield "another activation", _lines(module, ""), partial(_become, ACT2FN[other])


def _become(other: nn.Module, module: nn.Module) -> None:
    module.__class__ = type(other)
    vars(module).update(vars(copy.deepcopy(other)))


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda module: setattr(module, name, value)


def ahead(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return a function that makes a mask in which one more key can be seen."""

    def make(**kwargs: Any) -> Tensor | None:
        mask = make_mask(**kwargs)
        return None if mask is None else torch.cat([mask[..., :1], mask[..., :-1]], -1)

    return make


class Edit(NamedTuple):
    """A change of code in classes whose names match."""

    kind: str
    classes: str
    old: str
    new: str
    # The first line from there on that gives a wrong value, if it is not the one that is changed.
    wrong: str = ""


_ROTATED = r"k_embed = \((k\w*) \* cos\) \+ \(rotate_half\((k\w*)\) \* sin\)"
_EDITS = (
    Edit(
        "norm order",
        r"(Layer|Block)$",
        r"residual = hidden_states(\s+)(hidden_states = self\.\w*(?:norm|ln_)\w*\(hidden_states\))",
        r"\2\1residual = hidden_states",
        r"residual \+|\+ residual",
    ),
    Edit(
        "norm order",
        r"Bert\w*Output$",
        r"self\.LayerNorm\(hidden_states \+ input_tensor\)",
        "self.LayerNorm(hidden_states) + input_tensor",
    ),
    Edit(
        "norm order",
        r"ResNetConvLayer$|ConvNormAct$",
        r"(hidden_states = self\.normalization\(hidden_states\))(\s+)"
        r"(hidden_states = self\.activation\(hidden_states\))",
        r"\3\2\1",
    ),
    Edit("residual missing", r"(Layer|Block)$", r"residual \+ (\w+)", r"\1"),
    Edit("residual missing", r"(Layer|Block)$", r"(\w+) \+ residual", r"\1"),
    Edit("residual missing", r"ResNetBasicLayer$", r"hidden_state \+= residual", "pass"),
    Edit("residual missing", r"Bert\w*Output$", r"hidden_states \+ input_tensor", "hidden_states"),
    Edit("residual missing", r"GPTNeoXLayer$", r"\+ attn_output \+ hidden_states", "+ attn_output"),
    Edit(
        "mask off by one",
        r"(?<!ViT)Model$",
        r"(create_causal_mask|mask_function|(?<= attention_mask = )create_bidirectional_mask)\(",
        r"ahead(\1)(",
    ),
    Edit(
        "rope position",
        r"Attention$",
        _ROTATED,
        r"k_embed = (\1 * cos.roll(1, -2)) + (rotate_half(\2) * sin.roll(1, -2))",
    ),
    Edit("rope position", r"GPT2Model$", r"(position_ids\.unsqueeze\(0\))", r"\1 + 1"),
    Edit("rope position", r"BertEmbeddings$", r"(= self\.position_ids\[.*\])", r"\1 + 1"),
    Edit("rope position", r"ViTEmbeddings$", r"(\+ self\.position_embeddings)\b", r"\1.roll(1, 1)"),
    Edit(
        "grouped heads",
        r"Attention$",
        r"hidden_states(\.reshape\(batch, num_key_value_heads \* n_rep)",
        r"hidden_states.transpose(1, 2)\1",
    ),
    Edit("router normalisation", r"TopKRouter$", r"router_top_value /= .*", "pass"),
    Edit(
        "softcap",
        r"ForCausalLM$",
        r"if self\.config\.final_logit_softcapping is not None",
        "if False",
        r"logits / self",
    ),
)


def _edits(module: nn.Module) -> Iterator[Change]:
    """Give the faults of code."""
    kind = type(module)
    for edit in _EDITS:
        if re.search(edit.classes, kind.__name__):
            for place in _places(kind, edit.old):
                lines = _statement(_source(kind), _first_wrong(kind, edit, place.start()))
                if edit.kind == "mask off by one":
                    lines |= _MASKS
                yield edit.kind, lines, partial(_edit, edit, place)


def _edit(edit: Edit, place: re.Match[str], module: nn.Module) -> None:
    kind = type(module)
    file, text, *_ = _source(kind)
    text = text[: place.start()] + place.expand(edit.new) + text[place.end() :]
    namespace = {**vars(sys.modules[kind.__module__]), "ahead": ahead}
    exec(compile(text, file, "exec"), namespace)
    module.__class__ = namespace[kind.__name__]


def _first_wrong(kind: type, edit: Edit, start: int) -> int:
    found = re.compile(edit.wrong).search(_source(kind).text, start) if edit.wrong else None
    return start if found is None else found.start()


class Source(NamedTuple):
    file: str
    text: str
    # First and last line of each statement that holds no other one, and of functions and classes.
    statements: list[range]
    functions: list[range]
    classes: dict[str, range]

    def line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1


@cache
def _read(file: str) -> Source:
    with open(file, encoding="utf-8") as stream:
        text = stream.read()
    tree = ast.parse(text)
    simple = (x for x in ast.walk(tree) if isinstance(x, ast.stmt) and not hasattr(x, "body"))
    functions = (x for x in tree.body if isinstance(x, ast.FunctionDef))
    classes = {x.name: _span(x) for x in tree.body if isinstance(x, ast.ClassDef)}
    return Source(file, text, [*map(_span, simple)], [*map(_span, functions)], classes)


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _source(kind: type) -> Source:
    return _read(inspect.getsourcefile(kind) or "")


@cache
def _places(kind: type, pattern: str) -> list[re.Match[str]]:
    """Return the places that match in a class, else in the functions beside it."""
    source = _source(kind)
    places = [(source.line(x.start()), x) for x in re.finditer(pattern, source.text)]
    inside = [x for line, x in places if line in source.classes[kind.__name__]]
    beside = [x for line, x in places if any(line in span for span in source.functions)]
    return inside or beside


def _statement(source: Source, position: int) -> Lines:
    line = source.line(position)
    inside = next((x for x in source.statements if line in x), range(line, line + 1))
    return frozenset((source.file, number) for number in inside)


@cache
def _lines_of(kind: type, pattern: str) -> Lines:
    """Return the statements that match; of PyTorch's own modules, the whole forward."""
    source = _source(kind)
    if pattern and not kind.__module__.startswith("torch."):
        return frozenset().union(*(_statement(source, x.start()) for x in _places(kind, pattern)))
    lines, first = inspect.getsourcelines(kind.forward)
    return frozenset((source.file, first + number) for number in range(len(lines)))


def _lines(module: nn.Module, pattern: str) -> Lines:
    return _lines_of(type(module), pattern)


def _all_lines(module: ModuleType) -> Lines:
    file = module.__file__ or ""
    return frozenset((file, 1 + line) for line in range(_read(file).text.count("\n")))


# Functions of other files that compute masks and experts for a module.
_MASKS, _EXPERT_LINES = map(_all_lines, (masking_utils, moe))

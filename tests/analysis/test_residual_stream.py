"""The residual stream beside plain hooks and sums by hand: families, own nets, refusals."""

from __future__ import annotations

import os
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import ComparisonError, LabellingError, LayerNotFoundError, Recorder
from scio_recorder.errors import UnsupportedNetError
from tests.analysis.language_models import KINDS, example, make
from tests.analysis.streams_by_hand import assert_mixing, assert_stream

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
PIECES = 60

# By hand, from the code of transformers: the rows of the first block, the last norm and the head.
FAMILIES = {
    "gpt2": {
        "resid_pre": "transformer.drop",
        "attn_out": "transformer.h.0.attn.resid_dropout",
        "resid_mid": "transformer.h.0/add:0",
        "mlp_out": "transformer.h.0.mlp",
        "resid_post": "transformer.h.0",
        "final_norm": "transformer.ln_f",
        "logits": "lm_head",
    },
    "llama": {
        "resid_pre": "model.embed_tokens",
        "attn_out": "model.layers.0.self_attn.o_proj",
        "resid_mid": "model.layers.0/add:0",
        "mlp_out": "model.layers.0.mlp",
        "resid_post": "model.layers.0",
        "final_norm": "model.norm",
        "logits": "lm_head",
    },
    # Branches side by side.
    "gpt_neox": {
        "resid_pre": "gpt_neox.emb_dropout",
        "attn_out": "gpt_neox.layers.0.post_attention_dropout",
        "mlp_out": "gpt_neox.layers.0.post_mlp_dropout",
        "resid_post": "gpt_neox.layers.0",
        "final_norm": "gpt_neox.final_layer_norm",
        "logits": "lm_head",
    },
    # Norms behind branches, and logits that are capped.
    "gemma2": {
        "resid_pre": "model.embed_tokens",
        "attn_out": "model.layers.0.post_attention_layernorm",
        "resid_mid": "model.layers.0/add:0",
        "mlp_out": "model.layers.0.post_feedforward_layernorm",
        "resid_post": "model.layers.0",
        "final_norm": "model.norm",
        "logits": "/mul:0",
    },
    "mamba": {
        "resid_pre": "backbone.embeddings",
        "mixer_out": "backbone.layers.0.mixer",
        "resid_post": "backbone.layers.0",
        "final_norm": "backbone.norm_f",
        "logits": "lm_head",
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_names_of_families(kind: str) -> None:
    rnet = Recorder(make(kind), input_data=example())
    stream = rnet.residual_stream()
    rows = {name: stream.architecture[label].name for name, label in stream.items()}
    first = {name.removeprefix("blocks.0."): row for name, row in rows.items() if ".1." not in name}
    assert first == FAMILIES[kind]
    # The other block has the same.
    assert len(stream) == 2 * len(first) - 2
    assert_stream(rnet, stream, example(5))
    assert assert_mixing(rnet, stream, example(5)) == sum(name.endswith("_out") for name in stream)


# Nets whose blocks do not add to one stream: a norm behind each sum, a factor on the stream, a
# residual taken after the norm, several streams, a layer that runs several times.
REFUSED = {
    "bert": "is added to nothing, but .* bert.encoder.layer.0.attention.output.LayerNorm",
    "openai-gpt": "its last sum, 3-1/add:0 .*, is added to nothing, but .* transformer.h.0.ln_1",
    "doge": "what it receives is added to nothing",
    "gemma4_text": "its last sum, .* is added to nothing, but 3-1/mul_:0",
    "minimax": "what it receives is added to nothing, but .* model.layers.0.input_layernorm",
    "reformer": "the output depends on more than the last state",
    "hy_v4": "no numbered modules",
    "hrm_text": "no numbered modules",
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "bert" else pytest.mark.campaign) for kind in REFUSED],
)
def test_what_has_no_single_stream_is_refused_with_the_reason(kind: str) -> None:
    rnet = Recorder(make(kind), input_data=example(), force_static_flow=False)
    with pytest.raises(LayerNotFoundError, match=REFUSED[kind]):
        rnet.residual_stream()


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("piece", range(PIECES if FULL else 3))
def test_streams_of_all_causal_language_models(piece: int) -> None:
    judged = 0
    for kind in [*KINDS][piece::PIECES]:
        try:
            net = make(kind)
            with torch.no_grad():
                net(**example())
        except Exception:  # whatever transformers needs and this table of settings lacks
            continue
        rnet = Recorder(net, input_data=example(), force_static_flow=False)
        try:
            stream = rnet.residual_stream()
        except LayerNotFoundError:
            continue
        assert_stream(rnet, stream, example(5))
        assert_mixing(rnet, stream, example(5))
        judged += 1
    assert judged


# -- own nets --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with code of its own."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.out(
            nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        )


class Block(nn.Module):
    """A block whose way of adding is given."""

    def __init__(self, way: str = "in turn", size: int = 8) -> None:
        super().__init__()
        self.way = way
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        nn.init.normal_(self.norm2.bias)
        self.attn, self.mlp = Attention(size), nn.Linear(size, size)
        self.lora = nn.Linear(size, size)
        self.pair = Pair()
        self.multi = nn.MultiheadAttention(size, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.way.replace(" ", "_"))(x)

    def in_turn(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def in_place(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x

    def mlp_first(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm2(x))
        return x + self.attn(self.norm1(x))

    def side_by_side(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))

    def halves(self, x: Tensor) -> Tensor:
        return x + (self.mlp(self.norm2(x)) + self.attn(self.norm1(x)))

    def adapted(self, x: Tensor) -> Tensor:
        """The output projection has an adapter beside it, as LoRA adds one."""
        y = self.attn(self.norm1(x))
        x = x + (self.mlp(y) + self.lora(y))
        return x + self.mlp(self.norm2(x)) * 0.5

    def two_experts(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        y = self.norm2(x)
        return x + (self.mlp(y) + self.lora(y))

    def of_torch(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.multi(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))

    def of_pairs(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.pair(torch.cat([self.norm2(x)] * 2, -1))[0]

    def two_of_a_kind(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x + self.lora(self.norm2(x))

    def fed(self, x: Tensor) -> Tensor:
        """What attention gives is added to what a mixer reads, and not to the stream."""
        y = x + self.attn(self.norm1(x))
        return x + self.mixed(self.norm2(y))

    def mixed(self, x: Tensor) -> Tensor:
        return self.mlp(x.cumsum(1))

    def biased(self, x: Tensor) -> Tensor:
        x = x + (self.attn(self.norm1(x)) + self.norm2.bias.expand_as(x))
        return x + self.mlp(self.norm2(x))

    def tuple_of(self, x: Tensor) -> tuple[Tensor, int]:
        return self.in_turn(x), 1

    def scaled_stream(self, x: Tensor) -> Tensor:
        return x * 0.5 + self.attn(self.norm1(x))

    def multiplied(self, x: Tensor) -> Tensor:
        return x * self.attn(self.norm1(x))

    def normed_after(self, x: Tensor) -> Tensor:
        return self.norm1(x + self.attn(x))

    def of_zeros(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x)) * 0.0


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, *ways: str, head: str = "normed") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_of = head
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block(way) for way in ways)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, ids: Tensor | None = None, embedded: Tensor | None = None) -> Any:
        x = self.embed(ids) if embedded is None else embedded
        states = [x]
        for block in self.blocks:
            x = block(self.norm(x) if states[1:] and self.head_of == "normed between" else x)
            x = x[0] if isinstance(x, tuple) else x
            states.append(x)
        if self.head_of == "bypass":
            return self.head(self.norm(x) + states[1])
        if self.head_of == "pooled":
            return self.head(self.norm(x).mean(1))
        if self.head_of == "bare":
            return self.head(x)
        if self.head_of == "summed":
            return self.head(self.norm(x)).cumsum(1)
        if self.head_of == "last":
            return self.head(self.norm(x[:, -1:]))
        return self.norm(x) if self.head_of == "none" else self.head(self.norm(x))


IDS = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))


def names(net: nn.Module, **inputs: Any) -> dict[str, str]:
    """Return the rows of the first block by name, or the reasons."""
    return names_in(Recorder(net, **(inputs or {"input_data": IDS})).residual_stream())


def names_in(stream: Any) -> dict[str, str]:
    return {
        name.removeprefix("blocks.0."): entry
        if isinstance(entry, str)
        else stream.architecture[entry].name
        for name, entry in stream.entries.items()
        if ".1." not in name
    }


@pytest.mark.parametrize(
    ("way", "attn", "mlp", "mid"),
    [
        ("in turn", "attn.out", "mlp", "/add:0"),
        ("in place", "attn.out", "mlp", "/add_:0"),
        ("tuple of", "attn.out", "mlp", "/add:0"),
        ("mlp first", "attn.out", "mlp", None),
        ("halves", "attn.out", "mlp", None),
        ("side by side", "attn.out", "mlp", None),
        ("adapted", "/add:0", "/mul:0", "/add:1"),
        ("two experts", "attn.out", "/add:1", "/add:0"),
        ("biased", "/add:0", "mlp", "/add:1"),
    ],
)
def test_ways_of_adding(way: str, attn: str, mlp: str, mid: str | None) -> None:
    rnet = Recorder(Model(way, "in turn"), input_data=IDS)
    stream = rnet.residual_stream()
    rows = names_in(stream)
    # The attention is a module around its projection, with the same value.
    attn = attn.replace("attn.out", "attn")
    assert [rows["attn_out"], rows["mlp_out"]] == [
        f"blocks.0{part if part.startswith('/') else f'.{part}'}" for part in (attn, mlp)
    ]
    # A reason is a sentence, and names have no spaces.
    assert rows["resid_mid"] == f"blocks.0{mid}" if mid else " " in rows["resid_mid"]
    values = recorded(rnet, stream)
    for number in range(2):
        at = f"blocks.{number}."
        by_hand = values[at + "resid_pre"] + values[at + "attn_out"] + values[at + "mlp_out"]
        torch.testing.assert_close(values[at + "resid_post"], by_hand)


def recorded(rnet: Recorder, stream: Any) -> dict[str, Any]:
    rnet.record(*stream.values())
    with torch.no_grad():
        rnet(IDS.flip(1))
    return {name: rnet.activations[label] for name, label in stream.items()}


def test_the_row_of_a_block_that_returns_a_tuple_is_its_last_sum() -> None:
    assert names(Model("tuple of"))["resid_post"] == "blocks.0/add:1"


def test_attention_before_another_use_of_the_stream_is_no_part_of_a_branch() -> None:
    rows = names(Model("fed"))
    assert rows["mixer_out"] == "blocks.0.mlp"
    assert "no branch" in rows["attn_out"]


def test_logits_are_those_of_the_head_beside_a_loss() -> None:
    labelled = {**example(), "labels": example()["input_ids"]}
    stream = Recorder(make("llama"), input_data=labelled).residual_stream()
    assert stream.architecture[stream["logits"]].name == "lm_head"


class Pair(nn.Module):
    """Returns a tuple whose first tensor no operation returns alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.square().chunk(2, -1)


def test_a_branch_that_is_returned_in_a_tuple_only_is_named_in_the_reason() -> None:
    rows = names(Model("of pairs"))
    assert "blocks.0.pair (Pair) returns it first in a structure" in rows["mlp_out"]
    assert rows["attn_out"] == "blocks.0.attn"


@pytest.mark.filterwarnings("ignore:layer .* runs without torch's fused kernel")
def test_attention_of_torch() -> None:
    rows = names(Model("of torch"))
    assert rows["attn_out"].startswith("blocks.0.multi/")
    assert rows["mlp_out"] == "blocks.0.mlp"
    assert rows["resid_mid"] == "blocks.0/add:0"


def test_several_branches_of_a_kind_are_named_in_the_reason() -> None:
    rows = names(Model("two of a kind"))
    assert "several branches" in rows["mlp_out"]
    assert rows["attn_out"] == "blocks.0.attn"
    assert rows["resid_mid"] == "blocks.0/add:0"


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (lambda: Model("scaled stream"), "what it receives is added to nothing, but .* takes it"),
        (lambda: Model("normed after"), "its last sum, .*add:0.* but .*blocks.0.norm1.* takes it"),
        (lambda: Model("multiplied"), "what it receives is added to nothing, but .* takes it"),
        (lambda: Model("in turn", head="summed"), "does not follow, by position"),
        (lambda: Model("of zeros"), "what it receives is added to nothing"),
        (lambda: Model("in turn", "in turn", head="bypass"), "more than the last state"),
        (lambda: Model("in turn", head="pooled"), "record it without its head"),
        (lambda: Model("in turn", head="last"), "label it as it returns all positions"),
        (lambda: Model("in turn", "in turn", head="normed between"), "not receive the last sum"),
        (lambda: nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), "no numbered modules"),
        (lambda: Model(head="none"), "no numbered modules"),
    ],
)
def test_refusals_of_own_nets(net: Any, says: str) -> None:
    with pytest.raises(LayerNotFoundError, match=says):
        Recorder(net(), input_data=IDS).residual_stream()


def test_one_position_shows_no_stream() -> None:
    rows = names(Model("in turn"), input_data=IDS[:, :1])
    assert "no branch mixes" in rows["attn_out"]


def test_a_net_without_a_head_has_no_logits() -> None:
    rows = names(Model("in turn", head="none"))
    assert rows["final_norm"] == "norm"
    assert "returns the stream itself" in rows["logits"]


def test_a_head_without_a_norm_is_no_norm() -> None:
    rows = names(Model("in turn", head="bare"))
    assert rows["logits"] == "head"
    assert rows["final_norm"] == "no layer takes the last resid_post and norms it"


class Flagged(nn.Linear):
    """Notes the mode of each call outside of everything that is put back."""

    modes: ClassVar[set[bool]] = set()

    def forward(self, x: Tensor) -> Tensor:
        type(self).modes.add(self.training)
        return super().forward(x)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_network_runs_in_the_mode_of_its_labelling(mode: str) -> None:
    net = Model("in turn").train(mode != "train")
    net.head = Flagged(8, 20)
    rnet = Recorder(net, input_data=IDS, mode=mode)
    Flagged.modes.clear()
    rnet.residual_stream()
    assert Flagged.modes == {mode == "train"}


def test_what_a_block_only_receives_is_read_as_its_input() -> None:
    embedded = torch.randn(2, 6, 8)
    rnet = Recorder(Model("in turn"), input_data={"embedded": embedded})
    stream = rnet.residual_stream()
    with pytest.raises(KeyError, match=r"rnet.record\('2-1', inputs=True\)"):
        stream["blocks.0.resid_pre"]
    rnet.record("blocks.0", inputs=True)
    rnet(embedded=embedded)
    assert torch.equal(rnet.inputs["blocks.0"].args[0], embedded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sums_are_judged_by_the_rounding_of_the_dtype(dtype: torch.dtype) -> None:
    assert names(Model("in turn").to(dtype)) == names(Model("in turn"))


# -- the mapping -----------------------------------------------------------------------------------


def test_the_mapping_prints_names_and_reasons() -> None:
    stream = Recorder(Model("halves", "halves"), input_data=IDS).residual_stream()
    lines = str(stream).splitlines()
    assert lines[0] == "Residual stream: 10 names"
    label = str(stream["blocks.1.mlp_out"])
    assert ["blocks.1.mlp_out", label, "blocks.1.mlp"] in [line.split() for line in lines]
    assert any(line.startswith("blocks.*.resid_mid") for line in lines)
    assert repr(stream) == str(stream)
    assert len(stream) == len([*stream]) == 10


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("blocks.0.resid_mid", "adds all at once"),
        ("blocks.0.mixer_out", "no branch mixes positions without attention"),
        ("blocks.0.resid_psot", "the closest names are 'blocks.0.resid_post'"),
        ("blocks.7.resid_post", "There are blocks.0.resid_pre"),
        (3, "There are blocks.0.resid_pre"),
    ],
)
def test_a_missing_key_names_the_reason(name: Any, says: str) -> None:
    stream = Recorder(Model("halves"), input_data=IDS).residual_stream()
    assert name not in stream
    assert stream.get(name) is None
    with pytest.raises(LayerNotFoundError, match=says) as caught:
        stream[name]
    assert isinstance(caught.value, KeyError)


def test_blocks_of_a_sequence_are_found_among_other_modules() -> None:
    torch.manual_seed(0)
    ways = [Block("in turn"), Block("in turn")]
    net = nn.Sequential(nn.Embedding(20, 8), *ways, nn.LayerNorm(8), nn.Linear(8, 20))
    stream = Recorder(net, input_data=IDS).residual_stream()
    rows = [stream.architecture[label].name for label in stream.values()]
    assert rows == [
        *("0", "1.attn", "1/add:0", "1.mlp", "1", "1", "2.attn", "2/add:0", "2.mlp", "2"),
        *("3", "4"),
    ]


def test_names_are_keys_of_the_mapping_only() -> None:
    rnet = Recorder(Model("in turn"), input_data=IDS)
    rnet.residual_stream()
    with pytest.raises(LayerNotFoundError):
        rnet.record("blocks.0.resid_mid")


def test_values_select_for_sweeps_and_collections() -> None:
    rnet = Recorder(Model("in turn", "in turn"), input_data=IDS)
    stream = rnet.residual_stream()
    middle = stream["blocks.1.resid_mid"]
    rnet.record(middle)
    effects = rnet.sweep(IDS[:1], IDS[1:], lambda output: output[0, -1, 3], positions=[-1])
    # The last position of the last block is all that the head reads, but for its own branch.
    assert effects.labels == (middle,)
    assert effects[middle][0] == effects.clean
    recording = rnet.collect([IDS], progress=False)
    rnet(IDS)
    assert torch.equal(recording[middle], rnet.activations[middle])


# -- the recorder ----------------------------------------------------------------------------------


def test_the_search_leaves_no_trace() -> None:
    net = Model("in turn")
    rnet = Recorder(net, input_data=IDS)
    rnet.record("blocks.0.mlp")
    rnet(IDS)
    net.train()
    net.blocks[0].eval()
    before = rnet.activations["blocks.0.mlp"], torch.get_rng_state()
    flags = [module.training for module in net.modules()]
    rnet.residual_stream()
    assert rnet.activations["blocks.0.mlp"] is before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [module.training for module in net.modules()] == flags
    assert rnet.recording == (rnet.architecture["blocks.0.mlp"].label,)
    rnet.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_it_can_be_asked_again_but_not_of_a_copy() -> None:
    rnet = Recorder(Model("in turn"), input_data=IDS)
    rnet.operations()
    assert dict(rnet.residual_stream()) == dict(rnet.residual_stream())
    copy = pickle.loads(pickle.dumps(rnet))
    with pytest.raises(LabellingError, match="construct the Recorder again"):
        copy.residual_stream()


def test_inside_a_block_of_the_recorder_it_is_refused() -> None:
    rnet = Recorder(Model("in turn"), input_data=IDS)
    rnet.record("blocks.0")
    with rnet.watch():
        rnet.net(IDS)
        with pytest.raises(ComparisonError, match="leave the block"):
            rnet.residual_stream()


def test_a_compiled_part_is_refused() -> None:
    net = Model("in turn")
    rnet = Recorder(net, input_data=IDS)
    net.blocks[0].compile(backend="eager")
    with pytest.raises(UnsupportedNetError, match=r"without torch\.compile"):
        rnet.residual_stream()

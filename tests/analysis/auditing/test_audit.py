"""Columns made by plain hooks of torch and changed by hand: the audit must say what was done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from scio_recorder import Recorder, Recording, Tokens
from scio_recorder.errors import CollectError, ComparisonError
from scio_recorder.integrations.hidden_states import recording_of_hidden_states
from scio_recorder.reductions import Mean

WIDTH, HEADS, POSITIONS = 32, 4, 10


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        # A row that attends to nothing attends to itself.
        allowed = (causal & mask[:, None, None, :].bool()) | torch.eye(len(causal)).bool()
        mixed = scaled_dot_product_attention(q, k, v, allowed)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A small transformer with an embedding of absolute positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.head(self.norm(x))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs)


LENGTHS = [10, 6, 8, 10, 7, 6]


def inputs(side: str = "right") -> list[dict[str, Tensor]]:
    """Return two batches of three samples, padded."""
    ids = torch.randint(3, 50, (6, POSITIONS), generator=torch.Generator().manual_seed(0))
    real = torch.arange(POSITIONS) < torch.tensor(LENGTHS)[:, None]
    if side == "left":
        pads = zip(ids, LENGTHS, strict=True)
        ids = torch.stack([row.roll(POSITIONS - length) for row, length in pads])
        real = real.flip(1)
    ids = ids.masked_fill(~real, 1)
    return [
        {"input_ids": ids[some], "attention_mask": real[some].long()}
        for some in (slice(3), slice(3, 6))
    ]


NAMES = ("model.layers.0", "model.layers.1", "model.layers.2", "model.norm")
NAMES += tuple(f"model.layers.1.{name}" for name in ("attn", "attn.qkv", "norm2", "mlp", "mlp.1"))


def states(
    net: nn.Module, batches: list[dict[str, Tensor]], names: tuple[str, ...] = NAMES
) -> dict[str, Tensor]:
    """Return what modules return, [samples, positions, features], by plain hooks."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, out, name=name: seen.setdefault(name, []).append(out.detach().clone())
        )
        for name, module in net.named_modules()
        if name in names
    ]
    with torch.no_grad():
        for batch in batches:
            net(**batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.fixture(scope="module")
def net() -> Wrapped:
    torch.manual_seed(0)
    return Wrapped().eval()


@pytest.fixture(scope="module")
def rnet(net: Wrapped) -> Recorder:
    return Recorder(net, input_data=inputs()[0])


def tokens(columns: dict[str, Tensor], side: str = "right") -> Recording:
    """Return a recording whose rows are the real tokens."""
    mask = torch.cat([batch["attention_mask"] for batch in inputs(side)])
    return recording_of_hidden_states(columns, mask=mask)


def found(recording: Recording, rnet: Recorder, **options: object) -> dict[str, tuple[str, object]]:
    """Return the kind and the name of the layer of each column."""
    findings = recording.audit(rnet, options.pop("batches", inputs()), **options)
    return {
        findings.architecture[column].name: (finding.kind, finding.layer and finding.layer.name)
        for column, finding in findings.items()
    }


BLOCK = "model.layers.1"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["right", "left"])
def test_honest_columns_are_as_named(rnet, net, dtype, side):
    held = states(copy.deepcopy(net).to(dtype), inputs(side))
    for recording in (tokens(held, side), recording_of_hidden_states(held)):
        answers = found(recording, rnet, batches=inputs(side))
        assert answers == {name: ("as named", name) for name in held}


def test_what_another_precision_computed_may_be_stored_wider_or_narrower(rnet, net):
    # Of an embedding, values in bfloat16 are the exact ones, rounded once.
    low = states(copy.deepcopy(net).bfloat16(), inputs(), ("model.tokens", *NAMES))
    high = states(net, inputs())
    wider = {name: value.float() for name, value in low.items()}
    narrower = {name: value.to(torch.float8_e4m3fn) for name, value in high.items()}
    float8 = {name: value.to(torch.float8_e4m3fn) for name, value in low.items()}
    for held in (wider, narrower, float8, {name: value.half() for name, value in high.items()}):
        assert {kind for kind, _ in found(tokens(held), rnet).values()} == {"as named"}


def test_a_net_in_bfloat16_is_a_reference_for_itself_and_for_float32(net):
    low = copy.deepcopy(net).bfloat16()
    rnet = Recorder(low, input_data=inputs()[0])
    for other in (low, copy.deepcopy(low).float()):
        held = states(other, inputs())
        assert {kind for kind, _ in found(tokens(held), rnet).values()} == {"as named"}


@pytest.mark.parametrize(
    ("name", "means", "match"),
    [
        ("model.layers.1", "model.layers.1", None),
        ("layers.1", "model.layers.1", None),
        ("layers.1.mlp.1", "model.layers.1.mlp.1", None),
        ("blocks.1", "model.layers.1", {"blocks.*": "layers.*"}),
        ("hidden_states.1", "model.layers.0", None),
        ("7", "model.layers.0", {"7": "hidden_states.1"}),
        ("hidden_states.3", "model.norm", None),
    ],
)
def test_names_are_exact_or_endings_or_matched(rnet, net, name, means, match):
    held = states(net, inputs())
    findings = tokens({name: held[means]}).audit(rnet, inputs(), match=match)
    [finding] = findings.values()
    assert (finding.kind, finding.layer.name, finding.words) == ("as named", means, "")


def test_numbers_of_vllm_are_what_a_block_receives(rnet, net):
    held = states(net, inputs())
    recording = tokens({"1": held["model.layers.0"], "3": held["model.layers.2"]})
    recording.settings["rows"]["made_by"] = "vLLM"
    assert found(recording, rnet) == {
        "1": ("as named", "model.layers.0"),
        "3": ("as named", "model.layers.2"),
    }


def middle(net: nn.Module, held: dict[str, Tensor]) -> Tensor:
    """Return the residual stream between attention and MLP, added by hand."""
    return held["model.layers.0"] + held["model.layers.1.attn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tokens", [True, False])
def test_layers_under_the_names_of_others(rnet, net, dtype, is_tokens):
    held = states(copy.deepcopy(net).to(dtype), inputs())
    columns = {
        "model.layers.0": held["model.layers.1"],
        "model.layers.1": held["model.layers.1.mlp"],
        "layers.1": middle(net, held),
        "model.layers.2": held["model.norm"],
        "model.norm": held["model.layers.2"],
        "layers.1.mlp": held["model.layers.1"],
        "foo": held["model.layers.0"],
    }
    recording = tokens(columns) if is_tokens else recording_of_hidden_states(columns)
    assert found(recording, rnet) == {
        "model.layers.0": ("other layer", "model.layers.1"),
        "model.layers.1": ("branch without residual", "model.layers.1.mlp"),
        "layers.1": ("residual without branch", "model.layers.1/add:0"),
        "model.layers.2": ("after the norm", "model.norm"),
        "model.norm": ("before the norm", "model.layers.2"),
        "layers.1.mlp": ("other layer", "model.layers.1"),
        "foo": ("no such name", "model.layers.0"),
    }


def test_layers_that_are_nearer_than_the_limit_are_told_apart(net):
    """The second block adds a percent, of which rounding in bfloat16 explains a part."""
    other = copy.deepcopy(net)
    for part in (other.model.layers[1].attn.out, other.model.layers[1].mlp[2]):
        part.weight.data *= 0.06
        part.bias.data *= 0.06
    held = states(copy.deepcopy(other).bfloat16(), inputs())
    exact = states(other, inputs())
    first, second = exact["model.layers.0"], exact["model.layers.1"]
    apart = ((second - first).norm(dim=-1) / first.norm(dim=-1)).median()
    assert 0.01 < apart < 0.016
    recorder = Recorder(other, input_data=inputs()[0])
    columns = {"model.layers.0": held["model.layers.1"], "layers.0": held["model.layers.0"]}
    assert found(tokens(columns), recorder) == {
        "model.layers.0": ("other layer", "model.layers.1"),
        "layers.0": ("as named", "model.layers.0"),
    }


def permuted(values: Tensor, num_parts: int) -> Tensor:
    order = torch.randperm(num_parts, generator=torch.Generator().manual_seed(1))
    assert not order.equal(torch.arange(num_parts))
    return values.unflatten(-1, (num_parts, -1))[..., order, :].flatten(-2)


DEFECTS = {
    "constant": lambda x: x[:1, :1].expand_as(x).clone(),
    "features permuted": lambda x: permuted(x, WIDTH),
    "heads permuted": lambda x: permuted(x, HEADS),
    "beyond rounding": lambda x: x + 0.2 * x.std() * torch.randn_like(x),
    "unknown": torch.randn_like,
    "shifted by a token": lambda x: torch.stack([row.roll(1, 0) for row in x]),
    "samples swapped": lambda x: x[[3, 1, 2, 0, 4, 5]],
    "rounded twice": lambda x: x.bfloat16().half(),
}


@pytest.mark.parametrize("kind", DEFECTS)
@pytest.mark.parametrize("is_tokens", [True, False])
def test_numbers_and_rows_that_were_changed(rnet, net, kind, is_tokens):
    torch.manual_seed(0)
    held = states(net, inputs())
    columns = {"model.layers.0": held["model.layers.0"], BLOCK: DEFECTS[kind](held[BLOCK])}
    recording = tokens(columns) if is_tokens else recording_of_hidden_states(columns)
    layer = None if kind in ("constant", "unknown") else BLOCK
    assert found(recording, rnet) == {
        "model.layers.0": ("as named", "model.layers.0"),
        BLOCK: (kind, layer),
    }


def test_numbers_that_went_through_float8(rnet, net):
    held = states(net, inputs())
    twice = {name: value.to(torch.float8_e4m3fn).float() for name, value in held.items()}
    assert {kind for kind, _ in found(tokens(twice), rnet).values()} == {"rounded twice"}


def test_a_constant_that_the_net_returns_is_as_named(rnet):
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    recorder = Recorder(nn.Sequential(Constant()), input_size=(1, 4))
    recorder.record("0")
    batches = [torch.randn(5, 4)]
    assert found(recorder.collect(batches), recorder, batches=batches) == {"0": ("as named", "0")}


def test_rows_and_layer_that_are_both_wrong_are_named_for_the_layer(rnet, net):
    held = states(net, inputs())
    findings = tokens({BLOCK: held["model.layers.0"].roll(1, 1)}).audit(rnet, inputs())
    finding = findings[BLOCK]
    assert (finding.kind, finding.layer.name) == ("other layer", "model.layers.0")
    assert finding.words == "a row holds what belongs 1 position earlier"
    earlier = tokens({BLOCK: held[BLOCK].roll(-2, 1)}).audit(rnet, inputs())[BLOCK]
    assert earlier.words == "a row holds what belongs 2 positions later"
    torch.manual_seed(0)
    noise = 0.05 * torch.randn_like(held[BLOCK])
    noisy = tokens({BLOCK: held["model.layers.0"] + noise}).audit(rnet, inputs())[BLOCK]
    assert (noisy.kind, noisy.layer.name) == ("other layer", "model.layers.0")
    # The words are about the layer that is named.
    assert noisy.words.startswith(f"{noisy.error:.2g} off")


def test_words_do_not_name_the_layer_that_a_column_was_found_to_hold(rnet, net):
    finding = tokens({BLOCK: states(net, inputs())["model.layers.2"]}).audit(rnet, inputs())[BLOCK]
    assert (finding.kind, finding.layer.name) == ("other layer", "model.layers.2")
    assert finding.words == ""


@pytest.mark.parametrize(
    ("cut", "words"), [(slice(2, None), "starts at position 2"), (slice(-2), "lacks 2 rows")]
)
def test_positions_that_are_missing(rnet, net, cut, words):
    value = states(net, inputs())[BLOCK]
    rows = [row[:length][cut] for row, length in zip(value, LENGTHS, strict=True)]
    lengths = list(map(len, rows))
    recording = recording_of_hidden_states({BLOCK: torch.cat(rows)}, lengths=lengths)
    finding = recording.audit(rnet, inputs())[BLOCK]
    assert (finding.kind, finding.layer.name) == ("positions missing", BLOCK)
    assert words in finding.words
    blank = value.clone()
    # In the first batch only.
    blank[:3, :2] = torch.nan
    assert found(tokens({BLOCK: blank}), rnet)[BLOCK] == ("positions missing", BLOCK)


@pytest.mark.parametrize("lacking", [[1], [5], [3, 4, 5]])
def test_samples_without_rows(rnet, net, lacking):
    value = states(net, inputs())[BLOCK]
    lengths = [0 if sample in lacking else length for sample, length in enumerate(LENGTHS)]
    rows = torch.cat([row[:length] for row, length in zip(value, lengths, strict=True)])
    recording = recording_of_hidden_states({BLOCK: rows}, lengths=lengths)
    assert found(recording, rnet) == {BLOCK: ("positions missing", BLOCK)}


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_padding_that_are_counted(rnet, net, side):
    value = states(net, inputs(side))[BLOCK]
    recording = recording_of_hidden_states({BLOCK: value.flatten(0, 1)}, lengths=[POSITIONS] * 6)
    answers = found(recording, rnet, batches=inputs(side))
    assert answers == {BLOCK: ("padding counted", BLOCK)}


def test_padding_that_was_attended_to(rnet, net):
    unmasked = [x | {"attention_mask": torch.ones(3, POSITIONS)} for x in inputs("left")]
    columns = {BLOCK: states(net, unmasked)[BLOCK]}
    for recording in (tokens(columns, "left"), recording_of_hidden_states(columns)):
        answers = found(recording, rnet, batches=inputs("left"))
        assert answers == {BLOCK: ("padding counted", BLOCK)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_of_few_samples_that_was_attended_to(net, dtype):
    batches = inputs("left")
    for batch in batches:
        # Of each three samples, one is padded.
        batch["attention_mask"][:2] = 1
        batch["input_ids"][:2].clamp_(min=3)
    seen = [{**x, "attention_mask": torch.ones_like(x["attention_mask"])} for x in batches]
    held = states(copy.deepcopy(net).to(dtype), seen)[BLOCK]
    recorder = Recorder(net, input_data=batches[0])
    recording = recording_of_hidden_states({BLOCK: held})
    assert found(recording, recorder, batches=batches)[BLOCK] == ("padding counted", BLOCK)
    # Noise in as few rows is no padding.
    noisy = states(net, batches)[BLOCK]
    noisy[2::3] += torch.randn_like(noisy[2::3])
    answers = found(recording_of_hidden_states({BLOCK: noisy}), recorder, batches=batches)
    assert answers[BLOCK] == ("beyond rounding", BLOCK)


@pytest.mark.parametrize("is_tokens", [True, False])
def test_padding_on_the_other_side(rnet, net, is_tokens):
    # Positions are counted from the padding on, so the numbers differ as well.
    columns = {BLOCK: states(net, inputs("left"))[BLOCK]}
    recording = tokens(columns, "left") if is_tokens else recording_of_hidden_states(columns)
    assert found(recording, rnet) == {BLOCK: ("other padding side", BLOCK)}


def test_rows_that_lie_on_the_other_side_of_the_padding(rnet, net):
    value = states(net, inputs())[BLOCK]
    rolled = [row.roll(POSITIONS - length, 0) for row, length in zip(value, LENGTHS, strict=True)]
    recording = recording_of_hidden_states({BLOCK: torch.stack(rolled)})
    assert found(recording, rnet) == {BLOCK: ("other padding side", BLOCK)}


def test_error_and_rounding_are_those_of_a_copy_in_that_precision(rnet, net):
    exact = states(net, inputs())[BLOCK]
    rounded = states(copy.deepcopy(net).bfloat16(), inputs())[BLOCK]
    finding = tokens({BLOCK: rounded}).audit(rnet, inputs())[BLOCK]
    errors = (rounded.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)
    by_hand = pytest.approx(float(errors.median()), rel=0.2)
    assert (finding.error, finding.rounding) == (by_hand, by_hand)


def test_images_have_no_positions(rnet):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten())
    recorder, x = Recorder(net, input_size=(1, 3, 8, 8)), torch.randn(5, 3, 8, 8)
    recorder.record("0", "2", "3")
    recording = recorder.collect([x])
    recording["0"].copy_(recording["0"][[1, 0, 2, 3, 4]])
    recording["3"].copy_(net[:3](x).detach()[:, [1, 0, 2, 3, 4, 5]].flatten(1))
    answers = found(recording, recorder, batches=[x])
    assert answers["0"] == ("samples swapped", "0")
    assert answers["2"] == ("as named", "2")


def test_operations_and_rows_chosen_by_name_of_a_recording_on_disk(net, tmp_path):
    recorder = Recorder(net, input_data=inputs()[0])
    operation = f"{BLOCK}.mlp.1/gelu:0"
    recorder.record(BLOCK, operation)
    rows = Tokens(mask="attention_mask", where="attention_mask")
    recording = recorder.collect(inputs(), rows=rows, store=f"disk:{tmp_path}/run")
    layer = f"{BLOCK}.mlp.1"
    answers = found(recording, recorder)
    assert answers == {BLOCK: ("as named", BLOCK), operation: ("as named", operation)}
    assert found(tokens({layer: states(net, inputs())[layer]}), recorder) == {
        layer: ("as named", layer)
    }


def branches_first(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    return one + two + x


def stream_first(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    return x + one + two


@pytest.mark.parametrize("added", [branches_first, stream_first])
def test_branches_side_by_side_are_branches(added):
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.one(x), self.two(x)
            return added(x, one, two)

    net, x = nn.Sequential(Parallel(), Parallel(), Parallel()), torch.randn(9, 8)
    recorder = Recorder(net, input_size=(1, 8))
    middle = net[0](x).detach()
    columns = {"2": middle, "1": net[1].two(middle).detach(), "0": x}
    answers = found(recording_of_hidden_states(columns), recorder, batches=[x])
    assert answers["2"] == ("other layer", "0")
    assert answers["1"] == ("branch without residual", "1.two")
    assert answers["0"][0] == "residual without branch"
    columns = {"1": net[1].one(middle).detach(), "2": net[:2](x).detach()}
    answers = found(recording_of_hidden_states(columns), recorder, batches=[x])
    assert answers == {"1": ("branch without residual", "1.one"), "2": ("other layer", "1")}


def test_the_residual_stream_of_a_last_block_behind_which_nothing_is_done():
    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mid, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mid(x)
            return self.norm(x + self.mlp(x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = nn.ModuleList([PostNorm(), PostNorm()]), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layers[1](self.layers[0](x)))

    torch.manual_seed(0)
    net, x = Stack(), torch.randn(9, 8)
    middle = net.layers[1].mid(net.layers[0](x)).detach()
    recorder = Recorder(net, input_size=(1, 8))
    answers = found(recording_of_hidden_states({"layers.1": middle}), recorder, batches=[x])
    assert answers == {"layers.1": ("residual without branch", "layers.1.mid")}


class InARow(Block):
    """A block whose feed-forward part works on the tokens of all samples in a row, as OPT's."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = (x + self.attn(self.norm1(x), mask)).flatten(0, 1)
        return (hidden + self.mlp(self.norm2(hidden))).view(x.shape)


@pytest.mark.parametrize("name", ["norm2", "mlp"])
def test_both_terms_of_a_sum_over_tokens_in_a_row(name):
    torch.manual_seed(1)
    net = Wrapped().eval()
    net.model.layers[1] = InARow()
    value, kind = (
        states(net, inputs(), (f"{BLOCK}.mlp",))[f"{BLOCK}.mlp"],
        "branch without residual",
    )
    if name == "norm2":
        seen = []
        norm = net.get_submodule(f"{BLOCK}.norm2")
        with norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
            net.eval()(**inputs()[0]), net(**inputs()[1])
        value, kind = torch.cat(seen), "residual without branch"
    column = value.view(6, POSITIONS, WIDTH)
    answers = found(tokens({BLOCK: column}), Recorder(net, input_data=inputs()[0]))
    assert answers[BLOCK][0] == kind


def test_a_table_names_layers_that_no_column_holds(rnet, net):
    held = states(net, inputs())
    columns = {"model.layers.0": held["model.layers.0"], "layers.1": held["model.layers.0"]}
    audit = tokens(columns).audit(rnet, inputs())
    assert [layer.name for layer in audit.absent] == ["model.layers.1", "model.layers.2"]
    text = str(audit)
    assert "Audit of 2 columns, 6 samples: 1 not as named." in text
    assert "No column holds model.layers.1, model.layers.2." in text
    assert "other layer" in text
    finding = audit["layers.1"]
    assert str(finding) == "other layer: 3-1 model.layers.0 (Block) (error 0, rounding 0)"
    assert repr(finding).startswith("Finding(layer=<Layer 3-1 model.layers.0 (Block)>, kind=")
    assert "training mode" not in text


def test_words_are_printed_whole_and_training_mode_is_noted(net):
    other = copy.deepcopy(net).train()
    recorder = Recorder(other, input_data=inputs()[0])
    value = states(net, inputs())[BLOCK]
    audit = tokens({BLOCK: value.bfloat16().float()}).audit(recorder, inputs())
    [finding] = audit.values()
    assert finding.kind == "rounded twice"
    assert f"{BLOCK}: {finding.words}." in str(audit).splitlines()
    assert "training mode" in str(audit)


def test_the_net_is_left_as_it_was(net):
    other = copy.deepcopy(net).train()
    other.model.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.5))
    before = copy.deepcopy(other.state_dict())
    recorder = Recorder(other, input_data=inputs()[0])
    random = torch.get_rng_state()
    tokens({BLOCK: states(net, inputs())[BLOCK].bfloat16()}).audit(recorder, inputs())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, before.values(), other.state_dict().values()))
    assert all(module.training for module in other.modules())
    assert not any(module._forward_hooks for module in other.modules())


def test_samples_are_paired_by_ids_and_may_be_some_of_a_recording(rnet, net):
    value = states(net, inputs())[BLOCK]
    mask = torch.cat([batch["attention_mask"] for batch in inputs()])
    names = list("fedcba")
    recording = recording_of_hidden_states(
        {BLOCK: value.flip(0)}, mask=mask.flip(0), sample_ids=names[::-1]
    )
    some = [inputs()[0] | {"names": names[:3]}]
    options = {
        "sample_ids": lambda batch: batch["names"],
        "to_inputs": lambda batch: {k: x for k, x in batch.items() if k != "names"},
    }
    assert found(recording, rnet, batches=some, **options) == {BLOCK: ("as named", BLOCK)}
    with pytest.raises(ComparisonError, match="3 samples of those that the batches have are"):
        recording.audit(rnet, inputs()[:1])


def test_what_cannot_be_audited(rnet, net):
    recording = tokens({BLOCK: states(net, inputs())[BLOCK]})
    with pytest.raises(ComparisonError, match="batches is empty"):
        recording.audit(rnet, [])
    with pytest.raises(ComparisonError, match=r"write Recorder\(net"):
        recording.audit(net, inputs())
    with pytest.raises(ComparisonError, match=r"'blocks\.\*', which matches no column"):
        recording.audit(rnet, inputs(), match={"blocks.*": "layers.*"})
    with pytest.raises(ComparisonError, match="rows='x'"):
        recording.audit(rnet, inputs(), rows="x")
    recorder = Recorder(net, input_data=inputs()[0])
    recorder.record(BLOCK)
    reduced = recorder.collect(inputs(), reduce=Mean(), rows=Tokens())
    with pytest.raises(ComparisonError, match="none of the 1 layer of the recording has samples"):
        reduced.audit(rnet, inputs())
    rows = Tokens(where=lambda batch: batch["input_ids"] > 9)
    some = recorder.collect(inputs(), rows=rows)
    with pytest.raises(ComparisonError, match="give the same rows="):
        some.audit(rnet, inputs())
    assert found(some, rnet, rows=rows) == {BLOCK: ("as named", BLOCK)}
    with pytest.raises(CollectError, match="to_inputs"):
        recording.audit(rnet, inputs(), to_inputs=lambda batch: 1)

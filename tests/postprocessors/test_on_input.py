"""`OnInput`: a post-processor that acts on what a module receives."""

from __future__ import annotations

import copy
import re
import warnings
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import PostprocessorError, Recorder
from scio_recorder.postprocessors import Ablate, At, Heads, OnInput, Scale
from tests.zoo.base import Net as Composed
from tests.zoo.base import linear

WIDTH = 6


class Block(nn.Module):
    """A residual block whose parts can be composed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(input=self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def by_hand(net: Net, x: Tensor, change: Any, at: tuple[int, ...] = (1,)) -> Tensor:
    for number, block in enumerate(net.blocks):
        hidden = torch.relu(block.up(x))
        x = x + block.down(change(hidden) if number in at else hidden)
    return x


def recorder(net: nn.Module, *selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(net, input_size=(2, WIDTH))
    rnet.record(*selectors, **options)
    return rnet


CHANGES = {
    "out of place": lambda h: h * 2 + 1,
    "in place": lambda h: h.add_(1),
    "in place, without a result": lambda h: _halve(h),
    "one of the ready-made": Scale(3.0),
    "nested": Heads(4, [1, 3], Ablate()),
    "more nested": At((slice(None), 0), Scale(0.0)),
}


def _halve(hidden: Tensor) -> None:
    with torch.no_grad():
        hidden.mul_(0.5)


def out_of_place(change: Any) -> Any:
    def changed(hidden: Tensor) -> Tensor:
        copied = hidden.clone()
        result = change(copied)
        return copied if result is None else result

    return changed


@pytest.mark.parametrize("name", CHANGES)
def test_it_acts_on_what_the_module_receives(name):
    net, x = Net(), torch.randn(3, WIDTH)
    rnet = recorder(net, "blocks.1.down", "blocks.1")
    change = CHANGES[name]
    with torch.no_grad():
        for _ in range(3):
            out = rnet(x, activation_postproc={"blocks.1.down": OnInput(change)})
            expected = by_hand(net, x, out_of_place(change))
            assert torch.equal(out, expected)
            # What the layer returned for the changed input.
            assert torch.equal(rnet.activations["blocks.1"], expected)
        assert torch.equal(rnet(x), by_hand(net, x, None, ()))


def test_recorded_inputs_are_what_forward_received():
    net, x = Net(), torch.randn(3, WIDTH)
    rnet = recorder(net, "blocks.0.down", inputs=True)
    rnet(x, activation_postproc=OnInput(Scale(2.0)))
    hidden = torch.relu(net.blocks[0].up(x))
    (key,) = rnet.inputs["blocks.0.down"].kwargs
    assert key == "input"
    assert torch.equal(rnet.inputs["blocks.0.down"].kwargs["input"], hidden * 2)
    rnet(x)
    assert torch.equal(rnet.inputs["blocks.0.down"].kwargs["input"], hidden)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing(reentrant):
    net = Net(reentrant)
    rnet = recorder(net, "*down")
    x = torch.randn(3, WIDTH, requires_grad=True)
    posts = {"*down": OnInput(lambda h: h * 0.5)}
    outs = [rnet(x, activation_postproc=posts), rnet(x)]
    outs[0].square().sum().backward()
    twin = copy.deepcopy(net)
    twin.zero_grad()
    y = x.detach().clone().requires_grad_()
    by_hand(twin, y, lambda h: h * 0.5, (0, 1)).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_recompute_applies_it_again():
    net, x = Net(), torch.randn(3, WIDTH)
    rnet = recorder(net, "blocks.1", "blocks.1.down", inputs=True)
    rnet.record("blocks.1", "blocks.1.down", inputs=True)
    with torch.no_grad():
        rnet(x, activation_postproc={"blocks.1.down": OnInput(Scale(3.0))})
        expected = rnet.activations["blocks.1.down"].clone()
        recomputed = rnet.recompute("blocks.1.up", "blocks.1.down")
        assert torch.equal(recomputed["blocks.1.down"], expected)
        before = x + net.blocks[0].down(torch.relu(net.blocks[0].up(x)))
        assert torch.equal(recomputed["blocks.1.up"], net.blocks[1].up(before))


def twice(net: Any, x: Tensor) -> Any:
    """Call a module twice, after a call that fails."""
    try:
        net.cell(x, True)
    except ZeroDivisionError:
        x = x + 1
    return net.cell(net.cell(x))


def cell(_: Any, x: Tensor, fails: bool = False) -> Tensor:
    if fails:
        raise ZeroDivisionError
    return x * 3


def test_calls_of_one_module_are_told_apart():
    rnet = Recorder(Composed(twice, cell=Composed(cell)), input_size=(1, 2))
    first, second = rnet.architecture.labels_of("cell")
    rnet.record(first, second)
    x = torch.randn(1, 2)
    out = rnet(x, activation_postproc={second: OnInput(lambda y: y - 1)})
    assert torch.equal(out, ((x + 1) * 3 - 1) * 3)
    out = rnet(x, activation_postproc={first: OnInput(lambda y: y - 1)})
    assert torch.equal(out, (x + 1 - 1) * 3 * 3)
    out = rnet(x, activation_postproc=[OnInput(lambda y: y * 2), lambda y: y + 7])
    assert torch.equal(out, (x + 1) * 2 * 3 * 3 + 7)


def test_rows_without_a_call_do_not_count():
    shared = nn.Tanh()
    blocks = [
        Composed(lambda net, x: net.shared(net.linear(x)), linear=linear(), shared=shared)
        for _ in range(2)
    ]
    net = Composed(lambda net, x: net.blocks[1](net.blocks[0](x)), blocks=nn.ModuleList(blocks))
    rnet = Recorder(net, input_size=(1, 4))
    # torchinfo shows the shared module under its last name, whose containers get rows for that.
    rows = [row.executed for row in rnet.architecture.values() if row.name == "blocks.1"]
    assert rows == [False, True]
    rnet.record("blocks.1")
    x = torch.randn(2, 4)
    out = rnet(x, activation_postproc=OnInput(Scale(3.0)))
    assert torch.equal(out, net.blocks[1](net.blocks[0](x) * 3))


class Structured(nn.Module):
    def forward(self, pair: Any, *, mask: Tensor | None = None, flag: bool = True) -> Tensor:
        first, other = pair if isinstance(pair, tuple) else (pair, 0)
        return first - other if mask is None else mask * 2


def calls(net: Any, x: Tensor, how: str = "pair") -> Any:
    if how == "pair":
        return net.inner((x, x * 2), mask=None)
    if how == "keyword":
        return net.inner(None, flag=False, mask=x)
    return net.inner(3)


@pytest.mark.parametrize(
    ("how", "expected"), [("pair", lambda x: x * 10 - x * 2), ("keyword", lambda x: x * 20)]
)
def test_the_first_tensor_counts(how, expected):
    x = torch.randn(2, 3)
    rnet = Recorder(Composed(calls, inner=Structured()), input_data={"x": x, "how": how})
    rnet.record("inner")
    out = rnet(x, how, activation_postproc=OnInput(lambda t: t * 10))
    assert torch.equal(out, expected(x))


def test_what_can_not_be():
    x = torch.ones(2, 3)
    rnet = Recorder(Composed(calls, inner=Structured()), input_data={"x": x})
    rnet.record("inner")
    with pytest.raises(PostprocessorError, match="received no tensor"):
        rnet(x, "number", activation_postproc=OnInput(Scale(1.0)))
    with pytest.raises(PostprocessorError, match="must be the outermost"):
        rnet(x, activation_postproc=At(0, OnInput(Scale(1.0))))
    with pytest.raises(PostprocessorError, match="takes a post-processor"):
        OnInput(3)  # type: ignore[arg-type]
    with pytest.raises(PostprocessorError, match="takes a post-processor"):
        OnInput(OnInput(Scale(1.0)))
    with pytest.raises(ValueError, match="layer 1-1"):
        rnet(x, activation_postproc=OnInput(lambda t: t.reshape(7)))
    assert torch.equal(rnet(x), x - x * 2)


@pytest.mark.campaign
def test_compiled_passes_refuse_it():
    rnet = recorder(Net(), "blocks.0.down")
    compiled = torch.compile(rnet, backend="eager", fullgraph=True)
    # Up to torch 2.9, dynamo says of an error in what it follows only which kind it is.
    is_quoted = torch.__version__ >= "2.10"
    told = "OnInput can't act in a compiled pass" if is_quoted else "PostprocessorError"
    with pytest.raises(Exception, match=told):
        compiled(torch.ones(2, WIDTH), activation_postproc=OnInput(Scale(2.0)))


class Attention(nn.Module):
    def __init__(self, last: str) -> None:
        super().__init__()
        self.q_proj, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_v = nn.Linear(WIDTH, WIDTH)
        self.last = last
        if last:
            self.add_module(last, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q_proj(x) @ self.key(x).mT
        mixed: Tensor = scores.softmax(-1) @ self.to_v(x)
        return self.get_submodule(self.last)(mixed) if self.last else mixed


def transformer(last: str) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    return Composed(lambda net, x: net.mlp(net.attn(x)), attn=Attention(last), mlp=mlp)


HEADS = Heads(3, [1], Ablate())


@pytest.mark.parametrize("last", ["out_proj", "c_proj", "o", "dense", "proj", "wo"])
def test_heads_behind_their_projection_are_warned_of(last: str) -> None:
    rnet = recorder(transformer(last), "*")
    for name in ("attn", f"attn.{last}"):
        with pytest.warns(UserWarning, match=rf"'attn\.{last}': OnInput\(Heads\(num_heads=3"):
            rnet(torch.randn(2, WIDTH), activation_postproc={name: HEADS})
    # What is right, and what is no head at all, is not warned of.
    for name in ("attn.q_proj", "attn.key", "attn.to_v", "mlp.0", "mlp"):
        rnet(torch.randn(2, WIDTH), activation_postproc={name: HEADS})
    rnet(torch.randn(2, WIDTH), activation_postproc={f"attn.{last}": OnInput(HEADS)})


def test_heads_of_an_attention_without_a_projection_are_not_warned_of() -> None:
    rnet = recorder(transformer(""), "attn")
    rnet(torch.randn(2, WIDTH), activation_postproc=HEADS)


def test_heads_of_an_attention_whose_projection_is_no_layer() -> None:
    inner = nn.MultiheadAttention(WIDTH, 3)
    net = Composed(lambda net, x: net.inner(x, x, x, need_weights=False)[0], inner=inner)
    rnet = recorder(net, "inner")
    with pytest.warns(UserWarning, match="runs its projection as no layer"):
        rnet(torch.randn(2, WIDTH), activation_postproc=HEADS)


def test_heads_of_an_attention_that_is_the_whole_network_are_warned_of() -> None:
    rnet = recorder(Attention("out"), "out", "")
    for name in ("out", ""):
        with pytest.warns(UserWarning, match=r"'out': OnInput"):
            rnet(torch.randn(2, WIDTH), activation_postproc={name: HEADS})


def test_one_warning_names_all_layers_whose_heads_are_mixed() -> None:
    rnet = recorder(nn.Sequential(*(transformer("out_proj") for _ in range(3))), "*.attn")
    with pytest.warns(
        UserWarning, match="0.attn .* and 2 other layers return, .*'0.attn.out_proj'"
    ):
        rnet(torch.randn(2, WIDTH), activation_postproc=HEADS)


@pytest.mark.campaign
def test_heads_of_a_library_are_warned_of_behind_the_projection_alone() -> None:
    config: Any = {"vocab_size": 9, "num_hidden_layers": 1, "hidden_size": WIDTH}
    config |= {"num_attention_heads": 3, "intermediate_size": 8, "max_position_embeddings": 8}
    nets = [
        (transformers.GPT2Model, transformers.GPT2Config(**config), "*.c_proj"),
        (transformers.BertModel, transformers.BertConfig(**config), "*.attention.output.dense"),
        (transformers.LlamaModel, transformers.LlamaConfig(**config), "*.o_proj"),
    ]
    for kind, settings, projection in nets:
        ids = torch.zeros(1, 4, dtype=torch.int64)
        rnet = Recorder(kind(settings), input_data=ids)
        rnet.record("*")
        for row in rnet.architecture.values():
            is_wrong = "att" in row.name.lower() and fnmatch(row.name, projection)
            is_right = re.search(r"\.(query|key|value|[qkv]_proj|c_attn)$", row.name)
            if is_wrong or is_right:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    rnet(ids, activation_postproc={row.name: Heads(3, 0, abs)})
                assert any("OnInput" in str(warning.message) for warning in caught) == is_wrong, (
                    row.name
                )

"""Attention beside all that a recorder does: options, selectors, copies, threads, errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from scio_recorder import Recorder, compare
from scio_recorder.errors import (
    AttentionError,
    LayerNotFoundError,
    MutationError,
    PostprocessorError,
    SelectorTypeError,
    UnsupportedNetError,
)
from scio_recorder.postprocessors import Knockout
from tests.attention_nets import HEADS, SIZE, Net, SelfAttention, above
from tests.capture.test_attention_in_nets import GROUPED
from tests.harness import recorder
from tests.zoo.base import Net as Composed


def recorded(net: nn.Module, *selectors: Any, attention: Any = True, **options: Any) -> Recorder:
    rnet = Recorder(net, input_size=(2, 5, SIZE))
    rnet.record(*(selectors or ["h.*.attn"]), attention=attention, **options)
    return rnet


def assert_right(rnet: Recorder, net: Any, x: Tensor, tolerance: float = 1e-6) -> None:
    """Compare all weights with those by hand."""
    with torch.no_grad():
        for number, block in enumerate(net.h):
            weights = rnet.attention[f"h.{number}.attn"].weights()
            difference = weights - block.attn.by_hand(x)
            assert difference.abs().max() <= tolerance
            x = block(x)


@pytest.fixture(params=[False, True], ids=["kernel", "eager"])
def is_eager(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("policy", ["auto", "always", "never"])
@pytest.mark.parametrize("offload", [False, True])
def test_every_way_of_keeping(
    is_eager: bool, policy: Literal["auto", "always", "never"], offload: bool
) -> None:
    net = Net(is_eager=is_eager).eval()
    rnet = recorded(net, copy=policy, offload=offload)
    for _ in range(3):
        x = torch.randn(2, 5, SIZE)
        with torch.no_grad():
            assert torch.equal(rnet(x), net(x))
        assert_right(rnet, net, x)


@pytest.mark.parametrize("context", ["grad", "inference", "autocast"])
def test_every_mode(is_eager: bool, context: str) -> None:
    net, x = Net(is_eager=is_eager), torch.randn(2, 5, SIZE)
    rnet = recorded(net, gradients=context == "grad", inputs=True)
    for _ in range(2):
        if context == "inference":
            with torch.inference_mode():
                rnet(x)
        elif context == "autocast":
            with torch.autocast("cpu"):
                rnet(x)
        else:
            bare = torch.autograd.grad(net(x).sum(), [*net.parameters()])
            net.zero_grad()
            rnet(x).sum().backward()
            pairs = zip(net.parameters(), bare, strict=True)
            assert all(torch.equal(one.grad, other) for one, other in pairs)  # type: ignore[arg-type]
            assert list(rnet.gradients) == list(rnet.recording)
        # bfloat16 has 8 bits, and its rounding differs from step to step.
        assert_right(rnet, net, x, 2e-2 if context == "autocast" else 1e-6)
        assert set(rnet.inputs) == set(rnet.activations) == set(rnet.attention)


def test_dropout_that_acts() -> None:
    net, x = Net(dropout=0.25), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    rnet(x)
    attention = rnet.attention["h.0.attn"]
    assert attention.query is not None
    for read in (attention.weights, lambda: attention.error, attention.plot):
        with pytest.raises(AttentionError, match=r"dropped weights with probability 0\.25"):
            read()
    net.eval()
    rnet(x)
    assert_right(rnet, net, x)


def test_dropout_of_eager_code_is_in_the_weights() -> None:
    net, x = Net(dropout=0.25, is_eager=True), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    rnet(x)
    weights, expected = rnet.attention["h.0.attn"].weights(), net.h[0].attn.by_hand(x)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], expected[kept].detach() / 0.75)
    assert not kept.all()


class Overwriting(SelfAttention):
    """Overwrites all that the kernel has received and returned, once it has."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.contiguous() for part in self.parts(x))
        mask = above(x.shape[1])
        if self.is_eager:
            weights = (query @ key.mT / key.shape[-1] ** 0.5 + mask).softmax(-1)
            mixed = weights @ value
            weights.zero_()
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out = mixed.clone()
        for tensor in (query, key, value, mask, mixed):
            tensor.fill_(3.0)
        return out.transpose(1, 2).flatten(2)


def test_what_is_overwritten_afterwards(is_eager: bool) -> None:
    net = Net().eval()
    for block in net.h:
        block.attn = Overwriting(is_eager=is_eager)
    rnet = recorded(net)
    for _ in range(3):
        x = torch.randn(2, 5, SIZE)
        with torch.no_grad():
            rnet(x)
        assert_right(rnet, net, x)


def test_what_the_caller_overwrites_after_the_pass() -> None:
    net, x = Net().eval(), torch.randn(2, 5, SIZE)
    rnet = recorded(net, "h.1.attn")
    with torch.no_grad():
        rnet(x)
        rnet(x)
        attention = rnet.attention["h.1.attn"]
        before = attention.weights()
        rnet(torch.randn(2, 5, SIZE))
    assert torch.equal(attention.weights(), before)


def test_a_layer_that_runs_twice(is_eager: bool) -> None:
    attn = SelfAttention(is_eager=is_eager)
    net, x = Composed(lambda net, x: net.attn(net.attn(x)), attn=attn), torch.randn(2, 5, SIZE)
    rnet = recorded(net, "attn")
    rnet(x)
    first, second = rnet.recording
    torch.testing.assert_close(rnet.attention[first].weights(), net.attn.by_hand(x).detach())
    again = net.attn.by_hand(net.attn(x)).detach()
    torch.testing.assert_close(rnet.attention[second].weights(), again)
    with pytest.raises(LayerNotFoundError, match="attn"):
        _ = rnet.attention["attn"]


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("h.1.attn", ["h.1.attn"]),
        ("h.*.attn", ["h.0.attn", "h.1.attn"]),
        (["h.0.attn", "h.1.attn"], ["h.0.attn", "h.1.attn"]),
        ((3, 1), ["h.0.attn"]),
        ([(3, 3), "h.0.attn"], ["h.0.attn", "h.1.attn"]),
        (SelfAttention, ["h.0.attn", "h.1.attn"]),
        (lambda layer: layer.name == "h.1.attn", ["h.1.attn"]),
        (False, []),
    ],
)
@pytest.mark.parametrize("others", [["h.0.mlp"], []])
def test_selectors_of_its_own(attention: Any, expected: list[str], others: list[str]) -> None:
    net, x = Net(), torch.randn(2, 5, SIZE)
    rnet = Recorder(net, input_size=(2, 5, SIZE))
    rnet.record(*others, attention=attention)
    assert [rnet.architecture[at].name for at in rnet.recording] == others
    rnet(x)
    assert [rnet.architecture[at].name for at in rnet.attention] == expected
    assert list(rnet.activations) == list(rnet.recording)


def test_layers_of_both_kinds() -> None:
    net, x = Net(), torch.randn(2, 5, SIZE)
    rnet = recorded(net, "h.1.attn", "h.1.attn/scaled_dot_product_attention", "h.1/add:0")
    rnet(x)
    assert len(rnet.recording) == len(rnet.activations) == 3
    kernel = rnet.activations["h.1.attn/scaled_dot_product_attention"]
    assert torch.equal(kernel, rnet.attention["h.1.attn"].output)


class Several(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x + 1)


def test_layers_without_attention_or_with_several() -> None:
    net = Net()
    rnet = recorder(net, "h.0.mlp", input_size=(2, 5, SIZE))
    with pytest.raises(LayerNotFoundError, match=r"h\.0\.mlp.*layers that do: .*h\.0\.attn"):
        rnet.record("h.0.mlp", attention=True)
    with pytest.raises(LayerNotFoundError, match=r"h\.0 .*layers that do"):
        rnet.record("h.0.attn", attention="h.0")
    with pytest.raises(SelectorTypeError, match="calls"):
        rnet.record("h.0.attn", attention=True, calls="any")
    with pytest.raises(LayerNotFoundError, match="nothing"):
        rnet.record("h.0.attn", attention="nothing")
    for attention in (True, "h.0.attn/*"):
        with pytest.raises(SelectorTypeError, match="only operations are chosen"):
            rnet.record("h.0.attn/*", attention=attention)
    assert [rnet.architecture[at].name for at in rnet.recording] == ["h.0.mlp"]
    for is_eager in (False, True):
        net.h[1].attn = Several(is_eager=is_eager)
        function = "matmul" if is_eager else "scaled_dot_product_attention"
        with pytest.raises(LayerNotFoundError, match=f"several times.*{function}"):
            recorded(net, "h.1.attn")
    with pytest.raises(LayerNotFoundError, match="no layer of this network does"):
        recorded(nn.Sequential(nn.Linear(SIZE, SIZE)), "0")


class InParts(nn.Module):
    """Multiplies weights in two steps, of which no single product shows the weights of all keys."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.matrix = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        if self.kind == "first keys, then the others":
            return weights[..., :2] @ x[:, :2] + weights[..., 2:] @ x[:, 2:]
        if self.kind == "others first":
            return weights[..., 2:] @ x[:, 2:] + weights[..., :2] @ x[:, :2]
        if self.kind == "smoothed":
            return (weights @ torch.eye(x.shape[1])).unsqueeze(1).squeeze(1) @ x
        matrix = self.matrix.T
        projected = (weights @ x).clone() @ (matrix * 2 if self.kind == "scaled" else matrix)
        return projected @ projected.mT if self.kind == "projected" else projected


@pytest.mark.parametrize("kind", ["first keys, then the others", "others first", "smoothed"])
def test_weights_that_no_single_product_shows(kind: str) -> None:
    with pytest.raises(LayerNotFoundError, match=r"what is multiplied is not .*/softmax"):
        recorded(nn.Sequential(InParts(kind)), "0")


@pytest.mark.parametrize("kind", ["", "projected", "scaled"])
def test_products_behind_a_projection(kind: str) -> None:
    rnet = recorded(nn.Sequential(InParts(kind)), "0")
    x = torch.randn(2, 5, SIZE)
    rnet(x)
    scores = (x.double() @ x.double().mT).exp()
    expected = (scores / scores.sum(-1, keepdim=True)).float()
    torch.testing.assert_close(rnet.attention["0"].weights()[:, 0], expected)


def test_values_that_are_projected_from_another_attention() -> None:
    """By a parameter in the layer's own code, as in XLNet."""

    def forward(net: Any, x: Tensor) -> Any:
        parts = torch.einsum("bpd,dhe->bhpe", x, net.matrix)
        return ((parts @ parts.mT / SIZE).softmax(-1) @ parts).sum(1)

    matrices = [nn.Parameter(torch.randn(SIZE, HEADS, SIZE)) for _ in range(2)]
    net = nn.Sequential(*(Composed(forward, matrix=matrix) for matrix in matrices))
    rnet = recorded(net, "0", "1")
    x = torch.randn(2, 5, SIZE)
    rnet(x)
    for name, received in (("0", x), ("1", net[0](x))):
        matrix = net.get_parameter(f"{name}.matrix").double()
        parts = torch.einsum("bpd,dhe->bhpe", received.double(), matrix)
        expected = (parts @ parts.mT / SIZE).softmax(-1).float()
        torch.testing.assert_close(rnet.attention[name].weights(), expected, rtol=1e-4, atol=1e-5)


def test_a_softmax_that_is_a_module() -> None:
    """As in Swin of timm."""
    net = Composed(lambda net, x: net.softmax(x @ x.mT) @ x, softmax=nn.Softmax(-1))
    rnet = Recorder(net, input_size=(2, 5, SIZE))
    with pytest.raises(LayerNotFoundError, match=r"1-1 softmax \(Softmax\), whose output is the"):
        rnet.record("", attention=True)
    rnet.record("softmax")
    rnet(x := torch.randn(2, 5, SIZE))
    assert torch.equal(rnet.activations["softmax"], (x @ x.mT).softmax(-1))


def test_nothing_is_left_when_nothing_was_asked_for() -> None:
    rnet = recorded(Net(), attention=False)
    rnet(torch.randn(2, 5, SIZE))
    assert not rnet.attention
    with pytest.raises(LayerNotFoundError, match=r'"3-1", attention="3-1"\)'):
        _ = rnet.attention["h.0.attn"]


def test_passes_that_end_early(is_eager: bool) -> None:
    net, x = Net(is_eager=is_eager).eval(), torch.randn(2, 5, SIZE)
    rnet = recorded(net, "h.0.attn", attention="h.0.attn")
    ran: list[bool] = []
    net.h[1].register_forward_pre_hook(lambda module, args: ran.append(True))
    rnet.extract(x)
    assert not ran
    weights = rnet.attention["h.0.attn"].weights()
    torch.testing.assert_close(weights, net.h[0].attn.by_hand(x).detach())


def test_after_a_pass_that_failed() -> None:
    net, x = Net(), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    rnet(x)
    with pytest.raises(RuntimeError):
        rnet(torch.randn(2, 5, SIZE + 1))
    assert not rnet.attention
    rnet(x)
    assert_right(rnet, net, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_passes() -> None:
    net, x = Net().eval(), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    rnet.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        rnet(x)
        with pytest.raises(UnsupportedNetError, match="compiled"):
            _ = rnet.attention
        # Up to PyTorch 2.9, dynamo hands on only the kind of an error.
        told = "compiled pass" if torch.__version__ >= "2.10" else "PostprocessorError"
        with pytest.raises(Exception, match=told):
            rnet(x, activation_postproc={"h.0.attn": Knockout(-1, 0)})


def test_two_recorders_on_one_net(is_eager: bool) -> None:
    net, x = Net(is_eager=is_eager).eval(), torch.randn(2, 5, SIZE)
    outer = recorded(net)
    inner = recorder(net.h[1], "attn", input_size=(2, 5, SIZE), attention=True)
    with torch.no_grad():
        outer(x)
        assert not inner.attention
        inner(x)
        assert_right(outer, net, x)
        torch.testing.assert_close(inner.attention["attn"].weights(), net.h[1].attn.by_hand(x))
        # Both at once.
        with inner.watch() as passes:
            outer(x)
        assert_right(outer, net, x)
        [attention] = passes.attention
        expected = net.h[1].attn.by_hand(net.h[0](x))
        torch.testing.assert_close(attention["attn"].weights(), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_recorder(how: str) -> None:
    net, x = Net().eval(), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    other: Any = copy.deepcopy(rnet) if how == "deepcopy" else pickle.loads(pickle.dumps(rnet))
    del rnet
    other(x)
    assert_right(other, other.net, x)
    other.record("h.1.attn", attention=True)
    other(x)
    assert [other.architecture[at].name for at in other.attention] == ["h.1.attn"]


def test_it_is_printed() -> None:
    rnet = recorded(Net())
    rnet(torch.randn(2, 5, SIZE))
    lines = repr(rnet.attention).splitlines()
    assert len(lines) == 2
    assert "h.0.attn" in lines[0]
    assert "query [2, 2, 5, 4]" in lines[0]


# -- knocked out -----------------------------------------------------------------------------------


def knocked(net: Any, x: Tensor, where: tuple[Any, ...]) -> Tensor:
    """Run a net of these with a mask by hand, at the places of every attention."""
    for block in net.h:
        query, key, value = block.attn.parts(x)
        mask = above(x.shape[1]).repeat(HEADS, 1, 1)
        mask[where] = -torch.inf
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + mixed.transpose(1, 2).flatten(2)
        x = x + block.mlp(x).relu()
    return x


@pytest.mark.parametrize("heads", [None, [1]])
def test_knockout_is_a_mask(is_eager: bool, heads: list[int] | None) -> None:
    net, x = Net(is_eager=is_eager), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    knockout = Knockout(queries=[-1, 3], keys=[0, 2], heads=heads)
    where = (slice(None) if heads is None else 1, [[3], [4]], [[0, 2]])
    expected = knocked(net, x, where)
    for _ in range(2):
        out = rnet(x, activation_postproc={"h.*.attn": knockout})
        torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.sum(), [*net.parameters()])
    wanted = torch.autograd.grad(expected.sum(), [*net.parameters()])
    torch.testing.assert_close(found, wanted)
    weights = rnet.attention["h.0.attn"].weights()
    assert not weights[:, 1, -1, [0, 2]].any()
    assert bool(weights[:, 0, -1, 0].any()) == (heads is not None)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 5))
    # Afterwards nothing acts.
    torch.testing.assert_close(rnet(x), net(x))


@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.parametrize("keys", [[], [0, 2]], ids=["plain", "knocked out"])
def test_activation_checkpointing(is_eager: bool, checkpointing: str, keys: list[int]) -> None:
    net = Net(checkpointing, is_eager=is_eager)
    rnet = recorded(net)
    x = torch.randn(2, 5, SIZE, requires_grad=True)
    out = rnet(x, activation_postproc={"h.*.attn": Knockout(-1, keys)} if keys else None)
    weights = rnet.attention["h.0.attn"].weights(queries=-1)
    rnet(x.detach())
    out.square().sum().backward()
    assert (weights[..., keys] == 0).all()
    if not keys:
        torch.testing.assert_close(weights, net.h[0].attn.by_hand(x)[:, :, -1].detach())
    expected = knocked(net, x, (slice(None), -1, keys))
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [*net.parameters()])
    for one, other in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(one.grad, other)


@pytest.mark.parametrize("context", ["inference", "autocast", "offload"])
def test_knockout_in_every_mode(is_eager: bool, context: str) -> None:
    net, x = Net(is_eager=is_eager).eval(), torch.randn(2, 5, SIZE)
    rnet = recorded(net, offload=context == "offload")
    posts = {"h.*.attn": Knockout(-1, [0, 2])}
    mode: Any = torch.inference_mode() if context == "inference" else torch.no_grad()
    with mode, torch.autocast("cpu", enabled=context == "autocast"):
        out = rnet(x, activation_postproc=posts)
        expected = knocked(net, x, (slice(None), -1, [0, 2]))
    # bfloat16 has 8 bits.
    torch.testing.assert_close(
        out, expected, **({"rtol": 2e-2, "atol": 2e-2} if context == "autocast" else {})
    )


@pytest.mark.parametrize(
    ("knockout", "message"),
    [
        (Knockout(1, 0, heads=2), r"names heads \[2\].*2 heads"),
        (Knockout(1, [0, 1], heads=1), "leaves query 1 of head 1 without a key"),
    ],
)
def test_what_knockout_refuses(is_eager: bool, knockout: Knockout, message: str) -> None:
    net, x = Net(is_eager=is_eager), torch.randn(2, 5, SIZE)
    rnet = recorded(net)
    with pytest.raises(ValueError, match=message) as caught:
        rnet(x, activation_postproc={"h.1.attn": knockout})
    assert "h.1.attn" in "\n".join(caught.value.__notes__)
    rnet(x)
    assert_right(rnet, net, x)


def test_no_other_post_processor_acts_on_the_operation_that_a_knockout_changes(
    is_eager: bool,
) -> None:
    rnet, x = Recorder(Net(is_eager=is_eager), input_size=(2, 5, SIZE)), torch.randn(2, 5, SIZE)
    operation = "h.0.attn/softmax:0" if is_eager else "h.0.attn/scaled_dot_product_attention:0"
    rnet.record("h.*.attn", operation, attention="h.*.attn")
    two = {"h.0.attn": Knockout(-1, 0), operation: lambda value: value * 2}
    with pytest.raises(PostprocessorError, match=r"Knockout.* acts on what .*/s.* receives"):
        rnet(x, activation_postproc=two)


def test_knockout_needs_recorded_attention() -> None:
    rnet = recorded(Net(), "h.*.attn", "h.0", attention="h.1.attn")
    for layer in ("h.0.attn", "h.0"):
        with pytest.raises(ValueError, match=r"is not recorded: write record\(\.\.\., attention"):
            rnet(torch.randn(2, 5, SIZE), activation_postproc={layer: Knockout(-1, 0)})


def test_knockout_while_other_layers_are_changed() -> None:
    net, x = Net().eval(), torch.randn(2, 5, SIZE)
    rnet = recorded(net, "h.*.attn", "h.0.mlp", attention="h.*.attn")
    posts = {"h.0.mlp": torch.zeros_like, "h.1.attn": Knockout(-1, [0, 2])}
    out = rnet(x, activation_postproc=posts)
    hidden = x + net.h[0].attn(x)
    part: Any = nn.Module()
    part.h = [net.h[1]]
    torch.testing.assert_close(out, knocked(part, hidden, (slice(None), -1, [0, 2])))


def test_keys_of_a_knockout_are_counted_without_sinks() -> None:
    """The softmax has two more columns than there are keys, as that of gpt-oss has one."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scores = torch.cat([x @ x.mT, net.sinks.expand(*x.shape[:-1], 2)], -1)
        return scores.softmax(-1)[..., :-2] @ x

    x, sinks = torch.randn(2, 2, 5, 8), torch.tensor([0.3, -0.2])
    rnet = Recorder(nn.Sequential(Composed(forward, sinks=sinks)), input_data=x)
    rnet.record("0", attention=True)
    out = rnet(x, activation_postproc={"0": Knockout(queries=[1], keys=[-1, 2], heads=[1])})
    scores = torch.cat([x @ x.mT, sinks.expand(2, 2, 5, 2)], -1).double().exp()
    scores[:, 1, 1, [4, 2]] = 0
    weights = (scores / scores.sum(-1, keepdim=True))[..., :5]
    torch.testing.assert_close(out, (weights @ x.double()).float())
    torch.testing.assert_close(rnet.attention["0"].weights(), weights.float())
    with pytest.raises(PostprocessorError, match=r"keys \[5\], and the call .* has 5 keys"):
        rnet(x, activation_postproc={"0": Knockout(queries=[1], keys=[5])})


def grouped_net() -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**GROUPED, pad_token_id=0, eos_token_id=49)
    ids = torch.tensor([[0, 0, 3, 44, 9], [8, 8, 41, 2, 33]])
    prompt = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    return transformers.LlamaForCausalLM(config).eval(), prompt


def test_one_query_of_grouped_heads_in_generate() -> None:
    # The kernel receives the heads of a group as queries there.
    net, prompt = grouped_net()
    given: list[Tensor] = []
    knockout = Knockout(-1, 3, heads=[2])
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    logits = []
    for kernel in ("sdpa", "eager"):
        net.set_attn_implementation(kernel)
        rnet = recorder(net, "*.self_attn", input_data=prompt, attention=True)
        with rnet.watch(activation_postproc={"*.self_attn": knockout}) as passes:
            found = net.generate(
                **prompt, **options, return_dict_in_generate=True, output_logits=True
            )
        logits.append(torch.stack(found.logits))
        given.append(next(iter(passes.attention[1].values())).weights())
        assert given[-1].shape == (2, 4, 1, 6)
        assert ((given[-1][:, :, 0, 3] == 0) == torch.tensor([False, False, True, False])).all()
    torch.testing.assert_close(*given)
    torch.testing.assert_close(*logits)


def test_other_methods_of_a_recorder_with_attention() -> None:
    net, x, other = Net().eval(), torch.randn(2, 5, SIZE), torch.randn(2, 5, SIZE)
    rnet, plain = recorded(net), recorded(net, attention=False)
    swept = [one.sweep(x, other, lambda output: output.sum()).values for one in (rnet, plain)]
    assert torch.equal(*swept)
    assert not compare(rnet, recorded(copy.deepcopy(net), attention=False), [x]).first
    with rnet.guard(operations=True):
        rnet(x)
    assert_right(rnet, net, x)
    rnet.record("h.1", inputs=True, attention="h.1.attn")
    rnet(x)
    found = rnet.recompute("h.1.attn")["h.1.attn"]
    torch.testing.assert_close(found, net.h[1].attn(net.h[0](x)))


def test_what_was_lost_once_is_copied_from_then_on() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        received = x * 1
        output = functional.scaled_dot_product_attention(received, received, received)
        if net.overwrites:
            received.zero_()
        return output

    net = Composed(forward, overwrites=False)
    rnet = recorder(net, "", input_size=(1, 2, 3, 4), attention=True)
    with torch.no_grad():
        for _ in range(2):
            rnet(torch.randn(1, 2, 3, 4))
        net.overwrites = True
        rnet(torch.randn(1, 2, 3, 4))
        with pytest.raises(MutationError, match="attention of layer 0-1"):
            _ = rnet.attention[""]
        x = torch.randn(1, 2, 3, 4)
        rnet(x)
    weights = (x.double() @ x.double().mT / 2).softmax(-1)
    assert (rnet.attention[""].weights() - weights).abs().max() < 1e-6


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_mask_whose_writes_are_not_counted_comes_late() -> None:
    x, mask = torch.randn(1, 2, 3, 4), torch.randn(3, 3)
    expected = (x.double() @ x.double().mT / 2 + mask.double()).softmax(-1)
    rnet = Recorder(Masked(), input_data=(x, mask))
    rnet.record("", attention=True)
    with torch.inference_mode():
        uncounted = mask + 0
    with torch.no_grad():
        for given in (mask, mask, uncounted):
            rnet(x, given)
    with torch.inference_mode():
        uncounted.zero_()
    assert (rnet.attention[""].weights() - expected).abs().max() < 1e-6

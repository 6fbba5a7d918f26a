"""Layers that make an error of their own: faults planted by hand are named, clean ports are not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import ComparisonError, Recorder, compare, open_recording
from scio_recorder.analysis.comparing.difference import Difference
from tests.analysis.comparing.local_nets import (
    IDS,
    IMAGES,
    Attention,
    Experts,
    FlashAttention,
    FusedAttention,
    FusedExperts,
    Transformer,
    convolutional,
    fused,
    transformer,
    with_attention,
)

HALF = (torch.bfloat16, torch.float16)


def cast_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda x: x.to(dtype) if x.is_floating_point() else x


def judged(
    reference: nn.Module, candidate: nn.Module, *batches: Tensor, **options: Any
) -> Difference:
    """Compare two nets locally, the candidate in the dtype of its weights."""
    dtype = next(x.dtype for x in candidate.parameters() if x.is_floating_point())
    inputs = [cast_to(torch.float32), cast_to(dtype)]
    both = [
        Recorder(net, input_data=cast(batches[0]))
        for net, cast in zip((reference, candidate), inputs, strict=True)
    ]
    return compare(*both, batches, local=True, to_inputs=inputs, **options)


def names(difference: Difference) -> list[str]:
    return [fault.layer.name for fault in difference.faults]


# -- figures by hand -------------------------------------------------------------------------------


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).norm() / reference.norm())


def test_the_figures_of_a_linear_layer_are_those_computed_by_hand() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    port = copy.deepcopy(net).bfloat16()
    with torch.no_grad():
        port[1].weight[2] *= 1.5
        x = torch.randn(9, 6)
        middle = net[0](x)
        returned = net[1](middle).double()
        error = relative(port[1](middle.bfloat16()), returned)
        rounding = relative(copy.deepcopy(net[1]).bfloat16()(middle.bfloat16()), returned)
        weights = [copy.deepcopy(each).bfloat16().double() for each in (net[1], port[1])]
        exact = [linear(middle.double()) for linear in weights]
    fault = judged(net, port, x).faults[0]
    assert fault.layer.name == "1"
    assert fault.error == pytest.approx(error, rel=1e-6)
    assert fault.rounding == pytest.approx(rounding, rel=1e-6)
    assert fault.excess == pytest.approx(relative(exact[1], exact[0]), rel=1e-4)
    assert fault.score > 10


def test_figures_are_those_of_all_batches_together() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4))
    port = copy.deepcopy(net)
    port[0].bias.data += 0.1
    batches = torch.randn(3, 6), torch.randn(5, 6)
    with torch.no_grad():
        expected = relative(port(torch.cat(batches)), net(torch.cat(batches)).double())
    difference = judged(net, port, *batches)
    assert difference.faults[0].error == pytest.approx(expected, rel=1e-5)
    assert judged(net, port, *batches, max_batches=1).faults[0].error != difference.faults[0].error


# -- clean ports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Attention, FlashAttention])
def test_a_clean_transformer_has_no_fault(kind: type[Attention], dtype: torch.dtype) -> None:
    net = transformer()
    difference = judged(net, with_attention(net, kind).to(dtype), IDS)
    assert difference.faults == ()
    assert not difference.unjudged
    assert len(difference.local) == 25
    if dtype is not torch.float32:
        assert difference.first is not None
        assert difference.local["head"].error > 1e-4


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("is_training", [False, True])
def test_a_clean_convolutional_net_has_no_fault(dtype: torch.dtype, is_training: bool) -> None:
    net = convolutional().train(is_training)
    difference = judged(net, copy.deepcopy(net).to(dtype), IMAGES, IMAGES.flip(0))
    assert difference.faults == ()
    assert not difference.unjudged


def test_a_reference_in_a_lower_precision_than_the_candidate() -> None:
    for net in (transformer(), convolutional()):
        x = IDS if isinstance(net, Transformer) else IMAGES
        reference, port = copy.deepcopy(net).bfloat16(), copy.deepcopy(net)
        inputs = [cast_to(torch.bfloat16), cast_to(torch.float32)]
        pairs = zip((reference, port), inputs, strict=True)
        both = [Recorder(each, input_data=cast(x)) for each, cast in pairs]
        assert compare(*both, [x], local=True, to_inputs=inputs).faults == ()
        next(iter(port.children())).weight.data *= 1.05
        assert len(compare(*both, [x], local=True, to_inputs=inputs).faults) == 1


def test_two_half_precisions_that_compute_in_other_ways() -> None:
    net = transformer().bfloat16()
    assert judged(net, with_attention(net, FlashAttention), IDS).faults == ()


# -- planted faults --------------------------------------------------------------------------------


def scaled(net: Any) -> str:
    net.blocks[1].up.weight.data *= 1.01
    return "blocks.1.up"


def without_bias(net: Any) -> str:
    net.blocks[0].down.bias.data.zero_()
    return "blocks.0.down"


def transposed(net: Any) -> str:
    projection = net.blocks[0].attention.o_proj
    projection.weight.data = projection.weight.data.t().clone()
    return "blocks.0.attention.o_proj"


def other_activation(net: Any) -> str:
    net.blocks[1].act = nn.GELU("tanh")
    return "blocks.1.act"


def other_epsilon(net: Any) -> str:
    net.blocks[0].norm.eps = 1e-3
    return "blocks.0.norm"


def other_scale(net: Any) -> str:
    net.blocks[1].attention.scaling *= 1.1
    return "blocks.1.attention"


def dropout_left_on(net: Any) -> str:
    net.blocks[0].drop.train()
    return "blocks.0.drop"


class WithoutResidual(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        net: Any = self
        x = net.attention(net.norm(x), mask=mask)
        return x + net.drop(net.down(net.act(net.up(x))))


def without_residual(net: Any) -> str:
    net.blocks[1].__class__ = type("Block", (WithoutResidual,), {})
    return "blocks.1"


def added_outside(net: Any) -> str:
    """The root hands on another hidden state than the reference does."""

    class Shifted(type(net)):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> dict[str, Any]:
            x = self.embed(ids) * 1.02
            for block in self.blocks:
                x = block(x)
            return {"logits": self.head(x), "hidden": (x, None)}

    net.__class__ = Shifted
    return ""


PLANTED = (
    scaled,
    without_bias,
    transposed,
    other_activation,
    other_epsilon,
    other_scale,
    dropout_left_on,
    without_residual,
    added_outside,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("plant", PLANTED)
def test_a_fault_in_a_transformer_is_named(plant: Callable[[Any], str], dtype: torch.dtype) -> None:
    net = transformer()
    port = with_attention(net, FlashAttention)
    name = plant(port)
    assert names(judged(net, port.to(dtype), IDS)) == [name]


def test_nested_faults_are_both_named() -> None:
    net = transformer()
    port = copy.deepcopy(net)
    wanted = {other_scale(port), other_activation(port)}
    without_residual(port)
    assert set(names(judged(net, port.bfloat16(), IDS))) == {*wanted, "blocks.1"}


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_faults_of_a_convolutional_net(dtype: torch.dtype) -> None:
    net = convolutional()
    for change, name in [
        (lambda port: port.norm.running_var.mul_(1.1), "norm"),
        (lambda port: port.stem.weight.data[2].mul_(0.5), "stem"),
        (lambda port: setattr(port.mix, "padding_mode", "circular"), "mix"),
        (lambda port: port.drop.train(), "drop"),
    ]:
        port = copy.deepcopy(net)
        change(port)
        found = names(judged(net, port.to(dtype), IMAGES))
        assert set(found) == {name}, name


def test_an_overflow_is_the_surest_fault() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
    net[0].weight.data *= 1e5
    net[1].weight.data *= 1e-4
    difference = judged(net, copy.deepcopy(net).half(), torch.randn(5, 4))
    # Those that are handed the numbers which float16 can't hold are not to blame.
    assert names(difference) == ["0"]
    assert difference.faults[0].score == torch.inf


@pytest.mark.parametrize("offset", [1, 2])
def test_a_wrong_mask_is_the_fault_of_who_makes_it(offset: int) -> None:
    net = transformer()
    port = copy.deepcopy(net)
    port.makes_mask, port.offset = True, offset
    assert names(judged(net, port.bfloat16(), IDS)) == ([""] if offset == 2 else [])


def test_padding_is_not_judged() -> None:
    class Masked(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.linear, self.by = nn.Linear(4, 4), by

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            made = self.linear(x)
            return torch.where(attention_mask[..., None] == 0, made * self.by, made)

    net, port = Masked(1.0), Masked(2.0)
    port.load_state_dict(net.state_dict())
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    batch = {"x": torch.randn(2, 3, 4), "attention_mask": mask}
    both = [Recorder(each, input_data=batch) for each in (net, port)]
    assert compare(*both, [batch], local=True).faults == ()
    other = copy.deepcopy(port)
    other.linear.bias.data[1] += 0.1
    both[1] = Recorder(other, input_data=batch)
    assert names(compare(*both, [batch], local=True)) == ["linear"]


def test_a_fault_outside_of_the_recorded_layers_is_one_of_the_root() -> None:
    net = transformer()
    both = [Recorder(each, input_data=IDS) for each in (net, copy.deepcopy(net))]
    both[0].record("blocks.1.*", "head")
    assert compare(*both, [IDS], local=True).faults == ()
    other_scale(both[1].net)
    assert names(compare(*both, [IDS], local=True)) == ["blocks.1.attention"]
    both[1].net.blocks[1].attention.scaling = net.blocks[1].attention.scaling
    both[1].net.blocks[0].attention.scaling *= 1.1
    assert names(compare(*both, [IDS], local=True)) == [""]


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        (other_scale, "scores = query @ key.mT * self.scaling"),
        (without_residual, "x = x + self.attention(self.norm(x), mask=mask)"),
        (other_epsilon, ""),
    ],
)
def test_the_line_of_a_fault(plant: Callable[[Any], str], line: str) -> None:
    net = transformer()
    port = copy.deepcopy(net)
    name = plant(port)
    fault = judged(net, port.bfloat16(), IDS, operations=True).faults[0]
    assert fault.layer.name == name
    operation = fault.operation
    assert operation is not None
    assert operation.layer is fault.layer
    assert operation.source == line or (not line and operation.function == "layer_norm")


def test_masks_that_are_written_in_other_ways_are_equal() -> None:
    net = transformer()
    port = copy.deepcopy(net)
    net.makes_mask = port.makes_mask = True
    net.least = -torch.inf
    assert judged(net, port.bfloat16(), IDS).faults == ()
    port.offset = 2
    assert names(judged(net, port, IDS)) == [""]


class RewrittenAttention(FusedAttention):
    """The same in other steps, none of which stands beside one of the original's."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1)
        query, key, value = made.permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * self.scaling
        later = torch.ones(x.shape[1], x.shape[1]).tril() == 0
        weights = torch.exp(scores.masked_fill(later, -torch.inf))
        weights = weights / weights.sum(-1, keepdim=True)
        mixed: Tensor = torch.einsum("bhqk,bhkd->bqhd", weights, value).reshape(x.shape)
        result: Tensor = self.o_proj(mixed)
        return result


def test_the_line_of_a_fault_in_a_port_that_was_written_in_other_steps() -> None:
    """By shapes alone, the original's query would pair with the port's output projection."""
    net = transformer()
    port = fused(net)
    for block in port.blocks:
        block.attention.__class__ = RewrittenAttention
    assert judged(net, copy.deepcopy(port).bfloat16(), IDS).faults == ()
    port.blocks[1].attention.scaling *= 1.3
    fault = judged(net, port.bfloat16(), IDS, operations=True).faults[0]
    assert fault.layer.name == "blocks.1.attention"
    assert fault.operation is not None
    assert fault.operation.name == "blocks.1.attention/mul:0"
    assert fault.operation.source == "scores = query @ key.mT * self.scaling"


# -- structures ------------------------------------------------------------------------------------


def test_a_fused_projection_belongs_to_the_layer_around_it() -> None:
    net = transformer()
    port = fused(net)
    difference = judged(net, port.bfloat16(), IDS)
    assert difference.faults == ()
    assert "blocks.0.attention.q_proj" in [
        difference.architecture[label].name for label in difference.unjudged
    ]
    port.blocks[1].attention.qkv.weight.data[16:32] *= 1.1
    assert names(judged(net, port, IDS)) == ["blocks.1.attention"]


def test_fused_weights_are_those_of_the_reference_before_these_were_rounded() -> None:
    net = transformer()
    port = fused(net)
    reference = copy.deepcopy(net).bfloat16()
    assert judged(reference, port, IDS).faults == ()
    port.blocks[1].attention.qkv.weight.data[16:32] *= 1.1
    assert names(judged(reference, port, IDS)) == ["blocks.1.attention"]
    # Loaded from the rounded ones, they explain nothing.
    ports = [fused(net), fused(copy.deepcopy(reference).float())]
    for port in ports:
        port.blocks[1].attention.scaling *= 1.002
    found = [names(judged(reference, port, IDS)) for port in ports]
    assert found == [[], ["blocks.1.attention"]]


class Turned(nn.Module):
    """Makes an angle once for all blocks, in float32 or in the dtype of what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning() for _ in range(2))
        self.is_wide, self.base = True, 3.0

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1]) / self.base
        angle = angle.cos() if self.is_wide else angle.cos().to(x.dtype)
        for block in self.blocks:
            x = block(x, angle)
        return x


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(8, 8), Multiply()])

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        turned: Tensor = self.own[1](self.own[0](x), angle)
        return turned


class Multiply(nn.Module):
    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        return x + (x * angle[:, None]).to(x.dtype)


def test_who_hands_on_what_another_layer_has_rounded_is_no_fault() -> None:
    """The blocks receive in bfloat16 what the reference keeps in float32 in any dtype."""
    torch.manual_seed(0)
    net = Turned()
    port = copy.deepcopy(net).bfloat16()
    port.is_wide = False
    x = torch.randn(2, 6, 8)
    assert judged(net, port, x).faults == ()
    port.base = 3.5
    assert names(judged(net, port, x)) == [""]


class Normed(FlashAttention):
    """Norms queries and keys after their projections, before or behind the turn of axes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.is_early = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)]), True
        self.renamed: nn.ModuleList | None = None

    def parts(self, x: Tensor) -> list[Tensor]:
        query, key = (
            norm(project(x).unflatten(-1, (2, -1))).transpose(1, 2)
            if self.is_early
            else norm(self.split(project(x)))
            for norm, project in zip(
                self.norms, self.renamed or (self.q_proj, self.k_proj), strict=True
            )
        )
        return [query, key, self.split(self.v_proj(x))]


def test_layers_of_other_shapes_belong_to_the_code_around_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Normed(), nn.Linear(16, 16)).eval()
    port = copy.deepcopy(net).bfloat16()
    port[0].is_early, port[0].renamed = False, nn.ModuleList([port[0].q_proj, port[0].k_proj])
    del port[0].q_proj, port[0].k_proj
    x = torch.randn(2, 6, 16)
    difference = judged(net, port, x, x + 1)
    assert difference.faults == ()
    assert (
        "it returns (2, 6, 2, 8) in the reference and (2, 2, 6, 8)"
        in difference.unjudged["0.norms.0"]
    )
    port[0].scaling *= 1.5
    fault = judged(net, port, x, operations=True).faults[0]
    assert fault.operation is not None
    assert fault.operation.name == "0/scaled_dot_product_attention:0"
    port[0].scaling = net[0].scaling
    port[0].norms[1].weight.data[2] *= 1.5
    assert names(judged(net, port, x)) == ["0"]


class Body(nn.Module):
    """Hands a shifted input to a layer, and returns what the head makes of it, or leaves that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift, self.has_head = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x + self.shift)
        return self.head(x) if self.has_head else x


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return x if self.body.has_head else self.body.head(x)


def test_a_layer_that_returns_something_else_still_makes_what_it_hands_on() -> None:
    torch.manual_seed(0)
    net = WithHead()
    port = copy.deepcopy(net).bfloat16()
    port.body.has_head = True
    x = torch.randn(4, 8)
    assert judged(net, port, x).faults == ()
    port.body.shift = 1.5
    assert names(judged(net, port, x)) == ["body"]


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.7).sigmoid() * x


def test_code_with_one_operation_has_no_other_line() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    port = nn.Sequential(copy.deepcopy(net[0]), ByHand())
    fault = judged(net, port, torch.randn(8, 6), operations=True).faults[0]
    assert fault.operation is not None
    assert fault.operation.name == "1/gelu:0"


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() + self.weight).cos() * 2


class Rolled(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() + self.weight.roll(1)).cos() * 2


class Clamped(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=0.5)


class Normalised(Positions):
    def forward(self, x: Tensor) -> Tensor:
        weights = super().forward(x)
        weights /= weights.norm(dim=-1, keepdim=True)
        return weights


@pytest.mark.parametrize(
    ("own", "other", "function"),
    [(Positions, Rolled, "add"), (Positions, Clamped, "mul"), (Normalised, Positions, "norm")],
)
def test_the_line_where_one_code_does_more(own: type, other: type, function: str) -> None:
    net = nn.Sequential(nn.Linear(6, 6), own())
    port = copy.deepcopy(net)
    port[1].__class__ = other
    [fault] = judged(net, port, torch.randn(8, 6), operations=True).faults
    assert fault.operation is not None
    assert (fault.layer.name, fault.operation.function) == ("1", function)


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.1


def test_why_a_fault_has_no_operation_is_said() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6)))
    port = copy.deepcopy(net)
    port[1] = Scaled(*port[1])
    fault = judged(net, port, torch.randn(8, 6), operations=True).faults[0]
    assert (fault.layer.name, fault.operation) == ("1", None)
    assert "in the candidate, the operation mul:0" in fault.why_no_operation
    assert fault.why_no_operation in str(fault)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    port = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    faults = judged(net, port, torch.randn(8, 4), operations=True).faults
    assert [fault.operation is None for fault in faults] == [False] * 8 + [True]
    assert "8 surest" in faults[8].why_no_operation


class InOrder(nn.Module):
    """Lets a module see its rows as they come, or sorted, as experts get their tokens."""

    def __init__(self, *, sorts: bool) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        self.sorts = sorts

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        order = x[:, 0].argsort() if self.sorts else torch.arange(len(x))
        hidden = self.act(hidden[order])[order.argsort()]
        return self.last(hidden)


class Flipped(InOrder):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x).flip(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_another_order_are_no_fault(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, port = nn.Sequential(InOrder(sorts=False)), nn.Sequential(InOrder(sorts=True))
    port.load_state_dict(net.state_dict())
    difference = judged(net, port.to(dtype), torch.randn(64, 6))
    assert difference.faults == ()
    assert "another order" in difference.unjudged["0.act"]
    port[0].act = nn.ReLU()
    assert names(judged(net, port, torch.randn(64, 6))) == ["0"]


def test_rows_that_come_back_in_another_order_are_a_fault() -> None:
    torch.manual_seed(0)
    net, port = nn.Sequential(InOrder(sorts=False)), nn.Sequential(InOrder(sorts=False))
    port.load_state_dict(net.state_dict())
    port[0].__class__ = Flipped
    assert names(judged(net, port, torch.randn(64, 6)))[0] == "0"


def test_each_call_of_a_module_has_figures_of_its_own() -> None:
    class Twice(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.linear, self.by = nn.Linear(4, 4), by

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(self.linear(x) * self.by)
            return result

    net, port = Twice(1.0), Twice(1.05)
    port.load_state_dict(net.state_dict())
    difference = judged(net, port.bfloat16(), torch.randn(6, 4))
    # The factor is code of the root, which hands the product to the second call.
    assert names(difference) == [""]
    assert len(difference.local) == 3
    assert not difference.unjudged


def test_names_and_classes_that_differ() -> None:
    class Other(nn.Module):
        def __init__(self, net: nn.Sequential) -> None:
            super().__init__()
            self.first, self.second = copy.deepcopy(net[0]), copy.deepcopy(net[2])

        def forward(self, inputs: Tensor) -> tuple[Tensor]:
            return (self.second(self.first(inputs).relu()),)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    match = {"0": "first", "2": "second"}
    assert judged(net, Other(net).bfloat16(), torch.randn(7, 4), match=match).faults == ()
    port = Other(net)
    port.second.weight.data[1] += 0.05
    assert names(judged(net, port, torch.randn(7, 4), match=match)) == ["2"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize")
def test_quantised_layers_are_compared_with_their_kind() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), nn.LayerNorm(16)).eval()

    def quantised(net: nn.Module) -> nn.Module:
        made: nn.Module = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8)
        return made

    x = torch.randn(20, 16)
    recorders = [Recorder(each, input_data=x) for each in (net, quantised(net))]
    difference = compare(*recorders, [x], local=True)
    assert difference.faults == ()
    assert difference.local["2"].error > 1e-3
    port = copy.deepcopy(net)
    port[3].weight.data[4] *= 2
    recorders[1] = Recorder(quantised(port), input_data=x)
    assert names(compare(*recorders, [x], local=True)) == ["3"]


class RefusesDouble(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise TypeError("no kernel for float64")
        return super().forward(x)


def test_what_cannot_be_computed_exactly_is_judged_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(4, 4), RefusesDouble(4, 4), nn.Linear(4, 4))
    port = copy.deepcopy(net)
    difference = judged(net, port, torch.randn(5, 4))
    assert difference.faults == ()
    assert "Not computed exactly" in str(difference)
    assert difference.local["1"].excess != difference.local["1"].excess
    port[1].weight.data[0] += 0.1
    assert names(judged(net, port, torch.randn(5, 4))) == ["1"]


@pytest.mark.parametrize("is_reference", [False, True])
def test_fused_experts_against_modules(is_reference: bool) -> None:
    torch.manual_seed(0)
    apart = Experts()
    both: list[Any] = [FusedExperts(apart), apart] if is_reference else [apart, FusedExperts(apart)]
    x = torch.randn(40, 8)
    port = copy.deepcopy(both[1])
    assert judged(both[0], port.bfloat16(), x).faults == ()
    both[1].gate.weight.data *= 1.05
    assert names(judged(both[0], both[1].bfloat16(), x)) == ["gate"]
    with torch.no_grad():
        for name, parameter in port.named_parameters():
            if "down" in name:
                parameter *= 1.2
    assert names(judged(both[0], port, x)) == [""]


class Autocast(nn.Module):
    def __init__(self, net: nn.Module, *, casts: bool) -> None:
        super().__init__()
        self.net, self.casts = net, casts

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return self.net(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_inside_a_net_is_no_fault(dtype: torch.dtype) -> None:
    net, port = Autocast(transformer(), casts=False), Autocast(transformer(), casts=True)
    port = port.to(dtype)
    assert judged(net, port, IDS).faults == ()
    name = scaled(port.net)
    assert names(judged(net, port, IDS)) == [f"net.{name}"]


def test_what_a_module_writes_to_its_input_is_seen_around_it() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2).mean()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.doubles = nn.Linear(4, 4), Doubles()

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            self.doubles(x)
            return x

    torch.manual_seed(0)
    net = Around()
    difference = judged(net, copy.deepcopy(net).bfloat16(), torch.randn(5, 4))
    assert difference.faults == ()
    assert difference.local[0, 1].error < 0.01


def test_other_draws_of_random_numbers_are_no_fault_of_later_layers() -> None:
    class Draws(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0 * torch.rand(3).sum()

    net = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Dropout(0.5)).train()
    port = copy.deepcopy(net)
    port[1] = Draws()
    assert judged(net, port.bfloat16(), torch.randn(20, 8)).faults == ()


def test_inference_mode_inside_a_net() -> None:
    class Inference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convolutional()

        def forward(self, x: Tensor) -> Any:
            with torch.inference_mode():
                return self.net(x)

    port = Inference()
    assert judged(Inference(), copy.deepcopy(port).bfloat16(), IMAGES).faults == ()
    port.net.norm.running_mean += 0.2
    assert names(judged(Inference(), port.bfloat16(), IMAGES)) == ["net.norm"]


class Locked(nn.Sequential):
    """Can't be copied."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.lock = threading.Lock()


@pytest.mark.parametrize("is_alone", [False, True])
def test_nets_that_cannot_be_copied_are_judged_as_they_are(is_alone: bool) -> None:
    torch.manual_seed(0)
    port = Locked()
    net: nn.Module = nn.Sequential(*copy.deepcopy([*port])) if is_alone else Locked()
    net.load_state_dict(port.state_dict())
    x = torch.randn(30, 8)
    difference = judged(net, port.bfloat16(), x)
    assert difference.faults == ()
    assert "Note that the candidate can't be copied." in str(difference)
    port[2].weight.data *= 1.2
    assert names(judged(net, port, x)) == ["2"]


def test_memory_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*arguments: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("scio_recorder.analysis.comparing.local.convert", lacks)
    net = nn.Sequential(nn.Linear(1024, 256))
    with pytest.raises(ComparisonError, match=r"reference: .* 0\.00 GiB in bfloat16"):
        judged(net, copy.deepcopy(net).bfloat16(), torch.randn(2, 1024))


def test_nothing_that_pairs_is_an_error() -> None:
    class Words(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "many" if len(x) else "none"

    with pytest.raises(ComparisonError, match="no layer can be judged"):
        compare(
            *(Recorder(Words(), input_size=(3, 2)) for _ in range(2)),
            [torch.randn(3, 2)],
            local=True,
        )


# -- recordings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_recording_with_inputs_can_be_the_reference(
    store: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    net = transformer().to(dtype)
    recorder = Recorder(net, input_data=IDS)
    recorder.record("blocks.*", "head", inputs=True)
    batches = [IDS, IDS.flip(0)]
    recording = recorder.collect(batches, store=store if store == "host" else f"disk:{tmp_path}/r")
    if store == "disk":
        recording = open_recording(f"{tmp_path}/r")
    port = with_attention(transformer(), FlashAttention).bfloat16()
    candidate = Recorder(port, input_data=IDS)
    assert compare(recording, candidate, batches, local=True).faults == ()
    name = other_scale(port)
    assert names(compare(recording, candidate, batches, local=True)) == [name]


def test_a_recording_without_inputs_is_refused() -> None:
    recorder = Recorder(nn.Sequential(nn.Linear(4, 2)), input_size=(1, 4))
    recorder.record("*")
    batches = [torch.randn(3, 4)]
    recording = recorder.collect(batches)
    with pytest.raises(ComparisonError, match="inputs=True"):
        compare(recording, recorder, batches, local=True)
    with pytest.raises(ComparisonError, match="give its network"):
        compare(recorder, recording, batches, local=True)


# -- without a trace -------------------------------------------------------------------------------


class Counts(nn.Module):
    """Keeps state, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.fails = nn.BatchNorm1d(4), 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails:
            raise OSError("the disk is full")
        result: Tensor = self.norm(x)
        return result


class Seen:
    """Counts what a user's hook sees; no walk puts back what a class has."""

    calls = 0

    @classmethod
    def note(cls, *call: Any) -> None:
        cls.calls += 1


@pytest.mark.parametrize("fails", [False, True])
def test_both_nets_are_left_as_they_were(fails: bool) -> None:
    nets = [nn.Sequential(nn.Linear(4, 4), Counts()).train() for _ in range(2)]
    recorders = [Recorder(net, input_size=(3, 4)) for net in nets]
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    batches: Sequence[Any] = [torch.randn(3, 4), torch.randn(3, 5 if fails else 4)]
    nets[1][0].register_forward_hook(Seen.note)
    Seen.calls, random = 0, torch.get_rng_state()
    if fails:
        with pytest.raises(Exception, match="batch 1"):
            compare(*recorders, batches, local=True)
    else:
        assert names(compare(*recorders, batches, local=True)) == ["0"]
        # The comparison runs the network, and so does one forced pass; the others run copies.
        assert Seen.calls == 4
    assert torch.equal(torch.get_rng_state(), random)
    for net, state in zip(nets, before, strict=True):
        assert net[1].calls == 0
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
        assert all(module._compiled_call_impl is None for module in net.modules())
        assert sum(len(module._forward_hooks) for module in net.modules()) == (net is nets[1])


def test_all_other_figures_are_those_without_local_errors() -> None:
    class Counting(nn.Linear):
        calls = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    torch.manual_seed(0)
    net = nn.Sequential(Counting(4, 4), nn.Linear(4, 2))
    port = copy.deepcopy(net).bfloat16()
    batches = torch.randn(3, 5, 4).unbind()
    plain, local = (
        compare(
            Recorder(net, input_data=batches[0]),
            Recorder(port, input_data=batches[0].bfloat16()),
            batches,
            to_inputs=(cast_to(torch.float32), cast_to(torch.bfloat16)),
            local=is_local,
        )
        for is_local in (False, True)
    )
    assert [*plain.values()] == [*local.values()]
    assert str(plain.first) == str(local.first)
    assert local.faults == ()


# -- shown -----------------------------------------------------------------------------------------


def test_faults_are_printed_tabulated_drawn_and_put_on_a_page(tmp_path: Any) -> None:
    net = transformer()
    port = fused(net)
    name = other_activation(port)
    difference = judged(net, port.bfloat16(), IDS)
    fault = difference.faults[0]
    text = str(difference)
    assert text.startswith(f"Fault: {fault.layer.label} ({name}): local error {fault.error:.3g}")
    judged_of = f"Judged: {len(difference.local)} of {len(difference.local) + 6} layers."
    assert judged_of in text
    assert "it has no partner: the layer around it was judged with it" in text
    # Its label and name, without the network's own text.
    assert str(fault).startswith(f"{fault.layer.label} ({name}): local error")
    assert f"layer=<Layer {fault.layer}>" in repr(fault)
    assert "why_no_operation=''" in repr(fault)
    frame = difference.to_frame()
    assert frame.index[frame["is_fault"]].tolist() == [str(fault.layer.label)]
    assert frame.loc[str(fault.layer.label), "local_error"] == fault.error
    axis = difference.plot().axes[0]
    assert axis.get_ylabel() == "local error"
    assert len(axis.lines) > 3
    equal = judged(net, net, IDS)
    (line,) = [line for line in equal.plot().axes[0].lines if line.get_label() == "rounding"]
    # The errors, all of which are 0, don't bound them.
    drawn = [*zip(equal.local.values(), line.get_ydata(), strict=True)]
    assert all(y == x.rounding for x, y in drawn if x.rounding > 0)
    assert any(x.rounding > 0 for x, _ in drawn)
    assert difference.plot("max_abs").axes[0].get_ylabel() == "max abs"
    page = difference.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Local error" in page
    assert text.partition(":")[0] in page


def test_without_local_errors_there_are_none_to_read() -> None:
    recorder = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 2))
    difference = compare(recorder, recorder, [torch.ones(3, 2)])
    with pytest.raises(ComparisonError, match="local=True"):
        assert difference.faults
    assert "local_error" not in difference.to_frame()

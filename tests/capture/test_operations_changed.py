"""Post-processors on operations, against code written by hand."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from scio_recorder import LayerNotFoundError, PostprocessorError, Recorder
from scio_recorder.postprocessors import At, Heads, OnInput
from tests.oracle import same_bits

# Functions of a hidden tensor [3, 4]; their names follow.
PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda h: h + 1,
    "rsub": lambda h: 1 - h,
    "getitem": lambda h: h[:, 1:],
    "T": lambda h: h.T,
    "softmax": lambda h: nn.functional.softmax(h, dim=-1),
    "split": lambda h: h.split(2, -1),
    "chunk": lambda h: torch.chunk(h, 2, dim=-1),
    "max": lambda h: h.max(dim=-1, keepdim=True),
    "contiguous": lambda h: h.contiguous(),
    "dropout": lambda h: nn.functional.dropout(h, 0.5, training=False),
    "view": lambda h: h.view(3, 2, 2),
    "exp": lambda h: torch.ops.aten.exp.default(h),
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda h: h.add_(1),
    "mul_": lambda h: h.__imul__(3),
    "mul": lambda h: torch.mul(h.detach(), 2, out=h),
    "relu": lambda h: nn.functional.relu(h, inplace=True),
    "relu_": lambda h: h.relu_(),
    "sigmoid_": torch.sigmoid_,
}
SAVES_ITS_RESULT = {"relu", "relu_", "sigmoid_"}


class Twice(nn.Module):
    """Goes on with what a function returned, and with what it was given."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return total(self.function(hidden)) + hidden.square().sum(-1)

    def by_hand(
        self,
        x: Tensor,
        after: Callable[[Tensor], Tensor] | None = None,
        before: Callable[[Tensor], Tensor] | None = None,
        *,
        in_place: bool = False,
    ) -> Tensor:
        hidden = self.first(x)
        received = hidden if before is None else before(hidden)
        result = self.function(received)
        if after is not None:
            copy = map_parts(torch.clone, result)
            result = map_parts(after, copy)
        if in_place:
            hidden.copy_(result)
            result = hidden
        return total(result) + hidden.square().sum(-1)


def map_parts(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return tuple(function(part) for part in value)


def total(value: Any) -> Tensor:
    parts = [value] if isinstance(value, Tensor) else value
    return torch.stack([part.double().sin().sum() for part in parts if part.dim() > 1]).sum()


def double(value: Tensor) -> Tensor:
    return value * 2


def double_in_place(value: Tensor) -> None:
    value.mul_(2)


def doubled(value: Any) -> Any:
    return map_parts(double, value)


def fresh(function: Callable[[Tensor], Any]) -> Twice:
    torch.manual_seed(3)
    return Twice(function).eval()


def recorder(function: Callable[[Tensor], Any], name: str) -> Recorder:
    rnet = Recorder(fresh(function), input_size=(3, 4), verbose=0)
    rnet.record(f"/{name}:0", "first")
    return rnet


def gradients(net: nn.Module, output: Tensor) -> list[Tensor]:
    if not output.requires_grad:
        return []
    output.sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def assert_same(rnet: Recorder, mine: Tensor, net: nn.Module, theirs: Tensor) -> None:
    assert same_bits(mine, theirs)
    for one, two in zip(gradients(rnet.net, mine), gradients(net, theirs), strict=True):
        assert same_bits(one, two)


@contextlib.contextmanager
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


CONTEXTS = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": inference}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", PLAIN)
def test_what_an_operation_returned_is_changed(name: str, context: str) -> None:
    x = torch.randn(3, 4)
    post = {f"/{name}": doubled} if name in ("split", "chunk") else {f"/{name}": double}
    if name == "max":
        post = {f"/{name}": lambda pair: torch.return_types.max((pair[0] * 2, pair[1] * 2))}
    rnet, net = recorder(PLAIN[name], name), fresh(PLAIN[name])
    with CONTEXTS[context]():
        for _ in range(2):
            rnet.net.zero_grad()
            net.zero_grad()
            mine = rnet(x, activation_postproc=post)
            with torch.no_grad():
                expected = net.function(net.first(x))
            record = rnet.activations[f"/{name}"]
            parts = [record] if isinstance(record, Tensor) else list(record)
            truths = [expected] if isinstance(expected, Tensor) else list(expected)
            assert all(map(same_bits, parts, truths))
            assert_same(rnet, mine, net, net.by_hand(x, double))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_an_operation_wrote_is_changed_where_it_wrote(name: str, context: str) -> None:
    x = torch.randn(3, 4)
    rnet, net = recorder(IN_PLACE[name], name), fresh(IN_PLACE[name])
    with CONTEXTS[context]():
        is_refused = context == "grad" and name in SAVES_ITS_RESULT
        if context == "grad" and name == "mul":
            # torch takes no out= that requires gradients.
            return
        if is_refused:
            with pytest.raises(PostprocessorError, match="allow_mutation_on_saved_tensors"):
                rnet(x, activation_postproc={f"/{name}": double})
            assert f"/{name}" not in rnet.activations
        allowing = allow_mutation_on_saved_tensors if is_refused else contextlib.nullcontext
        with allowing():
            mine = rnet(x, activation_postproc={f"/{name}": double})
            assert_same(rnet, mine, net, net.by_hand(x, double, in_place=True))
        with torch.no_grad():
            truth = net.function(net.first(x))
        assert same_bits(rnet.activations[f"/{name}"], truth)


@pytest.mark.parametrize("context", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("name", [*PLAIN, "add_", "mul_", "relu_"])
def test_what_an_operation_receives_is_changed(name: str, context: str) -> None:
    function = {**PLAIN, **IN_PLACE}[name]
    x = torch.randn(3, 4)
    rnet, net = recorder(function, name), fresh(function)
    with CONTEXTS[context]():
        mine = rnet(x, activation_postproc={f"/{name}": OnInput(double)})
        theirs = net.by_hand(x, before=double, in_place=name in IN_PLACE)
        assert_same(rnet, mine, net, theirs)


def test_in_place_operation_whose_result_is_not_used_goes_on_changed() -> None:
    def function(h: Tensor) -> Tensor:
        h.add_(1)
        torch.mul(h, 3, out=h)
        return h

    x = torch.randn(3, 4)
    rnet = Recorder(fresh(function), input_size=(3, 4), verbose=0)
    rnet.record("/add_", "/mul")
    hidden = fresh(function).first(x)
    for post, expected in [
        ({"/add_": double}, (hidden + 1) * 2 * 3),
        ({"/add_": OnInput(double)}, (hidden * 2 + 1) * 3),
        ({"/add_": OnInput(double), "/mul": torch.neg}, -((hidden * 2 + 1) * 3)),
    ]:
        with torch.no_grad():
            mine = rnet(x, activation_postproc=post)
        assert same_bits(mine, total(expected) + expected.square().sum(-1))


@pytest.mark.parametrize("context", ["no_grad", "inference"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", lambda h: nn.functional.relu(h, True)),
        ("dropout", lambda h: nn.functional.dropout(h, 0.5, False, inplace=True)),
        ("resize_", lambda h: h.resize_(3, 4)),
    ],
)
def test_an_operation_that_writes_what_was_there_is_changed_where_it_wrote(
    name: str, function: Callable[[Tensor], Tensor], context: str
) -> None:
    def unused(h: Tensor) -> Tensor:
        function(h)
        return h

    x = torch.randn(3, 4)
    rnet = Recorder(Twice(unused).eval(), input_size=(3, 4), verbose=0)
    rnet.record(f"/{name}")
    nn.init.constant_(rnet.net.first.bias, 9)
    with CONTEXTS[context]():
        mine = rnet(x, activation_postproc={f"/{name}": double})
        hidden = rnet.net.first(x) * 2
    assert same_bits(mine, total(hidden) + hidden.square().sum(-1))


def test_an_operation_that_writes_to_several_tensors_is_not_changed() -> None:
    def function(h: Tensor) -> Tensor:
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
        torch.max(h.detach(), -1, out=(values, indices))
        return h * values[:, None]

    rnet, x = recorder(function, "max"), torch.randn(3, 4)
    with pytest.raises(PostprocessorError, match="max writes to several tensors"):
        rnet(x, activation_postproc={"/max": lambda pair: type(pair)((pair[0] * 2, pair[1]))})


def test_post_processors_that_work_in_place_get_a_copy() -> None:
    x = torch.randn(3, 4)
    for name in ("add", "getitem", "contiguous", "view"):
        rnet, net = recorder(PLAIN[name], name), fresh(PLAIN[name])
        with torch.no_grad():
            mine = rnet(x, activation_postproc={f"/{name}": double_in_place})
            assert same_bits(mine, net.by_hand(x, double)), name
            assert same_bits(rnet.activations[f"/{name}"], net.function(net.first(x))), name


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, change: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
        query, key, value = (
            part.view(2, 5, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.out(change(mixed.reshape(2, 5, 8)))  # type: ignore[no-any-return]


def zero_head(value: Tensor) -> Tensor:
    return torch.cat([value[..., :4], torch.zeros(2, 5, 4)], -1)


def zero_last(value: Tensor) -> Tensor:
    return torch.cat([value[:, :-1], torch.zeros(2, 1, 8)], 1)


@pytest.mark.parametrize(
    ("post", "by_hand"),
    [
        (Heads(2, [1], torch.zeros_like), zero_head),
        (At((slice(None), -1), torch.zeros_like), zero_last),
    ],
)
def test_parts_of_what_an_operation_returned(post: Any, by_hand: Any) -> None:
    net, x = Attention().eval(), torch.randn(2, 5, 8)
    rnet = Recorder(net, input_size=(2, 5, 8), verbose=0)
    rnet.record("/reshape", "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = rnet(x, activation_postproc={"/reshape": post})
    theirs = net(x, by_hand)
    assert same_bits(mine, theirs)
    mine_grads = torch.autograd.grad(mine.sum(), list(net.parameters()))
    their_grads = torch.autograd.grad(theirs.sum(), list(net.parameters()))
    assert all(map(same_bits, mine_grads, their_grads))


def test_post_processors_by_list_and_for_all_come_in_order() -> None:
    net, x = fresh(PLAIN["add"]), torch.randn(3, 4)
    rnet = Recorder(net, input_size=(3, 4), verbose=0)
    rnet.record("/add:0", "first", "first/linear")
    assert [str(key) for key in rnet.activations.architecture.in_order(rnet.recording)] == [
        "1-1/linear:0",
        "(1, 1)",
        "0-1/add:0",
    ]
    seen: list[Tensor] = []
    with torch.no_grad():
        rnet(x, activation_postproc=[seen.append, lambda y: y * 3, lambda y: y * 5])
        mine = rnet(x, activation_postproc=[lambda y: y * 2, lambda y: y * 3, lambda y: y * 5])
        hidden = net.first(x) * 2 * 3
        assert same_bits(mine, total((hidden + 1) * 5) + hidden.square().sum(-1))
        mine = rnet(x, activation_postproc=double)
        hidden = net.first(x) * 2 * 2
        assert same_bits(mine, total((hidden + 1) * 2) + hidden.square().sum(-1))
    assert same_bits(seen[0], net.first(x))


def test_an_operation_that_fails_does_not_shift_what_is_changed() -> None:
    class Retrying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                torch.add(x, torch.ones(7))
            first = torch.add(x, 1)
            return torch.add(first, 10)

    x = torch.randn(2, 4)
    rnet = Recorder(Retrying(), input_size=(2, 4), verbose=0)
    rnet.record("/add", inputs=True)
    assert same_bits(rnet(x, activation_postproc={"/add:1": OnInput(double)}), (x + 1) * 2 + 10)
    assert same_bits(rnet(x, activation_postproc={"/add:1": double}), (x + 1 + 10) * 2)
    assert same_bits(rnet.inputs["/add:0"].args[0], x)
    assert same_bits(rnet.inputs["/add:1"].args[0], x + 1)


def test_post_processors_that_are_wrong_are_errors() -> None:
    x = torch.randn(3, 4)
    rnet = recorder(PLAIN["add"], "add")
    for post, message in [
        (lambda y: y[:2], r"0-1/add:0 .* returned the shape \(2, 4\)"),
        (lambda y: 3, r"0-1/add:0 .* returned a int"),
        (lambda y: y.no_such, r"0-1/add:0"),
    ]:
        with pytest.raises(PostprocessorError, match=message):
            rnet(x, activation_postproc={"/add": post})
    with pytest.raises(LayerNotFoundError, match="no operation is '/sin': there are 'add'"):
        rnet(x, activation_postproc={"/sin": double})

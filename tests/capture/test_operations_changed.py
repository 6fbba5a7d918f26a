"""Post-processors on operations, against code written by hand."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scio_recorder import LayerNotFoundError, PostprocessorError, Recorder
from scio_recorder.postprocessors import At, Heads, OnInput
from tests.harness import recorder
from tests.oracle import same_bits
from tests.zoo.base import Net

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
            hidden = result
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


def recorded(function: Callable[[Tensor], Any], name: str) -> Recorder:
    return recorder(fresh(function), f"/{name}:0", "first")


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
    rnet, net = recorded(PLAIN[name], name), fresh(PLAIN[name])
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
    rnet, net = recorded(IN_PLACE[name], name), fresh(IN_PLACE[name])
    with CONTEXTS[context]():
        if context == "grad" and name == "mul":
            # torch takes no out= that requires gradients.
            return
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
    rnet, net = recorded(function, name), fresh(function)
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
    rnet = recorder(fresh(function), "/add_", "/mul")
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
        ("hardtanh_", lambda h: torch._C._nn.hardtanh_(h, -99, 99)),
    ],
)
def test_an_operation_that_writes_what_was_there_is_changed_where_it_wrote(
    name: str, function: Callable[[Tensor], Tensor], context: str
) -> None:
    def unused(h: Tensor) -> Tensor:
        function(h)
        return h

    x = torch.randn(3, 4)
    rnet = recorder(Twice(unused).eval(), f"/{name}")
    nn.init.constant_(rnet.net.first.bias, 9)
    with CONTEXTS[context]():
        mine = rnet(x, activation_postproc={f"/{name}": double})
        hidden = rnet.net.first(x) * 2
    assert same_bits(mine, total(hidden) + hidden.square().sum(-1))


SAVES_ITS_RESULT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": torch.relu,
    "sigmoid_": torch.sigmoid,
    "exp_": torch.exp,
    "tanh_": torch.tanh,
}


def in_place(name: str, *, is_checkpointed: bool) -> Any:
    """Return a net with an in-place operation in a region that may be checkpointed."""

    def forward(net: Any, x: Tensor) -> Any:
        run = partial(checkpoint, net.body, use_reentrant=False) if is_checkpointed else net.body
        return run(x).sin().sum()

    own = Net(lambda _, x: getattr(x, name)())
    return Net(forward, body=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), own)).train()


def negative_square(value: Tensor) -> Tensor:
    return -value * value


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", SAVES_ITS_RESULT)
def test_what_autograd_saves_is_neither_read_nor_changed(
    name: str, is_checkpointed: bool, before: bool
) -> None:
    torch.manual_seed(0)
    net, x = in_place(name, is_checkpointed=is_checkpointed), torch.randn(5, 4)
    twin, bare = copy.deepcopy(net), copy.deepcopy(net)
    rnet = Recorder(net, input_data=x, mode="train")
    rnet.record(f"body.2/{name}")
    post = OnInput(negative_square) if before else negative_square
    mine = rnet(x, activation_postproc={f"body.2/{name}": post})
    hidden = twin.body[1](twin.body[0](x))
    function = SAVES_ITS_RESULT[name]
    changed = function(negative_square(hidden)) if before else negative_square(function(hidden))
    theirs = changed.sin().sum()
    bare(x).backward()
    assert_same(rnet, mine, twin, theirs)
    # As often as without a recorder: once, and again in the backward pass.
    assert net.body[1].num_batches_tracked == bare.body[1].num_batches_tracked
    assert same_bits(net.body[1].running_mean, bare.body[1].running_mean)


@pytest.mark.parametrize("name", SAVES_ITS_RESULT)
def test_the_users_hooks_on_saved_tensors_run_as_without_a_post_processor(name: str) -> None:
    torch.manual_seed(0)
    net, x = in_place(name, is_checkpointed=False), torch.randn(5, 4)
    twin = copy.deepcopy(net)
    rnet = Recorder(net, input_data=x, mode="train")
    rnet.record(f"body.2/{name}")
    kept: list[Tensor] = []
    unpacked: list[int] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    def unpack(place: int) -> Tensor:
        unpacked.append(place)
        return kept[place]

    with saved_tensors_hooks(pack, unpack):
        mine = rnet(x, activation_postproc={f"body.2/{name}": negative_square})
    assert kept
    assert not unpacked
    hidden = SAVES_ITS_RESULT[name](twin.body[1](twin.body[0](x)))
    assert_same(rnet, mine, twin, negative_square(hidden).sin().sum())
    assert len(set(unpacked)) == len(unpacked)


LAYING_OUT: dict[str, Callable[[Tensor], Any]] = {
    "squeeze_": lambda h: h.squeeze_(0),
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "t_": lambda h: h.t_(),
    "transpose_": lambda h: h.transpose_(0, 1),
    "swapaxes_": lambda h: h.swapaxes_(0, 1),
    "swapdims_": lambda h: h.swapdims_(0, 1),
    "resize_": lambda h: h.resize_(2, 6),
    "resize_as_": lambda h: h.resize_as_(torch.ones(2, 6)),
    "as_strided_": lambda h: h.as_strided_((4, 3), (1, 4)),
    "detach_": lambda h: h.detach_(),
    "_foreach_add_": lambda h: torch._foreach_add_([h, h], 1),
    "_foreach_exp_": lambda h: torch._foreach_exp_([h]),
    "_foreach_copy_": lambda h: torch._foreach_copy_([h], [torch.ones(3, 4)]),
}


@pytest.mark.parametrize("kind", [lambda post: post, OnInput])
@pytest.mark.parametrize("name", LAYING_OUT)
def test_operations_that_change_more_than_numbers_are_refused_before_anything_runs(
    name: str, kind: Any
) -> None:
    ran = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(name)
            hidden = x.clone()
            LAYING_OUT[name](hidden)
            return hidden.sum()

    x = torch.randn(3, 4)
    rnet = recorder(Counted(), f"/{name}")
    ran.clear()
    with pytest.raises(PostprocessorError, match=f"can't act on .*{name}.* before or behind"):
        rnet(x, activation_postproc={f"/{name}": kind(lambda value: value)})
    assert not ran
    assert same_bits(rnet(x), rnet.net(x))


@pytest.mark.parametrize("name", ["add_", "mul_", "mul", "relu", "sigmoid_"])
def test_another_shape_can_not_be_written_where_an_operation_wrote(name: str) -> None:
    rnet, x = recorded(IN_PLACE[name], name), torch.randn(3, 4)
    with torch.no_grad(), pytest.raises(PostprocessorError, match=r"of shape \(3, 4\)"):
        rnet(x, activation_postproc={f"/{name}": lambda value: value[:, :1]})


@pytest.mark.parametrize("name", ["max", "sort", "topk"])
def test_what_replaces_several_outputs_is_written_to_all_of_them(name: str) -> None:
    called = {
        "max": lambda h, out: torch.max(h, -1, True, out=out),
        "sort": lambda h, out: torch.sort(h, out=out),
        "topk": lambda h, out: torch.topk(h, k=2, out=out),
    }[name]

    def function(h: Tensor, change: Callable[[Tensor], Any] = lambda pair: pair) -> Tensor:
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
        called(h.detach(), (values, indices))
        changed = change((values, indices))
        return h[:, :1] * changed[0] + changed[1]

    def change(pair: Any) -> Any:
        return pair[0] * 2, pair[1] + 1

    rnet, x = recorded(function, name), torch.randn(3, 4)
    mine = rnet(x, activation_postproc={f"/{name}": lambda pair: type(pair)(change(pair))})
    assert same_bits(mine, fresh(lambda h: function(h, change))(x))
    with pytest.raises(PostprocessorError, match=f"{name} writes to 2 of its arguments"):
        rnet(x, activation_postproc={f"/{name}": lambda pair: type(pair)(pair[:1] * 2)})


def test_post_processors_that_work_in_place_get_a_copy() -> None:
    x = torch.randn(3, 4)
    for name in ("add", "getitem", "contiguous", "view"):
        rnet, net = recorded(PLAIN[name], name), fresh(PLAIN[name])
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
    rnet = recorder(net, "/reshape", "out", input_size=(2, 5, 8))
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
    rnet = recorder(net, "/add:0", "first", "first/linear")
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
    def retry(_: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            torch.add(x, torch.ones(7))
        first = torch.add(x, 1)
        return torch.add(first, 10)

    x = torch.randn(2, 4)
    rnet = recorder(Net(retry), "/add", input_size=(2, 4), inputs=True)
    assert same_bits(rnet(x, activation_postproc={"/add:1": OnInput(double)}), (x + 1) * 2 + 10)
    assert same_bits(rnet(x, activation_postproc={"/add:1": double}), (x + 1 + 10) * 2)
    assert same_bits(rnet.inputs["/add:0"].args[0], x)
    assert same_bits(rnet.inputs["/add:1"].args[0], x + 1)


def test_post_processors_that_are_wrong_are_errors() -> None:
    x = torch.randn(3, 4)
    rnet = recorded(PLAIN["add"], "add")
    for post, message in [
        (lambda y: y[:2], r"0-1/add:0 .* returned the shape \(2, 4\)"),
        (lambda y: 3, r"0-1/add:0 .* returned a int"),
        (lambda y: y.no_such, r"0-1/add:0"),
    ]:
        with pytest.raises(PostprocessorError, match=message):
            rnet(x, activation_postproc={"/add": post})
    with pytest.raises(LayerNotFoundError, match="no operation is '/sin': there are 'add'"):
        rnet(x, activation_postproc={"/sin": double})

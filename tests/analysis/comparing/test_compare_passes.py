"""What comparing does to networks: nothing that stays, and each side from the same start."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from scio_recorder import Nodes, Recorder, Tokens, compare, open_recording
from scio_recorder.errors import (
    CollectError,
    CollectWarning,
    ComparisonError,
    FlowError,
    UnsupportedNetError,
)
from scio_recorder.reductions import Digest, Mean
from tests.analysis.comparing.faults import batches, make_net, planted
from tests.analysis.comparing.test_compare import recorder
from tests.garbage import garbage_left
from tests.zoo.base import Net


def hooks_of(net: nn.Module) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]


def test_nothing_stays() -> None:
    net = make_net().train()
    other = planted(net, "sign").train()
    one, two = recorder(net), recorder(other)
    one.record("embed", inputs=True)
    two.record("head")
    for rnet in (one, two):
        rnet(batches()[0])
    selections = one.recording, two.recording
    records = one.activations["embed"], two.activations["head"]
    before = [copy.deepcopy(each.state_dict()) for each in (net, other)]
    hooks, flags = hooks_of(net), [module.training for module in net.modules()]
    difference = compare(one, two, iter(batches()), progress=False)
    assert list(difference) == [(1, 1)]
    assert hooks_of(net) == hooks
    assert [module.training for module in net.modules()] == flags
    for state, each in zip(before, (net, other), strict=True):
        for name, value in each.state_dict().items():
            assert torch.equal(state[name], value)
    assert (one.recording, two.recording) == selections
    assert one.activations["embed"] is records[0]
    assert two.activations["head"] is records[1]


def test_nothing_stays_after_an_exception() -> None:
    net = make_net().train()
    rnet = recorder(net)
    before, hooks = copy.deepcopy(net.state_dict()), hooks_of(net)

    def loader() -> Iterator[Tensor]:
        yield batches()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(rnet, recorder(copy.deepcopy(net)), loader(), progress=False)
    assert hooks_of(net) == hooks
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_both_sides_start_from_the_same_random_numbers() -> None:
    net = make_net().train()
    assert compare(recorder(net), recorder(copy.deepcopy(net)), batches()).first is None


@pytest.mark.parametrize("on", ["reference", "candidate", "both"])
def test_random_numbers_are_left_as_they_were(on: str) -> None:
    net, other = make_net(), planted(make_net(), "sign")
    net.drop.train(on != "candidate")
    other.drop.train(on != "reference")
    sides = recorder(net), recorder(other)

    def loader() -> Iterator[Tensor]:
        for batch in batches():
            np.random.rand(), random.random(), torch.rand(2)
            yield batch

    before = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    assert compare(*sides, loader()).first is not None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[2] == before[1]
    assert random.getstate() == before[2]


def test_dropout_that_is_on_in_both_is_no_difference_and_a_fault_behind_it_is() -> None:
    net = make_net()
    net.drop.train()
    first = compare(recorder(net), recorder(planted(net, "last")), batches()).first
    assert first.layer.name == "head"


def counting(net: Any, x: Tensor) -> Tensor:
    """Has a state, as a buffer and as an attribute, that decides what it returns."""
    net.count += 1
    net.number += 1
    result: Tensor = net.act(x + net.count + net.number)
    return result


def test_one_network_on_both_sides() -> None:
    net = Net(counting, count=torch.zeros(()), number=0, act=nn.ReLU())
    one = Recorder(net, input_size=(2, 3))
    same, twin = (Recorder(each, input_size=(2, 3)) for each in (net, copy.deepcopy(net)))
    for two in (one, same, twin):
        given = [torch.ones(2, 3)] * 3
        difference = compare(one, two, given)
        assert difference.first is None
        assert (float(net.count), net.number) == (0.0, 0)


def test_parts_of_one_network() -> None:
    shared = nn.BatchNorm1d(4)
    one, two = nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(nn.Linear(4, 4), shared)
    two[0].load_state_dict(one[0].state_dict())
    sides = [Recorder(net.train(), input_size=(3, 4)) for net in (one, two)]
    assert compare(*sides, [torch.randn(3, 4) for _ in range(3)]).first is None
    assert int(shared.num_batches_tracked) == 0


def test_a_network_that_works_on_its_batch_in_place() -> None:
    net = nn.Sequential(Net(lambda _, x: x.add_(1)), nn.Linear(3, 3))
    given = torch.ones(2, 3)
    sides = [Recorder(each, input_size=(2, 3)) for each in (net, copy.deepcopy(net))]
    assert compare(*sides, [given]).first is None


def remembers(net: Any, x: Tensor, cache: list[Tensor]) -> Tensor:
    """Goes on with the tokens that a cache holds, and fills it further."""
    cache.append(x)
    return net.linear(torch.cat(cache))


def test_each_network_gets_what_the_batch_was() -> None:
    net = Net(remembers, linear=nn.Linear(3, 3))
    batch = {"x": torch.randn(2, 3), "cache": [torch.randn(4, 3)]}
    copies = (copy.deepcopy(batch) for _ in range(2))
    one, two = (
        Recorder(each, input_data=given)
        for each, given in zip((net, copy.deepcopy(net)), copies, strict=True)
    )
    assert compare(one, two, [batch]).first is None
    assert len(batch["cache"]) == 1


def test_the_earliest_layer_of_all_batches_is_first() -> None:
    net = nn.Sequential(nn.Identity(), nn.Hardtanh(-1e9, 1e9), nn.Tanh())
    # Is wrong for large numbers only.
    late = Net(lambda _, x: x.clamp(max=100.0))
    other = nn.Sequential(late, nn.Hardtanh(-1e9, 1e9), nn.Sigmoid())
    sides = [Recorder(each, input_size=(2, 3)) for each in (net, other)]
    small, large = torch.zeros(2, 3), torch.zeros(2, 3)
    large[1, 2] = 1000.0
    first = compare(*sides, [small, small, large]).first
    assert (first.layer.name, first.sample_id, first.index) == ("0", 5, (2,))
    assert (first.reference, first.candidate, first.inputs_equal) == (1000.0, 100.0, True)
    # Where the early one is not recorded, the later one makes a difference of its own.
    sides[0].record("1", "2")
    first = compare(*sides, [large, small]).first
    assert (first.layer.name, first.sample_id, first.inputs_equal) == ("2", 2, True)
    sides[0].record("1")
    first = compare(*sides, [small, large]).first
    assert (first.layer.name, first.sample_id, first.inputs_equal) == ("1", 3, False)


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float = 1.0, *, offset: Any = None) -> Any:
        return {"scaled": x * factor, "all": (x, [offset]), "factor": factor}


class Passes(nn.Module):
    """Hands a number, and a dictionary, to the module inside it."""

    def __init__(self, factor: float, offset: Any = None) -> None:
        super().__init__()
        self.inner, self.factor, self.offset = Scaled(), factor, offset

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, self.factor, offset=self.offset)


@pytest.mark.parametrize(
    "changed",
    [Passes(2.5), Passes(2.0, {"a": torch.zeros(1)}), Passes(float("nan"))],
    ids=["number", "dictionary", "nan"],
)
def test_inputs_that_are_no_tensors_count(changed: nn.Module) -> None:
    plain = Passes(2.0, {"a": torch.ones(1)} if changed.offset else None)
    sides = [Recorder(each, input_size=(2, 3)) for each in (plain, changed)]
    difference = compare(*sides, [torch.ones(2, 3)])
    assert difference["inner"].inputs_equal is False
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("", True)


def test_equal_calls_may_be_written_otherwise() -> None:
    class Keyword(Passes):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x, offset=None, factor=2.0)

    class Short(Passes):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    for nets in ((Passes(2.0), Keyword(2.0)), (Passes(1.0), Short(2.0))):
        sides = [Recorder(each, input_size=(2, 3)) for each in nets]
        assert compare(*sides, [torch.ones(2, 3)])["inner"].inputs_equal is True


def test_the_first_sample_is_that_of_any_tensor() -> None:
    nets = Net(lambda _, x: (x.clamp(max=2), x.clamp(max=1))), Net(lambda _, x: (x, x))
    sides = [Recorder(each, input_size=(3, 2)) for each in nets]
    first = compare(*sides, [torch.tensor([[0.0, 0.0], [0.0, 1.5], [3.0, 3.0]])]).first
    assert (first.sample_id, first.index, first.part) == (1, (1,), 1)
    assert (first.reference, first.candidate) == (1.0, 1.5)


def test_another_number_of_tensors_is_an_error_of_the_layer() -> None:
    functions = (lambda _, x: (x, x + 1)), (lambda _, x: (x,)), (lambda _, x: x)
    pair, single, bare = (
        Recorder(nn.Sequential(Net(function)), input_size=(2, 3)) for function in functions
    )
    difference = compare(pair, bare, [torch.ones(2, 3)])
    assert "returns 2 tensors in the reference and 1 tensor" in str(difference["0"].error)
    assert difference["0"].differs
    assert compare(single, bare, [torch.ones(2, 3)]).first is None


def test_autocast_around_it_counts() -> None:
    net = make_net()
    with torch.autocast("cpu", torch.bfloat16):
        difference = compare(recorder(net), recorder(copy.deepcopy(net)), batches())
        wide = net(batches()[0])["logits"]
    assert difference.first is None
    assert wide.dtype is torch.bfloat16


def test_modules_that_run_another_number_of_times() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(int(x.shape[1])):
            x = net.expert(x)
        return x

    one = Net(forward, expert=nn.Linear(3, 3))
    two = copy.deepcopy(one)
    sides = [Recorder(each, input_size=(2, 1, 3)) for each in (one, two)]
    given = [torch.randn(2, 1, 3), torch.randn(2, 4, 3)]
    with pytest.raises(FlowError):
        compare(*sides, given)
    sides[0].record("expert", calls="any")
    assert compare(*sides, given).first is None
    two.expert.bias.data.add_(1)
    first = compare(*sides, given).first
    assert first.layer.name == "expert"


@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (3, 1)])
def test_one_of_several_calls_makes_a_difference(counts: tuple[int, int]) -> None:
    def loop(net: Any, x: Tensor) -> Tensor:
        for _ in range(net.count):
            x = net.step(x)
        return net.head(x)

    net = Net(loop, step=nn.Linear(3, 3), head=nn.Linear(3, 3), count=2)
    other = copy.deepcopy(net)
    sides = [Recorder(each, input_size=(1, 3), verbose=0) for each in (net, other)]
    sides[0].record("*", calls="any")
    net.count, other.count = counts
    first = compare(*sides, [torch.randn(4, 3)]).first
    assert (None if first is None else first.layer.name) == (None if counts == (2, 2) else "step")
    other.step.bias.data.add_(1)
    first = compare(*sides, [torch.randn(4, 3)]).first
    assert (first.layer.name, first.inputs_equal) == ("step", None)


def test_one_batch_at_a_time_is_in_memory() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    made: list[Any] = []
    net[2].register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    alive = []

    def loader() -> Iterator[Tensor]:
        for _ in range(3):
            gc.collect()
            alive.append(sum(one() is not None for one in made))
            yield torch.randn(3, 4)

    compare(*(Recorder(net, input_size=(3, 4)) for _ in range(2)), loader(), progress=False)
    assert max(alive) <= 2


def test_no_tensor_waits_for_garbage_to_be_collected() -> None:
    def num_tensors() -> int:
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    sides = [recorder(make_net()) for _ in range(2)]
    compare(*sides, batches(), progress=False)
    with garbage_left():
        before = num_tensors()
        compare(*sides, batches(), progress=False)
        assert num_tensors() <= before


@pytest.mark.parametrize(
    "compiles", [pytest.param("recorder", marks=pytest.mark.campaign), "method"]
)
def test_a_compiled_candidate(compiles: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    other = copy.deepcopy(net)
    other[0].weight.data = net[0].weight.data.t()
    for candidate, wanted in ((copy.deepcopy(net), None), (other, "0")):
        one, two = recorder(net), recorder(candidate)
        one.record("0", "2")
        two.record("0", "2")
        given: Any = two
        if compiles == "recorder":
            given = torch.compile(two, backend="eager")
        else:
            two.compile(backend="eager")
        first = compare(one, given, batches()).first
        assert (first and first.layer.name) == wanted
        assert first is None or first.inputs_equal is None


# -- rows ------------------------------------------------------------------------------------------


def tagger() -> Net:
    def forward(net: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return net.head(functional.gelu(net.mix(net.embed(input_ids))))

    parts = {"embed": nn.Embedding(9, 5), "mix": nn.Linear(5, 5), "head": nn.Linear(5, 2)}
    return Net(forward, **parts)


def taggers() -> list[Recorder]:
    """Return recorders of two networks that are alike."""
    net = tagger()
    return [Recorder(each, input_data=texts(8)[0]) for each in (net, copy.deepcopy(net))]


def texts(pad: int) -> list[dict[str, Tensor]]:
    masks = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    ids = torch.arange(12).view(3, 4) % 8
    ids = torch.where(masks.bool(), ids, pad)
    return [{"input_ids": ids, "attention_mask": masks}]


def test_padding_is_not_compared() -> None:
    one, two = taggers()
    pads = [lambda batch: batch, lambda batch: texts(3)[0]]
    with_padding = compare(one, two, texts(8), to_inputs=pads)
    assert with_padding.first is not None
    assert compare(one, two, texts(8), to_inputs=pads, rows=Tokens()).first is None
    with torch.no_grad():
        two.net.mix.bias[1] += 1
    first = compare(one, two, texts(8), rows=Tokens()).first
    assert (first.layer.name, first.sample_id, first.index) == ("mix", 0, (0, 1))


def test_recordings_of_tokens() -> None:
    one, two = taggers()
    two.net.mix.weight.data[:, 2] += torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    for rnet in (one, two):
        rnet.record("?*")
    options: Any = {"rows": Tokens(), "progress": False}
    recordings = [rnet.collect(texts(8), **options) for rnet in (one, two)]
    reference = recordings[0]
    wanted = [compare(*recordings), compare(reference, two, texts(8), rows=Tokens())]
    wanted.append(compare(one, recordings[1], texts(8), rows=Tokens()))
    for difference in wanted:
        assert (difference.first.layer.name, difference.first.index) == ("mix", (0, 3))
        assert difference["mix"].num_elements == 9 * 5
    with pytest.raises(ComparisonError, match=r"rows=Tokens\(\)"):
        compare(reference, two, texts(8))
    other = [{**texts(8)[0], "attention_mask": torch.ones(3, 4, dtype=torch.long)}]
    with pytest.raises(
        ComparisonError, match=r"sample 0 .* 0, 1, 2, 3 in the candidate, and 0, 1, 2 on the other"
    ):
        compare(reference, one.collect(other, **options))
    with pytest.warns(CollectWarning, match="attention_mask"):
        plain = one.collect(texts(8), progress=False)
    with pytest.raises(ComparisonError, match="the reference has a row for each token"):
        compare(reference, plain)


def test_rows_at_other_positions_are_no_partners() -> None:
    rnet = taggers()[0]
    rnet.record("embed")
    options: Any = {"store": None, "progress": False, "reduce": Digest()}
    first, second = (
        Tokens(where=lambda batch, left_out=position: torch.arange(4).expand(3, 4) != left_out)
        for position in (0, 1)
    )
    both = rnet.collect(texts(8), rows=first, **options)
    wrong = "sample 0 has rows at the positions 0, 2 in the candidate, and 1, 2 on the other"
    with pytest.raises(ComparisonError, match=wrong):
        compare(both, rnet.collect(texts(8), rows=second, **options))
    wrong = "sample 0 has rows at the positions 1, 2 in the reference, and 0, 2 on the other"
    with pytest.raises(ComparisonError, match=wrong):
        compare(both, rnet, texts(8), rows=second)
    assert compare(both, rnet, texts(8), rows=first).first is None


def test_inputs_count_also_at_real_positions_that_are_not_compared() -> None:
    # To each position the one before it is added.
    neighbour = Net(lambda _, x: x + functional.pad(x, (0, 0, 1, 0))[:, :-1])
    net = nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2), neighbour)
    ids = torch.tensor([[3, 1, 2], [4, 5, 0]])
    one, two = (Recorder(each, input_data=ids) for each in (net, copy.deepcopy(net)))
    two.net[0].weight.data[4] += 1
    last = torch.tensor([[False, False, True], [False, True, False]])
    rows = Tokens(mask=lambda batch: batch != 0, where=lambda batch: last)
    difference = compare(one, two, [ids], rows=rows)
    # Token 4 differs, and only its neighbour is compared.
    assert not difference["1"].differs
    assert difference["2"].inputs_equal is False
    assert difference["2"].num_elements == 2 * 2
    assert (difference.first.layer.name, difference.first.sample_id) == ("", 1)
    # Padding says nothing about inputs.
    two = Recorder(copy.deepcopy(net), input_data=ids)
    two.net[0].weight.data[0] += 1
    two.net[1].bias.data += 1
    first = compare(one, two, [ids], rows=rows).first
    assert (first.layer.name, first.inputs_equal) == ("1", True)


def test_a_mask_is_asked_for_once_a_batch() -> None:
    asked: list[Any] = []

    def mask(batch: Tensor) -> Tensor:
        asked.append(batch)
        return batch != 0

    net = nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2))
    batches = [torch.tensor([[3, 1, 2], [4, 5, 0]])] * 2
    sides = [Recorder(each, input_data=batches[0]) for each in (net, copy.deepcopy(net))]
    assert compare(*sides, batches, rows=Tokens(mask=mask)).first is None
    assert len(asked) == len(batches)


def test_digests_of_tokens(tmp_path: Path) -> None:
    one, two = taggers()
    two.net.mix.bias.data[1] += 1
    for rnet in (one, two):
        rnet.record("?*")
    options: Any = {"rows": Tokens(), "reduce": Digest(), "store": None, "progress": False}
    sums, others = (rnet.collect(texts(8), **options) for rnet in (one, two))
    assert compare(sums, one, texts(8), rows=Tokens()).first is None
    sums.save(tmp_path / "sums")
    for reference in (sums, open_recording(tmp_path / "sums")):
        for difference in (
            compare(reference, others),
            compare(reference, two, texts(8), rows=Tokens()),
        ):
            assert difference.first.layer.name == "mix"
            assert difference["mix"].num_different == 9
            assert difference["embed"].num_different == 0
    # Other summaries say nothing about single rows: of these nothing is kept.
    assert not one.collect(texts(8), **options | {"reduce": Mean()}).rows


def test_nodes() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    other = copy.deepcopy(net)
    other[0].bias.data += 1
    sides = [Recorder(each, input_size=(5, 3)) for each in (net, other)]
    graphs = [{"x": torch.randn(5, 3), "batch": torch.tensor([0, 0, 1, 1, 1])}]
    difference = compare(
        *sides, graphs, to_inputs=lambda batch: batch["x"], rows=Nodes(sample="batch")
    )
    assert difference.num_samples == 2
    assert difference["0"].num_elements == 10


@pytest.mark.parametrize(
    ("wrap", "unwrap", "said"),
    [
        (lambda x: iter([x]), next, "list_iterator, which can be read only once"),
        (lambda x: lambda: x, lambda made: made(), "function with tensors inside it"),
        (lambda x: x.clone, lambda made: made(), "with tensors inside it"),
    ],
)
def test_outputs_that_no_copy_has_are_refused(
    wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor], said: str
) -> None:
    inner = Net(lambda _, x: wrap(x))
    rnet = recorder(Net(lambda net, x: unwrap(net.inner(x)), inner=inner))
    with pytest.raises(UnsupportedNetError, match=f"1-1 inner .*{said}"):
        compare(rnet, rnet, [torch.ones(2, 8)], progress=False)


def test_layers_inside_a_transform_are_refused() -> None:
    rnet = recorder(Net(lambda net, x: torch.func.vmap(net.inner)(x), inner=nn.Linear(8, 2)))
    with pytest.raises(UnsupportedNetError, match=r"1-1 inner .* inside a torch\.func transform"):
        compare(rnet, rnet, [torch.ones(2, 8)], progress=False)


def test_copies_are_not_shared_across_a_write_that_is_not_counted() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.second(net.first(x))
        hidden.numpy()[...] += net.writes
        return net.third(hidden)

    parts = {"first": nn.ReLU(), "second": nn.Identity(), "third": nn.Identity()}
    one, two = (recorder(Net(forward, writes=writes, **parts)) for writes in (False, True))
    difference = compare(one, two, [torch.ones(2, 8)], progress=False)
    assert [layer.max_abs for layer in difference.values()] == [0, 0, 1, 1]
    assert [layer.inputs_equal for layer in difference.values()] == [True, True, False, True]
    assert difference.first.layer.name == ""


def test_inputs_are_made_once_for_both_networks() -> None:
    given: list[Tensor] = []

    def to_inputs(batch: Tensor) -> Tensor:
        given.append(batch)
        # Random inputs are the same for both.
        return batch + torch.rand_like(batch)

    one, two = recorder(make_net()), recorder(make_net())
    assert compare(one, two, batches(), to_inputs=to_inputs).first is None
    assert len(given) == len(batches())


def test_an_error_of_either_function_names_the_batch() -> None:
    def fails(batch: Tensor) -> Tensor:
        if batch is given[1]:
            raise ValueError("odd")
        return batch

    def same(batch: Tensor) -> Tensor:
        return batch

    given = batches()
    sides = recorder(make_net()), recorder(make_net())
    for to_inputs in (fails, [fails, same], [same, fails]):
        with pytest.raises(CollectError, match="batch 1: to_inputs raised"):
            compare(*sides, given, to_inputs=to_inputs)

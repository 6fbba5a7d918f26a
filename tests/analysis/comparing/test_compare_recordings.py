"""Recordings beside networks and other recordings: samples by id, in any order and batch size."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scio_recorder
from scio_recorder import Recorder, Recording, Tokens, compare
from scio_recorder.analysis.comparing import compare as door
from scio_recorder.analysis.comparing import sides
from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.errors import CollectError, ComparisonError
from scio_recorder.reductions import Digest, Mean
from scio_recorder.stores import Disk
from tests.analysis.comparing.faults import planted
from tests.analysis.comparing.test_compare import make_net, recorder
from tests.rotation import one_in
from tests.zoo.base import Net

# Of equal values for each batch size: kernels differ in the last bits.
DATA = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))


def column_by_column(_: Any, x: Tensor) -> Tensor:
    result = x[:, 0].clone()
    for column in x.unbind(1)[1:]:
        result += column
    return result


def scaled(net: Any, x: Tensor) -> Tensor:
    return x * net.weight


def row_by_row(net: Any, x: Tensor) -> Any:
    return net.sum(net.act(net.scale(x.clone())))


def rowwise(weight: float = 2.0, **kwargs: Any) -> Recorder:
    """Record a net that computes each sample by itself, so that batches may be of any size."""
    scale, act = Net(scaled, weight=weight), nn.ReLU(inplace=True)
    net = Net(row_by_row, scale=scale, act=act, sum=Net(column_by_column))
    rnet = Recorder(net, input_size=(1, 8))
    rnet.record("?*", **kwargs)
    return rnet


def ids_of(batch: Any) -> Any:
    return batch[1]


def batches(order: list[int], size: int) -> list[tuple[Tensor, list[str]]]:
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [(DATA[part], [f"id{place}" for place in part]) for part in parts]


FORWARD, BACKWARD = list(range(12)), list(range(12))[::-1]
MIXED = [5, 3, 11, 0, 1, 2, 9, 10, 4, 8, 6, 7]


def collected(rnet: Recorder, order: list[int], size: int, **options: Any) -> Recording:
    options = {"sample_ids": ids_of, "progress": False, **options}
    return rnet.collect(batches(order, size), **options)


Make = Callable[[Recorder, list[int], int, Path], Any]


def in_memory(rnet: Recorder, order: list[int], size: int, folder: Path) -> Recording:
    return collected(rnet, order, size)


def on_disk(rnet: Recorder, order: list[int], size: int, folder: Path) -> Recording:
    collected(rnet, order, size, store=f"disk:{folder}")
    return scio_recorder.open_recording(folder)


def digests(rnet: Recorder, order: list[int], size: int, folder: Path) -> Recording:
    return collected(rnet, order, size, store=None, reduce=Digest())


def digests_on_disk(rnet: Recorder, order: list[int], size: int, folder: Path) -> Recording:
    collected(rnet, order, size, store=f"disk:{folder}", reduce=[Mean(), Digest()])
    return scio_recorder.open_recording(folder)


def network(rnet: Recorder, order: list[int], size: int, folder: Path) -> Recorder:
    return rnet


KINDS: dict[str, Make] = {
    "network": network,
    "memory": in_memory,
    "disk": on_disk,
    "digests": digests,
    "digests on disk": digests_on_disk,
}


def compared(one: Any, two: Any, order: list[int], size: int) -> Difference:
    is_network = isinstance(one, Recorder) or isinstance(two, Recorder)
    given = batches(order, size) if is_network else None
    return compare(one, two, given, sample_ids=ids_of, progress=False)


PAIRS = list(itertools.product(KINDS, KINDS))
# Some pairs of equal networks are left to a campaign, and none of different ones.
EQUAL, DIFFERENT = ([(*pair, weight) for pair in PAIRS] for weight in (2.0, 3.0))


@pytest.mark.parametrize(("one", "two", "weight"), [*one_in(3, EQUAL), *DIFFERENT])
def test_each_kind_beside_each(one: str, two: str, weight: float, tmp_path: Path) -> None:
    reference = KINDS[one](rowwise(), FORWARD, 4, tmp_path / "one")
    candidate = KINDS[two](rowwise(weight), MIXED, 5, tmp_path / "two")
    difference = compared(reference, candidate, BACKWARD, 3)
    assert difference.num_samples == 12
    if weight == 2.0:
        assert difference.first is None
        return
    first = difference.first
    assert first.layer.name == "scale"
    are_networks = one == two == "network"
    assert first.inputs_equal is (True if are_networks else None)
    has_digests = "digests" in one + two
    assert difference["scale"].num_elements == (12 if has_digests else 96)
    assert difference["scale"].num_different == (12 if has_digests else 96)
    if has_digests:
        assert (first.index, first.reference, first.candidate) == (None, None, None)
        assert difference["scale"].max_abs != difference["scale"].max_abs
    else:
        assert difference["scale"].max_abs == float(DATA.abs().max())
        own = DATA[int(str(first.sample_id).removeprefix("id"))][first.index]
        assert (first.reference, first.candidate) == ((own * 2).item(), (own * 3).item())


def test_layers_of_which_there_are_digests_and_others() -> None:
    reduce = {"scale": Digest()}
    reference = collected(rowwise(), FORWARD, 4, reduce=reduce)
    difference = compared(reference, rowwise(3.0), MIXED, 5)
    assert difference["scale"].num_elements == difference["scale"].num_different == 12
    act = (DATA * 3).relu() != (DATA * 2).relu()
    assert difference["act"].num_elements == DATA.numel()
    assert difference["act"].num_different == int(act.sum())
    # Two layers with one partner: what is a digest for one of them is for both.
    both = {"scale": "act"}
    found = compare(reference, rowwise(), batches(MIXED, 5), both, sample_ids=ids_of)
    assert (found["act"].num_elements, found["act"].num_different) == (12, 0)
    has_negative = (DATA < 0).any(1)
    assert found["scale"].num_different == int(has_negative.sum())


def test_the_first_sample_is_in_the_order_of_the_reference(tmp_path: Path) -> None:
    reference = collected(rowwise(), MIXED, 5)
    for candidate in (collected(rowwise(3.0), FORWARD, 4), collected(rowwise(3.0), MIXED, 5)):
        first = compare(reference, candidate).first
        assert first.sample_id == f"id{MIXED[0]}"


def test_large_recordings_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "_BLOCK_BYTES", 2 * 8 * 4)
    lengths = []
    add = door.Comparison.add

    def noted(self: Any, block: Any, *values: Any) -> None:
        lengths.append(len(block.ids))
        add(self, block, *values)

    monkeypatch.setattr(door.Comparison, "add", noted)
    difference = compare(collected(rowwise(), FORWARD, 4), collected(rowwise(3.0), MIXED, 5))
    assert lengths == [2] * 6
    assert difference["scale"].num_elements == 96


@pytest.mark.parametrize("sizes", [(4, 4), (4, 3)], ids=["same batches", "other batches"])
def test_recordings_with_inputs_know_the_maker(sizes: tuple[int, int], tmp_path: Path) -> None:
    """A layer that is not recorded makes the difference, and the next one passes it on."""
    reference = collected(rowwise(inputs=True), FORWARD, sizes[0])
    other = rowwise(inputs=True)
    other.net.sum.register_forward_hook(lambda module, args, output: output + 1)
    candidate = collected(other, FORWARD, sizes[1])
    first = compare(reference, candidate).first
    assert first is not None
    # Inputs are kept batch by batch, and are not known for parts of batches.
    are_known = True if sizes[0] == sizes[1] else None
    assert (first.layer.name, first.inputs_equal) == ("sum", are_known)


@pytest.mark.parametrize("inputs", [False, True])
def test_a_network_beside_a_recording_with_inputs(inputs: bool) -> None:
    reference = collected(rowwise(inputs=inputs), FORWARD, 4)
    candidate = rowwise()
    candidate.record("sum")
    candidate.net.sum.register_forward_hook(lambda module, args, output: output + 1)
    difference = compared(reference, candidate, FORWARD, 4)
    assert difference.first.inputs_equal is (True if inputs else None)
    assert difference["act"].inputs_equal is (True if inputs else None)


def test_inputs_that_differ_are_known() -> None:
    reference, candidate = rowwise(inputs=True), rowwise(3.0, inputs=True)
    reference.record("act", "sum", inputs=True)
    candidate.record("act", "sum", inputs=True)
    difference = compare(collected(reference, FORWARD, 4), collected(candidate, FORWARD, 4))
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("act", False)


# -- what can't be compared ----------------------------------------------------------------------


def refused(*parts: str, one: Any, two: Any, given: Any = None, **options: Any) -> None:
    with pytest.raises(ComparisonError) as caught:
        compare(one, two, given, progress=False, **{"sample_ids": ids_of, **options})
    assert isinstance(caught.value, ValueError)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_ids_that_are_missing() -> None:
    whole, part = collected(rowwise(), FORWARD, 4), collected(rowwise(), FORWARD[:7], 4)
    refused("5 samples", "candidate", "'id7', 'id8', 'id9', 'id10', 'id11'", one=whole, two=part)
    refused("5 samples", "reference", "'id7'", one=part, two=whole)
    refused("10 samples", "and 5 more", one=whole, two=collected(rowwise(), [2, 1], 4))
    # Those of all batches are counted, and the network does not run on them.
    net = rowwise()
    refused("5 samples", "batches", one=part, two=net, given=batches(MIXED, 2))
    refused("5 samples", "batches", one=net, two=part, given=batches(MIXED, 2))
    refused("5 samples", "batches", one=whole, two=net, given=batches(FORWARD[:7], 4))
    refused(
        "12 samples", "sample_ids=", one=whole, two=net, given=batches(FORWARD, 4), sample_ids=None
    )


def test_fewer_batches_can_be_asked_for() -> None:
    reference = collected(rowwise(), FORWARD, 4)
    difference = compare(
        reference, rowwise(), batches(FORWARD, 4), max_batches=2, sample_ids=ids_of
    )
    assert (difference.num_samples, difference.first) == (8, None)


def test_recordings_of_summaries() -> None:
    means = collected(rowwise(), FORWARD, 4, reduce=Mean(), store=None)
    refused(
        "candidate", "summaries", "Digest()", one=rowwise(), two=means, given=batches(FORWARD, 4)
    )
    by_class = collected(rowwise(), FORWARD, 4, reduce=Digest(by=ids_of), store=None)
    refused("without by=", one=by_class, two=by_class)


def test_layers_that_are_summaries_are_left_out() -> None:
    some = collected(rowwise(), FORWARD, 4, reduce={"act": Mean()})
    difference = compare(some, collected(rowwise(), FORWARD, 4))
    assert [layer.name for layer in difference.values()] == ["scale", "sum"]
    assert difference.unmatched == (("act",), ())
    assert compare(collected(rowwise(), FORWARD, 4), some).unmatched == (("act",), ("act",))


def test_bad_arguments() -> None:
    net, recording = rowwise(), collected(rowwise(), FORWARD, 4)
    refused("no batches", one=net, two=net)
    refused("no batches", one=recording, two=net)
    refused("is empty", one=net, two=net, given=[])
    refused("candidate", "Recorder(net, input_data=x)", one=net, two=net.net, given=[])
    refused("reference", "open_recording('run')", one="run", two=net, given=[])
    refused("candidate", "NoneType", "Recorder or a Recording", one=net, two=None, given=[])
    refused("two of them", one=net, two=net, given=[DATA], to_inputs=[len])
    refused("two of them", one=net, two=net, given=[DATA], to_inputs=3)
    refused("rows=3", "Tokens(...)", one=net, two=net, given=[DATA], rows=3)
    refused("write rows=Tokens()", one=net, two=net, given=[DATA], rows=Tokens)
    refused("leave rows= out", one=recording, two=net, given=[DATA], rows=Tokens())


# -- digests ---------------------------------------------------------------------------------------


def test_a_digest_is_of_bits_shape_and_dtype() -> None:
    from scio_recorder.tensors.digests import sample_digests

    x = torch.randn(3, 4, 5)
    digest = sample_digests(x)
    assert digest.dtype is torch.int64
    assert len(set(digest.tolist())) == 3
    others = [x.double(), x.reshape(3, 20), x.view(torch.int32), -x]
    assert not any((sample_digests(other) == digest).any() for other in others)
    assert sample_digests(x[1:]).tolist() == digest[1:].tolist()
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert sample_digests(strided).tolist() == digest.tolist()
    zeros = sample_digests(torch.tensor([[0.0], [-0.0]]))
    assert zeros[0] != zeros[1]
    for bits, kind, dtype in (
        ([0x7FC00000, 0x7FC00123], torch.int32, torch.float32),
        ([0x7E00, 0x7E01, -1], torch.int16, torch.float16),
        ([0x7FC0, 0x7FFF, -1], torch.int16, torch.bfloat16),
        ([2**63 - 1, -1, 0x7FF8 << 48], torch.int64, torch.float64),
    ):
        nans = torch.tensor(bits, dtype=kind).view(dtype)[:, None]
        assert len(set(sample_digests(nans).tolist())) == 1
    assert sample_digests(torch.randn(2, 3, dtype=torch.complex64)).shape == (2,)
    assert sample_digests(torch.randn(0, 3)).shape == (0,)
    assert len(set(sample_digests(torch.zeros(2, 0)).tolist())) == 1


def test_a_digest_follows_what_is_written_in_place() -> None:
    from scio_recorder.tensors.digests import sample_digests

    x = torch.randn(3, 4)
    before = sample_digests(x)
    assert torch.equal(sample_digests(x), before)
    x[1] += 1
    assert (sample_digests(x) == before).tolist() == [True, False, True]


def test_faults_are_named_by_digests() -> None:
    net = make_net()
    loader = [DATA[:6], DATA[6:]]
    reference, candidate = recorder(net), recorder(planted(net, "sign"))
    reference.record(lambda layer: layer.depth > 0 and layer.name != "lstm")
    recording = reference.collect(loader, reduce=Digest(), store=None, progress=False)
    first = compare(recording, candidate, loader, progress=False).first
    assert first.layer.name == "blocks.2.up"


def test_digests_of_several_processes_and_of_a_run_that_was_interrupted(tmp_path: Path) -> None:
    rnet, whole = rowwise(), collected(rowwise(), FORWARD, 4)
    for rank in (1, 0):
        store = Disk(tmp_path / "ranks", rank=rank, world_size=2)
        collected(rnet, FORWARD[rank::2], 2, store=store, reduce=Digest())
    ranks = scio_recorder.open_recording(tmp_path / "ranks")
    assert list(ranks.sample_ids)[:2] == ["id0", "id2"]
    assert compare(whole, ranks).first is None
    store = f"disk:{tmp_path / 'run'}"

    def broken() -> Any:
        yield from batches(FORWARD[:7], 4)
        raise KeyboardInterrupt

    options: Any = {"store": store, "reduce": Digest(), "sample_ids": ids_of, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        rnet.collect(broken(), **options)
    part = scio_recorder.open_recording(tmp_path / "run")
    assert compare(part, collected(rnet, FORWARD[: part.num_samples], 4)).first is None
    rnet.collect(batches(FORWARD, 4), **options, resume=True)
    again = scio_recorder.open_recording(tmp_path / "run")
    assert compare(again, whole).first is None
    first = compare(again, collected(rowwise(3.0), MIXED, 5)).first
    assert first.layer.name == "scale"


def test_a_recording_of_digests_can_be_saved(tmp_path: Path) -> None:
    digests(rowwise(), MIXED, 5, tmp_path).save(tmp_path / "saved")
    saved = scio_recorder.open_recording(tmp_path / "saved")
    assert compare(saved, rowwise(), batches(FORWARD, 4), sample_ids=ids_of).first is None
    assert saved["scale"].shape == (12,)


def test_what_counts_no_samples_has_no_digests_and_is_compared_between_networks() -> None:
    def positions(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net.act(x + net.positions(torch.arange(x.shape[1])[None]))
        return result

    net = Net(positions, positions=nn.Embedding(8, 3), act=nn.ReLU())
    rnet = Recorder(net, input_size=(2, 8, 3))
    rnet.record("*")
    loader = [torch.randn(4, 8, 3), torch.randn(4, 8, 3)]
    with pytest.raises(CollectError, match=r"positions.*leave the layer out"):
        rnet.collect(loader, reduce=Digest(), store=None, progress=False)
    # Two networks are compared there, too.
    assert "positions" in compare(rnet, rnet, loader)


def test_what_was_found_goes_to_other_processes() -> None:
    one, two = (rowwise(weight).collect([DATA], progress=False) for weight in (2.0, 3.0))
    found = compare(one, two, progress=False)
    again = pickle.loads(pickle.dumps(found))
    assert again.first.layer.name == found.first.layer.name == "scale"
    assert str(again) == str(found)
    assert again.made_with == (one.made_with, two.made_with)

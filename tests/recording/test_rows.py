"""Rows through stores, reductions and all options of a collection, beside tables by plain hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from scio_recorder import CollectError, Nodes, RecordingError, Tokens, open_recording
from scio_recorder.recording import Recording
from scio_recorder.reductions import Covariance, Fold, Histogram, Last, Max, Mean, Reduction
from scio_recorder.stores import Disk, Host
from tests.recording.nets import Sizes, interrupt
from tests.recording.tables import (
    assert_rows,
    assert_tokens,
    batches,
    columns,
    padded,
    reader,
    run_all,
    seen,
    tokens,
)

LENGTHS = ((3, 8, 1), (4, 4), (2, 5, 5, 1))


@pytest.mark.parametrize(
    ("store", "side"),
    [("host", "right"), ("device", "left"), ("auto", "right"), ("disk", "left"), ("host", "left")],
)
def test_each_real_token_is_a_row(store, side, tmp_path):
    rnet, data = reader(), batches(*LENGTHS, side=side)
    where = Disk(tmp_path / "run", chunk_bytes=300) if store == "disk" else store
    recording = rnet.collect(data, store=where, rows=Tokens())
    names = "embed", "mix", "act"
    assert_tokens(recording, rnet.net, data, *names)
    lengths = [length for batch in LENGTHS for length in batch]
    for name in names:
        assert [len(part) for part in recording.by_sample(name)] == lengths
    assert recording.num_samples == 9
    if store == "disk":
        assert_rows(open_recording(tmp_path / "run", verify=True), columns(data))


def test_without_padding_no_row_is_left_out():
    rnet, data = reader("mix"), [{"input_ids": padded(5, 5)["input_ids"]}]
    recording = rnet.collect(data, rows=Tokens())
    (values,) = seen(rnet.net, ["mix"], run_all(rnet.net, data))["mix"]
    assert torch.equal(recording["mix"], values.flatten(0, 1))
    assert recording.rows["position"].tolist() == [0, 1, 2, 3, 4] * 2


def test_batches_of_one_shape_without_padding_and_a_loader_of_unknown_length():
    rnet, data = reader("mix", "act"), [padded(4, 4, seed=seed) for seed in range(40)]
    data[30] = padded(2, 4, seed=30)
    host = Host()
    for _ in range(2):
        recording = rnet.collect(iter(data), rows=Tokens(), store=host)
        assert_tokens(recording, rnet.net, data, "mix", "act")


def test_layers_that_are_overwritten_later_and_lie_otherwise_in_memory():
    rnet, data = reader("mix", "act"), batches(*LENGTHS)
    turned = rnet.collect(
        data, rows=Tokens(), transform=lambda activation, batch: activation.mT.contiguous().mT
    )
    assert_tokens(turned, rnet.net, data, "mix", "act")


@pytest.mark.parametrize("inference", [False, True])
def test_in_the_callers_mode(inference):
    rnet, data = reader("mix"), batches(*LENGTHS)
    with torch.inference_mode(inference):
        recording = rnet.collect(data, rows=Tokens())
    assert_tokens(recording, rnet.net, data, "mix")
    assert not recording["mix"].is_inference()
    assert not recording.rows["sample"].is_inference()


# Reductions.

KINDS: dict[str, Callable[..., Reduction]] = {
    "Mean": Mean,
    "Last": Last,
    "Covariance": Covariance,
    "Histogram": lambda **by: Histogram(5, (-2.0, 2.0), **by),
    "Fold": lambda **by: Fold(lambda total, x: (0 if total is None else total) + x.sum(0), **by),
}


def flat(result: Any) -> Iterator[Tensor]:
    """Yield all tensors and numbers of a result."""
    if isinstance(result, dict):
        for key in result:
            yield torch.tensor([ord(letter) for letter in str(key)])
            yield from flat(result[key])
    elif isinstance(result, tuple | list):
        for one in result:
            yield from flat(one)
    else:
        yield torch.as_tensor(result)


def assert_equal(one: Any, other: Any) -> None:
    pairs = list(zip(flat(one), flat(other), strict=True))
    assert pairs
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_see_rows_alone(kind):
    rnet, data = reader("mix"), batches(*LENGTHS)
    recording = rnet.collect(data, rows=Tokens(), reduce=KINDS[kind](), store=None)
    by_hand = KINDS[kind]()
    for value, batch in zip(*of_net(rnet, data), strict=True):
        by_hand.update(tokens([value], [batch]))
    assert_equal(recording["mix"], by_hand.compute())
    assert (recording.num_rows, recording.num_samples) == (33, 9)
    # A stream of tokens that are kept nowhere takes no memory.
    assert not recording.rows


def of_net(rnet: Any, data: list[dict[str, Tensor]]) -> tuple[list[Tensor], list[Any]]:
    return seen(rnet.net, ["mix"], run_all(rnet.net, data))["mix"], data


LABELS: dict[str, Callable[[Any], Any]] = {
    "lines": lambda batch: batch["attention_mask"].sum(1) % 3,
    "strings": lambda batch: ["odd" if ids[0] % 2 else "even" for ids in batch["input_ids"]],
    "positions": lambda batch: batch["input_ids"] % 3,
    "lists": lambda batch: (batch["input_ids"] % 3).tolist(),
}


# Each kind with some labels, and each sort of labels with some kinds.
@pytest.mark.parametrize(
    ("kind", "by"),
    [
        (kind, [*LABELS][(number + turn) % 4])
        for number, kind in enumerate(KINDS)
        for turn in (0, 1)
    ],
)
def test_labels_of_samples_and_of_positions(kind, by):
    rnet, data = reader("mix"), batches(*LENGTHS)
    reduction = KINDS[kind](by=lambda batch: LABELS[by](as_inputs(batch)))
    recording = rnet.collect(data, rows=Tokens(), reduce=reduction, to_inputs=as_inputs)
    labels: list[Any] = []
    by_hand = KINDS[kind](by=lambda batch: labels)
    for value, batch in zip(*of_net(rnet, data), strict=True):
        given = LABELS[by](batch)
        given = given.tolist() if isinstance(given, Tensor) else given
        labels = [
            one[place] if isinstance(one, list) else one
            for one, real in zip(given, batch["attention_mask"], strict=True)
            for place in real.nonzero().flatten().tolist()
        ]
        by_hand.update(tokens([value], [batch]), batch)
    assert_equal(recording["mix"], by_hand.compute())


def as_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def test_labels_of_segments():
    rnet = reader("mix")
    batch = {"input_ids": padded(6)["input_ids"], "document": torch.tensor([[1, 1, 0, 0, 0, -1]])}
    recording = rnet.collect(
        [batch],
        rows=Tokens(segments="document"),
        to_inputs=lambda batch: batch["input_ids"],
        reduce=Fold(lambda total, x: (total or 0) + len(x), by=lambda batch: ["first", "second"]),
    )
    assert recording["mix"] == {"first": 2, "second": 3}


def test_labels_of_another_number():
    rnet, data = reader("mix"), batches(*LENGTHS)
    for by in (lambda batch: [1] * 5, lambda batch: batch["input_ids"][:, 1:]):
        with pytest.raises(CollectError, match=r"by= .*3 samples.*\(3, 8\)"):
            rnet.collect(data, rows=Tokens(), reduce=Mean(by=by))


def test_a_reduction_of_ones_own_sees_rows():
    rnet = reader("mix")
    assert rnet.collect(batches(*LENGTHS), rows=Tokens(), reduce=Sizes())["mix"] == [12, 8, 13]


# Other options.


def numbered(batch: dict[str, Tensor]) -> list[str]:
    lines, length = batch["input_ids"].shape
    return [f"{line}-{length}" for line in range(lines)]


@pytest.mark.parametrize("named", [False, True])
def test_every_and_max_batches(named):
    rnet, data = reader("mix"), batches(*LENGTHS, (6,), (2, 2), (9, 1))
    given: dict[str, Any] = {"sample_ids": numbered} if named else {}
    recording = rnet.collect(data, rows=Tokens(), every=2, max_batches=2, **given)
    taken = [data[0], data[2]]
    assert_tokens(recording, rnet.net, taken, "mix")
    ids = ["0-8", "1-8", "2-8", "0-5", "1-5", "2-5", "3-5"] if named else [0, 1, 2, 5, 6, 7, 8]
    assert list(recording.sample_ids) == ids


def test_samples_of_batches_that_are_passed_over_are_counted_by_segments():
    rnet = reader("mix")
    data = [{"input_ids": padded(4)["input_ids"], "document": torch.tensor([row])}
            for row in ([0, 0, 1, 1], [0, 1, 2, 3], [5, 5, 5, -1])]  # fmt: skip
    rows = Tokens(segments="document")
    recording = rnet.collect(data, rows=rows, every=2, to_inputs=lambda batch: batch["input_ids"])
    assert list(recording.sample_ids) == [0, 1, 6]
    assert recording.rows["sample"].tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_transforms_see_the_whole_batch_and_rows_are_chosen_after_them():
    rnet, data = reader("mix", "maps"), batches(*LENGTHS)
    recording = rnet.collect(
        data,
        rows=Tokens(),
        transform={
            "mix": lambda activation, batch: activation.softmax(1)[..., :2],
            # What each position attends to on average.
            "maps": lambda activation, batch: activation.mean(1).diagonal(dim1=1, dim2=2),
        },
    )
    found = seen(rnet.net, ["mix", "maps"], run_all(rnet.net, data))
    softened = [value.softmax(1)[..., :2] for value in found["mix"]]
    assert torch.equal(recording["mix"], tokens(softened, data))
    diagonals = [value.mean(1).diagonal(dim1=1, dim2=2) for value in found["maps"]]
    assert torch.equal(recording["maps"], tokens(diagonals, data))


@pytest.mark.parametrize("store", ["host", "disk"])
def test_rounding_is_measured_over_rows(store, tmp_path):
    rnet, data = reader("mix"), batches(*LENGTHS)
    where = f"disk:{tmp_path}/run" if store == "disk" else store
    recording = rnet.collect(data, rows=Tokens(), dtype=torch.bfloat16, store=where)
    exact = tokens(of_net(rnet, data)[0], data)
    assert torch.equal(recording["mix"][:], exact.bfloat16())
    lost = (exact.double() - exact.bfloat16().double()).norm() / exact.double().norm()
    assert recording.relative_errors["mix"] == pytest.approx(float(lost))


def test_as_many_ids_as_samples():
    rnet, data = reader("mix"), batches(*LENGTHS)
    with pytest.raises(CollectError, match=r"returned 4 ids for batch 0, which has 3 samples"):
        rnet.collect(data, rows=Tokens(), sample_ids=lambda batch: range(4))


@pytest.mark.parametrize("given", [Tokens, Nodes, "tokens", 3])
def test_what_is_no_kind_of_row(given):
    with pytest.raises(CollectError, match=r"rows=.*give scio_recorder\.Tokens"):
        reader("mix").collect(batches(*LENGTHS), rows=given)


def test_inputs_are_kept_by_whole_batches():
    with pytest.raises(CollectError, match=r"inputs=True .* rows="):
        reader("mix", inputs=True).collect(batches(*LENGTHS), rows=Tokens())


# Going on after an interruption.

ALL = ((3, 8, 1), (4, 4), (2, 5, 5), (1, 7), (6, 2, 3))


@pytest.mark.parametrize(
    ("stops_at", "size", "side"),
    [(1, None, "left"), (2, 1, "right"), (2, 4, "left"), (4, 4, "right"), (4, 13, "left")],
)
def test_resumed_recordings_are_those_of_one_go(stops_at, size, side, tmp_path):
    rnet, data = reader("embed", "act", "mix"), batches(*ALL, side=side)
    options: dict[str, Any] = {
        "rows": Tokens(where=lambda batch: batch["input_ids"] % 3 > 0),
        "reduce": {"act": [Max(), Fold(lambda n, x: (n or 0) + len(x))]},
        # What a mixing of positions makes of texts depends on what they are padded with.
        "transform": {"act": lambda activation, batch: rnet.net.embed.weight[batch["input_ids"]]},
    }
    wanted = rnet.collect(data, store="host", **options)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    interrupt(rnet, data, store, stops_at, **options)
    again = data if size is None else regrouped(data, size, side)
    found = rnet.collect(again, store=store, resume=True, **options)
    assert_same(found, wanted)
    assert found.complete
    assert_same(open_recording(tmp_path / "run", verify=True), wanted)
    # Once it is complete, nothing runs any more.
    assert_same(rnet.collect(again, store=store, resume=True, **options), wanted)


def regrouped(data: list[dict[str, Tensor]], size: int, side: str) -> list[dict[str, Tensor]]:
    """Return the same texts in batches of another size, all padded to one length."""
    texts = [
        ids[real.bool()]
        for batch in data
        for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    found = []
    for start in range(0, len(texts), size):
        own = texts[start : start + size]
        batch = padded(*map(len, own), positions=9, side=side)
        batch["input_ids"][batch["attention_mask"].bool()] = torch.cat(own)
        found.append(batch)
    return found


def assert_same(found: Recording, wanted: Recording) -> None:
    assert torch.equal(found["embed"][:], wanted["embed"])
    highest, count = found["act"]
    assert torch.equal(highest, wanted["act"][0])
    assert count == wanted["act"][1] == wanted.num_rows == found.num_rows
    assert list(found.sample_ids) == list(wanted.sample_ids)
    assert list(found.rows) == list(wanted.rows)
    for name, column in wanted.rows.items():
        assert torch.equal(found.rows[name][:], column), name


def test_a_reduction_of_ones_own_does_not_go_on_in_the_middle_of_a_batch(tmp_path):
    rnet, data = reader("embed"), batches(*ALL)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    options: dict[str, Any] = {"rows": Tokens(), "reduce": Sizes()}
    interrupt(rnet, data, store, 2, **options)
    with pytest.raises(CollectError, match=r"Sizes.*may read the batch.*the earlier batch size"):
        rnet.collect(regrouped(data, 4, "right"), store=store, resume=True, **options)
    assert rnet.collect(data, store=store, resume=True, **options)["embed"] == [12, 8, 12, 8, 11]


@pytest.mark.parametrize(
    "other",
    [
        None,
        Tokens(mask="attention_mask"),
        Tokens(fields=()),
        Tokens(where=lambda batch: batch["attention_mask"]),
        Nodes(sample=None),
    ],
)
def test_a_resume_with_other_rows_is_refused(other, tmp_path):
    rnet, data = reader("embed"), batches(*ALL)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    interrupt(rnet, data, store, 2, rows=Tokens())
    with pytest.raises(RecordingError, match="rows"):
        rnet.collect(data, store=store, rows=other, resume=True)
    assert rnet.collect(data, store=store, rows=Tokens(), resume=True).num_rows == 51


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("store", ["host", "device", "auto", "disk"])
@pytest.mark.parametrize("masks_on", ["cpu", "cuda"])
def test_rows_of_a_net_on_a_gpu(store, masks_on, tmp_path):
    rnet, data = reader(), batches(*LENGTHS)
    rnet.net.cuda()

    def to_gpu(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.cuda() for name, value in batch.items()}

    where = Disk(tmp_path / "run", chunk_bytes=300) if store == "disk" else store
    given = [{name: value.to(masks_on) for name, value in batch.items()} for batch in data]
    recording = rnet.collect(given, store=where, rows=Tokens(), to_inputs=to_gpu)
    moved = [to_gpu(batch) for batch in data]
    for name, values in seen(rnet.net, ["embed", "mix"], run_all(rnet.net, moved)).items():
        assert torch.equal(recording[name][:].cpu(), tokens(values, moved).cpu())
    assert_rows(recording, columns(data))

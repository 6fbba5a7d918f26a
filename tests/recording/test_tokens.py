"""Which tokens of a batch are rows: masks, packed documents, fields, and what is refused."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scio_recorder import CollectError, Recorder, Recording, Tokens, open_recording, reductions
from scio_recorder.reductions import Mean
from scio_recorder.stores import Disk
from tests.recording.nets import failing_after, recorder_of
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

DATA = batches((3, 8, 1), (4, 4), (2, 5, 5, 1))


class Texts(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor


def as_keywords(batch: Any) -> dict[str, Tensor]:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


FORMS = {
    "dict": (dict, None),
    "other mapping": (UserDict, None),
    "attributes": (lambda batch: SimpleNamespace(**batch), as_keywords),
    "named tuple": (lambda batch: Texts(**batch), as_keywords),
    "pair": (lambda batch: tuple(batch.values()), tuple),
    "keywords of a pair": (
        lambda batch: list(batch.values()),
        lambda batch: {"attention_mask": batch[1], "input_ids": batch[0]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_names_are_looked_up_in_every_form_of_batch(form):
    make, to_inputs = FORMS[form]
    rnet = reader("mix")
    recording = rnet.collect([make(batch) for batch in DATA], rows=Tokens(), to_inputs=to_inputs)
    assert_tokens(recording, rnet.net, DATA, "mix")


MASKS = {
    "name": "real",
    "function": lambda batch: batch["input_ids"] != 0,
    "array": lambda batch: (batch["input_ids"] != 0).numpy(),
    "lists": lambda batch: (batch["input_ids"] != 0).tolist(),
    "numbers": lambda batch: batch["attention_mask"] * 7,
    "floats": lambda batch: batch["attention_mask"] * 0.5,
    "float8": lambda batch: batch["attention_mask"].to(torch.float8_e4m3fn),
    "uint16": lambda batch: batch["attention_mask"].to(torch.uint16),
    "longer": lambda batch: torch.cat([1 - batch["attention_mask"], batch["attention_mask"]], 1),
}


@pytest.mark.parametrize("form", MASKS)
def test_every_form_of_mask(form):
    rnet = reader("mix")
    data = [{**batch, "real": batch["attention_mask"].bool()} for batch in DATA]
    recording = rnet.collect(
        data,
        rows=Tokens(mask=MASKS[form]),
        to_inputs=lambda batch: {"input_ids": batch["input_ids"]},
    )
    assert_tokens(recording, rnet.net, DATA, "mix")


def test_a_mask_in_the_middle():
    rnet = reader("mix")
    ids = torch.tensor([[5, 6, 7, 8], [9, 1, 2, 3]])
    mask = torch.tensor([[False, True, False, True], [True, False, True, True]])
    recording = rnet.collect([{"input_ids": ids, "attention_mask": mask}], rows=Tokens())
    wanted = {
        "sample": [0, 0, 1, 1, 1],
        "position": [0, 1, 0, 1, 2],
        "input_ids": [6, 8, 9, 2, 3],
    }
    assert_rows(recording, wanted)


def test_where_drops_tokens_that_still_count_in_positions():
    rnet = reader("mix")
    rows = Tokens(where=lambda batch: batch["input_ids"] % 2 == 0)
    recording = rnet.collect(DATA, rows=rows)
    whole = columns(DATA)
    kept = [place for place, number in enumerate(whole["input_ids"]) if number % 2 == 0]
    assert 0 < len(kept) < len(whole["sample"])
    assert_rows(recording, {name: [each[i] for i in kept] for name, each in whole.items()})
    values = tokens(seen(rnet.net, ["mix"], run_all(rnet.net, DATA))["mix"], DATA)
    assert torch.equal(recording["mix"], values[kept])
    # A sample may be left without rows.
    none = rnet.collect(DATA, rows=Tokens(where=lambda batch: batch["input_ids"] < 0))
    assert (none.num_rows, none.num_samples, len(none["mix"])) == (0, 9, 0)
    assert len(none.by_sample("mix")[3]) == 0


def test_fields_by_name_and_by_function():
    rnet = reader("mix")
    data = [{**b, "weight": b["input_ids"].to(torch.float16) / 8, "text": ["a"]} for b in DATA]
    rows = Tokens(
        fields={
            "weight": "weight",
            "next": lambda batch: batch["input_ids"].roll(-1, 1).to(torch.int32),
            "is_even": lambda batch: batch["input_ids"].numpy() % 2 == 0,
        }
    )
    recording = rnet.collect(
        data, rows=rows, to_inputs=lambda b: (b["input_ids"], b["attention_mask"])
    )
    assert list(recording.rows) == ["sample", "position", "weight", "next", "is_even"]
    found = [recording.rows[name] for name in ("weight", "next", "is_even")]
    assert [column.dtype for column in found] == [torch.float16, torch.int32, torch.bool]
    real = [batch["attention_mask"].bool() for batch in data]
    following = torch.cat([b["input_ids"].roll(-1, 1)[m] for b, m in zip(data, real, strict=True)])
    assert found[1].tolist() == following.tolist()
    assert found[0].tolist() == [number / 8 for number in columns(DATA)["input_ids"]]
    assert found[2].tolist() == [number % 2 == 0 for number in columns(DATA)["input_ids"]]
    # No fields at all.
    assert list(rnet.collect(DATA, rows=Tokens(fields=())).rows) == ["sample", "position"]


READER = reader("embed")

PACKED = torch.tensor(
    [
        [4, 4, 4, 9, 9, -1, 2],
        [7, 8, 7, 8, 8, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1],
        [0, 0, 0, 0, 0, 0, 0],
    ]
)


def packed_rows(segments: Tensor, real: Tensor) -> tuple[list[int], list[int], list[list[int]]]:
    """Go through packed documents by hand: sample, position and place of each row."""
    samples, positions, places = [], [], []
    number = 0
    for line, own in enumerate(segments.tolist()):
        for segment in dict.fromkeys(one for one in own if one >= 0):
            held = [p for p, one in enumerate(own) if one == segment and real[line, p]]
            samples += [number] * len(held)
            positions += range(len(held))
            places += [[line, place] for place in held]
            number += 1
    return samples, positions, places


@pytest.mark.parametrize("masked", ["no mask", "mask", "4-D mask"])
def test_each_segment_of_packed_documents_is_a_sample(masked):
    rnet = reader("mix")
    ids = padded(7, 7, 7, 7)["input_ids"]
    real = torch.ones(4, 7, dtype=torch.bool)
    batch = {"input_ids": ids, "documents": PACKED}
    if masked == "mask":
        real[0, 1] = real[3, 6] = False
        batch["attention_mask"] = real.long()
    elif masked == "4-D mask":
        batch["attention_mask"] = torch.ones(4, 1, 7, 7)
    recording = rnet.collect(
        [batch, batch],
        rows=Tokens(segments="documents"),
        to_inputs=lambda batch: batch["input_ids"],
        sample_ids=names_of(["abcdef", "ghijkl"]),
    )
    samples, positions, places = packed_rows(PACKED, real)
    line, place = torch.tensor(places).T
    (values,) = seen(rnet.net, ["mix"], lambda: rnet.net(ids))["mix"]
    assert torch.equal(recording["mix"], torch.cat([values[line, place]] * 2))
    wanted = {
        "sample": samples + [number + 6 for number in samples],
        "position": positions * 2,
        "input_ids": ids[line, place].tolist() * 2,
    }
    assert_rows(recording, wanted)
    assert list(recording.sample_ids) == list("abcdefghijkl")


@given(data=st.data())
@settings(max_examples=60)
def test_any_masks_segments_and_conditions(data):
    rnet = READER
    lines, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    shape = lines, size
    numbers = st.lists(st.integers(-1, 2), min_size=lines * size, max_size=lines * size)
    segments, chosen, real = (torch.tensor(data.draw(numbers)).view(shape) for _ in range(3))
    # No segment may be without tokens.
    real = (real > 0) | torch.tensor(
        [[place == own.index(one) for place, one in enumerate(own)] for own in segments.tolist()]
    )
    ids = torch.arange(1, lines * size + 1).view(shape)
    batch = {"input_ids": ids, "segments": segments, "keep": chosen > 0, "attention_mask": real}
    samples, positions, places = packed_rows(segments, real)
    kept = [row for row, (line, place) in enumerate(places) if chosen[line, place] > 0]
    recording = rnet.collect(
        [batch],
        rows=Tokens(segments="segments", where="keep"),
        to_inputs=lambda batch: batch["input_ids"],
    )
    wanted = {
        "sample": [samples[row] for row in kept],
        "position": [positions[row] for row in kept],
        "input_ids": [places[row][0] * size + places[row][1] + 1 for row in kept],
    }
    assert_rows(recording, wanted)
    assert recording.num_samples == len(set(samples))
    embedded = rnet.net.embed.weight[wanted["input_ids"]]
    assert torch.equal(recording["embed"], embedded.detach())


def names_of(words: list[str]) -> Any:
    given = iter(words)
    return lambda batch: list(next(given))


def all_real(batch: dict[str, Tensor]) -> list[list[bool]]:
    return [[True] * len(line) for line in batch["input_ids"]]


def test_under_another_default_device():
    rnet, rows = reader("mix"), Tokens(segments=lambda batch: batch["input_ids"] % 3, mask=all_real)
    wanted = rnet.collect(DATA, rows=rows)
    with torch.device("meta"):
        found = rnet.collect(DATA, rows=rows)
    assert torch.equal(found["mix"], wanted["mix"])
    assert_rows(found, {name: column.tolist() for name, column in wanted.rows.items()})


def test_what_the_net_is_given_says_how_many_positions_there_are():
    class Embedded(nn.Module):
        def forward(self, noise: Tensor, inputs_embeds: Tensor) -> Tensor:
            return inputs_embeds * 2

    rnet = recorder_of(Embedded().eval(), "0-1", input_data=[torch.ones(1), torch.ones(2, 3, 4)])
    x = torch.randn(2, 5, 4)
    recording = rnet.collect(
        [x], rows=Tokens(), to_inputs=lambda batch: {"noise": x, "inputs_embeds": batch}
    )
    assert torch.equal(recording["0-1"], (x * 2).flatten(0, 1))
    # A net that is fed by position alone.
    plain = recorder_of(nn.Linear(4, 3), "0-1", input_size=(2, 3, 4))
    assert plain.collect([x], rows=Tokens())["0-1"].shape == (10, 3)


def ids_of(batch: Any) -> Tensor:
    ids: Tensor = batch[0] if isinstance(batch, tuple) else batch
    return ids


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("mask", [None, "attention_mask"])
def test_texts_that_are_cut_on_their_way_to_the_net(side, mask):
    rnet, data = reader("mix"), batches((3, 8, 6), (4, 7), side=side)

    def cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = slice(0, 5) if side == "right" else slice(-5, None)
        return {name: value[:, kept] for name, value in batch.items()}

    recording = rnet.collect(data, rows=Tokens(mask=mask), to_inputs=cut)
    assert_tokens(recording, rnet.net, [cut(batch) for batch in data], "mix")
    # Of which positions is the mask, where it did not go along?
    with pytest.raises(CollectError, match=r"mask .*\(3, 8\) in batch 0.*\(3, 5\)"):
        rnet.collect(data, rows=Tokens(mask=mask), to_inputs=lambda batch: cut(batch)["input_ids"])
    for form in (lambda batch: batch["input_ids"], lambda batch: (batch["input_ids"], "label")):
        with pytest.raises(CollectError, match=r"mask .*\(3, 8\) in batch 0.*\(3, 5\)"):
            rnet.collect(
                [form(batch) for batch in data],
                rows=Tokens(mask=lambda batch: ids_of(batch) > 0),
                to_inputs=lambda batch: ids_of(batch)[:, :5],
            )


class Wrapped(nn.Module):
    """Hands on whatever it is given, as wrappers do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


def test_wrappers_that_hand_on_what_they_are_given():
    inner = reader("mix").net
    wrapped = Recorder(Wrapped(inner).eval(), input_data=[torch.ones(2, 9, dtype=torch.long)])
    wrapped.record("net.mix")
    wanted = tokens(seen(inner, ["mix"], run_all(inner, DATA))["mix"], DATA)
    for data in (DATA, [SimpleNamespace(**batch) for batch in DATA]):
        to_inputs = None if data is DATA else lambda batch: tuple(vars(batch).values())
        recording = wrapped.collect(data, rows=Tokens(), to_inputs=to_inputs)
        assert torch.equal(recording["net.mix"], wanted)
        assert_rows(recording, columns(DATA))


def test_scalars_that_go_in_come_out():
    rnet = recorder_of(nn.ReLU(), "0-1", input_size=(2, 4))
    x = torch.randn(2, 5)
    recording = rnet.collect([x], rows=Tokens(mask=lambda batch: batch > 0))
    assert torch.equal(recording["0-1"], x[x > 0])


# What is refused.


def same_error(rnet: Recorder, data: list[Any], match: str, tmp_path: Any, **options: Any) -> None:
    """See the same error with every store, and that nothing is left of it."""
    for store in ("host", f"disk:{tmp_path}/run"):
        with pytest.raises(CollectError, match=match):
            rnet.collect(data, store=store, **options)
    # Nothing has changed: the next collection is as if there had been none.
    recording = rnet.collect([DATA[0]], store="host", rows=Tokens())
    assert recording.num_rows == 12


def changed(number: int, **entries: Any) -> list[dict[str, Any]]:
    data = [dict(batch) for batch in DATA]
    data[number].update(entries)
    return data


ADDED = (1 - DATA[2]["attention_mask"]) * -1e9

REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "mask of another shape": (
        changed(1, real=torch.ones(2, 3)),
        {"mask": lambda batch: batch.get("real", batch["attention_mask"])},
        r"mask .*\(2, 3\) in batch 1.*\(2, 4\)",
    ),
    "mask of more lines": (
        DATA,
        {"mask": lambda batch: torch.ones(7, 4)},
        r"mask .*\(7, 4\) in batch 0.*\(3, 8\)",
    ),
    "4-D mask": (
        changed(1, attention_mask=torch.ones(2, 1, 4, 4)),
        {},
        r"mask .*\(2, 1, 4, 4\) in batch 1.*\(2, 4\)",
    ),
    "additive mask": (changed(2, attention_mask=ADDED), {}, "mask .*batch 2.*True for real rows"),
    "mask of NaN": (
        DATA,
        {"mask": lambda batch: batch["attention_mask"] * torch.nan},
        "mask .*batch 0.*True for real rows",
    ),
    "missing mask": (DATA, {"mask": "real"}, "mask='real', but batch 0 has no"),
    "mask that is no tensor": (DATA, {"mask": lambda batch: "yes"}, "mask .* is a str"),
    "empty sequence": (
        changed(2, attention_mask=DATA[2]["attention_mask"] * torch.tensor([[1], [1], [0], [1]])),
        {},
        "sample 2 of batch 2 is empty",
    ),
    "unknown field": (DATA, {"fields": ("weight",)}, "weight.*batch 0 has no"),
    "field that one batch lacks": (
        changed(0, weight=DATA[0]["input_ids"]),
        {"fields": ["weight"]},
        "weight.*batch 1",
    ),
    "field of another shape": (
        DATA,
        {"fields": {"last": lambda batch: batch["input_ids"][:, -3:]}},
        r"field 'last' of rows= has shape \(3, 3\) in batch 0.*\(3, 8\)",
    ),
    "missing segments": (DATA, {"segments": "documents"}, "segments='documents'"),
    "segments of another shape": (
        DATA,
        {"segments": lambda batch: batch["input_ids"][:, :2]},
        r"segments .*\(3, 2\) in batch 0.*\(3, 8\)",
    ),
    "segments of floats": (
        DATA,
        {"segments": lambda batch: batch["input_ids"] * 1.0},
        "segments .*float32.*integers",
    ),
    "where of another shape": (
        DATA,
        {"where": lambda batch: torch.ones(3)},
        r"where .*\(3,\) in batch 0.*\(3, 8\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_of_a_batch(case, tmp_path):
    data, given, match = REFUSED[case]
    same_error(
        reader("mix"),
        data,
        match,
        tmp_path,
        rows=Tokens(**given),
        to_inputs=lambda batch: batch["input_ids"],
    )


class Given(nn.Module):
    """Takes ids, or what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.mix = nn.Linear(4, 3)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.mix(self.embed(input_ids) if inputs_embeds is None else inputs_embeds)
        return out


@pytest.mark.parametrize("resumes", [False, True])
def test_columns_are_those_of_the_first_batch(resumes, tmp_path):
    rnet = Recorder(Given().eval(), input_data={"input_ids": torch.ones(2, 3, dtype=torch.long)})
    rnet.record("mix")
    ids = [{"input_ids": batch["input_ids"]} for batch in DATA]
    embedded = [{"inputs_embeds": rnet.net.embed(one["input_ids"]).detach()} for one in ids]
    store = Disk(tmp_path / "run", chunk_bytes=1)

    def collect(data: list[Any]) -> Recording:
        if resumes:
            with pytest.raises(InterruptedError):
                rnet.collect(failing_after(data, 1), store=store, rows=Tokens())
        return rnet.collect(data, store=store, rows=Tokens(), resume=resumes)

    with pytest.raises(CollectError, match="batch 1 has no field 'input_ids'"):
        collect([ids[0], *embedded[1:]])
    # Nothing that was durable is lost by it.
    recording = open_recording(tmp_path / "run", verify=True)
    assert (recording.num_rows, recording.complete) == (24, False)
    store = Disk(tmp_path / "other", chunk_bytes=1)
    found = collect([embedded[0], *ids[1:]])
    assert list(found.rows) == ["sample", "position"]
    wanted = torch.cat([rnet.net(**batch).flatten(0, 1) for batch in ids])
    assert torch.equal(found["mix"][:], wanted)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"fields": "input_ids"}, r"fields='input_ids'.*\(\"input_ids\",\)"),
        ({"fields": {"a": 3}}, r"fields: 'a'=3: give a name"),
        ({"fields": 3}, "fields=3"),
        ({"fields": ["sample"]}, "'sample', .*a column that rows always have"),
        ({"mask": 3}, "mask=3"),
        ({"where": torch.ones(2)}, "where=tensor"),
        *[({"fields": {name: "input_ids"}}, "be a name") for name in ("", ".", "..", "a\0")],
    ],
)
def test_arguments_that_are_no_names(given, match):
    with pytest.raises(CollectError, match=match):
        Tokens(**given)


@pytest.mark.parametrize(
    ("selector", "shown"),
    [
        ("pool", r"\(3, 4\), .*\[batch, positions, \.\.\.\].*\(3, 8, \.\.\.\).*transform="),
        ("maps", r"\(3, 3, 8, 8\), which looks like an attention map.*transform="),
    ],
)
@pytest.mark.parametrize("reduce", [False, True])
def test_layers_of_other_shapes_are_named(selector, shown, reduce, tmp_path):
    rnet = reader("mix", selector)
    options = {"reduce": Mean()} if reduce else {}
    match = rf"layer .*{selector}.*{shown}"
    for store in ("host", f"disk:{tmp_path}/run"):
        with pytest.raises(CollectError, match=match):
            rnet.collect(DATA, store=store, rows=Tokens(), **options)


def test_what_a_transform_makes_of_an_attention_map_is_believed():
    # As many maps as positions: [batch, positions, maps, positions] looks like the map itself.
    rnet = reader("maps")
    said = rnet.collect(
        [padded(3, 3)], rows=Tokens(), transform=lambda activation, batch: activation.mT
    )
    kept = padded(3, 3)["attention_mask"].bool()
    rnet(**padded(3, 3))
    assert torch.equal(said["maps"], rnet.activations["maps"].mT[kept])


def test_images_are_no_sequences():
    rnet = recorder_of(nn.Conv2d(3, 5, 3), "0-1", input_size=(2, 3, 8, 8))
    with pytest.raises(CollectError, match=r"layer 0-1.*no sequence.*mask="):
        rnet.collect([torch.ones(2, 3, 8, 8)], rows=Tokens())
    # Whoever says what is real says how many positions there are.
    recording = rnet.collect(
        [torch.ones(2, 3, 8, 8)],
        rows=Tokens(mask=lambda batch: torch.ones(2, 36)),
        transform=lambda activation, batch: activation.flatten(2).mT,
    )
    assert recording["0-1"].shape == (72, 5)


class Pair(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(50, 4)
        self.decoder = nn.Embedding(50, 4)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        read: Tensor = self.encoder(input_ids).mean(1, keepdim=True)
        return read + self.decoder(decoder_input_ids)


def test_encoder_or_decoder():
    rnet = Recorder(Pair().eval(), input_data=[torch.ones(2, 3).long()] * 4)
    first, second = padded(3, 5), padded(4, 2, seed=5)
    batch = {**first, **{f"decoder_{name}": value for name, value in second.items()}}
    rnet.record("encoder")
    with pytest.raises(CollectError, match=r"layer 1-1 encoder.*decoder_attention_mask"):
        rnet.collect([batch], rows=Tokens())
    recording = rnet.collect([batch], rows=Tokens(mask="attention_mask"))
    wanted = tokens(seen(rnet.net, ["encoder"], lambda: rnet.net(**batch))["encoder"], [first])
    assert torch.equal(recording["encoder"], wanted)
    assert_rows(recording, columns([first]))
    rnet.record("decoder")
    for mask in ("decoder_attention_mask", lambda batch: batch["decoder_attention_mask"]):
        recording = rnet.collect([batch], rows=Tokens(mask=mask))
        wanted = tokens(seen(rnet.net, ["decoder"], lambda: rnet.net(**batch))["decoder"], [second])
        assert torch.equal(recording["decoder"], wanted)
        assert recording.rows["decoder_input_ids"].tolist() == columns([second])["input_ids"]
    # Layers of the other half don't have these positions, also where these are as many.
    same = {**batch, **padded(3, 4)}
    for name, mask in (("encoder", "decoder_attention_mask"), ("decoder", "attention_mask")):
        rnet.record(name)
        with pytest.raises(CollectError, match=rf"belongs to the {name}, .* mask of its half"):
            rnet.collect([same], rows=Tokens(mask=mask))
    # Without a mask all is real to the net, and so it is here.
    del batch["decoder_attention_mask"]
    recording = rnet.collect([batch], rows=Tokens(mask="decoder_attention_mask"))
    [wanted] = seen(rnet.net, ["decoder"], lambda: rnet.net(**batch))["decoder"]
    assert torch.equal(recording["decoder"], wanted.flatten(0, 1))
    batch["decoder_attention_mask"] = second["attention_mask"]

    rnet.record("encoder")
    with pytest.raises(CollectError, match=r"encoder.*\(2, 5, 4\).*\(2, 4, \.\.\.\)"):
        rnet.collect([batch], rows=Tokens(mask="decoder_attention_mask"))


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_comes_with_each_batch_or_with_none(first: bool, tmp_path):
    data = [padded(3, 4), padded(4, 2, seed=1)]
    del data[first]["attention_mask"]
    rnet = reader()
    with pytest.raises(CollectError, match=f"batch 1 {'lacks' if first else 'has'} 'attention_m"):
        rnet.collect(data, rows=Tokens(), store=f"disk:{tmp_path}/run")
    assert open_recording(tmp_path / "run").num_samples == 2
    said = Tokens(mask=lambda batch: batch.get("attention_mask", batch["input_ids"] > 0))
    assert rnet.collect(data, rows=said).num_rows == 13


def test_batches_whose_keys_are_attributes_may_lack_some():
    class Attributes(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    data = [Attributes(padded(3, 4))]
    assert reader().collect(data, rows=Tokens()).num_rows == 7
    del data[0]["attention_mask"]
    assert reader().collect(data, rows=Tokens()).num_rows == 8


def test_frames_are_fewer_than_what_the_net_is_given_of_a_sound():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 3, stride=2), nn.Flatten(2))
    rnet = recorder_of(net, "1", input_size=(2, 11))
    sounds, real = torch.randn(3, 9), torch.arange(4) < torch.tensor([[4], [2], [3]])
    frames = rnet.collect(
        [sounds],
        rows=Tokens(mask=lambda batch: real),
        transform=lambda activation, batch: activation.mT,
    )
    assert torch.equal(frames["1"], net[:2](sounds).mT[real])
    # Ids are tokens one by one, of which the mask has too few.
    ids = recorder_of(nn.Embedding(9, 2), "0-1", input_data=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(CollectError, match=r"\(3, 9, 2\).*here \(3, 4, \.\.\.\)"):
        ids.collect([sounds.abs().long()], rows=Tokens(mask=lambda batch: real))


HEADS = 4


class Turning(nn.Module):
    """Has positions in dimension 0, as recurrent networks do, in 1, behind heads, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 8)
        self.turned, self.split, self.queries = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        self.turned(x.transpose(0, 1))
        self.split(x.unflatten(2, (HEADS, 2)).transpose(1, 2))
        self.queries(x.mean(1, keepdim=True).expand(-1, HEADS, -1))
        return x


def square() -> dict[str, Tensor]:
    """A batch of as many samples as positions, and as heads."""
    return padded(*[HEADS] * HEADS)


def recorder(*names: str, labelled_with: dict[str, Tensor] | None = None) -> Recorder:
    torch.manual_seed(0)
    return recorder_of(Turning().eval(), *names, input_data=labelled_with or square())


LABEL = r"may fit by chance \(label the net with inputs of other lengths\).*transform="


@pytest.mark.parametrize("name", ["turned", "split", "queries", "embed"])
@pytest.mark.parametrize("by_others", [False, True])
def test_lengths_that_tell_nothing_are_refused(name: str, by_others: bool):
    rnet = recorder(name)

    def run() -> None:
        if by_others:
            with rnet.collecting(rows=Tokens()):
                rnet.net(**square())
        else:
            rnet.collect([square()], rows=Tokens())

    with pytest.raises(CollectError, match=rf"{name}\b.* {LABEL}"):
        run()


@pytest.mark.parametrize("reduce", [None, reductions.Mean()])
def test_other_lengths_at_labelling_or_before_leave_no_doubt(reduce: reductions.Mean | None):
    batches = [padded(*[HEADS + 2] * HEADS), square()]
    expected = torch.cat(
        [recorder("embed").net.embed(batch["input_ids"]).flatten(0, 1) for batch in batches]
    ).detach()
    for rnet, data in (
        (recorder("embed", labelled_with=padded(3, 2)), batches[::-1]),
        (recorder("embed"), batches),
    ):
        kept = rnet.collect(data, rows=Tokens(), reduce=reduce)["embed"]
        if reduce is None:
            assert torch.equal(kept.sort(0).values, expected.sort(0).values)
        else:
            torch.testing.assert_close(kept, expected.mean(0))


@pytest.mark.parametrize("name", ["turned", "split", "queries"])
def test_what_does_not_follow_the_positions_is_refused(name: str):
    rnet = recorder(name, labelled_with=padded(3, 2))
    with pytest.raises(CollectError, match=rf"{name}\b.* fits by chance.*transform="):
        rnet.collect([square()], rows=Tokens())


class Captioned(nn.Module):
    """A text and an image of patches, and as many tokens as patches by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.patch = nn.Embedding(99, 8), nn.Conv2d(3, 8, 2, stride=2)
        self.seen, self.read = nn.Identity(), nn.Identity()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        seen = self.seen(self.patch(pixel_values).flatten(2).mT)
        return self.read(self.embed(input_ids) + seen.mean(1, keepdim=True))


def test_an_image_with_as_many_patches_as_a_text_has_tokens():
    torch.manual_seed(0)
    batch = {**padded(4, 2), "pixel_values": torch.randn(2, 3, 4, 4)}
    for name in ("seen", "read"):
        rnet = recorder_of(Captioned().eval(), name, input_data=batch)
        with pytest.raises(CollectError, match=rf"{name}\b.* {LABEL}"):
            rnet.collect([batch], rows=Tokens())
    shorter = {**padded(3, 2), "pixel_values": batch["pixel_values"]}
    rnet = recorder_of(Captioned().eval(), "read", input_data=shorter)
    recording = rnet.collect([batch], rows=Tokens())
    with torch.no_grad():
        del batch["attention_mask"]
        read = rnet.net(**batch)
    assert torch.equal(recording["read"], torch.cat([read[0], read[1, :2]]))


class Placed(nn.Module):
    """Gives all samples the same at labelling, without a mask, and each its own with one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(99, 8), nn.Embedding(99, 8)
        self.pair = nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            places = torch.arange(input_ids.shape[1])[None]
        else:
            places = attention_mask.cumsum(1) * attention_mask
        x: Tensor = self.embed(input_ids)
        x = x + self.place(places)
        self.pair(x[:1] if attention_mask is None else torch.stack([x.amin(0), x.amax(0)]))
        return x


def placed(*names: str, positions: int) -> Recorder:
    torch.manual_seed(0)
    ids = torch.ones(3, positions, dtype=torch.long)
    return recorder_of(Placed().eval(), *names, input_data=ids)


@pytest.mark.parametrize("positions", [5, 7])
def test_positions_that_all_samples_shared_at_labelling(positions: int):
    # The rows of `pair` are as many as the samples by chance; nothing tells it from `place`.
    for name in ("place", "pair"):
        with pytest.raises(CollectError, match=rf"{name}\b.* fits? by chance.*transform="):
            placed(name, positions=positions).collect([padded(5, 3)], rows=Tokens())
    # Of one sample, neither.
    with pytest.raises(CollectError, match=r"place\b.* fits? by chance.*transform="):
        placed("place", positions=positions).collect([padded(5)], rows=Tokens())

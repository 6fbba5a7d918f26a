"""What goes into the net, the ids of samples, and warnings of what is likely to be a mistake."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from scio_recorder import CollectError, Nodes, Recorder, RecordingError, Tokens, compare, reductions
from scio_recorder.errors import CollectWarning
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.options import CollectOptions
from scio_recorder.reductions import Digest, Mean
from scio_recorder.stores import Disk
from tests.capture.test_watch_libraries import gpt2
from tests.recording.nets import Sizes, batches, failing_after, recorder, recorder_of


class Masked(nn.Module):
    """Takes a mask as well, by position or by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.inner(x if mask is None else x * mask)
        return out * scale


def masked() -> Recorder:
    torch.manual_seed(3)
    return recorder_of(Masked().eval(), "0-1", input_size=(2, 4))


@pytest.mark.parametrize("pair", [Inputs, lambda args, kwargs: (args, kwargs)])
def test_positional_and_keyword_inputs_together(pair):
    rnet, data = masked(), [(x, (x > 0).float()) for x in batches(3, 2)]
    recording = rnet.collect(
        data, to_inputs=lambda batch: pair((batch[0],), {"mask": batch[1], "scale": 2.0})
    )
    with torch.no_grad():
        wanted = [rnet.net.inner(x * mask) * 2 for x, mask in data]
    assert torch.equal(recording["0-1"], torch.cat(wanted))


SQUARE = nn.Linear(4, 4)
# Where layers have as many outputs as inputs, nothing but the labelling tells a sample.
SAMPLES = [torch.randn(4) for _ in range(3)]


class Keywords(nn.Module):
    """Takes its inputs by keyword, in another order than batches have them."""

    def forward(self, scale: Tensor, x: Tensor) -> Tensor:
        return SQUARE(x) * scale


@pytest.mark.parametrize(
    ("net", "labelled", "data", "options"),
    [
        (SQUARE, {"input_size": (2, 4)}, SAMPLES, {}),
        (SQUARE, {"input_size": (2, 4)}, iter(SAMPLES), {"reduce": reductions.Mean()}),
        (SQUARE, {"input_size": (2, 4)}, list(TensorDataset(torch.randn(5, 4))), {}),
        (SQUARE, {"input_size": (2, 4)}, DataLoader(SAMPLES, batch_size=None), {}),
        (SQUARE, {"input_size": (2, 4)}, SAMPLES, {"to_inputs": lambda batch: batch}),
        (nn.Conv2d(3, 3, 1), {"input_size": (1, 3, 8, 8)}, [torch.randn(3, 6, 5)], {}),
        # An image without colours: its only channel would count as a sample.
        (nn.Softmax(dim=1), {"input_size": (2, 1, 8, 8)}, [torch.randn(1, 8, 8)], {}),
        (
            Keywords(),
            {"input_data": {"x": torch.ones(2, 4), "scale": torch.ones(2, 1)}},
            [{"x": torch.randn(4), "scale": torch.tensor(2.0)}],
            {},
        ),
    ],
)
def test_samples_without_a_batch_are_refused(net, labelled, data, options):
    rnet = recorder_of(net, "0-1", **labelled)
    with pytest.raises(CollectError, match=r"batch 0 has shape.*labelled with.*DataLoader.*stack"):
        rnet.collect(data, **options)


def test_a_list_of_samples_in_mappings_is_named():
    rnet = Recorder(Keywords(), input_data={"x": torch.ones(2, 4), "scale": torch.ones(2, 1)})
    rnet.record("0-1")
    batch = {"x": torch.randn(3, 4), "scale": torch.ones(3, 1)}
    (message,) = warned(rnet, [[batch, batch], [batch, batch]])
    assert "a list of 2 mappings with the same keys" in message
    assert not warned(rnet, [(batch, {"label": 1})])


def test_what_is_only_similar_to_a_sample_is_collected_with_a_warning():
    rnet = recorder_of(SQUARE, "0-1", input_size=(2, 5, 4))
    rows = torch.randn(3, 4)
    (message,) = warned(rnet, [rows, rows])
    assert "(3, 4)" in message
    assert "(2, 5, 4)" in message
    with pytest.warns(CollectWarning):
        assert torch.equal(rnet.collect([rows])["0-1"], SQUARE(rows))


@pytest.mark.parametrize(
    ("net", "labelled", "data", "options"),
    [
        # A batch of one sample, which can't be mistaken for a sample.
        (SQUARE, {"input_size": (2, 3, 4)}, [torch.randn(1, 4)], {}),
        # Ids say how many samples there are.
        (
            SQUARE,
            {"input_size": (2, 3, 4)},
            [torch.randn(3, 4)],
            {"sample_ids": lambda batch: range(3)},
        ),
        # So do rows.
        (SQUARE, {"input_size": (2, 3, 4)}, [torch.randn(3, 4)], {"rows": Nodes()}),
        # Labelled without a batch, or with fewer dimensions.
        (SQUARE, {"input_size": (4,)}, [torch.randn(5, 4)], {}),
        (SQUARE, {"input_size": (2, 4)}, [torch.randn(2, 5, 4)], {}),
        (
            nn.Embedding(9, 4),
            {"input_data": torch.ones(2, dtype=torch.long)},
            [torch.arange(9)],
            {},
        ),
        # What a keyword lacks says nothing of the other one.
        (
            Masked(),
            {"input_data": {"x": torch.ones(2, 4), "mask": torch.ones(2, 4)}},
            [{"mask": torch.ones(4), "x": torch.randn(3, 4)}],
            {"sample_ids": lambda batch: range(len(batch["x"]))},
        ),
    ],
)
def test_other_inputs_are_collected_without_a_word(net, labelled, data, options):
    rnet = recorder_of(net, "0-1", **labelled)
    assert warned(rnet, data, **options) == []


def test_samples_are_refused_around_passes_of_others_and_in_comparisons():
    rnet = recorder_of(SQUARE, "0-1", input_size=(2, 4))
    with pytest.raises(CollectError, match="batch 0 has shape"), rnet.collecting():
        rnet.net(SAMPLES[0])
    with pytest.raises(CollectError, match="batch 0 has shape"):
        compare(rnet, rnet, SAMPLES)


def test_a_dataset_of_batches_and_one_sample_at_a_time():
    rows = torch.randn(6, 3)
    rnet = recorder_of(nn.Linear(3, 3), "*", input_size=(2, 3))
    wanted = rnet.collect([rows])["0-1"]
    of_batches = DataLoader(TensorDataset(rows.view(3, 2, 3)), batch_size=None)
    torch.testing.assert_close(rnet.collect(of_batches)["0-1"], wanted)
    one_by_one = rnet.collect(TensorDataset(rows), to_inputs=lambda item: item[0][None])
    torch.testing.assert_close(one_by_one["0-1"], wanted)


@pytest.mark.parametrize("ids", [[[1, 2], [3, 1]], [[1, 2], [2, 3]], [["b", "a"], ["c", "b"]]])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_an_id_that_comes_twice(ids, store, tmp_path):
    given = iter(ids)
    where = f"disk:{tmp_path}/run" if store == "disk" else store
    twice = (set(ids[0]) & set(ids[1])).pop()
    with pytest.raises(CollectError, match=f"batch 1 has the id {twice!r}"):
        recorder("0").collect(batches(2, 2), store=where, sample_ids=lambda batch: next(given))


def test_ids_in_any_order_are_kept(tmp_path):
    rnet, data = recorder("0"), batches(2, 2, 1)
    ids = [[5, 9], [3, 10], [4]]
    given = iter(ids)
    recording = rnet.collect(data, sample_ids=lambda batch: next(given))
    assert list(recording.sample_ids) == [5, 9, 3, 10, 4]
    # What is durable already comes again on resuming, and is not taken for another sample.
    store = Disk(tmp_path / "run", chunk_bytes=1)
    given, interrupted = iter(ids), failing_after(data, 2)
    with pytest.raises(InterruptedError):
        rnet.collect(interrupted, store=store, sample_ids=lambda batch: next(given))
    with pytest.raises(RecordingError, match="already"):
        rnet.collect(data, store=store, sample_ids=lambda batch: next(given))
    given = iter(ids)
    resumed = rnet.collect(data, store=store, sample_ids=lambda batch: next(given), resume=True)
    assert list(resumed.sample_ids) == [5, 9, 3, 10, 4]


def warned(rnet: Recorder, data: list[Any], **options: Any) -> list[str]:
    """Return what a collection warns of, and check that it is said to come from here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rnet.collect(data, **options)
    assert {warning.category for warning in caught} <= {CollectWarning}
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def test_a_second_input_that_stays_out_is_said_once():
    rnet, data = masked(), [(x, (x > 0).float()) for x in batches(3, 3, 2)]
    (message,) = warned(rnet, data)
    for part in ("only batch[0]", "(3, 4)", "to_inputs=lambda batch: tuple(batch[:2])"):
        assert part in message
    both = rnet.collect(data, to_inputs=lambda batch: tuple(batch[:2]))
    with torch.no_grad():
        assert torch.equal(both["0-1"], torch.cat([rnet.net(x, mask) for x, mask in data]))
    # Whoever names it means it.
    assert warned(rnet, data, to_inputs=lambda batch: batch[0]) == []


class Option(nn.Module):
    """Its second parameter is no place for a tensor."""

    def forward(self, x: Tensor, return_more: bool = False) -> Tensor:
        return x * 2


class Labelled(nn.Module):
    """Its second parameter is for labels, which only a loss needs."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("net", "second"),
    [
        (nn.ReLU(), torch.ones(3, 4)),
        (nn.Sequential(nn.ReLU()), torch.ones(3, 4)),
        (Option(), torch.ones(3, 4)),
        (Labelled(), torch.ones(3, 4)),
        (Masked(), torch.tensor([0, 1, 2])),
        (Masked(), torch.ones(4)),
        (Masked(), ["a", "b", "c"]),
        (Masked(), None),
    ],
)
def test_labels_are_no_second_input(net, second):
    rnet = recorder_of(net.eval(), "0-1", input_size=(3, 4))
    assert warned(rnet, [(torch.ones(3, 4), second)]) == []
    assert warned(rnet, [torch.ones(3, 4)]) == []
    assert warned(rnet, [{net_input(net): torch.ones(3, 4)}]) == []


def net_input(net: nn.Module) -> str:
    return "x" if isinstance(net, Option | Labelled | Masked) else "input"


DIFFERING = [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()]
ALIKE = [
    nn.Linear(4, 4),
    nn.Dropout(0.0),
    nn.LayerNorm(4),
    nn.BatchNorm1d(4, track_running_stats=False),
]


@pytest.mark.parametrize("layer", DIFFERING + ALIKE, ids=str)
def test_layers_that_differ_in_training_mode_are_named(layer):
    rnet = recorder_of(nn.Sequential(nn.Linear(4, 4), layer).train(), "0", input_size=(3, 4))
    said = warned(rnet, batches(3, 2))
    assert len(said) == (layer in DIFFERING)
    assert all(f"1 ({type(layer).__name__})" in text and "net.eval()" in text for text in said)
    rnet.net.eval()
    assert warned(rnet, batches(3, 2)) == []
    # One that is left in training mode is meant to be.
    layer.train()
    assert warned(rnet, batches(3, 2)) == []


def test_a_warning_that_is_an_error_leaves_nothing_behind(tmp_path):
    rnet = recorder_of(nn.Sequential(nn.Dropout(0.5)).train(), "0", input_size=(3, 4))
    store = f"disk:{tmp_path}/run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CollectWarning):
            rnet.collect(batches(3), store=store)
    rnet.net.eval()
    assert rnet.collect(batches(3), store=store).complete


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"input": torch.ones(3, 2), "label": 0}, r"takes no 'label'.*for name in \('input',\)"),
        ({"image": torch.ones(3, 2)}, r"takes no 'image'.*lambda batch: batch\['image'\]"),
    ],
)
def test_the_advice_for_entries_that_forward_does_not_take_works(batch, match) -> None:
    rnet = recorder_of(nn.ReLU(), "0-1", input_size=(1, 2))
    with pytest.raises(CollectError, match=match) as caught:
        rnet.collect([batch])
    to_inputs = eval(str(caught.value).partition("to_inputs=")[2])
    assert torch.equal(rnet.collect([batch], to_inputs=to_inputs)["0-1"], torch.ones(3, 2))


def test_a_type_error_of_the_net_itself_is_its_own() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("of its own")

    odd = recorder_of(nn.ReLU(), "0-1", input_size=(1, 2))
    odd.net.forward = Odd().forward
    with pytest.raises(TypeError, match="of its own"):
        odd.collect([{"x": torch.ones(3, 2)}])


@pytest.mark.parametrize(
    ("every", "most", "number"), [(1, None, 7), (3, None, 3), (3, 2, 2), (9, None, 1), (2, 9, 4)]
)
def test_how_many_batches_come_is_known_before_they_do(every, most, number):
    feed = Feed([torch.ones(2, 4)] * 7, CollectOptions(every=every, max_batches=most))
    assert feed.num_batches == sum(is_taken for _, is_taken in feed) == number


LEFT = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}
PLACES = (LEFT["attention_mask"].cumsum(-1) - 1).clamp(min=0)


def first_of(activation: Any, batch: Any) -> Tensor:
    first: Tensor = activation[0] if isinstance(activation, tuple) else activation
    return first


@pytest.mark.parametrize("rows", [None, Tokens()])
def test_padding_on_the_left_that_is_counted_is_said_once(rows: Tokens | None) -> None:
    rnet = recorder_of(gpt2().eval(), "transformer.h.0", input_data=LEFT)
    padded_right = {name: value.flip(1) for name, value in LEFT.items()}
    collect = partial(rnet.collect, rows=rows, transform=None if rows else first_of)
    with pytest.warns(CollectWarning, match="padded on the left") as caught:
        collect([padded_right, LEFT, LEFT])
    assert len(caught) == 1
    for quiet in ([padded_right], [{**LEFT, "position_ids": PLACES}], [LEFT["input_ids"]]):
        collect(quiet)
    # A first column that nobody has, as of a text without tokens, is no padding before a text.
    nothing = {**LEFT, "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}
    rnet.collect([nothing], transform=first_of)


def test_what_the_warning_says_makes_left_padding_as_if_it_were_not_there() -> None:
    rnet = recorder_of(gpt2().eval(), "transformer.h.0", input_data=LEFT)
    alone = {name: value[1:, 2:] for name, value in LEFT.items()}
    rnet(**alone)
    expected = rnet.activations["transformer.h.0"][0].detach()
    with pytest.warns(CollectWarning, match=r"\(attention_mask.cumsum\(-1\) - 1\).clamp\(min=0\)"):
        counted = rnet.collect([LEFT], rows=Tokens()).by_sample("transformer.h.0")[1]
    given = rnet.collect([{**LEFT, "position_ids": PLACES}], rows=Tokens())
    torch.testing.assert_close(given.by_sample("transformer.h.0")[1], expected)
    assert not torch.allclose(counted, expected, atol=1e-3)


def test_a_wrapper_that_hands_positions_on_is_warned_of() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2().eval()

        def forward(self, **kwargs: Any) -> Any:
            return self.model(**kwargs)

    rnet = recorder_of(Wrapper(), "model.transformer.h.0", input_data=LEFT)
    with pytest.warns(CollectWarning, match="padded on the left"):
        rnet.collect([LEFT], rows=Tokens())


def test_a_network_that_takes_no_positions_is_let_be() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.embed(input_ids)

    rnet = recorder_of(Net(), "embed", input_data=LEFT)
    rnet.collect([LEFT], rows=Tokens())


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pool = nn.Embedding(20, 3), nn.AdaptiveAvgPool1d(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        pooled: Tensor = self.pool(self.embed(input_ids).mT).flatten(1)
        return pooled


def texts_recorder(selector: str = "embed") -> Recorder:
    return recorder_of(Texts(), selector, input_data=LEFT)


def right(*lengths: int, dtype: torch.dtype = torch.long) -> Any:
    """Return texts padded to four on the right, as a tokenizer does."""
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    return BatchEncoding({"input_ids": mask * 7, "attention_mask": mask.to(dtype)})


FORMS: dict[str, Any] = {
    "encoding": {},
    "dictionary": {"batch": dict},
    "keyword": {"to_inputs": dict},
    "keyword of a tuple": {
        "batch": lambda batch: tuple(batch.values()),
        "to_inputs": lambda pair: dict(zip(("input_ids", "attention_mask"), pair, strict=True)),
    },
    "argument by place": {
        "batch": lambda batch: tuple(batch.values()),
        "to_inputs": lambda batch: batch,
    },
    "entry that the net does not get": {"to_inputs": lambda batch: batch["input_ids"]},
}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("reduce", [None, Mean(), [Digest(), Mean()]])
def test_padding_that_is_kept_is_said_once(options: dict[str, Any], reduce: Any) -> None:
    options = dict(options)
    form = options.pop("batch", lambda batch: batch)
    collect = partial(texts_recorder().collect, reduce=reduce, **options)
    padded = [form(right(4, 4)), form(right(4, 2)), form(right(1, 3))]
    with pytest.warns(CollectWarning, match=r"batch 1 has zeros.*rows=Tokens\(\)") as caught:
        collect(padded)
    assert len(caught) == 1
    collect([form(right(4, 4)), form(right(4, 4, 4))])
    collect(padded, rows=Tokens(mask=lambda batch: torch.ones(2, 4)))


def test_padding_that_is_no_mistake() -> None:
    padded, rnet = [right(4, 2)], texts_recorder()
    rnet.collect(padded, reduce=Sizes())
    rnet.collect(padded, reduce=Digest())
    rnet.collect(padded, transform=lambda activation, batch: activation[:, 0])
    # It has no positions.
    texts_recorder("0-1").collect(padded)
    # Masks that are added to scores, and masks of pairs, are no masks of padding.
    added = [{**right(4, 4), "attention_mask": torch.tensor([[0.0] * 4, [0.0, 0.0, -1e4, -1e4]])}]
    pairs = [{**right(4, 4), "attention_mask": torch.ones(2, 4, 4).tril()}]
    for mask in (added, pairs):
        rnet.collect(mask)
    with pytest.warns(CollectWarning, match="has zeros"):
        rnet.collect([right(4, 2, dtype=torch.bool)])

"""Layers whose lengths are those of positions by chance, at labelling as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import CollectError, Recorder, Tokens, reductions
from tests.recording.tables import padded

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
    rnet = Recorder(Turning().eval(), input_data=labelled_with or square())
    rnet.record(*names)
    return rnet


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
    for rnet, given in (
        (recorder("embed", labelled_with=padded(3, 2)), batches[::-1]),
        (recorder("embed"), batches),
    ):
        kept = rnet.collect(given, rows=Tokens(), reduce=reduce)["embed"]
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
        rnet = Recorder(Captioned().eval(), input_data=batch)
        rnet.record(name)
        with pytest.raises(CollectError, match=rf"{name}\b.* {LABEL}"):
            rnet.collect([batch], rows=Tokens())
    shorter = {**padded(3, 2), "pixel_values": batch["pixel_values"]}
    rnet = Recorder(Captioned().eval(), input_data=shorter)
    rnet.record("read")
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
    rnet = Recorder(Placed().eval(), input_data=ids)
    rnet.record(*names)
    return rnet


@pytest.mark.parametrize("positions", [5, 7])
def test_positions_that_all_samples_shared_at_labelling(positions: int):
    # The rows of `pair` are as many as the samples by chance; nothing tells it from `place`.
    for name in ("place", "pair"):
        with pytest.raises(CollectError, match=rf"{name}\b.* fits? by chance.*transform="):
            placed(name, positions=positions).collect([padded(5, 3)], rows=Tokens())
    # Of one sample, neither.
    with pytest.raises(CollectError, match=r"place\b.* fits? by chance.*transform="):
        placed("place", positions=positions).collect([padded(5)], rows=Tokens())

"""Layers whose lengths are those of positions by chance, at labelling as well."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import CollectError, Recorder, Tokens
from tests.recording.collect.tables import padded

HEADS = 4


class Turning(nn.Module):
    """Has positions in dimension 0, as recurrent networks do, in 1, behind heads, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 8)
        self.turned, self.split, self.queries = nn.Identity(), nn.Identity(), nn.Identity()
        self.score, self.normed = nn.Identity(), nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        x = self.embed(input_ids)
        x = self.normed(x.mT).mT
        self.turned(x.transpose(0, 1))
        self.split(x.unflatten(2, (HEADS, 2)).transpose(1, 2))
        self.queries(x.mean(1, keepdim=True).expand(-1, HEADS, -1))
        return self.score(x.sum(-1))


def square() -> dict[str, Tensor]:
    """A batch of as many samples as positions, and as heads."""
    return padded(*[HEADS] * HEADS)


def recorder(*names: str) -> Recorder:
    torch.manual_seed(0)
    rnet = Recorder(Turning().eval(), input_data=square())
    rnet.record(*names)
    return rnet


@pytest.mark.parametrize("name", ["turned", "split", "queries"])
@pytest.mark.parametrize("by_others", [False, True])
def test_lengths_that_agree_by_chance_are_refused(name: str, by_others: bool):
    rnet = recorder(name)

    def run() -> None:
        if by_others:
            with rnet.collecting(rows=Tokens()):
                rnet.net(**square())
        else:
            rnet.collect([square()], rows=Tokens())

    with pytest.raises(CollectError, match=rf"{name}\b.* fits by chance.*transform="):
        run()


def test_what_follows_the_positions_is_kept():
    rnet, batch = recorder("embed", "score"), square()
    batch["attention_mask"][1, 2:] = 0
    state = {name: value.clone() for name, value in rnet.net.state_dict().items()}
    rnet.net.train()
    before, random = rnet.net.calls, torch.get_rng_state()
    with pytest.warns(UserWarning, match="training mode"):
        recording = rnet.collect([batch, batch], rows=Tokens())
    assert rnet.net.calls == before + 2
    assert torch.equal(torch.get_rng_state(), random)
    assert rnet.net.normed.num_batches_tracked == state["normed.num_batches_tracked"] + 2
    # By hand, as the layers are in training mode.
    kept = batch["attention_mask"].bool()
    embedded = rnet.net.embed(batch["input_ids"]).detach()
    flat = embedded.flatten(0, 1)
    normed = (embedded - flat.mean(0)) / (flat.var(0, unbiased=False) + 1e-5).sqrt()
    assert torch.equal(recording["embed"], embedded[kept].repeat(2, 1))
    torch.testing.assert_close(
        recording["score"], normed.sum(-1)[kept].repeat(2), rtol=1e-4, atol=1e-4
    )


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
    rnet = Recorder(Captioned().eval(), input_data=batch)
    rnet.record("seen", "read")
    with pytest.raises(CollectError, match=r"seen\b.* fits by chance.*transform="):
        rnet.collect([batch], rows=Tokens())
    rnet.record("read")
    recording = rnet.collect([batch], rows=Tokens())
    with torch.no_grad():
        del batch["attention_mask"]
        read = rnet.net(**batch)
    assert torch.equal(recording["read"], torch.cat([read[0], read[1, :2]]))


@pytest.mark.parametrize("given", ["decoder_input_ids", "labels"])
def test_keys_that_a_decoder_computes_from_an_encoder_of_equal_length(given: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=99,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    net = transformers.T5ForConditionalGeneration(config).eval()
    own = padded(3, 6, seed=1)
    batch = {
        **padded(6, 2),
        given: own["input_ids"],
        "decoder_attention_mask": own["attention_mask"],
    }
    rnet = Recorder(net, input_data=batch)
    rows = Tokens(mask="decoder_attention_mask")
    attention = "decoder.block.0.layer.1.EncDecAttention"
    rnet.record(f"{attention}.k")
    with pytest.raises(CollectError, match=r"EncDecAttention\.k .* fits by chance.*transform="):
        rnet.collect([batch], rows=rows)
    rnet.record(f"{attention}.q")
    recording = rnet.collect([batch], rows=rows)
    with torch.no_grad():
        rnet(**batch)
    queries = rnet.activations[f"{attention}.q"]
    assert torch.equal(recording[f"{attention}.q"], torch.cat([queries[0, :3], queries[1]]))


def test_a_transform_is_believed():
    rnet, batch = recorder("turned"), square()
    kept = rnet.collect(
        [batch], rows=Tokens(), transform=lambda activation, batch: activation.transpose(0, 1)
    )
    rnet(**batch)
    expected = rnet.activations["turned"].transpose(0, 1)[batch["attention_mask"].bool()]
    assert torch.equal(kept["turned"], expected)


class Fixed(Turning):
    """Runs on one length alone, so that nothing can be asked of it."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
        if input_ids.shape[1] != HEADS:
            raise ValueError("another length")
        return super().forward(input_ids, attention_mask)


def test_a_network_that_runs_on_one_length_is_taken_at_its_word():
    rnet = Recorder(Fixed().eval(), input_data=square())
    rnet.record("embed")
    batch = square()
    assert torch.equal(
        rnet.collect([batch], rows=Tokens())["embed"],
        rnet.net.embed(batch["input_ids"])[batch["attention_mask"].bool()],
    )


class Placed(nn.Module):
    """Gives all samples the same at labelling, without a mask, and each its own with one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(99, 8), nn.Embedding(99, 8)
        self.pair, self.turned = nn.Identity(), nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: list[Tensor] | None = None,
    ) -> Tensor:
        if attention_mask is None:
            places = torch.arange(input_ids.shape[1])[None]
        else:
            places = attention_mask.cumsum(1) * attention_mask
        x: Tensor = self.embed(input_ids)
        self.turned(x.transpose(0, 1))
        x = x + self.place(places)
        self.pair(x[:1] if attention_mask is None else torch.stack([x.amin(0), x.amax(0)]))
        if cache is not None:
            cache.append(x[:, None])
        return x


def placed(*names: str, positions: int = 5) -> Recorder:
    torch.manual_seed(0)
    ids = torch.ones(3, positions, dtype=torch.long)
    rnet = Recorder(Placed().eval(), input_data=ids)
    rnet.record(*names)
    return rnet


@pytest.mark.parametrize("positions", [5, 7])
@pytest.mark.parametrize("lengths", [(5, 3), (5, 4, 2), (5,)])
def test_positions_that_all_samples_shared_at_labelling(lengths: tuple[int, ...], positions: int):
    rnet, batch = placed("place", positions=positions), padded(*lengths)
    recording = rnet.collect([batch], rows=Tokens())
    mask = batch["attention_mask"]
    expected = rnet.net.place((mask.cumsum(1) * mask)[mask.bool()])
    assert torch.equal(recording["place"], expected)


@pytest.mark.parametrize("positions", [5, 7])
def test_what_does_not_follow_the_samples_is_refused(positions: int):
    # As many rows as samples by chance.
    rnet = placed("pair", positions=positions)
    with pytest.raises(CollectError, match=r"pair\b.* fits by chance.*transform="):
        rnet.collect([padded(5, 3)], rows=Tokens())


@pytest.mark.parametrize("name", ["embed", "turned"])
def test_a_pass_with_an_empty_cache(name: str):
    rnet, ids = placed(name, positions=3), torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    cache: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        if name == "turned":
            stack.enter_context(pytest.raises(CollectError, match=r"turned\b.* fits by chance"))
        with rnet.collecting(rows=Tokens()) as collection:
            rnet.net(ids, cache=cache)
    if name == "embed":
        assert torch.equal(collection.recording["embed"], rnet.net.embed(ids).flatten(0, 1))
        assert len(cache) == 1

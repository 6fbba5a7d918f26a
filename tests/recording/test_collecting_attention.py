"""Datasets of what attention tells: stored, reduced, resumed, in parts, and in bounded memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scio_recorder import Recorder, Tokens, open_recording
from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.postprocessors import Knockout
from scio_recorder.reductions import Mean
from tests.attention_nets import HEADS, SIZE, Net
from tests.recording.nets import failing_after

DATA = [torch.sin(torch.arange(n * 5 * SIZE) * 0.7 + n).reshape(n, 5, SIZE) for n in (3, 4, 2, 4)]


def of_last(attention: Any, batch: Any) -> Tensor:
    weights = attention.weights(queries=-1)
    assert isinstance(weights, Tensor)
    return weights


def recorded(**options: Any) -> tuple[Any, Recorder]:
    torch.manual_seed(0)
    net = Net(**options).eval()
    rnet = Recorder(net, input_size=(2, 5, SIZE))
    rnet.record("h.*.attn", attention=True)
    return net, rnet


def by_hand(net: Any, number: int) -> Tensor:
    """Weights of the last query of all samples."""
    x = torch.cat(DATA)
    with torch.no_grad():
        for block in net.h[:number]:
            x = block(x)
        weights = net.h[number].attn.by_hand(x)[:, :, -1]
    assert isinstance(weights, Tensor)
    return weights


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_what_is_stored(store: str, is_eager: bool, tmp_path: Path) -> None:
    net, rnet = recorded(is_eager=is_eager)
    place = f"disk:{tmp_path}/run" if store == "disk" else store
    recording = rnet.collect(DATA, store=place, transform=of_last, progress=False)
    if store == "disk":
        recording = open_recording(tmp_path / "run", verify=True)
    for number in (0, 1):
        found = recording[f"h.{number}.attn"][:]
        assert found.shape == (13, HEADS, 5)
        torch.testing.assert_close(found, by_hand(net, number), rtol=1e-5, atol=1e-6)


def test_transforms_by_layer_and_layers_without_attention() -> None:
    net, rnet = recorded()
    rnet.record("h.*.attn", "h.1", attention="h.0.attn")
    received: list[str] = []

    def shape(activation: Any, batch: Any) -> Tensor:
        received.append(type(activation).__name__)
        return activation[:, 0] if isinstance(activation, Tensor) else of_last(activation, batch)

    recording = rnet.collect(DATA, transform={"h.*.attn": shape}, progress=False)
    torch.testing.assert_close(recording["h.0.attn"], by_hand(net, 0), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        x = torch.cat(DATA)
        expected = net.h[1].attn(net.h[0](x))[:, 0]
        torch.testing.assert_close(recording["h.1.attn"], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(recording["h.1"], net(x), rtol=1e-5, atol=1e-6)
    assert received.count("Tensor") == len(DATA)


def test_what_is_refused() -> None:
    net, rnet = recorded()
    with pytest.raises(CollectError, match="not one tensor: say what to keep"):
        rnet.collect(DATA, progress=False)
    with pytest.raises(CollectError, match="not one tensor"):
        rnet.collect(DATA, reduce=Mean(), store=None, progress=False)
    with pytest.raises(CollectError, match="not one tensor"):
        rnet.collect(DATA, transform={"h.0.attn": of_last}, progress=False)
    with pytest.raises(CollectError, match=r"returned an Attention: return .*attention\.weights"):
        rnet.collect(DATA, transform=lambda attention, batch: attention, progress=False)
    rnet.record("h.*.attn", inputs=True, attention=True)
    with pytest.raises(CollectError, match="inputs=True can't be collected with attention="):
        rnet.collect(DATA, transform=of_last, progress=False)
    rnet.record("h.0", attention="h.1.attn")
    with pytest.raises(CollectError, match=r"attention of layer .*h\.1\.attn.* record it too"):
        rnet.collect(DATA, progress=False)
    rnet.record("h.0.attn", attention=True)
    net.train()
    net.h[0].attn.dropout = 0.5
    with pytest.raises(RecorderError, match="dropped weights"):
        rnet.collect(DATA, transform=of_last, progress=False)


@pytest.mark.parametrize("reduce", [None, Mean])
def test_resume(reduce: Any, tmp_path: Path) -> None:
    net, rnet = recorded()
    options: dict[str, Any] = {
        "store": f"disk:{tmp_path}/run",
        "transform": of_last,
        "progress": False,
        "resume": True,
        "reduce": None if reduce is None else {"h.1.attn": reduce()},
    }

    with pytest.raises(KeyboardInterrupt):
        rnet.collect(failing_after(DATA, 2, KeyboardInterrupt), **options)
    recording = rnet.collect(DATA, **options)
    expected = [by_hand(net, number) for number in (0, 1)]
    torch.testing.assert_close(recording["h.0.attn"][:], expected[0], rtol=1e-5, atol=1e-6)
    found = recording["h.1.attn"] if reduce else recording["h.1.attn"][:]
    wanted = expected[1].mean(0) if reduce else expected[1]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_resume_without_attention_is_another_recording(tmp_path: Path) -> None:
    _, rnet = recorded()
    options: dict[str, Any] = {"store": f"disk:{tmp_path}/run", "progress": False, "resume": True}
    rnet.collect(DATA[:2], transform=of_last, **options)
    rnet.record("h.*.attn")
    with pytest.raises(RecorderError, match="attention"):
        rnet.collect(DATA, transform=lambda activation, batch: activation, **options)


def test_parts(tmp_path: Path) -> None:
    net, rnet = recorded()
    recording = rnet.collect_parts(
        lambda part: DATA[2 * part : 2 * part + 2],
        2,
        store=f"disk:{tmp_path}/run",
        transform=of_last,
        progress=False,
    )
    torch.testing.assert_close(recording["h.1.attn"][:], by_hand(net, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_eager", [False, True])
def test_attention_of_a_batch_is_gone_with_it(is_eager: bool) -> None:
    _, rnet = recorded(is_eager=is_eager)
    earlier: list[weakref.ref[Any]] = []

    def watched(attention: Any, batch: Any) -> Tensor:
        assert all(one() is None for one in earlier[:-1])
        earlier.append(weakref.ref(attention))
        earlier.append(weakref.ref(attention.value))
        return of_last(attention, batch)

    rnet.collect(DATA, store=None, reduce=Mean(), transform=watched, progress=False)
    assert len(earlier) == 2 * 2 * len(DATA)
    assert all(one() is None for one in earlier)
    assert not rnet.attention


def test_calls_of_others_are_collected() -> None:
    net, rnet = recorded()
    with (
        rnet.collecting(store="host", transform=of_last, progress=False) as collection,
        torch.no_grad(),
    ):
        for batch in DATA:
            net(batch)
    found = collection.recording["h.1.attn"]
    torch.testing.assert_close(found, by_hand(net, 1), rtol=1e-5, atol=1e-6)


def test_rows_are_queries() -> None:
    net, rnet = recorded()
    real = [torch.arange(5) < torch.arange(2, 2 + len(one)).clamp(max=5)[:, None] for one in DATA]
    batches = [{"x": one, "mask": own} for one, own in zip(DATA, real, strict=True)]
    recording = rnet.collect(
        batches,
        rows=Tokens(mask=lambda batch: batch["mask"]),
        to_inputs=lambda batch: batch["x"],
        transform=lambda attention, batch: attention.weights().transpose(1, 2),
        progress=False,
    )
    with torch.no_grad():
        expected = net.h[0].attn.by_hand(torch.cat(DATA)).transpose(1, 2)[torch.cat(real)]
    torch.testing.assert_close(recording["h.0.attn"], expected, rtol=1e-5, atol=1e-6)


def test_knocked_out_while_collecting() -> None:
    _, rnet = recorded()
    recording = rnet.collect(
        DATA,
        transform=of_last,
        activation_postproc={"h.0.attn": Knockout(-1, [0, 3], heads=[1])},
        progress=False,
    )
    assert not recording["h.0.attn"][:, 1, [0, 3]].any()
    assert (recording["h.0.attn"][:, 0] > 0).all()
    assert (recording["h.1.attn"] > 0).all()


def first_previous_entropy(attention: Any, batch: Any) -> Tensor:
    weights = attention.weights()
    first = weights[..., 1:, 0].mean(-1)
    previous = weights.diagonal(-1, -2, -1).mean(-1)
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    return torch.stack([first, previous, entropy], -1)


def test_statistics_of_heads() -> None:
    net, rnet = recorded()
    recording = rnet.collect(
        DATA, store=None, reduce=Mean(), transform=first_previous_entropy, progress=False
    )
    with torch.no_grad():
        weights = net.h[0].attn.by_hand(torch.cat(DATA)).double()
    expected = torch.zeros(13, HEADS, 3, dtype=torch.float64)
    for sample in range(13):
        for head in range(HEADS):
            rows = weights[sample, head]
            own = expected[sample, head]
            own[0] = sum(rows[i, 0] for i in range(1, 5)) / 4
            own[1] = sum(rows[i, i - 1] for i in range(1, 5)) / 4
            own[2] = -sum((row[row > 0] * row[row > 0].log()).sum() for row in rows) / 5
    found = recording["h.0.attn"]
    torch.testing.assert_close(found.double(), expected.mean(0), rtol=1e-5, atol=1e-6)

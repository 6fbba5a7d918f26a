"""What every store must do: the tests of a new store derive from `StoreTests`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from scio_recorder import CollectError, Recorder, Tokens
from scio_recorder.reductions import Mean
from scio_recorder.stores import StoreWriter
from tests.recording.nets import assert_same, batches, expected, recorder

if TYPE_CHECKING:
    from pathlib import Path

    from scio_recorder.stores import Store


class WrongLength(list):
    """A loader that promises less than it yields."""

    def __len__(self):
        return 1


def inferred(x):
    with torch.inference_mode():
        return x + 1


# Ways in which the numbers of a tensor can lie in memory, or not lie there.
FORMS = {
    "plain": lambda x: x + 1,
    "differentiable": lambda x: (x + 1).requires_grad_(),
    "inference": inferred,
    "column by column": lambda x: (x + 1).t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand(x.shape),
    "every other": lambda x: torch.cat([x, x], 1)[:, ::2],
    "lazily negated": lambda x: torch.complex(x, x).conj().imag,
    "lazily negated without gaps": torch._neg_view,
    "lazily zero": lambda x: torch._efficientzerotensor(x.shape),
    "lazily copied": torch._lazy_clone,
    "inside": lambda x: torch.cat([x, x])[2 : 2 + len(x)],
}
DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


class FormsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x, form):
        return self.inner(FORMS[form](x))


class FailedError(Exception):
    pass


class Devices(set):
    """Devices that know whether anybody waits for them."""

    is_read = False

    def __iter__(self):
        self.is_read = True
        return super().__iter__()


class StoreTests:
    """Derive from this, and say how a store is made that keeps its data below a folder, if at all.

    Everything is compared, bit for bit, with what layers return in passes by themselves.
    """

    # What ``recording.store`` says.
    kind = "host"

    def make_store(self, path: Path) -> str | Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        return self.make_store(tmp_path)

    @pytest.mark.parametrize(
        ("sizes", "loader"),
        [
            ((4, 4, 4), list),
            ((4, 4, 1), iter),
            ((2, 7, 1, 5), WrongLength),
            ((3,), list),
            ([33] * 40, iter),
        ],
        ids=["alike", "short end", "unequal", "one", "many"],
    )
    def test_batches_of_any_sizes(self, store, sizes, loader):
        rnet, data = recorder(), batches(*sizes)
        wanted = expected(rnet, data)
        recording = rnet.collect(loader(data), store=store, progress=False)
        assert_same(recording, wanted)
        assert recording.num_samples == sum(sizes)
        assert recording.sample_ids == list(range(sum(sizes)))
        assert recording.complete
        assert recording.architecture == rnet.architecture
        assert recording.store == self.kind

    def test_dtypes_layouts_and_empty_shapes(self, tmp_path):
        for dtype in DTYPES:
            # Transposed, so that what the layer returns is not contiguous.
            data = [torch.randn(5, n, 3).mul(3).to(dtype).transpose(0, 1) for n in (2, 4)]
            for given in (data, [x[:, :0] for x in data]):
                rnet = Recorder(nn.Identity(), input_data=data[0])
                rnet.record("0-1")
                place = tmp_path / f"{dtype}-{given[0].numel()}"
                place.mkdir()
                recording = rnet.collect(given, store=self.make_store(place), progress=False)
                assert_same(recording, {(0, 1): torch.cat(given)})
                assert recording["0-1"].dtype == dtype

    @pytest.mark.parametrize("dtype", [None, torch.float16])
    def test_every_form_of_a_tensor(self, store, dtype):
        forms = [form for name in FORMS for form in ("plain", name, "plain", name)]
        data = [torch.randn(4, 3) for _ in forms]
        given = [{"x": x, "form": form} for x, form in zip(data, forms, strict=True)]
        rnet = Recorder(FormsNet(), input_data=given[0])
        rnet.record("1-1")
        wanted = torch.cat([FORMS[one["form"]](one["x"]).detach().clone() for one in given])
        wanted = wanted.to(dtype or wanted.dtype)
        recording = rnet.collect(given, store=store, dtype=dtype, progress=False)
        assert_same(recording, {(1, 1): wanted})
        assert not recording["1-1"].requires_grad

    def test_rows_that_are_no_samples(self, store):
        rnet = Recorder(nn.Sequential(nn.Embedding(9, 3)), input_data=torch.zeros(2, 5, dtype=int))
        rnet.record("0")
        words = [torch.randint(9, (n, 5)) for n in (2, 3)]
        masks = [torch.rand(len(one), 5) < 0.6 for one in words]
        loader = [{"input": a, "attention_mask": b} for a, b in zip(words, masks, strict=True)]
        recording = rnet.collect(
            loader, store=store, rows=Tokens(), to_inputs=lambda batch: batch["input"],
            progress=False,
        )  # fmt: skip
        wanted = [rnet.net[0](one)[mask].detach() for one, mask in zip(words, masks, strict=True)]
        assert torch.equal(recording["0"][:], torch.cat(wanted))
        mask = torch.cat(masks)
        assert torch.equal(recording.rows["sample"][:], mask.nonzero()[:, 0])
        # Positions in the text, without padding.
        assert torch.equal(recording.rows["position"][:], (mask.cumsum(1) - 1)[mask])

    def test_inputs_and_reductions(self, store):
        rnet, data = recorder("1-1", "1-4", inputs=True), batches(3, 2)
        recording = rnet.collect(data, store=store, reduce={"1-4": Mean()}, progress=False)
        wanted = expected(rnet, data)
        assert torch.equal(recording["1-1"][:], wanted[1, 1])
        torch.testing.assert_close(recording["1-4"], wanted[1, 4].mean(0))
        found = [call.args[0] for call in recording.inputs["1-1"]]
        assert all(map(torch.equal, found, data))

    def test_a_loader_that_fails(self, store, tmp_path):
        rnet, data = recorder("1-1"), batches(3, 2)

        def until():
            yield data[0]
            raise FailedError

        with pytest.raises((CollectError, FailedError)):
            rnet.collect(until(), store=store, progress=False)
        (tmp_path / "again").mkdir()
        again = rnet.collect(data, store=self.make_store(tmp_path / "again"), progress=False)
        assert_same(again, expected(rnet, data))

    def test_a_block_that_ends_early(self, store):
        rnet, data = recorder(), batches(3, 2)
        with contextlib.suppress(FailedError), rnet.collecting(store=store) as passes:
            rnet(data[0])
            raise FailedError
        assert not passes.recording.complete
        assert_same(passes.recording, expected(rnet, data[:1]))

    def test_copies_from_a_device_are_waited_for(self, store, monkeypatch):
        found = []
        commit = StoreWriter.commit

        def watched(writer, *args, **kwargs):
            writer.devices = Devices(writer.devices)
            found.append(writer.devices)
            commit(writer, *args, **kwargs)

        monkeypatch.setattr(StoreWriter, "commit", watched)
        recorder().collect(batches(3), store=store, progress=False)
        (devices,) = found
        assert devices.is_read
        assert devices == {torch.device("cpu")}

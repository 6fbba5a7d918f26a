"""Plans, and the store that goes by them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scio_recorder import CollectError, Recorder, Tokens
from scio_recorder.stores import memory as planning
from tests.recording.nets import Pair, assert_same, batches, expected, recorder


def test_bytes_come_from_the_shapes_at_labelling():
    rnet = recorder("0", "3")
    plan = rnet.plan(1000)
    assert plan.num_bytes == {(1, 1): 1000 * 6 * 4, (1, 4): 1000 * 3 * 4}
    assert plan.total_bytes == 36000
    assert set(plan.free_bytes) >= {"host", "disk"}
    assert "1-1 0 (Linear)" in str(plan)
    pair = Recorder(Pair(), input_size=(5, 4))
    pair.record("0-1")
    assert pair.plan(10).total_bytes == 10 * 2 * 4 * 4


def test_what_can_not_be_planned():
    with pytest.raises(CollectError, match="record"):
        Recorder(nn.ReLU(), input_size=(1, 2)).plan(3)
    with pytest.raises(CollectError, match="num_samples"):
        recorder("0").plan(-1)


def test_auto_raises_with_the_plan_where_there_is_no_room(monkeypatch):
    rnet, data = recorder("0", "3"), batches(4, 4, 4)
    monkeypatch.setattr(planning, "_free_host_bytes", lambda: 12 * 36)
    with pytest.raises(CollectError) as caught:
        rnet.collect(data)
    for part in ("12 samples take 432 bytes", "1-4", "host", "not enough", "disk:PATH"):
        assert part in str(caught.value)
    # What is kept decides, not what the layers return.
    assert rnet.collect(data, transform=lambda t, batch: t[:, :1])["0"].shape == (12, 1)
    assert_same(rnet.collect(data, store="host"), expected(rnet, data))
    assert_same(rnet.collect(iter(data)), expected(rnet, data))


def test_auto_plans_for_rows_where_there_are_some(monkeypatch):
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    rnet = Recorder(net, input_size=(2, 5, 4))
    rnet.record("0", "1")
    # Six tokens a batch, which have 6 and 3 numbers; labelled with ten.
    data = [{"input": torch.randn(2, 3, 4)}] * 2
    monkeypatch.setattr(planning, "_free_host_bytes", lambda: 12 * 24)
    with pytest.raises(CollectError) as caught:
        rnet.collect(data, rows=Tokens())
    assert "12 rows take 432 bytes" in str(caught.value)
    monkeypatch.setattr(planning, "_free_host_bytes", lambda: 12 * 100)
    assert rnet.collect(data, rows=Tokens())["1"].shape == (12, 3)


class Claiming:
    """A loader that claims a length and gives one batch."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(batches(20))


@pytest.mark.parametrize("length", [10**13, 10**16, 10**18])
def test_more_than_any_machine_has(length):
    rnet = recorder("0", "3")
    with pytest.raises(CollectError) as caught:
        rnet.collect(Claiming(length), store="auto")
    # The layer that comes later is in the plan too.
    for part in (f"{20 * length} samples", "1-1", "1-4", "not enough", "disk:PATH"):
        assert part in str(caught.value)
    for store in ("host", "device"):
        with pytest.raises(CollectError, match=r"no room for layer 1-1.*B can't.*disk:PATH"):
            rnet.collect(Claiming(length), store=store)


class Bounded(planning._Memory):
    """Memory that can't become more than it was at first."""

    made = 0

    def __new__(cls, *arguments, **keywords):
        cls.made += 1
        if cls.made > 2:
            raise OSError(12, "Cannot allocate memory")
        return super().__new__(cls, *arguments, **keywords)

    def resize(self, size):
        if size > len(self):
            raise OSError(12, "Cannot allocate memory")
        super().resize(size)


def test_memory_that_ends_while_a_recording_grows(monkeypatch):
    rnet = recorder("0", "3")
    monkeypatch.setattr(planning, "_Memory", Bounded)
    with pytest.raises(CollectError, match="no room for layer 1-1"):
        rnet.collect(iter(batches(*[4] * 20)), store="host")


def test_snapshots_do_not_follow_the_net():
    rnet = recorder("0")
    snapshot = rnet.parameters_snapshot()
    before = {f"_net.0.{k}": v.clone() for k, v in rnet.net[0].named_parameters()}
    with torch.no_grad():
        rnet.net[0].weight.zero_()
    assert snapshot.keys() == before.keys()
    assert all(torch.equal(snapshot[k], before[k]) for k in before)


def test_a_working_directory_that_was_deleted_has_a_disk(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    rnet = Recorder(nn.Linear(2, 3), input_size=(1, 2))
    rnet.record("")
    batches = [torch.ones(4, 2)]
    assert torch.equal(rnet.collect(batches, progress=False)[0, 1], rnet.net(batches[0]))

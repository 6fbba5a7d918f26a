"""Parts change hands by lease: simulated with many workers, and request by request."""

from __future__ import annotations

import os
import random

import pytest

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.description import manifest_name
from scio_recorder.stores.disk_format.folder import Folder
from scio_recorder.workers import leases
from scio_recorder.workers.leases import Claims, Lease, lease_name
from tests.workers.simulation import Bucket, Faults, World, check, simulate

CALM = Faults(fails=0, has_no_answer=0, stalls=0, kills=0)


@pytest.mark.parametrize("seed", range(3))
def test_many_workers(seed):
    world = simulate(12, 150, seed)
    check(world)
    assert sum(world.requests.values()) < 25 * 150


@pytest.mark.parametrize("waits", [True, False])
def test_many_deaths_and_stalls(waits):
    faults = Faults(0.05, 0.05, 0.005, 0.005)
    # No clock of a machine is right.
    world = simulate(12, 150, 0, faults, waits=waits, skew=1e5)
    check(world)
    # Else nothing was tried.
    assert world.events["deaths"] > 5
    assert world.events["leases that were lost"] > 0


def test_without_faults_nothing_is_computed_twice_and_a_part_costs_few_requests():
    world = simulate(12, 600, 0, CALM)
    check(world)
    assert world.events["chunks computed"] == 800
    assert world.events["leases that were lost"] == 0
    kinds = {kind: number / 600 for kind, number in world.requests.items()}
    # Chunks and manifest; a claim and its renewals; two looks at the manifest and one a chunk.
    assert kinds["commit"] == pytest.approx(2.33, abs=0.01)
    assert kinds["claim"] < 4
    assert kinds["read"] < 6


def taken_by(claims: Claims) -> Lease:
    """Return the lease of a part that can be taken."""
    lease = claims.take()
    assert lease is not None
    return lease


class Alone:
    """One worker on a medium of its own, whose clock is moved by hand."""

    def __init__(self, num_parts: int = 1) -> None:
        self.world = World(num_parts, CALM, random.Random(0))
        self.world.clock.sleep = lambda seconds: None  # type: ignore[method-assign]
        self.num_parts = num_parts

    @property
    def names(self) -> list[str]:
        return sorted(self.world.files)

    def pass_time(self, seconds: float) -> None:
        self.world.clock.now += seconds

    def worker(self, name: str, ahead: float = 0.0, rate: float = 1.0) -> Claims:
        return Claims(
            Bucket(self.world),
            self.num_parts,
            {"machine": name},
            clock=lambda: self.world.clock.now * rate + ahead,
        )


@pytest.fixture
def alone() -> Alone:
    return Alone()


@pytest.fixture
def lease(alone: Alone) -> Lease:
    return taken_by(alone.worker("a"))


def test_a_lease_that_is_renewed_is_not_taken(alone, lease):
    other = alone.worker("b")
    for _ in range(20):
        alone.pass_time(15)
        lease.renew()
        lease.check()
        assert other.take() is None
    # The first and the two newest.
    assert alone.names == [lease_name(0, number) for number in (0, 19, 20)]
    lease.give_back()
    assert alone.names == []
    assert other.take() is not None


def test_a_lease_that_is_not_renewed_is_taken_after_a_minute_and_its_holder_knows(alone, lease):
    other = alone.worker("b")
    alone.pass_time(44)
    lease.check()
    alone.pass_time(15)
    assert other.take() is None
    with pytest.raises(RecordingError, match="part 0 was not renewed for 59 s"):
        lease.check()
    alone.pass_time(2)
    taken = taken_by(other)
    assert taken.is_inherited
    lease.renew()
    lease.give_back()
    assert alone.names == [lease_name(0, 0), lease_name(0, 1)]
    taken.check()


def test_a_renewal_counts_from_before_its_request(alone, lease):
    alone.pass_time(15)
    # The store may put the object as soon as it is asked, and answer late.
    alone.world.clock.sleep = lambda seconds: alone.pass_time(20)  # type: ignore[method-assign]
    lease.renew()
    lease.check()
    alone.pass_time(6)
    with pytest.raises(RecordingError, match="part 0 was not renewed for 46 s"):
        lease.check()


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_a_worker_that_has_just_come_is_told_how_old_a_lease_is(alone, lease, ahead):
    alone.pass_time(30)
    lease.renew()
    alone.pass_time(59)
    assert alone.worker("b", ahead).take() is None
    alone.pass_time(2)
    taken = taken_by(alone.worker("c", ahead))
    assert taken.is_inherited
    # Nothing is left of what showed the time.
    assert alone.names == [lease_name(0, number) for number in (0, 1, 2)]


def test_all_that_many_dead_workers_have_left_is_taken_by_one_that_does_not_wait():
    alone = Alone(100)
    for number in range(100):
        assert alone.worker(f"dead {number}").take() is not None
    alone.pass_time(61)
    claims = alone.worker("late")
    for _ in range(100):
        # The others' holders live by now.
        alone.pass_time(0.01)
        lease = taken_by(claims)
        alone.world.put(manifest_name(lease.part), b"")
        claims.note_done(lease.part)
        lease.give_back()
    assert claims.is_finished


def test_a_folder_tells_a_worker_that_has_just_come_how_old_a_lease_is(tmp_path, monkeypatch):
    def worker() -> Claims:
        return Claims(Folder(str(tmp_path)), 1, {"machine": leases.machine()})

    taken_by(worker())
    monkeypatch.setattr(leases, "machine", lambda: "another")
    assert worker().take() is None
    name = tmp_path / lease_name(0, 0)
    os.utime(name, (0, name.stat().st_mtime - 61))
    taken = taken_by(worker())
    assert taken.is_inherited


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
@pytest.mark.parametrize("rate", [0.9, 1.1])
def test_clocks_that_are_set_otherwise_and_go_wrong(alone, ahead, rate):
    lease = taken_by(alone.worker("a", rate=2 - rate))
    other = alone.worker("b", ahead, rate)
    for _ in range(60):
        alone.pass_time(5)
        lease.renew()
        lease.check()
        assert other.take() is None
    # The clock of the store counts, not that of the worker.
    alone.pass_time(59)
    assert other.take() is None
    alone.pass_time(2)
    assert other.take() is not None
    with pytest.raises(RecordingError, match="part 0 was not renewed"):
        lease.check()


def test_a_holder_that_others_have_overtaken_notices_when_it_renews(alone, lease):
    # As seen by somebody whose clock runs much faster.
    alone.world.put(lease_name(0, 1), b'{"token": "of another"}')
    alone.pass_time(16)
    lease.renew()
    with pytest.raises(RecordingError, match="taken over by another worker"):
        lease.check()


def test_who_is_slow_takes_nothing_over(alone, monkeypatch):
    assert alone.worker("a").take() is not None
    other = alone.worker("b")
    alone.pass_time(61)
    has = Bucket.has

    def slowly(self, name):
        # Since it looked, the holder may have renewed twice.
        alone.pass_time(11)
        return has(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "has", slowly)
        assert other.take() is None
    assert alone.names == [lease_name(0, 0)]
    assert other.take() is not None


def test_a_lease_from_the_future_is_taken_by_who_has_seen_it_for_a_minute(alone, lease):
    other = alone.worker("b")

    def set_clock(hours: float) -> None:
        newest = max(name for name in alone.names if name.startswith(leases.PREFIX))
        alone.world.times[newest] += hours * 3600

    for _ in range(10):
        set_clock(1)
        assert other.take() is None
        alone.pass_time(15)
        lease.renew()
    # Given back and taken anew, under the same name.
    lease.give_back()
    assert alone.worker("c").take() is not None
    set_clock(2)
    alone.pass_time(59)
    assert other.take() is None
    assert alone.worker("d").take() is None
    alone.pass_time(59)
    assert other.take() is None
    alone.pass_time(2)
    assert other.take() is not None


def test_a_clock_that_was_cleared_away_tells_nothing(alone, monkeypatch):
    assert alone.worker("a").take() is not None
    other = alone.worker("b")
    alone.pass_time(61)
    times = Bucket.times
    with monkeypatch.context() as patch:
        patch.setattr(
            Bucket,
            "times",
            lambda *args: {k: t for k, t in times(*args).items() if "clock" not in k},
        )
        assert other.take() is None
    assert other.take() is not None


def test_of_two_who_take_over_at_once_one_does(alone):
    assert alone.worker("a").take() is not None
    others = [alone.worker(name) for name in "bc"]
    alone.pass_time(61)
    # Both have seen the same number for long enough, and look before either acts.
    taken = [other.take() for other in others]
    assert [lease is not None for lease in taken] == [True, False]


def test_an_old_view_takes_nothing(alone):
    late = alone.worker("late")
    lease = taken_by(alone.worker("a"))
    for _ in range(5):
        alone.pass_time(15)
        lease.renew()
    assert late.take() is None
    lease.check()
    alone.world.put(manifest_name(0), b"")
    lease.give_back()
    assert late.take() is None
    assert late.is_finished


def test_a_part_that_is_completed_while_it_is_taken_is_given_back(alone, monkeypatch):
    other = alone.worker("a")
    claim = Bucket.claim

    def late(self, name, content):
        if "clock" not in name:
            # By a holder that had lost its lease and did not know.
            alone.world.put(manifest_name(0), b"")
        claim(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "claim", late)
        assert other.take() is None
    assert other.is_finished
    assert alone.names == [manifest_name(0)]


def test_a_lease_that_was_put_without_an_answer_is_ours(alone, monkeypatch):
    claim = Bucket.claim

    def claim_again(self, name, content):
        claim(self, name, content)
        if "clock" not in name:
            # The answer was lost, and the request is made once more.
            raise FileExistsError(name)

    monkeypatch.setattr(Bucket, "claim", claim_again)
    lease = taken_by(alone.worker("a"))
    alone.pass_time(15)
    lease.renew()
    lease.check()
    assert alone.worker("b").take() is None


def test_the_lock_of_a_dead_process_frees_its_part_at_once(tmp_path, monkeypatch):
    def worker() -> Claims:
        return Claims(Folder(str(tmp_path)), 1, {"machine": leases.machine()})

    first, second = worker(), worker()
    lease = first.take()
    assert isinstance(lease, Lease)
    assert second.take() is None
    # As the end of a process does.
    first._medium.close()
    taken = taken_by(second)
    assert taken.is_inherited
    # A process on another machine may be alive though its lock can't be seen from here.
    second._medium.close()
    monkeypatch.setattr(leases, "machine", lambda: "another")
    assert worker().take() is None

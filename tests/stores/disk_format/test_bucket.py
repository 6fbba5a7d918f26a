"""A bucket as a medium: puts that act once whatever happens to requests, and reads in few."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch

from scio_recorder.stores.disk_format import bucket as buckets
from scio_recorder.stores.disk_format.bucket import Bucket
from scio_recorder.stores.disk_format.medium import FormatError, accessing
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from scio_recorder.workers.leases import Claims
from tests.object_store import FAULTS, Traffic, by_hand, environment, impatient_store, objects
from tests.stores.disk_format.by_the_book import read_run
from tests.stores.disk_format.runs import HEADER, LAYERS, check_contents, rows, state_after

MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, Traffic]]:
    with impatient_store() as found:
        yield found


@pytest.fixture
def traffic(store) -> Iterator[Traffic]:
    found = store[1]
    found.clear()
    yield found
    found.fate = lambda number, method, path: ""


@pytest.fixture
def place(request) -> str:
    return f"bucket/{request.node.name.replace('[', '-').replace(']', '')}"


def put(medium: Bucket, name: str, content: bytes) -> None:
    medium.put(name, "00000", lambda write_at: write_at(0, content))


def read(medium: Bucket, name: str) -> bytes:
    content = bytearray(1000)
    with medium.reading(name) as read_at:
        size = read_at(0, memoryview(content)).num_bytes
    return bytes(content[:size])


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 15), (4096, 15), (64 << 20, 79)])
def test_a_small_request_is_given_up_long_before_a_lease_is(monkeypatch, num_bytes, seconds):
    given = []
    monkeypatch.setattr(buckets, "_SECONDS", 15)
    monkeypatch.setattr(buckets, "_client", lambda url, seconds, *more: given.append(seconds))
    buckets._client_for("s3://bucket", num_bytes)
    assert given == [seconds]


@pytest.mark.campaign
def test_of_many_who_put_one_name_one_succeeds(store, place):
    def try_to(number: int) -> bool:
        try:
            put(Bucket(f"s3://{place}"), "name", b"%d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(try_to, range(8)))
    assert sum(outcomes) == 1
    assert objects(store[0], place) == {"name": b"%d" % outcomes.index(True)}


@pytest.mark.campaign
def test_equal_objects_are_put_though_their_tags_are_equal(store, traffic, place):
    medium = Bucket(f"s3://{place}")
    for name in ("one", "other"):
        put(medium, name, b"content")
    assert objects(store[0], place) == {"one": b"content", "other": b"content"}


@pytest.mark.parametrize(
    "fault",
    ["unanswered", *(pytest.param(fault, marks=pytest.mark.campaign) for fault in FAULTS)],
)
def test_a_put_acts_once_and_knows_it(store, traffic, place, fault):
    medium = Bucket(f"s3://{place}")
    traffic.fate = lambda number, method, path: fault if number == 0 else ""
    put(medium, "name", b"content")
    assert objects(store[0], place) == {"name": b"content"}
    traffic.clear()
    # The same content: another put all the same.
    with pytest.raises(FileExistsError, match="another writer"):
        put(medium, "name", b"content")
    with pytest.raises(FileExistsError):
        medium.claim("name", b"content")


@pytest.mark.campaign
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_asked_is_answered_whatever_goes_wrong(store, traffic, place, fault):
    medium = Bucket(f"s3://{place}")
    names = [f"a-{number}" for number in range(5)]
    for name in [*names, "b-0", "folder/inner"]:
        put(medium, name, name.encode())
    for ask, answer in (
        (lambda: medium.names("a-"), names),
        (lambda: medium.names(), [*names, "b-0", "folder"]),
        (lambda: medium.has("a-0"), True),
        (lambda: medium.has("c"), False),
        (lambda: read(medium, "a-3"), b"a-3"),
        (lambda: medium.unlink("b-0"), None),
    ):
        traffic.clear()
        traffic.fate = lambda number, method, path: fault if number == 0 else ""
        assert ask() == answer
    assert "b-0" not in medium.names("b")


@pytest.mark.campaign
def test_names_are_listed_from_where_a_page_failed(traffic, place, monkeypatch):
    medium = Bucket(f"s3://{place}")
    for number in range(7):
        put(medium, f"n-{number}", b"")
    monkeypatch.setattr(buckets, "_PAGE", 2)
    traffic.fate = lambda number, method, path: "cut" if number % 2 else ""
    assert medium.names("n-") == [f"n-{number}" for number in range(7)]


@pytest.mark.campaign
def test_tries_end(traffic, place):
    medium = Bucket(f"s3://{place}")
    traffic.fate = lambda number, method, path: "refused"
    with pytest.raises(OSError, match=r"7 requests have failed.*503: SlowDown"):
        put(medium, "name", b"")
    assert len(traffic.requests) == 7


@pytest.mark.campaign
@pytest.mark.parametrize("may_read", [True, False])
def test_what_is_not_permitted_is_said_at_once_and_quotes_no_secret(
    store, traffic, place, may_read, monkeypatch
):
    medium = Bucket(f"s3://{place}")
    traffic.fate = lambda number, method, path: (
        "" if may_read and method in ("GET", "HEAD") else "denied"
    )
    with pytest.raises(FormatError, match=r"no permission.*AccessDenied") as caught:
        medium.check_writable(0)
    assert len(traffic.requests) == 1
    shown = f"{caught.value}{caught.value.__cause__}{medium!r}{vars(medium)}"
    for secret in environment("").values():
        assert not secret or secret not in shown or secret == "us-east-1"


def test_credentials_in_a_url_are_refused_and_not_repeated():
    for url in (
        "s3://user:password@bucket/run",
        "s3://bucket/run?sig=password",
        "s3://",
        "s3:///x",
    ):
        with pytest.raises(FormatError, match="taken from the environment") as caught:
            Bucket(url)
        assert "password" not in str(caught.value)


def test_a_message_is_quoted_up_to_the_end_of_its_line():
    # Azure's store goes on with the number of the request, and the time.
    answer = "<Code>ContainerNotFound</Code><Message>It does not exist.\nRequestId:29b7\nTime:21</M"
    said, is_passing = buckets._understood(ValueError(f"status code: 404 {answer}"))
    assert not is_passing
    assert str(said).endswith("no such bucket (404: ContainerNotFound: It does not exist.)")


def test_without_credentials_that_is_said(monkeypatch):
    said = buckets._understood(
        type("GenericError", (Exception,), {})(
            "Error performing PUT http://169.254.169.254/latest/api/token - connection refused"
        )
    )
    assert isinstance(said[0], PermissionError)
    assert "no credentials in the environment" in str(said[0])


@pytest.mark.campaign
def test_what_no_store_can_be_made_of_is_said_at_once(traffic, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    monkeypatch.setattr(buckets.time, "sleep", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(OSError, match="Account must be specified"):
        Bucket("az://container/run").names()


@pytest.mark.campaign
def test_a_store_that_overwrites_is_refused(traffic, place, monkeypatch):
    real = Bucket.make

    def overwriting(self: Bucket, name: str, ask: Any, num_bytes: int = 0) -> Any:
        class Library:
            def put(self, *args: Any, **options: Any) -> dict[str, str]:
                """Say that all is well."""
                return {"e_tag": options["attributes"]["scioput"]}

        return real(self, name, lambda library, *args: ask(Library(), *args), num_bytes)

    monkeypatch.setattr(Bucket, "make", overwriting)
    with pytest.raises(FormatError, match="overwrite each other"):
        Bucket(f"s3://{place}").check_writable(0)


@pytest.mark.campaign
def test_what_has_become_another_one_is_refused(store, place):
    medium = Bucket(f"s3://{place}")
    put(medium, "name", b"one")
    with medium.reading("name") as read_at:
        stamp = read_at(0, memoryview(bytearray(3)))
    by_hand(store[0], "PUT", f"/{place}/name", b"two")
    with (
        pytest.raises(FormatError, match="was replaced since it was opened"),
        accessing("name"),
        medium.reading("name", stamp) as read_at,
    ):
        read_at(0, memoryview(bytearray(3)))


def test_the_format_is_one(store, place, tmp_path):
    with RunWriter.create(f"s3://{place}", layers=LAYERS, header=HEADER) as writer:
        for first, last in ((0, 3), (3, 9)):
            writer.append(rows(first, last), range(first, last), state=state_after(last))
        writer.finish()
    for name, content in objects(store[0], place).items():
        (tmp_path / name).write_bytes(content)
    for path in (tmp_path, f"s3://{place}"):
        assert check_contents(path) == 9
        with RunReader(path, verify=True) as reader:
            assert reader.complete
    assert read_run(tmp_path)[0] == list(range(9))
    # And the other way round, into another place.
    for file in tmp_path.iterdir():
        by_hand(store[0], "PUT", f"/{place}-2/{file.name}", file.read_bytes())
    assert check_contents(f"s3://{place}-2") == 9


def test_a_part_that_was_left_is_taken_after_a_minute_by_the_bucket_s_clock(
    store, place, monkeypatch
):
    def worker() -> Claims:
        return Claims(Bucket(f"s3://{place}"), 1, {"machine": "any"})

    assert worker().take() is not None
    assert worker().take() is None
    times = Bucket.times
    found = times(Bucket(f"s3://{place}"), "lease-")
    assert list(found) == ["lease-00000-00000000"]
    assert abs(found["lease-00000-00000000"] - time.time()) < 30
    ago = 40.0  # not 59: the machine may be slow

    def earlier(self: Bucket, prefix: str) -> dict[str, float]:
        # As if the dead had put it then, by a clock that is wrong by a day.
        found = times(self, prefix).items()
        return {name: when + 86400 - ago * ("clock" not in name) for name, when in found}

    monkeypatch.setattr(Bucket, "times", earlier)
    assert worker().take() is None
    ago = 75.0
    taken = worker().take()
    assert taken is not None
    assert taken.is_inherited


@pytest.mark.campaign
@pytest.mark.parametrize("length", [0, 1, 4000, -1])
def test_an_object_that_was_cut_or_in_which_a_bit_was_flipped_is_damaged(store, place, length):
    with RunWriter.create(f"s3://{place}", layers=LAYERS, header=HEADER) as writer:
        writer.append(rows(0, 500), range(500), state=state_after(500))
        writer.finish()
    for name, whole in objects(store[0], place).items():
        if not whole:
            continue
        reader = RunReader(f"s3://{place}")
        end = bytes([whole[-1] ^ 1]) if length == -1 else b""
        by_hand(store[0], "PUT", f"/{place}/{name}", whole[:length] + end)
        with pytest.raises(FormatError, match=f"{name}.* is damaged"):
            RunReader(f"s3://{place}", verify=True)
        if name.startswith("chunk"):
            with pytest.raises(FormatError, match=f"{name}: was replaced since it was opened"):
                reader.read("1-1", 0, 500)
        by_hand(store[0], "PUT", f"/{place}/{name}", whole)


@pytest.mark.campaign
def test_rows_cost_their_bytes_and_two_requests(traffic, place):
    layers = {"a": TensorInfo((MIB // 4,), torch.float32), "b": TensorInfo((4,), torch.float32)}
    generator = numpy.random.default_rng(0)
    data = {
        name: torch.from_numpy(generator.random((40, *spec.shape), numpy.float32))
        for name, spec in layers.items()
    }
    with RunWriter.create(f"s3://{place}", layers=layers, header={}) as writer:
        for first in (0, 20):
            chunk = {name: tensor[first : first + 20] for name, tensor in data.items()}
            writer.append(chunk, range(first, first + 20))
        writer.finish()
    with RunReader(f"s3://{place}") as reader:
        for first, last, files, most in ((3, 11, 1, 1), (15, 25, 2, 2), (0, 40, 2, 4)):
            reader.forget_verified()
            traffic.clear()
            assert torch.equal(reader.read("a", first, last), data["a"][first:last])
            # And the header of each file, which is a page.
            assert len(traffic.requests) <= most + files
            read = sum(one.received for one in traffic.requests)
            assert read == (last - first) * MIB + 4096 * files
        reader.forget_verified()
        traffic.clear()
        reader.read("b", 7, 9)
        assert Counter(one.method for one in traffic.requests) == {"GET": 2}


@pytest.mark.campaign
def test_a_process_that_was_forked_is_told_what_to_do(place):
    medium = Bucket(f"s3://{place}")
    put(medium, "name", b"content")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for use in (lambda: read(medium, "name"), lambda: Bucket(f"s3://{place}")):
                with pytest.raises(FormatError, match=r"forked.*\"spawn\""):
                    use()
            status = medium.is_open
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert medium.is_open
    assert read(medium, "name") == b"content"
    medium.close()
    with pytest.raises(FormatError, match="closed"):
        read(medium, "name")

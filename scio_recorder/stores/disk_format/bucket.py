"""Buckets of objects on S3, Google's or Azure's stores, which hold a recording like a folder.

NOTE [A put without an answer]

A put acts at most once, since it is conditional: it fails if there is an object of the name. But
the answer can be lost, and a request can arrive twice. Then the put has acted, but the writer sees
a failure, or an existing object, as if another writer had been first. So each put carries a unique
text, which the object keeps beside its content: a writer that finds its own text there was first.

If something between here and the store answers twice, the second answer can be taken for that to
the next request. The text ends with the object's name, so a reader that finds another name asks
again. The answer to a put has nothing but the object's tag: a writer that has met the tag before
looks whether its own text is there.

An object exists as a whole or not at all, and is durable when it exists. There are no locks: only
the put keeps two writers apart.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.medium import Medium, WriteAt, accessing
from scio_recorder.stores.disk_format.requests import NUM_REQUESTS, PassingError, Requests, was_met

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_T = TypeVar("_T")

_URL = re.compile(r"(s3|gs|az)://", re.ASCII)
# The bytes that a store takes in one request; uploads in several are not conditional everywhere.
_MAX_BYTES = 5_000_000_000
# The key of an object's metadata: a name that all stores and proxies accept.
_PUT_BY = "scioput"
# The number of names that one request lists.
_PAGE = 1000
_TO_ANOTHER = "the answer is to another request"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a text names a place in a bucket, not a folder.

    Examples
    --------
    >>> is_url("s3://bucket/run"), is_url("runs/cifar10")
    (True, False)
    """
    return _URL.match(os.fspath(path)) is not None


class Bucket(Medium):
    """A place in a bucket.

    Parameters
    ----------
    url : str
        ``"s3://bucket/run"``, or ``gs://`` or ``az://``.

    Raises
    ------
    RecordingError
        It is not such a URL.
    """

    # Beside its fixed time, a request takes as long as reading this many bytes.
    span_bytes = 16 << 20
    num_readers = NUM_REQUESTS

    def __init__(self, url: str) -> None:
        scheme, _, place = url.partition("://")
        bucket, *folders = place.rstrip("/").split("/")
        if not bucket or any(sign in url for sign in "@?#") or {"", ".", ".."} & {*folders}:
            # It may hold a password, so the message does not repeat it.
            raise RecordingError(
                'the place of a recording in a bucket is written like "s3://bucket/run", and '
                "credentials are taken from the environment"
            )
        self.path = "/".join((f"{scheme}://{bucket}", *folders))
        self._folder = "".join(f"{folder}/" for folder in folders)
        self._requests = Requests(f"{scheme}://{bucket}")
        self._process: int | None = os.getpid()

    def close(self) -> None:
        """End all use."""
        self._process = None

    @property
    def is_open(self) -> bool:
        """Whether this very process can write: a forked one could write twice."""
        return self._process == os.getpid()

    def make(
        self, name: str, request: Callable[[ModuleType, ObjectStore, str], _T], num_bytes: int = 0
    ) -> _T:
        """Make a request about an object; see `Requests.make`."""
        if self._process is None:
            raise RecordingError(f"{self.path} has been closed; open it again")
        path = self._folder + name
        return self._requests.make(lambda library, store: request(library, store, path), num_bytes)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin so, sorted."""
        found: list[str] = []
        pages: Iterator[Any] | None = None
        last = self._folder + prefix

        def next_page(library: ModuleType, store: ObjectStore, folder: str) -> Any:
            nonlocal pages
            if pages is None:
                # Names come in order, on request from the middle of the list on.
                begin = {"offset": last} if last else {}
                pages = iter(library.list(store, folder or None, chunk_size=_PAGE, **begin))
            try:
                return next(pages, ())
            except BaseException:
                # The rest is requested again.
                pages = None
                raise

        while page := self.make("", next_page):
            last = page[-1]["path"]
            names = [one["path"][len(self._folder) :] for one in page]
            found += [name.partition("/")[0] for name in names if name.startswith(prefix)]
            if not names[-1].startswith(prefix):
                break
        return sorted(set(found))

    @contextmanager
    def open(self, name: str, stamp: object = None) -> Iterator[Object]:
        """Open an object for reading; nothing is requested before it is read."""
        yield Object(self, name, stamp)

    def put(self, name: str, owner: str, write: Callable[[WriteAt], _T]) -> _T:
        """Put a new object in place, whole or not at all; see the NOTE."""
        # An object is sent as a whole, so its pieces stay in the caller's memory until then.
        pieces: dict[int, memoryview] = {}
        written = write(lambda offset, data: pieces.update({offset: memoryview(data)}))
        self._put(name, [pieces[offset] for offset in sorted(pieces)])
        return written

    def claim(self, name: str, content: bytes) -> None:
        """Put a small object in place."""
        self._put(name, [memoryview(content)])

    def unlink(self, name: str) -> None:
        """Remove an object, if there is one."""
        self.make(name, lambda library, store, path: library.delete(store, path))

    def check_writable(self, rank: int) -> None:
        """Refuse a bucket that is not writable, or whose puts are not conditional."""
        name, was_refused = f"lock-{rank:05d}", False
        with accessing(self.path):
            for _ in range(2):
                try:
                    self._put(name, [])
                except FileExistsError:
                    was_refused = True
                    break
        if not was_refused:
            raise RecordingError(
                f"{self.path}: this store replaces an existing object although the request "
                "forbids it (If-None-Match: *), so writers could overwrite each other: use a "
                "store that supports it"
            )

    def _put(self, name: str, pieces: list[memoryview]) -> None:
        num_bytes, ours = sum(map(len, pieces)), f"{uuid.uuid4().hex} {name}"
        if num_bytes > _MAX_BYTES:
            raise RecordingError(
                f"{self.path_of(name)}: {num_bytes} bytes are more than one request can put: set "
                "a smaller chunk_bytes"
            )

        def put(library: ModuleType, store: ObjectStore, path: str) -> None:
            content: Any = iter(pieces) if pieces else b""
            try:
                answer = library.put(
                    store, path, content, mode="create", attributes={_PUT_BY: ours}
                )
            except Exception as error:
                is_there = type(error).__name__ == "AlreadyExistsError"
                if not is_there or _put_by(library, store, path, name) != ours:
                    raise
            else:
                # A store that keeps no texts has nothing to compare.
                is_known = was_met(answer["e_tag"])
                if is_known and _put_by(library, store, path, name) not in (None, ours):
                    raise PassingError(_TO_ANOTHER)

        try:
            self.make(name, put, num_bytes)
        except FileExistsError as error:
            problem = "is there already: another writer has committed it; continue after it"
            raise FileExistsError(error.errno, f"{name} {problem}") from None


def _put_by(library: ModuleType, store: ObjectStore, path: str, name: str) -> str | None:
    """Return the text of the put that made an object; see the NOTE."""
    try:
        answer = library.get(store, path, options={"head": True})
    except FileNotFoundError:
        # Two simultaneous puts can hinder each other.
        raise PassingError("an object that is there already is not there") from None
    return _text(answer, name)


def _text(answer: Any, name: str) -> str | None:
    """Return the text that an object keeps, if the answer is about the object of the name."""
    found: str | None = answer.attributes.get(_PUT_BY)
    if found is not None and found.partition(" ")[2] not in ("", name):
        raise PassingError(_TO_ANOTHER)
    return found


class Object:
    """An object that is read, range by range.

    Parameters
    ----------
    bucket : Bucket
        The bucket that holds it.
    name : str
        Its name.
    stamp : object
        The expected stamp; None if it is not known.
    """

    def __init__(self, bucket: Bucket, name: str, stamp: object) -> None:
        self.path = bucket.path_of(name)
        self._bucket, self._name, self._stamp = bucket, name, stamp

    @property
    def num_bytes(self) -> int:
        """Its length."""
        length: int = self.stamp[0]
        return length

    @property
    def stamp(self) -> Any:
        """A value that changes when another object takes its place."""
        if self._stamp is None:
            self._get({"head": True})
        return self._stamp

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on, or fewer if it ends before."""
        if self._stamp is not None:
            count = min(count, self.num_bytes - offset)
        return bytes(self._range(offset, count)) if count > 0 else b""

    def fill(self, out: memoryview, offset: int) -> None:
        """Read into memory from ``offset`` on."""
        data = self._range(offset, len(out)) if out else memoryview(b"")
        if len(data) != len(out):
            raise RecordingError(f"{self.path} is damaged: it ends before byte {offset + len(out)}")
        out[:] = data

    def _range(self, offset: int, count: int) -> memoryview:
        try:
            return memoryview(self._get({"range": (offset, offset + count)}, count))
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            return memoryview(b"")

    def _get(self, options: Mapping[str, Any], num_bytes: int = 0) -> Any:
        # The tag ensures that it is the same one in every request.
        tag = None if self._stamp is None else self.stamp[1]
        wanted = {**options, **({} if tag is None else {"if_match": tag})}

        def get(library: ModuleType, store: ObjectStore, path: str) -> Any:
            answer = library.get(store, path, options=wanted)
            _text(answer, self._name)
            return answer.meta, b"" if "head" in options else answer.bytes()

        meta, data = self._bucket.make(self._name, get, num_bytes)
        was_met(meta["e_tag"])
        stamp = meta["size"], meta["e_tag"]
        if self._stamp not in (None, stamp):
            raise RecordingError(f"{self.path} was replaced since it was opened")
        self._stamp = stamp
        return data

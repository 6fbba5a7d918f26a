"""Buckets of objects on S3, Google's or Azure's stores, which hold a recording like a folder.

NOTE [A put without an answer]

A put acts at most once, since it is conditional: it fails if there is an object of the name. But
the answer can be lost, and a request can arrive twice. Then the put has acted, but the writer sees
a failure, or an existing object, as if another writer had been first. So each put carries a unique
text, which the object keeps beside its content: a writer that finds its own text there was first.

An object exists as a whole or not at all, and is durable when it exists. There are no locks: only
the put keeps two writers apart.

Errors say why a request was refused, and reveal no secret: credentials come from the environment,
and only parts of a store's answer that can't hold them are quoted.
"""

from __future__ import annotations

import errno
import importlib
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from scio_recorder.stores.disk_format.medium import (
    FormatError,
    Medium,
    ReadAt,
    Stamp,
    WriteAt,
    accessing,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_T = TypeVar("_T")

# The key of an object's metadata: a name that all stores and proxies accept.
_PUT_BY = "scioput"
# The number of names that one request lists.
_PAGE = 1000
# The first pause in seconds, and each is twice the one before: six seconds in all.
_FIRST_PAUSE, _TRIES = 0.1, 7
# The time limit of a request in seconds, and what is added for each number of bytes.
_SECONDS, _SECONDS_MORE, _BYTES_MORE = 15, 4, 4 << 20
# The most requests at once in this process: each holds the bytes that it reads in memory.
_NUM_REQUESTS = 16

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,200})")
# Secrets that a URL can hold: a password before an @, a signature after a question mark.
_CONFIDENTIAL = re.compile(r"(?<=//)[^/\s@]*@|\?[^\s)]*")
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
# Answers after which another try may succeed.
_PASSING = {"408", "409", "425", "429"}
_PASSING_CODES = {"RequestTimeout", "OperationAborted"}
# The address where machines in a cloud ask for credentials if the environment has none.
_ASKED_FOR_CREDENTIALS = re.compile(r"169\.254\.\d+\.\d+|metadata\.google\.internal")
# In a process that was forked from one that made requests, their threads don't exist.
_user: int | None = None
_slots = threading.BoundedSemaphore(_NUM_REQUESTS)


class PassingError(Exception):
    """An answer after which another try may succeed."""


class Bucket(Medium):
    """A place in a bucket.

    Parameters
    ----------
    url : str
        ``"s3://bucket/run"``, or ``gs://`` or ``az://``.

    Raises
    ------
    FormatError
        It is not such a URL.
    """

    # Beside its fixed time, a request takes as long as reading this many bytes.
    span_bytes = 16 << 20
    num_readers = _NUM_REQUESTS

    def __init__(self, url: str) -> None:
        scheme, _, place = url.partition("://")
        bucket, *folders = place.rstrip("/").split("/")
        if not bucket or any(sign in url for sign in "@?#") or {"", ".", ".."} & {*folders}:
            # It may hold a password, so the message does not repeat it.
            raise FormatError(
                'the place of a recording in a bucket is written like "s3://bucket/run", and '
                "credentials are taken from the environment"
            )
        self.path = "/".join((f"{scheme}://{bucket}", *folders))
        self._folder = "".join(f"{folder}/" for folder in folders)
        self._url = f"{scheme}://{bucket}"
        self._process: int | None = os.getpid()
        _library(self._url)

    def close(self) -> None:
        """End all use."""
        self._process = None

    @property
    def is_open(self) -> bool:
        """Whether this very process can write: a forked one could write twice."""
        return self._process == os.getpid()

    def make(
        self, name: str, request: Callable[[Any, ObjectStore, str], _T], num_bytes: int = 0
    ) -> _T:
        """Make a request about an object until it is answered, and return the answer.

        Parameters
        ----------
        name : str
            Its name.
        request : callable
            ``obstore, store, path -> answer``. It can act more than once: even a failed one may
            have acted.
        num_bytes : int, default 0
            The number of sent or received bytes, which extend the time limit.

        Raises
        ------
        FileNotFoundError, FileExistsError, PermissionError
            The answer says so.
        OSError
            There is another answer, or none after several tries.
        """
        if self._process is None:
            raise FormatError(f"{self.path} has been closed; open it again")
        library, client = _library(self._url), _client_for(self._url, num_bytes)
        for attempt in range(_TRIES):
            if attempt:
                # Randomly, so that many clients don't all come back at once.
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                with _slots:
                    return request(library, client, self._folder + name)
            except Exception as error:
                problem, is_passing = _understood(error)
            if not is_passing:
                break
        # Outside of the block, so that the error does not show the answer itself.
        raise problem

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin so, sorted."""
        return sorted(self.times(prefix))

    def times(self, prefix: str) -> dict[str, float]:
        """Return when each object whose name begins so was put, by the clock of the store."""
        times: dict[str, float] = {}
        last = self._folder + prefix

        def note(library: Any, store: ObjectStore, folder: str) -> None:
            nonlocal last
            # Names come in order, on request from the middle of the list on.
            begin = {"offset": last} if last else {}
            for page in library.list(store, folder or None, chunk_size=_PAGE, **begin):
                for entry in page:
                    name = entry["path"][len(folder) :]
                    if not name.startswith(prefix):
                        return
                    times[name.partition("/")[0]] = entry["last_modified"].timestamp()
                # If the next page fails, it is requested again.
                last = page[-1]["path"]

        self.make("", note)
        return times

    @contextmanager
    def reading(self, name: str, stamp: Stamp | None = None) -> Iterator[ReadAt]:
        """Give a function that reads a piece of an object by one request."""

        def read_at(offset: int, out: memoryview) -> Stamp:
            nonlocal stamp
            options: dict[str, Any] = {"range": (offset, offset + len(out))}
            if stamp is not None and stamp.version is not None:
                options["if_match"] = stamp.version

            def get(library: Any, store: ObjectStore, path: str) -> Any:
                answer = library.get(store, path, options=options)
                return answer.meta, memoryview(answer.bytes())

            meta, data = self.make(name, get, len(out))
            stamp = Stamp(meta["size"], meta["e_tag"])
            out = out[: stamp.num_bytes - offset]
            if len(data) != len(out):
                raise FormatError(f"{self.path_of(name)} is damaged: {len(data)} bytes came")
            out[:] = data
            return stamp

        yield read_at

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

    def has(self, name: str) -> bool:
        """Whether there is an object of this name."""
        with accessing(self.path_of(name)), suppress(FileNotFoundError):
            return bool(self.make(name, lambda library, store, path: library.head(store, path)))
        return False

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
            raise FormatError(
                f"{self.path}: this store replaces an existing object although If-None-Match: * "
                "forbids it, so writers could overwrite each other: use another store"
            )

    def _put(self, name: str, pieces: list[memoryview]) -> None:
        num_bytes, ours = sum(map(len, pieces)), f"{uuid.uuid4().hex} {name}"

        def put(library: Any, store: ObjectStore, path: str) -> None:
            content: Any = iter(pieces) if pieces else b""
            try:
                library.put(store, path, content, mode="create", attributes={_PUT_BY: ours})
            except Exception as error:
                is_there = type(error).__name__ == "AlreadyExistsError"
                if not is_there or _put_by(library, store, path) != ours:
                    raise

        try:
            self.make(name, put, num_bytes)
        except FileExistsError as error:
            problem = "is there already: another writer has committed it; continue after it"
            raise FileExistsError(error.errno, f"{name} {problem}") from None


def _put_by(library: Any, store: ObjectStore, path: str) -> str | None:
    """Return the text of the put that made an object; see the NOTE."""
    try:
        answer = library.get(store, path, options={"head": True})
    except FileNotFoundError:
        # Two simultaneous puts can hinder each other.
        raise PassingError("an object that is there already is not there") from None
    put_by: str | None = answer.attributes.get(_PUT_BY)
    return put_by


def _understood(error: Exception) -> tuple[OSError, bool]:
    """Return an error that explains an answer, and whether another try may succeed."""
    kind, text = type(error).__name__, str(error)
    said = _in_words(text)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return OSError(errno.ENXIO, f"there is no such bucket ({said})"), False
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return FileNotFoundError(errno.ENOENT, "there is no such object"), False
    if isinstance(error, FileExistsError) or kind == "AlreadyExistsError":
        return FileExistsError(errno.EEXIST, "the object exists already"), False
    if kind == "PreconditionError":
        return OSError(errno.ESTALE, "was replaced since it was opened"), False
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        problem = f"no permission ({said}); credentials are taken from the environment"
        return PermissionError(errno.EACCES, problem), False
    if _ASKED_FOR_CREDENTIALS.search(text):
        problem = "there are no credentials in the environment, such as AWS_ACCESS_KEY_ID"
        return PermissionError(errno.EACCES, problem), False
    if kind not in ("GenericError", "JoinError", PassingError.__name__):
        return OSError(errno.EINVAL, f"{kind}: {said}"), False
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None and status[1] == "416":
        return OSError(errno.ENODATA, "is damaged: it ends before the requested bytes"), False
    is_refused = status is not None and status[1].startswith("4") and status[1] not in _PASSING
    if is_refused and not (code is not None and code[1] in _PASSING_CODES):
        return OSError(errno.EIO, f"the store refuses the request ({said})"), False
    return OSError(errno.EIO, f"{_TRIES} requests have failed, the last with: {said}"), True


def _in_words(text: str) -> str:
    """Return the message of an answer without secrets."""
    matches = [pattern.search(text) for pattern in (_STATUS, _CODE, _MESSAGE)]
    words = [match[1] for match in matches if match is not None]
    return _CONFIDENTIAL.sub("", ": ".join(words) or text.partition("\n")[0])[:300]


def _library(url: str) -> Any:
    """Return obstore, unless its threads were left behind by a fork."""
    global _user
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise FormatError(
            f"{url}: a process that was forked from one that uses buckets can't use them, since it "
            'lacks the threads: start processes by "spawn" or "forkserver", as in '
            'DataLoader(..., multiprocessing_context="spawn")'
        )
    return importlib.import_module("obstore")


def _client_for(url: str, num_bytes: int) -> ObjectStore:
    # Of few different sizes, each of which has a client.
    seconds = _SECONDS + num_bytes // _BYTES_MORE * _SECONDS_MORE
    # The environment may change: by tests, or by users with new credentials.
    environment = (item for item in os.environ.items() if item[0].startswith(_SETTINGS))
    try:
        return _client(url, seconds, frozenset(environment))
    except Exception as error:
        # The environment's settings did not even allow a request.
        raise OSError(errno.EINVAL, _in_words(str(error))) from None


@cache
def _client(url: str, seconds: int, environment: frozenset[tuple[str, str]]) -> ObjectStore:
    store: Any = importlib.import_module("obstore.store")
    options: dict[str, Any] = {"timeout": f"{seconds}s", "connect_timeout": "5s"}
    if any("ENDPOINT" in name and value.startswith("http://") for name, value in environment):
        options["allow_http"] = True
    # Only one place repeats requests, since it knows which may have acted.
    no_retries = {"max_retries": 0}
    client: ObjectStore = store.from_url(url, client_options=options, retry_config=no_retries)
    return client

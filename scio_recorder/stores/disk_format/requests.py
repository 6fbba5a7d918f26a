"""Requests to object stores, which are repeated if that can help; failures in plain words.

Errors say why a request was refused, and reveal no secret: credentials come from the environment,
and only parts of a store's answer that can't hold them are quoted.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from scio_recorder.errors import needing

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_T = TypeVar("_T")

# The first pause in seconds, and each is twice the one before: six seconds in all.
_FIRST_PAUSE, _TRIES = 0.1, 7
# The time limit of a small request in seconds, and the bytes for which a large one has one second
# more.
_SECONDS, _BYTES_A_SECOND = 15, 1 << 20
# The number of answers of which one may come again.
_NUM_TAGS = 1000
# The most requests at once in this process: each holds the bytes that it reads in memory.
NUM_REQUESTS = 16

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,200})")
# Secrets that a URL can hold: a password before an @, a signature after a question mark.
_CONFIDENTIAL = re.compile(r"(?<=//)[^/\s@]*@|\?[^\s)]*")
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
_SECRET = re.compile(r"(AWS|AZURE|GOOGLE)_.*(KEY|SECRET|TOKEN|PASSWORD|CREDENTIALS|SIGNATURE)")
# Answers after which another try may succeed.
_PASSING = {"408", "409", "425", "429"}
_PASSING_CODES = {"RequestTimeout", "OperationAborted"}
# The address where machines in a cloud ask for credentials if the environment has none.
_ASKED_FOR_CREDENTIALS = re.compile(r"169\.254\.\d+\.\d+|metadata\.google\.internal")


class PassingError(Exception):
    """An answer after which another try may succeed."""


class Requests:
    """Makes requests to a bucket, from any thread of any process.

    Parameters
    ----------
    url : str
        The bucket, such as ``"s3://bucket"``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._library()

    def make(self, request: Callable[[ModuleType, ObjectStore], _T], num_bytes: int = 0) -> _T:
        """Make a request until it is answered, and return the answer.

        Parameters
        ----------
        request : callable
            ``obstore, store -> answer``. It can act more than once: even a failed one may have
            acted.
        num_bytes : int, default 0
            The number of sent or received bytes, which extend the time limit.

        Raises
        ------
        FileNotFoundError, FileExistsError, PermissionError
            The answer says so.
        OSError
            There is another answer, or none after several tries.
        """
        for attempt in range(_TRIES):
            if attempt:
                # Randomly, so that many clients don't all come back at once.
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                library = self._library()
                with _slots(os.getpid()):
                    return request(library, self._client(num_bytes))
            # The library's errors have other classes in a forked process.
            except Exception as error:
                problem, is_passing = _understood(error)
            if not is_passing:
                break
        # Outside of the block, so that the error does not show the answer itself.
        raise problem

    def _client(self, num_bytes: int) -> ObjectStore:
        # The environment may change: by tests, or by users with new credentials.
        environment = (item for item in os.environ.items() if item[0].startswith(_SETTINGS))
        try:
            return _client(os.getpid(), self._url, _seconds(num_bytes), frozenset(environment))
        except Exception as error:
            # The environment's settings did not even allow a request.
            raise OSError(errno.EINVAL, _in_words(str(error))) from None

    def _library(self) -> ModuleType:
        with needing("cloud", f"a recording on {self._url}"), _loading:
            return _library(os.getpid())


def _understood(error: Exception) -> tuple[OSError, bool]:
    """Return an error that explains an answer, and whether another try may succeed."""
    kind, text = type(error).__name__, str(error)
    said = _in_words(text)
    if type(error) is OSError:
        return OSError(*error.args), False
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
        return OSError(errno.ENODATA, "it ends before the requested bytes"), False
    is_refused = status is not None and status[1].startswith("4") and status[1] not in _PASSING
    if is_refused and not (code is not None and code[1] in _PASSING_CODES):
        return OSError(errno.EIO, f"the store refuses the request ({said})"), False
    return OSError(errno.EIO, f"{_TRIES} requests have failed, the last with: {said}"), True


def _in_words(text: str) -> str:
    """Return the message of an answer without secrets."""
    found = [pattern.search(text) for pattern in (_STATUS, _CODE, _MESSAGE)]
    words = [match[1] for match in found if match is not None]
    said = _CONFIDENTIAL.sub("", ": ".join(words) or text.partition("\n")[0])
    for name, value in os.environ.items():
        if len(value) > 3 and _SECRET.fullmatch(name):
            said = said.replace(value, "***")
    return said[:300]


def _seconds(num_bytes: int) -> int:
    more = num_bytes // _BYTES_A_SECOND
    # Rounded up, so that there are few different limits.
    return 1 << (2 * _SECONDS + more).bit_length() if more else _SECONDS


@cache
def _slots(process: int) -> threading.BoundedSemaphore:
    # In a forked process, the thread that held the parent's does not exist.
    return threading.BoundedSemaphore(NUM_REQUESTS)


@cache
def _client(
    process: int, url: str, seconds: int, environment: frozenset[tuple[str, str]]
) -> ObjectStore:
    store: Any = importlib.import_module("obstore.store")
    endpoints = [value for name, value in environment if "ENDPOINT" in name]
    options: dict[str, Any] = {"timeout": f"{seconds}s", "connect_timeout": "5s"}
    if any(value.startswith("http://") for value in endpoints):
        options["allow_http"] = True
    # Only one place repeats requests, since it knows which may have acted.
    found: ObjectStore = store.from_url(url, client_options=options, retry_config=_NO_RETRIES)
    return found


_NO_RETRIES = {"max_retries": 0}


def was_met(tag: str | None) -> bool:
    """Whether an earlier answer to this process had an object's tag; note the tag."""
    tags = _tags(os.getpid())
    found = tag in tags
    tags.append(tag)
    return found


@cache
def _tags(process: int) -> deque[str | None]:
    return deque(maxlen=_NUM_TAGS)


@cache
def _library(process: int) -> ModuleType:
    """Return obstore, for this process.

    A fork does not copy its threads, and calls there would wait for them forever. The system treats
    a copy of the library's file as another library, which starts threads of its own.
    """
    if not _forked_with_it:
        return importlib.import_module("obstore")
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        del sys.modules[name]
    package = importlib.util.find_spec("obstore")
    folders = None if package is None else package.submodule_search_locations
    found = PathFinder.find_spec("obstore._obstore", folders)
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copy(str(found and found.origin), folder)
        copy = importlib.util.spec_from_file_location("obstore._obstore", path)
        if copy is None or copy.loader is None:
            raise ImportError("obstore can't be used in a process that was forked: spawn it")
        sys.modules[copy.name] = importlib.util.module_from_spec(copy)
        copy.loader.exec_module(sys.modules[copy.name])
    return importlib.import_module("obstore")


_forked_with_it = False
_loading = threading.Lock()


def _note_fork() -> None:
    global _forked_with_it, _loading
    _forked_with_it = "obstore._obstore" in sys.modules
    # A thread of the parent may have held the lock.
    _loading = threading.Lock()


# Systems without forks have no such function.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)

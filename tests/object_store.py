"""A store of objects on this machine, and a proxy before it at which every request can go wrong.

The store is moto's, which keeps to ``If-None-Match: *``, but looks and puts in two steps: the proxy
lets one request that writes or lists through at a time.
"""

from __future__ import annotations

import http.client
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
from moto.server import ThreadedMotoServer

from scio_recorder.stores.disk_format import bucket

# What can happen to a request, besides nothing, which is "", and that it is "denied".
FAULTS = (
    "refused",  # it does not arrive, and the answer is 503
    "cut",  # it does not arrive: the connection is closed
    "unanswered",  # it arrives, and the connection is closed
    "late",  # it arrives later
    "twice",  # it arrives twice, and the second answer is the one that is seen
    "halved",  # half of the answer is seen
    "silent",  # it does not arrive, and there is no answer as long as anybody waits
)


class Request(NamedTuple):
    """A request that has arrived at the proxy."""

    method: str
    path: str
    sent: int
    received: int


@dataclass
class Traffic:
    """What passes the proxy, and what becomes of it."""

    # ``number, method, path -> one of FAULTS``, where numbers count requests.
    fate: Callable[[int, str, str], str] = lambda number, method, path: ""
    requests: list[Request] = field(default_factory=list)
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    # One at a time writes or lists.
    writing: threading.Lock = field(default_factory=threading.Lock)

    def next_fate(self, method: str, path: str) -> str:
        with self.lock:
            self.number += 1
            number = self.number - 1
        return self.fate(number, method, path)

    def clear(self) -> None:
        with self.lock:
            self.requests, self.number = [], 0


class Proxy(BaseHTTPRequestHandler):
    """Hands requests on to the store."""

    protocol_version = "HTTP/1.1"
    # An answer is one packet, and does not wait for another.
    disable_nagle_algorithm = True
    wbufsize = -1
    traffic: Traffic
    port: int

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fate = self.traffic.next_fate(self.command, self.path)
        if fate in ("cut", "refused", "denied", "silent"):
            self._log(len(body), 0)
            if fate == "refused":
                self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
            elif fate == "denied":
                self._answer(403, [], _DENIED)
            elif fate == "silent":
                # Until the other side hangs up.
                self.connection.recv(1)
                self._cut()
            else:
                self._cut()
            return
        if fate == "late":
            time.sleep(0.3)
        for _ in range(2 if fate == "twice" else 1):
            status, headers, answer = self._forward(body)
        self._log(len(body), len(answer))
        if fate == "unanswered":
            self._cut()
        elif fate == "halved":
            self._answer(status, headers, answer, cut_at=len(answer) // 2)
        else:
            self._answer(status, headers, answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle  # noqa: N815 - as the base wants it

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        is_alone = self.command != "GET" or "list-type" in self.path
        with self.traffic.writing if is_alone else nullcontext():
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            found = answer.status, answer.getheaders(), answer.read()
        connection.close()
        return found

    def _answer(self, status: int, headers: Any, body: bytes, cut_at: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        length = lengths[0] if self.command == "HEAD" and lengths else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body[:cut_at])
        if cut_at is not None:
            self.wfile.flush()
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _log(self, sent: int, received: int) -> None:
        with self.traffic.lock:
            self.traffic.requests.append(Request(self.command, self.path, sent, received))

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def object_store(traffic: Traffic) -> Iterator[str]:
    """Run a store and a proxy; yield the URL of the proxy."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    handler = type("_Proxy", (Proxy,), {"traffic": traffic, "port": store.get_host_and_port()[1]})
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()
        store.stop()


def environment(url: str) -> dict[str, str]:
    """Return what has to be in the environment to use the store."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-this-test",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def impatient_store() -> Iterator[tuple[str, Traffic]]:
    """Run a server with a bucket, which requests of this process find and don't wait for long."""
    traffic = Traffic()
    with object_store(traffic) as url:
        by_hand(url, "PUT", "/bucket")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(url).items():
                patch.setenv(name, value)
            patch.setattr(bucket, "_FIRST_PAUSE", 0.001)
            patch.setattr(bucket, "_SECONDS", 1)
            yield url, traffic


def by_hand(url: str, method: str, path: str, body: bytes = b"") -> bytes:
    """Make a request by hand; the store takes every signature for good."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request(method, path, body, {"Authorization": _SIGNATURE})
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    assert answer.status == 200, found
    return found


def objects(url: str, folder: str) -> dict[str, bytes]:
    """Return what is in a folder of a bucket, by other means than those that are tested."""
    bucket, _, prefix = folder.partition("/")
    listed = by_hand(url, "GET", f"/{bucket}?list-type=2&prefix={prefix}/").decode()
    keys = re.findall("<Key>([^<]*)</Key>", listed)
    return {key.removeprefix(f"{prefix}/"): by_hand(url, "GET", f"/{bucket}/{key}") for key in keys}


_SIGNATURE = "AWS4-HMAC-SHA256 Credential=AKIATESTTESTTEST/20200101/us-east-1/s3/aws4_request"
# What stores quote is what they were sent.
_DENIED = (
    b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message>"
    b"<AWSAccessKeyId>AKIATESTTESTTEST</AWSAccessKeyId></Error>"
)


def at_random(dice: random.Random, rate: float) -> Callable[[int, str, str], str]:
    """Return a fate that lets each request go wrong with this probability."""
    return lambda number, method, path: dice.choice(FAULTS) if dice.random() < rate else ""


def main() -> None:
    """Print where a store is that anybody can try: until Ctrl-C."""
    with object_store(Traffic()) as url:
        by_hand(url, "PUT", "/bucket")
        print(" ".join(f"{name}={value}" for name, value in environment(url).items()), flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)


if __name__ == "__main__":
    main()

"""Collecting into a bucket, compared with puts of the same chunks by obstore; and reading.

Run ``python benchmarks/cloud.py [--rounds 10]``. The store is a process of this machine that keeps
objects in memory and does nothing else: it takes more than a network brings.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import re
import statistics
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import obstore
import torch
from obstore.store import S3Store
from rich.console import Console
from rich.table import Table
from timing import interleaved, timed
from torch import nn

from scio_recorder import Recorder, open_recording
from scio_recorder.stores import Disk

ROWS, FEATURES, NUM_BATCHES = 4096, 1024, 32
CHUNK_BYTES = 64 << 20
BATCH_BYTES = ROWS * FEATURES * 4


class Server(BaseHTTPRequestHandler):
    """The part of S3 that a recording needs."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    objects: dict[str, bytes]
    # Each object has a tag of its own, as where stores make them of the contents.
    tags: dict[str, int]
    numbers: Iterator[int]
    requests: list[tuple[str, int]]

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        is_there = self.path in self.objects
        if not is_there:
            self.objects[self.path] = content
            self.tags[self.path] = next(self.numbers)
        self._answer(412 if is_there and self.headers["If-None-Match"] else 200)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            folder = re.search(r"prefix=([^&]*)", self.path)
            prefix = "/bucket/" + (folder[1].replace("%2F", "/") if folder else "")
            entries = "".join(
                f"<Contents><Key>{path.removeprefix('/bucket/')}</Key><Size>{len(content)}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for path, content in sorted(self.objects.items())
                if path.startswith(prefix)
            )
            self._answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())
            return
        content = self.objects.get(self.path)
        if content is None:
            self._answer(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, content)
            return
        first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        where = f"bytes {first}-{last}/{len(content)}"
        self._answer(206, memoryview(content)[first : last + 1], where)

    do_HEAD = do_GET  # noqa: N815 - as the base wants it

    def _answer(self, status: int, body: bytes | memoryview = b"", where: str = "") -> None:
        self.requests.append((self.command, len(body)))
        self.send_response_only(status)
        if where:
            self.send_header("Content-Range", where)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{self.tags.get(self.path, 0)}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()


def serve(parent: Connection) -> None:
    """Serve, and on request report the requests since the last report and forget all objects."""
    objects: dict[str, bytes] = {}
    requests: list[tuple[str, int]] = []
    state = {"objects": objects, "requests": requests, "tags": {}, "numbers": itertools.count(1)}
    handler = type("_Server", (Server,), state)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    parent.send(server.server_address[1])

    def tell() -> None:
        while True:
            forgets = parent.recv()
            parent.send(list(requests))
            requests.clear()
            if forgets:
                objects.clear()

    threading.Thread(target=tell, daemon=True).start()
    server.serve_forever()


class Store:
    """The server process."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{self._pipe.recv()}",
            AWS_ACCESS_KEY_ID="nobody",
            AWS_SECRET_ACCESS_KEY="nothing",
            AWS_REGION="us-east-1",
        )

    def requests(self, *, forgets: bool = False) -> list[tuple[str, int]]:
        self._pipe.send(forgets)
        found: list[tuple[str, int]] = self._pipe.recv()
        return found


def collect(batch: torch.Tensor) -> Any:
    rnet = Recorder(nn.Identity(), input_size=(1, FEATURES))
    rnet.record("0-1")
    store = Disk("s3://bucket/run", chunk_bytes=CHUNK_BYTES)
    return rnet.collect([batch] * NUM_BATCHES, store=store, progress=False)


def put(bucket: S3Store, content: bytes) -> None:
    for number in range(NUM_BATCHES * BATCH_BYTES // CHUNK_BYTES):
        obstore.put(bucket, f"plain/{number}", content, mode="create")


def writing(store: Store, batch: torch.Tensor, rounds: int) -> list[float]:
    """Return time(obstore puts) / time(collect) of each round."""
    bucket = S3Store("bucket", client_options={"allow_http": True})
    content = batch.numpy().tobytes() * (CHUNK_BYTES // BATCH_BYTES)

    def arm(work: Any, *arguments: Any) -> Any:
        def run() -> None:
            store.requests(forgets=True)
            work(*arguments)

        return run

    arms = {"put": arm(put, bucket, content), "collect": arm(collect, batch)}
    spent = interleaved(arms, rounds)
    return [a / b for a, b in zip(spent["put"], spent["collect"], strict=True)]


def reading(store: Store, batch: torch.Tensor, rounds: int) -> tuple[list[float], int, int]:
    """Return time(obstore gets a range) / time(a batch read), and what a batch costs at most."""
    store.requests(forgets=True)
    collect(batch)
    bucket = S3Store("bucket", client_options={"allow_http": True})
    chunk, ratios = "run/chunk-00000-00000000.safetensors", list[float]()
    requests = received = 0
    for number in range(rounds):
        samples = open_recording("s3://bucket/run")["0-1"]
        first, spent = number % 3 * ROWS + 100, {}
        begin = 4096 + first * FEATURES * 4
        arms = {
            "get": partial(obstore.get_range, bucket, chunk, start=begin, length=BATCH_BYTES),
            "read": partial(samples.__getitem__, slice(first, first + ROWS)),
        }
        for name in random.sample(sorted(arms), 2):
            store.requests()
            spent[name] = timed(arms[name])
            if name == "read":
                asked = store.requests()
                requests = max(requests, len(asked))
                received = max(received, sum(count for _, count in asked))
        ratios.append(spent["get"] / spent["read"])
    return ratios, requests, received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    batch, store = torch.randn(ROWS, FEATURES), Store()
    try:
        written = writing(store, batch, rounds)
        read, requests, received = reading(store, batch, 3 * rounds)
    finally:
        store.process.kill()
        store.process.join()
    table = Table(title=f"a bucket, {rounds} rounds, torch {torch.__version__}")
    for heading in ("ours", "beside", "rate", "quartiles", "bar"):
        table.add_column(heading)
    rows = [
        ("collect", "obstore, the same bytes", written, ">= 0.85"),
        ("read a batch, verified", "obstore, the same range", read, ""),
    ]
    for ours, beside, ratios, bar in rows:
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(ours, beside, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", bar)
    console = Console(width=130)
    console.print(table)
    console.print(f"a batch of {BATCH_BYTES:,} bytes: {requests} requests, {received:,} bytes")


if __name__ == "__main__":
    main()

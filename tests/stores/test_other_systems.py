"""Systems other than Linux, as far as they can be had by taking away what they lack."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from scio_recorder.stores import memory
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.disk_format.folder import fsync, write_at

# What Windows lacks, taken away after all libraries have been imported.
WITHOUT = """
import mmap, os, signal, sys, time
import numpy, psutil, rich.console, rich.progress, rich.table, safetensors.torch, torch, torchinfo
import torch._dynamo, torch.distributed

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
names = "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_TMPFILE fork preadv pread pwrite "
names += "register_at_fork sched_getaffinity sysconf"
for name in names.split():
    delattr(os, name)
del time.clock_gettime, signal.SIGKILL
for name in [name for name in vars(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))]:
    delattr(mmap, name)
sys.platform = "win32"
"""
USE = """
from scio_recorder import Recorder, RecordingError, open_recording
from scio_recorder.reductions import Mean
from scio_recorder.stores.disk_format.bucket import Bucket

try:
    Bucket("s3://bucket/run")
except ModuleNotFoundError as error:
    assert "cloud" in str(error)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
batches = torch.randn(3, 2, 3).unbind()
wanted = torch.cat([net[0](batch) for batch in batches])
rnet = Recorder(net, input_size=(2, 3))
rnet.record("0")
for store in ("auto", "host", "device"):
    assert torch.equal(rnet.collect(batches, store=store, progress=False)["0"], wanted)
means = rnet.collect(batches, reduce=Mean(), progress=False)
torch.testing.assert_close(means["0"], wanted.double().mean(0).float())
rnet.collect(batches, progress=False).report("page.html")
for attempt in (
    lambda: rnet.collect(batches, store="disk:run", progress=False),
    lambda: rnet.collect(batches, progress=False).save("run"),
    lambda: open_recording("."),
):
    try:
        attempt()
    except RecordingError as error:
        assert "needs locks of files" in str(error), error
        assert 'store="host"' in str(error), error
    else:
        raise AssertionError
"""


@pytest.mark.campaign
def test_without_what_windows_lacks_all_but_folders_works(tmp_path):
    command = [sys.executable, "-c", WITHOUT + USE]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["page.html"]


def test_free_memory_where_no_file_tells_it(monkeypatch):
    monkeypatch.setattr(memory, "_lines", lambda path: [])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=123))
    assert memory._free_host_bytes() == 123


@pytest.mark.parametrize("code", [0, errno.ENOTSUP, errno.EIO])
def test_a_sync_reaches_the_disk_itself_where_that_is_another_call(code, monkeypatch):
    calls = []

    def full_sync(descriptor: int, command: int) -> None:
        calls.append((descriptor, command))
        if code:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(system, "_full_sync", 51)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append((descriptor, "fsync")))
    if code == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(code)):
            fsync(7)
    else:
        fsync(7)
    assert calls == [(7, 51), *([(7, "fsync")] if code == errno.ENOTSUP else [])]


@pytest.mark.parametrize("call", [None, lambda *given: -1], ids=["absent", "refused"])
def test_a_file_is_whole_where_no_sync_can_begin_early(call, monkeypatch, tmp_path):
    monkeypatch.setattr(system, "_sync_file_range", call)
    with open(tmp_path / "file", "wb") as file:
        write_at(file.fileno(), 0, b"first")
        write_at(file.fileno(), 5, b"second")
    assert (tmp_path / "file").read_bytes() == b"firstsecond"

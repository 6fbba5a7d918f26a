"""One writer at a time: an advisory lock on an empty file, gone when its process is."""

from __future__ import annotations

import fcntl
import os
import weakref
from typing import TYPE_CHECKING

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import system
from scio_recorder.stores.disk_format.folder import close_quietly

if TYPE_CHECKING:
    from scio_recorder.stores.disk_format.folder import Folder


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class WriterLock:
    """The right to write one rank's part of a recording.

    Parameters
    ----------
    folder : Folder
        The recording.
    name : str
        The file that is locked.

    Raises
    ------
    RecordingError
        If another writer holds it.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._descriptor: int | None = None
        self._owner = os.getpid()
        descriptor = system.open_file(name, _FLAGS, 0o666, dir_fd=folder.descriptor)
        try:
            system.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            close_quietly(descriptor)
            message = f"{folder.path} is being written by another writer, which holds {name}"
            raise RecordingError(message) from cause
        except BaseException:
            close_quietly(descriptor)
            raise
        self._descriptor = descriptor
        _HELD.add(self)

    @property
    def held(self) -> bool:
        """Whether this very process still holds the lock."""
        return self._descriptor is not None and self._owner == os.getpid()

    def release(self) -> None:
        """Let another writer in."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_quietly(descriptor)


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    # A forked data loader worker would keep the lock alive after its parent was killed, and
    # nothing could be resumed until the worker noticed.
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited)

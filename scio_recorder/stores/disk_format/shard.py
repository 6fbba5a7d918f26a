"""One writer's part of a recording: chunk files, and the journal that makes them count."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import system
from scio_recorder.stores.disk_format.chunks import FileEntry, block_checksums, dense, write_tensors
from scio_recorder.stores.disk_format.folder import Folder, close_quietly, write_all
from scio_recorder.stores.disk_format.helper import helped_by
from scio_recorder.stores.disk_format.journal import encode_frame
from scio_recorder.stores.disk_format.jsons import JSON, dump
from scio_recorder.stores.disk_format.run import JOURNAL_NAME, shard_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from scio_recorder.stores.disk_format.records import OpenRecord

__all__ = ["ShardWriter"]


class _SyncFailedError(OSError):
    """A chunk file whose sync failed: what of it has reached the disk can't be known."""


class ShardWriter:
    """Writes a shard that nobody has written before.

    A file counts once the journal names it, and the journal names it only after the file, its name
    and everything that precedes it in the journal are durable.
    """

    def __init__(self, root: Folder, opening: OpenRecord) -> None:
        self._sequence = 0
        self._next_number = 0
        self._journal_bytes = 0
        self._unusable: str | None = None
        self._folder = root.create_subfolder(shard_name(opening.rank, opening.attempt))
        self._journal: int | None = None
        try:
            self._journal = self._folder.create_file(JOURNAL_NAME, append=True)
            self.commit(opening.to_json())
            self.settle()
            self._folder.sync()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Its folder, for messages."""
        return self._folder.path

    def store(self, tensors: Mapping[str, Tensor]) -> FileEntry | None:
        """Write a file; without tensors there is none. It does not count before `commit`."""
        if not tensors:
            return None
        plain = {name: dense(tensor) for name, tensor in tensors.items()}
        try:
            return self._write_file(plain)
        except _SyncFailedError:
            # Linux reports a failed sync once and then takes the lost pages for written, so that
            # syncing again would succeed and prove nothing. A new file is written in full.
            return self._write_file(plain)

    def sync_names(self) -> None:
        """Make the names of all stored files durable."""
        self._folder.sync()

    def commit(self, record: dict[str, JSON]) -> None:
        """Append a record to the journal; what it names is durable when this returns."""
        if self._journal is None or self._unusable is not None:
            reason = self._unusable or "it has been closed"
            raise RecordingError(f"{self.path} takes no more: {reason}; resume the recording")
        frame = encode_frame(dump({"sequence": self._sequence, **record}))
        # Whatever interrupts this leaves open whether the record counts, and a caller that tried
        # again could commit the same samples twice: only reading the journal again can tell.
        self._unusable = "writing its journal was interrupted"
        try:
            write_all(self._journal, frame)
            system.fsync(self._journal)
        except OSError:
            self._undo_record()
            raise
        self._sequence += 1
        self._journal_bytes += len(frame)

    def settle(self) -> None:
        """Allow the next commit, after whatever counts the last one has taken note of it."""
        self._unusable = None

    def discard(self, file: FileEntry) -> None:
        """Remove a file that has been replaced; what can't be removed now does no harm."""
        with suppress(OSError):
            self._folder.unlink(file.name)

    def close(self) -> None:
        """Close the files."""
        journal, self._journal = self._journal, None
        if journal is not None:
            close_quietly(journal)
        self._folder.close()

    def _write_file(self, tensors: Mapping[str, Tensor]) -> FileEntry:
        number, self._next_number = self._next_number, self._next_number + 1
        name = FileEntry(number, 0, ()).name
        temporary = name + ".tmp"
        descriptor = self._folder.create_file(temporary)
        try:
            num_bytes = write_tensors(descriptor, tensors)
            # The checksums cost nothing while the disk is at work.
            with helped_by(lambda: _sync(descriptor)):
                blocks = block_checksums(tensors)
        except BaseException:
            with suppress(OSError):
                self._folder.unlink(temporary)
            raise
        finally:
            close_quietly(descriptor)
        self._folder.rename(temporary, name)
        return FileEntry(number, num_bytes, blocks)

    def _undo_record(self) -> None:
        # After a failed sync the record may be readable now and gone after a power loss.
        if self._journal is not None:
            with suppress(OSError):
                system.ftruncate(self._journal, self._journal_bytes)
                system.fsync(self._journal)


def _sync(descriptor: int) -> None:
    try:
        system.fsync(descriptor)
    except OSError as cause:
        raise _SyncFailedError(cause.errno, cause.strerror) from cause

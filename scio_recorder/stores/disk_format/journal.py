"""The journal: framed, checksummed records, appended one at a time.

A frame is ``LLLLLLLL CCCCCCCC PAYLOAD XXXXXXXXXXXXXXXX`` and a line feed: the payload's length and
the first half of the checksum of that length, the payload, and its checksum, all but the payload in
hexadecimal digits. The length has a checksum of its own because a wrong one would make the rest of
the file look like a frame that was never finished, and what is torn is dropped without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from scio_recorder.stores.disk_format import system
from scio_recorder.stores.disk_format.checksums import DIGITS, checksum, new_checksum
from scio_recorder.stores.disk_format.folder import read_at

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EMPTY", "Frames", "encode_frame", "read_frames"]

MAX_PAYLOAD_BYTES = 64 << 20
_PREFIX_BYTES = 18
_SUFFIX_BYTES = DIGITS + 2


class Frames(NamedTuple):
    """What a journal holds: its whole payloads, and length and checksum of the file itself."""

    payloads: list[bytes]
    num_bytes: int
    checksum: str


EMPTY = Frames([], 0, checksum(b""))


def encode_frame(payload: bytes) -> bytes:
    r"""Return ``payload`` framed.

    Raises
    ------
    ValueError
        If the payload is longer than a reader would accept.

    Examples
    --------
    >>> encode_frame(b"{}")
    b'00000002 c124f312 {} 1349cde127705c16\n'
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes; commit fewer samples at a time")
    return _prefix(b"%08x" % len(payload)) + payload + _suffix(payload)


def read_frames(descriptor: int) -> Frames:
    """Read a journal; `ValueError` if a whole frame in it has changed.

    A frame that the file ends inside was being written when the writer stopped: it is left out.
    """
    size = system.fstat(descriptor).st_size
    digest = new_checksum()
    payloads = []
    for data, payload in _split(descriptor, size):
        digest.update(data)
        if payload is not None:
            payloads.append(payload)
    return Frames(payloads, size, digest.hexdigest())


def _split(descriptor: int, size: int) -> Iterator[tuple[bytes, bytes | None]]:
    offset = 0
    while offset < size:
        prefix = read_at(descriptor, offset, _PREFIX_BYTES)
        if len(prefix) < _PREFIX_BYTES:
            yield prefix, None
            return
        length = _length(prefix, offset)
        rest = read_at(descriptor, offset + _PREFIX_BYTES, length + _SUFFIX_BYTES)
        if len(rest) < length + _SUFFIX_BYTES:
            yield prefix + rest, None
            return
        payload = rest[:length]
        if rest[length:] != _suffix(payload):
            raise ValueError(f"the record at byte {offset} does not match its checksum")
        yield prefix + rest, payload
        offset += len(prefix) + len(rest)


def _length(prefix: bytes, offset: int) -> int:
    digits = prefix[:8]
    if prefix != _prefix(digits) or int(digits, 16) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"the record at byte {offset} has a damaged length")
    return int(digits, 16)


def _prefix(digits: bytes) -> bytes:
    return b"%s %s " % (digits, checksum(digits)[:8].encode())


def _suffix(payload: bytes) -> bytes:
    return b" %s\n" % checksum(payload).encode()

"""Files of tensors and strict JSON, written from and read into tensors' memory, and checked.

NOTE [A file that says all about itself]

Each is a safetensors file whose metadata has three texts: the checksum of the header, those of all
blocks of the data, and ``content``, which is JSON: a table of the tensors in torch's terms, and
everything else that the commit consists of. Table and content determine every byte of the header.
So a reader does not trust a header: it writes the header again from the parsed content, and
compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.stores.disk_format.medium import (
    FormatError,
    Medium,
    ReadAt,
    WriteAt,
    accessing,
    for_each,
    parsing,
)

_T = TypeVar("_T")
JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor.

    Examples
    --------
    >>> TensorInfo((2, 3), torch.float32).nbytes
    24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"shape {self.shape} and {self.dtype}"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, rows: int) -> TensorInfo:
        """Return the shape and dtype of this many such tensors, stacked."""
        return TensorInfo((rows, *self.shape), self.dtype)


Table: TypeAlias = Mapping[str, TensorInfo]

DIGITS = 16
MAX_FILE_BYTES = 64 << 20
MAX_DEPTH = 64
# Sizes below this stay exact in every program that reads them as doubles.
MAX_SIZE = 1 << 48
BLOCK_BYTES = 1 << 20
MAX_DIMENSIONS = 64
# If the header fills whole pages, the data begins aligned, and is read faster.
_PAGE_BYTES = 4096

_BEFORE_CHECKSUM = b'{"__metadata__":{"xxh3_64":"'
_BEFORE_BLOCKS = b'","blocks":"'
_BEFORE_CONTENT = b'","content":'
_CHECKSUM_AT = 8 + len(_BEFORE_CHECKSUM)
_BLOCKS_AT = _CHECKSUM_AT + DIGITS + len(_BEFORE_BLOCKS)

# The name of each dtype in safetensors; None for those that it lacks, which are kept as bytes.
_FORMAT_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: None,
    torch.float8_e5m2fnuz: None,
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex32: None,
    torch.complex64: "C64",
    torch.complex128: None,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in tables."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in _FORMAT_NAMES}

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def checksum(data: bytes | memoryview) -> str:
    """Return XXH3 of 64 bits, which runs at the speed of memory, in hexadecimal digits.

    Examples
    --------
    >>> checksum(b"")
    '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def dump(value: object) -> bytes:
    """Return the canonical form: ASCII, no spaces, keys in the given order.

    Raises
    ------
    ValueError, TypeError
        If ``value`` is not JSON (infinities and NaN are not), or is nested so deeply that it could
        exhaust the stack of a reader.
    """
    try:
        data = _ENCODER.encode(value).encode("ascii")
        is_deep = data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return data


def parse(data: bytes) -> Any:
    """Return the value of a JSON text; `ValueError` for any text that `dump` would not write.

    So it has no constants outside of the standard and no repeated keys, which programs read
    differently, and no deep nesting.
    """
    try:
        value = json.loads(data.decode("ascii"))
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    if dump(value) != data:
        raise ValueError("it has a repeated key, or is not in canonical form")
    return value


def as_read(value: object) -> Any:
    """Return a value as a reader of its text will find it: tuples are lists, and keys are strings.

    Raises
    ------
    ValueError, TypeError
        `dump` refuses it.

    Examples
    --------
    >>> as_read({1: (2, 3)})
    {'1': [2, 3]}
    """
    return parse(dump(value))


def expect(value: Any, kind: type[_T]) -> _T:
    """Return ``value`` if it is of exactly this type (a bool is not an int); else `ValueError`."""
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def entries(value: Any, **kinds: type) -> list[Any]:
    """Return these entries of an object in order, each of exactly its type; else `ValueError`.

    Examples
    --------
    >>> entries({"start": 5, "count": 2, "more": None}, count=int, start=int)
    [2, 5]
    """
    return [expect(value[name], kind) for name, kind in kinds.items()]


def _depth(value: Any) -> int:
    values = value.values() if isinstance(value, dict) else value
    # There can be many ids, and few of a file's values have others in them.
    inner = [item for item in values if isinstance(item, (list, tuple, dict))]
    return 1 + max(map(_depth, inner), default=0)


def table_to_json(table: Table) -> list[JSON]:
    """Return names, shapes and dtypes as JSON.

    Raises
    ------
    ValueError
        The format can't hold a dtype or a name.

    Examples
    --------
    >>> table_to_json({"1-3": TensorInfo((64, 7), torch.bfloat16)})
    [['1-3', {'dtype': 'bfloat16', 'shape': [64, 7]}]]
    """
    for name, spec in table.items():
        if spec.dtype not in _FORMAT_NAMES:
            raise ValueError(f"{name}: {spec.dtype} can't be kept on disk; convert the tensor")
        # Other programs read names as UTF-8, and one as an entry of another kind.
        if name == "__metadata__" or name != name.encode(errors="replace").decode():
            raise ValueError(f"{name!r} can't be the name of a tensor in a file")
    # Not every reader of JSON keeps the order in objects, and the order places the data.
    return [
        [name, {"dtype": dtype_name(spec.dtype), "shape": list(spec.shape)}]
        for name, spec in table.items()
    ]


def table_from_json(value: Any) -> dict[str, TensorInfo]:
    """Return the table that `table_to_json` wrote; `ValueError` for anything else."""
    table: dict[str, TensorInfo] = {}
    for name, entry in expect(value, list):
        if type(name) is not str or name in table:
            raise ValueError("a name is listed twice, or is no text")
        table[name] = _spec_from_json(entry)
    return table


def _spec_from_json(value: Any) -> TensorInfo:
    shape, dtype, product = value["shape"], _DTYPES[value["dtype"]], 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise ValueError(f"{shape} is not a shape")
        product *= size or 1
    if type(shape) is not list or len(shape) >= MAX_DIMENSIONS or product > MAX_SIZE:
        raise ValueError(f"{shape!s:.100} is not a shape")
    return TensorInfo(tuple(shape), dtype)


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Return shapes and dtypes of tensors; `ValueError` for those without numbers in memory."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            raise ValueError(f"{name} has no plain memory to write; make it an ordinary tensor")
    return {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in tensors.items()}


class FileLayout:
    """The places of tensors in a file, and the header in front of them; see the NOTE.

    Tensors with wider elements come first, which keeps all of them aligned.

    Parameters
    ----------
    table : mapping of str to TensorInfo
        The tensors in the file.
    content : mapping of str to JSON
        The rest of the content; `ValueError` if it is too large.
    """

    def __init__(self, table: Table, content: Mapping[str, JSON]) -> None:
        self.table = table
        text = dump({"tensors": table_to_json(table), **content}).decode()
        # For each tensor, in the file's order: its offset behind the header, and the number of its
        # first block.
        self.starts: dict[str, tuple[int, int]] = {}
        self.num_bytes = self.num_blocks = 0
        entries = {}
        for name, spec in sorted(table.items(), key=lambda item: -item[1].dtype.itemsize):
            start, num_bytes = self.num_bytes, spec.nbytes
            self.starts[name] = start, self.num_blocks
            self.num_bytes += num_bytes
            self.num_blocks += -(-num_bytes // BLOCK_BYTES)
            known = _FORMAT_NAMES[spec.dtype]
            shape = list(spec.shape) if known else [*spec.shape, spec.dtype.itemsize]
            offsets = [start, self.num_bytes]
            entries[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": offsets}
        # The header behind the checksums of blocks.
        metadata = {"xxh3_64": "", "blocks": "", "content": text}
        whole = dump({"__metadata__": metadata, **entries})
        self._rest = whole[len(_BEFORE_CHECKSUM + _BEFORE_BLOCKS) :]
        num_bytes = _BLOCKS_AT + DIGITS * self.num_blocks + len(self._rest)
        padding = -num_bytes % _PAGE_BYTES
        self._rest += b" " * padding
        self.header_bytes = num_bytes + padding
        if num_bytes > MAX_FILE_BYTES:
            raise ValueError(f"{num_bytes} bytes besides data: keep fewer settings, samples or ids")

    def header(self, blocks: str) -> bytes:
        """Return the header, given the checksums of all blocks in one text."""
        before = (self.header_bytes - 8).to_bytes(8, "little") + _BEFORE_CHECKSUM
        after = _BEFORE_BLOCKS + blocks.encode("ascii") + self._rest
        return before + checksum(before + after).encode() + after


def _parsed(header: bytes) -> tuple[FileLayout, str, dict[str, Any]]:
    """Return the layout, the checksums of blocks and the content of a header."""
    blocks, _, rest = header[_BLOCKS_AT:].decode("ascii").partition(_BEFORE_CONTENT.decode())
    text, _ = json.JSONDecoder().raw_decode(rest)
    content = expect(parse(expect(text, str).encode("ascii")), dict)
    layout = FileLayout(table_from_json(content.pop("tensors")), content)
    if layout.header(blocks) != header or len(blocks) != DIGITS * layout.num_blocks:
        raise ValueError("its header does not match its checksum, or contradicts itself")
    return layout, blocks, content


def file_writer(
    tensors: Mapping[str, Tensor], content: Mapping[str, JSON]
) -> Callable[[WriteAt], str]:
    """Return a function that writes a file and returns the checksum of its header.

    Values that no file can hold are a `ValueError` or `TypeError` before anything is written.
    """
    layout = FileLayout(table_of(tensors), content)
    return partial(_write, tensors=tensors, layout=layout)


def _write(write_at: WriteAt, tensors: Mapping[str, Tensor], layout: FileLayout) -> str:
    """Write a file from the tensors' own memory.

    The header is written last. While a block is written, the checksum of the next one is computed.
    """
    blocks = []
    writing: Future[None] | None = None
    done = layout.header_bytes
    with ThreadPoolExecutor(1) as pool:
        for name in layout.starts:
            data = _bytes_of(tensors[name])
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                # After a failure, no more than one other block is written.
                earlier, writing = writing, pool.submit(write_at, done, block)
                blocks.append(checksum(block))
                done += len(block)
                if earlier is not None:
                    earlier.result()
        if writing is not None:
            writing.result()
    header = layout.header("".join(blocks))
    write_at(0, header)
    return _checksum_of(header)


def _checksum_of(header: bytes) -> str:
    return header[_CHECKSUM_AT:][:DIGITS].decode("ascii")


def _bytes_of(tensor: Tensor) -> memoryview:
    # A conjugate or negative view has the bytes of its base until it is resolved.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride, which prevents a view of another dtype.
    flat = plain.as_strided((plain.numel(),), (1,))
    array: NDArray[numpy.uint8] = flat.view(torch.uint8).numpy()
    return array.data


def empty_bytes(num_bytes: int) -> Tensor:
    """Return bytes to read into."""
    # NumPy asks the system for large pages, which are prepared in a part of the time. An empty
    # array would have no stride, and no view of another dtype.
    return torch.from_numpy(numpy.empty(max(1, num_bytes), numpy.uint8))[:num_bytes]


class TensorFile:
    """A file of tensors with a checked header, whose data is read when it is requested.

    Data is read into the caller's memory and checked there: the caller gets the checked bytes,
    whatever happens to the file meanwhile. The file is open only while it is read.

    Attributes
    ----------
    table : dict of str to TensorInfo
        Its tensors.
    content : dict of str to JSON
        The rest of its content.
    checksum : str
        The checksum of its header, and so of everything.

    Raises
    ------
    FormatError
        If the length of the file differs from its header, or the header is damaged.
    """

    def __init__(self, medium: Medium, name: str) -> None:
        self.name = name
        self.path = medium.path_of(name)
        self._medium = medium
        with parsing(self.path):
            header = self._read_header()
            layout, self._blocks, self.content = _parsed(header)
            self.num_bytes = len(header) + layout.num_bytes
            num_bytes = self._stamp.num_bytes
            if num_bytes != self.num_bytes:
                raise ValueError(f"{num_bytes} bytes long, {self.num_bytes} were written")
        self._begin = len(header)
        self.checksum = _checksum_of(header)
        # The layout itself holds the text of the header.
        self.table, self._starts = layout.table, layout.starts
        self._verified = bytearray(layout.num_blocks)

    def _read_header(self) -> bytes:
        first = bytearray(_PAGE_BYTES)
        with self._medium.reading(self.name) as read_at:
            self._stamp = read_at(0, memoryview(first))
            length, num_bytes = 8 + int.from_bytes(first[:8], "little"), self._stamp.num_bytes
            if not _PAGE_BYTES <= length <= min(MAX_FILE_BYTES, num_bytes):
                raise ValueError(f"its header is said to have {length} bytes of {num_bytes}")
            more = bytearray(length - _PAGE_BYTES)
            if more:
                read_at(_PAGE_BYTES, memoryview(more))
        return bytes(first + more)

    def copy_into(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        """Fill ``out`` with the bytes of a tensor from ``start`` on, each block verified once."""
        step = self._medium.span_bytes
        spans = range(start - start % BLOCK_BYTES, start + len(out), step)
        with accessing(self.path), self._medium.reading(self.name, self._stamp) as read_at:
            copy = partial(self._copy_span, read_at, out, name, start)
            for_each(copy, spans, self._medium.num_readers)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor in new memory."""
        spec = self.table[name]
        data = empty_bytes(spec.nbytes)
        self.copy_into(data.numpy(), name, 0)
        return data.view(spec.dtype).view(spec.shape)

    def verify(self) -> int:
        """Check every block, even if checked before; return the length of the file."""
        self._verified = bytearray(len(self._verified))
        step = self._medium.span_bytes
        scratch = numpy.empty(step, numpy.uint8)
        for name, spec in self.table.items():
            for start in range(0, spec.nbytes, step):
                self.copy_into(scratch[: spec.nbytes - start], name, start)
        return self.num_bytes

    def _copy_span(
        self, read_at: ReadAt, out: NDArray[numpy.uint8], name: str, start: int, span: int
    ) -> None:
        """Copy the bytes of the blocks in ``span``, which are read in one go."""
        length = self.table[name].nbytes
        offset, first_block = self._starts[name]
        low, high = max(start, span), min(start + len(out), span + self._medium.span_bytes)
        blocks = range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES))
        is_known = self._verified[first_block + blocks.start : first_block + blocks.stop]
        # A block at either end is read as a whole, unless it was verified.
        begin = low if is_known[0] else blocks.start * BLOCK_BYTES
        end = high if is_known[-1] else min(blocks.stop * BLOCK_BYTES, length)
        part = out[low - start : high - start]
        whole = part if (begin, end) == (low, high) else numpy.empty(end - begin, numpy.uint8)
        data, offset = whole.data, offset + self._begin
        read_at(offset + begin, data)
        for number, was_verified in zip(blocks, is_known, strict=True):
            if not was_verified:
                at = number * BLOCK_BYTES
                block = data[at - begin : at - begin + BLOCK_BYTES]
                self._verify(block, offset + at, first_block + number)
        if whole is not part:
            part[:] = whole[low - begin : high - begin]

    def _verify(self, block: memoryview, offset: int, number: int) -> None:
        if checksum(block) != self._blocks[number * DIGITS : (number + 1) * DIGITS]:
            raise FormatError(
                f"{self.path} is damaged: bytes {offset} to {offset + len(block)} do not match "
                "their checksum"
            )
        self._verified[number] = True

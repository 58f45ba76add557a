"""The .mul file: a header, blocks that each carry their own checks, and an end that seals the whole."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from mulstm.data.plain import ARCHIVE as MAGIC
from mulstm.errors import CheckFailedError, DataError

VERSION = 1
STORED, CODED, END = 0, 1, 255
MOST_LANES = 1 << 14
MOST_BLOCK = 1 << 28
UNKNOWN = (1 << 64) - 1

_HEADER = struct.Struct("<8sHHIQ32s")  # magic, version, flags, block, length, fingerprint
_BLOCK = struct.Struct("<BxHIIII")  # kind, lanes, number, length, size of the payload, CRC-32 of the content
_SEAL = struct.Struct("<Q32s")  # length and SHA-256 of the content
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Header:
    """What is known before the first block."""

    block: int  # the most bytes a block holds
    fingerprint: bytes  # of the integer model
    adaptive: bool
    length: int | None  # of the content, where it was known beforehand


@dataclass(frozen=True)
class Block:
    """One block as it stands in the file."""

    kind: int
    lanes: int
    length: int  # of the content
    crc: int  # CRC-32 of the content
    payload: bytes


class Writer:
    """Writes an archive from front to back."""

    def __init__(self, target: BinaryIO, header: Header) -> None:
        self._target, self._number, self.size = target, 0, 0
        self._length, self._digest, self._header = 0, hashlib.sha256(), header
        length = UNKNOWN if header.length is None else header.length
        self._write(
            _HEADER.pack(MAGIC, VERSION, int(header.adaptive), header.block, length, header.fingerprint)
        )

    def block(self, content: bytes, payload: bytes, kind: int, lanes: int) -> None:
        """One block and its content."""
        self._length += len(content)
        self._digest.update(content)
        self._frame(kind, lanes, len(content), zlib.crc32(content), payload)

    def end(self) -> None:
        """The seal; nothing may follow it."""
        if self._header.length not in (None, self._length):
            raise CheckFailedError(
                f"The file had {self._header.length:,} bytes at first and {self._length:,} were read: it was "
                "changed meanwhile. Compress it again when nobody writes to it."
            )
        self._frame(END, 0, 0, 0, _SEAL.pack(self._length, self._digest.digest()))

    def _frame(self, kind: int, lanes: int, length: int, crc: int, payload: bytes) -> None:
        self._write(_BLOCK.pack(kind, lanes, self._number, length, len(payload), crc))
        self._write(payload)
        self._number += 1

    def _write(self, piece: bytes) -> None:
        for part in (piece, _CRC.pack(zlib.crc32(piece))):
            write(self._target, part)
            self.size += len(part)


class Reader:
    """Reads an archive from front to back; each fault is told where it is met."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._number = source, 0
        self.size = 0  # bytes read
        self._length, self._digest = 0, hashlib.sha256()
        self.header = self._header()

    def _header(self) -> Header:
        start = read(self._source, len(MAGIC))
        self.size = len(start)
        if not MAGIC.startswith(start):  # what is cut short begins right
            raise CheckFailedError(
                f"This is not a .mul archive: it begins with {start!r}. Give one that mulstm wrote."
            )
        start += self._take(len(MAGIC) + 2 - len(start), "its header")
        (version,) = struct.unpack("<H", start[len(MAGIC) :])
        if version != VERSION:
            raise CheckFailedError(
                f"The archive has version {version} of the format and this mulstm reads version {VERSION}. "
                "Install the mulstm that wrote it, or a newer one."
            )
        rest = self._take(_HEADER.size - len(start) + _CRC.size, "its header")
        whole = start + rest[: -_CRC.size]
        if zlib.crc32(whole) != _CRC.unpack(rest[-_CRC.size :])[0]:
            raise _damaged("its header")
        _, _, flags, block, length, fingerprint = _HEADER.unpack(whole)
        if flags > 1 or not 1 <= block <= MOST_BLOCK:
            raise _damaged("its header")
        return Header(block, fingerprint, bool(flags), None if length == UNKNOWN else length)

    def next(self) -> Block | None:
        """The next block, its payload checked; None after the seal, which is checked too."""
        where = f"block {self._number}"
        head = self._checked(_BLOCK.size, where)
        kind, lanes, number, length, size, crc = _BLOCK.unpack(head)
        if head[1] or number != self._number or kind not in (STORED, CODED, END):
            raise _damaged(where)
        self._number += 1
        if kind == END:
            if lanes or length or crc or size != _SEAL.size:
                raise _damaged("its end")
            self._seal(self._checked(size, "its end"))
            return None
        if kind == STORED:
            sound = lanes == 1 and size == length
        else:
            sound = 1 <= lanes <= MOST_LANES and 1 <= size <= 4 * (length + 2)
        if not sound or not 1 <= length <= self.header.block:
            raise _damaged(where)
        return Block(kind, lanes, length, crc, self._checked(size, where))

    def content(self, block: Block, content: bytes) -> None:
        """Checks what a block was decoded to."""
        if len(content) != block.length or zlib.crc32(content) != block.crc:
            raise CheckFailedError(
                f"Block {self._number - 1} does not decode to what was compressed. "
                "The archive is damaged, or this machine computes wrongly: try --products float64."
            )
        self._length += len(content)
        self._digest.update(content)

    def _seal(self, payload: bytes) -> None:
        stated = self.header.length
        if _SEAL.unpack(payload) != (self._length, self._digest.digest()) or stated not in (
            None,
            self._length,
        ):
            raise CheckFailedError(
                "The whole content does not match the archive's checksum: blocks are missing or foreign. "
                "Take another copy of it."
            )
        if read(self._source, 1):
            raise CheckFailedError(
                f"There are bytes after the end of the archive (from offset {self.size:,}). "
                "Cut them off, or take another copy of it."
            )

    def _checked(self, size: int, where: str) -> bytes:
        piece = self._take(size + _CRC.size, where)
        if zlib.crc32(piece[: -_CRC.size]) != _CRC.unpack(piece[-_CRC.size :])[0]:
            raise _damaged(where)
        return piece[: -_CRC.size]

    def _take(self, size: int, where: str) -> bytes:
        piece = read(self._source, size)
        if len(piece) < size:
            raise CheckFailedError(
                f"The archive ends inside {where}, after byte {self.size + len(piece):,}: it is cut short. "
                "Take another copy of it."
            )
        self.size += size
        return piece


def read(source: BinaryIO, size: int) -> bytes:
    """So many bytes, or what is left: a pipe may give less than it was asked for."""
    pieces, missing = io.BytesIO(), size
    while missing:
        piece = source.read(missing)
        if piece is None:
            raise DataError("The input does not wait for its bytes (it is non-blocking). Give one that does.")
        if not piece:
            break
        pieces.write(piece)
        missing -= len(piece)
    return pieces.getvalue()


def write(target: BinaryIO, data: bytes) -> None:
    """All of it: a stream without a buffer may take less than it is given, on a full disk above all."""
    if not isinstance(target, io.RawIOBase):
        target.write(data)
        return
    left = memoryview(data)
    while left:
        taken = target.write(left)
        if taken is None:
            raise DataError("The output does not wait for room (it is non-blocking). Give one that does.")
        left = left[taken:]


def _damaged(where: str) -> CheckFailedError:
    return CheckFailedError(f"The archive is damaged in {where}. Take another copy of it.")

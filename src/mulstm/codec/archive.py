"""Files and streams to archives and back: block after block, nothing kept of what is done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from mulstm import files
from mulstm.codec import block as blocks
from mulstm.codec import container
from mulstm.codec.block import Progress
from mulstm.codec.coder import require_coder
from mulstm.codec.container import CODED, MOST_BLOCK, MOST_LANES, STORED, Header, Reader, Writer
from mulstm.codec.network import Network
from mulstm.codec.session import cut
from mulstm.errors import CheckFailedError, DataError

BLOCK = 1 << 24
LANES = {"cpu": 64, "cuda": 256}  # as many as fill the hardware
LANE = 1 << 13  # bytes a lane has at least, unless lanes are given: a lane begins knowing nothing


@dataclass
class Summary:
    """What was done."""

    content: int = 0  # bytes
    archive: int = 0  # bytes
    blocks: int = 0
    stored: int = 0  # blocks that coding would not have made smaller
    lanes: int = 0  # the most of any block
    adaptive: bool = False
    verified: bool = False
    seconds: float = 0.0  # reading and writing included, verifying not
    verify_seconds: float = 0.0

    @property
    def bits_per_byte(self) -> float:
        """0 for an empty file."""
        return 8 * self.archive / self.content if self.content else 0.0

    def count(self, content: bytes, kind: int, lanes: int) -> None:
        """One block more; a short one has fewer lanes than were asked for."""
        self.content += len(content)
        self.blocks += 1
        self.stored += kind == STORED
        self.lanes = max(self.lanes, cut(len(content), lanes)[0])

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"bits_per_byte": self.bits_per_byte}


def compress(
    source: BinaryIO,
    target: BinaryIO,
    network: Network,
    *,
    lanes: int | None = None,
    adaptive: bool = True,
    block: int = BLOCK,
    verify: bool = True,
    coder: str = "auto",
    length: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Reads `source` to its end and writes an archive. Memory depends on `block`, not on the content.

    `length`: how long the content is, where that is known; the other side then knows it from the start.
    `progress` gets bytes done: each counts once for the way there, and once for the way back if verified.
    """
    check_options(lanes, block, coder)
    start = time.perf_counter()
    done = Summary(adaptive=adaptive, verified=verify)
    writer = Writer(target, Header(block, network.model.fingerprint, adaptive, length))
    while content := container.read(source, block):
        B = lanes if lanes is not None else default_lanes(len(content), network.device.type)
        payload, kind = blocks.encode(network, content, B, adaptive, coder=coder, progress=progress), CODED
        if len(payload) >= len(content):
            payload, kind, B = content, STORED, 1
        if verify and kind == CODED:
            between = time.perf_counter()
            if _decoded(network, payload, len(content), B, adaptive, coder, progress) != content:
                raise CheckFailedError(
                    f"Block {done.blocks} does not decode to what was read: this machine computes wrongly. "
                    "Try --products float64, and report it."
                )
            done.verify_seconds += time.perf_counter() - between
        elif verify and progress is not None:
            progress(len(content))  # what is stored needs no way back
        writer.block(content, payload, kind, B)
        done.count(content, kind, B)
    writer.end()
    done.archive = writer.size
    done.seconds = time.perf_counter() - start - done.verify_seconds
    return done


def decompress(
    source: BinaryIO,
    target: BinaryIO,
    network: Network,
    *,
    coder: str = "auto",
    progress: Progress | None = None,
) -> Summary:
    """Reads an archive and writes its content; what has been written up to a fault is right, but not all."""
    start = time.perf_counter()
    reader = Reader(source)
    require_model(reader.header, network)
    adaptive = reader.header.adaptive
    done = Summary(adaptive=adaptive, verified=True)
    while (found := reader.next()) is not None:
        if found.kind == STORED:
            content = found.payload
            if progress is not None:
                progress(len(content))
        else:
            content = _decoded(network, found.payload, found.length, found.lanes, adaptive, coder, progress)
        reader.content(found, content)
        container.write(target, content)
        done.count(content, found.kind, found.lanes)
    done.archive = reader.size
    done.seconds = time.perf_counter() - start
    return done


def _decoded(
    network: Network,
    payload: bytes,
    length: int,
    lanes: int,
    adaptive: bool,
    coder: str,
    progress: Progress | None,
) -> bytes:
    """What a block decodes to; nothing where it cannot be decoded: the caller knows which block it is."""
    try:
        return blocks.decode(network, payload, length, lanes, adaptive, coder=coder, progress=progress)
    except CheckFailedError:
        return b""


def compress_path(source: Path, target: Path, network: Network, **how: Any) -> Summary:
    """`compress` between paths, "-" a standard stream: a file is there whole, or not at all."""
    with _reading(source) as given, _writing(target, source) as taken:
        return compress(given, taken, network, length=length_of(source), **how)


def decompress_path(source: Path, target: Path, network: Network, **how: Any) -> Summary:
    """`decompress` between paths, "-" a standard stream: a file is there whole and checked, or not at all."""
    with _reading(source) as given, _writing(target, source) as taken:
        return decompress(given, taken, network, **how)


def length_of(path: Path) -> int | None:
    """The bytes of a plain file; None for what has no length of its own, or does not tell it."""
    if str(path) == "-" or not path.is_file():
        return None
    size = path.stat().st_size
    if not size:
        with _reading(path) as source:
            return None if source.read(1) else 0  # files of /proc have bytes all the same
    return size


def peek(path: Path) -> Header | None:
    """The header of an archive that can be read twice."""
    if length_of(path) is None:
        return None
    with _reading(path) as source:
        return Reader(source).header


def require_model(header: Header, network: Network, name: str = "this") -> None:
    """Raises CheckFailedError when the archive was written with another model than the one of that name."""
    mine = network.model.fingerprint
    if header.fingerprint != mine:
        raise CheckFailedError(
            f"The archive was written with the integer model {header.fingerprint.hex()[:16]}, and {name} is "
            f"{mine.hex()[:16]}. Give the model that compressed it."
        )


def default_lanes(length: int, device: str = "cpu") -> int:
    """As many as fill the hardware, each long enough for its cold start not to be felt."""
    return max(1, min(LANES.get(device, LANES["cpu"]), length // LANE))


def check_options(lanes: int | None, block: int, coder: str) -> None:
    """Raises DataError where an archive cannot be made so."""
    require_coder(coder)
    if lanes is not None and not 1 <= lanes <= MOST_LANES:
        raise DataError(f"A block cannot have {lanes} lanes. Give 1 to {MOST_LANES:,}.")
    if not 1 <= block <= MOST_BLOCK:
        raise DataError(f"A block cannot have {block:,} bytes. Give 1 to {MOST_BLOCK:,}.")


class _Source:
    """Something to read from; its faults name it, or they would be taken for those of what is written."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes; none at the end."""
        try:
            return self._file.read(size)
        except OSError as error:
            raise _unreadable(self._path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({files.reason_of(error)}). Give the path of a file that can.")


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        _require_open(sys.stdin, "input")
        yield cast(BinaryIO, _Source(path, sys.stdin.buffer))
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None
    with file:
        yield cast(BinaryIO, _Source(path, file))


@contextmanager
def _writing(path: Path, source: Path) -> Iterator[BinaryIO]:
    """A new file may be read by those who may read its source."""
    if str(path) == "-":
        _require_open(sys.stdout, "output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    like = source.stat() if str(source) != "-" and source.is_file() else None
    with files.replacing(path, like) as temporary, temporary.open("wb") as file:
        yield file


def _require_open(stream: Any, name: str) -> None:
    """A stream that the shell has closed has another in its place, which would take or give anything."""
    if getattr(stream, "name", "") == os.devnull:
        raise DataError(f"The standard {name} is closed. Give the path of a file, or leave it open.")

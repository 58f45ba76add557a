"""The codec beside the compressors everybody has: size, and speed both ways."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mulstm.codec import archive
from mulstm.codec.network import Network
from mulstm.errors import CheckFailedError, DataError

HEADERS = ("compressor", "bytes", "bits/byte", "with model", "bits/byte", "to MB/s", "from MB/s")
SPEED = "decode_megabytes_per_second"

Coding = tuple[str, Callable[[bytes], bytes], Callable[[bytes], bytes]]
STANDARD: tuple[Coding, ...] = (  # those of the standard library, at their strongest
    ("gzip -9", lambda data: gzip.compress(data, 9), gzip.decompress),
    ("bzip2 -9", lambda data: bz2.compress(data, 9), bz2.decompress),
    ("xz -9e", lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME), lzma.decompress),
)


@dataclass(frozen=True)
class Row:
    """One compressor on one file."""

    name: str
    content: int  # bytes before
    size: int  # bytes after
    model: int  # bytes the other side must have beside the program
    encode_seconds: float
    decode_seconds: float

    @property
    def bits_per_byte(self) -> float:
        """Of the compressed file alone."""
        return 8 * self.size / self.content

    @property
    def bits_per_byte_with_model(self) -> float:
        """Of the compressed file and the model together."""
        return 8 * (self.size + self.model) / self.content

    @property
    def megabytes_per_second(self) -> tuple[float, float]:
        """Of content, there and back."""
        size = self.content / 1e6
        return size / max(self.encode_seconds, 1e-9), size / max(self.decode_seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        to, back = self.megabytes_per_second
        return asdict(self) | {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_with_model": self.bits_per_byte_with_model,
            "encode_megabytes_per_second": to,
            SPEED: back,
        }

    def cells(self) -> list[str]:
        """For a table under HEADERS."""
        return [
            self.name,
            f"{self.size:,}",
            f"{self.bits_per_byte:.4f}",
            f"{self.size + self.model:,}",
            f"{self.bits_per_byte_with_model:.4f}",
            *(f"{speed:.4f}" if speed < 1 else f"{speed:.1f}" for speed in self.megabytes_per_second),
        ]


def compare(
    network: Network,
    model: int,
    file: Path,
    how: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> list[Row]:
    """Every compressor at hand on a file, each checked by decoding; `model`: bytes of the model's file."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}). Give the path of a file.") from None
    if not content:
        raise DataError(f"{file} is empty. Give a file with something to compress.")
    rows = [_row(name, content, 0, to, back) for name, to, back in others()]
    _warm(network, how)
    for adaptive in (False, True):

        def to(data: bytes, adaptive: bool = adaptive) -> bytes:
            out = io.BytesIO()
            archive.compress(
                io.BytesIO(data), out, network, adaptive=adaptive, verify=False, progress=progress, **how
            )
            return out.getvalue()

        def back(data: bytes) -> bytes:
            out = io.BytesIO()
            archive.decompress(io.BytesIO(data), out, network, coder=how["coder"], progress=progress)
            return out.getvalue()

        rows.append(_row("mulstm adaptive" if adaptive else "mulstm static", content, model, to, back))
    return sorted(rows, key=lambda row: -row.size)


def _warm(network: Network, how: dict[str, Any]) -> None:
    """Loads or makes the machine code, which the first of ours would be charged with."""
    for adaptive in (False, True):
        small = io.BytesIO()
        archive.compress(io.BytesIO(b"warm " * 40), small, network, adaptive=adaptive, **how | {"lanes": 2})
        small.seek(0)
        archive.decompress(small, io.BytesIO(), network, coder=how["coder"])


def _row(
    name: str, content: bytes, model: int, to: Callable[[bytes], bytes], back: Callable[[bytes], bytes]
) -> Row:
    start = time.perf_counter()
    small = to(content)
    between = time.perf_counter()
    if back(small) != content:
        raise CheckFailedError(
            f"{name} does not give back what it was given. Leave it out of the comparison."
        )
    return Row(name, len(content), len(small), model, between - start, time.perf_counter() - between)


def others() -> Iterator[Coding]:
    """Those of the standard library, then those that are installed."""
    yield from STANDARD
    if find_spec("zstandard"):
        import zstandard

        yield (
            "zstd -19",
            lambda data: zstandard.ZstdCompressor(level=19).compress(data),
            lambda data: zstandard.ZstdDecompressor().decompress(data),
        )
    if find_spec("brotli"):
        import brotli

        yield "brotli -11", lambda data: brotli.compress(data, quality=11, lgwin=24), brotli.decompress
    if find_spec("pyppmd"):
        import pyppmd

        order, memory = 16, 1 << 28

        def to(data: bytes) -> bytes:
            coder = pyppmd.Ppmd7Encoder(order, memory)
            return bytes(struct.pack("<Q", len(data)) + coder.encode(data) + coder.flush())

        def back(data: bytes) -> bytes:
            # Asked for a known length: without one, pyppmd 1.3 loses bytes or fails, by variant.
            (length,) = struct.unpack("<Q", data[:8])
            coder, data, out = pyppmd.Ppmd7Decoder(order, memory), data[8:], b""
            while len(out) < length and (piece := coder.decode(data, length - len(out))):
                out, data = out + piece, b""
            return out

        yield "PPMd -o16", to, back


def draw(rows: list[Row], target: Path) -> list[Path]:
    """Size against speed, as an SVG and a PNG beside it."""
    from mulstm.report.canvas import Figure

    data = [row.as_dict() for row in rows]
    return Figure(target.with_suffix("").name, data, _paint, (7.6, 4.6)).draw(target.parent)


def _paint(picture: Any, data: Any) -> None:
    from mulstm.report.canvas import BLUE, FAINT, INK

    axes = picture.subplots()
    axes.set_title("Size against speed")
    axes.set_xlabel("decompression, MB/s")
    axes.set_ylabel("bits per byte, without the model")
    axes.set_xscale("log")
    for row in data:
        ours, x, y = row["name"].startswith("mulstm"), row[SPEED], row["bits_per_byte"]
        axes.plot([x], [y], "o" if ours else "s", color=BLUE if ours else FAINT, markersize=8 if ours else 6)
        # Away from the nearest neighbour, so that names do not meet.
        others = [other for other in data if other is not row]
        near = min(others, key=lambda other: abs(math.log(other[SPEED] / x)), default=row)
        axes.annotate(
            row["name"],
            (x, y),
            xytext=(0, 9 if y >= near["bits_per_byte"] else -17),
            textcoords="offset points",
            ha="center",
            color=BLUE if ours else INK,
            weight="bold" if ours else "normal",
            fontsize=9,
        )
    axes.margins(x=0.12, y=0.15)

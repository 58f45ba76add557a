"""Harms archives in ten thousand ways: `python tests/fuzz_codec.py [count] [record.json]`, and counts.

Not a test by itself (it takes a minute); the test suite does a few hundred of these.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from codec_models import TEXT, integer
from mulstm.codec import archive
from mulstm.codec.network import Network
from mulstm.errors import CheckFailedError


def frames(data: bytes) -> list[bytes]:
    """Header, blocks and end."""
    places, at = [0, 60], 60
    while at < len(data):
        at += 28 + struct.unpack("<I", data[at + 12 : at + 16])[0]
        places.append(at)
    return [data[a:b] for a, b in pairwise(places)]


def swapped(data: bytes, rng: random.Random) -> bytes:
    """Whole blocks in another order, twice, or left out: every CRC in them is right."""
    header, *blocks, end = frames(data)
    order = rng.choice([rng.sample(blocks, len(blocks)), rng.choices(blocks, k=len(blocks)), blocks[1:]])
    return b"".join([header, *order, end])


def forged(data: bytes, rng: random.Random, place: tuple[int, int]) -> bytes:
    """A field of the header is something else, and the header's CRC is right again."""
    header = bytearray(data[:56])
    header[slice(*place)] = rng.randbytes(place[1] - place[0])
    return bytes(header) + struct.pack("<I", zlib.crc32(header)) + data[60:]


def renumbered(data: bytes, rng: random.Random) -> bytes:
    """A field of a block is something else, and the block's CRC is right again."""
    header, *blocks, end = frames(data)
    k, place = rng.randrange(len(blocks)), rng.choice([(0, 1), (1, 2), (2, 4), (4, 8), (8, 12), (16, 20)])
    head = bytearray(blocks[k][:20])
    head[slice(*place)] = rng.randbytes(place[1] - place[0])
    if place == (2, 4):
        # Fewer lanes than bytes may be the same cut: no harm is done then, and none is found.
        head[2:4] = struct.pack("<H", rng.choice([0, 1, 2, 3, 20_000, 65_535]))
    blocks[k] = bytes(head) + struct.pack("<I", zlib.crc32(head)) + blocks[k][24:]
    return b"".join([header, *blocks, end])


def payload(data: bytes, rng: random.Random) -> bytes:
    """Other coded words, whose CRC is right again."""
    header, *blocks, end = frames(data)
    k = rng.randrange(len(blocks))
    words = bytearray(blocks[k][24:-4])
    words[rng.randrange(len(words))] ^= 1 << rng.randrange(8)
    blocks[k] = blocks[k][:24] + bytes(words) + struct.pack("<I", zlib.crc32(words))
    return b"".join([header, *blocks, end])


def harmed(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One way of harming, and what it leaves."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    noise = rng.randbytes(rng.randint(1, 64))
    ways: dict[str, Callable[[], bytes]] = {
        "flip a bit": lambda: data[:a] + bytes([data[a] ^ (1 << rng.randrange(8))]) + data[a + 1 :],
        "overwrite": lambda: data[:a] + noise + data[a + len(noise) :],
        "cut short": lambda: data[:a],
        "lose the start": lambda: data[a:],
        "lose a piece": lambda: data[:a] + data[b:],
        "repeat a piece": lambda: data[:b] + data[a:],
        "zero a piece": lambda: data[:a] + bytes(b - a) + data[b:],
        "insert noise": lambda: data[:a] + noise + data[a:],
        "append": lambda: data + noise,
        "swap halves": lambda: data[a:] + data[:a],
        "swap blocks": lambda: swapped(data, rng),
        "a later version": lambda: forged(data, rng, (8, 10)),
        "other flags": lambda: forged(data, rng, (10, 12)),
        "another length": lambda: forged(data, rng, (16, 24)),
        "another model": lambda: forged(data, rng, (24, 56)),
        "a block's fields": lambda: renumbered(data, rng),
        "a block's words": lambda: payload(data, rng),
    }
    name = rng.choice(list(ways))
    a = min(a, len(data) - 1)
    return name, ways[name]()


def main(count: int, record: Path | None) -> int:
    network, rng = Network(integer(hidden=4)), random.Random(7)
    found, mode_of, started = Counter[str](), Counter[str](), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        whole, target, out = Path(folder) / "a", Path(folder) / "a.mul", Path(folder) / "out"
        whole.write_bytes(TEXT[:2000])
        archives = {}
        for mode in ("static", "adaptive"):
            archive.compress_path(whole, target, network, block=700, lanes=100, adaptive=mode == "adaptive")
            archives[mode] = target.read_bytes()
        while found.total() < count:
            mode = rng.choice(list(archives))
            name, wrong = harmed(archives[mode], rng)
            if wrong == archives[mode]:
                continue
            target.write_bytes(wrong)
            try:
                archive.decompress_path(target, out, network)
            except CheckFailedError:
                found[name] += 1
                mode_of[mode] += 1
            else:
                print(f"not found: {name} in the {mode} archive")
                return 1
            if out.exists() or len(list(Path(folder).iterdir())) != 2:
                print(f"something was left behind: {name} in the {mode} archive")
                return 1
    seconds = time.perf_counter() - started
    print(f"{found.total():,} of {count:,} found: " + ", ".join(f"{k} {n}" for k, n in found.items()))
    if record is not None:
        facts = {"corruptions": count, "found": found.total(), "crashes": 0, "outputs_left": 0}
        facts |= {
            "archives": dict(mode_of),
            "ways": dict(sorted(found.items())),
            "seconds": round(seconds, 1),
        }
        record.write_text(json.dumps(facts, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(
        main(
            int(sys.argv[1]) if len(sys.argv) > 1 else 10_000,
            Path(sys.argv[2]) if len(sys.argv) > 2 else None,
        )
    )

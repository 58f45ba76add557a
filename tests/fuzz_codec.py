"""Harms an archive in ten thousand ways: `python tests/fuzz_codec.py [count]` says whether each was found.

Not a test by itself (it takes a minute); the test suite does a few hundred of these.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from codec_models import TEXT, integer
from mulstm.codec import archive
from mulstm.codec.network import Network
from mulstm.errors import CheckFailedError


def harmed(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One way of harming, and what it leaves."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    noise = rng.randbytes(rng.randint(1, 64))
    ways = {
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
    }
    name = rng.choice(list(ways))
    a = min(a, len(data) - 1)
    return name, ways[name]()


def main(count: int) -> int:
    network, rng, found = Network(integer(hidden=4)), random.Random(7), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        whole, target, out = Path(folder) / "a", Path(folder) / "a.mul", Path(folder) / "out"
        whole.write_bytes(TEXT[:2000])
        archive.compress_path(whole, target, network, block=700, lanes=100)
        data = target.read_bytes()
        while found.total() < count:
            name, wrong = harmed(data, rng)
            if wrong == data:
                continue
            target.write_bytes(wrong)
            try:
                archive.decompress_path(target, out, network)
            except CheckFailedError:
                found[name] += 1
            else:
                print(f"not found: {name}")
                return 1
            if out.exists() or len(list(Path(folder).iterdir())) != 2:
                print(f"something was left behind: {name}")
                return 1
    print(f"{found.total():,} of {count:,} found: " + ", ".join(f"{k} {n}" for k, n in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))

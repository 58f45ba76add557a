"""Archives that were harmed, cut or forged: every fault is told, and none is decoded."""

from __future__ import annotations

import random
import struct
import zlib
from itertools import pairwise

import pytest

from codec_models import integer, mixed, packed, unpacked
from mulstm.codec import block
from mulstm.codec.container import VERSION
from mulstm.codec.network import Network
from mulstm.errors import CheckFailedError


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(integer())


def test_verifying_finds_a_decoder_that_errs(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*given: object, **more: object) -> bytes:
        raise CheckFailedError("The coded stream is damaged. Take another copy.")  # of what?

    for errs in (lambda *given, **more: b"something else", damaged):
        monkeypatch.setattr(block, "decode", errs)
        with pytest.raises(CheckFailedError, match=r"Block 0 does not decode .*: this machine computes"):
            packed(mixed(200), network, verify=True)


def frames(data: bytes) -> list[int]:
    """Where header, blocks and end begin, and the end of all."""
    places, at = [0, 60], 60
    while at < len(data):
        at += 28 + struct.unpack("<I", data[at + 12 : at + 16])[0]
        places.append(at)
    return places


def test_every_byte_of_an_archive_is_watched(network: Network) -> None:
    content = mixed(90)
    data = packed(content, network, block=50, lanes=10)
    for place in range(len(data)):
        harmed = bytearray(data)
        harmed[place] ^= 1 << (place % 8)
        with pytest.raises(CheckFailedError):
            unpacked(bytes(harmed), network)


def test_every_cut_and_every_addition_is_told(network: Network) -> None:
    data = packed(mixed(90), network, block=50, lanes=10)
    for length in range(len(data)):
        with pytest.raises(CheckFailedError, match=r"cut short|not a \.mul"):
            unpacked(data[:length], network)
    with pytest.raises(CheckFailedError, match="after the end"):
        unpacked(data + b"\0", network)


def test_blocks_moved_or_taken_out_are_told(network: Network) -> None:
    data = packed(mixed(150), network, block=50, lanes=10)
    cuts = frames(data)
    header, one, two, three, end = (data[a:b] for a, b in pairwise(cuts))
    for order, where in (([two, one, three], 0), ([one, two], 2), ([one, one, two, three], 1), ([], 0)):
        with pytest.raises(CheckFailedError, match=f"block {where}"):
            unpacked(b"".join([header, *order, end]), network)
    # Even with its number put right, a missing block shows in the seal.
    fake = bytearray(end)
    fake[4] = 2
    fake[20:24] = struct.pack("<I", zlib.crc32(fake[:20]))
    with pytest.raises(CheckFailedError, match="checksum"):
        unpacked(header + one + two + bytes(fake), network)


@pytest.mark.parametrize(
    ("frame", "place", "value"),
    [
        (0, 12, struct.pack("<I", 0)),  # the most bytes of a block
        (0, 12, struct.pack("<I", (1 << 28) + 1)),
        (0, 16, struct.pack("<Q", 89)),  # the length of all
        (1, 12, struct.pack("<I", 4 * (50 + 2) + 4)),  # the size of a payload
        (3, 12, struct.pack("<I", 41)),  # and of the seal
        (0, 10, struct.pack("<H", 2)),  # flags
        (1, 2, struct.pack("<H", 0)),  # lanes
        (1, 2, struct.pack("<H", (1 << 14) + 1)),
        (3, 2, struct.pack("<H", 1)),  # which the end has none of
        (3, 8, struct.pack("<I", 1)),  # nor a length
        (3, 16, struct.pack("<I", 1)),  # nor a checksum of its content
    ],
    ids=[
        *("no block", "block", "length", "payload", "seal"),
        *("flags", "no lanes", "lanes", "lanes of the end", "length of the end", "checksum of the end"),
    ],
)
def test_numbers_that_were_forged_with_their_checksum(
    frame: int, place: int, value: bytes, network: Network
) -> None:
    data = packed(mixed(90), network, block=50, lanes=10, length=90)
    at = frames(data)[frame]
    head = bytearray(data[at : at + (20 if frame else 56)])
    head[place : place + len(value)] = value
    parts = [bytes(head)]
    if (frame, place) in ((1, 12), (3, 12)):  # a payload as long as it says
        parts.append(bytes(struct.unpack("<I", value)[0]))
    forged = b"".join(part + struct.pack("<I", zlib.crc32(part)) for part in parts)
    with pytest.raises(CheckFailedError, match=r"damaged in (its header|block 0|its end)|checksum"):
        unpacked(data[:at] + forged + data[at + len(forged) :], network)


def test_a_stored_block_is_one_lane_of_its_own_length(network: Network) -> None:
    data = packed(random.Random(1).randbytes(40), network)
    at, end = frames(data)[1:3]
    assert unpacked(data, network) == data[at + 24 : end - 4]
    for place, value in ((2, struct.pack("<H", 2)), (8, struct.pack("<I", 41))):
        head = bytearray(data[at : at + 20])
        head[place : place + len(value)] = value
        forged = data[:at] + head + struct.pack("<I", zlib.crc32(head)) + data[at + 24 :]
        with pytest.raises(CheckFailedError, match="damaged in block 0"):
            unpacked(forged, network)


@pytest.mark.parametrize("coder", ["constriction", "python"])
def test_a_payload_that_was_forged_with_its_checksum_does_not_crash(network: Network, coder: str) -> None:
    if coder == "constriction":
        pytest.importorskip(coder)
    data = packed(mixed(200), network, lanes=20)
    start, end = 60 + 24, frames(data)[2] - 4
    rng = random.Random(5)
    for _ in range(40):
        payload = bytearray(data[start:end])
        for _ in range(rng.randint(1, 9)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        forged = data[:start] + payload + struct.pack("<I", zlib.crc32(payload)) + data[end + 4 :]
        if forged != data:
            with pytest.raises(CheckFailedError, match="Block 0 does not decode"):
                unpacked(forged, network, coder=coder)


def test_a_block_longer_than_its_payload_allows_is_refused_unread(network: Network) -> None:
    with pytest.raises(CheckFailedError, match="A block of 8 bytes cannot hold 268,435,456"):
        block.decode(network, bytes(8), 1 << 28, 1, True)


def test_versions_and_models_are_told_apart(network: Network) -> None:
    data = packed(b"text", network)
    newer = data[:8] + struct.pack("<H", VERSION + 1) + data[10:]
    with pytest.raises(CheckFailedError, match=f"version {VERSION + 1}"):
        unpacked(newer, network)
    with pytest.raises(CheckFailedError, match=network.model.fingerprint.hex()[:16]):
        unpacked(data, Network(integer(seed=5)))
    with pytest.raises(CheckFailedError, match=r"not a \.mul"):
        unpacked(b"PK\x03\x04 something else entirely", network)


def test_damage_is_told_before_anything_after_it_is_decoded(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(packed(mixed(150), network, block=50, lanes=10))
    data[frames(bytes(data))[2] + 40] ^= 1  # in the second block's payload
    decoded = []
    real = block.decode
    monkeypatch.setattr(block, "decode", lambda *given, **more: decoded.append(1) or real(*given, **more))
    with pytest.raises(CheckFailedError, match="block 1"):
        unpacked(bytes(data), network)
    assert len(decoded) == 1

"""Alphabets: bytes to symbols and back, and what happens with bytes nobody knows."""

import json

import numpy as np
import pytest

from mulstm.data import Alphabet
from mulstm.errors import DataError


def test_all_bytes_are_their_own_symbols() -> None:
    alphabet = Alphabet.bytes()
    assert alphabet.size == 256
    assert alphabet.encode(b"\x00a\xff").tolist() == [0, 97, 255]
    assert alphabet.decode([0, 97, 255]) == b"\x00a\xff"


def test_all_bytes_in_another_order_are_other_symbols() -> None:
    alphabet = Alphabet(bytes(reversed(range(256))))
    assert alphabet.encode(b"\x00a\xff").tolist() == [255, 158, 0]
    assert alphabet.decode([255, 158, 0]) == b"\x00a\xff"


def test_distinct_bytes_are_ranked() -> None:
    alphabet = Alphabet.distinct([b"cab", np.frombuffer(b"\nb", np.uint8)])
    assert alphabet.symbols == b"\nabc"
    assert alphabet.encode(b"cab\n").tolist() == [3, 1, 2, 0]
    assert alphabet.encode(np.frombuffer(b"caba", np.uint8).reshape(2, 2)).shape == (2, 2)
    assert alphabet == Alphabet.distinct(b"abc\n")
    assert alphabet != Alphabet.distinct(b"abc")
    assert alphabet.fingerprint != Alphabet.distinct(b"abc").fingerprint


def test_a_byte_outside_says_which_and_where() -> None:
    alphabet = Alphabet.distinct(b"abc")
    with pytest.raises(DataError, match=r"0x64 \('d'\) at offset 1,002 is not in the alphabet of 3"):
        alphabet.encode(b"abd", offset=1000)
    for byte in (b"\x00", b"\x7f", b"\xe9"):
        with pytest.raises(DataError, match=f"0x{byte.hex()} at offset 0"):
            alphabet.encode(byte)


def test_a_symbol_outside() -> None:
    with pytest.raises(DataError, match="Symbol 3 is outside the alphabet of 3"):
        Alphabet.distinct(b"abc").decode([0, 3])
    with pytest.raises(DataError, match="Symbol -1 is outside"):
        Alphabet.distinct(b"abc").decode([0, -1])


def test_json_and_back() -> None:
    alphabet = Alphabet.distinct(b"\x00\xffxyz")
    assert Alphabet.from_json(json.loads(json.dumps(alphabet.to_json()))) == alphabet


@pytest.mark.parametrize("value", [None, [], {}, {"size": 2, "bytes": "61"}, {"size": 1, "bytes": "zz"}])
def test_foreign_json(value: object) -> None:
    with pytest.raises(DataError, match="not a stored alphabet"):
        Alphabet.from_json(value)


@pytest.mark.parametrize("symbols", [b"", b"aa"])
def test_no_alphabet_at_all(symbols: bytes) -> None:
    with pytest.raises(DataError, match="needs distinct bytes"):
        Alphabet(symbols)


@pytest.mark.parametrize("aliases", [b"c", b"ab", b"cd"], ids=["half a pair", "known", "of nothing"])
def test_aliases_are_new_bytes_for_known_ones(aliases: bytes) -> None:
    with pytest.raises(DataError, match="not pairs of a new byte and a known one"):
        Alphabet(b"ab", aliases=aliases)


def test_the_fingerprint_knows_aliases() -> None:
    prints = {Alphabet(b"ab", aliases=aliases).fingerprint for aliases in (b"", b"ca", b"cb")}
    assert len(prints) == 3

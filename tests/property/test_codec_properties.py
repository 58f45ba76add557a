"""Any bytes in, the same bytes out; any harm is found."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from codec_models import TEXT, integer, packed, unpacked
from mulstm.codec.network import Network
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckFailedError

ALPHABETS = (None, Alphabet(b"etaoin shrdlu"), Alphabet(b"\x00\xff"))
NETWORKS = {alphabet: Network(integer(alphabet, hidden=4)) for alphabet in ALPHABETS}
PIECES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", b"\0", b"\xff" * 70, bytes(range(256)), TEXT[:150], b"ababababab" * 9]),
)


@settings(max_examples=60)
@given(
    pieces=st.lists(PIECES, max_size=4),
    alphabet=st.sampled_from(ALPHABETS),
    lanes=st.one_of(st.none(), st.integers(1, 300)),
    block=st.sampled_from([1 << 20, 97]),
    adaptive=st.booleans(),
)
def test_any_bytes_come_back(
    pieces: list[bytes], alphabet: Alphabet | None, lanes: int | None, block: int, adaptive: bool
) -> None:
    content, network = b"".join(pieces), NETWORKS[alphabet]
    assert unpacked(packed(content, network, lanes=lanes, block=block, adaptive=adaptive), network) == content


ARCHIVE = packed(TEXT[:200], NETWORKS[None], lanes=10, block=70)


@settings(max_examples=300)
@given(data=st.data())
def test_any_harm_is_found(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["flip", "set", "cut", "drop", "add", "swap"]))
    place = data.draw(st.integers(0, len(ARCHIVE) - 1))
    more = data.draw(st.binary(min_size=1, max_size=40))
    harmed = {
        "flip": ARCHIVE[:place] + bytes([ARCHIVE[place] ^ (1 << (more[0] % 8))]) + ARCHIVE[place + 1 :],
        "set": ARCHIVE[:place] + more + ARCHIVE[place + len(more) :],
        "cut": ARCHIVE[:place],
        "drop": ARCHIVE[:place] + ARCHIVE[place + len(more) :],
        "add": ARCHIVE[:place] + more + ARCHIVE[place:],
        "swap": ARCHIVE[place:] + ARCHIVE[:place],
    }[kind]
    if harmed == ARCHIVE:
        return
    try:
        found = unpacked(harmed, NETWORKS[None])
    except CheckFailedError:
        return
    raise AssertionError(f"{kind} at {place} gave {len(found)} bytes and no error")

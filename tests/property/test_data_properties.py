"""Whatever the text and however it is cut: nothing is lost, nothing repeated, everything comes back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mulstm.data import Alphabet, Corpus, Lanes
from mulstm.data.text import Text

texts = st.binary(min_size=2, max_size=300)
counts = st.integers(1, 20)


def corpus_of(data: bytes, ends: tuple[int, int] | None = None, pieces: int = 1) -> Corpus:
    """A corpus of `data`, as one piece or as several."""
    array = np.frombuffer(data, np.uint8)
    return Corpus(
        "text", Text(np.array_split(array, pieces)), Alphabet.bytes(), ends or (len(data), len(data))
    )


@given(texts, counts, counts, st.integers(1, 4))
def test_evaluation_predicts_every_symbol_once_in_order(
    data: bytes, lanes: int, chunk: int, pieces: int
) -> None:
    cut = Lanes(corpus_of(data, pieces=pieces).split("all"), lanes, chunk, trim=False)
    y = np.concatenate([c.y for c in cut], axis=1)
    x = np.concatenate([c.x for c in cut], axis=1)
    assert bytes(y[y >= 0].astype(np.uint8)) == data[1:]
    assert bytes(x[y >= 0]) == data[:-1]
    assert (y >= 0).sum() == len(data) - 1


@given(texts, st.integers(1, 6), st.integers(1, 6), st.integers(0, 400), st.integers(0, 100))
def test_training_repeats_nothing(data: bytes, lanes: int, chunk: int, offset: int, block: int) -> None:
    # Symbols cannot be told apart, so places are: a text in which each place has its own pair of bytes.
    n = len(data)
    if n - 1 < lanes * chunk or 0 < block < lanes * chunk:
        return
    places = np.arange(n) % 251
    cut = Lanes(
        corpus_of(places.astype(np.uint8).tobytes()).split("all"),
        lanes,
        chunk,
        trim=True,
        offset=offset,
        block=block,
    )
    y = np.concatenate([c.y.ravel() for c in cut])
    assert y.size == len(cut) * lanes * chunk
    assert (np.bincount(y, minlength=251) <= np.bincount(places[1:], minlength=251)).all()
    # What is dropped is less than a chunk of every lane (and block).
    blocks = -(-(n - 1) // (block or n))
    assert n - 1 - y.size < lanes * chunk * blocks
    for c in cut:
        assert ((c.x + 1) % 251 == c.y).all()
        # Inside a lane the text goes on unbroken, but for the one seam of the rotation.
        assert (np.diff(c.y, axis=1) % 251 != 1).sum() <= 1


@given(texts, st.integers(0, 300), st.integers(0, 300))
def test_parts_are_the_whole(data: bytes, one: int, other: int) -> None:
    low, high = sorted((min(one, len(data)), min(other, len(data))))
    corpus = corpus_of(data, (low, high))
    parts = [corpus.split(name) for name in ("train", "valid", "test")]
    assert b"".join(part.read(0, part.symbols_count).tobytes() for part in parts) == data[1:]
    for part in parts:
        if part.symbols_count:
            assert part.read(-1, 0).tobytes() == data[part.start - 1 : part.start]


@given(st.binary(min_size=1, max_size=200))
def test_an_alphabet_is_undone(data: bytes) -> None:
    alphabet = Alphabet.distinct(data)
    assert alphabet.size == len(set(data))
    assert alphabet.decode(alphabet.encode(data)) == data
    assert Alphabet.from_json(alphabet.to_json()) == alphabet


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=6), st.data())
def test_pieces_read_as_one(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    text = Text([np.frombuffer(piece, np.uint8) for piece in pieces])
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert text.read(start, stop).tobytes() == whole[start:stop]
    if whole:
        places = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=10))
        assert text.take(np.array(places, np.int64)).tobytes() == bytes(whole[i] for i in places)

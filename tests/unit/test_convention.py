"""Each model reads texts as its own software wrote them: cleaning, start, end."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mulstm.convention import ALPHABETS, Convention, protein_alphabet
from mulstm.data.alphabet import Alphabet
from mulstm.errors import DataError


def text(symbols: np.ndarray) -> bytes:
    return bytes(symbols.astype(np.uint8))


def test_proteins() -> None:
    convention = Convention(protein_alphabet(), "protein")
    assert convention.read(b"MK", "p").tolist() == [24, 1, 4]
    x, y = convention.scored(b"MK", "p")
    assert (x.tolist(), y.tolist()) == ([24, 1, 4], [1, 4, 25])
    assert convention.around == (1, 0)
    with pytest.raises(DataError, match="Record p has '1' at position 4, which is no residue"):
        convention.read(b"BZJ1", "p")


@pytest.mark.parametrize(
    ("name", "raw", "cleaned"),
    [
        ("openai-review", " Tom &amp; Jerry\nare <b>fun</b> ", b"Tom & Jerry are <b>fun</b>"),
        ("openai-review", "caf\u00e9", "caf\u00e9".encode()),
        ("nvidia-review", " Tom &amp;  Jerry\n\nare <b>fun</b> ", b"Tom & Jerry are fun"),
        ("nvidia-review", "Loved it.<br /><br />But no.", b"Loved it. But no."),
        ("nvidia-review", "x < y <b>z, a <b\nc> d", b"x z, a <b c> d"),  # as theirs finds tags
        ("nvidia-review", "don\u2019t \u2014 \u201ccheap\u201d \u2022 1\u20132", b'don\'t -- "cheap" * 1-2'),
        ("nvidia-review", "na\u00efve caf\u00e9 \u4e16", b"naive cafe"),
        ("nvidia-review", "a&eacute;", "a\u00e9".encode()),
        ("nvidia-review", "a&nbsp;&#32;b&nbsp;", b"a b"),
        ("openai-review", f"a&#{'1' * 5000};b&#{'0' * 5000}65;&#0000000066;", "a\ufffdbAB".encode()),
        ("nvidia-review", f"a&#{'1' * 5000};b", "a\ufffdb".encode()),
        ("", " as it <is> &amp; ", b" as it <is> &amp; "),
    ],
)
def test_cleaning(name: str, raw: str, cleaned: bytes) -> None:
    assert Convention(Alphabet.bytes(), name).cleaned(raw.encode()) == cleaned


def test_signs_that_open_tags_and_never_close_them() -> None:
    nvidia, before = Convention(Alphabet.bytes(), "nvidia-review"), time.perf_counter()
    assert nvidia.cleaned(b"a <b> c " + b"<" * 300_000) == b"a c " + b"<" * 300_000
    assert time.perf_counter() - before < 5  # to look for the end of each would take minutes


def test_bytes_that_are_no_text_pass_through() -> None:
    assert Convention(Alphabet.bytes(), "openai-review").cleaned(b"a\xff b ") == b"a\xff b"


def test_reviews() -> None:
    openai = Convention(Alphabet.bytes(), "openai-review")
    assert text(openai.read(b"good", "r")) == b"\n good "
    assert openai.around == (2, 1)
    # NVIDIA's features are read before the closing space.
    nvidia = Convention(ALPHABETS["padded-bytes"](), "nvidia-review")
    assert text(nvidia.read(b"good", "r")) == b"\n good"
    for convention in (openai, nvidia):
        x, y = convention.scored(b"good", "r")
        assert text(x) == b"\n good"
        assert y.tolist() == [-1, *b"good "]


def test_own_texts() -> None:
    lines = Convention(Alphabet.bytes())
    assert text(lines.read(b"abc", "r")) == b"abc"
    x, y = lines.scored(b"abc", "r")
    assert (text(x), text(y)) == (b"\nabc", b"abc\n")
    spaces = Convention(Alphabet.distinct(b" abc"))
    assert spaces.alphabet.decode(spaces.scored(b"abc", "r")[0]) == b" abc"
    records = Convention(Alphabet.bytes(), opens=True)
    assert text(records.read(b"abc", "r")) == b"\nabc"
    assert records.around == (1, 0)
    bare = Convention(Alphabet.distinct(b"abc"))
    assert bare.alphabet.decode(bare.scored(b"abc", "r")[0]) == b"ab"


def test_what_a_checkpoint_says() -> None:
    assert Convention.of(Alphabet.bytes(), {}).name == ""
    assert Convention.of(Alphabet.bytes(), {"convention": "openai-review"}).name == "openai-review"
    with pytest.raises(DataError, match="which this version does not know"):
        Convention.of(Alphabet.bytes(), {"convention": "telegram"})


def test_an_empty_text_has_nothing_to_read() -> None:
    own, protein = Convention(Alphabet.bytes()), Convention(protein_alphabet(), "protein")
    for read in (own.read, protein.read, protein.scored):
        with pytest.raises(DataError, match="Record r is empty"):
            read(b"", "r")
    assert own.scored(b"", "r")[1].tolist() == [10]

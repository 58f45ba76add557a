"""The page reads like its text, shows every number, and can neither be broken nor made to do anything."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from mulstm.heat import LEVELS, Part, Scale, characters, colours, page, visible
from mulstm.scoring import Score
from mulstm.scoring.page import surprise

HOSTILE = (
    '</pre></section><script>alert(1)</script><img src=x onerror="alert(1)">&amp;\'"'
    "</style><!-- --> {{7*7}} javascript:\u202egnp.exe\u2066\u0000\u001b[31m\r\n\ttab"
)


class Reader(HTMLParser):
    """Text, tags and attributes as a browser sees them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.inside: list[str] = []
        self.pre: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self.inside:
            self.pre.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def scored(text: bytes, id: str = "1") -> Score:
    return Score(id, text, len(text), float(len(text)), losses=np.ones(len(text)))


@pytest.mark.parametrize(("protein", "highest"), [(False, 10), (True, 8), (None, 10)])
def test_the_colours_of_a_page_go_from_nothing_to_what_is_rare(protein: bool | None, highest: int) -> None:
    shown = [] if protein is None else [replace(scored(b"MK"), protein=protein)]
    html = "".join(surprise("t", shown))
    assert re.search(rf'<p class="legend">0 .* {highest} bits</p>', html)


def test_hostile_text_is_only_text() -> None:
    raw = HOSTILE.encode()
    html = "".join(surprise(HOSTILE, [scored(raw, HOSTILE)]))
    reader = read(html)
    assert set(reader.tags) <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "section",
        "pre",
        "i",
    }
    assert {name for name, _ in reader.attributes} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "title",
    }
    assert "".join(reader.pre) == visible(HOSTILE).replace("\n", "\u21b5\n")
    for character in "\u202e\u2066\u0000\u001b":
        assert character not in html
    assert "default-src 'none'" in html
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html


def test_the_page_reads_like_the_text() -> None:
    text = "Grüße, 世界 e\u0301!\nSecond  line"
    reader = read("".join(surprise("t", [scored(text.encode())])))
    assert "".join(reader.pre).replace("\u21b5", "") == text


def test_characters_gather_their_bytes() -> None:
    text = "a\u00e9\u4e16e\u0301".encode() + b"\xff\xc3"
    values = np.arange(len(text), dtype=float)
    assert list(characters(text, values)) == [
        ("a", 0.0),
        ("\u00e9", 3.0),
        ("\u4e16", 12.0),
        ("e\u0301", 21.0),
        ("\\xff", 9.0),
        ("\\xc3", 10.0),
    ]
    assert [v for _, v in characters(text, values, adds=False)] == [0.0, 2.0, 5.0, 8.0, 9.0, 10.0]


def test_a_protein_shows_its_stop() -> None:
    result = Score("p", b"MK", 3, 3.0, protein=True, losses=np.array([1.0, 2.0, 3.0]))
    reader = read("".join(surprise("t", [result])))
    assert "".join(reader.pre) == "MK\u25a0"
    assert ("title", f"{3 / np.log(2):.2f} bits") in reader.attributes


def test_scales() -> None:
    scale = Scale("bits", 0.0, 10.0)
    assert [scale.level(v) for v in (-1.0, 0.0, 9.99, 10.0, 1e9)] == [
        0,
        0,
        LEVELS - 1,
        LEVELS - 1,
        LEVELS - 1,
    ]
    two = Scale("h", -1.0, 1.0, diverging=True, adds=False)
    html = "".join(page("t", "l", [Part("a", "n", b"xy", np.array([-1.0, 0.5]))], two))
    assert 'title="-1.00 h"' in html
    assert 'title="+0.50 h"' in html


def test_what_is_plain_has_the_colour_of_the_page() -> None:
    """At the low end of one scale, in the middle of the other."""

    def strength(scale: Scale) -> list[int]:
        light = colours(scale).partition("@media")[0]
        return [3 * 255 - sum(map(int, rgb)) for rgb in re.findall(r"rgb\((\d+) (\d+) (\d+)\)", light)]

    one, two = strength(Scale("bits", 0, 1)), strength(Scale("h", -1, 1, diverging=True))
    assert len(one) == len(two) == LEVELS
    assert one[0] == 0
    assert one == sorted(one)
    half = LEVELS // 2
    assert two[half:] == sorted(two[half:])
    assert two[:half] == sorted(two[:half], reverse=True)
    assert two[-1] == one[-1]


def test_scores_without_losses_are_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="losses"):
        list(surprise("t", [Score("a", b"x", 1, 1.0)]))

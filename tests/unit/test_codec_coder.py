"""The range coder: constriction's stream, with it and without it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mulstm.codec import coder, kernels
from mulstm.errors import BackendError, CheckFailedError, ExtraError

Whole = NDArray[np.int64]


def tables(rng: np.random.Generator, n: int, entries: int, peak: float) -> Whole:
    p = rng.dirichlet(np.full(entries, peak), size=n)
    free = (1 << 24) - entries
    begins = np.zeros((n, entries + 1), dtype=np.int64)
    begins[:, 1:] = np.floor(np.cumsum(p, axis=1) * free).astype(np.int64) + np.arange(1, entries + 1)
    begins[:, -1] = 1 << 24
    return begins


@pytest.mark.parametrize("entries", [2, 28, 206, 256])
@pytest.mark.parametrize("likely", [True, False])
def test_all_coders_write_and_read_the_same(entries: int, likely: bool) -> None:
    pytest.importorskip("constriction")
    rng = np.random.default_rng(entries)
    begins = tables(rng, 400, entries, 0.02)
    draws = rng.integers(0, 1 << 24, 400)
    symbols = (begins[:, 1:] <= draws[:, None]).sum(axis=1) if likely else rng.integers(0, entries, 400)
    streams = []
    for kind in coder.KINDS:
        out = coder.encoder(kind)
        for low in range(0, 400, 50):  # in pieces, as a block does
            out.put(begins[low : low + 50], symbols[low : low + 50])
        streams.append(out.finish())
    assert len(set(streams)) == 1
    for kind in coder.KINDS:
        assert (coder.decoder(streams[0], kind).get(begins) == symbols).all()


def test_all_coders_end_a_stream_alike() -> None:
    pytest.importorskip("constriction")
    rng = np.random.default_rng(9)
    begins = tables(rng, 30, 3, 0.05)
    for n in [*range(1, 31)] * 20:
        symbols, data = rng.integers(0, 3, n), set()
        for kind in coder.KINDS:
            out = coder.encoder(kind)
            out.put(begins[:n], symbols)
            data.add(out.finish())
        assert len(data) == 1
        assert (coder.decoder(data.pop(), "python").get(begins[:n]) == symbols).all()


def test_the_last_entry_is_coded_when_it_is_the_least_likely() -> None:
    begins = np.array([[*range(256), 1 << 24], [0, *range((1 << 24) - 255, (1 << 24) + 1)]])
    for kind in coder.KINDS:
        if kind != "python":
            pytest.importorskip(kind)
        out = coder.encoder(kind)
        out.put(begins, np.array([0, 255]))
        assert coder.decoder(out.finish(), kind).get(begins).tolist() == [0, 255]


def test_carries_run_through_words_of_ones() -> None:
    # The upper end of the interval stays just above a power of two for many words, then falls to one side.
    begins = np.array([[0, (1 << 23) - 1, (1 << 23) + 1, 1 << 24]])
    for ending in (0, 2):
        symbols = np.array([1] * 60 + [ending] * 8)
        rows, data = begins.repeat(len(symbols), axis=0), set()
        for kind in coder.KINDS:
            if kind != "python":
                pytest.importorskip(kind)
            out = coder.encoder(kind)
            out.put(rows, symbols)
            data.add(out.finish())
        assert len(data) == 1
        assert (coder.decoder(data.pop(), "python").get(rows) == symbols).all()


def test_a_range_of_one_whole_word_is_written_out() -> None:
    out = coder.PythonEncoder(0, 65_537 << 24)
    out.put(np.array([[0, 65_535, 1 << 24]]), np.array([0]))
    assert out._range == 0xFFFFFFFF << 32


def test_the_end_of_a_stream_carries_too() -> None:
    out = coder.PythonEncoder((1 << 64) - 16, 1 << 40, [7, 0xFFFFFFFF])
    assert np.frombuffer(out.finish(), "<u4").tolist() == [8, 0, 0]


@pytest.mark.parametrize("kind", coder.KINDS)
def test_nothing_coded_is_nothing_written(kind: str) -> None:
    if kind != "python":
        pytest.importorskip(kind)
    assert coder.encoder(kind).finish() == b""


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckFailedError, match="5 bytes"):
        coder.decoder(b"12345")
    with pytest.raises(BackendError, match="'huffman'"):
        coder.encoder("huffman")
    monkeypatch.setattr(coder, "find_spec", lambda name: None)
    monkeypatch.setattr(kernels, "find", lambda: None)
    for kind in ("constriction", "numba"):
        with pytest.raises(ExtraError, match=rf"{kind}.*pip install"):
            coder.encoder(kind)
    assert isinstance(coder.encoder(), coder.PythonEncoder)


@pytest.mark.parametrize("kind", coder.KINDS)
def test_a_stream_that_no_encoder_writes_is_refused_or_decodes_to_something(kind: str) -> None:
    if kind != "python":
        pytest.importorskip(kind)
    begins = np.array([[0, 1, 1 << 24]]).repeat(64, axis=0)
    with pytest.raises(CheckFailedError):
        coder.decoder(b"\xff" * 400, kind).get(begins)


@pytest.mark.parametrize("kind", ["numba", "python"])
def test_no_decoder_reads_far_past_the_end(kind: str) -> None:
    if kind != "python":
        pytest.importorskip(kind)
    # Four bits for each of the symbols that zeros stand for.
    begins = np.array([[0, 1 << 20, 1 << 24]]).repeat(99, axis=0)
    with pytest.raises(CheckFailedError, match="damaged"):
        coder.decoder(bytes(8), kind).get(begins)
    # Eight of them take a word, and two words may be missing.
    assert coder.decoder(bytes(8), kind).get(begins[:23]).tolist() == [0] * 23
    with pytest.raises(CheckFailedError, match="damaged"):
        coder.decoder(bytes(8), kind).get(begins[:24])


def test_a_stream_in_many_pieces_is_the_same() -> None:
    begins, least = np.array([[0, (1 << 24) - 1, 1 << 24]]), np.ones(1, dtype=np.int64)
    whole = coder.encoder("python")
    whole.put(begins.repeat(6_000, axis=0), least.repeat(6_000))
    pieces = coder.encoder()
    for _ in range(6_000):
        pieces.put(begins, least)
    assert pieces.finish() == whole.finish()


@pytest.mark.parametrize("entries", [2, 256, 257])
def test_no_stream_holds_more_than_its_size_allows(entries: int) -> None:
    n = 1 << 20  # of the likeliest entry there can be
    begins = np.concatenate([[0], (1 << 24) - np.arange(entries)[::-1]])[None]
    out = coder.encoder("numba" if kernels.find() else "python")
    for _ in range(16):
        out.put(begins.repeat(n // 16, axis=0), np.zeros(n // 16, dtype=np.int64))
    assert n <= coder.most_symbols(len(out.finish()), entries)


def test_constriction_says_that_it_has_no_table_of_one_entry() -> None:
    pytest.importorskip("constriction")
    begins = np.array([[0, 1 << 24]])
    with pytest.raises(BackendError, match="no table of one entry"):
        coder.encoder("constriction").put(begins, np.zeros(1, dtype=np.int64))
    with pytest.raises(BackendError, match="no table of one entry"):
        coder.decoder(bytes(8), "constriction").get(begins)

"""Lanes: unbroken stretches of a split, in chunks of one shape."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mulstm.data import Lanes, Split, load
from mulstm.errors import DataError


def split_of(folder: Path, data: bytes, name: str = "all", cut: str = "") -> Split:
    path = folder / "text"
    path.write_bytes(data)
    return load(path, split=cut).split(name)


def test_training_lanes_are_equal_and_full(tmp_path: Path) -> None:
    lanes = Lanes(split_of(tmp_path, bytes(range(50))), 3, 4, trim=True)  # 49 to predict, 16 a lane
    assert len(lanes) == 4
    first, last = lanes.chunk_at(0), lanes.chunk_at(3)
    assert first.x.tolist() == [[0, 1, 2, 3], [16, 17, 18, 19], [32, 33, 34, 35]]
    assert first.y.tolist() == [[1, 2, 3, 4], [17, 18, 19, 20], [33, 34, 35, 36]]
    assert last.y[0].tolist() == [13, 14, 15, 16]
    assert (first.x.dtype, first.y.dtype) == (np.uint8, np.int64)


def test_evaluation_pads_with_minus_one(tmp_path: Path) -> None:
    lanes = Lanes(split_of(tmp_path, bytes(range(12))), 2, 4, trim=False)  # 11 to predict, 6 a lane
    assert len(lanes) == 2
    assert [chunk.y.tolist() for chunk in lanes] == [
        [[1, 2, 3, 4], [7, 8, 9, 10]],
        [[5, 6, -1, -1], [11, -1, -1, -1]],
    ]


def test_more_lanes_than_symbols(tmp_path: Path) -> None:
    chunks = list(Lanes(split_of(tmp_path, b"abc"), 5, 4, trim=False))
    assert sorted(y for chunk in chunks for y in chunk.y.ravel() if y >= 0) == [98, 99]


def test_the_test_part_begins_with_the_symbol_before_it(tmp_path: Path) -> None:
    split = split_of(tmp_path, bytes(range(100)), "test", "90-5-5")
    chunk = Lanes(split, 1, 5, trim=False).chunk_at(0)
    assert chunk.x.tolist() == [[94, 95, 96, 97, 98]]
    assert chunk.y.tolist() == [[95, 96, 97, 98, 99]]


def test_rotation_keeps_pairs_together(tmp_path: Path) -> None:
    split = split_of(tmp_path, bytes(range(13)))
    chunks = list(Lanes(split, 2, 3, trim=True, offset=10))
    assert chunks[0].y[0].tolist() == [11, 12, 1]
    assert chunks[0].x[0].tolist() == [10, 11, 0]
    assert sorted(int(y) for chunk in chunks for y in chunk.y.ravel()) == list(range(1, 13))


def test_blocks_are_cut_by_themselves(tmp_path: Path) -> None:
    lanes = Lanes(split_of(tmp_path, bytes(range(48))), 2, 5, trim=True, block=20)  # 20, 20 and 7 symbols
    assert [lanes.fresh(k) for k in range(len(lanes))] == [True, False, True, False]
    assert lanes.chunk_at(1).y.tolist() == [[6, 7, 8, 9, 10], [16, 17, 18, 19, 20]]
    assert lanes.chunk_at(2).y.tolist() == [[21, 22, 23, 24, 25], [31, 32, 33, 34, 35]]
    # A last block that is shorter counts as far as it fills chunks.
    longer = Lanes(split_of(tmp_path, bytes(range(54))), 2, 5, trim=True, block=20)
    assert (len(longer), longer.fresh(4)) == (5, True)
    assert longer.chunk_at(4).y.tolist() == [[41, 42, 43, 44, 45], [46, 47, 48, 49, 50]]


def test_chunks_by_number(tmp_path: Path) -> None:
    lanes = Lanes(split_of(tmp_path, bytes(range(50))), 3, 4, trim=True)
    for k, chunk in enumerate(lanes):
        assert (lanes.chunk_at(k).x == chunk.x).all()
    with pytest.raises(IndexError, match="chunk 4 of 4"):
        lanes.chunk_at(4)


def test_too_short_says_what_fits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 49 symbols, too few for 8 x 10.*train\.lanes=4\."):
        Lanes(split_of(tmp_path, bytes(50)), 8, 10, trim=True)
    with pytest.raises(DataError, match=r"train\.lanes=1 --set train\.chunk=49"):
        Lanes(split_of(tmp_path, bytes(50)), 1, 100, trim=True)
    with pytest.raises(DataError, match=r"The valid part of text is empty\. Give another part or"):
        Lanes(split_of(tmp_path, bytes(50), "valid", "95-0-5"), 1, 10, trim=False)


def test_a_foreign_byte_is_told_by_its_place_in_the_text(tmp_path: Path) -> None:
    text = split_of(tmp_path, b"ab" * 40 + b"z" + b"ab" * 40)
    known = load(tmp_path / "text", alphabet="corpus").alphabet
    (tmp_path / "other").write_bytes(b"ab" * 40 + b"!" + b"ab" * 40)
    split = replace(load(tmp_path / "other").split("all"), alphabet=known)
    assert text.symbols_count == split.symbols_count
    for lanes, chunk in ((1, 200), (3, 7)):
        with pytest.raises(DataError, match="at offset 80 is not in the alphabet"):
            list(Lanes(split, lanes, chunk, trim=False))

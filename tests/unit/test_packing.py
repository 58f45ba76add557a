"""Packed lanes read every record once, whole, and lose next to nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mulstm.errors import BackendError, DataError
from mulstm.nn.model import LanguageModel
from mulstm.packing import pack, run
from mulstm.recipe import ModelRecipe


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), max_size=40),
    lanes=st.integers(1, 9),
    chunk=st.sampled_from([0, 1, 3, 8]),
    ahead=st.integers(1, 50),
)
def test_every_record_is_read_once_and_ends_at_a_chunks_end(
    lengths: list[int], lanes: int, chunk: int, ahead: int
) -> None:
    rng = np.random.default_rng(len(lengths))
    records = [rng.integers(0, 50, n) for n in lengths]
    read: dict[int, list[int]] = {}
    over: set[int] = set()
    before: list[int] = []
    for packed in pack(iter(records), lanes=lanes, chunk=chunk, ahead=ahead):
        B, T = packed.x.shape
        assert lanes >= B
        assert [before[k] for k in packed.kept] == packed.record[: len(packed.kept)]
        for lane in range(B):
            record, start = packed.record[lane], int(packed.start[lane])
            begins = np.flatnonzero(packed.first[lane]).tolist()
            if start <= 0:
                assert begins == [-start]
                assert record not in read
                assert lane >= len(packed.kept)
            else:
                assert begins == []
            own = packed.x[lane, max(0, -start) :]
            read.setdefault(record, []).extend(own.tolist())
            if lane in packed.ended:
                assert start + T == len(records[record])
                over.add(record)
        before = packed.record
    assert over == set(range(len(records)))
    assert all(read[k] == list(record) for k, record in enumerate(records))


def test_lanes_stay_full() -> None:
    rng = np.random.default_rng(0)
    records = [np.zeros(n, dtype=np.int64) for n in rng.integers(30, 1200, 300)]
    used = sum(packed.x.size for packed in pack(iter(records), lanes=64))
    assert used < 1.04 * sum(map(len, records))


def test_few_records_take_no_more_lanes_than_they_can_fill() -> None:
    records = [np.zeros(n, dtype=np.int64) for n in [800, *[100] * 120]]
    widths = [packed.x.shape[0] for packed in pack(iter(records), chunk=8)]
    assert widths[0] == 16
    assert widths.count(16) > 0.9 * len(widths)
    assert len(widths) <= 1.1 * 800 / 8


@pytest.mark.parametrize(("ahead", "symbols"), [(16, 4_000_000), (4096, 320)])
def test_reading_runs_ahead_only_so_far(ahead: int, symbols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mulstm.packing.AHEAD_SYMBOLS", symbols)
    handed = 0

    def records() -> object:
        nonlocal handed
        for _ in range(1000):
            handed += 1
            yield np.zeros(20, dtype=np.int64)

    chunks = pack(records(), lanes=4, chunk=4, ahead=ahead)  # type: ignore[arg-type]
    next(chunks)
    assert handed == 32


@pytest.mark.parametrize("ahead", [10, 4096])
def test_equal_records_are_taken_in_their_order(ahead: int) -> None:
    records = [np.zeros(5, dtype=np.int64)] * 20
    assert next(pack(records, lanes=4, chunk=5, ahead=ahead)).record == [0, 1, 2, 3]


def test_no_lanes() -> None:
    with pytest.raises(DataError, match="0 lanes"):
        list(pack([np.zeros(3, dtype=np.int64)], lanes=0))


def test_an_empty_record_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="record 1 has no symbols"):
        list(pack([np.zeros(3, dtype=np.int64), np.zeros(0, dtype=np.int64)]))


def test_what_a_kernel_made_that_waited_in_vain_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(ModelRecipe(hidden=3), 5)
    list(run(model, model, [np.array([1, 2, 3])]))
    monkeypatch.setattr("mulstm.nn.packed.has_failed", lambda device: True)
    with pytest.raises(BackendError, match="waited in vain"):
        list(run(model, model, [np.array([1, 2, 3])]))

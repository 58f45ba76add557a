"""Representations equal those of one text at a time, in input order, under the model's own convention."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import foreign
from mulstm import interop
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.embedding import Wanted, embed, embed_file, files
from mulstm.embedding.store import Rows, Store
from mulstm.errors import DataError, ExtraError
from mulstm.interop import openai, unirep
from mulstm.nn.model import LanguageModel
from mulstm.packing import _blocks
from mulstm.recipe import ModelRecipe, Recipe
from mulstm.records import Record

RESIDUES = "MRHKDESTNQCUGPAVIFYWLO"


@pytest.fixture(scope="module", params=[1, 3])
def made(request: pytest.FixtureRequest) -> foreign.Foreign:
    return foreign.unirep(H=7, layers=request.param)


@pytest.fixture(scope="module")
def proteins() -> list[str]:
    rng = np.random.default_rng(2)
    return ["".join(rng.choice(list(RESIDUES), n)) for n in (4, 5, 90, 1, 33, 33, 64, 200, 2)]


def by_formula(made: foreign.Foreign, protein: str) -> tuple[np.ndarray, np.ndarray]:
    """h of start and residues, last layer, in float64; and the last c."""
    tokens = [24, *(1 + RESIDUES.index(r) for r in protein)]
    x = made.embedding.astype(np.float64)[tokens]
    for cell in made.cells[:-1]:
        x = foreign.run(cell, x)
    cell, H = made.cells[-1], made.cells[-1].B.shape[0]
    h, c, hs = np.zeros(H), np.zeros(H), []
    for x_t in x:
        i, f, o, u = np.split(x_t @ cell.P + ((x_t @ cell.A) * (h @ cell.B)) @ cell.Q + cell.b, 4)
        c = foreign.sigmoid(f) * c + foreign.sigmoid(i) * np.tanh(u)
        h = foreign.sigmoid(o) * np.tanh(c)
        hs.append(h)
    return np.array(hs), c


def test_unireps_three_vectors(made: foreign.Foreign, proteins: list[str]) -> None:
    """The mean is over start and residues, without a stop; rows are in input order."""
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    found = embed(loaded, proteins, lanes=3)
    for k, protein in enumerate(proteins):
        h, c = by_formula(made, protein)
        np.testing.assert_allclose(found.h_mean[k], h.mean(axis=0), atol=2e-6)
        np.testing.assert_allclose(found.h_final[k], h[-1], atol=2e-6)
        np.testing.assert_allclose(found.c_final[k], c, atol=1e-5)
    assert found.joined.shape == (len(proteins), 21)


def test_company_does_not_matter(made: foreign.Foreign, proteins: list[str]) -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    together = embed(loaded, proteins, lanes=128)
    for k in (0, 1, 3, 7):
        alone = embed(loaded, proteins[k])
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose(a[0], b[k], atol=1e-6)


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
def test_files(suffix: str, made: foreign.Foreign, proteins: list[str], tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    expected = embed(loaded, proteins)
    ids = ["same", "same", *(f"p{k}" for k in range(len(proteins) - 2))]
    records = [Record(i, p.encode()) for i, p in zip(ids, proteins, strict=True)]
    out = tmp_path / f"r{suffix}"
    wanted = Wanted(("h_mean", "h_final", "c_final", "joined"), positions=True)
    summary = embed_file(loaded, iter(records), out, wanted=wanted, lanes=3)
    assert summary.records == len(proteins)
    assert summary.symbols == sum(map(len, proteins)) + len(proteins)
    rows = read_rows(out)
    assert [row["id"] for row in rows] == ids
    for k, (row, protein) in enumerate(zip(rows, proteins, strict=True)):
        np.testing.assert_allclose(row["h_mean"], expected.h_mean[k], atol=1e-6)
        np.testing.assert_allclose(row["h_final"], expected.h_final[k], atol=1e-6)
        np.testing.assert_allclose(row["c_final"], expected.c_final[k], atol=1e-6)
        np.testing.assert_allclose(row["joined"], expected.joined[k], atol=1e-6)
        h, _ = by_formula(made, protein)
        assert len(row["h"]) == len(protein)
        np.testing.assert_allclose(row["h"], h[1:], atol=2e-6)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
def test_a_name_that_is_no_text(suffix: str, made: foreign.Foreign, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    out = tmp_path / os.fsdecode(b"caf\xe9" + suffix.encode())
    embed_file(loaded, [Record("a", b"MKT")], out, wanted=Wanted(positions=True))
    assert list(tmp_path.iterdir()) == [out]
    assert [row["id"] for row in read_rows(out.rename(tmp_path / f"r{suffix}"))] == ["a"]


def read_rows(path: Path) -> list[dict[str, object]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]
    with np.load(path, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    cuts = arrays.pop("offsets")
    h = arrays.pop("h")
    rows: list[dict[str, object]] = [
        dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)
    ]
    return [row | {"h": h[cuts[k] : cuts[k + 1]]} for k, row in enumerate(rows)]


def test_chosen_units(made: foreign.Foreign, tmp_path: Path) -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    expected = embed(loaded, ["MKT"])
    embed_file(loaded, [Record("a", b"MKT")], tmp_path / "r.npz", wanted=Wanted(("h_mean",), units=(5, 0)))
    with np.load(tmp_path / "r.npz") as found:
        assert found.files == ["id", "h_mean"]
        np.testing.assert_allclose(found["h_mean"], expected.h_mean[:, [5, 0]], atol=1e-6)
    with pytest.raises(DataError, match="no unit 7: the model has 7"):
        embed_file(loaded, [], tmp_path / "r.npz", wanted=Wanted(units=(7,)))


def test_openai_reviews_come_with_their_surroundings() -> None:
    made = foreign.openai()
    loaded = interop.to_checkpoint(openai.from_arrays(made.arrays, "w"))
    found = embed(loaded, " a &amp; b\nc ")
    x = made.embedding.astype(np.float64)[list(b"\n a & b c ")]
    np.testing.assert_allclose(found.h_final[0], foreign.run(made.cells[0], x)[-1], atol=2e-6)


def test_positions_of_reviews_are_those_of_their_own_text(tmp_path: Path) -> None:
    made = foreign.openai()
    loaded = interop.to_checkpoint(openai.from_arrays(made.arrays, "w"))
    reviews = [b"quite a long review", b"b", b"cd"]
    records = [Record(str(k), review) for k, review in enumerate(reviews)]
    embed_file(loaded, records, tmp_path / "r.npz", wanted=Wanted(("h_mean",), positions=True))
    for row, review in zip(read_rows(tmp_path / "r.npz"), reviews, strict=True):
        x = made.embedding.astype(np.float64)[list(b"\n " + review + b" ")]
        np.testing.assert_allclose(row["h"], foreign.run(made.cells[0], x)[2:-1], atol=2e-6)


def test_own_models_read_the_bare_text() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=5, cell="lstm"), 256)
    loaded = Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})
    texts = [b"abc", b"a longer text, with more in it"]
    found = embed(loaded, texts)
    for k, text in enumerate(texts):
        h, state = model.hidden(torch.tensor([list(text)]))
        np.testing.assert_allclose(found.h_mean[k], h[0].mean(dim=0).detach(), atol=1e-6)
        np.testing.assert_allclose(found.c_final[k], state[-1].c[0].detach(), atol=1e-6)


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
@pytest.mark.parametrize("units", [(), (3, 1)])
def test_cells_without_c(suffix: str, units: tuple[int, ...], tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=5, cell="rnn"), 256)
    loaded = Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})
    wanted = Wanted(("h_mean", "c_final", "joined"), positions=True, units=units)
    embed_file(loaded, [Record("a", b"abc"), Record("b", b"de")], tmp_path / f"r{suffix}", wanted=wanted)
    expected = embed(loaded, ["abc", "de"])
    for k, row in enumerate(read_rows(tmp_path / f"r{suffix}")):
        h = expected.h_mean[k, list(units)] if units else expected.h_mean[k]
        np.testing.assert_allclose(row["h_mean"], h, atol=1e-6)
        assert len(row["c_final"]) == 0  # type: ignore[arg-type]
        assert len(row["joined"]) == 2 * len(h)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("protein", "words"),
    [
        (b"MKT*", "Record p has '*' at position 4, which is no residue. The end is understood"),
        (b"MK\xff", "Record p has 0xff at position 3"),
        (b"MKt", "--upper"),
        (b"MK*T", "position 3, which is no residue. End the record before the stop sign, or write X"),
        (b">p", "--as fasta (train: --set data.records=fasta)"),
        (b"MK>p", "Begin a new line with it where it opens a FASTA record"),
        (b"MK1", "Record p has '1' at position 3"),
    ],
)
def test_a_wrong_letter_is_named(protein: bytes, words: str, made: foreign.Foreign, tmp_path: Path) -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    with pytest.raises(DataError) as error:
        embed_file(loaded, [Record("ok", b"MK"), Record("p", protein)], tmp_path / "r.npz")
    assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_wrong_outputs_are_told_before_any_work(
    made: foreign.Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))

    def records() -> Iterator[Record]:
        raise AssertionError("read too early")
        yield

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".mulstm-a1b2"))

    with pytest.raises(DataError, match="End it in one of"):
        embed_file(loaded, records(), tmp_path / "r.txt")
    with pytest.raises(DataError, match="does not exist"):
        embed_file(loaded, records(), tmp_path / "no" / "r.npz")
    with monkeypatch.context() as refusing:
        refusing.setattr("tempfile.TemporaryFile", refuse)
        with pytest.raises(DataError, match=f"The folder {tmp_path} cannot be written"):
            embed_file(loaded, records(), tmp_path / "r.npz")
    with pytest.raises(DataError, match="holds no record"):
        embed_file(loaded, [], tmp_path / "r.npz")


def test_memory_does_not_grow_with_the_number_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's and numpy's, which is where forgotten rows would pile up."""
    monkeypatch.setattr("mulstm.embedding.store.BLOCK", 1 << 14)
    monkeypatch.setattr("mulstm.packing._blocks", lambda records, ahead: _blocks(records, 256))
    loaded = interop.to_checkpoint(unirep.from_arrays(foreign.unirep(H=16).arrays, "unirep", "w"))

    def peak(count: int) -> int:
        records = (Record(f"p{k}", b"MKT") for k in range(count))
        tracemalloc.start()
        try:
            embed_file(loaded, records, tmp_path / "r.npz")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(500)  # what is imported or made once
    # Rows alone would be 576,000 bytes more.
    assert peak(4_000) < peak(1_000) + 150_000


@pytest.mark.parametrize(("suffix", "count"), [(".jsonl", 1), (".parquet", 50)])
def test_positions_are_written_in_blocks(
    suffix: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("mulstm.embedding.store.BLOCK", 1 << 14)
    monkeypatch.setattr("mulstm.embedding.files.VALUES", 1 << 12)
    files.check(tmp_path / f"r{suffix}")  # what is imported once
    h = np.random.default_rng(0).normal(size=(6_000, 16)).astype(np.float32)
    with Store(tmp_path, {"h_mean": 16, "h": 16}) as store:
        for k in range(count):
            store.add(f"p{k}", len(h) // count)
        store.put("h_mean", 0, h[:count])
        store.put("h", 0, h)
        tracemalloc.start()
        try:
            files.write(store, tmp_path / f"r{suffix}")
            # As Python's own numbers they would be 3,000,000 bytes.
            assert tracemalloc.get_traced_memory()[1] < 300_000
        finally:
            tracemalloc.stop()
    found = read_rows(tmp_path / f"r{suffix}")
    np.testing.assert_array_equal([row["h_mean"] for row in found], h[:count])
    np.testing.assert_array_equal(np.concatenate([row["h"] for row in found]), h)  # type: ignore[misc]


def test_ids_of_any_width_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mulstm.embedding.store.BLOCK", 64)
    ids = ["a", "bc", "d", "e", "a name of 20 letters", "f", "\u00e9", "g"]
    with Store(tmp_path, {"h_mean": 2}) as store:
        for k, id in enumerate(ids):
            store.add(id, 1)
            store.put("h_mean", k, np.full((1, 2), k, dtype=np.float32))
        files.write(store, tmp_path / "r.npz")
    found = np.load(tmp_path / "r.npz")
    assert found["id"].tolist() == ids
    assert found["h_mean"].tolist() == [[k, k] for k in range(len(ids))]


def test_ids_that_an_array_cannot_hold(made: foreign.Foreign, tmp_path: Path) -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    for id, words in (("a\0", r"The id 'a\\x00' has a NUL in it"), ("x" * 10_001, "has 10,001 characters")):
        with pytest.raises(DataError, match=words):
            embed_file(loaded, [Record(id, b"MK")], tmp_path / "r.npz")


def test_a_full_disk(made: foreign.Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: Store, name: str, row: int, values: np.ndarray) -> None:
        store._offsets.close()
        store._offsets = open("/dev/full", "wb")  # noqa: SIM115
        store._offsets.write(b"what cannot be written when it is closed")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "put", full)
    with pytest.raises(DataError, match="no room for the rows"):
        embed_file(
            interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "made")),
            [Record("a", b"MK")],
            tmp_path / "x.npz",
        )
    assert not list(tmp_path.iterdir())


def test_a_store_tells_offsets_between_two_records(tmp_path: Path) -> None:
    with Store(tmp_path, {"h": 2}) as store:
        for k, positions in enumerate((3, 4, 5)):
            store.add(str(k), positions)
            store.offset(0)
        assert [store.offset(k) for k in range(4)] == [0, 3, 7, 12]


def test_a_store_has_no_names_that_a_killed_run_could_leave(tmp_path: Path) -> None:
    with Store(tmp_path, {"h_mean": 2}) as store:
        store.add("a", 3)
        store.put("h_mean", 0, np.ones((1, 2), dtype=np.float32))
        assert next(store.rows("h_mean")).tolist() == [[1.0, 1.0]]
        assert list(tmp_path.iterdir()) == []


def test_a_fault_that_is_no_full_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), Store(tmp_path, {"h": 2}):
        raise PermissionError(13, "Permission denied")


def test_a_very_long_record(made: foreign.Foreign) -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(made.arrays, "unirep", "w"))
    protein = "MKTAYIAKQR" * 300
    found = embed(loaded, [protein, "MK"])
    h, _ = by_formula(made, protein)
    np.testing.assert_allclose(found.h_mean[0], h.mean(axis=0), atol=5e-6)


def test_the_numbers_of_one_record_are_counted_in_64_bits() -> None:
    pyarrow = pytest.importorskip("pyarrow")

    class Two:
        widths: ClassVar = {"h": 3}

        def rows(self, name: str, first: int, last: int) -> list[Rows]:
            return [np.arange(3 * (last - first), dtype=np.float32).reshape(-1, 3)]

        def offset(self, k: int) -> int:
            return 2 * k

    made = files._lists(Two(), "h", 0, 1)  # type: ignore[arg-type]
    assert made.to_pylist() == [[[0, 1, 2], [3, 4, 5]]]
    assert made.type == pyarrow.list_(pyarrow.large_list(pyarrow.float32()))


def test_a_folder_in_the_place_of_the_output_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "d.npz").mkdir()
    with pytest.raises(DataError, match=r"d\.npz is a folder"):
        files.check(tmp_path / "d.npz")


def test_what_parquet_needs_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ExtraError, match=r"needs pyarrow, which is not installed.*, or write \.npz"):
        files.check(tmp_path / "v.parquet")

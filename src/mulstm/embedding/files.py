"""Writes a store of representations as .npz, .parquet or .jsonl, in blocks."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mulstm.embedding.store import Store, names
from mulstm.errors import DataError, ExtraError
from mulstm.runs import replacing

SUFFIXES = (".npz", ".parquet", ".jsonl")
ROWS = 256  # records a Parquet group or a block of lines


def check(path: Path) -> None:
    """Complains about the output before any work is done."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path.name} does not say what to write. End it in one of: {', '.join(SUFFIXES)}.")
    if not path.parent.is_dir():
        raise DataError(f"The folder {path.parent} does not exist. Make it first.")
    if path.suffix == ".parquet":
        _pyarrow()


def write(store: Store, path: Path) -> None:
    """The whole file, or none."""
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            _npz(store, temporary)
        elif path.suffix == ".parquet":
            _parquet(store, temporary)
        else:
            with temporary.open("w", encoding="utf-8") as out:
                for record in _records(store):
                    out.write(json.dumps(record) + "\n")


def _npz(store: Store, path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _member(archive, "id", f"<U{store.longest_id}", (store.count,), store.id_blocks())
        for name in names(store.widths):
            count = store.total if name == "h" else store.count
            _member(archive, name, "<f4", (count, store.widths[name]), store.rows(name))
            store.forget(name)
        if "h" in store.widths:
            offsets = np.array([store.offset(k) for k in range(store.count + 1)], dtype=np.int64)
            _member(archive, "offsets", "<i8", offsets.shape, [offsets])


def _member(
    archive: zipfile.ZipFile,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    blocks: Iterable[npt.NDArray[Any]],
) -> None:
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(_Unseekable(member), header)
        for block in blocks:
            member.write(np.ascontiguousarray(block).data.cast("B") if block.size else b"")


class _Unseekable:
    """What numpy needs of a file to write a header."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write = file.write


def _records(store: Store) -> Iterator[dict[str, Any]]:
    """One object a record."""
    vectors = [name for name in names(store.widths) if name != "h"]
    rows = {name: _one_by_one(store, name) for name in vectors}
    for k, id in enumerate(store.ids()):
        record: dict[str, Any] = {"id": id} | {name: next(rows[name]).tolist() for name in vectors}
        if "h" in store.widths:
            low, high = store.offset(k), store.offset(k + 1)
            record["h"] = [row.tolist() for block in store.rows("h", low, high) for row in block]
        yield record


def _one_by_one(store: Store, name: str) -> Iterator[npt.NDArray[np.float32]]:
    for block in store.rows(name):
        yield from block


def _parquet(store: Store, path: Path) -> None:
    pyarrow, parquet = _pyarrow()
    vector = pyarrow.list_(pyarrow.float32())
    fields = [("id", pyarrow.string())]
    fields += [(name, pyarrow.list_(vector) if name == "h" else vector) for name in names(store.widths)]
    schema = pyarrow.schema(fields)
    with parquet.ParquetWriter(path, schema) as writer:
        block: list[dict[str, Any]] = []
        for record in _records(store):
            block.append(record)
            if len(block) == ROWS:
                writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))
                block = []
        writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ExtraError(
            'Writing .parquet needs pyarrow, which is not installed. Run "pip install mulstm[parquet]", '
            "or write .npz."
        ) from error
    return pyarrow, parquet

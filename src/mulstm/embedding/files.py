"""Writes a store of representations as .npz, .parquet or .jsonl, in blocks."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mulstm.embedding.store import Store, names
from mulstm.errors import DataError, ExtraError
from mulstm.files import replacing, require_place

SUFFIXES = (".npz", ".parquet", ".jsonl")
VALUES = 1 << 20  # numbers in a Parquet group, about: a record is never cut


def check(path: Path) -> None:
    """Complains about the output before any work is done."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path.name} does not say what to write. End it in one of: {', '.join(SUFFIXES)}.")
    require_place(path)
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
                for k, id in enumerate(store.ids()):
                    out.writelines(_line(store, k, id))


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
        np.lib.format.write_array_header_1_0(member, header)
        for block in blocks:
            member.write(np.ascontiguousarray(block).data.cast("B") if block.size else b"")


def _line(store: Store, k: int, id: str) -> Iterator[str]:
    """Record k as a JSON object, piece by piece: its positions may be many."""
    yield '{"id": ' + json.dumps(id)
    for name in names(store.widths):
        low, high = _place(store, name, k, k + 1)
        rows = (json.dumps(row.tolist()) for block in store.rows(name, low, high) for row in block)
        yield f', "{name}": ' + (next(rows) if name != "h" else "[" + next(rows, ""))
        yield from (", " + row for row in rows)
        yield "]" if name == "h" else ""
    yield "}\n"


def _place(store: Store, name: str, low: int, high: int) -> tuple[int, int]:
    """The rows of records low ... high - 1."""
    return (store.offset(low), store.offset(high)) if name == "h" else (low, high)


def _parquet(store: Store, path: Path) -> None:
    pyarrow, parquet = _pyarrow()
    vector, long = pyarrow.list_(pyarrow.float32()), pyarrow.large_list(pyarrow.float32())
    fields = [("id", pyarrow.string())]
    fields += [(name, pyarrow.list_(long) if name == "h" else vector) for name in names(store.widths)]
    schema, ids = pyarrow.schema(fields), store.ids()
    # Opened here, because pyarrow opens none whose name is no UTF-8.
    with path.open("wb") as file, parquet.ParquetWriter(file, schema) as writer:
        for low, high in _groups(store):
            columns = [pyarrow.array(islice(ids, high - low), pyarrow.string())]
            columns += [_lists(store, name, low, high) for name in names(store.widths)]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def _groups(store: Store) -> Iterator[tuple[int, int]]:
    """Cuts between records, so that each group has about as many numbers as any."""
    width = sum(store.widths[name] for name in names(store.widths) if name != "h")
    low = 0
    for high in range(1, store.count + 1):
        rows = store.offset(high) - store.offset(low)
        if high == store.count or (high - low) * width + rows * store.widths.get("h", 0) >= VALUES:
            yield low, high
            low = high


def _lists(store: Store, name: str, low: int, high: int) -> Any:
    """A column as Arrow wants it: all numbers, and where each list begins."""
    pyarrow, _ = _pyarrow()
    first, last = _place(store, name, low, high)
    width = store.widths[name]
    numbers = np.concatenate([np.zeros(0, np.float32), *(b.ravel() for b in store.rows(name, first, last))])
    begins = np.arange(last - first + 1, dtype=np.int64) * width
    if name != "h":
        return pyarrow.ListArray.from_arrays(begins.astype(np.int32), numbers)
    # All positions of one record stand together, and may be more numbers than 32 bits count.
    rows = pyarrow.LargeListArray.from_arrays(begins, numbers)
    offsets = np.array([store.offset(k) - first for k in range(low, high + 1)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(offsets, rows)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        what = "Writing .parquet needs pyarrow, which is not installed"
        raise ExtraError(what, "parquet", ", or write .npz") from error
    return pyarrow, parquet

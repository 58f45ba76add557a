"""Reading .npz and .npy without pickle, and writing .npz byte-identically from run to run."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from mulstm.errors import CheckpointError
from mulstm.files import write_atomic
from mulstm.interop.weights import AnyArray, plain_file

_PICKLE = (
    "{path} is or holds a pickle, which can run any code when it is read. "
    "Open it where you trust it, write its arrays with numpy.savez, and import that."
)
# What an archive may unpack to: so many bytes, or so many times its own. Weights hardly compress.
ALWAYS, TIMES = 64 << 20, 50


def read_npz(path: Path) -> dict[str, AnyArray]:
    """All arrays of an archive."""
    arrays: dict[str, AnyArray] = {}
    with _reading(path, ".npz archive") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        check_sizes(members, path)
        for member in members:
            key = member.filename.removesuffix(".npy")
            if key in arrays:
                raise ValueError(f"it holds {key} twice")
            with archive.open(member) as stream:
                arrays[key] = _array(stream, member.file_size, path)
    return arrays


def read_npy(path: Path) -> AnyArray:
    """One array."""
    with _reading(path, ".npy file") as file:
        if file.peek(2)[:2] == b"PK":
            raise CheckpointError(f"{path} is an archive, not one array. Give the folder of .npy files.")
        return _array(file, path.stat().st_size, path)


@contextlib.contextmanager
def _reading(path: Path, kind: str) -> Iterator[io.BufferedReader]:
    """The open file; whatever its bytes make numpy and zipfile raise becomes a sentence that names it."""
    try:
        with plain_file(path).open("rb") as file:
            if file.peek(1)[:1] == pickle.PROTO:
                raise CheckpointError(_PICKLE.format(path=path))
            yield file
    except CheckpointError:
        raise
    except Exception as error:  # a header is an expression of Python: what is wrong in it can be anything
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"{path} is not a readable {kind} ({reason:.200}). Check that it was copied whole."
        ) from error


def check_sizes(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuses, before anything is unpacked, what a small file could fill the memory with."""
    size, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > max(ALWAYS, TIMES * size):
        raise CheckpointError(
            f"{path} has {size:,} bytes and would unpack to {unpacked:,}, as no weights do. "
            "Check where it comes from."
        )
    # The other methods do not keep to the size that they state, and neither numpy nor torch writes them.
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise CheckpointError(
            f"{path} is compressed in a way that neither numpy nor torch writes. Write it again with one."
        )


def _array(stream: IO[bytes], size: int, path: Path) -> AnyArray:
    """The array in `size` bytes; memory is taken only for what is there."""
    version = np.lib.format.read_magic(stream)
    of_version = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in of_version:
        raise ValueError(f"its version is {version}")
    shape, _, dtype = of_version[version](stream)
    if dtype.hasobject:
        raise CheckpointError(_PICKLE.format(path=path))
    claimed, there = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if claimed != there:  # or its checksum, at the end, would not be looked at
        raise ValueError(f"an array of {claimed} bytes has {there}")
    stream.seek(0)
    array: AnyArray = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def write_npz(path: Path, arrays: Mapping[str, AnyArray]) -> None:
    """An uncompressed archive with a fixed date, so that equal arrays give equal files."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for key, array in arrays.items():
            archive.writestr(zipfile.ZipInfo(f"{key}.npy"), _npy(array))
    write_atomic(path, whole.getvalue())


def write_npy(path: Path, array: AnyArray) -> None:
    """One array, whole or not at all."""
    write_atomic(path, _npy(array))


def _npy(array: AnyArray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()

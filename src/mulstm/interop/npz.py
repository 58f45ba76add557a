"""Reading .npz and .npy without pickle, and writing .npz byte-identically from run to run."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mulstm.errors import CheckpointError
from mulstm.files import write_atomic
from mulstm.interop.weights import AnyArray

_PICKLE = (
    "{path} is or holds a pickle, which can run any code when it is read. "
    "Open it where you trust it, write its arrays with numpy.savez, and import that."
)


def read_npz(path: Path) -> dict[str, AnyArray]:
    """All arrays of an archive."""
    try:
        # Opened here, because numpy leaves a file open that turns out to be no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, OSError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a readable .npz archive ({error}). Check that it was copied whole."
        ) from error
    except ValueError as error:
        raise _not_plain(path, error) from error


def read_npy(path: Path) -> AnyArray:
    """One array."""
    try:
        array = np.load(path, allow_pickle=False)
    except (EOFError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Check that it was copied whole.") from error
    except ValueError as error:
        raise _not_plain(path, error) from error
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{path} is an archive, not one array. Give the folder of .npy files.")
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


def _not_plain(path: Path, error: ValueError) -> CheckpointError:
    if "pickle" in str(error).lower() or "object" in str(error).lower():
        return CheckpointError(_PICKLE.format(path=path))
    return CheckpointError(f"{path} is damaged ({error}). Check that it was copied whole.")

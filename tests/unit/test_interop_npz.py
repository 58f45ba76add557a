"""Arrays in .npz and .npy files: all of them, once each, with their checksums."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from mulstm.errors import CheckpointError
from mulstm.interop import npz


@pytest.mark.parametrize("bit", range(16))
def test_a_header_of_another_length(bit: int, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    npz.write_npz(path, {"a": np.arange(5_000.0)})  # more than is read at a time
    content = bytearray(path.read_bytes())
    at = content.index(b"\x93NUMPY\x01\x00") + 8  # the length of the first header, two bytes
    content[at + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not a readable \.npz archive"):
        npz.read_npz(path)


def test_bytes_behind_an_array(tmp_path: Path) -> None:
    path = tmp_path / "1.npy"
    npz.write_npy(path, np.ones(3))
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="has 28"):
        npz.read_npy(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("second", ["l2/b.npy", "l2/b"])
def test_a_name_that_is_there_twice(second: str, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in (("l2/b.npy", 1.0), (second, 2.0)):
            archive.writestr(name, npz._npy(np.full(3, value)))
    with pytest.raises(CheckpointError, match="holds l2/b twice"):
        npz.read_npz(path)

"""OpenAI's sentiment neuron: a folder of fifteen numbered .npy files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.files import filling
from mulstm.interop.npz import read_npy, write_npy
from mulstm.interop.weights import (
    BYTES,
    AnyArray,
    Array,
    Weights,
    axis_size,
    checked,
    existing,
    from_order,
    layer_recipe,
    require,
    sha256,
    to_order,
)

ORDER = ("i", "f", "o", "h_hat")


def read(path: str | Path) -> Weights:
    """A model from the folder that holds 0.npy to 14.npy."""
    folder = existing(path, "the folder with 0.npy to 14.npy")
    if folder.is_dir() and not (folder / "0.npy").exists() and (folder / "model" / "0.npy").exists():
        folder = folder / "model"
    if not folder.is_dir() or not any(folder.glob("[!.]*.npy")):
        raise CheckpointError(
            f"{folder} is not a folder of .npy files. Give the folder with 0.npy to 14.npy."
        )
    found = {file.stem: read_npy(file) for file in sorted(folder.glob("[!.]*.npy"))}
    weights = from_arrays(found, str(folder))
    weights.source.update(sha256=sha256(folder), file=folder.name)
    return weights


def from_arrays(found: dict[str, AnyArray], where: str) -> Weights:
    """Checked arrays by number to ours."""
    N, E = axis_size(found, "0", 0, 2, where), axis_size(found, "0", 1, 2, where)
    H = axis_size(found, "7", 0, 2, where)
    if N != BYTES:
        raise CheckpointError(f"{where}: 0 should have 256 rows, one a byte, but has {N}. Check the folder.")
    a = checked(found, _shapes(E, H), where)
    Q = np.concatenate([a["2"], a["3"], a["4"], a["5"]], axis=1)  # (H, 4H)
    ours: dict[str, Array] = {
        "embedding": a["0"],
        "layers.0.W_zx": from_order(a["1"].T, ORDER),
        "layers.0.W_zm": from_order(Q.T, ORDER),
        "layers.0.W_mx": a["6"].T,
        "layers.0.W_mh": a["7"].T,
        "layers.0.b_z": from_order(a["8"], ORDER),
        "layers.0.g_zx": from_order(a["9"], ORDER),
        "layers.0.g_zm": from_order(a["10"], ORDER),
        "layers.0.g_mx": a["11"],
        "layers.0.g_mh": a["12"],
        "W_out": a["13"].T,
        "b_out": a["14"],
    }
    source = {
        "format": "openai",
        "vocabulary": "bytes",
        "convention": "openai-review",
        "licence": "as the file it was made from (OpenAI's release: MIT)",
    }
    recipe = layer_recipe(hidden=H, embedding=E)
    return Weights(recipe, ours, Alphabet.bytes(), source)


def write(weights: Weights, path: str | Path) -> None:
    """The fifteen files, for any byte model of one layer."""
    require(weights, "openai", layers=1, alphabets=[Alphabet.bytes()])
    with filling(Path(path)) as folder:
        for name, array in to_arrays(weights).items():
            write_npy(folder / f"{name}.npy", array)


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Our arrays by number."""
    (V_mx, g_mx), (V_mh, g_mh) = weights.split(0, "mx"), weights.split(0, "mh")
    (V_zx, g_zx), (V_zm, g_zm) = weights.split(0, "zx"), weights.split(0, "zm")
    i, f, o, u = np.split(to_order(V_zm, ORDER).T, 4, axis=1)
    W_out, b_out = weights.head()
    numbered = [
        weights.embedding(),
        to_order(V_zx, ORDER).T,
        *(i, f, o, u),
        V_mx.T,
        V_mh.T,
        to_order(weights.arrays["layers.0.b_z"], ORDER),
        to_order(g_zx, ORDER),
        to_order(g_zm, ORDER),
        g_mx,
        g_mh,
        W_out.T,
        b_out,
    ]
    return {str(k): array for k, array in enumerate(numbered)}


def _shapes(E: int, H: int) -> dict[str, tuple[int, ...]]:
    square = (H, H)
    shapes: list[tuple[int, ...]] = [(256, E), (E, 4 * H), square, square, square, square, (E, H), square]
    shapes += [(4 * H,), (4 * H,), (4 * H,), (H,), (H,), (H, 256), (256,)]
    return {str(k): shape for k, shape in enumerate(shapes)}

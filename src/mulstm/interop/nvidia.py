"""NVIDIA's sentiment-discovery checkpoints, old and new, with and without weight norm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mulstm.convention import padded_bytes
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.interop import torchfile
from mulstm.interop.weights import (
    BYTES,
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

ORDER = ("i", "f", "h_hat", "o")
_MATRICES = {"w_mih": "mx", "w_mhh": "mh", "w_ih": "zx", "w_hh": "zm"}


def read(path: str | Path) -> Weights:
    """A language model from a checkpoint, or the encoder inside a classifier's file.

    The latter can embed but not predict: its head is uniform, and `score` refuses it.
    """
    place = existing(path, "a sentiment-discovery checkpoint")
    weights = from_arrays(_flatten(torchfile.load(place), str(place)), str(place))
    weights.source.update(sha256=sha256(place), file=place.name)
    return weights


def from_arrays(found: dict[str, AnyArray], where: str) -> Weights:
    """Checked arrays, keys as "rnns.<k>.<p>", "encoder.weight", "decoder.weight", to ours."""
    if projected := sorted(key for key in found if key.endswith(("w_ho", "w_ho_g", "w_ho_v"))):
        raise CheckpointError(
            f"{where}: {projected[0]} is a projected output, which this cell does not have. "
            "Import a model trained without a projection."
        )
    layers = layer_count({k: m[1] for k in found if (m := re.match(r"rnns\.(\d+)\.", k))}, where)
    N, E = axis_size(found, "encoder.weight", 0, 2, where), axis_size(found, "encoder.weight", 1, 2, where)
    if N not in (BYTES, BYTES + 1):
        raise CheckpointError(
            f"{where}: encoder.weight should have 256 or 257 rows but has {N}. Check that the file is "
            "a byte model of sentiment-discovery."
        )
    normed = "rnns.0.w_mhh_v" in found
    H = axis_size(found, "rnns.0.w_mhh_v" if normed else "rnns.0.w_mhh", 0, 2, where)
    has_head = "decoder.weight" in found or "decoder.bias" in found
    if not has_head:
        found = found | {
            "decoder.weight": np.zeros((N, H), np.float32),
            "decoder.bias": np.zeros(N, np.float32),
        }
    a = checked(found, _shapes(found, layers, N, E, H), where)
    ours: dict[str, Array] = {"embedding": _pad_last(a["encoder.weight"])}
    any_norm = any(key.endswith("_g") for key in a)
    for l in range(layers):
        for theirs, name in _MATRICES.items():
            V, g = _split(a, f"rnns.{l}.{theirs}", any_norm)
            ours[f"layers.{l}.W_{name}"] = from_order(V, ORDER) if name.startswith("z") else V
            if g is not None:
                ours[f"layers.{l}.g_{name}"] = from_order(g, ORDER) if name.startswith("z") else g
        ours[f"layers.{l}.b_z"] = from_order(a[f"rnns.{l}.b_ih"] + a[f"rnns.{l}.b_hh"], ORDER)
    ours["W_out"] = _pad_last(a["decoder.weight"])
    ours["b_out"] = _pad_last(a["decoder.bias"])
    source = {
        "format": "nvidia",
        "vocabulary": "bytes" if N == BYTES else "bytes-and-pad",
        "convention": "nvidia-review",
        "head": has_head,
        "licence": "as the file it was made from (the software is BSD-3)",
    }
    recipe = layer_recipe(hidden=H, embedding=E, layers=layers, weight_norm=any_norm)
    alphabet = Alphabet.bytes() if N == BYTES else padded_bytes()
    return Weights(recipe, ours, alphabet, source)


def write(weights: Weights, path: str | Path) -> None:
    """A checkpoint in the nested form, weight norm as the model has it."""
    require(weights, "nvidia", alphabets=[Alphabet.bytes(), padded_bytes()], headless=True)
    arrays = to_arrays(weights)
    rnn = {k: v for k, v in arrays.items() if k.startswith("rnns.")}
    nested: dict[str, Any] = {
        "encoder": {
            "encoder": torchfile.as_tensors({"weight": arrays["encoder.weight"]}),
            "rnn": torchfile.as_tensors(rnn),
        }
    }
    if weights.source.get("head", True):
        nested["decoder"] = torchfile.as_tensors({p: arrays[f"decoder.{p}"] for p in ("weight", "bias")})
    torchfile.save(nested, Path(path))


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Our arrays in sentiment-discovery's names. Its two biases add up, so ours goes into the first."""
    theirs: dict[str, Array] = {"encoder.weight": _pad_first(weights.embedding())}
    for l in range(weights.recipe.layers):
        for foreign, name in _MATRICES.items():
            V = weights.arrays[f"layers.{l}.W_{name}"]
            V = to_order(V, ORDER) if name.startswith("z") else V
            if not weights.recipe.weight_norm:
                theirs[f"rnns.{l}.{foreign}"] = V
                continue
            g = weights.arrays[f"layers.{l}.g_{name}"].reshape(-1, 1)
            theirs[f"rnns.{l}.{foreign}_v"] = V
            theirs[f"rnns.{l}.{foreign}_g"] = to_order(g, ORDER) if name.startswith("z") else g
        b = to_order(weights.arrays[f"layers.{l}.b_z"], ORDER)
        theirs[f"rnns.{l}.b_ih"], theirs[f"rnns.{l}.b_hh"] = b, np.zeros_like(b)
    W_out, b_out = weights.head()
    theirs["decoder.weight"] = _pad_first(W_out)
    theirs["decoder.bias"] = _pad_first(b_out)
    return theirs


def _pad_last(rows: Array) -> Array:
    """Rows that begin with the pad symbol, in our order; 256 rows have none."""
    return rows if len(rows) == BYTES else rows[[*range(1, len(rows)), 0]]


def _pad_first(rows: Array) -> Array:
    """The way back."""
    return rows if len(rows) == BYTES else rows[[-1, *range(len(rows) - 1)]]


def _split(a: dict[str, Array], key: str, any_norm: bool) -> tuple[Array, Array | None]:
    """V and g; a plain matrix among normed ones gets its row lengths as gains, which changes nothing."""
    if f"{key}_v" in a:
        return a[f"{key}_v"], a[f"{key}_g"].reshape(-1)
    if not any_norm:
        return a[key], None
    return a[key], np.linalg.norm(a[key].astype(np.float64), axis=1).astype(np.float32)


def _shapes(found: dict[str, AnyArray], layers: int, N: int, E: int, H: int) -> dict[str, tuple[int, ...]]:
    """The spelling may differ from matrix to matrix; every matrix has exactly one of the two."""
    shapes: dict[str, tuple[int, ...]] = {"encoder.weight": (N, E)}
    for l in range(layers):
        below = E if l == 0 else H
        matrices = {"w_ih": (4 * H, below), "w_hh": (4 * H, H), "w_mih": (H, below), "w_mhh": (H, H)}
        for name, shape in matrices.items():
            key = f"rnns.{l}.{name}"
            if f"{key}_v" in found or f"{key}_g" in found:
                shapes[f"{key}_v"], shapes[f"{key}_g"] = shape, (shape[0], 1)
            else:
                shapes[key] = shape
        shapes[f"rnns.{l}.b_ih"] = shapes[f"rnns.{l}.b_hh"] = (4 * H,)
    return shapes | {"decoder.weight": (N, H), "decoder.bias": (N,)}


def _flatten(loaded: Any, where: str) -> dict[str, AnyArray]:
    """The nested dictionaries of any release under one set of names; a classifier's file has no decoder."""
    top = torchfile.mapping(loaded, "the file", where)
    for name in ("sd", "lm_encoder"):
        top = torchfile.mapping(top[name], name, where) if name in top else top
    inner = top.get("encoder")
    if isinstance(inner, dict) and "decoder" in inner:
        top = inner
    encoder = top if "rnn" in top else torchfile.mapping(top.get("encoder"), "encoder", where)
    found: dict[str, Any] = {}
    for name, prefix in (("encoder", "encoder."), ("rnn", "")):
        part = torchfile.mapping(encoder.get(name), f"encoder/{name}", where)
        found |= {prefix + key: value for key, value in part.items()}
    if "decoder" in top:
        decoder = torchfile.mapping(top["decoder"], "decoder", where)
        found |= {f"decoder.{key}": value for key, value in decoder.items()}
    return torchfile.as_arrays(found, where)

"""A model's matrices as they act, in sums whose order is fixed: the same numbers on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mulstm.recipe import ModelRecipe

Float = NDArray[np.float64]
_BLOCK = 1 << 16  # numbers that stay in a core's cache


@dataclass(frozen=True)
class FoldedLayer:
    """One layer with embedding and weight norm multiplied away. Rows of tables: symbols, or one."""

    zx: Float  # (N or 1, Z)
    W_zm: Float  # (Z, H)
    mx: Float | None  # (N or 1, H)
    W_mh: Float | None  # (H, H)
    W_ml: Float | None  # (H, H)
    W_zl: Float | None  # (Z, H)
    px: Float | None  # (N, Z)
    b_h: Float | None  # (H)


def fold(weights: Mapping[str, NDArray[Any]], recipe: ModelRecipe) -> list[FoldedLayer]:
    """The layers of a checkpoint's arrays."""
    embedding = as_float(weights["embedding"]) if recipe.embedding else None
    layers = []
    for k in range(recipe.layers):
        prefix = f"layers.{k}."
        mine = {n.removeprefix(prefix): as_float(a) for n, a in weights.items() if n.startswith(prefix)}
        layers.append(_fold_layer(mine, embedding, recipe, sees_symbol=k == 0 or recipe.skip))
    return layers


def _fold_layer(
    mine: dict[str, Float], embedding: Float | None, recipe: ModelRecipe, sees_symbol: bool
) -> FoldedLayer:
    def matrix(name: str) -> Float | None:
        W, g = mine.get(name), mine.get("g" + name[1:])
        return W if W is None or g is None else W * (g / lengths(W))[:, None]

    def rows(W: Float | None) -> Float | None:
        """W times every symbol."""
        if W is None or not sees_symbol:
            return W
        return np.ascontiguousarray(W.T) if embedding is None else outer_sum(embedding, W)

    H, b_z = recipe.hidden, mine["b_z"].copy()
    b_h = None
    if recipe.unit == "initial":
        b_h = b_z[:H].copy()
        b_z[:H] = 0
    W_zm = matrix("W_zm")
    zx, mx = rows(matrix("W_zx")), rows(matrix("W_mx"))
    assert W_zm is not None
    assert zx is not None
    W_zl, W_ml = matrix("W_zl"), matrix("W_ml")
    if not sees_symbol:  # without skip wiring, the "input" of an upper layer is the layer below
        W_zl, zx = zx, np.zeros((1, len(b_z)))
        W_ml, mx = mx, None if mx is None else np.zeros((1, H))
    px = None
    if recipe.cell == "milstm":
        zx, px = mine["beta_2"] * zx, mine["alpha"] * zx + mine["beta_1"]
    return FoldedLayer(zx + b_z, W_zm, mx, matrix("W_mh"), W_ml, W_zl, px, b_h)


def lengths(W: Float) -> Float:
    """The length of each row; a row of zeros counts as 1."""
    total = np.zeros(len(W))
    for column in np.ascontiguousarray(W.T):
        total += column * column
    total[total == 0] = 1
    return np.sqrt(total)


def outer_sum(x: Float, W: Float) -> Float:
    """x @ W.T, every sum from left to right: a library's product has an order of its own on each machine."""
    right = np.ascontiguousarray(W.T)  # (E, Z)
    out = np.zeros((len(x), len(W)))
    size = max(1, _BLOCK // len(W))
    for low in range(0, len(x), size):
        block = out[low : low + size]
        for x_e, row in zip(x[low : low + size].T, right, strict=True):
            block += x_e[:, None] * row
    return out


def as_float(array: NDArray[Any]) -> Float:
    """The same numbers, doubly precise."""
    return np.asarray(array, dtype=np.float64)

"""The equations once more, in numpy float64 and lane by lane: shares no code with src."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def sigmoid(v: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-v))


def lane(
    zx: Array,  # (T, 4H) or (T, H)
    W_zm: Array,
    h: Array,  # (H)
    c: Array,
    *,
    mx: Array | None = None,  # (T, H)
    W_mh: Array | None = None,
    px: Array | None = None,  # (T, 4H)
    mask: Array | None = None,  # (H)
    b_h: Array | None = None,
    unit: str = "standard",
) -> tuple[Array, Array, Array]:
    """h of every step, and the last h and c, of one lane."""
    hs = []
    for t in range(len(zx)):
        m = h if W_mh is None else mx[t] * (W_mh @ h)
        product = W_zm @ m
        z = zx[t] + (product if px is None else px[t] * product)
        h, c = cell(z, c, b_h, unit)
        if mask is not None:
            h = h * mask
        hs.append(h)
    return np.array(hs), h, c


def cell(z: Array, c: Array, b_h: Array | None, unit: str) -> tuple[Array, Array]:
    """z holds, in this order: the candidate, the input gate, the output gate, the forget gate."""
    if unit == "tanh":
        return np.tanh(z), c
    H = len(z) // 4
    candidate, i, o, f = z[:H], sigmoid(z[H : 2 * H]), sigmoid(z[2 * H : 3 * H]), sigmoid(z[3 * H :])
    if unit == "standard":
        c = f * c + i * np.tanh(candidate)
        return o * np.tanh(c), c
    if unit == "initial":
        c = f * c + i * candidate
        return np.tanh(o * c + (0 if b_h is None else b_h)), c
    c = f * c + i * np.tanh(candidate)
    return np.tanh(o * c), c


def recurrence(
    mx: Array | None,
    zx: Array,  # (T, B, .)
    W_mh: Array | None,
    W_zm: Array,
    h_0: Array,
    c_0: Array,
    mask: Array | None,
    px: Array | None,
    b_h: Array | None,
    unit: str,
) -> tuple[Array, Array, Array]:
    """As `lane`, for all lanes: h (T, B, H), last h, last c."""
    lanes = [
        lane(
            zx[:, b],
            W_zm,
            h_0[b],
            c_0[b],
            mx=None if mx is None else mx[:, b],
            W_mh=W_mh,
            px=None if px is None else px[:, b],
            mask=None if mask is None else mask[b],
            b_h=b_h,
            unit=unit,
        )
        for b in range(zx.shape[1])
    ]
    h, h_T, c_T = zip(*lanes, strict=True)
    return np.stack(h, axis=1), np.stack(h_T), np.stack(c_T)


def effective(weights: dict[str, Array], layer: str, name: str) -> Array | None:
    """A matrix with its rows brought to their gains, row by row."""
    W, g = weights.get(f"{layer}.W_{name}"), weights.get(f"{layer}.g_{name}")
    if W is None or g is None:
        return W
    rows = [
        gain * row / np.sqrt(np.sum(row**2))
        for row, gain in zip(W.reshape(-1, W.shape[-1]), g.ravel(), strict=True)
    ]
    return np.array(rows).reshape(W.shape)


def language_model(
    weights: dict[str, Array],
    x: Array,  # (B, T) symbols
    *,
    cell_name: str,
    unit: str,
    layers: int,
    skip: bool,
    embedding_mask: Array | None = None,  # (B, E)
    hidden_masks: list[Array] | None = None,  # (B, H) each
    output_mask: Array | None = None,
) -> Array:
    """Logits (B, T, N) from zero states."""
    N = weights["W_out"].shape[0]
    H = weights["layers.0.b_z"].shape[0] // (1 if cell_name in ("rnn", "mrnn", "tensor-rnn") else 4)
    logits = []
    for b, symbols in enumerate(x):
        text = np.eye(N)[symbols]
        if "embedding" in weights:
            text = text @ weights["embedding"]
            text = text if embedding_mask is None else text * embedding_mask[b]
        below: Array | None = None
        outputs = []
        for k in range(layers):
            mask = None if hidden_masks is None else hidden_masks[k][b]
            below = _layer(weights, k, text, below, symbols, cell_name, unit, skip, H, mask)
            outputs.append(below)
        top = np.concatenate(outputs, axis=1) if skip else outputs[-1]
        top = top if output_mask is None else top * output_mask[b]
        logits.append(top @ weights["W_out"].T + weights.get("b_out", 0))
    return np.array(logits)


def _layer(
    weights: dict[str, Array],
    k: int,
    text: Array,  # (T, E)
    below: Array | None,  # (T, H)
    symbols: Array,
    cell_name: str,
    unit: str,
    skip: bool,
    H: int,
    mask: Array | None,
) -> Array:
    name = f"layers.{k}"
    source = text if k == 0 or skip else below
    b_z, b_h = weights[f"{name}.b_z"], None
    zx = source @ effective(weights, name, "zx").T
    mx = None
    if cell_name in ("mlstm", "mrnn"):
        mx = source @ effective(weights, name, "mx").T
    if k > 0 and skip:
        zx = zx + below @ effective(weights, name, "zl").T
        if mx is not None:
            mx = mx + below @ effective(weights, name, "ml").T
    unit = "tanh" if cell_name in ("rnn", "mrnn", "tensor-rnn") else unit
    if unit == "initial":
        b_z = b_z.copy()
        b_h = b_z[:H].copy()
        b_z[:H] = 0
    px = None
    if cell_name == "milstm":
        wx = zx
        px = weights[f"{name}.alpha"] * wx + weights[f"{name}.beta_1"]
        zx = weights[f"{name}.beta_2"] * wx
    zx = zx + b_z
    if cell_name == "tensor-rnn":
        W_hh = effective(weights, name, "hh")
        h, hs = np.zeros(H), []
        for t, symbol in enumerate(symbols):
            h = np.tanh(zx[t] + W_hh[symbol] @ h)
            h = h if mask is None else h * mask
            hs.append(h)
        return np.array(hs)
    c = np.zeros(0 if unit == "tanh" else H)
    W_mh = effective(weights, name, "mh")
    return lane(
        zx,
        effective(weights, name, "zm"),
        np.zeros(H),
        c,
        mx=mx,
        W_mh=W_mh,
        px=px,
        mask=mask,
        b_h=b_h,
        unit=unit,
    )[0]

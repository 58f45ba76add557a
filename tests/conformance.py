"""Makes docs/conformance.json: small cases of every cell but the tensor RNN, from the oracle alone.

`python tests/conformance.py` writes the file anew. Gradients are complex steps: the oracle at v + 1e-30 i has
dL/dv as its imaginary part over 1e-30, without a difference that could round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import oracle

FILE = Path(__file__).parents[1] / "docs" / "conformance.json"
T, B, E, H = 5, 2, 3, 4
STEP = 1e-30
MULTIPLICATIVE = ("mlstm", "mrnn")
# name, cell, unit, weight norm, dropout
CASES = [
    ("multiplicative LSTM", "mlstm", "standard", False, False),
    ("multiplicative LSTM, weight normalisation", "mlstm", "standard", True, False),
    ("multiplicative LSTM, variational dropout", "mlstm", "standard", False, True),
    ("multiplicative LSTM, unit of the RMSprop rows (code)", "mlstm", "initial", False, False),
    ("multiplicative LSTM, unit of the RMSprop rows (text)", "mlstm", "initial-text", False, False),
    ("multiplicative RNN", "mrnn", "tanh", False, False),
    ("LSTM", "lstm", "standard", False, False),
    ("MI-LSTM", "milstm", "standard", False, False),
    ("RNN", "rnn", "tanh", False, False),
]


def made(seed: int, name: str, cell: str, unit: str, weight_norm: bool, dropout: bool) -> dict[str, Any]:
    """One case: what is given, and what a right cell makes of it."""
    dice = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        """Two decimals, which every reader of JSON takes for the same number."""
        return dice.integers(-150, 151, shape) / 100

    Z = H if unit == "tanh" else 4 * H
    weights = {"W_zx": draw(Z, E), "W_zm": draw(Z, H), "b_z": draw(Z)}
    if cell in MULTIPLICATIVE:
        weights |= {"W_mx": draw(H, E), "W_mh": draw(H, H)}
    if cell == "milstm":
        weights |= {key: draw(Z) for key in ("alpha", "beta_1", "beta_2")}
    if weight_norm:
        weights |= {f"g{key[1:]}": draw(len(W)) for key, W in weights.items() if key.startswith("W_")}
    given = {**weights, "x": draw(T, B, E), "h_0": draw(B, H)}
    if unit != "tanh":
        given["c_0"] = draw(B, H)
    mask = np.where(dice.random((B, H)) < 0.5, 0.0, 2.0) if dropout else None
    dh, dc_T = draw(T, B, H), draw(B, H) if unit != "tanh" else None
    h, c = run(given, cell, unit, mask)

    def loss(**changed: Any) -> Any:
        h, c = run(given | changed, cell, unit, mask)
        return np.sum(h * dh) + (0 if dc_T is None else np.sum(c[-1] * dc_T))

    gradients = {}
    for key, v in given.items():
        slope = np.empty(v.shape)
        for place in np.ndindex(v.shape):
            moved = v.astype(complex)
            moved[place] += STEP * 1j
            slope[place] = loss(**{key: moved}).imag / STEP
        gradients[key] = slope
    return {
        "name": name,
        "cell": cell,
        "unit": unit,
        "weights": weights,
        "x": given["x"],
        "h_0": given["h_0"],
        "c_0": given.get("c_0"),
        "mask": mask,
        "h": h,
        "c": None if unit == "tanh" else c,
        "dh": dh,
        "dc_T": dc_T,
        "gradients": gradients,
    }


def run(given: dict[str, Any], cell: str, unit: str, mask: Any) -> tuple[Any, Any]:
    """h and c of every step, (T, B, H)."""
    named = {f"layer.{key}": v for key, v in given.items()}
    W = {key[2:]: oracle.effective(named, "layer", key[2:]) for key in given if key.startswith("W_")}
    x, b_z, b_h = given["x"], given["b_z"], None
    zx, px, mx = x @ W["zx"].T, None, x @ W["mx"].T if "mx" in W else None
    if cell == "milstm":
        zx, px = given["beta_2"] * zx, given["alpha"] * zx + given["beta_1"]
    if unit == "initial":  # whose candidate has no bias, and whose last tanh has one
        b_h, b_z = b_z[:H], np.concatenate([np.zeros(H), b_z[H:]])
    zx = zx + b_z
    h, c = given["h_0"], given.get("c_0", np.zeros((B, 0)))
    hs, cs = [], []
    for t in range(T):
        one = slice(t, t + 1)
        _, h, c = oracle.recurrence(
            None if mx is None else mx[one],
            zx[one],
            W.get("mh"),
            W["zm"],
            h,
            c,
            mask,
            None if px is None else px[one],
            b_h,
            unit,
        )
        hs.append(h)
        cs.append(c)
    return np.stack(hs), np.stack(cs)


def text() -> str:
    """The file: a line for each array of a case."""
    cases = []
    for seed, case in enumerate(CASES, 1):
        lines = []
        for key, value in made(seed, *case).items():
            if isinstance(value, dict):
                inner = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v.tolist())}" for k, v in value.items())
                lines.append(f'  "{key}": {{\n{inner}\n  }}')
            else:
                plain = value.tolist() if isinstance(value, np.ndarray) else value
                lines.append(f'  "{key}": {json.dumps(plain)}')
        cases.append(" {\n" + ",\n".join(lines) + "\n }")
    return "[\n" + ",\n".join(cases) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())

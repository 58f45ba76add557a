"""Made-up models in every foreign format, with what they must compute, from the formats' own formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


@dataclass
class Cell:
    """Matrices that act on row vectors, gate blocks i, f, o, u."""

    A: Array  # (d, H)
    B: Array  # (H, H)
    P: Array  # (d, 4H)
    Q: Array  # (H, 4H)
    b: Array  # (4H,)


@dataclass
class Foreign:
    """The arrays of a file, and the same model as plain matrices."""

    arrays: dict[str, Array]
    embedding: Array
    cells: list[Cell]
    head: Array  # (H, classes)
    bias: Array
    extra: dict[str, Any] = field(default_factory=dict)

    def logits(self, tokens: Array) -> Array:
        """(T, classes), in float64, one sequence."""
        x = self.embedding.astype(np.float64)[tokens]
        for cell in self.cells:
            x = run(cell, x)
        return x @ self.head.astype(np.float64) + self.bias


def run(cell: Cell, x: Array) -> Array:
    H = cell.B.shape[0]
    h, c, out = np.zeros(H), np.zeros(H), []
    for x_t in x:
        m = (x_t @ cell.A) * (h @ cell.B)
        i, f, o, u = np.split(x_t @ cell.P + m @ cell.Q + cell.b, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(u)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.array(out)


def draw(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(0, 0.5, shape).astype(np.float32)


def normed(V: Array, g: Array) -> Array:
    """Columns of V with the lengths g."""
    V64 = V.astype(np.float64)
    return V64 / np.sqrt(np.maximum((V64**2).sum(axis=0), 1e-12)) * g.astype(np.float64)


def unirep(H: int = 6, layers: int = 1, E: int = 4, seed: int = 0) -> Foreign:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {"embedding": draw(rng, 26, E)}
    cells = []
    for l in range(layers):
        d = E if l == 0 else H
        a = {
            "wmx": draw(rng, d, H),
            "wmh": draw(rng, H, H),
            "wx": draw(rng, d, 4 * H),
            "wh": draw(rng, H, 4 * H),
        }
        # Normal gains: about half of them are negative.
        a |= {"gmx": draw(rng, H), "gmh": draw(rng, H), "gx": draw(rng, 4 * H), "gh": draw(rng, 4 * H)}
        a["b"] = draw(rng, 4 * H)
        arrays |= {f"mlstm.{l}.{k}": v for k, v in a.items()}
        cells.append(
            Cell(
                normed(a["wmx"], a["gmx"]),
                normed(a["wmh"], a["gmh"]),
                normed(a["wx"], a["gx"]),
                normed(a["wh"], a["gh"]),
                a["b"],
            )
        )
    arrays |= {"dense.w": draw(rng, H, 25), "dense.b": draw(rng, 25)}
    return Foreign(arrays, arrays["embedding"], cells, arrays["dense.w"], arrays["dense.b"])


def tape(H: int = 6, seed: int = 0, *, head: bool = True) -> Foreign:
    same = unirep(H, 1, 10, seed)
    body = {"embed_matrix.weight": same.arrays["embedding"]}
    for name in ("mx", "mh", "x", "h"):
        body[f"encoder.mlstm_cell.w{name}.weight_v"] = same.arrays[f"mlstm.0.w{name}"].T
        body[f"encoder.mlstm_cell.w{name}.weight_g"] = same.arrays[f"mlstm.0.g{name}"][:, None]
    body["encoder.mlstm_cell.wh.bias"] = same.arrays["mlstm.0.b"]
    if head:
        body = {f"unirep.{k}": v for k, v in body.items()}
        body |= {"feedforward.weight": same.arrays["dense.w"].T, "feedforward.bias": same.arrays["dense.b"]}
    same.arrays = body
    return same


def openai(H: int = 6, E: int = 4, seed: int = 0) -> Foreign:
    rng = np.random.default_rng(seed)
    P, A, B = draw(rng, E, 4 * H), draw(rng, E, H), draw(rng, H, H)
    parts = [draw(rng, H, H) for _ in range(4)]
    gP, gQ, gA, gB, b = (draw(rng, n) for n in (4 * H, 4 * H, H, H, 4 * H))
    files = [draw(rng, 256, E), P, *parts, A, B, b, gP, gQ, gA, gB, draw(rng, H, 256), draw(rng, 256)]
    Q = np.concatenate(parts, axis=1)
    cell = Cell(normed(A, gA), normed(B, gB), normed(P, gP), normed(Q, gQ), b)
    arrays = {str(k): v for k, v in enumerate(files)}
    return Foreign(arrays, files[0], [cell], files[13], files[14])


def nvidia(
    H: int = 6, E: int = 4, N: int = 257, layers: int = 2, norm: str = "all", seed: int = 0
) -> Foreign:
    """norm: "all", "none", or "some" (both spellings in one file)."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {"encoder.weight": draw(rng, N, E)}
    cells = []
    for l in range(layers):
        d = E if l == 0 else H
        plain = {}
        shapes = {"w_ih": (4 * H, d), "w_hh": (4 * H, H), "w_mih": (H, d), "w_mhh": (H, H)}
        for k, (name, shape) in enumerate(shapes.items()):
            V, g = draw(rng, *shape), draw(rng, shape[0], 1)
            if norm == "all" or (norm == "some" and k % 2):
                arrays[f"rnns.{l}.{name}_v"], arrays[f"rnns.{l}.{name}_g"] = V, g
                plain[name] = normed(V.T, g[:, 0])
            else:
                arrays[f"rnns.{l}.{name}"] = V
                plain[name] = V.T
        b_ih, b_hh = draw(rng, 4 * H), draw(rng, 4 * H)
        arrays |= {f"rnns.{l}.b_ih": b_ih, f"rnns.{l}.b_hh": b_hh}

        def blocks(z: Array) -> Array:  # i f u o -> i f o u
            i, f, u, o = np.split(z, 4, axis=-1)
            return np.concatenate([i, f, o, u], axis=-1)

        cells.append(
            Cell(
                plain["w_mih"],
                plain["w_mhh"],
                blocks(plain["w_ih"]),
                blocks(plain["w_hh"]),
                blocks(b_ih + b_hh),
            )
        )
    arrays |= {"decoder.weight": draw(rng, N, H), "decoder.bias": draw(rng, N)}
    return Foreign(
        arrays, arrays["encoder.weight"], cells, arrays["decoder.weight"].T, arrays["decoder.bias"]
    )


def chainer(H: int = 6, E: int = 4, N: int = 27, seed: int = 0) -> Foreign:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {"embed/W": draw(rng, N, E)}
    plain = {}
    for name, shape in {"WhxWN": (4 * H, E), "WmxWN": (H, E), "WmhWN": (H, H), "WhmWN": (4 * H, H)}.items():
        V, g = draw(rng, *shape), draw(rng, shape[0])
        arrays |= {f"{name}/W": V, f"{name}/g": g, f"{name}/b": np.zeros(shape[0], np.float32)}
        plain[name] = normed(V.T, g)
    arrays |= {"l1/b": draw(rng, 4 * H), "l2/W": draw(rng, N, H), "l2/b": draw(rng, N)}

    def blocks(z: Array) -> Array:  # index 4n + r: r = 0 u, 1 i, 2 f, 3 o
        u, i, f, o = (z[..., r::4] for r in range(4))
        return np.concatenate([i, f, o, u], axis=-1)

    cell = Cell(
        plain["WmxWN"], plain["WmhWN"], blocks(plain["WhxWN"]), blocks(plain["WhmWN"]), blocks(arrays["l1/b"])
    )
    return Foreign(arrays, arrays["embed/W"], [cell], arrays["l2/W"].T, arrays["l2/b"])


def torchrecurrent(H: int = 6, E: int = 4, N: int = 256, layers: int = 2, seed: int = 0) -> Foreign:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {"emb.weight": draw(rng, N, E)}
    cells = []

    def blocks(z: Array) -> Array:  # i f u o -> i f o u
        i, f, u, o = np.split(z, 4, axis=-1)
        return np.concatenate([i, f, o, u], axis=-1)

    for l in range(layers):
        d = E if l == 0 else H
        W_ih, W_hh, W_mh = draw(rng, 5 * H, d), draw(rng, H, H), draw(rng, 4 * H, H)
        b_ih, b_mh = draw(rng, 5 * H), draw(rng, 4 * H)
        b_ih[:H] = 0
        stem = f"layer.cells.{l}."
        arrays |= {f"{stem}weight_ih": W_ih, f"{stem}weight_hh": W_hh, f"{stem}weight_mh": W_mh}
        arrays |= {f"{stem}bias_ih": b_ih, f"{stem}bias_hh": np.zeros(H, np.float32), f"{stem}bias_mh": b_mh}
        b = blocks(b_ih[H:] + b_mh)
        cells.append(Cell(W_ih[:H].T, W_hh.T, blocks(W_ih[H:].T), blocks(W_mh.T), b))
    arrays |= {"out.weight": draw(rng, N, H), "out.bias": draw(rng, N)}
    return Foreign(arrays, arrays["emb.weight"], cells, arrays["out.weight"].T, arrays["out.bias"])

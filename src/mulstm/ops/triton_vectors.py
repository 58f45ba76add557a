"""MI-LSTM's vectors alpha, beta_1, beta_2 and b in packed order, and their gradients over a whole chunk."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mulstm.ops.triton_cell import from_packed, to_packed

NAMES = ("alpha", "beta_1", "beta_2", "b_z")
ROWS, COLUMNS = 8, 256  # a tile
PARTS = 64  # of all rows: each is summed by itself


def pack_vectors(p: dict[str, Tensor], b: Tensor, blocks: int, HP: int) -> Tensor:
    """(4, 4 HP) fp32: alpha, beta_1, beta_2 and what of b_z is added to z."""
    return to_packed(torch.stack([p["alpha"], p["beta_1"], p["beta_2"], b]).float(), blocks, HP)


def unpack_vectors(d: Tensor, blocks: int, H: int) -> dict[str, Tensor]:
    """The gradients by their names."""
    return dict(zip(NAMES, from_packed(d, blocks, H), strict=True))


@triton.jit
def _through_vectors(
    dz, r, u, vectors, sums, rows, width, each, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """du in dz's place for `each` rows, and their sums for the vectors."""
    part = tl.program_id(0)
    n = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = n < width
    alpha = tl.load(vectors + n, mask=inside, other=0.0)
    beta_2 = tl.load(vectors + 2 * width + n, mask=inside, other=0.0)
    d_alpha = tl.zeros([BR, BC], tl.float32)
    d_beta_1 = tl.zeros([BR, BC], tl.float32)
    d_beta_2 = tl.zeros([BR, BC], tl.float32)
    d_b = tl.zeros([BR, BC], tl.float32)
    last = min((part + 1) * each, rows)
    for first in range(part * each, last, BR):
        row = first + tl.arange(0, BR)[:, None]
        at = row.to(tl.int64) * width + n  # a chunk may hold more than 2^31 numbers
        wide = (row < last) & inside
        d = tl.load(dz + at, mask=wide, other=0.0).to(tl.float32)
        q = tl.load(r + at, mask=wide, other=0.0).to(tl.float32)
        x = tl.load(u + at, mask=wide, other=0.0).to(tl.float32)
        tl.store(dz + at, (d * (alpha * q + beta_2)).to(dz.dtype.element_ty), mask=wide)
        d_alpha += d * q * x
        d_beta_1 += d * q
        d_beta_2 += d * x
        d_b += d
    to = sums + part * 4 * width + n
    tl.store(to, tl.sum(d_alpha, axis=0, keep_dims=True), mask=inside)
    tl.store(to + width, tl.sum(d_beta_1, axis=0, keep_dims=True), mask=inside)
    tl.store(to + 2 * width, tl.sum(d_beta_2, axis=0, keep_dims=True), mask=inside)
    tl.store(to + 3 * width, tl.sum(d_b, axis=0, keep_dims=True), mask=inside)


def through_vectors(dz: Tensor, r: Tensor, u: Tensor, vectors: Tensor) -> Tensor:
    """The vectors' gradient, (4, 4H) fp32, added up in a fixed order; dz, (T, B, 4H), becomes du.

    z = (alpha u + beta_1) r + beta_2 u + b, so that du = dz (alpha r + beta_2).
    """
    width = vectors.shape[1]
    rows = dz.numel() // width
    each = triton.cdiv(triton.cdiv(rows, PARTS), ROWS) * ROWS
    parts = triton.cdiv(rows, each)
    sums = vectors.new_empty(parts, 4, width)
    _through_vectors[(parts, triton.cdiv(width, COLUMNS))](
        dz, r, u, vectors, sums, rows, width, each, BR=ROWS, BC=COLUMNS
    )
    return sums.sum(0)

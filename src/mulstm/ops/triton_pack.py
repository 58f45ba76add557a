"""Weights as the kernels want them: normalised, cast to bf16, padded and in packed order, once an update."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mulstm.ops import eight
from mulstm.ops.triton_cell import GROUP


@triton.jit
def place(row, H, BLOCKS: tl.constexpr):
    """The packed row of a parameter's row: gate blocks of H become interleaved ones."""
    if BLOCKS == 1:
        return row
    gate, u = row // H, row % H
    return (u // GROUP) * (4 * GROUP) + gate * GROUP + u % GROUP


@triton.jit
def _rows_in(
    v, gain, drop, bias, out, scale, K, KP, H, ROWS,
    BLOCKS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_DROP: tl.constexpr, HAS_BIAS: tl.constexpr,
    EIGHT: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """R packed rows from a parameter's, zeros where there is none; scale keeps g / |v|.

    EIGHT: 0, or the scale of numbers of 8 bits.
    """
    target = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BK)
    if BLOCKS == 1:
        u, row = target, target
    else:
        u = target // (4 * GROUP) * GROUP + target % GROUP
        row = target // GROUP % 4 * H + u
    real = u < H
    inside = real[:, None] & (k < K)[None, :]
    w = tl.load(v + row[:, None] * K + k[None, :], mask=inside, other=0.0)
    if HAS_GAIN:
        length = tl.sqrt(tl.sum(w * w, axis=1))
        # A row of zeros stays one instead of becoming NaN.
        s = tl.load(gain + row, mask=real, other=0.0) / tl.where(length == 0.0, 1.0, length)
        tl.store(scale + row, s, mask=real)
        w *= s[:, None]
    if HAS_DROP:
        w *= tl.load(drop + row[:, None] * K + k[None, :], mask=inside, other=0.0)
    if HAS_BIAS:
        # In two parts, so that a bias loses nothing to the cast; the input has two columns of ones for it.
        b = tl.load(bias + row, mask=real, other=0.0)[:, None]
        high = b.to(out.dtype.element_ty).to(tl.float32)
        w = tl.where((k == K)[None, :], high, tl.where((k == K + 1)[None, :], b - high, w))
    if EIGHT != 0:
        w = tl.clamp(w * EIGHT, -448.0, 448.0, tl.PropagateNan.ALL)
    within = (target < ROWS)[:, None] & (k < KP)[None, :]
    tl.store(out + target[:, None] * KP + k[None, :], w.to(out.dtype.element_ty), mask=within)


@triton.jit
def _rows_out(
    dw, v, scale, drop, dv, dgain, dbias, at, K, KP, H, ROWS,
    BLOCKS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_DROP: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of R rows of a parameter from that of their packed places."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BK)
    real = row < ROWS
    inside = real[:, None] & (k < K)[None, :]
    source = at + place(row, H, BLOCKS)
    d = tl.load(dw + source[:, None] * KP + k[None, :], mask=inside, other=0.0)
    if HAS_BIAS:
        tl.store(dbias + row, tl.load(dw + source * KP + K, mask=real, other=0.0), mask=real)
    if HAS_DROP:
        d *= tl.load(drop + row[:, None] * K + k[None, :], mask=inside, other=0.0)
    if HAS_GAIN:
        # W = s v with s = g / |v|:  dg = d.v / |v|,  dv = s (d - (d.v) v / |v|^2)
        w = tl.load(v + row[:, None] * K + k[None, :], mask=inside, other=0.0)
        square = tl.sum(w * w, axis=1)
        square = tl.where(square == 0.0, 1.0, square)
        along = tl.sum(d * w, axis=1)
        tl.store(dgain + row, along / tl.sqrt(square), mask=real)
        s = tl.load(scale + row, mask=real, other=0.0)
        d = s[:, None] * (d - (along / square)[:, None] * w)
    tl.store(dv + row[:, None] * K + k[None, :], d, mask=inside)


def _tile(K: int, KP: int) -> tuple[int, int, int]:
    """Rows of a program, its width, its warps."""
    BK = triton.next_power_of_2(max(K, KP))
    R = max(1, 4096 // BK)
    return R, BK, 8 if R * BK >= 4096 else 4


def _by_rows(*parts: Any) -> Any:
    """As the kernels read them: a parameter may be the transpose of another tensor."""
    return (None if part is None else part.contiguous() for part in parts)


def pack_rows(
    v: Tensor,  # (rows, K)  rows = blocks * H
    gain: Tensor | None,
    drop: Tensor | None,
    bias: Tensor | None,
    out: Tensor,  # (blocks * HP, KP) bf16, or e4m3 with its scale; every element is written
    blocks: int,
) -> Tensor:
    """Writes one parameter's rows into `out`; returns g / |v|, (rows)."""
    v, gain, drop, bias = _by_rows(v, gain, drop, bias)
    rows, K = v.shape
    KP = out.shape[1]
    scale = torch.empty(rows if gain is not None else 0, device=v.device)
    R, BK, warps = _tile(K, KP)
    _rows_in[(triton.cdiv(out.shape[0], R),)](
        v, gain, drop, bias, out, scale, K, KP, rows // blocks, out.shape[0],
        BLOCKS=blocks, HAS_GAIN=gain is not None, HAS_DROP=drop is not None, HAS_BIAS=bias is not None,
        EIGHT=eight.WEIGHT if out.dtype == eight.E4M3 else 0.0, R=R, BK=BK, num_warps=warps,
    )  # fmt: skip
    return scale


def unpack_rows(
    dw: Tensor,  # (.., KP)  fp32
    v: Tensor,
    gain: Tensor | None,
    scale: Tensor,
    drop: Tensor | None,
    bias: Tensor | None,
    at: int,
    blocks: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dv, dgain, dbias from the gradient of the packed matrix."""
    v, gain, drop, bias = _by_rows(v, gain, drop, bias)
    rows, K = v.shape
    H, KP = rows // blocks, dw.shape[1]
    dv = torch.empty_like(v)
    dgain = None if gain is None else torch.empty_like(gain)
    dbias = None if bias is None else torch.empty_like(bias)
    R, BK, warps = _tile(K, K)
    _rows_out[(triton.cdiv(rows, R),)](
        dw, v, scale, drop, dv, dgain, dbias, at, K, KP, H, rows,
        BLOCKS=blocks, HAS_GAIN=gain is not None, HAS_DROP=drop is not None, HAS_BIAS=bias is not None,
        R=R, BK=BK, num_warps=warps,
    )  # fmt: skip
    return dv, dgain, dbias


@triton.jit
def _transpose(x, out, ROWS, COLUMNS, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tile = tl.load(x + row[:, None] * COLUMNS + column[None, :], mask=inside)
    inside = (column < COLUMNS)[:, None] & (row < ROWS)[None, :]
    tl.store(out + column[:, None] * ROWS + row[None, :], tl.trans(tile), mask=inside)


def transposed(x: Tensor) -> Tensor:
    """A contiguous copy of x's transpose, tile by tile: torch's own takes five times as long."""
    rows, columns = x.shape
    out = x.new_empty(columns, rows)
    # Numbers of 8 bits go as they are, in tiles of as many bytes a row.
    kind, tile = (torch.uint8, 128) if x.element_size() == 1 else (x.dtype, 64)
    grid = triton.cdiv(rows, tile), triton.cdiv(columns, tile)
    _transpose[grid](x.view(kind), out.view(kind), rows, columns, TILE=tile, num_warps=4)
    return out


@triton.jit
def _pad(x, out, ROWS, K, KP, R: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    k = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]
    y = tl.load(x + row * K + k, mask=(row < ROWS) & (k < K), other=0.0)
    tl.store(out + row * KP + k, y, mask=(row < ROWS) & (k < KP))


def pad_columns(x: Tensor, KP: int) -> Tensor:
    """x with zeros up to KP columns, in one launch."""
    rows, K = x.shape
    out = x.new_empty(rows, KP)
    _pad[(triton.cdiv(rows, 4), triton.cdiv(KP, 512))](
        x.contiguous(), out, rows, K, KP, R=4, BK=512, num_warps=4
    )
    return out

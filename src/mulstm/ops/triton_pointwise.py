"""The pointwise halves of a step, for products that cuBLAS makes: m, gates, and both backwards."""

from __future__ import annotations

import triton
import triton.language as tl

from mulstm.ops.triton_cell import TANH, cell_backward, cell_forward, column


@triton.jit
def wait(PDL: tl.constexpr):
    """Holds until the kernel before has written everything; then lets the one after start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def m_forward(
    a, mx, m, stride_a, stride_mx, B, H, BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr
):
    """m = mx * a."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    u = tl.program_id(1) * BU + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    x = tl.load(mx + b * stride_mx + u, mask=inside).to(tl.float32)
    wait(PDL)
    y = tl.load(a + b * stride_a + u, mask=inside).to(tl.float32)
    tl.store(m + b * H + u, (x * y).to(m.dtype.element_ty), mask=inside)


@triton.jit
def gates_forward(
    r,  # (B, 4H)  W_zm m
    zx, px, c_prev, mask, b_h,
    z, r_kept, c, h,
    stride_zx, stride_px, B, H,
    UNIT: tl.constexpr, HAS_PX: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, SAVE: tl.constexpr,
    BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From the recurrent product to c and h; keeps z (and MI-LSTM's r) for the backward."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    u = tl.program_id(1) * BU + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    blocks: tl.constexpr = 1 if UNIT == TANH else 4
    width = blocks * H
    at = b * H + u
    wait(PDL)
    z_0, z_1, z_2, z_3 = _z(r, zx, px, z, r_kept, b, u, inside, stride_zx, stride_px, width, UNIT, HAS_PX, SAVE)
    old = tl.load(c_prev + at, mask=inside, other=0.0) if UNIT != TANH else z_0
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    new, y = cell_forward(z_0, z_1, z_2, z_3, old, bias, UNIT)
    if HAS_MASK:
        y *= tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
    if UNIT != TANH:
        tl.store(c + at, new, mask=inside)
    tl.store(h + at, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _z(
    r, zx, px, z, r_kept, b, u, inside, stride_zx, stride_px, width,
    UNIT: tl.constexpr, HAS_PX: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """The four blocks of z_t (one for TANH, repeated), stored for the backward."""
    z_0 = _z_block(r, zx, px, z, r_kept, b, column(u, 0, UNIT), inside, stride_zx, stride_px, width, HAS_PX, SAVE)
    if UNIT == TANH:
        return z_0, z_0, z_0, z_0
    z_1 = _z_block(r, zx, px, z, r_kept, b, column(u, 1, UNIT), inside, stride_zx, stride_px, width, HAS_PX, SAVE)
    z_2 = _z_block(r, zx, px, z, r_kept, b, column(u, 2, UNIT), inside, stride_zx, stride_px, width, HAS_PX, SAVE)
    z_3 = _z_block(r, zx, px, z, r_kept, b, column(u, 3, UNIT), inside, stride_zx, stride_px, width, HAS_PX, SAVE)
    return z_0, z_1, z_2, z_3


@triton.jit
def _z_block(
    r, zx, px, z, r_kept, b, at, inside, stride_zx, stride_px, width, HAS_PX: tl.constexpr, SAVE: tl.constexpr
):
    r_t = tl.load(r + b * width + at, mask=inside, other=0.0).to(tl.float32)
    z_t = tl.load(zx + b * stride_zx + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_PX:
        z_t += r_t * tl.load(px + b * stride_px + at, mask=inside, other=0.0).to(tl.float32)
        if SAVE:
            tl.store(r_kept + b * width + at, r_t.to(r_kept.dtype.element_ty), mask=inside)
    else:
        z_t += r_t
    if SAVE:
        tl.store(z + b * width + at, z_t.to(z.dtype.element_ty), mask=inside)
    return z_t


@triton.jit
def gates_backward(
    dh_rec,  # (SPLIT, B, H) partial sums, from the step after
    dh, z, c_prev, c, mask, b_h, px, r,
    dc,  # (B, H) fp32, replaced
    dz, dr, dpx, db_h,  # db_h: (B, H) fp32, added to
    stride_dz, stride_px, B, H,
    UNIT: tl.constexpr, HAS_PX: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, SPLIT: tl.constexpr,
    BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dz of a step from the gradient of its h and c."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    u = tl.program_id(1) * BU + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    blocks: tl.constexpr = 1 if UNIT == TANH else 4
    at = b * H + u
    zs = z + b * (blocks * H)
    d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
    z_0 = tl.load(zs + column(u, 0, UNIT), mask=inside, other=0.0).to(tl.float32)
    z_1, z_2, z_3, old, new, d_c = z_0, z_0, z_0, z_0, z_0, z_0
    if UNIT != TANH:
        z_1 = tl.load(zs + column(u, 1, UNIT), mask=inside, other=0.0).to(tl.float32)
        z_2 = tl.load(zs + column(u, 2, UNIT), mask=inside, other=0.0).to(tl.float32)
        z_3 = tl.load(zs + column(u, 3, UNIT), mask=inside, other=0.0).to(tl.float32)
        old = tl.load(c_prev + at, mask=inside, other=0.0)
        new = tl.load(c + at, mask=inside, other=0.0)
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    keep = tl.load(mask + at, mask=inside, other=0.0).to(tl.float32) if HAS_MASK else 1.0
    wait(PDL)
    for s in tl.static_range(SPLIT):
        d += tl.load(dh_rec + s * B * H + at, mask=inside, other=0.0).to(tl.float32)
    d *= keep
    if UNIT != TANH:
        d_c = tl.load(dc + at, mask=inside, other=0.0)
    d_0, d_1, d_2, d_3, d_c, d_b = cell_backward(z_0, z_1, z_2, z_3, old, new, d, d_c, bias, UNIT)
    if HAS_B:
        tl.store(db_h + at, tl.load(db_h + at, mask=inside, other=0.0) + d_b, mask=inside)
    width = blocks * H
    _put(d_0, column(u, 0, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
    if UNIT != TANH:
        tl.store(dc + at, d_c, mask=inside)
        _put(d_1, column(u, 1, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
        _put(d_2, column(u, 2, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
        _put(d_3, column(u, 3, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)


@triton.jit
def _put(d, at, dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX: tl.constexpr):
    """Stores a block of dz, and for MI-LSTM what it means for the product and its factor."""
    tl.store(dz + b * stride_dz + at, d.to(dz.dtype.element_ty), mask=inside)
    if HAS_PX:
        p = tl.load(px + b * stride_px + at, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(r + b * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dr + b * width + at, (d * p).to(dr.dtype.element_ty), mask=inside)
        tl.store(dpx + b * width + at, (d * q).to(dpx.dtype.element_ty), mask=inside)


@triton.jit
def m_backward(
    dm,  # (SPLIT, B, H) partial sums
    mx, a, da, dmx,
    stride_mx, stride_dmx, B, H,
    SPLIT: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """da and dmx from dm, whose partial sums are added in order."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    u = tl.program_id(1) * BU + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    at = b * H + u
    x = tl.load(mx + b * stride_mx + u, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    d = tl.zeros([BR, BU], tl.float32)
    for s in tl.static_range(SPLIT):
        d += tl.load(dm + s * B * H + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(da + at, (d * x).to(da.dtype.element_ty), mask=inside)
    tl.store(dmx + b * stride_dmx + u, (d * y).to(dmx.dtype.element_ty), mask=inside)

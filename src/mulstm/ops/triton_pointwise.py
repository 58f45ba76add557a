"""The pointwise halves of a step, for products that cuBLAS makes: m, gates, and both backwards."""

from __future__ import annotations

import triton
import triton.language as tl

from mulstm.ops.triton_cell import TANH, cell_forward, cell_slopes, column


@triton.jit
def wait(PDL: tl.constexpr):
    """Holds until the kernel before has written everything; then lets the one after start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def m_forward(
    a, mx, m, stride_mx, B, H, BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr
):
    """m = mx * a."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    u = tl.program_id(1) * BU + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    x = tl.load(mx + b * stride_mx + u, mask=inside).to(tl.float32)
    wait(PDL)
    y = tl.load(a + b * H + u, mask=inside).to(tl.float32)
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
    n_0, n_1, n_2, n_3 = column(u, 0, UNIT), column(u, 1, UNIT), column(u, 2, UNIT), column(u, 3, UNIT)
    # All loads stand before the first store: the compiler cannot move one across it.
    x_0 = tl.load(zx + b * stride_zx + n_0, mask=inside, other=0.0)
    x_1, x_2, x_3 = x_0, x_0, x_0
    if UNIT != TANH:
        x_1 = tl.load(zx + b * stride_zx + n_1, mask=inside, other=0.0)
        x_2 = tl.load(zx + b * stride_zx + n_2, mask=inside, other=0.0)
        x_3 = tl.load(zx + b * stride_zx + n_3, mask=inside, other=0.0)
    keep = tl.load(mask + at, mask=inside, other=0.0) if HAS_MASK else 1.0
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    wait(PDL)
    r_0 = tl.load(r + b * width + n_0, mask=inside, other=0.0)
    r_1, r_2, r_3 = r_0, r_0, r_0
    if UNIT != TANH:
        r_1 = tl.load(r + b * width + n_1, mask=inside, other=0.0)
        r_2 = tl.load(r + b * width + n_2, mask=inside, other=0.0)
        r_3 = tl.load(r + b * width + n_3, mask=inside, other=0.0)
    old = tl.load(c_prev + at, mask=inside, other=0.0) if UNIT != TANH else bias
    z_0 = _z(r_0, x_0, px, b, n_0, inside, stride_px, HAS_PX)
    z_1, z_2, z_3 = z_0, z_0, z_0
    if UNIT != TANH:
        z_1 = _z(r_1, x_1, px, b, n_1, inside, stride_px, HAS_PX)
        z_2 = _z(r_2, x_2, px, b, n_2, inside, stride_px, HAS_PX)
        z_3 = _z(r_3, x_3, px, b, n_3, inside, stride_px, HAS_PX)
    new, y = cell_forward(z_0, z_1, z_2, z_3, old, bias, UNIT)
    tl.store(h + at, (y * keep).to(h.dtype.element_ty), mask=inside)
    if UNIT != TANH:
        tl.store(c + at, new, mask=inside)
    if SAVE:
        _keep(z_0, r_0, z, r_kept, b * width + n_0, inside, HAS_PX)
        if UNIT != TANH:
            _keep(z_1, r_1, z, r_kept, b * width + n_1, inside, HAS_PX)
            _keep(z_2, r_2, z, r_kept, b * width + n_2, inside, HAS_PX)
            _keep(z_3, r_3, z, r_kept, b * width + n_3, inside, HAS_PX)


@triton.jit
def _z(r, x, px, b, n, inside, stride_px, HAS_PX: tl.constexpr):
    """A block of z_t."""
    if HAS_PX:
        r = r.to(tl.float32) * tl.load(px + b * stride_px + n, mask=inside, other=0.0).to(tl.float32)
    return x.to(tl.float32) + r.to(tl.float32)


@triton.jit
def _keep(z_t, r_t, z, r, at, inside, HAS_PX: tl.constexpr):
    """Stores a block for the backward."""
    tl.store(z + at, z_t.to(z.dtype.element_ty), mask=inside)
    if HAS_PX:
        tl.store(r + at, r_t.to(r.dtype.element_ty), mask=inside)


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
    A, D_hat, D_i, D_o, D_f, f, S = cell_slopes(z_0, z_1, z_2, z_3, old, new, bias, UNIT)
    wait(PDL)
    if UNIT != TANH:
        d_c = tl.load(dc + at, mask=inside, other=0.0)
    for s in tl.static_range(SPLIT):
        d += tl.load(dh_rec + s * B * H + at, mask=inside, other=0.0).to(tl.float32)
    d *= keep
    if HAS_B:
        tl.store(db_h + at, tl.load(db_h + at, mask=inside, other=0.0) + d * S, mask=inside)
    width = blocks * H
    if UNIT == TANH:
        _put(d * S, u, dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
    else:
        d_c += d * A
        _put(d_c * D_hat, column(u, 0, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
        _put(d_c * D_i, column(u, 1, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
        _put(d * D_o, column(u, 2, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
        _put(d_c * D_f, column(u, 3, UNIT), dz, dr, dpx, px, r, b, inside, stride_dz, stride_px, width, HAS_PX)
        tl.store(dc + at, d_c * f, mask=inside)


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

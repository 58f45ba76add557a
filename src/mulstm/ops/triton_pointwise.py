"""The pointwise halves of a step, for products that cuBLAS makes: m, gates, and both backwards."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from mulstm.ops.triton_cell import TANH, cell_forward, cell_slopes, join_gates, split_gates


@triton.jit
def wait(PDL: tl.constexpr):
    """Holds until the kernel before has written everything; then lets the one after start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def m_forward(a, mx, m, stride_mx, B, H, BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr):
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
    """From the recurrent product to c and h; keeps z (and MI-LSTM's r) for the backward.

    z is read and written as a whole tile and split in registers: gate by gate each access would touch four
    times as many lines.
    """
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    first = tl.program_id(1) * BU
    u = first + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    blocks: tl.constexpr = 1 if UNIT == TANH else 4
    width = blocks * H
    n = first * blocks + tl.arange(0, BU * blocks)[None, :]
    wide = (b < B) & (n < width)
    at = b * H + u
    # All loads stand before the first store: the compiler cannot move one across it.
    x = tl.load(zx + b * stride_zx + n, mask=wide, other=0.0).to(tl.float32)
    keep = tl.load(mask + at, mask=inside, other=0.0) if HAS_MASK else 1.0
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    p = tl.load(px + b * stride_px + n, mask=wide, other=0.0).to(tl.float32) if HAS_PX else 1.0
    wait(PDL)
    r_t = tl.load(r + b * width + n, mask=wide, other=0.0)
    old = tl.load(c_prev + at, mask=inside, other=0.0) if UNIT != TANH else x
    z_t = x + p * r_t.to(tl.float32)
    if UNIT == TANH:
        new, y = cell_forward(z_t, z_t, z_t, z_t, old, bias, UNIT)
    else:
        h_hat, i, o, f = split_gates(z_t, BR, 4 * BU)
        new, y = cell_forward(h_hat, i, o, f, old, bias, UNIT)
    tl.store(h + at, (y * keep).to(h.dtype.element_ty), mask=inside)
    if UNIT != TANH:
        tl.store(c + at, new, mask=inside)
    if SAVE:
        tl.store(z + b * width + n, z_t.to(z.dtype.element_ty), mask=wide)
        if HAS_PX:
            tl.store(r_kept + b * width + n, r_t, mask=wide)


@triton.jit
def gates_backward(
    dh_rec,  # (SPLIT, B, H) partial sums, from the step after
    dh, z, c_prev, c, mask, b_h, px, r,
    dc,  # (B, H) fp32, replaced
    dz, dr, dpx, db_h,  # db_h: (B, H) fp32, added to
    stride_dz, stride_px, B, H,
    UNIT: tl.constexpr, HAS_PX: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr,
    SPLIT: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dz of a step from the gradient of its h and c."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    first = tl.program_id(1) * BU
    u = first + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    blocks: tl.constexpr = 1 if UNIT == TANH else 4
    width = blocks * H
    n = first * blocks + tl.arange(0, BU * blocks)[None, :]
    wide = (b < B) & (n < width)
    at = b * H + u
    z_t = tl.load(z + b * width + n, mask=wide, other=0.0).to(tl.float32)
    d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    keep = tl.load(mask + at, mask=inside, other=0.0).to(tl.float32) if HAS_MASK else 1.0
    if UNIT == TANH:
        A, D_hat, D_i, D_o, D_f, f, S = cell_slopes(z_t, z_t, z_t, z_t, z_t, z_t, bias, UNIT)
    else:
        old = tl.load(c_prev + at, mask=inside, other=0.0)
        new = tl.load(c + at, mask=inside, other=0.0)
        h_hat, i, o, f = split_gates(z_t, BR, 4 * BU)
        A, D_hat, D_i, D_o, D_f, f, S = cell_slopes(h_hat, i, o, f, old, new, bias, UNIT)
    wait(PDL)
    d_c = tl.load(dc + at, mask=inside, other=0.0) if UNIT != TANH else d
    for s in tl.static_range(SPLIT):
        d += tl.load(dh_rec + s * B * H + at, mask=inside, other=0.0).to(tl.float32)
    d *= keep
    if HAS_B:
        tl.store(db_h + at, tl.load(db_h + at, mask=inside, other=0.0) + d * S, mask=inside)
    if UNIT == TANH:
        d_z = d * S
    else:
        d_c += d * A
        tl.store(dc + at, d_c * f, mask=inside)
        d_z = join_gates(d_c * D_hat, d_c * D_i, d * D_o, d_c * D_f, BR, 4 * BU)
    tl.store(dz + b * stride_dz + n, d_z.to(dz.dtype.element_ty), mask=wide)
    if HAS_PX:
        p = tl.load(px + b * stride_px + n, mask=wide, other=0.0).to(tl.float32)
        q = tl.load(r + b * width + n, mask=wide, other=0.0).to(tl.float32)
        tl.store(dr + b * width + n, (d_z * p).to(dr.dtype.element_ty), mask=wide)
        tl.store(dpx + b * width + n, (d_z * q).to(dpx.dtype.element_ty), mask=wide)


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

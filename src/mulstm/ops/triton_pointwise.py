"""The pointwise halves of a step, for products that cuBLAS makes: m, gates, and both backwards."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from mulstm.ops.triton_cell import TANH, cell_forward, cell_slopes, join_gates, split_gates

# What multiplies the recurrent product: nothing, or MI-LSTM's px, given as it is or made from its vectors.
NONE: tl.constexpr = tl.constexpr(0)
GIVEN: tl.constexpr = tl.constexpr(1)
VECTORS: tl.constexpr = tl.constexpr(2)


@triton.jit
def wait(PDL: tl.constexpr):
    """Holds until the kernel before has written everything; then lets the one after start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def in_e5m2(x, scale):
    """8-bit numbers of x times a scale; what is too large becomes the largest, and NaN stays NaN."""
    return tl.clamp(x * scale, -57344.0, 57344.0, tl.PropagateNan.ALL).to(tl.float8e5)


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
def input_side(zx, px, b, n, B, width, stride_zx, stride_px, PX: tl.constexpr):
    """What is added to the recurrent product in z, and what multiplies it; with VECTORS zx is u = W_zx x."""
    wide = (b < B) & (n < width)
    x = tl.load(zx + b * stride_zx + n, mask=wide, other=0.0).to(tl.float32)
    p = 1.0
    if PX == GIVEN:
        p = tl.load(px + b * stride_px + n, mask=wide, other=0.0).to(tl.float32)
    if PX == VECTORS:
        inside = n < width
        alpha = tl.load(px + n, mask=inside, other=0.0)
        beta_1 = tl.load(px + width + n, mask=inside, other=0.0)
        beta_2 = tl.load(px + 2 * width + n, mask=inside, other=0.0)
        bias = tl.load(px + 3 * width + n, mask=inside, other=0.0)
        p = alpha * x + beta_1
        x = beta_2 * x + bias
    return x, p


@triton.jit
def gates_forward(
    r,  # (B, 4H)  W_zm m
    zx,
    px,  # GIVEN: (B, 4H); VECTORS: (4, 4H) fp32
    c_prev, mask, b_h,
    z, c, h,
    stride_zx, stride_px, B, H,
    UNIT: tl.constexpr, PX: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, SAVE: tl.constexpr,
    BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From the recurrent product to c and h; keeps z for the backward, but for MI-LSTM's, which has r.

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
    x, p = input_side(zx, px, b, n, B, width, stride_zx, stride_px, PX)
    keep = tl.load(mask + at, mask=inside, other=0.0) if HAS_MASK else 1.0
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    wait(PDL)
    old = tl.load(c_prev + at, mask=inside, other=0.0) if UNIT != TANH else x
    z_t = x + p * tl.load(r + b * width + n, mask=wide, other=0.0).to(tl.float32)
    if UNIT == TANH:
        new, y = cell_forward(z_t, z_t, z_t, z_t, old, bias, UNIT)
    else:
        h_hat, i, o, f = split_gates(z_t, BR, 4 * BU)
        new, y = cell_forward(h_hat, i, o, f, old, bias, UNIT)
    tl.store(h + at, (y * keep).to(h.dtype.element_ty), mask=inside)
    if UNIT != TANH:
        tl.store(c + at, new, mask=inside)
    if SAVE and PX == NONE:
        tl.store(z + b * width + n, z_t.to(z.dtype.element_ty), mask=wide)


@triton.jit
def gates_backward(
    dh_rec,  # (SPLIT, B, H) partial sums, from the step after
    dh,
    z,  # MI-LSTM: r, from which z is made again
    c_prev, c, mask, b_h, zx, px,
    dc,  # (B, H) fp32, replaced
    dz, dr, db_h,  # db_h: (B, H) fp32, added to
    dz_8, scale,  # EIGHT: (B, 4H), dz once more in 8 bits, and their scale
    stride_dz, stride_zx, stride_px, B, H,
    UNIT: tl.constexpr, PX: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr,
    EIGHT: tl.constexpr, SPLIT: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dz of a step from the gradient of its h and c, and MI-LSTM's dr."""
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
    if PX != NONE:
        x, p = input_side(zx, px, b, n, B, width, stride_zx, stride_px, PX)
        z_t = x + p * z_t
    d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(scale) if EIGHT else 1.0
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
    if EIGHT:
        tl.store(dz_8 + b * width + n, in_e5m2(d_z, by), mask=wide)
    if PX != NONE:
        tl.store(dr + b * width + n, (d_z * p).to(dr.dtype.element_ty), mask=wide)


@triton.jit
def m_backward(
    dm,  # (SPLIT, B, H) partial sums
    mx, rows, a, da, dmx,
    da_8, scale,  # EIGHT: da once more in 8 bits, and their scale
    stride_mx, stride_dmx, B, H,
    INDEXED: tl.constexpr, EIGHT: tl.constexpr, SPLIT: tl.constexpr,
    BR: tl.constexpr, BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """da and dmx from dm, whose partial sums are added in order; INDEXED: lane b's row of mx is rows[b]."""
    b = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    u = tl.program_id(1) * BU + tl.arange(0, BU)[None, :]
    inside = (b < B) & (u < H)
    at = b * H + u
    row = tl.load(rows + b, mask=b < B, other=0).to(tl.int64) if INDEXED else b
    x = tl.load(mx + row * stride_mx + u, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(scale) if EIGHT else 1.0
    wait(PDL)
    d = tl.zeros([BR, BU], tl.float32)
    for s in tl.static_range(SPLIT):
        d += tl.load(dm + s * B * H + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(da + at, (d * x).to(da.dtype.element_ty), mask=inside)
    tl.store(dmx + b * stride_dmx + u, (d * y).to(dmx.dtype.element_ty), mask=inside)
    if EIGHT:
        tl.store(da_8 + at, in_e5m2(d * x, by), mask=inside)

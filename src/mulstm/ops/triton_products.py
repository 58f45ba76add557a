"""The step's products with its pointwise work in their epilogues: two kernels a step forward, three back.

Operands come through tensor descriptors (the copy engine pads past the edges with zeros); W is always the
packed matrix as the forward has it. Each kernel loads what does not depend on the kernel before, then waits
for that one. It lets the next one start only after its own wait, so that a kernel may read, before its wait,
whatever was written two kernels ago or earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mulstm.ops.triton_cell import GROUP, cell_backward, cell_forward, column
from mulstm.ops.triton_pointwise import wait


@triton.jit
def product(
    A, W, row, col, k_0, k_1, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """The (BM, BN) tile of A @ W.T (TRANSPOSED) or A @ W, over k_0 .. k_1."""
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(k_0, k_1, BK):
        a = A.load([row, k])
        if TRANSPOSED:
            acc = tl.dot(a, W.load([col, k]).T, acc)
        else:
            acc = tl.dot(a, W.load([k, col]), acc)
    return acc


@triton.jit
def split_gates(z, BM: tl.constexpr, BN: tl.constexpr):
    """The four (BM, BN / 4) blocks of a tile in packed order."""
    z = tl.reshape(z, [BM, BN // (4 * GROUP), 4, GROUP])
    z = tl.reshape(tl.permute(z, [0, 1, 3, 2]), [BM, BN // 4, 2, 2])
    even, odd = tl.split(z)
    h_hat, o = tl.split(even)
    i, f = tl.split(odd)
    return h_hat, i, o, f


@triton.jit
def m_product(
    h, W_mh, mx, a, m, row, stride_mx, B, H,
    SAVE: tl.constexpr, PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """a = W_mh h_{t-1}, m = mx * a; h_{t-1} starts at `row` of the descriptor h."""
    tile = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    b = tile + tl.arange(0, BM)[:, None]
    u = col + tl.arange(0, BN)[None, :]
    inside = (b < B) & (u < H)
    x = tl.load(mx + b * stride_mx + u, mask=inside, other=0.0)
    wait(PDL)
    acc = product(h, W_mh, row + tile, col, 0, H, BM, BN, BK, True)
    if SAVE:
        tl.store(a + b * H + u, acc.to(a.dtype.element_ty), mask=inside)
    tl.store(m + b * H + u, (acc * x.to(tl.float32)).to(m.dtype.element_ty), mask=inside)


@triton.jit
def gates_product(
    m, W_zm, zx, c_prev, mask, b_h, z, c, h, row, stride_zx, B, H,
    UNIT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, SAVE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """z = zx + W_zm m, then c and h; m starts at `row` of its descriptor. Packed order throughout.

    EARLY says that another kernel ran since c_prev was written, so that it can be read before the wait.
    """
    tile = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    b = tile + tl.arange(0, BM)[:, None]
    n = col + tl.arange(0, BN)[None, :]
    u = col // 4 + tl.arange(0, BN // 4)[None, :]
    inside = (b < B) & (u < H)
    wide = (b < B) & (n < 4 * H)
    at = b * H + u
    # A larger tile has no registers left to hold x through the product.
    if BM * BN <= 16384:
        x = tl.load(zx + b * stride_zx + n, mask=wide, other=0.0)
    if EARLY:
        old = tl.load(c_prev + at, mask=inside, other=0.0)
    keep = tl.load(mask + at, mask=inside, other=0.0) if HAS_MASK else 1.0
    wait(PDL)
    if not EARLY:
        old = tl.load(c_prev + at, mask=inside, other=0.0)
    acc = product(m, W_zm, row + tile, col, 0, H, BM, BN, BK, True)
    if BM * BN > 16384:
        x = tl.load(zx + b * stride_zx + n, mask=wide, other=0.0)
    acc += x.to(tl.float32)
    if SAVE:
        tl.store(z + b * (4 * H) + n, acc.to(z.dtype.element_ty), mask=wide)
    h_hat, i, o, f = split_gates(acc, BM, BN)
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    new, y = cell_forward(h_hat, i, o, f, old, bias, UNIT)
    if HAS_MASK:
        y *= keep
    tl.store(c + at, new, mask=inside)
    tl.store(h + at, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def sum_product(
    A, W, out, row, B, N, K,
    SPLIT: tl.constexpr, PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A @ W in SPLIT partial sums over K, (SPLIT, B, N) in fp32, for the next kernel to add in order."""
    tile = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    part = tl.program_id(2)
    b = tile + tl.arange(0, BM)[:, None]
    n = col + tl.arange(0, BN)[None, :]
    length = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    k_0 = part * length
    wait(PDL)
    acc = product(A, W, row + tile, col, k_0, min(k_0 + length, K), BM, BN, BK, False)
    tl.store(out + (part * B + b) * N + n, acc, mask=(b < B) & (n < N))


@triton.jit
def dm_product(
    dz, W_zm, mx, a, da, dmx, row, stride_mx, stride_dmx, B, H,
    PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dm = dz W_zm, then da and dmx: where the batch is large enough to fill the chip without a split."""
    tile = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    b = tile + tl.arange(0, BM)[:, None]
    u = col + tl.arange(0, BN)[None, :]
    inside = (b < B) & (u < H)
    x = tl.load(mx + b * stride_mx + u, mask=inside, other=0.0)
    y = tl.load(a + b * H + u, mask=inside, other=0.0)
    wait(PDL)
    acc = product(dz, W_zm, row + tile, col, 0, 4 * H, BM, BN, BK, False)
    tl.store(da + b * H + u, (acc * x.to(tl.float32)).to(da.dtype.element_ty), mask=inside)
    tl.store(dmx + b * stride_dmx + u, (acc * y.to(tl.float32)).to(dmx.dtype.element_ty), mask=inside)


@triton.jit
def dh_product(
    da, W_mh, dh, z, c_prev, c, mask, b_h, dc, dz, db_h, row, stride_dz, B, H,
    UNIT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr,
    PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dh_rec = da W_mh of step t + 1, and with it dz and dc of step t; da starts at `row`."""
    tile = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    b = tile + tl.arange(0, BM)[:, None]
    u = col + tl.arange(0, BN)[None, :]
    inside = (b < B) & (u < H)
    at = b * H + u
    zs = z + b * (4 * H)
    z_0 = tl.load(zs + column(u, 0, UNIT), mask=inside, other=0.0)
    z_1 = tl.load(zs + column(u, 1, UNIT), mask=inside, other=0.0)
    z_2 = tl.load(zs + column(u, 2, UNIT), mask=inside, other=0.0)
    z_3 = tl.load(zs + column(u, 3, UNIT), mask=inside, other=0.0)
    old = tl.load(c_prev + at, mask=inside, other=0.0)
    new = tl.load(c + at, mask=inside, other=0.0)
    d = tl.load(dh + at, mask=inside, other=0.0)
    d_c = tl.load(dc + at, mask=inside, other=0.0)
    wait(PDL)
    acc = product(da, W_mh, row + tile, col, 0, H, BM, BN, BK, False)
    d = d.to(tl.float32) + acc
    if HAS_MASK:
        d *= tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    d_0, d_1, d_2, d_3, d_c, d_b = cell_backward(
        z_0.to(tl.float32), z_1.to(tl.float32), z_2.to(tl.float32), z_3.to(tl.float32),
        old, new, d, d_c, bias, UNIT,
    )  # fmt: skip
    if HAS_B:
        tl.store(db_h + at, tl.load(db_h + at, mask=inside, other=0.0) + d_b, mask=inside)
    tl.store(dc + at, d_c, mask=inside)
    out = dz + b * stride_dz
    tl.store(out + column(u, 0, UNIT), d_0.to(dz.dtype.element_ty), mask=inside)
    tl.store(out + column(u, 1, UNIT), d_1.to(dz.dtype.element_ty), mask=inside)
    tl.store(out + column(u, 2, UNIT), d_2.to(dz.dtype.element_ty), mask=inside)
    tl.store(out + column(u, 3, UNIT), d_3.to(dz.dtype.element_ty), mask=inside)

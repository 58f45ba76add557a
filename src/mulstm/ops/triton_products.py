"""The step's products: forward with the pointwise work in their epilogues, backward in partial sums.

Operands come through tensor descriptors (the copy engine pads past the edges with zeros); W is always the
packed matrix as the forward has it. Each kernel loads what does not depend on the kernel before, then waits
for that one. It lets the next one start only after its own wait, so that a kernel may read, before its wait,
whatever was written two kernels ago or earlier.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from mulstm.ops.triton_cell import cell_forward, split_gates
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
    # A larger tile has no registers left to hold its zx through the product.
    AHEAD: tl.constexpr = BM * BN <= 16384
    if AHEAD:
        x = _zx(zx, stride_zx, tile, col, B, H, BM, BN)
    if EARLY:
        old = _state(c_prev, tile, col, B, H, BM, BN)
    wait(PDL)
    if not EARLY:
        old = _state(c_prev, tile, col, B, H, BM, BN)
    acc = product(m, W_zm, row + tile, col, 0, H, BM, BN, BK, True)
    if not AHEAD:
        x = _zx(zx, stride_zx, tile, col, B, H, BM, BN)
    _finish(acc, x, old, mask, b_h, z, c, h, tile, col, B, H, UNIT, HAS_MASK, HAS_B, SAVE, BM, BN)


@triton.jit
def _zx(zx, stride_zx, tile, col, B, H, BM: tl.constexpr, BN: tl.constexpr):
    b = tile + tl.arange(0, BM)[:, None]
    n = col + tl.arange(0, BN)[None, :]
    return tl.load(zx + b * stride_zx + n, mask=(b < B) & (n < 4 * H), other=0.0)


@triton.jit
def _state(x, tile, col, B, H, BM: tl.constexpr, BN: tl.constexpr):
    b = tile + tl.arange(0, BM)[:, None]
    u = col // 4 + tl.arange(0, BN // 4)[None, :]
    return tl.load(x + b * H + u, mask=(b < B) & (u < H), other=0.0)


@triton.jit
def _finish(
    acc, x, old, mask, b_h, z, c, h, tile, col, B, H,
    UNIT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, SAVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The cell of a tile: from the recurrent product to z, c and h."""
    b = tile + tl.arange(0, BM)[:, None]
    n = col + tl.arange(0, BN)[None, :]
    u = col // 4 + tl.arange(0, BN // 4)[None, :]
    inside = (b < B) & (u < H)
    acc += x.to(tl.float32)
    if SAVE:
        tl.store(z + b * (4 * H) + n, acc.to(z.dtype.element_ty), mask=(b < B) & (n < 4 * H))
    h_hat, i, o, f = split_gates(acc, BM, BN)
    bias = tl.load(b_h + u, mask=u < H, other=0.0).to(tl.float32) if HAS_B else 0.0
    new, y = cell_forward(h_hat, i, o, f, old, bias, UNIT)
    if HAS_MASK:
        y *= tl.load(mask + b * H + u, mask=inside, other=0.0)
    tl.store(c + b * H + u, new, mask=inside)
    tl.store(h + b * H + u, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def sum_product(
    A, W, out, row, B, N, K, parts,
    PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A @ W in partial sums over K, (parts, B, N), for the next kernel to add in order."""
    tile = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    part = tl.program_id(2)
    b = tile + tl.arange(0, BM)[:, None]
    n = col + tl.arange(0, BN)[None, :]
    length = tl.cdiv(tl.cdiv(K, BK), parts) * BK
    k_0 = part * length
    wait(PDL)
    acc = product(A, W, row + tile, col, k_0, min(k_0 + length, K), BM, BN, BK, False)
    tl.store(out + (part * B + b) * N + n, acc.to(out.dtype.element_ty), mask=(b < B) & (n < N))

"""Small layers: one launch for a whole chunk, the weights resident on chip, lanes in independent groups.

A group of CTAs owns some lanes for the whole chunk; a CTA of it owns UNITS units and keeps their rows of
W_mh and W_zm in shared memory. Forward, the group exchanges h and m. Backward, dz is four times as wide, so
each CTA multiplies its own dz by its own rows of W_zm and the group exchanges partial sums, which are added
in the CTAs' order; then it exchanges da. Two meetings a step either way. Groups never wait for each other.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mulstm.ops import faults
from mulstm.ops.cuda_source import LARGEST_SHARED
from mulstm.ops.triton_cell import GROUP, NATIVE, cell_forward, cell_slopes

UNITS = 32  # owned by a CTA
SPINS = 400_000  # polls before a CTA gives up waiting, a few tenths of a second
WIDEST = 512


@triton.jit
def look(counter):
    """Reads the counter; what its writers wrote before is then visible."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def meet(counter, target, failed, patience):
    """Waits until the group has come here `target` times; returns the patience left, 0 after a hang."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    spins = 0
    while (seen < target) & (spins < patience):
        seen = look(counter)
        spins += 1
    if seen < target:
        tl.store(failed, 1)
        patience = 0
    tl.debug_barrier()
    return patience


@triton.jit
def gates_apart(z, U: tl.constexpr, L: tl.constexpr):
    """The four (U, L) blocks of (4U, L) in packed order."""
    z = tl.reshape(z, [U // GROUP, 4, GROUP, L])
    z = tl.reshape(tl.permute(z, [0, 2, 3, 1]), [U, L, 2, 2])
    even, odd = tl.split(z)
    h_hat, o = tl.split(even)
    i, f = tl.split(odd)
    return h_hat, i, o, f


@triton.jit
def gates_together(h_hat, i, o, f, U: tl.constexpr, L: tl.constexpr):
    """The inverse of gates_apart."""
    z = tl.join(tl.join(h_hat, o), tl.join(i, f))  # (U, L, 2, 2): the last index is the low bit of the gate
    z = tl.reshape(z, [U // GROUP, GROUP, L, 4])
    return tl.reshape(tl.permute(z, [0, 3, 1, 2]), [4 * U, L])


@triton.jit
def first_half(x, U: tl.constexpr, L: tl.constexpr):
    """The first U rows of (2U, L)."""
    x = tl.permute(tl.reshape(x, [2, U, L]), [1, 2, 0])
    top, _ = tl.split(x)
    return top


@triton.jit
def small_forward(
    mx, zx, W_mh, W_zm, mask, h, c, z, a, m, counters, failed,
    stride_mx, stride_zx, T, B, H, patience,
    UNIT: tl.constexpr, HAS_M: tl.constexpr, HAS_MASK: tl.constexpr, SAVE: tl.constexpr,
    PARTS: tl.constexpr, U: tl.constexpr, L: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """All steps of a chunk; h[0] and c[0] hold the state before it."""
    group = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    k = tl.arange(0, K)
    row = tl.arange(0, 2 * U)
    lane = group * L + tl.arange(0, L)
    unit = part * U + tl.arange(0, U)
    n = part * 4 * U + tl.arange(0, 4 * U)
    # Transposed: weights are the left operand, whose 64-row tiles the tensor cores want, lanes the right one.
    W_z = tl.load(W_zm + n[:, None] * H + k[None, :], mask=k[None, :] < H, other=0.0)
    if HAS_M:
        own = (row[:, None] < U) & (k[None, :] < H)
        W_m = tl.load(W_mh + (part * U + row)[:, None] * H + k[None, :], mask=own, other=0.0)
    within = (lane < B)[:, None] & (k < H)[None, :]
    at_lanes = lane[:, None] * H + k[None, :]
    inside = (lane < B)[None, :] & (unit < H)[:, None]
    wide = (lane < B)[None, :] & (n < 4 * H)[:, None]
    at = lane[None, :] * H + unit[:, None]
    at_z = lane[None, :] * (4 * H) + n[:, None]
    c_t = tl.load(c + at, mask=inside, other=0.0)
    keep = tl.load(mask + at, mask=inside, other=0.0) if HAS_MASK else 1.0
    meetings = 0
    # What a step reads is asked for in the step before, ahead of the meeting.
    at_zx = lane[None, :] * stride_zx + n[:, None]
    at_mx = lane[None, :] * stride_mx + unit[:, None]
    z_t = tl.load(zx + at_zx, mask=wide, other=0.0)
    if HAS_M:
        x_t = tl.load(mx + at_mx, mask=inside, other=0.0)
    for t in tl.range(0, T, num_stages=1):
        rows = tl.cast(t, tl.int64) * B  # a chunk may have more than 2^31 numbers
        step = rows * H
        kept = step if SAVE else 0
        operand = h + step
        if HAS_M:
            before = tl.load(operand + at_lanes, mask=within, other=0.0, cache_modifier=".cg")
            a_t = first_half(tl.dot(W_m, tl.trans(before)), U, L)
            if SAVE:
                tl.store(a + kept + at, a_t.to(a.dtype.element_ty), mask=inside)
            tl.store(m + kept + at, (a_t * x_t.to(tl.float32)).to(m.dtype.element_ty), mask=inside)
            meetings += 1
            patience = meet(counters + group, meetings * PARTS, failed, patience)
            operand = m + kept
        m_t = tl.load(operand + at_lanes, mask=within, other=0.0, cache_modifier=".cg")
        r_t = tl.dot(W_z, tl.trans(m_t)) + z_t.to(tl.float32)
        if SAVE:
            tl.store(z + 4 * step + at_z, r_t.to(z.dtype.element_ty), mask=wide)
        h_hat, i, o, f = gates_apart(r_t, U, L)
        c_t, y = cell_forward(h_hat, i, o, f, c_t, 0.0, UNIT)
        tl.store(h + step + B * H + at, (y * keep).to(h.dtype.element_ty), mask=inside)
        if SAVE:
            tl.store(c + step + B * H + at, c_t, mask=inside)
        if t + 1 < T:
            z_t = tl.load(zx + (rows + B) * stride_zx + at_zx, mask=wide, other=0.0)
            if HAS_M:
                x_t = tl.load(mx + (rows + B) * stride_mx + at_mx, mask=inside, other=0.0)
            meetings += 1
            patience = meet(counters + group, meetings * PARTS, failed, patience)
    if not SAVE:
        tl.store(c + (T % 2) * B * H + at, c_t, mask=inside)


@triton.jit
def summed(sums, mine, at_own, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """The group's partial sums of my rows, added in the CTAs' order."""
    total = tl.load(sums + at_own, mask=mine, other=0.0, cache_modifier=".cg").to(tl.float32)
    for q in tl.static_range(1, PARTS):
        total += tl.load(sums + q * SIZE + at_own, mask=mine, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def small_backward(
    dh, dh_T, dc, mx, W_mh, W_zm, mask, c, z, a, dx, da, dh_0, sums, counters, failed,
    stride_mx, stride_dx, T, B, H, patience,
    UNIT: tl.constexpr, HAS_M: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTS: tl.constexpr, U: tl.constexpr, L: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dmx, dz and da of all steps; dc is replaced by dc_0. sums: (groups, 2, PARTS, K, L)."""
    group = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    SIZE: tl.constexpr = K * L
    k = tl.arange(0, K)
    row = tl.arange(0, 2 * U)
    lane = group * L + tl.arange(0, L)
    unit = part * U + tl.arange(0, U)
    n = part * 4 * U + tl.arange(0, 4 * U)
    # Own rows of W_zm, read as columns; own columns of W_mh, read as rows.
    W_z = tl.load(W_zm + n[None, :] * H + k[:, None], mask=(k < H)[:, None], other=0.0)
    if HAS_M:
        own = (row[:, None] < U) & (k[None, :] < H)
        W_m = tl.load(W_mh + k[None, :] * H + (part * U + row)[:, None], mask=own, other=0.0)
    within = (lane < B)[:, None] & (k < H)[None, :]
    at_lanes = lane[:, None] * H + k[None, :]
    inside = (lane < B)[None, :] & (unit < H)[:, None]
    wide = (lane < B)[None, :] & (n < 4 * H)[:, None]
    at = lane[None, :] * H + unit[:, None]
    at_z = lane[None, :] * (4 * H) + n[:, None]
    at_sums = k[:, None] * L + tl.arange(0, L)[None, :]
    at_own = unit[:, None] * L + tl.arange(0, L)[None, :]
    mine = (unit < K)[:, None] & (lane >= 0)[None, :]
    keep = tl.load(mask + at, mask=inside, other=0.0) if HAS_MASK else 1.0
    d_h = tl.load(dh_T + at, mask=inside, other=0.0).to(tl.float32)
    d_c = tl.load(dc + at, mask=inside, other=0.0)
    first = sums + group * 2 * PARTS * SIZE
    meetings = 0
    OFFSET: tl.constexpr = 1 if HAS_M else 0
    # What a step reads is asked for in the step before, ahead of the meeting.
    last = tl.cast(T - 1, tl.int64) * B * H
    z_t = tl.load(z + 4 * last + at_z, mask=wide, other=0.0)
    d_t = tl.load(dh + last + at, mask=inside, other=0.0)
    new = tl.load(c + last + B * H + at, mask=inside, other=0.0)
    old = tl.load(c + last + at, mask=inside, other=0.0)
    h_hat, i, o, f = gates_apart(z_t.to(tl.float32), U, L)
    A, D_hat, D_i, D_o, D_f, f, _ = cell_slopes(h_hat, i, o, f, old, new, 0.0, UNIT)
    for back in tl.range(0, T, num_stages=1):
        t = T - 1 - back
        rows = tl.cast(t, tl.int64) * B
        step = rows * H
        d_h = (d_t.to(tl.float32) + d_h) * keep
        d_c += d_h * A
        d_z = gates_together(d_c * D_hat, d_c * D_i, d_h * D_o, d_c * D_f, U, L).to(dx.dtype.element_ty)
        d_c *= f
        # Two places in turn: a CTA may still read the one while another already fills the other.
        place = first + (back % 2) * PARTS * SIZE
        tl.store(place + part * SIZE + at_sums, tl.dot(W_z, d_z).to(sums.dtype.element_ty))
        out = dx + rows * stride_dx + lane[None, :] * stride_dx
        tl.store(out + OFFSET * H + n[:, None], d_z, mask=wide)
        new = old
        if t > 0:
            z_t = tl.load(z + 4 * (step - B * H) + at_z, mask=wide, other=0.0)
            d_t = tl.load(dh + step - B * H + at, mask=inside, other=0.0)
            old = tl.load(c + step - B * H + at, mask=inside, other=0.0)
        if HAS_M:
            at_mx = lane[None, :] * stride_mx + unit[:, None]
            x_t = tl.load(mx + rows * stride_mx + at_mx, mask=inside, other=0.0)
            a_t = tl.load(a + step + at, mask=inside, other=0.0)
        meetings += 1
        patience = meet(counters + group, meetings * PARTS, failed, patience)
        d_h = summed(place, mine, at_own, PARTS, SIZE)
        if HAS_M:
            tl.store(da + step + at, (d_h * x_t.to(tl.float32)).to(da.dtype.element_ty), mask=inside)
            tl.store(out + unit[:, None], (d_h * a_t.to(tl.float32)).to(dx.dtype.element_ty), mask=inside)
        h_hat, i, o, f = gates_apart(z_t.to(tl.float32), U, L)
        A, D_hat, D_i, D_o, D_f, f, _ = cell_slopes(h_hat, i, o, f, old, new, 0.0, UNIT)
        if HAS_M:
            meetings += 1
            patience = meet(counters + group, meetings * PARTS, failed, patience)
            d_a = tl.load(da + step + at_lanes, mask=within, other=0.0, cache_modifier=".cg")
            d_h = first_half(tl.dot(W_m, tl.trans(d_a)), U, L)
    tl.store(dc + at, d_c, mask=inside)
    tl.store(dh_0 + at, d_h.to(dh_0.dtype.element_ty), mask=inside)


def lanes_of(H: int, B: int, processors: int) -> int:
    """How many lanes a group takes, 0 where a layer does not fit: too wide, or more CTAs than processors."""
    if H > WIDEST:
        return 0
    K = max(64, triton.next_power_of_2(H))
    parts = H // UNITS
    for lanes in (16, 32, 64, 128):
        shared = 6 * UNITS * K * 2 + lanes * K * 2 + 8192
        if shared <= LARGEST_SHARED and triton.cdiv(B, lanes) * parts <= processors:
            return lanes
    return 0


def launch_arguments(
    H: int, B: int, lanes: int, device: torch.device
) -> tuple[tuple[int], Tensor, Tensor, dict[str, Any]]:
    """Grid, counters (zeroed in the graph, too), the flag of a failed meeting, options."""
    parts, groups = H // UNITS, triton.cdiv(B, lanes)
    counters = torch.zeros(groups, dtype=torch.int32, device=device)
    options = {
        "PARTS": parts,
        "U": UNITS,
        "L": lanes,
        "K": max(64, triton.next_power_of_2(H)),
        "num_warps": 8,
        "num_stages": 1,
        "launch_cooperative_grid": True,
    }
    return (parts * groups,), counters, faults.flag(device), options

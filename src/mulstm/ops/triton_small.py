"""Small layers: one launch for a whole chunk, the weights resident on chip, lanes in independent groups.

A group of CTAs owns some lanes for the whole chunk; a CTA of it owns UNITS units and keeps their rows of W_mh
and W_zm in shared memory. Forward, the group exchanges h and m; backward, each CTA multiplies what it owns by
its own rows, and the group exchanges partial sums, which are added in the CTAs' order. Two meetings a step
either way. Groups never wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mulstm.ops.triton_cell import GROUP, cell_backward, cell_forward

UNITS = 32  # owned by a CTA
SPINS = 400_000  # polls before a CTA gives up waiting, a few tenths of a second
WIDEST = 512


@triton.jit
def meet(counter, target, failed, patience):
    """Waits until the whole group has come here `target` times in all; returns the patience left, 0 after a hang."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    spins = 0
    while (seen < target) & (spins < patience):
        seen = tl.atomic_add(counter, 0, sem="acquire")
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
    for t in tl.range(0, T, num_stages=1):
        step = t * B * H
        kept = step if SAVE else 0
        z_t = tl.load(zx + t * B * stride_zx + lane[None, :] * stride_zx + n[:, None], mask=wide, other=0.0)
        operand = h + step
        if HAS_M:
            x_t = tl.load(mx + t * B * stride_mx + lane[None, :] * stride_mx + unit[:, None], mask=inside, other=0.0)
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
            tl.store(z + t * B * 4 * H + at_z, r_t.to(z.dtype.element_ty), mask=wide)
        h_hat, i, o, f = gates_apart(r_t, U, L)
        c_t, y = cell_forward(h_hat, i, o, f, c_t, 0.0, UNIT)
        tl.store(h + step + B * H + at, (y * keep).to(h.dtype.element_ty), mask=inside)
        if SAVE:
            tl.store(c + step + B * H + at, c_t, mask=inside)
        if t + 1 < T:
            meetings += 1
            patience = meet(counters + group, meetings * PARTS, failed, patience)
    if not SAVE:
        tl.store(c + (T % 2) * B * H + at, c_t, mask=inside)


@triton.jit
def exchanged(
    sums, mine, x, part, at_sums, at_own, counters, target, failed, patience, PARTS: tl.constexpr, SIZE: tl.constexpr
):
    """Sum over the group, in the CTAs' order, of the rows that are mine."""
    tl.store(sums + part * SIZE + at_sums, x)
    patience = meet(counters, target, failed, patience)
    total = tl.load(sums + at_own, mask=mine, other=0.0, cache_modifier=".cg")
    for q in tl.static_range(1, PARTS):
        total += tl.load(sums + q * SIZE + at_own, mask=mine, other=0.0, cache_modifier=".cg")
    return total, patience


@triton.jit
def small_backward(
    dh, dh_T, dc, mx, W_mh, W_zm, mask, c, z, a, dx, da, dh_0, sums, counters, failed,
    stride_mx, stride_dx, T, B, H, patience,
    UNIT: tl.constexpr, HAS_M: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTS: tl.constexpr, U: tl.constexpr, L: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dmx, dz and da of all steps; dc is replaced by dc_0. sums: (groups, 2, PARTS, K, L) fp32."""
    group = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    SIZE: tl.constexpr = K * L
    k = tl.arange(0, K)
    lane = group * L + tl.arange(0, L)
    unit = part * U + tl.arange(0, U)
    n = part * 4 * U + tl.arange(0, 4 * U)
    # Own rows, read as columns: (K, 4U) and (K, U).
    W_z = tl.load(W_zm + n[None, :] * H + k[:, None], mask=(k < H)[:, None], other=0.0)
    if HAS_M:
        W_m = tl.load(W_mh + unit[None, :] * H + k[:, None], mask=(k < H)[:, None] & (unit < H)[None, :], other=0.0)
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
    # Two places in turn: a CTA may still read the one while another already fills the other.
    first = sums + group * 2 * PARTS * SIZE
    second = first + PARTS * SIZE
    meetings = 0
    OFFSET: tl.constexpr = 1 if HAS_M else 0
    for back in tl.range(0, T, num_stages=1):
        t = T - 1 - back
        step = t * B * H
        z_t = tl.load(z + t * B * 4 * H + at_z, mask=wide, other=0.0).to(tl.float32)
        d_t = tl.load(dh + step + at, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(c + step + at, mask=inside, other=0.0)
        new = tl.load(c + step + B * H + at, mask=inside, other=0.0)
        h_hat, i, o, f = gates_apart(z_t, U, L)
        d_0, d_1, d_2, d_3, d_c, _ = cell_backward(h_hat, i, o, f, old, new, (d_t + d_h) * keep, d_c, 0.0, UNIT)
        d_z = gates_together(d_0, d_1, d_2, d_3, U, L).to(dx.dtype.element_ty)
        out = dx + t * B * stride_dx + lane[None, :] * stride_dx
        tl.store(out + OFFSET * H + n[:, None], d_z, mask=wide)
        meetings += 1
        place = first if HAS_M else first + (back % 2) * PARTS * SIZE
        d_h, patience = exchanged(
            place, mine, tl.dot(W_z, d_z), part, at_sums, at_own,
            counters + group, meetings * PARTS, failed, patience, PARTS, SIZE,
        )  # fmt: skip
        if HAS_M:
            x_t = tl.load(mx + t * B * stride_mx + lane[None, :] * stride_mx + unit[:, None], mask=inside, other=0.0)
            a_t = tl.load(a + step + at, mask=inside, other=0.0)
            d_a = (d_h * x_t.to(tl.float32)).to(da.dtype.element_ty)
            tl.store(da + step + at, d_a, mask=inside)
            tl.store(out + unit[:, None], (d_h * a_t.to(tl.float32)).to(dx.dtype.element_ty), mask=inside)
            meetings += 1
            d_h, patience = exchanged(
                second, mine, tl.dot(W_m, d_a), part, at_sums, at_own,
                counters + group, meetings * PARTS, failed, patience, PARTS, SIZE,
            )  # fmt: skip
    tl.store(dc + at, d_c, mask=inside)
    tl.store(dh_0 + at, d_h.to(dh_0.dtype.element_ty), mask=inside)


def groups_of(H: int, B: int, processors: int) -> int:
    """How many lanes a group takes, 0 where a layer does not fit: too wide, or more CTAs than processors."""
    if H > WIDEST:
        return 0
    K = max(64, triton.next_power_of_2(H))
    parts = H // UNITS
    for lanes in (16, 32, 64, 128):
        shared = 6 * UNITS * K * 2 + lanes * K * 2 + 8192
        if shared <= 227 * 1024 and triton.cdiv(B, lanes) * parts <= processors:
            return lanes
    return 0


def launch(H: int, B: int, lanes: int, device: torch.device) -> tuple[tuple[int], Tensor, Tensor, dict[str, Any]]:
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
    return (parts * groups,), counters, failed_flag(device), options


_FAILED: dict[torch.device, Tensor] = {}


def failed_flag(device: torch.device) -> Tensor:
    """1 once a group has waited in vain: whoever reads results should look at it now and then."""
    if device not in _FAILED:
        _FAILED[device] = torch.zeros((), dtype=torch.int32, device=device)
    return _FAILED[device]

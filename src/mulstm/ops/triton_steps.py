"""The loop over a chunk's steps on packed, padded tensors: forward, and the backward written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mulstm.ops import cuda_steps, eight
from mulstm.ops import triton_pointwise as pointwise
from mulstm.ops import triton_products as products
from mulstm.ops import triton_small as small
from mulstm.ops.reference import UNITS
from mulstm.ops.triton_chunk import Chunk, Gradients, Saved
from mulstm.ops.triton_plan import Form, Plan, Tile
from mulstm.ops.triton_vectors import through_vectors

Step = Callable[[int], None]  # of t: launches what step t needs
Sums = Callable[[int], tuple[Tensor, int]]  # the same, and where the partial sums stand, and how many
NONE, GIVEN, VECTORS = 0, 1, 2  # kinds of px, as in triton_pointwise
ROWS, COLUMNS, WARPS = 4, 256, 4  # a pointwise kernel's tile
ROWS_BACK = 2  # so many that more CTAs find registers beside a product and load while it runs
ROWS_VECTORS, COLUMNS_VECTORS = 8, 64  # as small, but MI-LSTM's vectors are read anew for fewer tiles of rows


def reads_rows(chunk: Chunk, plan: Plan) -> bool:
    """Whether this plan's kernels find the rows of mx and zx by an index."""
    if chunk.px is not None or chunk.unit == "tanh" or not isinstance(plan.gates, Form):
        return False
    return plan.gates.fused and (chunk.mx is None or isinstance(plan.m, Form))


def _rows(x: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    """A descriptor over all steps' rows of (T, B, width)."""
    T, B, width = x.shape
    return TensorDescriptor(x, [T * B, width], [x.stride(1), 1], list(tile))


def _matrix(W: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(W, list(W.shape), [W.stride(0), 1], list(tile))


def _options(tile: Tile, pdl: bool) -> dict[str, Any]:
    return {
        "BM": tile.BM,
        "BN": tile.BN,
        "BK": tile.BK,
        "PDL": pdl,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "launch_pdl": pdl,
    }


def _px_kind(px: Tensor | None) -> int:
    if px is None:
        return NONE
    return VECTORS if px.dim() == 2 else GIVEN


def _px_of(px: Tensor | None, t: int) -> tuple[Tensor | None, int]:
    """What a kernel is given of px in step t, and its stride over the lanes."""
    return (px[t], px.stride(1)) if px is not None and _px_kind(px) == GIVEN else (px, 0)


class _Pointwise:
    """Grid and options of the pointwise kernels of one chunk."""

    def __init__(self, B: int, H: int, rows: int = ROWS, columns: int = COLUMNS) -> None:
        columns = min(columns, triton.next_power_of_2(H))
        self.grid = (triton.cdiv(B, rows), triton.cdiv(H, columns))
        self.rows, self.columns = rows, columns

    @classmethod
    def of(cls, chunk: Chunk, rows: int = ROWS) -> _Pointwise:
        """For the gates; without vectors, tiles of so many rows."""
        vectors = _px_kind(chunk.px) == VECTORS
        return cls(*chunk.h_0.shape, *((ROWS_VECTORS, COLUMNS_VECTORS) if vectors else (rows,)))

    def options(self, pdl: bool) -> dict[str, Any]:
        return {"BR": self.rows, "BU": self.columns, "PDL": pdl, "launch_pdl": pdl, "num_warps": WARPS}


def forward(chunk: Chunk, plan: Plan, save: bool) -> Saved:
    """h of all steps, and what the backward wants where it is to be saved."""
    mx, zx, px, W_mh, W_zm, h_0, c_0, mask, _, unit, _ = chunk
    (T, B, width), H = chunk.shape, h_0.shape[1]
    places = T + 1 if save else 2
    kept = T if save else 1
    h = zx.new_empty(T + 1, B, H)
    c = zx.new_empty(places, B, c_0.shape[1], dtype=torch.float32)
    z = zx.new_empty((T, B, width) if save and px is None else 0, dtype=torch.float16)
    a = zx.new_empty((kept, B, H) if mx is not None else 0)
    m = torch.empty_like(a)
    r = zx.new_empty((kept, B, width) if px is not None else 0)
    h[0].copy_(h_0)
    operands = eight.operands(h[:1]) if plan.eight else None
    c[0].copy_(c_0)
    saved = Saved(h, c, z, a, m, r)
    if plan.lanes:
        grid, counters, failed, options = small.launch_arguments(H, B, plan.lanes, zx.device)
        small.small_forward[grid](
            mx, zx, W_mh, W_zm, mask, h, c, z, a, m, counters, failed,
            0 if mx is None else mx.stride(1), zx.stride(1), T, B, H, small.SPINS,
            UNIT=UNITS.index(unit), HAS_M=mx is not None, HAS_MASK=mask is not None, SAVE=save, **options,
        )  # fmt: skip
        return saved
    # The copies above stand between the first kernel of the loop and whatever made mx and zx: a kernel reads
    # before its wait only what was written two kernels ago or earlier.
    step = _forward_step(chunk, saved, plan, save, operands)
    for t in range(T):
        step(t)
    return saved


def _forward_step(
    chunk: Chunk, saved: Saved, plan: Plan, save: bool, operands: eight.Operands | None
) -> Step:
    """A function of t that makes the whole step."""
    fusible = chunk.px is None and chunk.unit != "tanh"
    bare = isinstance(plan.gates, Form) and not plan.gates.fused
    tile_z = plan.gates if fusible or bare else None
    if chunk.mx is None:
        kernel_m = None
    elif isinstance(plan.m, Form):
        kernel_m = cuda_steps.m_step(chunk, saved, plan.m, save, operands)
    else:
        kernel_m = _m_step(chunk, saved, plan.m, save, plan.pdl)
    if isinstance(tile_z, Form) and tile_z.fused:
        kernel_z = cuda_steps.gates_step(chunk, saved, tile_z, save, operands)
    else:
        kernel_z = _gates_step(chunk, saved, tile_z, save, plan.pdl)

    def step(t: int) -> None:
        if kernel_m is not None:
            kernel_m(t)
        kernel_z(t)

    return step


def _m_step(chunk: Chunk, saved: Saved, tile: Tile | None, save: bool, pdl: bool) -> Step:
    """A function of t that makes a_t and m_t."""
    mx, W_mh = chunk.mx, chunk.W_mh
    assert mx is not None
    assert W_mh is not None
    h, a, m = saved.h, saved.a, saved.m
    _, B, H = h.shape
    kept = a.shape[0]
    if tile is None:
        work = _Pointwise(B, H)

        def plain(t: int) -> None:
            k = t % kept
            torch.mm(h[t], W_mh.t(), out=a[k])
            pointwise.m_forward[work.grid](a[k], mx[t], m[k], mx.stride(1), B, H, **work.options(pdl))

        return plain
    h_rows, W = _rows(h, (tile.BM, tile.BK)), _matrix(W_mh, (tile.BN, tile.BK))
    grid = (triton.cdiv(B, tile.BM), triton.cdiv(H, tile.BN))

    def fused(t: int) -> None:
        k = t % kept
        products.m_product[grid](
            h_rows, W, mx[t], a[k], m[k], t * B, mx.stride(1), B, H, SAVE=save, **_options(tile, pdl)
        )

    return fused


def _gates_step(chunk: Chunk, saved: Saved, tile: Tile | Form | None, save: bool, pdl: bool) -> Step:
    """A function of t that makes z_t, c_t and h_t; a form makes the product alone."""
    mx, zx, px, _, W_zm, _, _, mask, b_h, unit, _ = chunk
    h, c, z, _, m, r = saved
    operand = h if mx is None else m
    _, B, H = h.shape
    width = zx.shape[2]
    places = c.shape[0]
    flags = {"UNIT": UNITS.index(unit), "HAS_MASK": mask is not None, "HAS_B": b_h is not None, "SAVE": save}
    if tile is None or isinstance(tile, Form):
        work = _Pointwise.of(chunk)
        sums = zx.new_empty(1, B, width) if px is None else r
        product = _product(operand, W_zm, sums, tile)

        def apart(t: int) -> None:
            product(t)
            px_t, stride_px = _px_of(px, t)
            pointwise.gates_forward[work.grid](
                sums[t % sums.shape[0]], zx[t], px_t, c[t % places], mask, b_h,
                z[t] if z.numel() else z, c[(t + 1) % places], h[t + 1],
                zx.stride(1), stride_px, B, H,
                PX=_px_kind(px), **flags, **work.options(pdl),
            )  # fmt: skip

        return apart
    rows, W = _rows(operand, (tile.BM, tile.BK)), _matrix(W_zm, (tile.BN, tile.BK))
    grid = (triton.cdiv(B, tile.BM), triton.cdiv(width, tile.BN))

    def fused(t: int) -> None:
        row = (t % operand.shape[0]) * B
        products.gates_product[grid](
            rows, W, zx[t], c[t % places], mask, b_h,
            z[t] if save else z, c[(t + 1) % places], h[t + 1],
            row, zx.stride(1), B, H,
            EARLY=mx is not None, **flags, **_options(tile, pdl),
        )  # fmt: skip

    return fused


def _product(x: Tensor, W: Tensor, out: Tensor, form: Form | None) -> Step:
    """A function of t that makes x_t @ W.T in out_t; both may have fewer places than there are steps."""
    if form is not None:
        return cuda_steps.product(x, W, out, form)

    def plain(t: int) -> None:
        torch.mm(x[t % x.shape[0]], W.t(), out=out[t % out.shape[0]])

    return plain


def backward(
    chunk: Chunk,
    saved: Saved,
    dh: Tensor,
    dh_T: Tensor | None,
    dc_T: Tensor | None,
    plan: Plan,
    to_start: bool = True,
) -> Gradients:
    """The gradients of one chunk but for the weights', which are products over all steps.

    Without `to_start` nobody wants dh_0, and it holds nothing. For a plan of 8-bit numbers the chunk has its
    two recurrent matrices transposed.
    """
    mx, zx, px, W_mh, W_zm, h_0, c_0, mask, b_h, unit, _ = chunk
    c, z, a = saved.c, saved.z, saved.a
    (T, B, width), H = chunk.shape, h_0.shape[1]
    in_eight = eight.backward_operands(dh, dh_T, dc_T, width) if plan.eight else None
    dx = zx.new_empty(T, B, width + (0 if mx is None else H))
    dmx, dz = (None, dx) if mx is None else (dx[..., :H], dx[..., H:])
    dr = dz if px is None else torch.empty_like(zx, memory_format=torch.contiguous_format)
    da = torch.empty_like(a)
    dc = torch.zeros_like(c_0) if dc_T is None else dc_T.clone(memory_format=torch.contiguous_format)
    db_h = None if b_h is None else torch.zeros(B, H, dtype=torch.float32, device=zx.device)
    dh_rec = torch.zeros_like(h_0) if dh_T is None else dh_T.clone(memory_format=torch.contiguous_format)
    dh_0 = torch.empty_like(h_0)
    out = Gradients(dx, dmx, dz, dr, da, None, dh_0, dc, db_h)
    if plan.lanes:
        grid, counters, failed, options = small.launch_arguments(H, B, plan.lanes, zx.device)
        sums = zx.new_empty(2 * grid[0] * options["K"] * options["L"])
        small.small_backward[grid](
            dh, dh_rec, dc, mx, W_mh, W_zm, mask, c, z, a, dx, da, dh_0, sums, counters, failed,
            0 if mx is None else mx.stride(1), dx.stride(1), T, B, H, small.SPINS,
            UNIT=UNITS.index(unit), HAS_M=mx is not None, HAS_MASK=mask is not None, **options,
        )  # fmt: skip
        return out
    # Likewise these copies stand between the first kernel and whatever made dh.
    step = _backward_step(chunk, saved, dh, dh_rec, out, plan, to_start, in_eight)
    for t in range(T - 1, -1, -1):
        step(t)
    if px is None:
        return out
    vectors = _px_kind(px) == VECTORS
    return out._replace(dpx=through_vectors(dz, saved.r, zx, px) if vectors else dz * saved.r)


def _backward_step(
    chunk: Chunk,
    saved: Saved,
    dh: Tensor,
    dh_T: Tensor,
    out: Gradients,
    plan: Plan,
    to_start: bool,
    in_eight: eight.BackwardOperands | None,
) -> Step:
    """A function of t that goes from dh_t and dc_t to those of the step before; the last may give dh_0."""
    mx, zx, px, W_mh, W_zm, h_0, _, mask, b_h, unit, rows = chunk
    c, z = saved.c, saved.z if px is None else saved.r
    (B, H), T = h_0.shape, dh.shape[0]
    _, _, dz, dr, da, _, dh_0, dc, db_h = out
    work = _Pointwise.of(chunk, ROWS_BACK if plan.uses_cuda else ROWS)
    flags = {"UNIT": UNITS.index(unit), "HAS_MASK": mask is not None, "HAS_B": b_h is not None}
    lstm = unit != "tanh"
    if mx is not None:
        to_m = _to_da(chunk, saved, out, plan, work, in_eight)
    else:
        to_m = _partial(dr, W_zm, plan.dm, plan)
    dz_8, da_8, scale, undo = (None, da, None, None) if in_eight is None else in_eight
    # Where the last product goes on to dz of the step before, the pointwise kernel makes only the first.
    cell = None
    if isinstance(plan.dh, Form) and plan.dh.fused and W_mh is not None and lstm and px is None:
        cell = cuda_steps.cell_step(chunk, saved, dh, out, plan.dh)
    to_h = None if W_mh is None else _partial(da_8, W_mh, plan.dh, plan, undo)
    dh_rec, split = dh_T, 1

    def gates(t: int) -> None:
        px_t, stride_px = _px_of(px, t)
        pointwise.gates_backward[work.grid](
            dh_rec, dh[t], z[t], c[t] if lstm else c, c[t + 1] if lstm else c, mask, b_h,
            zx[t] if rows is None else zx, px_t, dc, dz[t], dr[t], db_h, dz_8, scale,
            dz.stride(1), zx.stride(-2), stride_px, B, H,
            PX=_px_kind(px), EIGHT=plan.eight, SPLIT=split, **flags, **work.options(plan.pdl),
        )  # fmt: skip

    def step(t: int) -> None:
        nonlocal dh_rec, split
        if cell is None or t == T - 1:
            gates(t)
        over = t == 0 and not to_start
        if not over or mx is not None:
            dh_rec, split = to_m(t)
        if over:
            return
        if cell is not None and t > 0:
            cell(t)
        elif to_h is not None:
            dh_rec, split = to_h(t)
        if t == 0:
            dh_0.copy_(dh_rec.view(split, B, H).sum(0, dtype=torch.float32))

    return step


def _to_da(
    chunk: Chunk,
    saved: Saved,
    out: Gradients,
    plan: Plan,
    work: _Pointwise,
    in_eight: eight.BackwardOperands | None,
) -> Sums:
    """A function of t that goes from dz_t to da_t and dmx_t."""
    mx, a, da, dmx, rows = chunk.mx, saved.a, out.da, out.dmx, chunk.rows
    assert mx is not None
    assert dmx is not None
    B, H = chunk.h_0.shape
    if isinstance(plan.dm, Form) and plan.dm.fused:
        fused = cuda_steps.dm_step(chunk, saved, out, plan.dm)

        def whole(t: int) -> tuple[Tensor, int]:
            fused(t)
            return da[t], 1

        return whole
    dr, da_8, scale, undo = (out.dr, None, None, None) if in_eight is None else in_eight
    product = _partial(dr, chunk.W_zm, plan.dm, plan, undo)

    def apart(t: int) -> tuple[Tensor, int]:
        dm, split = product(t)
        mx_t, rows_t = (mx[t], None) if rows is None else (mx, rows[t])
        pointwise.m_backward[work.grid](
            dm, mx_t, rows_t, a[t], da[t], dmx[t], da_8, scale, mx.stride(-2), dmx.stride(1), B, H,
            INDEXED=rows is not None, EIGHT=plan.eight, SPLIT=split, **work.options(plan.pdl),
        )  # fmt: skip
        return da[t], 1

    return apart


def _partial(x: Tensor, W: Tensor, tile: Tile | Form | None, plan: Plan, undo: Tensor | None = None) -> Sums:
    """A function of t that makes x_t @ W in partial sums, and says in how many.

    With `undo` x is of 8 bits, and W of 8 bits and transposed.
    """
    _, B, K = x.shape
    N = W.shape[1]
    if isinstance(tile, Form):
        if undo is not None:
            parts, product = cuda_steps.sums_in_eight(x, W, undo, tile)
        else:
            parts, product = cuda_steps.sums(x, W, tile)

        def in_cuda(t: int) -> tuple[Tensor, int]:
            product(t)
            return parts, tile.parts

        return in_cuda
    if tile is None:
        out = x.new_empty(B, N)

        def plain(t: int) -> tuple[Tensor, int]:
            return torch.mm(x[t], W, out=out), 1

        return plain
    rows, matrix = _rows(x, (tile.BM, tile.BK)), _matrix(W, (tile.BK, tile.BN))
    sums = x.new_empty(tile.split, B, N)
    grid = (triton.cdiv(B, tile.BM), triton.cdiv(N, tile.BN), tile.split)

    def split(t: int) -> tuple[Tensor, int]:
        products.sum_product[grid](rows, matrix, sums, t * B, B, N, K, tile.split, **_options(tile, plan.pdl))
        return sums, tile.split

    return split


def weight_gradients(saved: Saved, grads: Gradients) -> dict[str, Callable[[], Tensor]]:
    """Functions that make dW_zm and dW_mh in fp32, padded and packed; the larger comes first."""
    T, B, H = saved.h.shape[0] - 1, saved.h.shape[1], saved.h.shape[2]
    before = saved.h[:-1].view(T * B, H)
    dr = grads.dr.flatten(0, 1)
    if grads.dmx is None:
        return {"W_zm": lambda: product_fp32(dr.t(), before)}
    da, m = grads.da.view(T * B, H), saved.m.view(T * B, H)
    return {"W_zm": lambda: product_fp32(dr.t(), m), "W_mh": lambda: product_fp32(da.t(), before)}


def product_fp32(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of bf16 operands, summed and given in fp32."""
    if x.is_cuda:
        return torch.mm(x, y, out_dtype=torch.float32)
    return x.float() @ y.float()

"""The recurrence with its backward written out: no tape, and one product for each weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mulstm.ops.reference import State

_FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def why_not(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    state: State,
    mask: Tensor | None = None,
    px: Tensor | None = None,
    b_h: Tensor | None = None,
    unit: str = "standard",
) -> str | None:
    """None, or the reason why this backend cannot run the chunk."""
    if zx.device.type not in ("cpu", "cuda"):
        return f"it knows CPU and CUDA, and the tensors are on {zx.device}"
    if zx.dtype not in _FLOATS:
        return f"it knows float32, bfloat16 and float64, not {zx.dtype}"
    if mask is not None and mask.requires_grad:
        return "it gives no gradient for the mask"
    return None


def recurrence(
    mx: Tensor | None,  # (T, B, H)
    zx: Tensor,  # (T, B, 4H)
    W_mh: Tensor | None,  # (H, H)
    W_zm: Tensor,  # (4H, H)
    state: State,
    mask: Tensor | None = None,
    px: Tensor | None = None,  # (T, B, 4H)
    b_h: Tensor | None = None,
    unit: str = "standard",
) -> tuple[Tensor, State]:
    """All h of a chunk, (T, B, H), and the state after it."""
    inputs = (mx, zx, W_mh, W_zm, state.h, state.c, mask, px, b_h)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        h, c_T, *_ = _forward(*inputs, unit)
    elif torch.compiler.is_compiling():
        h, c_T = _infer(*inputs, unit)
    else:  # the dispatcher costs as much as a small step
        h, c_T = _run(*inputs, unit, None)
    return h, State(h[-1], c_T)


class _Saved:
    """What the backward wants, kept in whole-chunk buffers that the loop writes into."""

    def __init__(
        self, zx: Tensor, H: int, wide: torch.dtype, multiplicative: bool, px: Tensor | None
    ) -> None:
        T, B, width = zx.shape
        lstm = width > H
        self.gates = zx.to(wide, copy=True)  # (T, B, 4H)  starts as zx, ends as the activated blocks
        self.c = zx.new_empty((T, B, H) if lstm else 0, dtype=wide)
        self.a = zx.new_empty((T, B, H) if multiplicative else 0)  # W_mh h_{t-1}
        self.r = zx.new_empty(zx.shape if px is not None else 0)  # W_zm m_t


def _run(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
    saved: _Saved | None,
) -> tuple[Tensor, Tensor]:
    """h of all steps and the last c; fills `saved` when there is one, else works in one step's scratch."""
    T, B, width = zx.shape
    H = h_0.shape[1]
    h = zx.new_empty(T, B, H)
    c = c_0.clone() if saved is None else c_0
    z = zx.new_empty(B, width, dtype=c_0.dtype)
    a, m, r = zx.new_empty(B, H), zx.new_empty(B, H), zx.new_empty(B, width)
    u = zx.new_empty(B, H, dtype=c_0.dtype)
    h_prev = h_0
    for t in range(T):
        if saved is not None:
            z = saved.gates[t]
            a = saved.a[t] if W_mh is not None else a
            r = saved.r[t] if px is not None else r
        else:
            z.copy_(zx[t])
        if W_mh is None or mx is None:
            m = h_prev
        else:
            torch.mm(h_prev, W_mh.T, out=a)
            torch.mul(mx[t], a, out=m)
        if px is not None:
            torch.mm(m, W_zm.T, out=r)
            z.addcmul_(px[t].to(z.dtype), r.to(z.dtype))
        elif z.dtype == m.dtype:
            z.addmm_(m, W_zm.T)
        else:
            torch.mm(m, W_zm.T, out=r)
            z.add_(r)
        c_next = c if saved is None or unit == "tanh" else saved.c[t]
        _activate(z, c, c_next, u, b_h, unit)
        if mask is not None:
            u.mul_(mask)
        h_prev = h[t].copy_(u)
        c = c_next
    return h, c


def _activate(z: Tensor, c: Tensor, c_next: Tensor, u: Tensor, b_h: Tensor | None, unit: str) -> None:
    """z becomes its activated blocks, c_next (which may be c) the next cell, u the unmasked h."""
    if unit == "tanh":
        torch.tanh(z, out=z)
        u.copy_(z)
        return
    H = u.shape[1]
    z[:, H:].sigmoid_()
    h_hat, i, o, f = z.chunk(4, dim=1)
    if unit != "initial":
        h_hat.tanh_()
    torch.mul(f, c, out=c_next)
    c_next.addcmul_(i, h_hat)
    if unit == "standard":
        torch.tanh(c_next, out=u)
        u.mul_(o)
    else:
        torch.mul(o, c_next, out=u)
        if b_h is not None:
            u.add_(b_h)
        u.tanh_()


@torch.library.custom_op("mulstm::fused_infer", mutates_args=())
def _infer(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> tuple[Tensor, Tensor]:
    return _run(mx, zx, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit, None)


@_infer.register_fake
def _(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> tuple[Tensor, Tensor]:
    return zx.new_empty(zx.shape[0], zx.shape[1], h_0.shape[1]), torch.empty_like(c_0)


@torch.library.custom_op("mulstm::fused_forward", mutates_args=())
def _forward(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h, the last c, and what the backward wants: c, the activated blocks, W_mh h, W_zm m."""
    saved = _Saved(zx, h_0.shape[1], c_0.dtype, W_mh is not None, px)
    h, c_T = _run(mx, zx, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit, saved)
    return h, c_T.clone(), saved.c, saved.gates, saved.a, saved.r


@_forward.register_fake
def _(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, B, width = zx.shape
    H = h_0.shape[1]
    return (
        zx.new_empty(T, B, H),
        torch.empty_like(c_0),
        zx.new_empty((T, B, H) if unit != "tanh" else 0, dtype=c_0.dtype),
        zx.new_empty(T, B, width, dtype=c_0.dtype),
        zx.new_empty((T, B, H) if W_mh is not None else 0),
        zx.new_empty((T, B, width) if px is not None else 0),
    )


def _factors(
    gates: Tensor, c: Tensor, c_0: Tensor, mask: Tensor | None, b_h: Tensor | None, unit: str
) -> tuple[Tensor, Tensor, Tensor]:
    """For all steps at once: dz = D * (dc, dc, dh, dc), dc += A * dh, and dh / d(inside of the last tanh)."""
    if unit == "tanh":
        D = 1 - gates * gates
        D = D if mask is None else D.mul_(mask)
        return D, D, D
    H = c.shape[2]
    h_hat, i, o, _f = gates.chunk(4, dim=2)
    inner = c if unit == "standard" else (o * c if b_h is None else o * c + b_h)
    tanh = torch.tanh(inner)
    slope = 1 - tanh * tanh
    if mask is not None:
        slope.mul_(mask)
        tanh.mul_(mask)
    A = o * slope
    D = torch.empty_like(gates)
    D_hat, D_i, D_o, D_f = D.chunk(4, dim=2)
    torch.mul(gates[:, :, H:], 1 - gates[:, :, H:], out=D[:, :, H:])
    D_i.mul_(h_hat)
    D_o.mul_(tanh if unit == "standard" else slope * c)
    D_f[0].mul_(c_0)
    D_f[1:].mul_(c[:-1])
    if unit == "initial":
        D_hat.copy_(i)
    else:
        torch.mul(h_hat, h_hat, out=D_hat)
        D_hat.neg_().add_(1).mul_(i)
    return D, A, slope


@torch.library.custom_op("mulstm::fused_backward", mutates_args=())
def _backward(
    dh: Tensor,  # (T, B, H)
    dc_T: Tensor,  # (B, H)
    mx: Tensor | None,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
    h: Tensor,
    c: Tensor,
    gates: Tensor,
    a: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dmx, dzx, dW_mh, dW_zm, dh_0, dc_0, dpx, db_h; empty where the input is not there."""
    T, B, width = gates.shape
    H = h_0.shape[1]
    D, A, slope = _factors(gates, c, c_0, mask, b_h, unit)
    none = h_0.new_empty(0)
    dz = h_0.new_empty(T, B, width)
    dr = dz if px is None else torch.empty_like(dz)
    da = torch.empty_like(a)
    dm = torch.empty_like(a)
    db_h = none if b_h is None else torch.zeros_like(b_h)
    dc = dc_T.clone()
    dh_t = dh[T - 1].to(c_0.dtype, copy=True)
    for t in range(T - 1, -1, -1):
        if unit == "tanh":
            dz[t] = dh_t * D[t]
        else:
            dc.addcmul_(dh_t, A[t])
            step = D[t].view(B, 4, H) * dc.unsqueeze(1)
            torch.mul(D[t, :, 2 * H : 3 * H], dh_t, out=step[:, 2])
            dz[t] = step.view(B, width)
            dc.mul_(gates[t, :, 3 * H :])
        if b_h is not None:
            db_h += (dh_t * slope[t]).sum(0).to(db_h.dtype)
        if px is not None:
            torch.mul(dz[t], px[t], out=dr[t])
        if W_mh is None or mx is None:
            dh_t = torch.mm(dr[t], W_zm)
        else:
            torch.mm(dr[t], W_zm, out=dm[t])
            torch.mul(dm[t], mx[t], out=da[t])
            dh_t = torch.mm(da[t], W_mh)
        dh_t = dh_t.to(c_0.dtype)
        if t > 0:
            dh_t += dh[t - 1]
    h_prev = torch.cat([h_0.unsqueeze(0), h[:-1]]).view(T * B, H)
    if W_mh is None or mx is None:
        dmx, dW_mh, m = none, none.clone(), h_prev
    else:
        dmx, dW_mh, m = dm * a, da.view(T * B, H).T @ h_prev, (mx * a).view(T * B, H)
    dW_zm = dr.view(T * B, width).T @ m
    dpx = none.clone() if px is None else dz * r
    return dmx, dz, dW_mh, dW_zm, dh_t.to(h_0.dtype), dc, dpx, db_h.clone() if b_h is None else db_h


@_backward.register_fake
def _(
    dh: Tensor,
    dc_T: Tensor,
    mx: Tensor | None,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
    h: Tensor,
    c: Tensor,
    gates: Tensor,
    a: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(x: Tensor | None) -> Tensor:
        return h_0.new_empty(0) if x is None else torch.empty_like(x)

    dzx = h_0.new_empty(gates.shape)
    return like(mx), dzx, like(W_mh), like(W_zm), like(h_0), like(c_0), like(px), like(b_h)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mx, _zx, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit = inputs
    h, _c_T, c, gates, a, r = output
    ctx.save_for_backward(mx, W_mh, W_zm, h_0, c_0, mask, px, b_h, h, c, gates, a, r)
    ctx.unit = unit
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh: Tensor | None, dc_T: Tensor | None, *_saved: Tensor | None) -> tuple[Any, ...]:
    mx, W_mh, W_zm, h_0, c_0, mask, px, b_h, h, c, gates, a, r = ctx.saved_tensors
    dh = torch.zeros_like(h) if dh is None else dh
    dc_T = torch.zeros_like(c_0) if dc_T is None else dc_T
    dmx, dzx, dW_mh, dW_zm, dh_0, dc_0, dpx, db_h = _backward(
        dh, dc_T, mx, W_mh, W_zm, h_0, c_0, mask, px, b_h, ctx.unit, h, c, gates, a, r
    )
    if mx is None:
        dmx = dW_mh = None
    return (
        dmx,
        dzx,
        dW_mh,
        dW_zm,
        dh_0,
        dc_0,
        None,
        dpx if px is not None else None,
        db_h if b_h is not None else None,
        None,
    )


_forward.register_autograd(_gradients, setup_context=_setup_context)

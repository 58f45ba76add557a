"""The two loops over a chunk's steps, forward and back, in few PyTorch calls and no fresh memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mulstm.ops.memory import empty
from mulstm.ops.products import product

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


class Inputs(NamedTuple):
    """What the recurrence is given, as the reference names it."""

    mx: Tensor | None
    zx: Tensor
    W_mh: Tensor | None
    W_zm: Tensor
    h_0: Tensor
    c_0: Tensor
    mask: Tensor | None
    px: Tensor | None
    b_h: Tensor | None
    unit: str


class Saved(NamedTuple):
    """What the backward wants. Everything after the GEMMs is in c's type: gates in bf16 lose their slopes."""

    gates: Tensor  # (T, B, 4H)  the activated blocks; empty for the tanh unit
    c: Tensor  # (T, B, H)
    tanh: Tensor  # (T, B, H)   the last tanh, before the output gate or the mask
    a: Tensor  # (T, B, H)   W_mh h_{t-1}; empty where m_t is h_{t-1}
    m: Tensor  # (T, B, H)
    r: Tensor  # (T, B, 4H)  W_zm m_t; empty without px


def saved_shapes(x: Inputs, steps: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each field of Saved, for so many steps."""
    B, Z, H, k = x.zx.shape[1], x.zx.shape[2], x.h_0.shape[1], steps
    none = (0,)
    gated, factored = x.unit != "tanh", x.W_mh is not None
    narrow, wide = x.zx.dtype, x.c_0.dtype
    return [
        ((k, B, Z) if gated else none, wide),
        ((k, B, H) if gated else none, wide),
        ((k, B, H), wide),
        ((k, B, H) if factored else none, narrow),
        ((k, B, H) if factored else none, narrow),
        ((k, B, Z) if x.px is not None else none, narrow),
    ]


def forward(x: Inputs, save: bool) -> tuple[Tensor, Tensor, Saved]:
    """h of all steps, the last c, and what was saved: of all steps, or without `save` one step's scratch."""
    T, B, H = x.zx.shape[0], x.zx.shape[1], x.h_0.shape[1]
    saved = Saved(*(empty(s, d, x.zx.device) for s, d in saved_shapes(x, T if save else 1)))
    h = empty((T, B, H), x.zx.dtype, x.zx.device)
    rows = _Rows(saved, T, H, save)
    by_W_mh = None if x.W_mh is None else product(x.W_mh, B, T)
    by_W_zm = product(x.W_zm, B, T)
    zx = x.zx.unbind(0)
    mx = () if x.mx is None else x.mx.unbind(0)
    px = () if x.px is None else x.px.unbind(0)
    same = x.zx.dtype == x.c_0.dtype
    m, c = x.h_0, x.c_0
    for t, h_t in enumerate(h.unbind(0)):
        if by_W_mh is not None:
            a = by_W_mh(m)
            if save:
                rows.a[t].copy_(a)
            m = torch.mul(mx[t], a, out=rows.m[t])
        if px:
            r = rows.r[t].copy_(by_W_zm(m))
            z = torch.addcmul(zx[t].to(c.dtype), px[t].to(c.dtype), r.to(c.dtype))
        elif same:
            z = by_W_zm.plus(m, zx[t])
        else:
            # r is small where zx holds the bias: added in float32, z keeps the digits its slopes need.
            z = zx[t].to(c.dtype).add_(by_W_zm(m))
        c = _activate(z, rows, t, c, h_t, x)
        if x.mask is not None:
            h_t.mul_(x.mask)
        m = h_t
    return h, c, saved


class _Rows:
    """The saved buffers step by step; without saving, every step is the same scratch."""

    def __init__(self, saved: Saved, T: int, H: int, save: bool) -> None:
        def steps(x: Tensor) -> tuple[Tensor, ...]:
            return x.unbind(0) if save else (x[0],) * T

        gated = saved.gates.numel() > 0
        self.tanh = steps(saved.tanh)
        self.a = steps(saved.a) if saved.a.numel() else ()
        self.m = steps(saved.m) if saved.m.numel() else ()
        self.r = steps(saved.r) if saved.r.numel() else ()
        self.c = steps(saved.c) if gated else ()
        if gated:
            h_hat, i, o, f = saved.gates.chunk(4, dim=2)
            self.h_hat, self.i, self.o, self.f = steps(h_hat), steps(i), steps(o), steps(f)
            self.sigmoids = steps(saved.gates[:, :, H:])


def _activate(z: Tensor, rows: _Rows, t: int, c: Tensor, h_t: Tensor, x: Inputs) -> Tensor:
    """From z to the unmasked h_t and the saved rows; gives the next c."""
    tanh = rows.tanh[t]
    if x.unit == "tanh":
        h_t.copy_(torch.tanh(z, out=tanh))
        return c
    H = tanh.shape[1]
    h_hat, i, o = rows.h_hat[t], rows.i[t], rows.o[t]
    torch.sigmoid(z[:, H:], out=rows.sigmoids[t])
    if x.unit == "initial":
        h_hat.copy_(z[:, :H])
    else:
        torch.tanh(z[:, :H], out=h_hat)
    c = torch.mul(rows.f[t], c, out=rows.c[t])
    c.addcmul_(i, h_hat)
    if x.unit == "standard":
        torch.tanh(c, out=tanh)
        torch.mul(tanh, o, out=h_t)
        return c
    torch.mul(o, c, out=tanh)
    if x.b_h is not None:
        tanh.add_(x.b_h)
    h_t.copy_(tanh.tanh_())
    return c


class Gradients(NamedTuple):
    """Of everything the recurrence is given; empty where it was not."""

    dmx: Tensor
    dzx: Tensor
    dW_mh: Tensor
    dW_zm: Tensor
    dh_0: Tensor
    dc_0: Tensor
    dpx: Tensor
    db_h: Tensor


def backward(dh: Tensor, dc_T: Tensor, x: Inputs, h: Tensor, saved: Saved) -> Gradients:
    """The loop from the last step to the first, then one product for each weight gradient."""
    T, B = h.shape[:2]
    narrow, wide, device = h.dtype, x.c_0.dtype, h.device
    back = _Back(x, saved, dc_T)
    dz = empty((T, B, x.W_zm.shape[0]), narrow, device)
    da, dmx = (empty(saved.a.shape, narrow, device) for _ in range(2))
    dr, dpx = (dz, saved.r) if x.px is None else (empty(dz.shape, narrow, device) for _ in range(2))
    to_m = product(x.W_zm.T, B, T)
    to_h = None if x.W_mh is None else product(x.W_mh.T, B, T)
    mx = () if x.mx is None else x.mx.unbind(0)
    dh_in = dh.contiguous().unbind(0)
    d = dh_in[T - 1].to(wide)
    for t in range(T - 1, -1, -1):
        back.step(t, d, dz[t])
        if x.px is not None:
            torch.mul(dz[t], x.px[t], out=dr[t])
            torch.mul(dz[t], saved.r[t], out=dpx[t])
        last, use = dr[t], to_m
        if to_h is not None:
            dm = to_m(last)
            torch.mul(dm, saved.a[t], out=dmx[t])
            last, use = torch.mul(dm, mx[t], out=da[t]), to_h
        if t == 0:
            d = use(last)
        elif narrow == wide:
            d = use.plus(last, dh_in[t - 1])
        else:
            d = use(last).to(wide).add_(dh_in[t - 1])
    dW_zm = _weight_gradient(dr, saved.m) if x.W_mh is not None else _weight_gradient(dr, h, x.h_0)
    dW_mh = h.new_empty(0) if x.W_mh is None else _weight_gradient(da, h, x.h_0)
    db_h = h.new_empty(0) if back.db_h is None or x.b_h is None else back.db_h.sum(0).to(x.b_h.dtype)
    return Gradients(dmx, dz, dW_mh, dW_zm, d.to(narrow), back.dc, dpx, db_h)


class _Back:
    """The pointwise part of a step back: dc carried along, dz written."""

    def __init__(self, x: Inputs, saved: Saved, dc_T: Tensor) -> None:
        self.unit, self.mask = x.unit, x.mask
        self.dc = dc_T.clone()
        self.tanh = saved.tanh.unbind(0)
        self.db_h: Tensor | None = None
        if x.unit == "tanh":
            return
        B, H = x.h_0.shape
        self.c = (x.c_0, *saved.c.unbind(0))
        self.gates = saved.gates.view(-1, B, 4, H)
        self.q = torch.empty(B, 4, H, dtype=self.dc.dtype, device=self.dc.device)
        self.e = torch.empty_like(self.dc)
        self.db_h = None if x.b_h is None else torch.zeros_like(self.dc)

    def step(self, t: int, d: Tensor, dz_t: Tensor) -> None:
        """d is the gradient of h_t."""
        if self.mask is not None:
            d = d * self.mask
        if self.unit == "tanh":
            dz_t.copy_(torch.ops.aten.tanh_backward(d, self.tanh[t]))
            return
        dc, e, c_t, c_prev, tanh = self.dc, self.e, self.c[t + 1], self.c[t], self.tanh[t]
        gates = self.gates[t]
        h_hat, i, o, f = gates.unbind(1)
        q_hat, q_i, q_o, q_f = self.q.unbind(1)
        if self.unit == "standard":
            torch.mul(d, o, out=e)
            _tanh_backward(e, tanh, grad_input=e)
            dc.add_(e)
            torch.mul(d, tanh, out=q_o)
        else:
            _tanh_backward(d, tanh, grad_input=e)
            if self.db_h is not None:
                self.db_h.add_(e)
            dc.addcmul_(e, o)
            torch.mul(e, c_t, out=q_o)
        torch.mul(dc, i, out=q_hat)
        torch.mul(dc, h_hat, out=q_i)
        torch.mul(dc, c_prev, out=q_f)
        out = dz_t.view(gates.shape) if dz_t.dtype == dc.dtype else self.q
        _sigmoid_backward(self.q[:, 1:], gates[:, 1:], grad_input=out[:, 1:])
        if self.unit != "initial":
            _tanh_backward(q_hat, h_hat, grad_input=out[:, 0])
        elif out is not self.q:
            out[:, 0].copy_(q_hat)
        if out is self.q:
            dz_t.copy_(self.q.view(dz_t.shape))
        dc.mul_(f)


def _weight_gradient(dy: Tensor, x: Tensor, x_0: Tensor | None = None) -> Tensor:
    """dW of y = x W^T over all steps; with x_0, of y_t = x_{t-1} W^T."""
    if x_0 is None:
        return dy.flatten(0, 1).T @ x.flatten(0, 1)
    first = dy[0].T @ x_0
    return first if len(dy) == 1 else torch.addmm(first, dy[1:].flatten(0, 1).T, x[:-1].flatten(0, 1))

"""The two loops over a chunk's steps, forward and back, in few PyTorch calls and no fresh memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mulstm.ops.memory import empty
from mulstm.ops.products import gradient, product

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
# As tensors: PyTorch would make one of a number at every call.
_TWO, _MINUS_ONE = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in (2.0, -1.0))


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
    """What the backward wants. What comes after the products is in c's type: bf16 gates lose their slopes."""

    gates: Tensor  # (T, B, 4H)  the activated blocks; empty for the tanh unit
    c: Tensor  # (T, B, H)
    tanh: Tensor  # (T, B, H)   the last tanh, before the output gate or the mask
    a: Tensor  # (T, B, H)   W_mh h_{t-1}; empty where m_t is h_{t-1}
    m: Tensor  # (T, B, H)   empty likewise
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


def quick(x: Tensor) -> bool:
    """Whether tanh x is better had as 2 sigmoid(2x) - 1: in float32 on a CPU PyTorch's sigmoid is six times
    as fast as its tanh. The absolute error is that of the sigmoid, about 1e-7."""
    return x.dtype == torch.float32 and x.device.type == "cpu"


def tanh(x: Tensor, out: Tensor) -> Tensor:
    """tanh x, which may be out."""
    if not quick(x):
        return torch.tanh(x, out=out)
    torch.mul(x, _TWO, out=out)
    return torch.add(_MINUS_ONE, out.sigmoid_(), alpha=2, out=out)


def forward(x: Inputs, save: bool) -> tuple[Tensor, Tensor, Saved]:
    """h of all steps, the last c, and what was saved: of all steps, or without `save` one step's scratch."""
    T, B, H = x.zx.shape[0], x.zx.shape[1], x.h_0.shape[1]
    saved = Saved(*(empty(s, d, x.zx.device) for s, d in saved_shapes(x, T if save else 1)))
    h = empty((T, B, H), x.zx.dtype, x.zx.device)
    step = _Forward(x, saved, T, save)
    by_W_mh = None if x.W_mh is None else product(x.W_mh, B, T)
    by_W_zm = product(x.W_zm, B, T)
    zx, px, mx = x.zx.unbind(0), _unbind(x.px), _unbind(x.mx)
    a_kept, m_kept, r_kept = (step.rows(v) for v in (saved.a, saved.m, saved.r))
    same, wide = x.zx.dtype == x.c_0.dtype, x.c_0.dtype
    m, c = x.h_0, x.c_0
    for t, h_t in enumerate(h.unbind(0)):
        if by_W_mh is not None:
            a = by_W_mh(m)
            if save:
                a_kept[t].copy_(a)
            m = torch.mul(mx[t], a, out=m_kept[t])
        if px:
            r = r_kept[t].copy_(by_W_zm(m))
            z = torch.addcmul(zx[t].to(wide), px[t].to(wide), r.to(wide))
        elif same:
            z = by_W_zm.plus(m, zx[t])
        else:
            # r is small where zx holds the bias: added in float32, z keeps the digits its slopes need.
            z = zx[t].to(wide).add_(by_W_zm(m))
        c = step(t, z, c, h_t)
        m = h_t
    return h, c, saved


def _unbind(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else x.unbind(0)


class _Forward:
    """The pointwise part of a step: from z and c to the unmasked and then the masked h."""

    def __init__(self, x: Inputs, saved: Saved, T: int, save: bool) -> None:
        self.unit, self.mask, self.b_h, self.H = x.unit, x.mask, x.b_h, x.h_0.shape[1]
        self.T, self.save = T, save
        self.tanh = self.rows(saved.tanh)
        if x.unit != "tanh":
            self.gates = self.rows(saved.gates)
            self.h_hat, self.i, self.o, self.f = (self.rows(v) for v in saved.gates.chunk(4, dim=2))
            self.sigmoids = self.rows(saved.gates[:, :, self.H :])
            self.c = self.rows(saved.c)

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """A buffer step by step; without saving, every step is the same scratch."""
        if x.shape[0] == 0:
            return ()
        return x.unbind(0) if self.save else (x[0],) * self.T

    def __call__(self, t: int, z: Tensor, c: Tensor, h_t: Tensor) -> Tensor:
        """Writes h_t and the rows saved; gives the next c."""
        last = self.tanh[t]
        if self.unit == "tanh":
            h_t.copy_(tanh(z, last))
        else:
            h_hat, o = self.h_hat[t], self.o[t]
            self._gates(t, z)
            c = torch.mul(self.f[t], c, out=self.c[t])
            c.addcmul_(self.i[t], h_hat)
            if self.unit == "standard":
                torch.mul(tanh(c, last), o, out=h_t)
            else:
                torch.mul(o, c, out=last)
                if self.b_h is not None:
                    last.add_(self.b_h)
                h_t.copy_(tanh(last, last))
        if self.mask is not None:
            h_t.mul_(self.mask)
        return c

    def _gates(self, t: int, z: Tensor) -> None:
        H, h_hat = self.H, self.h_hat[t]
        if self.unit != "initial" and quick(z):  # one sigmoid for all four, as tanh() above has it
            z[:, :H].mul_(_TWO)
            torch.sigmoid(z, out=self.gates[t])
            torch.add(_MINUS_ONE, h_hat, alpha=2, out=h_hat)
            return
        torch.sigmoid(z[:, H:], out=self.sigmoids[t])
        if self.unit == "initial":
            h_hat.copy_(z[:, :H])
        else:
            tanh(z[:, :H], h_hat)


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
    T, B = dh.shape[:2]
    narrow, wide, device = x.h_0.dtype, x.c_0.dtype, dh.device
    none = dh.new_empty(0)
    dz = empty((T, B, x.W_zm.shape[0]), narrow, device)
    da, dmx = (empty(saved.a.shape, narrow, device) for _ in range(2))
    dr, dpx = (dz, none) if x.px is None else (empty(dz.shape, narrow, device) for _ in range(2))
    step = _Backward(x, saved, dc_T, dz)
    to_m = product(x.W_zm.T, B, T)
    to_h = None if x.W_mh is None else product(x.W_mh.T, B, T)
    mx, px, a, r, dzs = _unbind(x.mx), _unbind(x.px), saved.a.unbind(0), saved.r.unbind(0), dz.unbind(0)
    das, dmxs, drs, dpxs = da.unbind(0), dmx.unbind(0), dr.unbind(0), dpx.unbind(0)
    dhs = dh.contiguous().unbind(0)
    d = dhs[T - 1].to(wide)
    for t in range(T - 1, -1, -1):
        step(t, d)
        if px:
            torch.mul(dzs[t], px[t], out=drs[t])
            torch.mul(dzs[t], r[t], out=dpxs[t])
        last, use = drs[t], to_m
        if to_h is not None:
            dm = to_m(last)
            torch.mul(dm, a[t], out=dmxs[t])
            last, use = torch.mul(dm, mx[t], out=das[t]), to_h
        if t == 0:
            d = use(last)
        elif narrow == wide:
            d = use.plus(last, dhs[t - 1])
        else:
            d = use(last).to(wide).add_(dhs[t - 1])
    if x.W_mh is None:
        dW_mh, dW_zm = none.clone(), of_previous(dr, h, x.h_0)
    else:
        dW_mh, dW_zm = of_previous(da, h, x.h_0), weight_gradient(dr, saved.m)
    db_h = none.clone() if step.db_h is None or x.b_h is None else step.db_h.sum(0).to(x.b_h.dtype)
    return Gradients(dmx, dz, dW_mh, dW_zm, d.to(narrow), step.dc, dpx, db_h)


class _Backward:
    """The pointwise part of a step back: dc carried along, dz written."""

    def __init__(self, x: Inputs, saved: Saved, dc_T: Tensor, dz: Tensor) -> None:
        self.unit, self.mask = x.unit, x.mask
        self.dc = dc_T.clone()
        self.tanh = saved.tanh.unbind(0)
        self.dz = dz.unbind(0)
        self.db_h: Tensor | None = None
        if x.unit == "tanh":
            return
        T, (B, H), wide = len(dz), x.h_0.shape, self.dc.dtype
        self.c = (x.c_0, *saved.c.unbind(0))
        self.h_hat, self.i, self.o, self.f = (v.unbind(0) for v in saved.gates.chunk(4, dim=2))
        self.sigmoids = saved.gates[:, :, H:].unbind(0)
        self.q = torch.empty(B, 4 * H, dtype=wide, device=dz.device)
        self.q_hat, self.q_i, self.q_o, self.q_f = self.q.chunk(4, dim=1)
        self.q_sigmoids = self.q[:, H:]
        self.e = torch.empty(B, H, dtype=wide, device=dz.device)
        self.narrow = dz.dtype != wide
        self.dz_hat = (self.q_hat,) * T if self.narrow else dz[:, :, :H].unbind(0)
        self.dz_sigmoids = (self.q_sigmoids,) * T if self.narrow else dz[:, :, H:].unbind(0)
        self.db_h = None if x.b_h is None else torch.zeros(B, H, dtype=wide, device=dz.device)

    def __call__(self, t: int, d: Tensor) -> None:
        """d is the gradient of h_t."""
        if self.mask is not None:
            d = d * self.mask
        last = self.tanh[t]
        if self.unit == "tanh":
            self.dz[t].copy_(torch.ops.aten.tanh_backward(d, last))
            return
        dc, e, o, h_hat = self.dc, self.e, self.o[t], self.h_hat[t]
        if self.unit == "standard":
            torch.mul(d, o, out=e)
            dc.add_(_tanh_backward(e, last, grad_input=e))
            torch.mul(d, last, out=self.q_o)
        else:
            _tanh_backward(d, last, grad_input=e)
            if self.db_h is not None:
                self.db_h.add_(e)
            dc.addcmul_(e, o)
            torch.mul(e, self.c[t + 1], out=self.q_o)
        torch.mul(dc, h_hat, out=self.q_i)
        torch.mul(dc, self.c[t], out=self.q_f)
        _sigmoid_backward(self.q_sigmoids, self.sigmoids[t], grad_input=self.dz_sigmoids[t])
        if self.unit == "initial":
            torch.mul(dc, self.i[t], out=self.dz_hat[t])
        else:
            torch.mul(dc, self.i[t], out=e)
            _tanh_backward(e, h_hat, grad_input=self.dz_hat[t])
        if self.narrow:
            self.dz[t].copy_(self.q)
        dc.mul_(self.f[t])


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW of y = x W^T over all steps."""
    return gradient(dy.flatten(0, 1), x.flatten(0, 1))


def of_previous(dy: Tensor, h: Tensor, h_0: Tensor) -> Tensor:
    """dW of y_t = h_{t-1} W^T."""
    if len(dy) == 1:
        return dy[0].T @ h_0
    return weight_gradient(dy[1:], h[:-1]).addmm_(dy[0].T, h_0)

"""The two loops over a chunk's steps on a CPU: products, and between them one pass over memory each."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mulstm.ops import native
from mulstm.ops.fused_loops import Gradients, Inputs, Saved, of_previous, saved_shapes, weight_gradient
from mulstm.ops.memory import empty
from mulstm.ops.products import Step, step_product
from mulstm.ops.reference import GATES, blocks

if TYPE_CHECKING:
    from mulstm.ops.vector import Code, Place, V

SHARED_FROM = 1 << 12  # numbers in one h, from which a second thread is worth waking
_H_HAT, _I, _O, _F = range(len(GATES))
# In the type of the products' operands; the others are float32.
_NARROW = ("mx", "a", "m", "zx", "px", "r", "h", "dh", "dz", "dr", "dpx", "dmx", "da")
_STACKED = ("Wm", "zx", "px", "r", "gates", "dz", "dr", "dpx")  # as wide as z


def why_not(x: Inputs) -> str | None:
    """None, or why the chunk is left to PyTorch's own pointwise calls."""
    if x.zx.device.type != "cpu":
        return f"it is for a CPU, and the tensors are on {x.zx.device}"
    if x.zx.dtype == torch.float64 or x.c_0.dtype != torch.float32:
        return "it is for float32 and bfloat16"
    return native.unavailable()


# The formulas. Which operands there are says which terms a formula has.


def _factor(at: Place) -> None:
    """m = mx a, with a = W_mh h."""
    a = at.get("Wh")
    at.put("m", at.get("mx") * a)
    if "a" in at:
        at.put("a", a)


def _z(at: Place, block: int) -> V:
    r = at.get("Wm", block)
    if "px" not in at:
        return at.get("zx", block) + r
    if "r" in at:
        at.put("r", r, block)
    return r.times(at.get("px", block), at.get("zx", block))


def _finish(at: Place, unit: str) -> None:
    """From the products to the next state; the activated gates are kept."""
    from mulstm.ops.vector import sigmoid, tanh

    if unit == "tanh":
        last = h = tanh(_z(at, 0))
    else:
        h_hat = _z(at, _H_HAT)
        i, o, f = (sigmoid(_z(at, block)) for block in (_I, _O, _F))
        h_hat = h_hat if unit == "initial" else tanh(h_hat)
        c = f.times(at.get("c_before"), i * h_hat)
        inner = o.times(c, at.get("b_h")) if "b_h" in at else o * c
        last = tanh(c if unit == "standard" else inner)
        h = last * o if unit == "standard" else last
        for block, gate in ((_H_HAT, h_hat), (_I, i), (_O, o), (_F, f)):
            if "gates" in at:
                at.put("gates", gate, block)
        at.put("c", c)
    if "tanh" in at:
        at.put("tanh", last)
    at.put("h", h * at.get("mask") if "mask" in at else h)


def _begin(at: Place, unit: str) -> None:
    """From the gradient of h to that of z; dc is carried along."""
    d = at.get("Wda") + at.get("dh")
    d = d * at.get("mask") if "mask" in at else d
    last = at.get("tanh")
    slope = 1.0 - last * last
    if unit == "tanh":
        _put_dz(at, d * slope, 0)
        return
    h_hat, i, o, f = (at.get("gates", block) for block in (_H_HAT, _I, _O, _F))
    if unit == "standard":
        dc = (d * o).times(slope, at.get("dc"))
        do = d * last
    else:
        e = d * slope
        if "db_h" in at:
            at.put("db_h", at.get("db_h") + e)
        dc = e.times(o, at.get("dc"))
        do = e * at.get("c")
    dh_hat = dc * i
    _put_dz(at, dh_hat if unit == "initial" else dh_hat * (1.0 - h_hat * h_hat), _H_HAT)
    _put_dz(at, dc * h_hat * (i * (1.0 - i)), _I)
    _put_dz(at, do * (o * (1.0 - o)), _O)
    _put_dz(at, dc * at.get("c_before") * (f * (1.0 - f)), _F)
    at.put("dc", dc * f)


def _put_dz(at: Place, dz: V, block: int) -> None:
    at.put("dz", dz, block)
    if "px" in at:
        at.put("dr", dz * at.get("px", block), block)
        at.put("dpx", dz * at.get("r", block), block)


def _unfactor(at: Place) -> None:
    """From the gradient of m to those of its factors."""
    dm = at.get("Wdr")
    at.put("dmx", dm * at.get("a"))
    at.put("da", dm * at.get("mx"))


@functools.cache
def _code(part: str, unit: str, narrow: tuple[str, ...], names: tuple[str, ...], product: Any) -> Code:
    """Of one formula; after a product of that kind, where one is given."""
    from mulstm.ops.vector import Operand, kernel

    formulas: dict[str, Any] = {
        "factor": _factor,
        "finish": functools.partial(_finish, unit=unit),
        "begin": functools.partial(_begin, unit=unit),
        "unfactor": _unfactor,
    }
    operands = {
        name: Operand(blocks(unit) if name in _STACKED else 1, name in narrow, name == "b_h")
        for name in names
    }
    if product is None:
        return kernel(formulas[part], operands)
    code: Code = native.products().followed(product, formulas[part], operands)
    return code


class _Steps:
    """A product and the formula after it, with the addresses of all operands step by step."""

    def __init__(self, part: str, x: Inputs, first: str, by: Step, rest: dict[str, Iterable[int]]) -> None:
        narrow: tuple[str, ...] = _NARROW if x.h_0.dtype == torch.bfloat16 else ()
        narrow += (first,) if by.dtype == torch.bfloat16 else ()
        self.by, self.size = by, tuple(x.h_0.shape)
        self.rows = zip(*rest.values(), strict=False)
        self.code = functools.partial(_code, part, x.unit, narrow, (first, *rest))
        B, H = self.size
        self.threads = torch.get_num_threads() if B * H >= SHARED_FROM else 1
        self.both: Code | None = None
        if isinstance(by, native.products().StepProduct):
            self.both = self.code(by.kind)
            self.given = (*by.rest, *self.size, by.y.data_ptr())
            self.threads = max(self.threads, by.threads)

    def __call__(self, x: Tensor) -> None:
        """The next step: what is made of the product with x."""
        if self.both is None:
            self.finish(self.by(x))
        else:
            self.both(self.threads, x.data_ptr(), *self.given, *next(self.rows))

    def finish(self, product: Tensor) -> None:
        """The next step, from the product itself."""
        self.code(None)(self.threads, *self.size, product.data_ptr(), *next(self.rows))


def _rows(x: Tensor) -> list[int]:
    """The address of each step of x, (T, ...)."""
    first, size = x.data_ptr(), x.stride(0) * x.element_size()
    return [first + t * size for t in range(x.shape[0])]


def _always(x: Tensor) -> Iterable[int]:
    return repeat(x.data_ptr())


def _in_line(x: Inputs) -> Inputs:
    """The same, as the kernels read it."""

    def row(v: Tensor | None) -> Tensor | None:
        return None if v is None else v.contiguous()

    def wide(v: Tensor | None) -> Tensor | None:
        return None if v is None else v.float().contiguous()

    mx, px, mask, b_h = row(x.mx), row(x.px), wide(x.mask), wide(x.b_h)
    zx, h_0, c_0 = x.zx.contiguous(), x.h_0.contiguous(), x.c_0.contiguous()
    return x._replace(mx=mx, zx=zx, h_0=h_0, c_0=c_0, mask=mask, px=px, b_h=b_h)


def forward(x: Inputs, save: bool) -> tuple[Tensor, Tensor, Saved]:
    """h of all steps, the last c, and what was saved: without `save` one step's scratch."""
    x = _in_line(x)
    T, B, H = x.zx.shape[0], *x.h_0.shape
    saved = Saved(*(empty(s, d, x.zx.device) for s, d in saved_shapes(x, T if save else 1)))
    h = empty((T, B, H), x.zx.dtype, x.zx.device)
    rows = _rows if save else _always
    finish = _Steps("finish", x, "Wm", step_product(x.W_zm, B, T), _finish_rows(x, save, h, saved))
    if x.W_mh is not None and x.mx is not None:
        kept: dict[str, Iterable[int]] = {"mx": _rows(x.mx), "m": rows(saved.m)}
        kept |= {"a": rows(saved.a)} if save else {}
        factor = _Steps("factor", x, "Wh", step_product(x.W_mh, B, T), kept)
        ms = saved.m.unbind(0) if save else (saved.m[0],) * T
    m = x.h_0
    for t, h_t in enumerate(h.unbind(0)):
        if x.mx is not None:
            factor(m)
            m = ms[t]
        finish(m)
        m = h_t
    return h, x.c_0 if x.unit == "tanh" else saved.c[-1], saved


def _finish_rows(x: Inputs, save: bool, h: Tensor, saved: Saved) -> dict[str, Iterable[int]]:
    rows = _rows if save else _always
    found: dict[str, Iterable[int]] = {"zx": _rows(x.zx), "h": _rows(h)}
    if x.unit != "tanh":
        found |= {"c_before": chain(_rows(x.c_0[None]), rows(saved.c)), "c": rows(saved.c)}
        found |= {"gates": rows(saved.gates)} if save else {}
    if x.px is not None:
        found |= {"px": _rows(x.px)} | ({"r": rows(saved.r)} if save else {})
    if save:
        found["tanh"] = rows(saved.tanh)
    if x.mask is not None:
        found["mask"] = _always(x.mask)
    if x.b_h is not None:
        found["b_h"] = _always(x.b_h)
    return found


def backward(dh: Tensor, dc_T: Tensor, x: Inputs, h: Tensor, saved: Saved) -> Gradients:
    """The loop from the last step to the first, then one product for each weight gradient."""
    given, x, dh, h = x, _in_line(x), dh.contiguous(), h.contiguous()
    saved = Saved(*(v.contiguous() for v in saved))  # hooks of autograd may have kept them in another order
    T, B, H = dh.shape
    device, narrow, none = dh.device, x.h_0.dtype, dh.new_empty(0)
    dz = empty((T, B, x.W_zm.shape[0]), narrow, device)
    da, dmx = (empty(saved.a.shape, narrow, device) for _ in range(2))
    dr, dpx = (dz, none) if x.px is None else (empty(dz.shape, narrow, device) for _ in range(2))
    dc = dc_T.clone(memory_format=torch.contiguous_format)
    db_h = none.clone() if x.b_h is None else torch.zeros(B, H, dtype=torch.float32, device=device)
    to_m = to_h = step_product(x.W_zm.T, B, T)
    if x.W_mh is not None and x.mx is not None:
        to_h = step_product(x.W_mh.T, B, T)
        back = {"a": saved.a, "mx": x.mx, "dmx": dmx, "da": da}
        unfactor = _Steps("unfactor", x, "Wdr", to_m, {name: _rows(v)[::-1] for name, v in back.items()})
    begin = _Steps("begin", x, "Wda", to_h, _begin_rows(x, saved, dh, dz, dr, dpx, dc, db_h))
    drs, lasts = dr.unbind(0), (dr if x.W_mh is None else da).unbind(0)
    begin.finish(torch.zeros(B, H, dtype=to_h.dtype, device=device))
    for t in range(T - 1, -1, -1):
        if x.W_mh is not None:
            unfactor(drs[t])
        if t > 0:
            begin(lasts[t])
    d = to_h(lasts[0])
    if x.W_mh is None:
        dW_mh, dW_zm = none.clone(), of_previous(dr, h, x.h_0)
    else:
        dW_mh, dW_zm = of_previous(da, h, x.h_0), weight_gradient(dr, saved.m)
    if given.b_h is not None:
        db_h = db_h.sum(0).to(given.b_h.dtype)
    return Gradients(dmx, dz, dW_mh, dW_zm, d.to(narrow), dc, dpx, db_h)


def _begin_rows(
    x: Inputs, saved: Saved, dh: Tensor, dz: Tensor, dr: Tensor, dpx: Tensor, dc: Tensor, db_h: Tensor
) -> dict[str, Iterable[int]]:
    found: dict[str, Iterable[int]] = {"dh": _rows(dh)[::-1], "tanh": _rows(saved.tanh)[::-1]}
    found["dz"] = _rows(dz)[::-1]
    if x.unit != "tanh":
        c = _rows(saved.c)
        found |= {"gates": _rows(saved.gates)[::-1], "dc": _always(dc)}
        found["c_before"] = chain(c[-2::-1], _rows(x.c_0[None]))
        if x.unit != "standard":
            found["c"] = c[::-1]
    if x.px is not None:
        found |= {"px": _rows(x.px)[::-1], "r": _rows(saved.r)[::-1]}
        found |= {"dr": _rows(dr)[::-1], "dpx": _rows(dpx)[::-1]}
    if x.mask is not None:
        found["mask"] = _always(x.mask)
    if x.b_h is not None:
        found["db_h"] = _always(db_h)
    return found

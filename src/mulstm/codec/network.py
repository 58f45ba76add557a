"""The integer network at work, in whole numbers only: the same tables on every device, in any batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mulstm.codec.integer import ACT_BITS, ACT_MOST, SHIFT, IntegerLayer, IntegerModel
from mulstm.codec.products import Product, choose, planes
from mulstm.codec.tables import (
    EXP_END,
    GATE_BITS,
    SIGMOID_END,
    TANH_END,
    TOTAL_BITS,
    Z_BITS,
    tables,
)

HALF = 1 << (SHIFT - 1)
C_BITS = 16  # c counts 2**-16
C_MOST = (1 << 31) - 1
PX_BITS = 12  # MI-LSTM's factor counts 2**-12
ESCAPE_BITS = 22  # how likely an escape is, counting 2**-22
_RATIO_BITS = 31


@dataclass
class IntegerState:
    """What one layer remembers of B lanes."""

    h: Tensor  # (2, B, H) int8: the two planes of h
    c: Tensor  # (B, H) int64


class _Layer:
    """One layer's arrays on the device, tables already shifted to where they are added."""

    def __init__(self, layer: IntegerLayer, device: torch.device, products: str) -> None:
        def wide(array: object) -> Tensor | None:
            return None if array is None else torch.as_tensor(array).to(device, torch.int64)

        def product(W: object) -> Product | None:
            return None if W is None else choose(torch.as_tensor(W), device, products)

        zx = wide(layer.zx)
        assert zx is not None
        # The rounding half goes with the table: the sum then needs one shift and nothing else.
        self.zx = (zx << SHIFT) + HALF
        self.W_zm, self.R_zm = product(layer.W_zm), wide(layer.R_zm)
        self.W_zl, self.R_zl = product(layer.W_zl), wide(layer.R_zl)
        self.W_mh = product(layer.W_mh)
        self.W_ml, self.R_ml = product(layer.W_ml), wide(layer.R_ml)
        self.mx, self.e_m = wide(layer.mx), wide(layer.e_m)
        self.px, self.b_h = wide(layer.px), wide(layer.b_h)
        if self.mx is not None and self.e_m is not None and self.W_ml is None:
            self.mx = self.mx << self.e_m


class Network:
    """Steps and tables of an integer model on one device.

    `products`: how integer matrices are multiplied, "auto", or a name of `products.KINDS`; all give the same.
    """

    def __init__(
        self, model: IntegerModel, device: str | torch.device = "cpu", products: str = "auto"
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self.layers = [_Layer(layer, self.device, products) for layer in model.layers]
        self.W_out = choose(torch.as_tensor(model.W_out), self.device, products)
        self.R_out = torch.as_tensor(model.R_out).to(self.device, torch.int64)
        self.b_out = (torch.as_tensor(model.b_out).to(self.device, torch.int64) << SHIFT) + HALF
        curve = tables()
        self._sigmoid = torch.tensor(curve.sigmoid, device=self.device)
        self._tanh = torch.tensor(curve.tanh, device=self.device)
        # One entry more, of weight zero, for all that is too unlikely to be told apart.
        self._exp = torch.cat([torch.tensor(curve.exp), torch.zeros(1, dtype=torch.int32)]).to(self.device)

    def start(self, B: int) -> list[IntegerState]:
        """The state before the first symbol: zero."""
        H = self.model.hidden
        return [
            IntegerState(
                torch.zeros(2, B, H, dtype=torch.int8, device=self.device),
                torch.zeros(B, H, dtype=torch.int64, device=self.device),
            )
            for _ in self.layers
        ]

    def step(self, x: Tensor, state: list[IntegerState]) -> list[IntegerState]:
        """The state after the symbols x (B)."""
        after: list[IntegerState] = []
        for k, (layer, prev) in enumerate(zip(self.layers, state, strict=True)):
            row = x if k == 0 or self.model.skip else torch.zeros_like(x)
            after.append(self._layer_step(layer, row, after[-1].h if after else None, prev))
        return after

    def _layer_step(self, w: _Layer, x: Tensor, low: Tensor | None, prev: IntegerState) -> IntegerState:
        m = prev.h if w.W_mh is None else planes(self.factor(w, x, low, prev.h))
        z = w.zx.index_select(0, x)
        assert w.W_zm is not None and w.R_zm is not None
        r = w.W_zm(m).to(torch.int64).mul_(w.R_zm)
        if w.px is not None:
            r = (r + HALF) >> SHIFT
            r = r.mul_(w.px.index_select(0, x)) << (SHIFT - PX_BITS)
        z += r
        if w.W_zl is not None and w.R_zl is not None and low is not None:
            z += w.W_zl(low).to(torch.int64).mul_(w.R_zl)
        z >>= SHIFT
        return self._finish(z, prev.c, w.b_h)

    def factor(self, w: _Layer, x: Tensor, low: Tensor | None, h: Tensor) -> Tensor:
        """m_t = mx_t a_t, (B, H), each unit counting what its calibration gave."""
        assert w.W_mh is not None and w.mx is not None
        p = w.mx.index_select(0, x)
        if w.W_ml is not None and w.R_ml is not None and w.e_m is not None and low is not None:
            p += (w.W_ml(low).to(torch.int64).mul_(w.R_ml) + HALF) >> SHIFT
            p = p.clamp_(-32767, 32767) << w.e_m
        m = p.mul_(w.W_mh(h)).add_(HALF)
        m >>= SHIFT
        return m.clamp_(-ACT_MOST, ACT_MOST)

    def _finish(self, z: Tensor, c_prev: Tensor, b_h: Tensor | None) -> IntegerState:
        H, unit = self.model.hidden, self.model.unit
        if unit == "tanh":
            h = _round(self._tanh_of(z), GATE_BITS - ACT_BITS)
            return IntegerState(planes(h.clamp_(-ACT_MOST, ACT_MOST)), c_prev)
        gates = _take(self._sigmoid, z[:, H:], SIGMOID_END)
        i, o, f = gates[:, :H], gates[:, H : 2 * H], gates[:, 2 * H :]
        candidate = z[:, :H] << (GATE_BITS - Z_BITS) if unit == "initial" else self._tanh_of(z[:, :H])
        c = _round(f * c_prev + i * candidate, GATE_BITS).clamp_(-C_MOST, C_MOST)
        if unit == "standard":
            h = _round(o * self._tanh_of(c >> (C_BITS - Z_BITS)), 2 * GATE_BITS - ACT_BITS)
        else:
            inner = _round(o * c, GATE_BITS)
            inner = inner if b_h is None else inner + b_h
            h = _round(self._tanh_of(inner >> (C_BITS - Z_BITS)), GATE_BITS - ACT_BITS)
        return IntegerState(planes(h.clamp_(-ACT_MOST, ACT_MOST)), c)

    def _tanh_of(self, z: Tensor) -> Tensor:
        return _take(self._tanh, z, TANH_END)

    def output(self, state: list[IntegerState]) -> Tensor:
        """What the output layer sees, (2, B, H)."""
        return torch.cat([s.h for s in state], dim=-1) if self.model.skip else state[-1].h

    def shares(self, h: Tensor, escape: Tensor | None = None) -> Tensor:
        """Where each symbol's share begins, (B, entries + 1) int32, from 0 to 2**24.

        `h` comes from `output`, of any number of lanes or steps. With `escape` (B) int64, counting 2**-22,
        there is one entry more, after the symbols.
        """
        N = self.model.alphabet.size
        entries = N if escape is None else N + 1
        logits = (self.W_out(h).to(torch.int64).mul_(self.R_out).add_(self.b_out)) >> SHIFT
        d = (logits.amax(dim=1, keepdim=True) - logits).clamp_(max=EXP_END)
        until = self._exp.index_select(0, d.view(-1)).view(d.shape).cumsum(1, dtype=torch.int64)
        free = torch.full_like(until[:, -1:], (1 << TOTAL_BITS) - entries)
        if escape is not None:
            free -= (escape.unsqueeze(1) * free) >> ESCAPE_BITS
        ratio = torch.div(free << _RATIO_BITS, until[:, -1:], rounding_mode="floor")
        until = until.mul_(ratio) >> _RATIO_BITS
        begins = torch.zeros(h.shape[1], entries + 1, dtype=torch.int32, device=self.device)
        begins[:, 1 : N + 1] = until + torch.arange(1, N + 1, device=self.device)
        begins[:, -1] = 1 << TOTAL_BITS
        return begins


def _round(value: Tensor, bits: int) -> Tensor:
    return (value + (1 << (bits - 1))) >> bits


def _take(table: Tensor, z: Tensor, end: int) -> Tensor:
    index = z.clamp(-end, end - 1).add_(end)
    return table.index_select(0, index.view(-1)).view(index.shape).to(torch.int64)

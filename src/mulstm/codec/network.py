"""The integer network at work, in whole numbers only: the same tables on every device, in any batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec.integer import ACT_BITS, ACT_MOST, SHIFT, IntegerLayer, IntegerModel
from mulstm.codec.products import Products, Sums, planes
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
RATIO_BITS = 31
_NONE = np.zeros((0, 0), dtype=np.int8)  # what a layer does not have


@dataclass
class IntegerState:
    """What one layer remembers of B lanes."""

    h: Tensor  # (2, B, H) int8: the two planes of h
    c: Tensor  # (B, H) int64


class Weights:
    """One layer's arrays on the device, tables already shifted to where they are added."""

    def __init__(self, layer: IntegerLayer, products: Products) -> None:
        def wide(array: NDArray[Any] | None) -> Tensor:
            return torch.as_tensor(_NONE if array is None else array).to(products.device, torch.int64)

        def product(W: NDArray[Any] | None) -> Sums:
            return products.by_planes(torch.as_tensor(_NONE if W is None else W))

        self.multiplicative, self.sees_layer = layer.W_mh is not None, layer.W_zl is not None
        # The rounding half goes with the table: the sum then needs one shift and nothing else.
        self.zx = (wide(layer.zx) << SHIFT) + HALF
        self.W_zm, self.R_zm = product(layer.W_zm), wide(layer.R_zm)
        self.W_zl, self.R_zl = product(layer.W_zl), wide(layer.R_zl)
        self.W_mh = product(layer.W_mh)
        self.W_ml, self.R_ml = product(layer.W_ml), wide(layer.R_ml)
        self.mx, self.e_m = wide(layer.mx), wide(layer.e_m)
        self.px = None if layer.px is None else wide(layer.px)
        self.b_h = None if layer.b_h is None else wide(layer.b_h)
        if self.multiplicative and not self.sees_layer:
            self.mx = self.mx << self.e_m


class Network:
    """Steps and tables of an integer model on one device.

    `products`: how integer matrices are multiplied, "auto", or a name of `products.KINDS`; all give the same.
    """

    def __init__(
        self, model: IntegerModel, device: str | torch.device = "cpu", products: str = "auto"
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self.products = Products(self.device, products)
        self.layers = [Weights(layer, self.products) for layer in model.layers]
        self.W_out = self.products.by_planes(torch.as_tensor(model.W_out))
        self.R_out = torch.as_tensor(model.R_out).to(self.device, torch.int64)
        self.b_out = (torch.as_tensor(model.b_out).to(self.device, torch.int64) << SHIFT) + HALF
        curve = tables()
        self._sigmoid = torch.tensor(curve.sigmoid, dtype=torch.int64, device=self.device)
        self._tanh = torch.tensor(curve.tanh, dtype=torch.int64, device=self.device)
        self._one_each = torch.arange(1, model.alphabet.size + 1, device=self.device)
        # One entry more, of weight zero, for all that is too unlikely to be told apart.
        self._exp = torch.tensor([*curve.exp.tolist(), 0], device=self.device)

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
        for w, prev in zip(self.layers, state, strict=True):
            row = x if len(w.zx) > 1 else torch.zeros_like(x)
            after.append(self._layer_step(w, row, after[-1].h if w.sees_layer else None, prev))
        return after

    def _layer_step(self, w: Weights, x: Tensor, low: Tensor | None, prev: IntegerState) -> IntegerState:
        m = planes(self.factor(w, x, low, prev.h)) if w.multiplicative else prev.h
        z = w.zx.index_select(0, x)
        r = w.W_zm(m).to(torch.int64).mul_(w.R_zm)
        if w.px is not None:
            r = (r + HALF) >> SHIFT
            r = r.mul_(w.px.index_select(0, x)) << (SHIFT - PX_BITS)
        z += r
        if low is not None:
            z += w.W_zl(low).to(torch.int64).mul_(w.R_zl)
        z >>= SHIFT
        return self._finish(z, prev.c, w.b_h)

    def factor(self, w: Weights, x: Tensor, low: Tensor | None, h: Tensor) -> Tensor:
        """m_t = mx_t a_t, (B, H), each unit counting what its calibration gave."""
        p = w.mx.index_select(0, x)
        if low is not None:
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

    def logits(self, h: Tensor) -> Tensor:
        """(B, N) int64, counting 2**-10 bits."""
        return self.W_out(h).to(torch.int64).mul_(self.R_out).add_(self.b_out) >> SHIFT

    def shares(self, logits: Tensor, escape: Tensor | None = None) -> Tensor:
        """Where each symbol's share begins, (B, entries + 1) int64, from 0 to 2**24.

        With `escape` (B) int64, counting 2**-22, there is one entry more, after the symbols.
        """
        B, N = logits.shape
        entries = N if escape is None else N + 1
        d = (logits.amax(dim=1, keepdim=True) - logits).clamp_(max=EXP_END)
        until = self._exp.index_select(0, d.view(-1)).view(d.shape).cumsum(1)
        free = torch.full_like(until[:, -1:], (1 << TOTAL_BITS) - entries)
        if escape is not None:
            free -= (escape.unsqueeze(1) * free) >> ESCAPE_BITS
        ratio = torch.div(free << RATIO_BITS, until[:, -1:], rounding_mode="floor")
        begins = torch.zeros(B, entries + 1, dtype=torch.int64, device=self.device)
        begins[:, 1 : N + 1] = (until.mul_(ratio) >> RATIO_BITS).add_(self._one_each)
        begins[:, -1] = 1 << TOTAL_BITS
        return begins


def _round(value: Tensor, bits: int) -> Tensor:
    return (value + (1 << (bits - 1))) >> bits


def _take(table: Tensor, z: Tensor, end: int) -> Tensor:
    index = z.clamp(-end, end - 1).add_(end)
    return table.index_select(0, index.view(-1)).view(index.shape)

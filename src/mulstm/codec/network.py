"""The integer network at work, in whole numbers only: the same tables on every device, in any batch.

Whole numbers are held in float64, which has them all up to 2**53: `integer.check` has seen to it that no sum
or product passes 2**52, so nothing is rounded but where a floor says so. (Those of milstm may pass it, as
multiples of 2**6 or where they are clipped.) torch adds and multiplies float64 several times faster than
int64. On a CPU, loops that numba compiled do the same sooner still, where it is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec import kernels
from mulstm.codec.integer import ACT_BITS, ACT_MOST, C_BITS, PX_BITS, SHIFT, IntegerLayer, IntegerModel
from mulstm.codec.products import PlaneProduct, Products, planes
from mulstm.codec.tables import EXP_END, GATE_BITS, SIGMOID_END, TANH_END, TOTAL_BITS, Z_BITS, tables

C_MOST = float((1 << 31) - 1)
MX_MOST = 32767.0
ESCAPE_BITS = 22  # how likely an escape is, counting 2**-22
RATIO_BITS = 28
_NONE = np.zeros((0, 0), dtype=np.int8)  # what a layer does not have
_EMPTY = np.zeros((0, 0), dtype=np.int32)


@dataclass
class IntegerState:
    """What one layer remembers of B lanes."""

    h: Tensor  # (2, B, H) int8: the two planes of h
    c: Tensor  # (B, H)


class Weights:
    """One layer's arrays on the device, scaled so that a sum of what they count comes out right."""

    def __init__(self, layer: IntegerLayer, products: Products) -> None:
        def numbers(array: NDArray[Any] | None, bits: int = 0) -> Tensor:
            exact = torch.as_tensor(_NONE if array is None else array).to(products.device, torch.float64)
            return exact * 2.0**-bits

        def product(W: NDArray[Any] | None) -> PlaneProduct:
            return products.by_planes(torch.as_tensor(_NONE if W is None else W))

        self.multiplicative, self.sees_layer = layer.W_mh is not None, layer.W_zl is not None
        self.zx = numbers(layer.zx)
        self.W_zm, self.R_zm = product(layer.W_zm), numbers(layer.R_zm, SHIFT)
        self.W_zl, self.R_zl = product(layer.W_zl), numbers(layer.R_zl, SHIFT)
        self.W_mh = product(layer.W_mh)
        self.W_ml, self.R_ml = product(layer.W_ml), numbers(layer.R_ml, SHIFT)
        self.mx = numbers(layer.mx)
        self.px = None if layer.px is None else numbers(layer.px, PX_BITS)
        self.b_h = None if layer.b_h is None else numbers(layer.b_h)
        self.scale_m = torch.ones((), dtype=torch.float64)
        if layer.e_m is not None:
            exact = np.ldexp(1.0, layer.e_m.astype(np.int32) - SHIFT)
            self.scale_m = torch.as_tensor(exact).to(products.device)
            if not self.sees_layer:
                self.mx, self.scale_m = self.mx * self.scale_m, torch.ones_like(self.scale_m)


class Network:
    """Steps and tables of an integer model on one device.

    `products`: how integer matrices are multiplied, "auto", or a name of `products.KINDS`; all give the same.
    `compiled`: whether compiled loops do the rest, where there are any; they too give the same.
    """

    def __init__(
        self,
        model: IntegerModel,
        device: str | torch.device = "cpu",
        products: str = "auto",
        compiled: bool = True,
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self.products = Products(self.device, products)
        self.loops = kernels.find() if compiled and self.device.type == "cpu" else None
        self.layers = [Weights(layer, self.products) for layer in model.layers]
        self.W_out = self.products.by_planes(torch.as_tensor(model.W_out))
        self.R_out = torch.as_tensor(model.R_out).to(self.device, torch.float64) * 2.0**-SHIFT
        self.b_out = torch.as_tensor(model.b_out).to(self.device, torch.float64) + 0.5
        self._one_each = torch.arange(1.0, model.alphabet.size + 1, dtype=torch.float64, device=self.device)
        curve = tables()
        # One entry more, of weight zero, for all that is too unlikely to be told apart.
        self._exp = torch.tensor([*curve.exp.tolist(), 0], dtype=torch.float64, device=self.device)
        # Both curves one after the other: one look-up serves all of z. Gates are fractions of one.
        sigmoid, tanh = (torch.tensor(t, dtype=torch.float64) for t in (curve.sigmoid, curve.tanh))
        self._curves = torch.cat([tanh, sigmoid * 2.0**-GATE_BITS]).to(self.device)
        self._middle, self._low, self._high = self._places()

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each column of z: where its curve has zero (and a half, for rounding), begins and ends."""
        H, blocks = self.model.hidden, 1 if self.model.unit == "tanh" else 4
        sigmoid = torch.arange(blocks * H, device=self.device) >= H
        low = torch.where(sigmoid, 2.0 * TANH_END, 0.0).double()
        half = torch.where(sigmoid, float(SIGMOID_END), float(TANH_END)).double()
        return low + half + 0.5, low, low + 2 * half - 1

    def start(self, B: int) -> list[IntegerState]:
        """The state before the first symbol: zero."""
        H = self.model.hidden
        return [
            IntegerState(
                torch.zeros(2, B, H, dtype=torch.int8, device=self.device),
                torch.zeros(B, H, dtype=torch.float64, device=self.device),
            )
            for _ in self.layers
        ]

    def step(self, x: Tensor, state: list[IntegerState]) -> None:
        """Moves the state on by the symbols x (B). In place: a captured graph finds it where it was."""
        for k, (w, now) in enumerate(zip(self.layers, state, strict=True)):
            low = state[k - 1].h if w.sees_layer else None
            if self.loops is not None:
                self._compiled_step(w, k, x, low, now)
                continue
            row = x if len(w.zx) > 1 else torch.zeros_like(x)
            after = self._layer_step(w, row, low, now)
            now.h.copy_(after.h)
            now.c.copy_(after.c)

    def _layer_step(self, w: Weights, x: Tensor, low: Tensor | None, prev: IntegerState) -> IntegerState:
        m = planes(self.factor(w, x, low, prev.h)) if w.multiplicative else prev.h
        z = w.W_zm(m).double().mul_(w.R_zm)
        if w.px is not None:
            z = z.add_(0.5).floor_().mul_(w.px.index_select(0, x))
        z += w.zx.index_select(0, x)
        if low is not None:
            z += w.W_zl(low).double().mul_(w.R_zl)
        return self._finish(z, prev.c, w.b_h)

    def _compiled_step(self, w: Weights, k: int, x: Tensor, low: Tensor | None, now: IntegerState) -> None:
        loops, given = cast(ModuleType, self.loops), self.model.layers[k]
        symbols, m = x.numpy(), now.h
        if given.W_mh is not None:
            below = _EMPTY if low is None else w.W_ml.apart(low).numpy()
            m = torch.empty_like(now.h)
            loops.factor(
                w.W_mh.apart(now.h).numpy(),
                symbols,
                given.mx,
                given.e_m,
                below,
                _or_empty(given.R_ml),
                m.numpy(),
            )
        z = np.empty((len(symbols), given.zx.shape[1]), dtype=np.int32)
        below = _EMPTY if low is None else w.W_zl.apart(low).numpy()
        px = _EMPTY if given.px is None else given.px
        loops.gather_z(
            w.W_zm.apart(m).numpy(), symbols, given.zx, given.R_zm, px, below, _or_empty(given.R_zl), z
        )
        curve, unit = tables(), self.model.unit
        if unit == "tanh":
            loops.plain_unit(z, curve.tanh, now.h.numpy())
            return
        linear, inside = unit == "initial", unit != "standard"
        b_h, c, h = _or_empty(given.b_h), now.c.numpy(), now.h.numpy()
        loops.gated_unit(z, curve.sigmoid, curve.tanh, linear, inside, b_h, c, h)

    def factor(self, w: Weights, x: Tensor, low: Tensor | None, h: Tensor) -> Tensor:
        """m_t = mx_t a_t, (B, H), each unit counting what its calibration gave."""
        p = w.mx.index_select(0, x)
        if low is not None:
            p += w.W_ml(low).double().mul_(w.R_ml).add_(0.5).floor_()
            p = p.clamp_(-MX_MOST, MX_MOST).mul_(w.scale_m)
        return p.mul_(w.W_mh(h)).add_(0.5).floor_().clamp_(-ACT_MOST, ACT_MOST)

    def _finish(self, z: Tensor, c_prev: Tensor, b_h: Tensor | None) -> IntegerState:
        """From z, not yet rounded, to the next state. Places in a table are not negative: cutting floors."""
        H, unit = self.model.hidden, self.model.unit
        linear = (z[:, :H] + 0.5).floor_().mul_(2.0 ** (GATE_BITS - Z_BITS)) if unit == "initial" else None
        z += self._middle
        place = torch.clamp(z, self._low, self._high).to(torch.int32)
        gates = self._curves.index_select(0, place.view(-1)).view(place.shape)
        if unit == "tanh":
            return IntegerState(_activation(gates.mul_(2.0 ** (ACT_BITS - GATE_BITS))), c_prev)
        h_hat, i, o, f = gates.chunk(4, dim=1)
        c = torch.mul(f, c_prev).addcmul_(i, h_hat if linear is None else linear)
        c = c.add_(0.5).floor_().clamp_(-C_MOST, C_MOST)
        if unit == "standard":
            return IntegerState(_activation(self._tanh_of(c).mul_(o)), c)
        inner = torch.mul(o, c).add_(0.5).floor_()
        return IntegerState(_activation(self._tanh_of(inner if b_h is None else inner.add_(b_h))), c)

    def _tanh_of(self, c: Tensor) -> Tensor:
        """What h counts, of what c counts; not yet rounded."""
        place = (
            torch.mul(c, 2.0 ** (Z_BITS - C_BITS)).add_(TANH_END).clamp_(0, 2 * TANH_END - 1).to(torch.int32)
        )
        tanh = self._curves.index_select(0, place.view(-1)).view(place.shape)
        return tanh.mul_(2.0 ** (ACT_BITS - GATE_BITS))

    def output(self, state: list[IntegerState]) -> Tensor:
        """What the output layer sees, (2, B, H)."""
        return torch.cat([s.h for s in state], dim=-1) if self.model.skip else state[-1].h

    def logits(self, h: Tensor) -> Tensor:
        """(B, N), counting 2**-10 bits."""
        return self.W_out(h).double().mul_(self.R_out).add_(self.b_out).floor_()

    def tables(self, h: Tensor, said: Tensor | None, escape: Tensor | None, begins: Tensor) -> None:
        """Fills `begins` (B, entries + 1) with the tables of h, `said` (B, N) being added to the logits."""
        if self.loops is None:
            logits = self.logits(h)
            begins.copy_(self.shares(logits if said is None else logits + said, escape))
            return
        model, curve = self.model, tables()
        self.loops.shares(
            self.W_out.apart(h).numpy(),
            model.R_out,
            model.b_out,
            np.zeros((0, 0)) if said is None else said.numpy(),
            curve.exp,
            np.zeros(0) if escape is None else escape.numpy(),
            begins.numpy(),
        )

    def shares(self, logits: Tensor, escape: Tensor | None = None) -> Tensor:
        """Where each symbol's share begins, (B, entries + 1), from 0 to 2**24.

        With `escape` (B), counting 2**-22, there is one entry more, after the symbols.
        """
        B, N = logits.shape
        entries = N if escape is None else N + 1
        d = (logits.amax(dim=1, keepdim=True) - logits).clamp_(max=EXP_END).to(torch.int32)
        until = self._exp.index_select(0, d.view(-1)).view(d.shape).cumsum(1)
        free = torch.full_like(until[:, -1:], (1 << TOTAL_BITS) - entries)
        if escape is not None:
            free -= (escape.unsqueeze(1) * free).mul_(2.0**-ESCAPE_BITS).floor_()
        # The dividend is below 2**52: its quotient cannot be rounded up to a whole number it does not reach.
        ratio = (free * 2.0**RATIO_BITS).div_(until[:, -1:]).floor_()
        begins = torch.zeros(B, entries + 1, dtype=torch.float64, device=self.device)
        begins[:, 1 : N + 1] = until.mul_(ratio).mul_(2.0**-RATIO_BITS).floor_().add_(self._one_each)
        begins[:, -1] = 1 << TOTAL_BITS
        return begins


def _or_empty(array: NDArray[Any] | None) -> NDArray[Any]:
    return np.zeros(0, dtype=np.int32) if array is None else array


def _activation(value: Tensor) -> Tensor:
    """The planes of h, rounded."""
    return planes(value.add_(0.5).floor_().clamp_(-ACT_MOST, ACT_MOST))

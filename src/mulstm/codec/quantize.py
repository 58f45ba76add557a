"""From a trained model to an integer one: the same bytes on every machine, so that both sides may make it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec.fold import Float, FoldedLayer, as_float, fold, lengths
from mulstm.codec.integer import (
    ACT_BITS,
    ACT_MOST,
    C_BITS,
    EXACT,
    H_DROP,
    MOST_E_M,
    MOST_RATE,
    PX_BITS,
    SHIFT,
    WIDEST,
    IntegerLayer,
    IntegerModel,
    check,
    reach,
)
from mulstm.codec.learner import RATE_BITS
from mulstm.codec.network import Network, Weights
from mulstm.codec.products import LOW_BITS
from mulstm.codec.tables import LOGIT_BITS, Z_BITS
from mulstm.data.alphabet import Alphabet
from mulstm.errors import BackendError
from mulstm.recipe import LSTM_TYPE, MULTIPLICATIVE, ModelRecipe

_H_UNIT = 2.0**-ACT_BITS
_BITS_PER_NAT = 1.4426950408889634  # written out: libraries differ in the last digit of a logarithm
_PLANE = 128.0  # a sum comes out divided by what the low plane counts
_ROUNDS, _LANES, _STEPS = 2, 64, 128
# The learner's first rate, were h to stray by one in all; the part it falls to; symbols until it has halved.
_RATE, _LEAST, _HASTE = 0.66, 6, 20_000
# Where the learner's h strays less than so far in all (its square), the rate would be so high that errors of
# a few percent reach their bound, and large ones would teach no more than small ones. It then leaves out
# fewer bits of h, as long as units stray less than this on the average, of 127.
_FAR, _STRAY = 1 << 19, 32
_ROOM = 4  # how far m may go past the largest value calibration saw


def quantize(
    weights: Mapping[str, NDArray[Any]], recipe: ModelRecipe, alphabet: Alphabet, parent: str
) -> IntegerModel:
    """The integer model of a checkpoint's arrays. It needs no text: it calibrates on its own samples."""
    _refuse(weights, recipe)
    layers = fold(weights, recipe)
    out = (as_float(weights["W_out"]), as_float(weights["b_out"]) if recipe.output_bias else None)
    units = [_first_guess(layer) for layer in layers]
    model = _assemble(layers, units, out, recipe, alphabet, parent)
    for _ in range(_ROUNDS if recipe.cell in MULTIPLICATIVE else 0):
        for unit, peak in zip(units, _watch(model).peaks(), strict=True):
            unit *= np.maximum(peak, 1) * (_ROOM / ACT_MOST)
        model = _assemble(layers, units, out, recipe, alphabet, parent)
    mean, rate = _watch(model).learning()
    model = replace(model, h_mean=mean, rate=rate)
    try:
        check(model)
    except ValueError as fault:
        raise BackendError(
            f"The model has no integer counterpart: {fault}. Train with weight norm or smaller weights."
        ) from None
    return model


def _refuse(weights: Mapping[str, NDArray[Any]], recipe: ModelRecipe) -> None:
    width = recipe.hidden * (recipe.layers if recipe.skip else 1)
    if width > WIDEST:
        raise BackendError(
            f"The output layer sees {width:,} units, and whole numbers serve {WIDEST:,}. "
            "Compress with a narrower model."
        )
    if recipe.cell == "tensor-rnn" or (recipe.cell == "milstm" and recipe.layers > 1):
        which = "several layers of milstm" if recipe.cell == "milstm" else "the tensor-rnn cell"
        raise BackendError(
            f"There is no integer arithmetic for {which}. Compress with an mlstm, lstm, mrnn or rnn "
            "model, or a milstm of one layer."
        )
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise BackendError(
                f"The weights {name} hold numbers that are not finite. Take an earlier checkpoint."
            )


def _first_guess(layer: FoldedLayer) -> Float:
    """What m counts before anything is known: room for four times the length of each row."""
    if layer.W_mh is None:
        return np.full(layer.W_zm.shape[1], _H_UNIT)
    return _reach(layer) * lengths(layer.W_mh) * (4.0 / ACT_MOST)


def _reach(layer: FoldedLayer) -> Float:
    """The most that the factor of a_t can be, for each unit."""
    assert layer.mx is not None
    reach: Float = np.abs(layer.mx).max(axis=0)
    if layer.W_ml is not None:
        for column in np.abs(layer.W_ml).T:
            reach = reach + column  # |h| <= 1
    return np.where(reach == 0, 1.0, reach)


def _assemble(
    layers: list[FoldedLayer],
    units: list[Float],
    out: tuple[Float, Float | None],
    recipe: ModelRecipe,
    alphabet: Alphabet,
    parent: str,
) -> IntegerModel:
    W_out, s_out = _rows(out[0] * _H_UNIT)
    bits = _BITS_PER_NAT * (1 << LOGIT_BITS)
    b_out = np.zeros(len(W_out)) if out[1] is None else out[1]
    return IntegerModel(
        cell=recipe.cell,
        unit=recipe.unit if recipe.cell in LSTM_TYPE else "tanh",
        hidden=recipe.hidden,
        skip=recipe.skip,
        alphabet=alphabet,
        layers=tuple(_layer(layer, unit) for layer, unit in zip(layers, units, strict=True)),
        W_out=W_out,
        R_out=_multiplier(s_out * bits),
        b_out=_whole(b_out * bits, np.int32),
        h_mean=np.zeros(W_out.shape[1], dtype=np.int16),
        rate=np.array([0, 0, 1], dtype=np.int32),
        parent=parent,
    )


def _layer(layer: FoldedLayer, unit: Float) -> IntegerLayer:
    z = float(1 << Z_BITS)
    W_zm, s_zm = _rows(layer.W_zm * unit)
    more: dict[str, Any] = {}
    if layer.W_zl is not None:
        more["W_zl"], s_zl = _rows(layer.W_zl * _H_UNIT)
        more["R_zl"] = _multiplier(s_zl * z)
    if layer.W_mh is not None and layer.mx is not None:
        more["W_mh"], s_mh = _rows(layer.W_mh * _H_UNIT)
        # m = mx a: from what a sum of W_mh counts to what m counts.
        gain = s_mh * _PLANE / unit * 2.0**SHIFT
        _, e_m = np.frexp(_reach(layer) * gain / 32767)
        # Units that hardly ever speak would be scaled up beyond all bounds.
        most = np.frexp((EXACT >> 1) / reach(more["W_mh"], np.full(len(unit), 32767)).clip(min=1))[1] - 1
        e_m = np.clip(e_m, 0, np.clip(most, 0, MOST_E_M))
        gain = np.ldexp(gain, -e_m)
        more["e_m"], more["mx"] = e_m.astype(np.uint8), _whole(layer.mx * gain, np.int16)
        if layer.W_ml is not None:
            more["W_ml"], s_ml = _rows(layer.W_ml * _H_UNIT)
            more["R_ml"] = _multiplier(s_ml * gain)
    if layer.px is not None:
        more["px"] = _whole(layer.px * (1 << PX_BITS), np.int16)
    if layer.b_h is not None:
        more["b_h"] = _whole(layer.b_h * (1 << C_BITS), np.int32)
    return IntegerLayer(zx=_whole(layer.zx * z, np.int16), W_zm=W_zm, R_zm=_multiplier(s_zm * z), **more)


def _rows(W: Float) -> tuple[NDArray[np.int8], Float]:
    """W as int8, and what each row counts."""
    scale = np.abs(W).max(axis=1) / 127
    scale[scale == 0] = 1
    return np.rint(W / scale[:, None]).astype(np.int8), scale


def _multiplier(scale: Float) -> NDArray[np.int32]:
    return _whole(scale * _PLANE * 2.0**SHIFT, np.int32)


def _whole(values: Float, dtype: Any) -> NDArray[Any]:
    most = np.iinfo(dtype).max
    return np.rint(np.clip(values, -most, most)).astype(dtype)


class _Watched(Network):
    """Remembers how far each unit of m went, and the first two moments of h."""

    def __init__(self, model: IntegerModel) -> None:
        super().__init__(model, compiled=False)
        self._peaks = {w: torch.zeros(model.hidden, dtype=torch.float64) for w in self.layers}
        self._first = torch.zeros(model.W_out.shape[1], dtype=torch.int64)
        self._second = torch.zeros_like(self._first)
        self._count = 0

    def factor(self, w: Weights, x: Tensor, low: Tensor | None, h: Tensor) -> Tensor:
        m = super().factor(w, x, low, h)
        torch.maximum(self._peaks[w], m.abs().amax(dim=0), out=self._peaks[w])
        return m

    def see(self, h: Tensor) -> None:
        v = (h[0].to(torch.int64) << LOW_BITS) + h[1]
        self._first += v.sum(dim=0)
        self._second += (v * v).sum(dim=0)
        self._count += len(v)

    def peaks(self) -> list[Float]:
        """The largest |m| of each unit, layer by layer."""
        return [peak.numpy() for peak in self._peaks.values()]

    def learning(self) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
        """The learner's mean of h; a rate and bits to leave out, in keeping with how far h strays from it."""
        n, ones, squares = self._count, self._first.tolist(), self._second.tolist()
        mean = np.array([(2 * s + n) // (2 * n) for s in ones], dtype=np.int16)
        spread = sum(n * s2 - s1 * s1 for s1, s2 in zip(ones, squares, strict=True))
        first, drop = 0, H_DROP
        if spread:
            while drop > 1 and spread < n * n * min(_FAR, len(mean) * _STRAY**2) << 2 * drop:
                drop -= 1
            unit = 2 * (ACT_BITS + drop - H_DROP)
            rate = _RATE * _BITS_PER_NAT * 2.0**RATE_BITS * (n * n << unit) / spread
            first = min(MOST_RATE, round(rate))
        said = [first, first // _LEAST, _HASTE]
        return mean, np.array(said if drop == H_DROP else [*said, drop], dtype=np.int32)


def _watch(model: IntegerModel) -> _Watched:
    """The network after it has written a text of its own."""
    network = _Watched(model)
    state = network.start(_LANES)
    for t in range(_STEPS):
        h = network.output(state)
        if t >= _STEPS // 4:
            network.see(h)
        begins = network.shares(network.logits(h))
        # The draws are hash values: any machine, any version of numpy draws the same text.
        draw = np.frombuffer(hashlib.shake_128(b"%d" % t).digest(4 * _LANES), "<u4") >> 8
        x = (begins[:, 1:] <= torch.from_numpy(draw.astype(np.float64))[:, None]).sum(dim=1)
        network.step(x, state)
    return network

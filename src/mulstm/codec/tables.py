"""The three curves of the integer network as look-up tables, the same on every machine."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Z_BITS = 10  # pre-activations z, and c on its way into tanh, count 1/1024
GATE_BITS = 16  # sigmoid and tanh come out counting 1/65536
LOGIT_BITS = 10  # logits count 1/1024 of a bit
TOTAL_BITS = 24  # a share is counted in 2**-24
WEIGHT_BITS = 22  # the likeliest symbol has the weight 2**22

# Past these ends the curve has reached its last value.
SIGMOID_END = 12 << Z_BITS
TANH_END = 6 << Z_BITS
EXP_END = (WEIGHT_BITS + 1) << LOGIT_BITS

# CRC-32 of each table as little-endian int32. No value lies within 1e-6 of a rounding boundary, so any
# mathematics library gives these; one that does not is told, and not used.
_CRC = {"sigmoid": 0x65F48B7C, "tanh": 0x2EA615CE, "exp": 0x8B154FD0}


@dataclass(frozen=True)
class Tables:
    """Sigmoid over [-SIGMOID_END, SIGMOID_END), tanh over [-TANH_END, TANH_END), 2**-d over [0, EXP_END)."""

    sigmoid: NDArray[np.int32]
    tanh: NDArray[np.int32]
    exp: NDArray[np.int32]


@cache
def tables() -> Tables:
    """The tables, computed once and checked against their CRC-32."""
    z = np.arange(-SIGMOID_END, SIGMOID_END) / (1 << Z_BITS)
    t = np.arange(-TANH_END, TANH_END) / (1 << Z_BITS)
    d = np.arange(EXP_END) / (1 << LOGIT_BITS)
    made = {
        "sigmoid": np.rint((1 << GATE_BITS) / (1 + np.exp(-z))).astype("<i4"),
        "tanh": np.rint((1 << GATE_BITS) * np.tanh(t)).astype("<i4"),
        "exp": np.rint((1 << WEIGHT_BITS) * np.exp2(-d)).astype("<i4"),
    }
    for name, table in made.items():
        if zlib.crc32(table.tobytes()) != _CRC[name]:
            raise ArithmeticError(f"this machine's {name} table differs from the format's")
        table.flags.writeable = False
    return Tables(**made)

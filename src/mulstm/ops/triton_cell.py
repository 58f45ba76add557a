"""The cell's arithmetic as Triton functions, and the order of z's columns: what all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

# Packed order: z's columns come in groups of 4 x GATE_BLOCK, one block of each gate for the same units, so that
# one tile of a product holds all four gates of its units. A group's gates follow ops.reference.GATES.
GATE_BLOCK = 16
GROUP: tl.constexpr = tl.constexpr(GATE_BLOCK)

# ops.reference.UNITS as numbers.
STANDARD: tl.constexpr = tl.constexpr(0)
INITIAL: tl.constexpr = tl.constexpr(1)
INITIAL_TEXT: tl.constexpr = tl.constexpr(2)
TANH: tl.constexpr = tl.constexpr(3)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def column(u, gate: tl.constexpr, UNIT: tl.constexpr):
    """Where gate `gate` of unit u stands in z."""
    if UNIT == TANH:
        return u
    return (u // GROUP) * (4 * GROUP) + gate * GROUP + u % GROUP


@triton.jit
def cell_forward(h_hat, i, o, f, c_prev, b_h, UNIT: tl.constexpr):
    """c_t and the unmasked h_t from z_t; for TANH z_t is in h_hat."""
    if UNIT == TANH:
        return c_prev, tanh(h_hat)
    candidate = h_hat if UNIT == INITIAL else tanh(h_hat)
    c = tl.sigmoid(f) * c_prev + tl.sigmoid(i) * candidate
    if UNIT == STANDARD:
        return c, tanh(c) * tl.sigmoid(o)
    return c, tanh(tl.sigmoid(o) * c + b_h)


@triton.jit
def cell_backward(h_hat, i, o, f, c_prev, c, dh, dc, b_h, UNIT: tl.constexpr):
    """dz in four blocks, dc_{t-1}, and the gradient inside the last tanh (b_h's); dh comes masked."""
    if UNIT == TANH:
        y = tanh(h_hat)
        dz = dh * (1.0 - y * y)
        return dz, dz, dz, dz, dc, dz
    i, o, f = tl.sigmoid(i), tl.sigmoid(o), tl.sigmoid(f)
    if UNIT == STANDARD:
        y = tanh(c)
        dy = dh * (1.0 - y * y)
        dc += dy * o
        do = dh * y * o * (1.0 - o)
    else:
        y = tanh(o * c + b_h)
        dy = dh * (1.0 - y * y)
        dc += dy * o
        do = dy * c * o * (1.0 - o)
    if UNIT == INITIAL:
        candidate = h_hat
        dh_hat = dc * i
    else:
        candidate = tanh(h_hat)
        dh_hat = dc * i * (1.0 - candidate * candidate)
    di = dc * candidate * i * (1.0 - i)
    df = dc * c_prev * f * (1.0 - f)
    return dh_hat, di, do, df, dc * f, dy

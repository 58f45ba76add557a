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


# The interpreter, which checks the kernels on a CPU, knows no machine instructions.
NATIVE: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def quick_tanh(x):
    """One instruction, to 2^-11 of the result: for values that are rounded to bf16, never for slopes."""
    if NATIVE:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tanh(x)


@triton.jit
def quick_sigmoid(x):
    return 0.5 * quick_tanh(0.5 * x) + 0.5


@triton.jit
def prefetch(pointers, inside):
    """Asks for lines to be brought into L2, for a kernel that comes later."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [pointers.to(tl.int64), inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


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
        return c_prev, quick_tanh(h_hat)
    candidate = h_hat if UNIT == INITIAL else quick_tanh(h_hat)
    # What is forgotten multiplies up over hundreds of steps.
    c = tl.sigmoid(f) * c_prev + quick_sigmoid(i) * candidate
    if UNIT == STANDARD:
        return c, quick_tanh(c) * quick_sigmoid(o)
    return c, quick_tanh(quick_sigmoid(o) * c + b_h)


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

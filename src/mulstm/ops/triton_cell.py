"""The cell's arithmetic as Triton functions, and the order of z's columns: what all kernels share."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Packed order: z's columns come in groups of 4 x GATE_BLOCK, one block of each gate for the same units, so
# that one tile of a product holds all four gates of its units. A group's gates follow ops.reference.GATES.
GATE_BLOCK = 16
GROUP: tl.constexpr = tl.constexpr(GATE_BLOCK)

# Places in ops.reference.UNITS.
STANDARD: tl.constexpr = tl.constexpr(0)
INITIAL: tl.constexpr = tl.constexpr(1)
TANH: tl.constexpr = tl.constexpr(3)


def to_packed(z: Tensor, blocks: int, HP: int) -> Tensor:
    """z's last axis, blocks of H, padded to HP with zeros and in packed order."""
    H = z.shape[-1] // blocks
    z = torch.nn.functional.pad(z.reshape(*z.shape[:-1], blocks, H), (0, HP - H))
    if blocks == 1:
        return z.flatten(-2).contiguous()
    groups = z.reshape(*z.shape[:-1], HP // GATE_BLOCK, GATE_BLOCK)
    return groups.transpose(-3, -2).flatten(-3).contiguous()


def from_packed(z: Tensor, blocks: int, H: int) -> Tensor:
    """The inverse of to_packed."""
    if blocks == 1:
        return z[..., :H].contiguous()
    groups = z.reshape(*z.shape[:-1], -1, blocks, GATE_BLOCK).transpose(-3, -2)
    return groups.flatten(-2)[..., :H].flatten(-2)


# The interpreter, which checks the kernels on a CPU, knows no machine instructions.
NATIVE: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def quick_tanh(x):
    """One instruction, to 2^-11 of the result: for values that are rounded to bf16, never for slopes."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tanh(x)


@triton.jit
def quick_sigmoid(x):
    return 0.5 * quick_tanh(0.5 * x) + 0.5


@triton.jit
def column(u, gate: tl.constexpr, UNIT: tl.constexpr):
    """Where gate `gate` of unit u stands in z."""
    if UNIT == TANH:
        return u
    return (u // GROUP) * (4 * GROUP) + gate * GROUP + u % GROUP


@triton.jit
def split_gates(z, BM: tl.constexpr, BN: tl.constexpr):
    """The four (BM, BN / 4) blocks of a tile in packed order."""
    z = tl.reshape(z, [BM, BN // (4 * GROUP), 4, GROUP])
    z = tl.reshape(tl.permute(z, [0, 1, 3, 2]), [BM, BN // 4, 2, 2])
    even, odd = tl.split(z)
    h_hat, o = tl.split(even)
    i, f = tl.split(odd)
    return h_hat, i, o, f


@triton.jit
def join_gates(h_hat, i, o, f, BM: tl.constexpr, BN: tl.constexpr):
    """The inverse of split_gates."""
    z = tl.join(tl.join(h_hat, o), tl.join(i, f))  # (BM, BN / 4, 2, 2): the last index is the gate's low bit
    z = tl.permute(tl.reshape(z, [BM, BN // (4 * GROUP), GROUP, 4]), [0, 1, 3, 2])
    return tl.reshape(z, [BM, BN])


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
def cell_slopes(h_hat, i, o, f, c_prev, c, b_h, UNIT: tl.constexpr):
    """What the backward of a step needs of its forward, known before any gradient is.

    With dc = dc_in + dh A:  dz = (dc D_hat, dc D_i, dh D_o, dc D_f),  dc_{t-1} = dc f,  and b_h's is dh S.
    """
    if UNIT == TANH:
        y = tanh(h_hat)
        S = 1.0 - y * y
        return S, S, S, S, S, S, S
    i, o, f = tl.sigmoid(i), tl.sigmoid(o), tl.sigmoid(f)
    if UNIT == STANDARD:
        y = tanh(c)
        S = 1.0 - y * y
        D_o = y * o * (1.0 - o)
    else:
        y = tanh(o * c + b_h)
        S = 1.0 - y * y
        D_o = S * c * o * (1.0 - o)
    if UNIT == INITIAL:
        D_hat = i
        D_i = h_hat * i * (1.0 - i)
    else:
        g = tanh(h_hat)
        D_hat = i * (1.0 - g * g)
        D_i = g * i * (1.0 - i)
    return S * o, D_hat, D_i, D_o, c_prev * f * (1.0 - f), f, S

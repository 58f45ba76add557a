"""From one row for each pair of lane and symbol to one for each step, and the sums of the way back."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048  # of a program
WARPS = 4


@triton.jit
def _spread(rows, index, out, width, BC: tl.constexpr):
    """The row of one place."""
    place = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.load(index + place).to(tl.int64)
    x = tl.load(rows + row * width + n, mask=n < width)
    tl.store(out + place * width + n, x, mask=n < width)


@triton.jit
def _collect(x, order, first, out, width, BC: tl.constexpr):
    """The sum, in their order, of the rows at the places of one pair."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BC], tl.float32)
    k = tl.load(first + pair)
    end = tl.load(first + pair + 1)
    while k < end:
        place = tl.load(order + k).to(tl.int64)
        total += tl.load(x + place * width + n, mask=n < width, other=0.0).to(tl.float32)
        k += 1
    tl.store(out + pair * width + n, total.to(out.dtype.element_ty), mask=n < width)


def spread(rows: Tensor, index: Tensor) -> Tensor:
    """(T * B, width): the row of each place's pair."""
    places, width = index.shape[0], rows.shape[1]
    out = torch.empty(places, width, dtype=rows.dtype, device=rows.device)
    _spread[(places, triton.cdiv(width, COLUMNS))](rows, index, out, width, BC=COLUMNS, num_warps=WARPS)
    return out


def collect(x: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """(P, width) from (T * B, width), the backward of `spread`: sums in fp32, in the order of the places."""
    P, width = first.shape[0] - 1, x.shape[1]
    out = torch.empty(P, width, dtype=x.dtype, device=x.device)
    _collect[(P, triton.cdiv(width, COLUMNS))](x, order, first, out, width, BC=COLUMNS, num_warps=WARPS)
    return out

"""Dropout masks from uniform numbers in one launch, where torch takes four."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _mask(u, p, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dropped = tl.load(p).to(tl.float32)
    # Rounded as torch rounds it: a run gives the same on either way.
    kept = tl.div_rn(1.0, 1.0 - dropped)
    x = tl.load(u + at, mask=at < count, other=0.0)
    tl.store(out + at, tl.where(x >= dropped, kept, 0.0), mask=at < count)


def mask_of(u: Tensor, p: Tensor) -> Tensor:
    """0 where u < p, else 1 / (1 - p); p is a tensor of one number on u's device."""
    out = torch.empty_like(u)
    _mask[(triton.cdiv(u.numel(), BLOCK),)](u, p, out, u.numel(), BLOCK=BLOCK, num_warps=4)
    return out

"""Numbers of 8 bits, for the recurrent products of training: their types, and the scales they are kept with.

A product's operands carry 3 binary places (gradients 2) instead of bf16's 7. What that adds to a sum of
thousands of products is small beside what dropout adds. Sums, states, weight gradients and the weights
themselves keep their types.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = 448.0  # of E4M3
# A number is multiplied by its scale; what then is too large becomes the largest.
WEIGHT = 64.0  # up to 7; in full precision down to 2.4e-4
H = 128.0  # |h| < 1, and up to 3.5 behind a dropout mask
MOST_DROPPED = 0.7  # of the state: 1 / (1 - 0.7) is below that 3.5
M = 2.0  # up to 224; in full precision down to 8e-3
GRADIENT = 32.0  # what the largest gradient of an h becomes; those of z are sums over many steps


class Operands(NamedTuple):
    """What the forward's products multiply, one place for all steps: (1, B, H) e4m3."""

    h: Tensor
    m: Tensor


class BackwardOperands(NamedTuple):
    """What the backward's products multiply, one place for all steps: e5m2."""

    dz: Tensor  # (1, B, 4H)
    da: Tensor  # (1, B, H)
    scale: Tensor  # (1) fp32, what dz and da were multiplied by
    undo: Tensor  # (1) its inverse


def rounded(x: Tensor, scale: float) -> Tensor:
    """x times a scale in 8 bits."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)


def gradient_scale(*given: Tensor | None) -> Tensor:
    """A power of two, (1) fp32, for the gradients of a chunk that is given these; nothing is read back."""
    ends = [end.float() for x in given if x is not None for end in torch.aminmax(x)]
    largest = torch.stack(ends).abs().max().clamp(min=1e-30)
    return torch.exp2(torch.floor(torch.log2(GRADIENT / largest))).view(1)


def operands(h_0: Tensor) -> Operands:
    """Those before the first step, from h_0 (1, B, H)."""
    h = rounded(h_0, H)
    return Operands(h, torch.empty_like(h))


def backward_operands(dh: Tensor, dh_T: Tensor | None, dc_T: Tensor | None, width: int) -> BackwardOperands:
    """Those of a chunk that is given these gradients; z has so many columns."""
    scale = gradient_scale(dh, dh_T, dc_T)
    dz, da = (torch.empty(1, dh.shape[1], n, dtype=E5M2, device=dh.device) for n in (width, dh.shape[2]))
    return BackwardOperands(dz, da, scale, 1 / scale)

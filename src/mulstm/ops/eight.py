"""Numbers of 8 bits, for the recurrent products of training: their types, and the scales they are kept with.

A product's operands carry 3 binary places (gradients 2) instead of bf16's 7. What that adds to a sum of
thousands of products is small beside what dropout adds. Sums, states, weight gradients and the weights
themselves keep their types.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# A number is multiplied by its scale; what then is too large becomes the largest.
WEIGHT = 256.0  # up to 1.75; in full precision down to 6e-5
H = 128.0  # |h| < 1, and up to 3.5 behind a dropout mask
M = 8.0  # up to 56
GRADIENT = 32.0  # what the largest gradient of an h becomes; those of z are sums over many steps


def rounded(x: Tensor, scale: float, dtype: torch.dtype = E4M3) -> Tensor:
    """x times a scale in 8 bits."""
    return (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def gradient_scale(*given: Tensor | None) -> Tensor:
    """A power of two, (1) fp32, for the gradients of a chunk that is given these; nothing is read back."""
    ends = [end.float() for x in given if x is not None for end in torch.aminmax(x)]
    largest = torch.stack(ends).abs().max().clamp(min=1e-30)
    return torch.exp2(torch.floor(torch.log2(GRADIENT / largest))).view(1)

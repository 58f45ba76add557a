"""Exact products of an int8 matrix with 15-bit activations, by whatever the machine multiplies fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mulstm.errors import BackendError

LOW_BITS = 7
KINDS = ("int8", "float32", "float64")
_EXACT = {"float32": 1 << 24, "float64": 1 << 53}  # whole numbers below are all there
_ALIGN = 32  # CUDA's int8 product wants sides that are multiples of 8, and is faster at 32

Product = Callable[[Tensor], Tensor]  # (2, B, K) int8 planes -> (B, J) int32


def planes(v: Tensor) -> Tensor:
    """(2, ...) int8: v = 128 * first + second, with the second in 0 ... 127."""
    return torch.stack([v >> LOW_BITS, v & ((1 << LOW_BITS) - 1)]).to(torch.int8)


def choose(W: Tensor, device: torch.device, kind: str = "auto") -> Product:
    """A function from planes of activations to sum_k W[j,k] v[k] / 128, the low plane's part rounded down."""
    if kind not in ("auto", *KINDS):
        raise BackendError(f"There is no integer product {kind!r}. Choose auto, {', '.join(KINDS)}.")
    W = W.to(device)
    if kind == "auto":
        kind = "int8" if _int8_is_exact(W) else "float32"
    sums = _int8(W) if kind == "int8" else _floats(W, kind)

    def product(v: Tensor) -> Tensor:
        both = sums(v.reshape(-1, v.shape[-1]))
        high, low = both.view(2, -1, both.shape[-1])
        return high + (low >> LOW_BITS)

    return product


def _int8(W: Tensor) -> Callable[[Tensor], Tensor]:
    J, K = W.shape
    if W.device.type == "cpu":
        right = W.T
        return lambda v: torch._int_mm(v, right)
    padded = torch.zeros(-(-J // _ALIGN) * _ALIGN, -(-K // _ALIGN) * _ALIGN, dtype=torch.int8, device=W.device)
    padded[:J, :K] = W
    right, pad = padded.T, padded.shape[1] - K

    def sums(v: Tensor) -> Tensor:
        rows = max(_ALIGN, -(-v.shape[0] // _ALIGN) * _ALIGN)  # CUDA refuses 16 rows and fewer
        v = torch.nn.functional.pad(v, (0, pad, 0, rows - v.shape[0]))
        return torch._int_mm(v, right)[:, :J]

    return lambda v: sums(v)[: v.shape[0]]


def _floats(W: Tensor, kind: str) -> Callable[[Tensor], Tensor]:
    """Floating point that never rounds: no partial sum, in whatever order, leaves the exact whole numbers."""
    dtype = getattr(torch, kind)
    most = int(W.to(torch.int64).abs().sum(dim=1).max()) << LOW_BITS if W.numel() else 0
    pieces = min(W.shape[1], most // (_EXACT[kind] - 1) + 1)
    width = -(-W.shape[1] // pieces)
    while any(int(p.to(torch.int64).abs().sum(dim=1).max()) << LOW_BITS >= _EXACT[kind] for p in W.split(width, 1)):
        width = -(-width // 2)
    rights = [p.T.to(dtype) for p in W.split(width, dim=1)]

    def sums(v: Tensor) -> Tensor:
        parts = v.to(dtype).split(width, dim=1)
        total = (parts[0] @ rights[0]).to(torch.int32)
        for part, right in zip(parts[1:], rights[1:], strict=True):
            total += (part @ right).to(torch.int32)
        return total

    return sums


def _int8_is_exact(W: Tensor) -> bool:
    """Whether this machine's int8 product of W, driven to its extremes, is right.

    Processors without the right instruction may add pairs of products in 16 bits, which saturate.
    """
    signs = torch.where(W < 0, -128, 127).to(torch.int8)
    probe = torch.cat([signs[:2], torch.full_like(signs[:1], 127), torch.full_like(signs[:1], -128)])
    try:
        sums = _int8(W)(probe)
    except RuntimeError:
        return False
    return torch.equal(sums.cpu().double(), probe.cpu().double() @ W.cpu().double().T)

"""Exact products of int8 matrices, by whatever the machine multiplies fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mulstm.errors import BackendError
from mulstm.ops import modes

LOW_BITS = 7
KINDS = ("int8", "float32", "float64")
_EXACT = {"float32": 1 << 24, "float64": 1 << 53}  # below, floating point holds every whole number
_ALIGN = 32  # CUDA's int8 product wants sides that are multiples of 8, and is faster at 32

Sums = Callable[[Tensor], Tensor]


def planes(v: Tensor) -> Tensor:
    """(2, ...) int8 of 15-bit numbers: v = 128 * first + second, with the second in 0 ... 127."""
    v = v.to(torch.int16)
    both = torch.empty((2, *v.shape), dtype=torch.int8, device=v.device)
    both[0] = v >> LOW_BITS
    both[1] = v & ((1 << LOW_BITS) - 1)
    return both


class Products:
    """How one device multiplies int8 matrices into int32 sums without an error. All kinds give the same."""

    def __init__(self, device: torch.device, kind: str = "auto") -> None:
        if kind not in ("auto", *KINDS):
            raise BackendError(f"There is no integer product {kind!r}. Choose auto, {', '.join(KINDS)}.")
        self.device = device
        self.kind = kind
        if kind in ("auto", "int8"):
            exact = _int8_is_exact(device)
            if kind == "int8" and not exact:
                raise BackendError("The int8 products of this machine are not exact. Say float32, or auto.")
            self.kind = "int8" if exact else "float32"

    def by(self, W: Tensor) -> Sums:
        """The function from v (B, K) to v @ W.T, (B, J) int32, for a W (J, K) used again and again."""
        W = W.to(self.device)
        if self.kind == "int8":
            return _int8(W)
        return _floats(W, self.kind)

    def by_planes(self, W: Tensor) -> PlaneProduct:
        """From planes (2, B, K) to (B, J): the high plane's sums plus the low plane's, shifted down."""
        return PlaneProduct(self.by(W))

    def once(self, a: Tensor, b: Tensor) -> Tensor:
        """a (M, K) @ b (K, J), for matrices that both change."""
        return self.by(b.T)(a)


class PlaneProduct:
    """The product of a matrix with numbers in two planes."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def apart(self, v: Tensor) -> Tensor:
        """The sums of the high plane, then those of the low one: (2 B, J)."""
        return self._sums(v.reshape(2 * v.shape[1], -1))

    def __call__(self, v: Tensor) -> Tensor:
        high, low = self.apart(v).chunk(2)
        return high + (low >> LOW_BITS)


def _int8(W: Tensor) -> Sums:
    J, K = W.shape
    if W.device.type == "cpu":
        if K == 1:  # torch 2.13 multiplies a single column wrongly
            return lambda v: (v.to(torch.int32) * W.T).to(torch.int32)
        right = W.T

        def plain(v: Tensor) -> Tensor:
            return torch._int_mm(v, right)

        return plain
    rows, columns = _up(J), _up(K)
    right = torch.nn.functional.pad(W, (0, columns - K, 0, rows - J)).T

    def sums(v: Tensor) -> Tensor:
        B = v.shape[0]
        v = torch.nn.functional.pad(v, (0, columns - K, 0, _up(B) - B))
        return torch._int_mm(v, right)[:B, :J]

    return sums


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _floats(W: Tensor, kind: str) -> Sums:
    """Floating point that never rounds: no partial sum, in whatever order, leaves the exact whole numbers."""
    dtype = getattr(torch, kind)
    width = _EXACT[kind] >> (2 * LOW_BITS)  # so many products of -128 with -128 are still exact
    rights = [piece.T.to(dtype) for piece in torch.split(W, width, dim=1)]

    def sums(v: Tensor) -> Tensor:
        parts = torch.split(v.to(dtype), width, dim=1)
        with modes.without_autocast(W.device):  # it would round
            total = (parts[0] @ rights[0]).to(torch.int32)
            for part, right in zip(parts[1:], rights[1:], strict=True):
                total += (part @ right).to(torch.int32)
        return total

    return sums


def _int8_is_exact(device: torch.device) -> bool:
    """Whether this machine's int8 product, driven to its extremes, is right.

    Processors without the right instruction may add pairs of products in 16 bits, which saturate.
    """
    for K in (1, 2, 3, 200):
        most = torch.full((48, K), 127, dtype=torch.int8, device=device)
        least = torch.full_like(most, -128)
        mixed = torch.where(torch.arange(K, device=device) % 3 == 0, most, least)
        W, v = torch.cat([most, -most, mixed.clamp(min=-127)]), torch.cat([most, least, mixed])
        try:
            sums = _int8(W)(v)
        except RuntimeError:
            return False
        if not torch.equal(sums.cpu().double(), v.cpu().double() @ W.cpu().double().T):
            return False
    return True

"""Products with a matrix that many steps share: packed once, then as fast as the machine allows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mulstm.ops import native
from mulstm.ops.memory import empty

PACK_FROM = 4  # uses after which packing has paid for itself
SMALL = 1 << 20  # multiplications in one product, below which oneDNN's call costs more than it gains
CACHED = 1 << 23  # bytes; a matrix below it stays in some cache between steps
_KEPT = "_mulstm_products"


class Step(Protocol):
    """x -> x W^T, in a type of its own."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor: ...


class Product(Step, Protocol):
    """x -> x W^T, in x's type."""

    def plus(self, x: Tensor, add: Tensor) -> Tensor:
        """add + x W^T."""
        ...


class Plain:
    """What every device and type can do."""

    def __init__(self, W: Tensor) -> None:
        self.W_T, self.dtype = W.T, W.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.W_T)

    def plus(self, x: Tensor, add: Tensor) -> Tensor:
        return torch.addmm(add, x, self.W_T)


class Packed:
    """oneDNN with the matrix in its own layout: a quarter faster than BLAS, and bf16 at full speed."""

    def __init__(self, W: Tensor, lanes: int) -> None:
        self.W, self.dtype = torch.ops.mkldnn._reorder_linear_weight(W, lanes), W.dtype
        self.linear: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x, self.W, None, "none", [], "")
        return y

    def plus(self, x: Tensor, add: Tensor) -> Tensor:
        # oneDNN's own sum of the two takes longer than this one.
        return self(x).add_(add)


class Split:
    """One lane, float32, a matrix larger than the caches: as a batched product it is read by all threads
    at the memory's speed; the matrix-vector routine of BLAS uses one thread and reaches half of that."""

    def __init__(self, W: Tensor, parts: int) -> None:
        self.W, self.dtype = W.view(parts, W.shape[0] // parts, W.shape[1]), W.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(self.W, x.T.expand(self.W.shape[0], -1, 1)).view(1, -1)

    def plus(self, x: Tensor, add: Tensor) -> Tensor:
        return self(x).add_(add)


@dataclass
class _Forms:
    """Of a matrix that does not change: made when they are first asked for."""

    one: Product | None = None  # for one lane
    several: Product | None = None
    vectors: Any = None  # the CPU's


def product(W: Tensor, lanes: int, uses: int) -> Product:
    """The fastest product with W for so many lanes and uses."""
    if W.device.type != "cpu" or W.dtype == torch.float64:
        return Plain(W)
    kept: _Forms | None = getattr(W, _KEPT, None)
    if kept is None:
        return _choose(W, lanes, uses)
    if lanes == 1:
        kept.one = kept.one or _choose(W, lanes, PACK_FROM)
        return kept.one
    kept.several = kept.several or _choose(W, lanes, PACK_FROM)
    return kept.several


def step_product(W: Tensor, lanes: int, uses: int) -> Step:
    """The same where the result may be float32 whatever the operands are, as the CPU's vectors make it."""
    kept: _Forms | None = getattr(W, _KEPT, None)
    vectors = native.products()
    if lanes == 1 or (kept is None and uses < PACK_FROM) or not vectors.VectorProduct.fits(W):
        return product(W, lanes, uses)
    kept = kept or _Forms()
    kept.vectors = kept.vectors or vectors.VectorProduct(W)
    step: Step = vectors.StepProduct(kept.vectors, lanes)
    return step


def many(x: Tensor, W: Tensor, b: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """x W^T + b of many rows, into y where it is given."""
    if _is_native(x) and x.is_contiguous() and native.products().VectorProduct.fits(W):
        made: Tensor = native.products().VectorProduct(W)(x, b, y)
        return made
    if y is None:
        found = product(W, len(x), PACK_FROM)(x)
        return found if b is None else found + b
    return torch.mm(x, W.T, out=y) if b is None else torch.addmm(b, x, W.T, out=y)


def _is_native(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and native.unavailable() is None


def gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW of y = x W^T, both (rows, ...)."""
    both = _native_gradients(dy, x)
    if both is not None:
        return both[0]
    return torch.mm(dy.T, x, out=empty((dy.shape[1], x.shape[1]), dy.dtype, dy.device))


def gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """dW and db of y = x W^T + b."""
    both = _native_gradients(dy, x)
    return (gradient(dy, x), dy.sum(0)) if both is None else both


def _native_gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    if not (_is_native(dy) and native.products().gradient_fits(dy, x)):
        return None
    both: tuple[Tensor, Tensor] = native.products().gradient(dy, x)
    return both


def keep(W: Tensor) -> Tensor:
    """W under a new name; the caller promises that it does not change, and its packed form stays with it."""
    W = W.detach()
    setattr(W, _KEPT, _Forms())
    return W


def _choose(W: Tensor, lanes: int, uses: int) -> Product:
    if lanes == 1 and W.dtype == torch.float32 and W.is_contiguous() and W.nbytes > CACHED:
        for parts in (4, 2, 5, 3):
            if W.shape[0] % parts == 0:
                return Split(W, parts)
    if uses >= PACK_FROM and not _small(W, lanes) and _onednn(W.dtype):
        return Packed(W, lanes)
    return Plain(W)


def _small(W: Tensor, lanes: int) -> bool:
    """Whether BLAS is as good and cheaper to call."""
    if W.dtype != torch.float32:
        return lanes * W.numel() <= SMALL >> 4
    return W.nbytes <= CACHED if lanes == 1 else lanes * W.numel() <= SMALL


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has oneDNN's packed product for the type: tried, not guessed."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        with torch.no_grad(), torch.device("cpu"):
            W, x = torch.eye(4, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype)
            return bool((Packed(W, 3).plus(x, torch.ones(3, 4, dtype=dtype)) == x @ W.T + 1).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _onednn(dtype: torch.dtype) -> bool:
    return bool(torch.backends.mkldnn.enabled) and _can_pack(dtype)

"""The two ends of the model on a GPU: symbols to input rows, h to losses, with their backwards."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mulstm.ops.triton_beside import Beside
from mulstm.ops.triton_layer import column_sums, wide
from mulstm.ops.triton_pack import pack_rows, unpack_rows
from mulstm.ops.triton_plan import padded
from mulstm.ops.triton_steps import product_fp32

R = 8  # rows of a program


@triton.jit
def _embed(
    x, lanes, table, mask, out, rows, B, N, E, EP,
    HAS_TABLE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LANES: tl.constexpr,
    R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """R rows of the input: a symbol's (masked) embedding or its one-hot vector, then ones, then zeros.

    What is no symbol becomes NaN: to tell the host, it would have to wait.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    k = tl.arange(0, BE)[None, :]
    symbol = tl.load(x + row, mask=row < rows, other=0)
    known = (symbol >= 0) & (symbol < N)
    inside = (row < rows) & (k < E) & known
    if HAS_TABLE:
        y = tl.load(table + symbol * E + k, mask=inside, other=0.0)
        if HAS_MASK:
            lane = tl.load(lanes + row, mask=row < rows, other=0) if HAS_LANES else row % B
            y *= tl.load(mask + lane * E + k, mask=inside, other=0.0)
    else:
        y = tl.where(k == symbol, 1.0, 0.0)
    y = tl.where((k == E) | (k == E + 1), 1.0, y)
    y = tl.where(known, y, float("nan"))
    tl.store(out + row * EP + k, y.to(out.dtype.element_ty), mask=(row < rows) & (k < EP))


@triton.jit
def _masked(
    dx, lanes, mask, out, rows, B, E, EP,
    HAS_MASK: tl.constexpr, HAS_LANES: tl.constexpr, R: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The gradient of R unmasked embeddings."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    k = tl.arange(0, BE)[None, :]
    inside = (row < rows) & (k < E)
    d = tl.load(dx + row * EP + k, mask=inside, other=0.0)
    if HAS_MASK:
        lane = tl.load(lanes + row, mask=row < rows, other=0) if HAS_LANES else row % B
        d = (d * tl.load(mask + lane * E + k, mask=inside, other=0.0)).to(out.dtype.element_ty)
    tl.store(out + row * EP + k, d, mask=(row < rows) & (k < EP))


class EmbedFunction(torch.autograd.Function):
    """The input's rows (rows, EP) from symbols, (T, B) or with `lanes` (rows); without a table one-hot."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lanes: Tensor | None, table: Tensor | None, mask: Tensor | None, N: int
    ) -> Tensor:
        rows = x.numel()
        table = None if table is None else table.contiguous()
        E = N if table is None else table.shape[1]
        out = torch.empty(rows, wide(E), dtype=torch.bfloat16, device=x.device)
        _embed[(triton.cdiv(rows, R),)](
            x, lanes, table, mask, out, rows, x.shape[-1], N, E, wide(E),
            HAS_TABLE=table is not None, HAS_MASK=mask is not None, HAS_LANES=lanes is not None,
            R=R, BE=triton.next_power_of_2(wide(E)), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, lanes, mask)
        ctx.shape = (N, E)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[2]:
            return None, None, None, None, None
        (dx,) = grads
        x, lanes, mask = ctx.saved_tensors
        N, E = ctx.shape
        rows, EP = dx.shape
        d = torch.empty_like(dx)
        _masked[(triton.cdiv(rows, R),)](
            dx, lanes, mask, d, rows, x.shape[-1], E, EP,
            HAS_MASK=mask is not None, HAS_LANES=lanes is not None,
            R=R, BE=triton.next_power_of_2(EP), num_warps=4,
        )  # fmt: skip
        # As a product with the one-hot matrix: in a fixed order, unlike atomic additions.
        hot = EmbedFunction.apply(x, None, None, None, N)
        return None, None, product_fp32(hot.t(), d)[:N, :E], None, None


@triton.jit
def _losses(
    logits, bias, y, losses, lse, rows, N, NP, HAS_BIAS: tl.constexpr, R: tl.constexpr, BN: tl.constexpr
):
    """-log p of each row's target, 0 where it is negative, NaN behind the alphabet."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    n = tl.arange(0, BN)
    real = row < rows
    # Whole rows, so that loads are wide; what is behind the alphabet is no symbol.
    s = tl.load(logits + row[:, None] * NP + n[None, :], mask=real[:, None] & (n < NP)[None, :], other=0.0)
    s = tl.where((n < N)[None, :], s, float("-inf"))
    if HAS_BIAS:
        s += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    top = tl.max(s, axis=1)
    total = top + tl.log(tl.sum(tl.exp(s - top[:, None]), axis=1))
    target = tl.load(y + row, mask=real, other=-1)
    chosen = tl.sum(tl.where(n[None, :] == target[:, None], s, 0.0), axis=1)
    chosen = tl.where(target < N, chosen, float("nan"))
    tl.store(losses + row, tl.where(target >= 0, total - chosen, 0.0), mask=real)
    tl.store(lse + row, total, mask=real)


@triton.jit
def _logit_gradients(
    logits, bias, y, lse, share, dlogits, rows, N, NP,
    HAS_BIAS: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(p - target) * share, 0 where there is no target and behind the alphabet."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    n = tl.arange(0, BN)
    real = row < rows
    # Whole rows, so that loads are wide; what is behind the alphabet is no symbol.
    s = tl.load(logits + row[:, None] * NP + n[None, :], mask=real[:, None] & (n < NP)[None, :], other=0.0)
    s = tl.where((n < N)[None, :], s, float("-inf"))
    if HAS_BIAS:
        s += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    p = tl.exp(s - tl.load(lse + row, mask=real, other=0.0)[:, None])
    target = tl.load(y + row, mask=real, other=-1)
    d = tl.where(n[None, :] == target[:, None], p - 1.0, p) * tl.load(share)
    d = tl.where((target >= 0)[:, None], d, 0.0)
    tl.store(
        dlogits + row[:, None] * NP + n[None, :], d.to(dlogits.dtype.element_ty),
        mask=real[:, None] & (n < NP)[None, :],
    )  # fmt: skip


def pack_output(W_out: Tensor, H: int) -> list[Tensor]:
    """(NP, HP) in bf16 for each layer whose h the output reads."""
    N = W_out.shape[0]
    NP, HP = -(-N // 64) * 64, padded(H)
    packed = []
    for first in range(0, W_out.shape[1], H):
        W = torch.empty(NP, HP, dtype=torch.bfloat16, device=W_out.device)
        part = W_out if W_out.shape[1] == H else W_out[:, first : first + H].contiguous()
        pack_rows(part, None, None, None, W, 1)
        packed.append(W)
    return packed


def logits_of(hs: list[Tensor], packed: list[Tensor]) -> Tensor:
    """(T * B, NP) in fp32, without the bias; columns behind the alphabet are 0."""
    sums = [product_fp32(h.flatten(0, 1), W.t()) for h, W in zip(hs, packed, strict=True)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def losses_of(logits: Tensor, bias: Tensor | None, y: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """The nats of each row, (T * B), and its normaliser."""
    rows, NP = logits.shape
    losses = torch.empty(rows, device=logits.device)
    lse = torch.empty(rows, device=logits.device)
    _losses[(triton.cdiv(rows, R),)](
        logits, bias, y, losses, lse, rows, N, NP,
        HAS_BIAS=bias is not None, R=R, BN=triton.next_power_of_2(NP), num_warps=4,
    )  # fmt: skip
    return losses, lse


class LossFunction(torch.autograd.Function):
    """The mean nats of the targets y (T, B) >= 0 under h of the layers that the output reads."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, H: int, W_out: Tensor, b_out: Tensor | None, *hs: Tensor) -> Tensor:
        packed = pack_output(W_out, H)
        logits = logits_of(list(hs), packed)
        losses, lse = losses_of(logits, b_out, y, W_out.shape[0])
        count = (y >= 0).sum().clamp(min=1)
        ctx.save_for_backward(y, W_out, b_out, logits, lse, count, *packed, *hs)
        ctx.H = H
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, W_out, b_out, logits, lse, count, *rest = ctx.saved_tensors
        layers = len(rest) // 2
        packed, hs = rest[:layers], rest[layers:]
        rows, NP = logits.shape
        N, H = W_out.shape[0], ctx.H
        d = torch.empty(rows, NP, dtype=torch.bfloat16, device=logits.device)
        _logit_gradients[(triton.cdiv(rows, R),)](
            logits, b_out, y, lse, grads[0] / count, d, rows, N, NP,
            HAS_BIAS=b_out is not None, R=R, BN=triton.next_power_of_2(NP), num_warps=4,
        )  # fmt: skip
        beside = Beside(d.device)
        parts, kept = [], []
        none = logits.new_empty(0)
        with beside.fork():
            for k, h in enumerate(hs):
                kept.append(product_fp32(d.t(), h.flatten(0, 1)))
                part = W_out if layers == 1 else W_out[:, k * H : (k + 1) * H].contiguous()
                parts.append(unpack_rows(kept[-1], part, None, none, None, None, 0, 1)[0])
            dW_out = parts[0] if layers == 1 else torch.cat(parts, dim=1)
            db = None
            if b_out is not None:
                db = column_sums(d)[:N]
        dhs = [torch.mm(d, W).view(h.shape) for h, W in zip(hs, packed, strict=True)]
        beside.join()
        return None, None, dW_out, db, *dhs

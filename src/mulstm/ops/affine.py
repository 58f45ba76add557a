"""The products before the recurrence, x W^T + b for a whole chunk, into kept memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mulstm.ops import memory, modes
from mulstm.ops.products import gradient, gradients, many


def affine(x: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
    """As torch.nn.functional.linear, x of any shape (..., E); large results on a CPU fill no fresh pages."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":  # before a size is asked for: it may be open
        return torch.nn.functional.linear(x, W, b)
    rows = x.numel() // x.shape[-1]
    large = rows * W.shape[0] * x.dtype.itemsize >= memory.SMALLEST
    if not large or not _fits(x, W, b) or modes.objection() is not None:
        return torch.nn.functional.linear(x, W, b)
    y: Tensor = _affine(x.reshape(rows, -1), W, b)
    return y.view(*x.shape[:-1], -1)


def _fits(x: Tensor, W: Tensor, b: Tensor | None) -> bool:
    """Whether shapes are as they should be, and all of one type, the one that autocast asks for."""
    if W.dim() != 2 or W.shape[1] != x.shape[-1] or (b is not None and b.shape != W.shape[:1]):
        return False
    asked = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return asked == x.dtype == W.dtype == (x.dtype if b is None else b.dtype)


@torch.library.custom_op("mulstm::affine", mutates_args=())
def _affine(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    b = None if b is None else b.contiguous()
    return many(x, W, b, memory.empty((x.shape[0], W.shape[0]), x.dtype, x.device))


@_affine.register_fake
def _(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], W.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, W, b = inputs
    ctx.save_for_backward(x, W)
    ctx.biased = b is not None


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, W = ctx.saved_tensors
    wants_x, wants_W, wants_b = ctx.needs_input_grad
    wants_b = ctx.biased and wants_b
    # What is packed has no derivative of its own, and knows nothing of a batch of gradients.
    if torch.is_grad_enabled() or modes.is_batch(dy):
        return (
            dy @ W if wants_x else None,
            dy.T @ x if wants_W else None,
            dy.sum(0) if wants_b else None,
        )
    dy = dy.contiguous()
    dx = many(dy, W.T) if wants_x else None
    if wants_W and wants_b:
        return dx, *gradients(dy, x)
    return dx, gradient(dy, x) if wants_W else None, dy.sum(0) if wants_b else None


_affine.register_autograd(_gradients, setup_context=_setup_context)

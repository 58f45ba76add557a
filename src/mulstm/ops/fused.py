"""The recurrence with its backward written out: no tape, and one product for each weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mulstm.ops import fused_loops, fused_native, modes
from mulstm.ops.fused_loops import Gradients, Inputs, Saved, saved_shapes
from mulstm.ops.reference import State

_FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def forward(x: Inputs, save: bool) -> tuple[Tensor, Tensor, Saved]:
    """By the fastest loop that can."""
    quick = fused_native.why_not(x) is None
    return fused_native.forward(x, save) if quick else fused_loops.forward(x, save)


def backward(dh: Tensor, dc_T: Tensor, x: Inputs, h: Tensor, saved: Saved) -> Gradients:
    """Likewise; either understands what the other has saved."""
    quick = fused_native.why_not(x) is None
    return (fused_native.backward if quick else fused_loops.backward)(dh, dc_T, x, h, saved)


def why_not(zx: Tensor) -> str | None:
    """None, or the reason why this backend cannot run chunks of this kind."""
    if zx.device.type not in ("cpu", "cuda"):
        return f"it knows CPU and CUDA, and the tensors are on {zx.device}"
    if zx.dtype not in _FLOATS:
        return f"it knows float32, bfloat16 and float64, not {zx.dtype}"
    return None


def recurrence(
    mx: Tensor | None,  # (T, B, H)
    zx: Tensor,  # (T, B, 4H)
    W_mh: Tensor | None,  # (H, H)
    W_zm: Tensor,  # (4H, H)
    state: State,
    mask: Tensor | None = None,
    px: Tensor | None = None,  # (T, B, 4H)
    b_h: Tensor | None = None,
    unit: str = "standard",
) -> tuple[Tensor, State]:
    """All h of a chunk, (T, B, H), and the state after it."""
    x = Inputs(mx, zx, W_mh, W_zm, state.h, state.c, mask, px, b_h, unit)
    if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in x):
        h, c_T = _forward(*x)[:2]
    elif torch.compiler.is_compiling():
        h, c_T = _infer(*x)
    else:  # the dispatcher costs as much as a small step
        h, c_T, _ = forward(x, save=False)
    return h, State(h[-1], c_T)


@torch.library.custom_op("mulstm::fused_infer", mutates_args=())
def _infer(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> tuple[Tensor, Tensor]:
    h, c_T, _ = forward(Inputs(mx, zx, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit), save=False)
    return h, c_T.clone() if unit == "tanh" else c_T


@_infer.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    x = Inputs(*inputs)
    return x.zx.new_empty(*x.zx.shape[:2], x.h_0.shape[1]), x.c_0.new_empty(x.c_0.shape)


@torch.library.custom_op("mulstm::fused_forward", mutates_args=())
def _forward(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h, the last c, and the fields of Saved."""
    x = Inputs(mx, zx, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit)
    h, c_T, s = forward(x, save=True)
    return h, c_T.clone(), s.gates, s.c, s.tanh, s.a, s.m, s.r


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x = Inputs(*inputs)
    T, B, _ = x.zx.shape
    saved = (x.zx.new_empty(shape, dtype=dtype) for shape, dtype in saved_shapes(x, T))
    return x.zx.new_empty(T, B, x.h_0.shape[1]), x.c_0.new_empty(x.c_0.shape), *saved


@torch.library.custom_op("mulstm::fused_backward", mutates_args=())
def _backward(
    dh: Tensor,  # (T, B, H)
    dc_T: Tensor,  # (B, H)
    mx: Tensor | None,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
    h: Tensor,
    gates: Tensor,
    c: Tensor,
    tanh: Tensor,
    a: Tensor,
    m: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of Gradients."""
    x = Inputs(mx, h, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit)  # zx itself is not wanted any more
    dmx, dzx, dW_mh, dW_zm, dh_0, dc_0, dpx, db_h = backward(dh, dc_T, x, h, Saved(gates, c, tanh, a, m, r))
    return dmx, dzx, dW_mh, dW_zm, dh_0, dc_0, dpx, db_h


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    _, _, mx, W_mh, W_zm, h_0, c_0, _, px, b_h, _, h, *_ = inputs
    dzx = h.new_empty(*h.shape[:2], W_zm.shape[0])
    wanted = (mx, W_mh, W_zm, h_0, c_0, px, b_h)
    dmx, *rest = (h_0.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)
    return dmx, dzx, *rest


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mx, _zx, W_mh, W_zm, h_0, c_0, mask, px, b_h, unit = inputs
    h, _c_T, *saved = output
    ctx.save_for_backward(mx, W_mh, W_zm, h_0, c_0, mask, px, b_h, h, *saved)
    ctx.unit = unit
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh: Tensor | None, dc_T: Tensor | None, *_saved: Tensor | None) -> tuple[Any, ...]:
    mx, W_mh, W_zm, h_0, c_0, mask, px, b_h, h, *saved = ctx.saved_tensors
    dh = torch.zeros_like(h) if dh is None else dh
    dc_T = torch.zeros_like(c_0) if dc_T is None else dc_T
    with modes.without_autocast(dh.device):
        dmx, dzx, dW_mh, dW_zm, dh_0, dc_0, dpx, db_h = _backward(
            dh, dc_T, mx, W_mh, W_zm, h_0, c_0, mask, px, b_h, ctx.unit, h, *saved
        )
    if mx is None:
        dmx = dW_mh = None
    return (
        dmx,
        dzx,
        dW_mh,
        dW_zm,
        dh_0,
        dc_0,
        None,
        None if px is None else dpx,
        None if b_h is None else db_h,
        None,
    )


_forward.register_autograd(_gradients, setup_context=_setup_context)
_backward.register_autograd(modes.no_second_derivative)

"""The backend "triton": the recurrence on a GPU in bf16, for any width and in the paper's order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mulstm.ops import modes
from mulstm.ops import triton_steps as steps
from mulstm.ops.cuda_source import LARGEST_SHARED
from mulstm.ops.reference import State
from mulstm.ops.triton_cell import to_packed
from mulstm.ops.triton_choice import plan_for
from mulstm.ops.triton_chunk import Chunk, Saved
from mulstm.ops.triton_plan import padded


def why_not(zx: Tensor) -> str | None:
    """None, or the reason why this backend cannot run chunks of this kind."""
    if torch.cuda.get_device_capability(zx.device) < (9, 0):
        return f"it needs a Hopper GPU or newer, and this is {torch.cuda.get_device_name(zx.device)}"
    properties = torch.cuda.get_device_properties(zx.device)
    if getattr(properties, "shared_memory_per_block_optin", LARGEST_SHARED) < LARGEST_SHARED:
        return f"its kernels need {LARGEST_SHARED >> 10} KB of shared memory, and {properties.name} has less"
    if zx.dtype != torch.bfloat16:
        return f"it computes in bfloat16 (c in float32), and the tensors are {zx.dtype}"
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
    H = state.h.shape[1]
    HP = padded(H)
    k = zx.shape[2] // H
    W_mh_p = None if W_mh is None else torch.nn.functional.pad(W_mh, (0, HP - H, 0, HP - H)).contiguous()
    tensors = (
        _pad(mx, HP),
        to_packed(zx, k, HP),
        None if px is None else to_packed(px, k, HP),
        W_mh_p,
        _pad(to_packed(W_zm.t(), k, HP).t(), HP),
        _pad(state.h, HP),
        _pad(state.c.float(), HP if k > 1 else 0),
        None if mask is None else _pad(mask.float(), HP),
        None if b_h is None else _pad(b_h.float(), HP),
    )
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    h, c_T, *_ = _forward(*tensors, unit, save)
    h = h[1:, :, :H]
    return h, State(h[-1], c_T[:, : state.c.shape[1]].to(state.c.dtype))


def _pad(x: Any, HP: int) -> Any:
    """With zeros up to that width, row by row in memory."""
    return x if x is None else torch.nn.functional.pad(x, (0, HP - x.shape[-1])).contiguous()


@torch.library.custom_op("mulstm::triton_forward", mutates_args=())
def _forward(
    mx: Tensor | None,
    zx: Tensor,
    px: Tensor | None,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    b_h: Tensor | None,
    unit: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h from h_0 on, the last c, and what the backward wants: c from c_0 on, z, a, m, r; else empty ones."""
    # A kernel starts on the current device, which autograd sets for the backward by itself.
    with torch.cuda.device(zx.device):
        chunk = Chunk(mx, zx, px, W_mh, W_zm, h_0, c_0, mask, b_h, unit)
        h, *kept = saved = steps.forward(chunk, plan_for(chunk, save), save)
        c, z, a, m, r = kept if save else (x.new_empty(0) for x in kept)
        return h, saved.c_T.clone(), c, z, a, m, r


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    mx, zx, px, _, _, h_0, c_0, _, _, _, save = inputs
    (T, B, width), H = zx.shape, h_0.shape[1]
    shape = (T, B, H) if save and mx is not None else (0,)
    return (
        zx.new_empty(T + 1, B, H),
        torch.empty_like(c_0),
        c_0.new_empty((T + 1, *c_0.shape) if save else (0,)),
        zx.new_empty((T, B, width) if save and px is None else (0,), dtype=torch.float16),
        zx.new_empty(shape),
        zx.new_empty(shape),
        zx.new_empty((T, B, width) if save and px is not None else (0,)),
    )


@torch.library.custom_op("mulstm::triton_backward", mutates_args=())
def _backward(
    dh: Tensor,  # (T + 1, B, H): h_0's place counts, too
    dc_T: Tensor | None,
    mx: Tensor | None,
    zx: Tensor,
    px: Tensor | None,
    W_mh: Tensor | None,
    W_zm: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    b_h: Tensor | None,
    unit: str,
    h: Tensor,
    c: Tensor,
    z: Tensor,
    a: Tensor,
    m: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dmx, dzx, dpx, dW_mh, dW_zm, dh_0, dc_0, db_h; empty where the input is not there."""
    chunk = Chunk(mx, zx, px, W_mh, W_zm, h_0, c_0, mask, b_h, unit)
    saved = Saved(h, c, z, a, m, r)
    g = steps.backward(chunk, saved, dh[1:], None, dc_T, plan_for(chunk))
    products = {name: product() for name, product in steps.weight_gradients(saved, g).items()}
    dW_mh, dW_zm = products.get("W_mh"), products["W_zm"]
    none = h_0.new_empty(0)
    return (
        none if g.dmx is None else g.dmx.contiguous(),
        g.dz.clone(),
        none.clone() if g.dpx is None else g.dpx,
        none.clone() if dW_mh is None else dW_mh.to(W_zm.dtype),
        dW_zm.to(W_zm.dtype),
        g.dh_0 + dh[0],
        g.dc_0,
        none.clone() if g.db_h is None else g.db_h.sum(0),
    )


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    _, _, mx, zx, px, W_mh, W_zm, h_0, c_0, _, b_h, *_ = inputs
    wanted = (mx, zx, px, W_mh, W_zm, h_0, c_0, b_h)
    return tuple(h_0.new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, unit, _save = inputs
    h, _c_T, *saved = output
    ctx.save_for_backward(*tensors, h, *saved)
    ctx.unit = unit
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh: Tensor | None, dc_T: Tensor | None, *_saved: Tensor | None) -> tuple[Any, ...]:
    *inputs, h, c, z, a, m, r = ctx.saved_tensors
    mx, _, px, _, _, _, _, _, b_h = inputs
    dh = torch.zeros_like(h) if dh is None else dh.contiguous()
    dmx, dzx, dpx, dW_mh, dW_zm, dh_0, dc_0, db_h = _backward(dh, dc_T, *inputs, ctx.unit, h, c, z, a, m, r)
    return (
        None if mx is None else dmx,
        dzx,
        None if px is None else dpx,
        None if mx is None else dW_mh,
        dW_zm,
        dh_0,
        dc_0,
        None,
        None if b_h is None else db_h,
        None,
        None,
    )


_forward.register_autograd(_gradients, setup_context=_setup_context)
_backward.register_autograd(modes.no_second_derivative)

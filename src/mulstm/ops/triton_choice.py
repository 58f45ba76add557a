"""Which plan runs a chunk here: the fastest that is stored for its size and passes a trial on this device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from mulstm.ops import cuda_driver, eight, faults
from mulstm.ops import triton_small as small
from mulstm.ops.cuda_source import CompileError
from mulstm.ops.triton_chunk import Chunk
from mulstm.ops.triton_pack import transposed
from mulstm.ops.triton_plan import PLAIN, Plan, plan_in_eight, plan_of
from mulstm.ops.triton_steps import backward, forward, reads_rows


def plan_for(chunk: Chunk, save: bool = True) -> Plan:
    """How this chunk is best run here; without `save`, for no backward."""
    B, H = chunk.h_0.shape
    in_eight = plan_in_eight(H, B) if chunk.W_zm.dtype == eight.E4M3 else None
    if in_eight is not None:  # `eight_works` was asked before the weights were packed so
        return in_eight
    if chunk.px is None and chunk.b_h is None and chunk.unit != "tanh":
        processors = torch.cuda.get_device_properties(chunk.zx.device).multi_processor_count
        lanes = small.lanes_of(H, B, processors)
        if lanes and _works(chunk, Plan(lanes=lanes), save, "whole-chunk"):
            return Plan(lanes=lanes)
    if cuda_driver.why_not(chunk.zx.device) is None:
        plan = plan_of(H, B, cuda=True, px=chunk.px is not None)
        if not plan.uses_cuda or _works(chunk, plan, save, "CUDA step"):
            return plan
    return plan_of(H, B)


def eight_works(H: int, B: int, unit: str, mask: bool, device: torch.device) -> bool:
    """Whether such a layer of multiplicative units can have its recurrent products in 8 bits here."""
    plan = plan_in_eight(H, B)

    def like(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((), dtype=dtype, device=device).expand(shape)

    mx, zx, W_mh, W_zm, h_0 = (
        like(*shape, dtype=torch.bfloat16) for shape in ((1, B, H), (1, B, 4 * H), (H, H), (4 * H, H), (B, H))
    )
    bias = like(H) if unit == "initial" else None
    chunk = Chunk(mx, zx, None, W_mh, W_zm, h_0, like(B, H), like(B, H) if mask else None, bias, unit)
    return plan is not None and _works(chunk, plan, True, "8-bit step")


_WORKS: dict[tuple[Any, ...], bool] = {}


def _works(chunk: Chunk, plan: Plan, save: bool, name: str) -> bool:
    """Whether these kernels agree with cuBLAS and pointwise kernels here: tried once for each shape."""
    # Whether rows are found by an index is no matter: a plan is tried both ways.
    there = (part is not None for part in (chunk.mx, chunk.mask, chunk.b_h))
    px = None if chunk.px is None else chunk.px.dim()
    key = (chunk.zx.device, *chunk.h_0.shape, *there, px, chunk.unit, plan, save)
    if key not in _WORKS:
        if torch.cuda.is_current_stream_capturing():  # a trial reads results back, which a capture forbids
            return False
        why = "failed its self-test"
        try:
            _WORKS[key] = agree(chunk, plan, PLAIN, save)
        except (CompileError, cuda_driver.LaunchError, TritonError) as error:
            _WORKS[key], why = False, f"could not be made ({error})"
        if not _WORKS[key]:
            warnings.warn(f"The {name} kernel {why} and is not used.", stacklevel=2)
    return _WORKS[key]


def agree(like: Chunk, one: Plan, other: Plan, save: bool = True) -> bool:
    """Whether two plans give the same on three steps of random numbers, shaped like a chunk's.

    A plan that can find rows by an index is tried both ways: a later chunk may want the other. Without `save`
    the kernels are other machine code, and there is no index.
    """
    device = like.zx.device
    dice = torch.Generator(device).manual_seed(1)
    failed_before = faults.failed(device)

    def drawn(x: Tensor | None, scale: float = 1.0, shape: tuple[int, ...] | None = None) -> Any:
        if x is None:
            return None
        return (torch.randn(shape or x.shape, generator=dice, device=x.device) * scale).to(x.dtype)

    B, H = like.h_0.shape

    def matrix(W: Tensor | None) -> Any:
        """Of numbers that 8 bits hold where the plan has them."""
        if W is None:
            return None
        made = torch.randn(W.shape, generator=dice, device=W.device) * H**-0.5
        return _unscaled(eight.rounded(made, eight.WEIGHT)) if one.eight else made.to(W.dtype)

    every = (3, B, like.zx.shape[-1])
    given = like.px is not None and like.px.dim() == 3
    chunk = Chunk(
        drawn(like.mx, shape=(3, B, H)), drawn(like.zx, shape=every),
        drawn(like.px, shape=every if given else None), matrix(like.W_mh), matrix(like.W_zm),
        drawn(like.h_0), drawn(like.c_0), drawn(like.mask), drawn(like.b_h), like.unit,
    )  # fmt: skip
    dh = drawn(chunk.zx[..., :H].contiguous())
    ways = [(chunk, other), (chunk, one)]
    if save and reads_rows(chunk, one):
        ways.append((by_rows(chunk, dice), one))
    results = []
    for tried, plan in ways:
        there, back = _in_eight(tried) if plan.eight else (tried, tried)
        saved = forward(there, plan, save)
        dx = [backward(back, saved, dh, None, None, plan).dx] if save else []
        results.append([x.float() for x in (saved.h, saved.c_T, *dx) if x.numel()])
    wanted, *found = results
    apart = [(a - b).norm() / b.norm() for result in found for a, b in zip(result, wanted, strict=True)]
    failed = faults.failed(device)
    if failed and not failed_before:  # the trial's own fault: what runs instead is not to answer for it
        faults.forget(device)
    return not failed and all(float(x) < (0.1 if one.eight else 0.02) for x in apart)


def _unscaled(W: Tensor) -> Tensor:
    return (W.float() / eight.WEIGHT).bfloat16()


def _in_eight(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """The same chunk for the forward and the backward of a plan of 8-bit numbers."""
    W_mh, W_zm = (eight.rounded(W, eight.WEIGHT) for W in (chunk.W_mh, chunk.W_zm) if W is not None)
    turned = chunk._replace(W_mh=transposed(W_mh), W_zm=transposed(W_zm))
    return chunk._replace(W_mh=W_mh, W_zm=W_zm), turned


def by_rows(chunk: Chunk, dice: torch.Generator) -> Chunk:
    """The same chunk with its rows in another order, found by an index."""
    T, B, _ = chunk.shape
    order = torch.randperm(T * B, generator=dice, device=chunk.zx.device)

    def moved(x: Tensor | None) -> Any:
        if x is None:
            return None
        out = torch.empty_like(x.flatten(0, 1))
        out[order] = x.flatten(0, 1)
        return out

    return chunk._replace(mx=moved(chunk.mx), zx=moved(chunk.zx), rows=order.int().view(T, B))

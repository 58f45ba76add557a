"""Which plan runs a chunk here: the fastest that is stored for its size and passes a trial on this device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from mulstm.ops import cuda_driver
from mulstm.ops import triton_small as small
from mulstm.ops.triton_plan import PLAIN, Plan, plan_of
from mulstm.ops.triton_steps import Chunk, backward, forward


def plan_for(chunk: Chunk) -> Plan:
    """How this chunk is best run here."""
    B, H = chunk.h_0.shape
    if chunk.px is None and chunk.b_h is None and chunk.unit != "tanh":
        processors = torch.cuda.get_device_properties(chunk.zx.device).multi_processor_count
        lanes = small.groups_of(H, B, processors)
        if lanes and _works(chunk, Plan(lanes=lanes), "whole-chunk"):
            return Plan(lanes=lanes)
    if cuda_driver.why_not(chunk.zx.device) is None:
        plan = plan_of(H, B, cuda=True, px=chunk.px is not None)
        if not plan.uses_cuda or _works(chunk, plan, "CUDA step"):
            return plan
    return plan_of(H, B)


_WORKS: dict[tuple[Any, ...], bool] = {}


def _works(chunk: Chunk, plan: Plan, name: str) -> bool:
    """Whether these kernels agree with cuBLAS and pointwise kernels here: tried once for each shape."""
    there = (None if part is None else part.dim() for part in (chunk.mx, chunk.px, chunk.mask, chunk.b_h))
    key = (chunk.zx.device, *chunk.h_0.shape, *there, chunk.unit, plan)
    if key not in _WORKS:
        if torch.cuda.is_current_stream_capturing():  # a trial reads results back, which a capture forbids
            return False
        why = "failed its self-test"
        try:
            _WORKS[key] = agree(chunk, plan, PLAIN)
        except (cuda_driver.CompileError, cuda_driver.LaunchError) as error:
            _WORKS[key], why = False, f"could not be made ({error})"
        if not _WORKS[key]:
            warnings.warn(f"The {name} kernel {why} and is not used.", stacklevel=2)
    return _WORKS[key]


def agree(like: Chunk, one: Plan, other: Plan) -> bool:
    """Whether two plans give the same on three steps of random numbers, shaped like a chunk's."""
    dice = torch.Generator(like.zx.device).manual_seed(1)

    def drawn(x: Tensor | None, scale: float = 1.0, steps: int = 0) -> Any:
        if x is None:
            return None
        shape = (steps, *x.shape[1:]) if steps and x.dim() == 3 else x.shape
        return (torch.randn(shape, generator=dice, device=x.device) * scale).to(x.dtype)

    H = like.h_0.shape[1]
    chunk = Chunk(
        drawn(like.mx, steps=3), drawn(like.zx, steps=3), drawn(like.px, steps=3), drawn(like.W_mh, H**-0.5),
        drawn(like.W_zm, H**-0.5), drawn(like.h_0), drawn(like.c_0), drawn(like.mask), drawn(like.b_h),
        like.unit,
    )  # fmt: skip
    dh = drawn(chunk.zx[..., :H].contiguous())
    results = []
    for plan in (one, other):
        saved = forward(chunk, plan, save=True)
        results.append((saved.h.float(), backward(chunk, saved, dh, None, None, plan).dx.float()))
    apart = [(a - b).norm() / b.norm() for a, b in zip(*results, strict=True)]
    failed = small.failed(like.zx.device) or cuda_driver.failed(like.zx.device)
    return not failed and all(float(x) < 0.02 for x in apart)

"""The CUDA kernels in their places in a step: functions of t over a chunk's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mulstm.ops import eight, faults
from mulstm.ops.cuda_driver import kernel
from mulstm.ops.cuda_source import Variant
from mulstm.ops.triton_plan import Form

if TYPE_CHECKING:
    from mulstm.ops.eight import Operands
    from mulstm.ops.triton_chunk import Chunk, Gradients, Saved

Fixed = dict[str, Tensor | None]  # what every step is given
Moving = dict[str, tuple[Tensor, int]]  # step t is given place t + this number of the tensor, around it


def _launcher(
    variant: Variant,
    x: Tensor,  # (T, B, K)
    W: Tensor,
    fixed: Fixed,
    moving: Moving,
    **numbers: float,
) -> Callable[[int], None]:
    """A function of t that multiplies x_t by W, with all else under its name in step.cu."""
    work = kernel(variant, x.device)
    arguments = work.arguments(x, W, faults.flag(x.device))
    for name, number in numbers.items():
        setattr(arguments, name, number)
    for name, tensor in fixed.items():
        setattr(arguments, name, None if tensor is None else tensor.data_ptr())
    # Addresses are counted here: an index into a tensor costs more than all the rest of a launch.
    moves = [
        (name, y.data_ptr(), y.stride(0) * y.element_size(), y.shape[0], ahead)
        for name, (y, ahead) in moving.items()
    ]
    places, B = x.shape[:2]
    launch = work.launcher(arguments)

    def run(t: int) -> None:
        arguments.row = t % places * B
        for name, start, size, count, ahead in moves:
            setattr(arguments, name, start + (t + ahead) % count * size)
        launch()

    return run


def _rows_of(x: Tensor, chunk: Chunk) -> tuple[Fixed, Moving]:
    """Where steps find their rows of mx or zx."""
    return ({}, {"x0": (x, 0)}) if chunk.rows is None else ({"x0": x}, {"rows": (chunk.rows, 0)})


def m_step(
    chunk: Chunk, saved: Saved, form: Form, save: bool, operands: Operands | None = None
) -> Callable[[int], None]:
    """Makes a_t and m_t."""
    mx, W_mh = chunk.mx, chunk.W_mh
    assert mx is not None
    assert W_mh is not None
    variant = Variant(form, "m", save=save, indexed=chunk.rows is not None)
    fixed, moving = _rows_of(mx, chunk)
    moving |= {"y0": (saved.a, 0), "y1": (saved.m, 0)}
    numbers = {"stride_x": mx.stride(-2)}
    if operands is None:
        return _launcher(variant, saved.h, W_mh, fixed, moving, **numbers)
    variant, fixed = replace(variant, eight="e4m3"), fixed | {"y8": operands.m}
    scales = {"undo": 1 / (eight.H * eight.WEIGHT), "scale": eight.M}
    return _launcher(variant, operands.h, W_mh, fixed, moving, **numbers, **scales)


def gates_step(
    chunk: Chunk, saved: Saved, form: Form, save: bool, operands: Operands | None = None
) -> Callable[[int], None]:
    """Makes z_t, c_t and h_t."""
    mx, zx, _, _, W_zm, _, _, mask, b_h, unit, rows = chunk
    h, c, z, _, m, _ = saved
    early = mx is not None
    variant = Variant(
        form, "gates", unit=unit, mask=mask is not None, bias=b_h is not None, save=save, early=early,
        indexed=rows is not None,
    )  # fmt: skip
    fixed, moving = _rows_of(zx, chunk)
    fixed |= {"x2": mask, "x3": b_h}
    moving |= {"x1": (c, 0), "y1": (c, 1), "y2": (h, 1)}
    if save:
        moving["y0"] = (z, 0)
    numbers = {"stride_x": zx.stride(-2)}
    if operands is None:
        return _launcher(variant, m if early else h, W_zm, fixed, moving, **numbers)
    variant, fixed = replace(variant, eight="e4m3"), fixed | {"y8": operands.h}
    scales = {"undo": 1 / (eight.M * eight.WEIGHT), "scale": eight.H}
    return _launcher(variant, operands.m, W_zm, fixed, moving, **numbers, **scales)


def product(x: Tensor, W: Tensor, out: Tensor, form: Form) -> Callable[[int], None]:
    """Makes x_t @ W.T in out_t, and nothing else."""
    return _launcher(Variant(form, "sums"), x, W, {}, {"y0": (out, 0)})


def sums(x: Tensor, W: Tensor, form: Form) -> tuple[Tensor, Callable[[int], None]]:
    """Where x_t @ W comes to stand, in parts to be added, and the function that makes it."""
    out = x.new_empty(form.parts, x.shape[1], W.shape[1])
    return out, _launcher(Variant(form, "sums", rows_are_k=True), x, W, {"y0": out}, {})


def sums_in_eight(x: Tensor, W: Tensor, factor: Tensor, form: Form) -> tuple[Tensor, Callable[[int], None]]:
    """The same of e5m2 numbers and a W that is (N, K), times a factor that stands on the device."""
    out = torch.empty(form.parts, x.shape[1], W.shape[0], dtype=torch.bfloat16, device=x.device)
    fixed: Fixed = {"y0": out, "factor": factor}
    return out, _launcher(Variant(form, "sums", eight="e5m2"), x, W, fixed, {}, undo=1 / eight.WEIGHT)


def dm_step(chunk: Chunk, saved: Saved, out: Gradients, form: Form) -> Callable[[int], None]:
    """Makes da_t and dmx_t from dz_t."""
    mx, dmx = chunk.mx, out.dmx
    assert mx is not None
    assert dmx is not None
    variant = Variant(form, "dm", rows_are_k=True, indexed=chunk.rows is not None)
    fixed, moving = _rows_of(mx, chunk)
    moving |= {"x1": (saved.a, 0), "y0": (out.da, 0), "y1": (dmx, 0)}
    strides = {"stride_x": mx.stride(-2), "stride_y": dmx.stride(1)}
    return _launcher(variant, out.dr, chunk.W_zm, fixed, moving, **strides)


def cell_step(chunk: Chunk, saved: Saved, dh: Tensor, out: Gradients, form: Form) -> Callable[[int], None]:
    """Makes dz and dc of step t - 1 from da_t."""
    W_mh, mask, b_h, unit = chunk.W_mh, chunk.mask, chunk.b_h, chunk.unit
    assert W_mh is not None
    c, z, dz = saved.c, saved.z, out.dz
    variant = Variant(form, "cell", rows_are_k=True, unit=unit, mask=mask is not None, bias=b_h is not None)
    fixed: Fixed = {"x3": mask, "x5": b_h, "y0": out.dc_0, "y2": out.db_h}
    moving: Moving = {"x0": (z, -1), "x1": (c, -1), "x2": (c, 0), "x4": (dh, -1), "y1": (dz, -1)}
    return _launcher(variant, out.da, W_mh, fixed, moving, stride_y=dz.stride(1))

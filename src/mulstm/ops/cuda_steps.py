"""The CUDA kernels in their places in a step: functions of t over a chunk's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from mulstm.ops.cuda_driver import Arguments, fault_flag, kernel
from mulstm.ops.cuda_source import Variant
from mulstm.ops.triton_plan import Form

if TYPE_CHECKING:
    from mulstm.ops.triton_chunk import Chunk, Gradients, Saved

Fields = Iterator[tuple[str, Tensor | None]]


def _launcher(
    variant: Variant,
    x: Tensor,  # (T, B, K)
    W: Tensor,
    given: Callable[[int], Fields],
    stride_x: int = 0,
    stride_y: int = 0,
) -> Callable[[int], None]:
    """A function of t that multiplies x_t by W; `given` names the other tensors of a step."""
    work = kernel(variant, x.device)
    base = work.arguments(x, W, fault_flag(x.device))
    base.stride_x, base.stride_y = stride_x, stride_y
    places, B = x.shape[0], x.shape[1]

    def run(t: int) -> None:
        arguments = Arguments.from_buffer_copy(base)
        arguments.row = t % places * B
        for name, tensor in given(t):
            setattr(arguments, name, None if tensor is None else tensor.data_ptr())
        work.launch(arguments)

    return run


def _rows_of(x: Tensor, chunk: Chunk, t: int) -> Fields:
    """Where a step finds its rows of mx or zx."""
    yield "x0", x[t] if chunk.rows is None else x
    yield "rows", None if chunk.rows is None else chunk.rows[t]


def m_step(chunk: Chunk, saved: Saved, form: Form, save: bool) -> Callable[[int], None]:
    """Makes a_t and m_t."""
    mx, W_mh = chunk.mx, chunk.W_mh
    assert mx is not None
    assert W_mh is not None
    a, m = saved.a, saved.m
    variant = Variant(form, "m", save=save, indexed=chunk.rows is not None)

    def given(t: int) -> Fields:
        k = t % a.shape[0]
        yield from (*_rows_of(mx, chunk, t), ("y0", a[k]), ("y1", m[k]))

    return _launcher(variant, saved.h, W_mh, given, mx.stride(-2))


def gates_step(chunk: Chunk, saved: Saved, form: Form, save: bool) -> Callable[[int], None]:
    """Makes z_t, c_t and h_t."""
    mx, zx, _, _, W_zm, _, _, mask, b_h, unit, rows = chunk
    h, c, z, _, m, _ = saved
    early = mx is not None
    variant = Variant(
        form, "gates", unit=unit, mask=mask is not None, bias=b_h is not None, save=save, early=early,
        indexed=rows is not None,
    )  # fmt: skip
    places = c.shape[0]

    def given(t: int) -> Fields:
        yield from (*_rows_of(zx, chunk, t), ("x1", c[t % places]), ("x2", mask), ("x3", b_h))
        yield from (("y0", z[t] if save else None), ("y1", c[(t + 1) % places]), ("y2", h[t + 1]))

    return _launcher(variant, m if early else h, W_zm, given, zx.stride(-2))


def product(x: Tensor, W: Tensor, out: Tensor, form: Form) -> Callable[[int], None]:
    """Makes x_t @ W.T in out_t, and nothing else."""

    def given(t: int) -> Fields:
        yield "y0", out[t % out.shape[0]]

    return _launcher(Variant(form, "sums"), x, W, given)


def sums(x: Tensor, W: Tensor, form: Form) -> tuple[Tensor, Callable[[int], None]]:
    """Where x_t @ W comes to stand, in parts to be added, and the function that makes it."""
    out = x.new_empty(form.parts, x.shape[1], W.shape[1])

    def given(t: int) -> Fields:
        yield "y0", out

    return out, _launcher(Variant(form, "sums", rows_are_k=True), x, W, given)


def dm_step(chunk: Chunk, saved: Saved, out: Gradients, form: Form) -> Callable[[int], None]:
    """Makes da_t and dmx_t from dz_t."""
    mx, W_zm, dmx = chunk.mx, chunk.W_zm, out.dmx
    assert mx is not None
    assert dmx is not None
    variant = Variant(form, "dm", rows_are_k=True, indexed=chunk.rows is not None)

    def given(t: int) -> Fields:
        yield from (*_rows_of(mx, chunk, t), ("x1", saved.a[t]), ("y0", out.da[t]), ("y1", dmx[t]))

    return _launcher(variant, out.dr, W_zm, given, mx.stride(-2), dmx.stride(1))


def cell_step(chunk: Chunk, saved: Saved, dh: Tensor, out: Gradients, form: Form) -> Callable[[int], None]:
    """Makes dz and dc of step t - 1 from da_t."""
    W_mh, mask, b_h, unit = chunk.W_mh, chunk.mask, chunk.b_h, chunk.unit
    assert W_mh is not None
    c, z, dz = saved.c, saved.z, out.dz
    variant = Variant(form, "cell", rows_are_k=True, unit=unit, mask=mask is not None, bias=b_h is not None)

    def given(t: int) -> Fields:
        yield from (("x0", z[t - 1]), ("x1", c[t - 1]), ("x2", c[t]), ("x3", mask), ("x4", dh[t - 1]))
        yield from (("x5", b_h), ("y0", out.dc_0), ("y1", dz[t - 1]), ("y2", out.db_h))

    return _launcher(variant, out.da, W_mh, given, stride_y=dz.stride(1))

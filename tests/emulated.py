"""Products of 8-bit numbers without a GPU, for tests/interpreted.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mulstm.ops import eight
from mulstm.ops.triton_cell import from_packed
from mulstm.ops.triton_chunk import Chunk
from mulstm.ops.triton_plan import Form


class Emulated:
    """In the place of the kernels in CUDA for products of 8-bit numbers: what they are meant to do."""

    @staticmethod
    def m_step(chunk: Chunk, saved: Any, form: Form, save: bool, operands: Any) -> Any:
        def run(t: int) -> None:
            h, W = operands.h[0].float() / eight.H, chunk.W_mh.float() / eight.WEIGHT  # type: ignore[union-attr]
            saved.a[t] = h @ W.t()
            saved.m[t] = chunk.mx[t] * saved.a[t]  # type: ignore[index]
            operands.m[0] = eight.rounded(saved.m[t], eight.M)

        return run

    @staticmethod
    def gates_step(chunk: Chunk, saved: Any, form: Form, save: bool, operands: Any) -> Any:
        H = chunk.h_0.shape[1]

        def run(t: int) -> None:
            m, W = operands.m[0].float() / eight.M, chunk.W_zm.float() / eight.WEIGHT
            saved.z[t] = chunk.zx[t] + m @ W.t()
            h_hat, i, o, f = from_packed(saved.z[t].float(), 4, H).chunk(4, dim=1)
            saved.c[t + 1] = f.sigmoid() * saved.c[t] + i.sigmoid() * h_hat.tanh()
            h = saved.c[t + 1].tanh() * o.sigmoid()
            saved.h[t + 1] = h if chunk.mask is None else h * chunk.mask
            operands.h[0] = eight.rounded(saved.h[t + 1], eight.H)

        return run

    @staticmethod
    def sums_in_eight(x: Tensor, W: Tensor, factor: Tensor, form: Form) -> tuple[Tensor, Any]:
        out = torch.zeros(form.parts, x.shape[1], W.shape[0], dtype=torch.bfloat16)

        def run(t: int) -> None:
            out[-1] = x[0].float() @ W.float().t() * factor / eight.WEIGHT

        return out, run

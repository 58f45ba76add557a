"""What the loop over a chunk is given, what its forward leaves, and what its backward leaves."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Chunk(NamedTuple):
    """What the recurrence is given, H padded and z in packed order; mx and zx may be strided views."""

    mx: Tensor | None  # (T, B, H), or (P, H) where rows are given
    zx: Tensor  # (T, B, 4H), or (P, 4H)
    # MI-LSTM: what multiplies W_zm h, (T, B, 4H). Or alpha, beta_1, beta_2 and b, (4, 4H) fp32: then zx is
    # u = W_zx x, and the kernels make px = alpha u + beta_1 and zx = beta_2 u + b of it.
    px: Tensor | None
    W_mh: Tensor | None  # (H, H)  bf16, or e4m3 with its scale (ops/eight.py)
    W_zm: Tensor  # (4H, H)
    h_0: Tensor  # (B, H)
    c_0: Tensor  # (B, H)  fp32
    mask: Tensor | None  # (B, H)  fp32
    b_h: Tensor | None  # (H)
    unit: str
    rows: Tensor | None = None  # (T, B) int32: each place's row of mx and zx, for plans that `reads_rows`

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, B and z's width."""
        T, B = (self.zx if self.rows is None else self.rows).shape[:2]
        return T, B, self.zx.shape[-1]


class Saved(NamedTuple):
    """What the forward leaves. Without gradients c has two places in turn and the rest one or none."""

    h: Tensor  # (T + 1, B, H)  from h_0 on
    c: Tensor  # (T + 1, B, H)  fp32, from c_0 on
    z: Tensor  # (T, B, 4H)  fp16; not MI-LSTM, which makes it again of r
    a: Tensor  # (T, B, H)  W_mh h_{t-1}
    m: Tensor  # (T, B, H)
    r: Tensor  # (T, B, 4H)  W_zm m, MI-LSTM only

    @property
    def c_T(self) -> Tensor:
        """The last c."""
        return self.c[(self.h.shape[0] - 1) % self.c.shape[0]]


class Gradients(NamedTuple):
    """What the backward leaves, padded and packed like the chunk."""

    dx: Tensor  # (T, B, H + 4H): dmx and dz side by side, or dz alone
    dmx: Tensor | None  # view
    dz: Tensor  # view; zx's gradient, so that it is du where px are vectors
    dr: Tensor  # (T, B, 4H)  what multiplies W_zm: dz, but for MI-LSTM
    da: Tensor  # (T, B, H)
    dpx: Tensor | None  # shaped like px
    dh_0: Tensor
    dc_0: Tensor
    db_h: Tensor | None  # (B, H) fp32, to be summed over B

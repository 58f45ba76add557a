"""The equations of every cell, once, in the paper's symbols: what the fast backends are judged against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# The order of the four stacked blocks of z, as the paper lists them; fast code takes z apart in this order.
GATES = ("h_hat", "i", "o", "f")

# How z and c become h. LSTM-type units have four blocks in z, "tanh" (the RNNs) has one and no c.
#   standard      c = f c + i tanh(h_hat),  h = tanh(c) o          the paper's equations
#   initial       c = f c + i h_hat,        h = tanh(o c + b_h)    the authors' code behind the RMSprop rows
#   initial-text  c = f c + i tanh(h_hat),  h = tanh(o c)          the same rows as the paper's text has them
#   tanh          h = tanh(z)
UNITS = ("standard", "initial", "initial-text", "tanh")


class State(NamedTuple):
    """What is remembered between steps. For the "tanh" unit c has width 0."""

    h: Tensor  # (B, H)
    c: Tensor  # (B, H), never less than float32

    def detach(self) -> State:
        """Without its history: gradients stop here."""
        return State(self.h.detach(), self.c.detach())


# By this name an exported program that gives one can be saved.
pytree._register_namedtuple(State, serialized_type_name="mulstm.ops.State")


def blocks(unit: str) -> int:
    """How many H-wide blocks z has."""
    return 1 if unit == "tanh" else len(GATES)


def step(
    mx_t: Tensor | None,  # (B, H)   W_mx x_t; None: m_t is h_{t-1}
    zx_t: Tensor,  # (B, 4H)  W_zx x_t + b
    W_mh: Tensor | None,  # (H, H)
    W_zm: Tensor,  # (4H, H)
    prev: State,
    mask: Tensor | None = None,  # (B, H)  variational dropout
    px_t: Tensor | None = None,  # (B, 4H)  MI-LSTM: what multiplies the recurrent product
    b_h: Tensor | None = None,  # (H)     "initial" unit only
    unit: str = "standard",
) -> State:
    """One step of any cell but the tensor RNN."""
    m_t = prev.h if W_mh is None or mx_t is None else mx_t * (prev.h @ W_mh.T)
    r_t = m_t @ W_zm.T
    return finish(zx_t + (r_t if px_t is None else px_t * r_t), prev.c, mask, b_h, unit)


def finish(z_t: Tensor, c_prev: Tensor, mask: Tensor | None, b_h: Tensor | None, unit: str) -> State:
    """From the stacked z_t to the next state."""
    if unit == "tanh":
        h_t, c_t = torch.tanh(z_t), c_prev
    else:
        h_hat_t, i_t, o_t, f_t = z_t.to(c_prev.dtype).chunk(4, dim=-1)
        i_t, o_t, f_t = torch.sigmoid(i_t), torch.sigmoid(o_t), torch.sigmoid(f_t)
        candidate = h_hat_t if unit == "initial" else torch.tanh(h_hat_t)
        c_t = f_t * c_prev + i_t * candidate
        if unit == "standard":
            h_t = torch.tanh(c_t) * o_t
        else:
            inner = o_t * c_t
            h_t = torch.tanh(inner if b_h is None else inner + b_h)
    # A dropped unit is gone for the whole chunk: the output does not see it, and neither does the
    # next step. c is never masked.
    h_t = h_t if mask is None else h_t * mask
    return State(h_t.to(z_t.dtype), c_t)


def recurrence(
    mx: Tensor | None,  # (T, B, H)
    zx: Tensor,  # (T, B, 4H)
    W_mh: Tensor | None,
    W_zm: Tensor,
    state: State,
    mask: Tensor | None = None,
    px: Tensor | None = None,  # (T, B, 4H)
    b_h: Tensor | None = None,
    unit: str = "standard",
) -> tuple[Tensor, State]:
    """All h of a chunk, (T, B, H), and the state after it."""
    h = []
    for t in range(zx.shape[0]):
        mx_t = None if mx is None else mx[t]
        px_t = None if px is None else px[t]
        state = step(mx_t, zx[t], W_mh, W_zm, state, mask, px_t, b_h, unit)
        h.append(state.h)
    return torch.stack(h), state


def tensor_recurrence(
    x: Tensor,  # (T, B)     symbols
    zx: Tensor,  # (T, B, H)
    W_hh: Tensor,  # (N, H, H)  a transition matrix for each symbol
    state: State,
    mask: Tensor | None = None,
) -> tuple[Tensor, State]:
    """The tensor RNN: h_t = tanh(W_hh^(x_t) h_{t-1} + W_hx x_t)."""
    h = []
    for x_t, zx_t in zip(x, zx, strict=True):
        r_t = torch.einsum("bij,bj->bi", W_hh[x_t], state.h)
        state = finish(zx_t + r_t, state.c, mask, None, "tanh")
        h.append(state.h)
    return torch.stack(h), state

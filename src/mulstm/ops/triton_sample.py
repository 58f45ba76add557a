"""One symbol after another on a GPU: four kernels a symbol, many symbols a graph.

Each kernel asks for its weights before it waits for the kernel before it, so that memory never idles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mulstm.ops.graphs import recorded
from mulstm.ops.reference import UNITS
from mulstm.ops.triton_cell import cell_forward, column
from mulstm.ops.triton_pointwise import wait

MOST_STREAMS = 4  # beyond, a matrix product is better


@triton.jit
def _m(
    W_mh, table, symbols, h, m, H, WIDTH,
    S: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """m = mx * (W_mh h), R rows a program; the table's row of a symbol begins with its mx."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BK)
    W = tl.load(W_mh + row[:, None] * H + k[None, :], mask=(row < H)[:, None] & (k < H)[None, :], other=0.0)
    wait(PDL)
    for s in tl.static_range(S):
        x = tl.load(h + s * H + k, mask=k < H, other=0.0)
        a = tl.sum(W.to(tl.float32) * x[None, :], axis=1)
        mx = tl.load(table + tl.load(symbols + s) * WIDTH + row, mask=row < H, other=0.0)
        tl.store(m + s * H + row, mx * a, mask=row < H)


@triton.jit
def _row_block(W_zm, n, k, H):
    inside = (n < 4 * H)[:, None] & (k < H)[None, :]
    return tl.load(W_zm + n[:, None] * H + k[None, :], mask=inside, other=0.0)


@triton.jit
def _gates(
    W_zm, table, symbols, m, b_h, c, h, H, WIDTH, OFFSET,
    UNIT: tl.constexpr, HAS_B: tl.constexpr, S: tl.constexpr, U: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """c and h of U units a program."""
    u = tl.program_id(0) * U + tl.arange(0, U)
    k = tl.arange(0, BK)
    n_0, n_1, n_2, n_3 = column(u, 0, UNIT), column(u, 1, UNIT), column(u, 2, UNIT), column(u, 3, UNIT)
    W_0, W_1 = _row_block(W_zm, n_0, k, H), _row_block(W_zm, n_1, k, H)
    W_2, W_3 = _row_block(W_zm, n_2, k, H), _row_block(W_zm, n_3, k, H)
    bias = tl.load(b_h + u, mask=u < H, other=0.0) if HAS_B else 0.0
    wait(PDL)
    for s in tl.static_range(S):
        x = tl.load(m + s * H + k, mask=k < H, other=0.0)[None, :]
        zx = table + tl.load(symbols + s) * WIDTH + OFFSET
        z_0 = tl.sum(W_0.to(tl.float32) * x, axis=1) + tl.load(zx + n_0, mask=u < H, other=0.0)
        z_1 = tl.sum(W_1.to(tl.float32) * x, axis=1) + tl.load(zx + n_1, mask=u < H, other=0.0)
        z_2 = tl.sum(W_2.to(tl.float32) * x, axis=1) + tl.load(zx + n_2, mask=u < H, other=0.0)
        z_3 = tl.sum(W_3.to(tl.float32) * x, axis=1) + tl.load(zx + n_3, mask=u < H, other=0.0)
        old = tl.load(c + s * H + u, mask=u < H, other=0.0)
        new, y = cell_forward(z_0, z_1, z_2, z_3, old, bias, UNIT)
        tl.store(c + s * H + u, new, mask=u < H)
        tl.store(h + s * H + u, y, mask=u < H)


@triton.jit
def _logits(
    W_out, b_out, h, logits, N, H,
    S: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows a program."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BK)
    W = tl.load(W_out + row[:, None] * H + k[None, :], mask=(row < N)[:, None] & (k < H)[None, :], other=0.0)
    bias = tl.load(b_out + row, mask=row < N, other=0.0)
    wait(PDL)
    for s in tl.static_range(S):
        x = tl.load(h + s * H + k, mask=k < H, other=0.0)
        tl.store(logits + s * N + row, tl.sum(W.to(tl.float32) * x[None, :], axis=1) + bias, mask=row < N)


@triton.jit
def _draw(
    logits, dice, temperature, symbols, drawn, N,
    GREEDY: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One stream a program: inverts the cumulative distribution at its die."""
    s = tl.program_id(0)
    n = tl.arange(0, BN)
    wait(PDL)
    x = tl.load(logits + s * N + n, mask=n < N, other=float("-inf"))
    if GREEDY:
        place = tl.argmax(x, axis=0).to(tl.int32)
    else:
        p = tl.exp((x - tl.max(x, axis=0)) / tl.load(temperature))
        upto = tl.cumsum(p, axis=0)
        # A weight of zero is never drawn: its place in the sum is its predecessor's, too.
        place = tl.sum((upto <= tl.load(dice + s) * tl.sum(p, axis=0)).to(tl.int32), axis=0)
        place = tl.minimum(place, tl.max(tl.where(p > 0.0, n, 0), axis=0))
    tl.store(symbols + s, place)
    tl.store(drawn + s, place)


class Sampler:
    """A captured run of `steps` symbols on a few streams, from states that it keeps.

    The tables hold a row for each symbol: mx, then zx with its bias in packed order, in fp32.
    """

    def __init__(
        self,
        table: Tensor,  # (N, H + 4H) or (N, 4H)
        W_mh: Tensor | None,
        W_zm: Tensor,
        b_h: Tensor | None,
        W_out: Tensor,  # (>= N, H)
        b_out: Tensor | None,
        unit: str,
        streams: int,
        steps: int,
        greedy: bool,
        pdl: bool = True,
    ) -> None:
        device, H, N = table.device, W_zm.shape[1], table.shape[0]
        self.weights = (table.contiguous(), W_mh, W_zm, b_h, W_out)
        self.b_out = torch.zeros(N, device=device) if b_out is None else b_out.float()
        self.unit, self.greedy, self.pdl, self.steps = unit, greedy, pdl, steps
        self.h = torch.zeros(streams, H, device=device)
        self.c = torch.zeros(streams, H, device=device)
        self.m = torch.zeros(streams, H, device=device)
        self.logits = torch.zeros(streams, N, device=device)
        self.symbols = torch.zeros(streams, dtype=torch.int32, device=device)
        self.dice = torch.zeros(steps, streams, device=device)
        self.drawn = torch.zeros(steps, streams, dtype=torch.int32, device=device)
        self.temperature = torch.ones((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def start(self, h: Tensor, c: Tensor, symbols: Tensor, temperature: float) -> None:
        """Sets the states (streams, width up to H) and the symbols that are read first."""
        for kept, given in ((self.h, h), (self.c, c)):
            kept.zero_()
            kept[:, : given.shape[1]].copy_(given)
        self.symbols.copy_(symbols)
        self.temperature.fill_(max(temperature, 1e-30) if temperature else 1.0)  # nearly none is no 0 in fp32

    def run(self, dice: Tensor) -> Tensor:
        """The next symbols of each stream, (steps, streams), drawn at dice of that shape in [0, 1)."""
        self.dice.copy_(dice)
        if self.graph is None:
            state = [kept.clone() for kept in (self.h, self.c, self.symbols)]
            self.graph, _ = recorded(self.h.device, self._all_steps, before=partial(self._step, 0))
            for kept, before in zip((self.h, self.c, self.symbols), state, strict=True):
                kept.copy_(before)
        self.graph.replay()
        return self.drawn

    def _all_steps(self) -> None:
        for step in range(self.steps):
            self._step(step)

    def _step(self, step: int) -> None:
        """Reads the last symbols, draws the next."""
        table, W_mh, W_zm, b_h, W_out = self.weights
        S, H = self.h.shape
        N, width = table.shape
        BK = triton.next_power_of_2(H)
        options: dict[str, Any] = {"S": S, "BK": BK, "PDL": self.pdl, "launch_pdl": self.pdl}
        if W_mh is None:
            self.m.copy_(self.h)  # every program reads all of h, and writes its units into it
        else:
            _m[(triton.cdiv(H, 8),)](
                W_mh, table, self.symbols, self.h, self.m, H, width, R=8, num_warps=8, **options
            )
        _gates[(triton.cdiv(H, 2),)](
            W_zm, table, self.symbols, self.m, b_h, self.c, self.h, H, width, width - 4 * H,
            UNIT=UNITS.index(self.unit), HAS_B=b_h is not None, U=2, num_warps=8, **options,
        )  # fmt: skip
        _logits[(triton.cdiv(N, 2),)](
            W_out, self.b_out, self.h, self.logits, N, H, R=2, num_warps=4, **options
        )
        _draw[(S,)](
            self.logits, self.dice[step], self.temperature, self.symbols, self.drawn[step], N,
            GREEDY=self.greedy, BN=triton.next_power_of_2(N), PDL=self.pdl, launch_pdl=self.pdl, num_warps=4,
        )  # fmt: skip

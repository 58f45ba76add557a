"""Clipping and Adam over all parameters in three launches: a gradient is read twice and written never."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# (a kernel's arguments are pointers, tiles and numbers, for which there are no types)
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program
WARPS = 8


@triton.jit
def _squares(gradients, firsts, sizes, sums, BLOCK: tl.constexpr):
    """The sum of squares of one block of one gradient."""
    pid = tl.program_id(0)
    for k in tl.static_range(len(gradients)):
        if (pid >= firsts[k]) & (pid < firsts[k + 1]):
            at = (pid - firsts[k]) * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(gradients[k] + at, mask=at < sizes[k], other=0.0)
            tl.store(sums + pid, tl.sum(g * g))


@triton.jit
def _measure(
    sums, steps, norm, numbers, count, largest, log_beta1, log_beta2, CLIP: tl.constexpr, BLOCK: tl.constexpr
):
    """The norm; the factor that clips; both bias corrections of this step, which it counts."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < count, other=0.0)
    length = tl.sqrt(tl.sum(total))
    tl.store(norm, length)
    factor = largest / (length + 1e-6)
    # Written so that a norm that is no number shows in the parameters, as torch's clipping has it.
    tl.store(numbers, tl.where(factor > 1.0, 1.0, factor) if CLIP else 1.0)
    j = tl.load(steps[0]) + 1.0
    for k in tl.static_range(len(steps)):
        tl.store(steps[k], j)
    # In float64: 1 - 0.999 has three digits less than its terms.
    tl.store(numbers + 1, (1.0 - tl.exp(j.to(tl.float64) * log_beta1)).to(tl.float32))
    tl.store(numbers + 2, tl.sqrt(1.0 - tl.exp(j.to(tl.float64) * log_beta2)).to(tl.float32))


@triton.jit
def _adam(
    parameters, gradients, means, squares, firsts, sizes, numbers, rate,
    new1, beta2, new2, epsilon, decay,
    DECAYED: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adam on one block of one parameter; the first DECAYED of them decay.

    new1 and new2 are 1 - beta1 and 1 - beta2, which fp32 could not make of the betas.
    """
    pid = tl.program_id(0)
    lr = tl.load(rate).to(tl.float32)
    factor = tl.load(numbers)
    correction = tl.load(numbers + 1)
    root = tl.load(numbers + 2)
    for k in tl.static_range(len(parameters)):
        if (pid >= firsts[k]) & (pid < firsts[k + 1]):
            at = (pid - firsts[k]) * BLOCK + tl.arange(0, BLOCK)
            inside = at < sizes[k]
            g = tl.load(gradients[k] + at, mask=inside, other=0.0) * factor
            p = tl.load(parameters[k] + at, mask=inside, other=0.0)
            m = tl.load(means[k] + at, mask=inside, other=0.0)
            v = tl.load(squares[k] + at, mask=inside, other=0.0)
            if k < DECAYED:
                if DECOUPLED:
                    p -= lr * decay * p
                else:
                    g += decay * p
            m += new1 * (g - m)
            v = beta2 * v + new2 * g * g
            p -= lr / correction * m / (tl.sqrt(v) / root + epsilon)
            tl.store(parameters[k] + at, p, mask=inside)
            tl.store(means[k] + at, m, mask=inside)
            tl.store(squares[k] + at, v, mask=inside)


def adam(
    parameters: Sequence[Tensor],  # those that decay first
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rate: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
    decayed: int,
    decoupled: bool,
    largest: float,
) -> Tensor:
    """One update of all parameters in place; returns the norm of the whole gradient before clipping."""
    sizes = tuple(p.numel() for p in parameters)
    firsts = (0, *accumulate(triton.cdiv(n, BLOCK) for n in sizes))
    device = parameters[0].device
    sums = torch.empty(firsts[-1], device=device)
    norm, numbers = torch.empty((), device=device), torch.empty(3, device=device)
    grid = (firsts[-1],)
    _squares[grid](tuple(gradients), firsts, sizes, sums, BLOCK=BLOCK, num_warps=WARPS)
    logs = [math.log(beta) if beta else -1e30 for beta in betas]
    _measure[(1,)](
        sums, tuple(steps), norm, numbers, firsts[-1], largest, *logs,
        CLIP=largest > 0, BLOCK=1024, num_warps=8,
    )  # fmt: skip
    _adam[grid](
        tuple(parameters), tuple(gradients), tuple(means), tuple(squares), firsts, sizes, numbers, rate,
        1.0 - betas[0], betas[1], 1.0 - betas[1], epsilon, decay,
        DECAYED=decayed if decay else 0, DECOUPLED=decoupled, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return norm

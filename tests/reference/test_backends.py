"""Each backend = reference: h, c, final state, every gradient; whole = chunks = steps = swapped."""

from __future__ import annotations

import math
from typing import Any

import chunks
import pytest
import torch
from chunks import CASES

from mulstm.ops import State, fused_loops, fused_native, memory

SHAPES = [(6, 3, 7), (1, 3, 8), (5, 1, 16), (1, 1, 5), (9, 4, 33)]  # T, B, H


@pytest.mark.parametrize(("cell", "unit"), CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64(cell: str, unit: str, shape: tuple[int, int, int]) -> None:
    for mask in (True, False):
        chunk = chunks.make(cell, unit, *shape, mask=mask).to(torch.float64)
        found = chunks.errors(chunks.answers(chunk, "fused"), chunks.answers(chunk, "reference"))
        assert max(found.values()) < 1e-13, found


@pytest.mark.parametrize(("cell", "unit"), CASES)
@pytest.mark.parametrize(
    ("dtype", "floor"), [(torch.float32, 3e-7), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"]
)
def test_low_precision_loses_no_more_than_the_reference(
    cell: str, unit: str, dtype: torch.dtype, floor: float
) -> None:
    exact = chunks.make(cell, unit, T=12, B=4, H=24)
    # The inputs are rounded first, so that only what happens inside is measured.
    rounded = exact.to(dtype)
    truth = chunks.answers(rounded.to(torch.float64), "reference")
    ours = chunks.errors(chunks.answers(rounded, "fused"), truth)
    theirs = chunks.errors(chunks.answers(rounded, "reference"), truth)
    for name, lost in ours.items():
        assert lost < 1.5 * theirs[name] + floor, (name, lost, theirs[name])


@pytest.mark.parametrize("cell", ["lstm", "milstm"])
@pytest.mark.parametrize("loops", ["the fastest", "PyTorch's"])
def test_open_gates_keep_their_slopes_in_bf16(cell: str, loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """z is summed and kept in float32: in bf16, far from zero, a gate's slope would be off by percents."""
    if loops == "PyTorch's":
        monkeypatch.setattr(fused_native, "why_not", lambda x: "not asked for")
    exact = chunks.make(cell, "standard", T=1, B=16, H=24, mask=False)
    exact.zx[:, :, 24:] += 6
    rounded = exact.to(torch.bfloat16)
    truth = chunks.answers(rounded.to(torch.float64), "reference")["dzx"][:, :, 24:]
    ours, theirs = (chunks.answers(rounded, b)["dzx"][:, :, 24:] for b in ("fused", "reference"))
    assert chunks.error(ours, truth) < 0.6 * chunks.error(theirs, truth)


def test_c_is_never_below_float32() -> None:
    chunk = chunks.make("mlstm", "standard").to(torch.bfloat16)
    for backend in ("reference", "fused"):
        h, state = chunk.run(backend)
        assert (h.dtype, state.h.dtype, state.c.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("cell", "unit"), CASES)
def test_memory_is_written_before_it_is_read(cell: str, unit: str, poisoned: None) -> None:
    chunk = chunks.make(cell, unit).to(torch.float64)
    found = chunks.answers(chunk, "fused")
    assert all(bool(x.isfinite().all()) for x in found.values())
    with torch.no_grad():
        assert bool(chunk.run("fused")[0].isfinite().all())


@pytest.mark.parametrize(("cell", "unit"), CASES)
@pytest.mark.parametrize("gradients", [True, False])
def test_whole_is_chunks_is_steps_is_swapped(cell: str, unit: str, gradients: bool) -> None:
    chunk = chunks.make(cell, unit, T=6).to(torch.float64)
    with torch.set_grad_enabled(gradients):
        whole, end = chunk.run("reference")
        for backends, cuts in [
            (["fused", "fused"], [0, 4, 6]),
            (["fused"] * 6, range(7)),
            (["fused", "reference", "fused"], [0, 2, 3, 6]),
        ]:
            state, hs = State(chunk.h_0, chunk.c_0), []
            for backend, low, high in zip(backends, cuts[:-1], cuts[1:], strict=True):
                h, state = chunk.run(backend, low, high, state)
                hs.append(h)
            assert chunks.error(torch.cat(hs), whole) < 1e-14
            assert chunks.error(state.h, end.h) < 1e-14
            assert chunks.error(state.c, end.c) < 1e-14


@pytest.mark.parametrize(("cell", "unit"), [("mlstm", "standard"), ("lstm", "initial"), ("mrnn", "tanh")])
def test_gradients_of_the_final_state_alone(cell: str, unit: str) -> None:
    chunk = chunks.make(cell, unit).to(torch.float64)
    for which in ("h", "c"):
        found = {}
        for backend in ("reference", "fused"):
            _, state = chunk.run(backend)
            leaves = chunk.leaves()
            d = torch.autograd.grad(getattr(state, which).sum(), list(leaves.values()), allow_unused=True)
            found[backend] = {
                name: torch.zeros_like(leaves[name]) if g is None else g
                for name, g in zip(leaves, d, strict=True)
            }
        errors = chunks.errors(found["fused"], found["reference"])
        assert max(errors.values()) < 1e-13, (which, errors)


def test_autocast_casts_nothing_inside() -> None:
    chunk = chunks.make("mlstm", "standard").to(torch.float32)
    right = chunks.answers(chunk, "fused")
    with torch.autocast("cpu", torch.bfloat16):
        found = chunks.answers(chunk, "fused")
        with torch.no_grad():
            assert chunks.error(chunk.run("fused")[0], right["h"]) < 1e-6
    assert max(chunks.errors(found, right).values()) < 1e-6


def test_inputs_are_left_as_they_were() -> None:
    chunk = chunks.make("both", "standard").to(torch.float64)
    before = {name: x.detach().clone() for name, x in chunk.leaves().items()}
    chunks.answers(chunk, "fused")
    with torch.no_grad():
        chunk.run("fused")
    assert all(torch.equal(before[name], x) for name, x in chunk.leaves().items())


def test_two_chunks_at_once_do_not_share_memory() -> None:
    """Large enough for kept buffers: a second forward before the first backward must not write into it."""
    chunk = chunks.make("mlstm", "standard", T=40, B=32, H=64).to(torch.float32)
    other = chunks.make("mlstm", "standard", T=40, B=32, H=64, seed=5).to(torch.float32)
    leaves = list(chunk.leaves().values())
    for _ in range(2):
        h, _ = chunk.run("fused")
        alone = torch.autograd.grad(h.square().sum(), leaves)
        del h
        h, _ = chunk.run("fused")
        copy = h.detach().clone()
        chunks.answers(other, "fused")
        assert torch.equal(h, copy)
        both = torch.autograd.grad(h.square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))
        chunks.answers(other, "fused")
        assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))


def test_without_gradients_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    T, B, H = 50, 16, 64
    chunk = chunks.make("mlstm", "standard", T=T, B=B, H=H, mask=False).to(torch.float32)
    asked: list[int] = []

    def counted(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(math.prod(shape) * dtype.itemsize)
        return memory.empty(shape, dtype, device)

    for loops in (fused_loops, fused_native):
        monkeypatch.setattr(loops, "empty", counted)
    with torch.no_grad():
        h, _ = chunk.run("fused")
    assert h.nbytes <= sum(asked) < h.nbytes + 20 * B * H * 4
    asked.clear()
    chunk.run("fused")
    assert sum(asked) > 5 * h.nbytes

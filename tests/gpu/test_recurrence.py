"""The Triton backend against the equations in float64: every cell, odd sizes, carried states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distance import rms
from mulstm import ops
from mulstm.ops import State, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# (cell, unit)
CELLS = [
    ("mlstm", "standard"),
    ("mlstm", "initial"),
    ("mlstm", "initial-text"),
    ("lstm", "standard"),
    ("milstm", "standard"),
    ("milstm", "initial"),
    ("rnn", "tanh"),
    ("mrnn", "tanh"),
]
LIMIT = 0.012  # bf16 operands lose about 0.004
# The last four: one for each row of the plan's kernels in CUDA.
SIZES = [(1, 1, 8), (7, 5, 50), (6, 37, 200), (5, 100, 600)]
SIZES += [(3, 1, 1300), (3, 200, 1900), (2, 100, 2400), (2, 256, 2800)]


def given(cell: str, unit: str, T: int, B: int, H: int, masked: bool = True) -> dict[str, Any]:
    """Random inputs in bf16 (c, mask and b_h in fp32)."""
    g = torch.Generator("cuda").manual_seed(T * 1000 + B * 10 + H)
    width = H if unit == "tanh" else 4 * H

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda") * scale

    multiplicative = cell in ("mlstm", "mrnn")
    found: dict[str, Any] = {
        "mx": draw(T, B, H).bfloat16() if multiplicative else None,
        "zx": draw(T, B, width).bfloat16(),
        "W_mh": draw(H, H, scale=H**-0.5).bfloat16() if multiplicative else None,
        "W_zm": draw(width, H, scale=H**-0.5).bfloat16(),
        "h": draw(B, H, scale=0.5).bfloat16(),
        "c": draw(B, H if width > H else 0),
        "px": draw(T, B, width).bfloat16() if cell == "milstm" else None,
        "b_h": draw(H) if unit == "initial" else None,
    }
    keep = torch.rand(B, H, generator=g, device="cuda") >= 0.2
    found["mask"] = keep.float() / 0.8 if masked else None
    return found


def leaves(x: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Copies that want gradients, all in `dtype` where it is given."""
    return {
        name: None if v is None else v.detach().clone().to(dtype or v.dtype).requires_grad_(name != "mask")
        for name, v in x.items()
    }


def run(x: dict[str, Any], unit: str, backend: str) -> tuple[Tensor, State]:
    state = State(x["h"], x["c"])
    args = (x["mx"], x["zx"], x["W_mh"], x["W_zm"], state)
    if backend == "float64":
        return reference.recurrence(*args, x["mask"], x["px"], x["b_h"], unit)
    return ops.recurrence(*args, mask=x["mask"], px=x["px"], b_h=x["b_h"], unit=unit, backend=backend)


@pytest.mark.parametrize(("cell", "unit"), CELLS)
@pytest.mark.parametrize(("T", "B", "H"), SIZES)
def test_equals_the_equations(cell: str, unit: str, T: int, B: int, H: int) -> None:
    x = given(cell, unit, T, B, H)
    ours, exact = leaves(x, None), leaves(x, torch.float64)
    junk = torch.full((1 << 27,), float("nan"), device="cuda")  # what is read unwritten shows
    del junk
    h, state = run(ours, unit, "triton")
    h_64, state_64 = run(exact, unit, "float64")
    g = torch.Generator("cuda").manual_seed(3)
    dh, dh_T, dc_T = (torch.randn(t.shape, generator=g, device="cuda") for t in (h, state.h, state.c))
    ((h * dh).sum() + (state.h * dh_T).sum() + (state.c * dc_T).sum()).backward()
    ((h_64 * dh).sum() + (state_64.h * dh_T).sum() + (state_64.c * dc_T).sum()).backward()
    assert rms(h, h_64) < LIMIT
    assert state.c.numel() == 0 or rms(state.c, state_64.c) < LIMIT
    for name, exact_leaf in exact.items():
        if exact_leaf is None or exact_leaf.grad is None or exact_leaf.numel() == 0:
            continue
        assert rms(ours[name].grad, exact_leaf.grad) < 2 * LIMIT, name


@pytest.mark.parametrize("H", [96, 640, 1300])
def test_continues_another_backends_chunk(H: int) -> None:
    x = given("mlstm", "standard", 8, 20, H)
    whole, after = run(x, "standard", "triton")
    first = {**x, "mx": x["mx"][:3], "zx": x["zx"][:3]}
    h_1, state = run(first, "standard", "fused")
    rest = {**x, "mx": x["mx"][3:], "zx": x["zx"][3:], "h": state.h, "c": state.c}
    h_2, last = run(rest, "standard", "triton")
    assert rms(torch.cat([h_1, h_2]), whole) < LIMIT
    assert rms(last.c, after.c) < LIMIT


@pytest.mark.parametrize(("B", "H"), [(128, 480), (64, 640), (128, 1900), (200, 1900), (256, 2800)])
def test_repeats_bit_for_bit(B: int, H: int) -> None:
    def once() -> list[Tensor]:
        x = leaves(given("mlstm", "standard", 10, B, H), None)
        h, state = run(x, "standard", "triton")
        h.float().square().sum().backward()
        return [h, state.c, *(v.grad for v in x.values() if v is not None and v.grad is not None)]

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("B", "H"), [(16, 450), (64, 640), (128, 1900), (256, 2800)])
def test_keeps_nothing_where_no_gradients_are_wanted(B: int, H: int) -> None:
    def peak(x: dict[str, Any]) -> tuple[Tensor, int]:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        h, _ = run(x, "standard", "triton")
        return h, torch.cuda.max_memory_allocated() - before

    x = given("mlstm", "standard", 200, B, H)
    for tried in (x, leaves(x, None)):
        peak(tried)  # the first call of a shape tries its kernels
    h, without = peak(x)
    wanting, wanted = peak(leaves(x, None))
    assert torch.equal(h, wanting)
    # For a backward c, z, a and m are kept, eight times what mx takes; copies to pack hide a part of that.
    assert without < wanted - 3 * x["mx"].nbytes, (without, wanted)


def test_a_small_layers_chunk_of_more_numbers_than_an_int32_counts() -> None:
    T, B, H = 9000, 128, 480  # 2.2e9 numbers in zx
    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("less than 80 GB of GPU memory are free")
    x = leaves(given("mlstm", "standard", T, B, H), None)
    whole, last = run(x, "standard", "triton")
    half, state = run({**x, "mx": x["mx"][:4000], "zx": x["zx"][:4000]}, "standard", "triton")
    rest = {**x, "mx": x["mx"][4000:], "zx": x["zx"][4000:], "h": state.h.detach(), "c": state.c.detach()}
    h, after = run(rest, "standard", "triton")
    assert torch.equal(whole, torch.cat([half, h]))
    assert torch.equal(last.c, after.c)
    # dz of the last steps does not depend on where the chunk began.
    (found,) = torch.autograd.grad(whole[-5:].float().square().sum(), x["zx"])
    (wanted,) = torch.autograd.grad(h[-5:].float().square().sum(), rest["zx"])
    assert torch.equal(found[-200:], wanted[-200:])
    assert wanted[-1].abs().sum() > 0


def test_says_why_not() -> None:
    x = given("mlstm", "standard", 2, 2, 8)
    wide = {name: None if v is None else v.float() for name, v in x.items()}
    state = State(wide["h"], wide["c"])
    args = (wide["mx"], wide["zx"], wide["W_mh"], wide["W_zm"], state)
    assert ops.chosen(wide["zx"], wide["mask"]) == "fused"
    with pytest.raises(Exception, match="bfloat16"):
        ops.recurrence(*args, mask=wide["mask"], backend="triton")

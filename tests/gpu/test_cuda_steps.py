"""The step kernels in CUDA: they are chosen, agree without saving, and give way where they fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from distance import rms
from mulstm.nn import packed
from mulstm.ops import cuda_driver, eight, faults
from mulstm.ops import triton_choice as choice
from mulstm.ops import triton_steps as steps
from mulstm.ops.cuda_source import CompileError
from mulstm.ops.triton_chunk import Chunk
from mulstm.ops.triton_plan import PLAIN, Form, Plan, plan_in_eight, plan_of
from mulstm.recipe import ModelRecipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
on_hopper = pytest.mark.usefixtures("hopper")
SIZES = [(128, 1920), (256, 1920), (100, 2816), (256, 2816)]


@pytest.fixture
def hopper() -> None:
    if cuda_driver.why_not(torch.device("cuda", 0)) is not None:
        pytest.skip("not a Hopper GPU")


def chunk_of(B: int, H: int, T: int = 4, m: bool = True) -> Chunk:
    """Random numbers, laid out as a layer lays them out."""
    g = torch.Generator("cuda").manual_seed(B + H)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device="cuda") * scale).bfloat16()

    x = draw(T, B, 5 * H)
    W_mh = draw(H, H, scale=H**-0.5) if m else None
    W_zm = draw(4 * H, H, scale=H**-0.5)
    c_0 = torch.randn(B, H, generator=g, device="cuda")
    mask = (torch.rand(B, H, generator=g, device="cuda") > 0.2).float()
    mx = x[..., :H] if m else None
    return Chunk(mx, x[..., H:], None, W_mh, W_zm, draw(B, H), c_0, mask, None, "standard")


@on_hopper
@pytest.mark.parametrize(("B", "H"), SIZES)
@pytest.mark.parametrize("m", [True, False])
def test_are_chosen_and_need_not_save(B: int, H: int, m: bool) -> None:
    chunk = chunk_of(B, H, m=m)
    plan = choice.plan_for(chunk)
    assert plan == plan_of(H, B, cuda=True)
    assert plan.uses_cuda
    kept, bare = (steps.forward(chunk, plan, save) for save in (True, False))
    assert torch.equal(kept.h, bare.h)
    assert torch.equal(kept.c_T, bare.c_T)
    assert not faults.failed(chunk.zx.device)


@on_hopper
@pytest.mark.parametrize(("B", "H"), SIZES)
@pytest.mark.parametrize("m", [True, False])
def test_find_rows_by_an_index(B: int, H: int, m: bool) -> None:
    chunk = chunk_of(B, H, m=m)
    indexed = choice.by_rows(chunk, torch.Generator("cuda").manual_seed(0))
    plan = choice.plan_for(indexed)
    assert plan == plan_of(H, B, cuda=True)
    assert steps.reads_rows(indexed, plan)
    tried = len(choice._WORKS)
    assert choice.plan_for(chunk) == plan
    assert len(choice._WORKS) == tried  # one trial for both
    dh = torch.randn_like(chunk.zx[..., :H].contiguous())
    one, other = (steps.forward(x, plan, True) for x in (indexed, chunk))
    assert torch.equal(one.h, other.h)
    assert torch.equal(one.z, other.z)
    back = [steps.backward(x, other, dh, None, None, plan) for x in (indexed, chunk)]
    assert torch.equal(back[0].dx, back[1].dx)
    assert torch.equal(back[0].da, back[1].da)
    short = steps.backward(indexed, other, dh, None, None, plan, to_start=False)
    assert torch.equal(short.dx, back[0].dx)
    assert torch.equal(short.da, back[0].da)


@on_hopper
@pytest.mark.parametrize("more", [{"stream": False}, {"share": 100}], ids=str)
@pytest.mark.parametrize("B", [200, 256])
def test_ways_to_memory_change_nothing(B: int, more: dict[str, Any]) -> None:
    chunk = chunk_of(B, 2816)
    plan = plan_of(2816, B, cuda=True)
    assert isinstance(plan.gates, Form)
    other = replace(plan, gates=replace(plan.gates, **more))
    wanted, found = (steps.forward(chunk, p, True) for p in (plan, other))
    for part in ("h", "c", "z"):
        assert torch.equal(getattr(found, part), getattr(wanted, part)), part


def require_the_same_in_a_graph(
    plan: Plan, chunks: tuple[Chunk, Chunk], captured: tuple[Chunk, Chunk]
) -> None:
    """Chunks for the forward and for the backward, as they are run and as they are captured."""
    there, back = chunks
    wanted = steps.forward(there, plan, True)
    dh = torch.randn_like(wanted.h[1:])
    grads = steps.backward(back, wanted, dh, None, None, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = steps.forward(captured[0], plan, True)
        other = steps.backward(captured[1], again, dh, None, None, plan)
    for part in (*again[:2], other.dx, other.da):
        part.fill_(float("nan"))
    graph.replay()
    assert torch.equal(again.h, wanted.h)
    assert torch.equal(other.dx, grads.dx)
    assert torch.equal(other.dh_0, grads.dh_0)


def test_hold_in_a_graph() -> None:
    chunk = chunk_of(200, 1920)
    require_the_same_in_a_graph(choice.plan_for(chunk), (chunk, chunk), (chunk, chunk))


def test_an_unknown_shape_inside_a_capture_takes_the_other_kernels() -> None:
    chunk = chunk_of(57, 1408)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = choice.plan_for(chunk)
        chunk.h_0.zero_()  # an empty capture is warned of
    assert plan == plan_of(1408, 57)
    assert choice.plan_for(chunk).uses_cuda


def test_a_kernel_that_cannot_be_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise CompileError("no compiler")

    chunk = chunk_of(33, 1536)
    monkeypatch.setattr(cuda_driver, "_KERNELS", {})
    monkeypatch.setattr(cuda_driver, "machine_code", broken)
    with pytest.warns(UserWarning, match="no compiler"):
        assert choice.plan_for(chunk) == plan_of(1536, 33)
    monkeypatch.undo()
    assert choice.plan_for(chunk) == plan_of(1536, 33)  # once a shape


def in_eight(chunk: Chunk) -> tuple[Chunk, Chunk, Chunk]:
    """The chunk with weights that 8 bits hold: as it is, and for the two directions of an 8-bit plan."""
    W_mh, W_zm = (eight.rounded(W, eight.WEIGHT) for W in (chunk.W_mh, chunk.W_zm) if W is not None)
    plain = [(W.float() / eight.WEIGHT).bfloat16() for W in (W_mh, W_zm)]
    turned = [W.float().t().contiguous().to(eight.E4M3) for W in (W_mh, W_zm)]
    return (
        chunk._replace(W_mh=plain[0], W_zm=plain[1]),
        chunk._replace(W_mh=W_mh, W_zm=W_zm),
        chunk._replace(W_mh=turned[0], W_zm=turned[1]),
    )


@on_hopper
@pytest.mark.parametrize(("B", "H"), [*SIZES, (33, 1408), (320, 4096)])
def test_products_of_8_bit_numbers(B: int, H: int) -> None:
    chunk = chunk_of(B, H)
    plain, there, back = in_eight(chunk)
    plan = choice.plan_for(there)
    assert plan == plan_in_eight(H, B)
    assert choice.eight_works(H, B, "standard", mask=True, device=chunk.zx.device)
    dh = torch.randn_like(chunk.zx[..., :H].contiguous()) * 1e-6
    wanted, found = steps.forward(plain, PLAIN, True), steps.forward(there, plan, True)
    for part in ("h", "c", "m", "z"):
        assert rms(getattr(found, part).cpu(), getattr(wanted, part).cpu()) < 0.06, part
    # Both directions by themselves: what the forward left is the same for both.
    exact = steps.backward(plain, wanted, dh, None, None, PLAIN)
    close = steps.backward(back, wanted, dh, None, None, plan)
    for part in ("dx", "da", "dh_0", "dc_0"):
        assert rms(getattr(close, part).cpu(), getattr(exact, part).cpu()) < 0.1, part
    assert not faults.failed(chunk.zx.device)


@on_hopper
def test_products_of_8_bit_numbers_find_rows_and_hold_in_a_graph() -> None:
    _, there, back = in_eight(chunk_of(200, 1920))
    dice = torch.Generator("cuda")
    indexed, indexed_back = (choice.by_rows(x, dice.manual_seed(0)) for x in (there, back))
    plan = choice.plan_for(there)
    assert steps.reads_rows(indexed, plan)
    require_the_same_in_a_graph(plan, (there, back), (indexed, indexed_back))


@on_hopper
def test_nan_stays_nan_in_8_bits() -> None:
    _, there, back = in_eight(chunk_of(200, 1920))
    plan = choice.plan_for(there)
    saved = steps.forward(there, plan, True)
    dh = torch.randn_like(saved.h[1:])
    saved.z[-1, 5, 7] = float("nan")
    da = steps.backward(back, saved, dh, None, None, plan).da[-1]
    assert da[5].isnan().all()
    assert da[:5].isfinite().all()
    assert da[6:].isfinite().all()


@on_hopper
def test_8_bit_products_that_cannot_be_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise CompileError("no compiler")

    wide, there = ModelRecipe(hidden=1536), torch.device("cuda", 0)
    monkeypatch.setattr(cuda_driver, "_KERNELS", {})
    monkeypatch.setattr(cuda_driver, "machine_code", broken)
    with pytest.warns(UserWarning, match="no compiler"):
        assert packed.no_eight(wide, 34, True, there) == "they failed their self-test"
    monkeypatch.undo()
    assert packed.no_eight(wide, 34, True, there) == "they failed their self-test"  # once a shape
    assert packed.no_eight(wide, 34, False, there) is None

"""A whole MI-LSTM layer on a GPU against float64: all gradients, carried states, odd sizes, its own plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from distance import rms
from mulstm.nn.layer import normalised
from mulstm.ops import State, cuda_driver, reference
from mulstm.ops.triton_choice import plan_for
from mulstm.ops.triton_chunk import Chunk
from mulstm.ops.triton_layer import LayerFunction, Spec, infer, pack
from mulstm.ops.triton_plan import plan_of
from mulstm.ops.triton_vectors import through_vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LIMIT = 0.012  # bf16 operands lose about 0.005
E = 11
# The last: where the products are made in CUDA.
SIZES = [(1, 1, 3), (70, 9, 40), (5, 33, 90), (3, 100, 600), (3, 200, 2219)]


class Given(NamedTuple):
    spec: Spec
    p: dict[str, Tensor]  # fp32
    x: Tensor  # (T * B, E) bf16
    h_0: Tensor
    c_0: Tensor
    mask: Tensor | None

    def rows(self) -> Tensor:
        """x as a layer wants it: padded, with its columns of ones."""
        wide = self.x.new_zeros(self.x.shape[0], self.spec.width(E))
        wide[:, :E], wide[:, E : E + 2] = self.x, 1.0
        return wide


def given(unit: str, T: int, B: int, H: int, masked: bool = True) -> Given:
    g = torch.Generator("cuda").manual_seed(T * 1000 + B * 10 + H)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda") * scale + mean

    p = {"W_zx": draw(4 * H, E, scale=E**-0.5), "W_zm": draw(4 * H, H, scale=H**-0.5), "b_z": draw(4 * H)}
    p |= {"alpha": draw(4 * H, scale=0.5, mean=1.0)}
    p |= {name: draw(4 * H, scale=0.3, mean=0.5) for name in ("beta_1", "beta_2")}
    p |= {name: draw(4 * H, scale=0.2, mean=1.0) for name in ("g_zx", "g_zm")}
    mask = (torch.rand(B, H, generator=g, device="cuda") >= 0.2).float() / 0.8 if masked else None
    x, h_0 = draw(T * B, E).bfloat16(), draw(B, H, scale=0.5).bfloat16()
    return Given(Spec(H, 4, unit), p, x, h_0, draw(B, H), mask)


def ours(it: Given) -> tuple[list[Tensor], dict[str, Tensor]]:
    """h, the last h and c; and the leaves."""
    leaves = {name: v.clone().requires_grad_() for name, v in it.p.items()}
    x, h_0, c_0 = (v.clone().requires_grad_() for v in (it.rows(), it.h_0, it.c_0))
    H = it.spec.H
    found = LayerFunction.apply(
        it.spec, tuple(leaves), {}, None, x, None, h_0, c_0, it.mask, *leaves.values()
    )
    return [v[..., :H] for v in found], leaves | {"x": x, "h_0": h_0, "c_0": c_0}


def exact(it: Given) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same by the equations in float64."""
    leaves = {name: v.double().requires_grad_() for name, v in it.p.items()}
    x, h_0, c_0 = (v.double().requires_grad_() for v in (it.x, it.h_0, it.c_0))
    W_zx, W_zm = (normalised(leaves["W_" + k], leaves["g_" + k]) for k in ("zx", "zm"))
    u = (x @ W_zx.T).view(-1, *it.h_0.shape[:1], 4 * it.spec.H)
    b, b_h = leaves["b_z"], None
    if it.spec.unit == "initial":
        b_h = b[: it.spec.H]
        b = torch.cat([torch.zeros_like(b_h), b[it.spec.H :]])
    zx, px = leaves["beta_2"] * u + b, leaves["alpha"] * u + leaves["beta_1"]
    mask = None if it.mask is None else it.mask.double()
    h, state = reference.recurrence(None, zx, None, W_zm, State(h_0, c_0), mask, px, b_h, it.spec.unit)
    return [h, state.h, state.c], leaves | {"x": x, "h_0": h_0, "c_0": c_0}


@pytest.mark.parametrize("unit", ["standard", "initial", "initial-text"])
@pytest.mark.parametrize(("T", "B", "H"), SIZES)
def test_layer_equals_the_equations(unit: str, T: int, B: int, H: int) -> None:
    it = given(unit, T, B, H, masked=B != 9)
    junk = torch.full((1 << 27,), float("nan"), device="cuda")  # what is read unwritten shows
    del junk
    found, leaves = ours(it)
    wanted, leaves_64 = exact(it)
    g = torch.Generator("cuda").manual_seed(3)
    weights = [torch.randn(v.shape, generator=g, device="cuda") for v in wanted]
    for results in (found, wanted):
        torch.stack([(v * w).sum().double() for v, w in zip(results, weights, strict=True)]).sum().backward()
    for a, b in zip(found, wanted, strict=True):
        assert rms(a, b) < LIMIT
    for name, leaf in leaves_64.items():
        gradient: Any = leaves[name].grad
        gradient = gradient[:, :E] if name == "x" else gradient
        assert rms(gradient, leaf.grad) < 2 * LIMIT, name


@torch.no_grad()
@pytest.mark.parametrize(("B", "H"), [(33, 90), (200, 2219)])
def test_needs_no_gradients_and_continues(B: int, H: int) -> None:
    it = given("standard", 6, B, H)
    w = pack(it.spec, it.p, {}, it.spec.width(E))
    whole, h_T, c_T = infer(it.spec, w, it.rows(), None, it.h_0, it.c_0, it.mask)
    saved = LayerFunction.apply(it.spec, tuple(it.p), {}, None, it.rows(), None, *it[3:], *it.p.values())
    assert torch.equal(whole, saved[0])
    first, h, c = infer(it.spec, w, it.rows()[: 2 * B], None, it.h_0, it.c_0, it.mask)
    rest, h, c = infer(it.spec, w, it.rows()[2 * B :], None, h, c, it.mask)
    assert torch.equal(torch.cat([first, rest]), whole)
    assert torch.equal(h, h_T)
    assert torch.equal(c, c_T)


@pytest.mark.parametrize(("B", "H"), [(33, 90), (256, 2219)])
def test_repeats_bit_for_bit(B: int, H: int) -> None:
    def once() -> list[Tensor]:
        found, leaves = ours(given("standard", 10, B, H))
        found[0].float().square().sum().backward()
        return [found[0], *(v.grad for v in leaves.values() if v.grad is not None)]

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


def test_the_products_in_cuda_are_chosen() -> None:
    if cuda_driver.why_not(torch.device("cuda", 0)) is not None:
        pytest.skip("not a Hopper GPU")
    B, H = 256, 2304
    u = torch.randn(3, B, 4 * H, device="cuda").bfloat16()
    vectors, W = torch.randn(4, 4 * H, device="cuda"), torch.randn(4 * H, H, device="cuda").bfloat16()
    h_0, c_0 = (torch.randn(B, H, device="cuda", dtype=t) for t in (torch.bfloat16, torch.float32))
    for px in (vectors, u):
        plan = plan_for(Chunk(None, u, px, None, W, h_0, c_0, None, None, "standard"))
        assert plan == plan_of(H, B, cuda=True, px=True)
        assert plan.gates is not None


@pytest.mark.parametrize("rows", [1, 7, 511, 5000])
def test_vectors_gradients(rows: int) -> None:
    g = torch.Generator("cuda").manual_seed(rows)
    dz, r, u = (torch.randn(rows, 1, 384, generator=g, device="cuda").bfloat16() for _ in range(3))
    vectors = torch.randn(4, 384, generator=g, device="cuda")
    d, q, x, v = (part.double() for part in (dz, r, u, vectors))
    wanted = torch.stack([part.sum((0, 1)) for part in (d * q * x, d * q, d * x, d)])
    assert rms(through_vectors(dz, r, u, vectors), wanted) < 1e-5
    assert rms(dz, d * (v[0] * q + v[2])) < 0.003

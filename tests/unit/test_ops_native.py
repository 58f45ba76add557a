"""Machine code made here: as exact as float32 allows, whatever the sizes, and never needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from mulstm.ops import State, fused_loops, fused_native, native, products, recurrence
from mulstm.ops.fused_loops import Inputs

pytest.importorskip("llvmlite")

from mulstm.ops import vector, vector_product
from mulstm.ops.vector import Operand, Place, kernel

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh}


def applied(name: str, x: Tensor, threads: int = 1) -> Tensor:
    def formula(at: Place) -> None:
        at.put("y", getattr(vector, name)(at.get("x")))

    operand = Operand(bf16=x.dtype == torch.bfloat16)
    y = torch.empty_like(x)
    kernel(formula, {"x": operand, "y": operand})(threads, *x.shape, x.data_ptr(), y.data_ptr())
    return y


def test_it_is_to_be_had_where_llvmlite_is() -> None:
    assert native.unavailable() is None


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_are_exact_to_the_last_digits(name: str) -> None:
    x = torch.cat([torch.linspace(-80, 80, 40_001), torch.linspace(-1, 1, 40_001)])
    x = torch.cat([x, torch.logspace(-30, 1, 2_001), -torch.logspace(-30, 1, 2_001)])
    truth = FUNCTIONS[name](x.double())
    found = applied(name, x[None])[0].double()
    assert ((found - truth).abs() <= 2.4e-7 * truth.abs()).all()


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_at_the_ends(name: str) -> None:
    ends = torch.tensor([[-torch.inf, -1e30, -1e4, -200.0, 200.0, 1e4, 1e30, torch.inf]])
    assert applied(name, ends).equal(FUNCTIONS[name](ends))
    assert applied(name, torch.full((1, 17), torch.nan)).isnan().all()


def test_bf16_is_rounded_as_pytorch_rounds_it() -> None:
    x = torch.randn(3, 37) * torch.logspace(-38, 38, 37)
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    x[1] = 1 + torch.arange(37) / 256  # half-way every other time
    x.view(torch.int32)[0, 4] = 0x7FFFFFFF  # a NaN that rounding would carry into the sign
    y = torch.empty(3, 37, dtype=torch.bfloat16)
    operands = {"x": Operand(), "y": Operand(bf16=True)}
    kernel(lambda at: at.put("y", at.get("x")), operands)(1, 3, 37, x.data_ptr(), y.data_ptr())
    assert y.view(torch.int16)[~x.isnan()].equal(x.bfloat16().view(torch.int16)[~x.isnan()])
    assert y[0, [2, 4]].isnan().all()


@pytest.mark.parametrize("B", [1, 2, 5])
def test_threads_share_the_lanes(B: int) -> None:
    x = torch.randn(B, 21)
    for threads in (2, 3):
        assert applied("tanh", x, threads).equal(applied("tanh", x))


UNITS = [("standard", 4), ("initial", 4), ("initial-text", 4), ("tanh", 1)]


def inputs(unit: str, k: int, dtype: torch.dtype, B: int = 3, H: int = 21, scale: float = 1.0) -> Inputs:
    g = torch.Generator().manual_seed(5)

    def draw(*shape: int, scale: float = scale) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    return Inputs(
        mx=draw(4, B, H, scale=1.0),
        zx=draw(4, B, k * H),
        W_mh=draw(H, H, scale=H**-0.5),
        W_zm=draw(k * H, H, scale=H**-0.5),
        h_0=draw(B, H, scale=0.5),
        c_0=torch.randn(B, H if k > 1 else 0, generator=g),
        mask=(torch.rand(B, H, generator=g) > 0.3) / 0.7,
        px=draw(4, B, k * H, scale=1.0),
        b_h=torch.randn(H, generator=g) if unit == "initial" else None,
        unit=unit,
    )


@pytest.mark.parametrize(("unit", "k"), UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_loops_agree(unit: str, k: int, dtype: torch.dtype) -> None:
    """And either goes back over what the other has saved."""
    x = inputs(unit, k, dtype)
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    h, c, saved = fused_loops.forward(x, save=True)
    h_2, c_2, saved_2 = fused_native.forward(x, save=True)
    dh, dc = torch.randn_like(h), torch.randn_like(c)
    right = (h, c, *fused_loops.backward(dh, dc, x, h, saved))
    for found in (
        (h_2, c_2, *fused_native.backward(dh, dc, x, h_2, saved_2)),
        (h_2, c_2, *fused_native.backward(dh, dc, x, h, saved)),
        (*fused_native.forward(x, save=False)[:2], *fused_loops.backward(dh, dc, x, h_2, saved_2)),
    ):
        for a, b in zip(found, right, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert (a.double() - b.double()).norm() <= limit * b.double().norm()


def test_vectors_may_be_of_the_narrow_type() -> None:
    x = inputs("initial", 4, torch.bfloat16)
    assert x.b_h is not None
    assert x.mask is not None
    narrow = x._replace(b_h=x.b_h.bfloat16(), mask=x.mask.bfloat16())
    assert narrow.b_h is not None
    assert narrow.mask is not None
    wide = narrow._replace(b_h=narrow.b_h.float(), mask=narrow.mask.float())
    found = []
    for given in (narrow, wide):
        h, c, saved = fused_native.forward(given, save=True)
        found.append((h, c, fused_native.backward(torch.ones_like(h), torch.ones_like(c), given, h, saved)))
    (h, c, back), (right_h, right_c, right) = found
    assert h.equal(right_h)
    assert c.equal(right_c)
    assert back.db_h.dtype == torch.bfloat16
    assert back.db_h.equal(right.db_h.bfloat16())
    assert all(a.equal(b) for a, b in zip(back[:-1], right[:-1], strict=True))


@pytest.mark.parametrize(("unit", "k"), UNITS)
def test_however_the_memory_lies(unit: str, k: int) -> None:
    def askew(v: Tensor) -> Tensor:
        return v.transpose(0, -1).contiguous().transpose(0, -1)

    x = inputs(unit, k, torch.float32, B=32, H=128)
    lying = Inputs(*(askew(v) if isinstance(v, Tensor) and v.dim() > 1 else v for v in x))
    h, c, saved = fused_native.forward(x, save=True)
    found_h, found_c, found_saved = fused_native.forward(lying, save=True)
    torch.testing.assert_close((found_h, found_c), (h, c))
    dh, dc = torch.randn_like(h), torch.randn_like(c)
    right = fused_native.backward(dh, dc, x, h, saved)
    found = fused_native.backward(askew(dh), askew(dc), lying, found_h, found_saved)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("unit", "k"), UNITS)
def test_far_out_nothing_is_infinite(unit: str, k: int) -> None:
    x = inputs(unit, k, torch.float32, scale=1e4)
    h, c, saved = fused_native.forward(x, save=True)
    found = fused_native.backward(torch.ones_like(h), torch.ones_like(c), x, h, saved)
    assert all(bool(v.isfinite().all()) for v in (h, c, *saved, *found))


def test_not_a_number_is_passed_on() -> None:
    x = inputs("standard", 4, torch.bfloat16)
    x.zx[0, 1, 2] = torch.nan
    h, _, _ = fused_native.forward(x._replace(mask=None), save=False)
    assert h[0, 1, 2].isnan()
    assert not h[0, 0].isnan().any()


def test_pieces_and_lanes_apart_are_the_whole_bit_for_bit() -> None:
    x = inputs("standard", 4, torch.float32, B=16, H=64)._replace(px=None, mask=None)
    whole, c_T, _ = fused_native.forward(x, save=True)
    h, c = x.h_0, x.c_0
    for t in range(4):
        assert x.mx is not None
        piece = x._replace(mx=x.mx[t : t + 1], zx=x.zx[t : t + 1], h_0=h, c_0=c)
        hs, c, _ = fused_native.forward(piece, save=t % 2 == 0)
        h = hs[-1]
        assert (h - whole[t]).abs().max() < 1e-6  # fewer uses, another product
    assert (c - c_T).abs().max() < 1e-6
    assert fused_native.forward(x, save=False)[0].equal(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread must not begin a formula before the other has finished its part of the product."""
    monkeypatch.setattr(vector_product, "LARGE", 0)
    x = inputs("standard", 4, dtype, B=32, H=128)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 2):
            torch.set_num_threads(threads)
            h, c, saved = fused_native.forward(x, save=True)
            found.append((h, c, *fused_native.backward(h, c, x, h, saved)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0][:4], other[:4], strict=True))
        assert all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(found[0], other, strict=True))


def test_without_it_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs("standard", 4, torch.float32)._replace(mask=None)
    chunk = (x.mx, x.zx, x.W_mh, x.W_zm, State(x.h_0, x.c_0))
    right, _ = recurrence(*chunk, px=x.px)
    monkeypatch.setattr(native, "unavailable", lambda: "llvmlite cannot be imported")
    monkeypatch.setattr(fused_native, "forward", None)
    monkeypatch.setattr(native, "products", None)
    W = torch.randn(512, 256, requires_grad=True)
    found, _ = recurrence(*chunk, px=x.px)
    assert (found - right).abs().max() < 1e-6
    assert products.gradient(torch.randn(600, 512), torch.randn(600, 256)).shape == W.shape


@pytest.mark.parametrize("fault", [ImportError("gone"), RuntimeError("no such CPU")])
def test_why_it_is_not_to_be_had(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise fault

    monkeypatch.setattr(native.importlib, "import_module", refuse)
    native.unavailable.cache_clear()
    try:
        said = str(native.unavailable())
        assert str(fault) in said
        assert ("llvmlite" in said) == isinstance(fault, ImportError)
    finally:
        monkeypatch.undo()
        native.unavailable.cache_clear()
    assert native.unavailable() is None


# Products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B", [2, 8, 13, 32])
@pytest.mark.parametrize("turned", [False, True])
def test_products(dtype: torch.dtype, B: int, turned: bool) -> None:
    if vector_product.why_not(dtype) is not None:
        pytest.skip(str(vector_product.why_not(dtype)))
    g = torch.Generator().manual_seed(B)
    W = (torch.randn(64, 42, generator=g) if not turned else torch.randn(42, 64, generator=g).T).to(dtype)
    x = torch.randn(B, 42, generator=g).to(dtype)
    by_W = products.step_product(W, B, products.PACK_FROM)
    assert isinstance(by_W, vector_product.StepProduct)
    truth, bias = x.double() @ W.double().T, torch.randn(64, generator=g)
    y = by_W(x)
    assert y.dtype == by_W.dtype == torch.float32
    assert (y.double() - truth).norm() < 1e-6 * truth.norm()
    y = vector_product.VectorProduct(W)(x, bias)
    assert (y.double() - truth - bias).norm() < 1e-6 * truth.norm()
    if dtype == torch.float32:
        assert products.many(x, W, bias, torch.empty(B, 64)).equal(y)


def test_products_have_their_own_type_whatever_is_usual(usual: AbstractContextManager[None]) -> None:
    if vector_product.why_not(torch.float32) is not None:
        pytest.skip(str(vector_product.why_not(torch.float32)))
    product, x = vector_product.VectorProduct(torch.ones(64, 42)), torch.ones(8, 42)
    with usual:
        y = product(x)
    assert y.dtype == torch.float32
    assert y.eq(42).all()


def test_a_kept_matrix_is_put_in_order_once() -> None:
    W = products.keep(torch.randn(64, 42))
    if not vector_product.VectorProduct.fits(W):
        pytest.skip("the CPU has no AVX-512")
    first, second = products.step_product(W, 4, 1), products.step_product(W, 8, 1)
    assert isinstance(first, vector_product.StepProduct)
    assert isinstance(second, vector_product.StepProduct)
    assert first.by_W is second.by_W
    assert first.y is not second.y


def test_products_that_do_not_fit_are_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    if vector_product.why_not(torch.float32) is not None:
        pytest.skip(str(vector_product.why_not(torch.float32)))
    assert not vector_product.VectorProduct.fits(torch.empty(65, 42))
    assert not vector_product.VectorProduct.fits(torch.empty(64, 41, dtype=torch.bfloat16))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert vector_product.VectorProduct.fits(torch.empty(96, 42)) == vector.has_team()
    assert not vector_product.VectorProduct.fits(torch.empty(64, 42))
    monkeypatch.setattr(vector_product, "has_team", lambda: False)
    assert not vector_product.VectorProduct.fits(torch.empty(96, 42))
    monkeypatch.undo()
    assert isinstance(products.step_product(torch.randn(65, 42), 4, 1), products.Plain)
    assert isinstance(products.step_product(torch.randn(64, 42), 4, 1), products.Plain)


@pytest.mark.parametrize("rows", [2, 399, 400, 1001])
def test_weight_gradient(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if vector_product.why_not(torch.float32) is not None:
        pytest.skip(str(vector_product.why_not(torch.float32)))
    monkeypatch.setattr(vector_product, "LARGE", 0)
    dy, x = torch.randn(rows, 96), torch.randn(rows, 24)
    assert vector_product.gradient_fits(dy, x)
    truth = dy.double().T @ x.double()
    found = products.gradient(dy, x)
    assert found.is_contiguous()
    assert (found.double() - truth).norm() < 1e-6 * truth.norm()
    dW, db = products.gradients(dy, x)
    assert dW.equal(found)
    assert (db - dy.double().sum(0)).norm() < 1e-6 * db.norm()
    assert not vector_product.gradient_fits(dy[:, :50], x)
    assert not vector_product.gradient_fits(dy, torch.randn(rows, 20))
    assert not vector_product.gradient_fits(dy, torch.randn(24, rows).T[:, :16])


def test_one_step_whose_rows_do_not_move() -> None:
    """A (1, B, H) cut from an expanded tensor is contiguous and has a stride of 0."""
    B, H = 2, 16
    torch.manual_seed(0)
    mx = torch.randn(1, B, H).expand(3, B, H)[:1]
    zx = torch.randn(1, B, 4 * H).expand(3, B, 4 * H)[:1]
    W_mh, W_zm = torch.randn(H, H), torch.randn(4 * H, H)
    state = State(torch.randn(B, H), torch.randn(B, H))
    h, _ = recurrence(mx, zx, W_mh, W_zm, state, backend="fused")
    wanted, _ = recurrence(mx, zx, W_mh, W_zm, state, backend="reference")
    assert torch.allclose(h, wanted, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_device_that_is_usual_elsewhere_is_not_taken(gradients: bool) -> None:
    T, B, H = 5, 8, 64
    mx, zx = torch.randn(T, B, H), torch.randn(T, B, 4 * H)
    W_mh, W_zm = torch.randn(H, H) / 8, torch.randn(4 * H, H) / 8
    state = State(torch.zeros(B, H), torch.zeros(B, H))

    def run() -> Tensor:
        W = W_zm.clone().requires_grad_(gradients)
        h, _ = recurrence(mx, zx, W_mh, W, state, backend="fused")
        return torch.autograd.grad(h.square().sum(), W)[0] if gradients else h

    truth = run()
    native.unavailable.cache_clear()  # what is tried once is tried there
    with torch.device("meta"):
        found = run()
    assert found.equal(truth)


def test_what_was_saved_may_come_back_in_another_order() -> None:
    """As from hooks of autograd that keep tensors elsewhere meanwhile."""
    torch.manual_seed(1)
    T, B, H = 5, 3, 4

    def turned(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT if x.dim() > 1 else x

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        shapes = (T, B, H), (T, B, 4 * H), (H, H), (4 * H, H)
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        h, _ = recurrence(*given, State(torch.zeros(B, H), torch.zeros(B, H)), backend="fused")
        return torch.autograd.grad(h.square().sum(), given)

    right = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
        found = gradients()
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)

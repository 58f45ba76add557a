"""x W^T + b in kept memory is torch's linear: values, gradients, types."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from mulstm.ops import affine, memory
from mulstm.ops.affine import _affine


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_affine_is_linear(dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALLEST", 0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, 10, generator=g).to(dtype).transpose(0, 1).requires_grad_()
    W = torch.randn(8, 10, generator=g).to(dtype).requires_grad_()
    b = torch.randn(8, generator=g).to(dtype).requires_grad_() if biased else None
    inputs = [x, W, b] if b is not None else [x, W]
    dy = torch.randn(4, 6, 8, generator=g).to(dtype)
    found, right = affine(x, W, b), linear(x, W, b)
    assert found.grad_fn is not None
    assert "affine" in str(found.grad_fn.next_functions[0][0])
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found, right, atol=limit, rtol=limit)
    for a, c in zip(
        torch.autograd.grad(found, inputs, dy), torch.autograd.grad(right, inputs, dy), strict=True
    ):
        torch.testing.assert_close(a, c, atol=20 * limit, rtol=limit)


@pytest.mark.parametrize("b", [torch.randn(64)[::2], torch.randn(1).expand(32)], ids=["strided", "expanded"])
def test_a_bias_may_lie_anyhow(b: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALLEST", 0)
    x, W = torch.randn(6, 8), torch.randn(32, 8)
    torch.testing.assert_close(affine(x, W, b), linear(x, W, b))


def test_only_what_wants_a_gradient_gets_one() -> None:
    x, W = torch.randn(5, 3), torch.randn(4, 3, requires_grad=True)
    y = _affine(x, W, None)
    y.sum().backward()
    assert W.grad is not None
    assert x.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use
def test_transforms_get_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALLEST", 0)
    x, W = torch.randn(5, 3), torch.randn(4, 3)
    found, right = (torch.func.jvp(f, (x, W), (x + 1, W + 1)) for f in (affine, linear))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.vmap(affine)(x[:, None], W.expand(5, 4, 3)), linear(x, W)[:, None])


def test_memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free", {})
    x, W = torch.randn(4096, 16), torch.randn(128, 16)
    address = affine(x, W).data_ptr()
    assert memory.kept() > 0
    assert affine(x, W).data_ptr() == address


def test_autocast_is_honoured() -> None:
    x, W = torch.randn(4096, 16), torch.randn(128, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert affine(x, W).dtype == torch.bfloat16
        assert affine(x.bfloat16(), W.bfloat16()).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_library() -> None:
    x, W, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (4, 3), (4,)))
    assert torch.autograd.gradcheck(_affine, (x, W, b))
    torch.library.opcheck(_affine, (x, W, b))
    assert torch.autograd.gradgradcheck(_affine, (x, W, b))


def test_other_shapes_are_linears_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALLEST", 0)
    x, W = torch.randn(20, 8), torch.randn(16, 8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        affine(x, torch.randn(16, 12))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        affine(x, torch.randn(16, 4))
    one = torch.ones(1)
    torch.testing.assert_close(affine(x, W, one), linear(x, W, one))  # a bias for all
    torch.testing.assert_close(affine(x, W[0]), linear(x, W[0]))

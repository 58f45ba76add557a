"""Every way to multiply gives the same product; a kept packing is used again."""

from __future__ import annotations

import pytest
import torch

from mulstm.ops import products
from mulstm.ops.products import PACK_FROM, Packed, Plain, Split, keep, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("lanes", "rows", "columns"), [(1, 12, 8), (3, 7, 5), (32, 64, 33)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_agree(
    dtype: torch.dtype, lanes: int, rows: int, columns: int, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "CACHED", 0)
    monkeypatch.setattr(products, "SMALL", 0)
    g = torch.Generator().manual_seed(1)
    W = torch.randn(columns, rows, generator=g).T if turned else torch.randn(rows, columns, generator=g)
    W = W.to(dtype)
    x = torch.randn(lanes, columns, generator=g).to(dtype)
    add = torch.randn(lanes, rows, generator=g).to(dtype)
    right = x.double() @ W.double().T
    limit = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}[dtype]
    for uses in (1, PACK_FROM):
        f = product(W, lanes, uses)
        for found, truth in ((f(x), right), (f.plus(x, add), right + add.double())):
            assert found.dtype == dtype
            assert found.shape == truth.shape
            assert (found.double() - truth).norm() < limit * truth.norm()


def test_the_way_is_chosen_by_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.randn(512, 128)
    assert isinstance(product(W, 32, 1), Plain)
    assert isinstance(product(W, 1, 100), Plain)
    assert isinstance(product(W.double(), 32, 100), Plain)
    assert isinstance(product(W[:8], 32, 100), Plain)
    assert isinstance(product(torch.empty(8000, 1900), 1, 1), Split)
    if products._can_pack(torch.float32):
        assert isinstance(product(W, 32, PACK_FROM), Packed)
    monkeypatch.setattr(products, "_can_pack", lambda dtype: False)
    assert isinstance(product(W, 32, PACK_FROM), Plain)


def test_a_kept_matrix_is_packed_once() -> None:
    W = keep(torch.nn.Parameter(torch.randn(64, 16)))
    assert not W.requires_grad
    assert product(W, 4, 1) is product(W, 8, 1)
    assert product(W, 1, 1) is product(W, 1, 1)
    assert product(W.clone(), 4, 1) is not product(W, 4, 1)

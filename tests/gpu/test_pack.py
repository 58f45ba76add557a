"""Small kernels around the products give what torch gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mulstm.ops.triton_masks import mask_of
from mulstm.ops.triton_pack import pad_columns, transposed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("shape", [(1, 5), (70, 33), (9600, 416)])
def test_transposed(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    assert torch.equal(transposed(x), x.t())
    assert transposed(x).is_contiguous()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("H", "HP"), [(450, 480), (1900, 1920), (7, 640)])
def test_pad_columns(H: int, HP: int, kind: torch.dtype) -> None:
    x = torch.randn(37, H, device="cuda").to(kind)
    junk = torch.full((37, HP), float("nan"), dtype=kind, device="cuda")
    del junk  # what is allocated next may well be this memory
    assert torch.equal(pad_columns(x, HP), torch.nn.functional.pad(x, (0, HP - H)))


@pytest.mark.parametrize("p", [0.0, 0.2, 0.3, 0.77])
def test_masks(p: float) -> None:
    u = torch.rand(37, 401, device="cuda")
    share = torch.tensor(p, device="cuda")
    assert torch.equal(mask_of(u, share), (u >= share).float() / (1 - share))

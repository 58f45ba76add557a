"""Small kernels around the products give what torch gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mulstm.ops import eight
from mulstm.ops.triton_masks import mask_of
from mulstm.ops.triton_pack import pack_rows, pad_columns, transposed

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


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no numbers of 8 bits"
)
def test_packed_in_8_bits() -> None:
    w = torch.randn(96, 70, device="cuda") * 5
    w[40, 3] = float("nan")
    out = torch.empty(96, 96, dtype=eight.E4M3, device="cuda")
    pack_rows(w, None, None, None, out, 1)
    wanted = torch.nn.functional.pad(eight.rounded(w, eight.WEIGHT).float(), (0, 26))
    assert torch.equal(out.float().nan_to_num(999.0), wanted.nan_to_num(999.0))
    assert out[40, 3].float().isnan()
    assert out.float().abs().nan_to_num(0.0).max() == eight.LARGEST


@pytest.mark.parametrize("p", [0.0, 0.2, 0.3, 0.77])
def test_masks(p: float) -> None:
    u = torch.rand(37, 401, device="cuda")
    share = torch.tensor(p, device="cuda")
    assert torch.equal(mask_of(u, share), (u >= share).float() / (1 - share))

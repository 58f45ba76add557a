"""Numbers of 8 bits: what they hold, and their scales."""

from __future__ import annotations

import pytest
import torch

from mulstm.ops import eight


def test_what_is_rounded_stays_near() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    x = x[x.abs() > 0.01]
    back = eight.rounded(x, 64.0).float() / 64
    assert float(((back - x) / x).abs().max()) <= 2**-4
    assert float(((back - x) / x).mean().abs()) < 0.01


def test_what_is_too_large_becomes_the_largest() -> None:
    x = torch.tensor([1e9, -1e9, 447.0, 0.0])
    assert eight.rounded(x, 1.0).tolist() == [448.0, -448.0, 448.0, 0.0]


@pytest.mark.parametrize(
    ("scale", "highest", "lowest"),
    [(eight.WEIGHT, 7.0, 2.45e-4), (eight.H, 3.5, 1.3e-4), (eight.M, 224.0, 8e-3)],
)
def test_what_the_scales_leave_room_for(scale: float, highest: float, lowest: float) -> None:
    x = torch.tensor([highest, 2 * highest, lowest, -lowest])
    back = eight.rounded(x, scale).float() / scale
    assert back[:2].tolist() == [highest, highest]
    assert float((back[2:] / x[2:] - 1).abs().max()) <= 2**-4


@pytest.mark.parametrize("largest", [1e-9, 3e-5, 0.7, 1.0, 2000.0])
def test_the_scale_of_gradients_is_a_power_of_two_that_brings_them_into_range(largest: float) -> None:
    dh = torch.tensor([[0.3 * largest, -largest], [0.0, 0.1 * largest]]).bfloat16()
    scale = eight.gradient_scale(dh)
    assert scale.shape == (1,)
    assert scale.dtype == torch.float32
    assert float(torch.log2(scale)) == round(float(torch.log2(scale)))
    assert eight.GRADIENT / 2 < float(dh.abs().max()) * float(scale) <= eight.GRADIENT


def test_gradients_that_are_all_zero_have_a_finite_scale() -> None:
    assert torch.isfinite(eight.gradient_scale(torch.zeros(3, 4))).all()


def test_what_a_mask_keeps_of_h_fits() -> None:
    kept = torch.tensor([1.0, -1.0]) / (1 - eight.MOST_DROPPED)
    back = eight.rounded(kept, eight.H).float() / eight.H
    assert float((back / kept - 1).abs().max()) <= 2**-4

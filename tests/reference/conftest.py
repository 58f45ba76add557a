"""Chunks of every cell, and memory that shows whether it was read before it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mulstm.ops import fused_loops, fused_native, memory


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN instead of, mostly, zeros."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return empty

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    for loops in (fused_loops, fused_native):
        monkeypatch.setattr(loops, "empty", filled(memory.empty))

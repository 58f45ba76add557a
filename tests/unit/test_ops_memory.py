"""Large buffers come back when nobody holds them, and never before."""

from __future__ import annotations

import gc

import pytest
import torch

from mulstm.ops import memory

CPU = torch.device("cpu")
SHAPE = (3, 1 << 18)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free", type(memory._free)())


def test_a_block_comes_back_only_when_its_last_view_is_gone() -> None:
    x = memory.empty(SHAPE, torch.float32, CPU)
    assert x.shape == SHAPE
    assert x.is_contiguous()
    assert x.data_ptr() % 64 == 0
    address = x.data_ptr()
    row = x[1].fill_(7)
    del x
    gc.collect()
    other = memory.empty(SHAPE, torch.float32, CPU).zero_()
    assert other.data_ptr() != address
    assert bool((row == 7).all())
    del row
    assert memory.empty(SHAPE, torch.float32, CPU).data_ptr() == address


def test_a_block_serves_another_type_of_the_same_size() -> None:
    address = memory.empty(SHAPE, torch.float32, CPU).data_ptr()
    x = memory.empty((*SHAPE, 2), torch.bfloat16, CPU)
    assert x.data_ptr() == address
    assert x.dtype == torch.bfloat16


def test_small_buffers_are_torchs_own() -> None:
    memory.empty((10,), torch.float32, CPU)
    assert not memory._free


def test_no_more_than_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LIMIT", 2 << 20)
    kept = [memory.empty((k << 18,), torch.float32, CPU) for k in (1, 1, 1)]
    kept.clear()
    assert 0 < sum(b.nbytes for b in memory._free) <= 2 << 20
    memory.empty((1 << 20,), torch.float32, CPU)
    assert not memory._free

"""Large buffers come back when nobody holds them, and never before."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mulstm.ops import memory

CPU = torch.device("cpu")
SHAPE = (3, 1 << 18)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free", {})


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
    monkeypatch.setattr(memory, "LIMIT", 3 << 20)
    held = [memory.empty((1 << 18,), torch.float32, CPU) for _ in range(3)]
    held.clear()
    assert 0 < memory.kept() <= 3 << 20
    # A new size drives out the one that was used longest ago.
    memory.empty((1 << 19,), torch.float32, CPU)
    assert 2 << 20 < memory.kept() <= 3 << 20
    assert (2 << 20) + 64 in memory._free
    before = memory.kept()
    memory.empty((1 << 20,), torch.float32, CPU)
    assert memory.kept() == before  # larger than the limit: not kept, and nothing makes room for it


def test_blocks_given_back_by_many_threads() -> None:
    def work(seed: int) -> bool:
        good = True
        for k in range(200):
            x = memory.empty(SHAPE, torch.float32, CPU)
            x[0, :8] = seed * 1000 + k
            y = memory.empty(SHAPE, torch.float32, CPU)
            y[0, :8] = -1
            good &= bool((x[0, :8] == seed * 1000 + k).all())
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert memory.kept() <= 4 * 4 * (3 * (1 << 20) + 64)

"""Keeps large CPU buffers for the next chunk: fresh pages cost more than the arithmetic done in them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes; below it malloc does not go to the kernel
LIMIT = 1 << 28  # bytes kept while nobody uses them
_ALIGN = 64

_free: deque[np.ndarray[Any, Any]] = deque()  # the longest unused first


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty; a large CPU tensor gets pages that an earlier one has given back."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    block = _take(size + _ALIGN)
    start = -block.ctypes.data % _ALIGN
    # torch holds on to this array for as long as the storage lives, whoever shares the storage; when
    # it lets go the block is free again.
    lease = block[start : start + size]
    weakref.finalize(lease, _give, block).atexit = False
    return torch.from_numpy(lease).view(dtype).view(tuple(shape))


def _take(size: int) -> np.ndarray[Any, Any]:
    for k in range(len(_free) - 1, -1, -1):
        if _free[k].nbytes == size:
            block = _free[k]
            del _free[k]
            return block
    return np.empty(size, dtype=np.uint8)


def _give(block: np.ndarray[Any, Any]) -> None:
    _free.append(block)
    while sum(b.nbytes for b in _free) > LIMIT:
        _free.popleft()

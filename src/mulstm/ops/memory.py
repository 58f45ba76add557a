"""Keeps large CPU buffers for the next chunk: fresh pages cost more than the arithmetic done in them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes; below it malloc does not go to the kernel
LIMIT = 1 << 28  # bytes kept while nobody uses them
_ALIGN = 64

# By size, the sizes used last at the end. Blocks come back whenever a tensor dies, in any thread and in the
# midst of any line below: only single, atomic calls on these containers are safe.
_free: dict[int, list[np.ndarray[Any, Any]]] = {}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty; a large CPU tensor gets pages that an earlier one has given back."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    block = _take(size + _ALIGN)
    start = -block.ctypes.data % _ALIGN
    # torch holds on to this array for as long as the storage lives, whoever shares the storage; when
    # it lets go the block is free again.
    lent = block[start : start + size]
    weakref.finalize(lent, _give, block).atexit = False
    return torch.from_numpy(lent).view(dtype).view(tuple(shape))


def _take(size: int) -> np.ndarray[Any, Any]:
    try:
        return _free[size].pop()
    except (KeyError, IndexError):
        return np.empty(size, dtype=np.uint8)


def _give(block: np.ndarray[Any, Any]) -> None:
    if block.nbytes > LIMIT:
        return
    blocks = _free.pop(block.nbytes, [])
    blocks.append(block)
    _free[block.nbytes] = blocks
    for size in list(_free):  # the longest unused first
        while kept() > LIMIT and _free.get(size):
            _take(size)
        if not _free.get(size):
            _free.pop(size, None)


def kept() -> int:
    """Bytes in nobody's use."""
    return sum(size * len(blocks) for size, blocks in list(_free.items()))

"""Whether this machine has compiled loops for what follows the products; without them torch does it."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def find() -> ModuleType | None:
    """The compiled loops, or None where numba is not installed or does not load."""
    try:
        from mulstm.codec import compiled
    except ImportError:
        return None
    return compiled

"""Loops as machine code, by numba, kept for the next run.

Import this module only where numba is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numba import config, njit
from numba.core.caching import FunctionCache

from mulstm.data.store import cache_folder
from mulstm.errors import DataError

F = TypeVar("F", bound=Callable[..., Any])


def kept_in() -> str | None:
    """The folder where machine code is kept for the next run: our cache, unless NUMBA_CACHE_DIR names one.

    numba's files are pickles, so ours must be a folder that nobody else can write to.
    """
    if config.CACHE_DIR:
        return str(config.CACHE_DIR)
    try:
        folder = cache_folder() / "numba"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, DataError):
        return None
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        return None
    return str(folder)


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's, which ends the program where a file in it is damaged or the disk is full."""

    def load_overload(self, *asked: Any) -> Any:
        """What was kept; nothing where it cannot be read, and then it is made again."""
        try:
            return super().load_overload(*asked)
        except Exception:  # a damaged pickle may raise anything
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, *made: Any) -> None:
        """Keeps it, where that can be done."""
        with suppress(Exception):
            super().save_overload(*made)


_KEPT_IN = kept_in()


def compiled(function: F) -> F:
    """Machine code."""
    made: Any = njit(error_model="numpy", nogil=True)(function)
    if _KEPT_IN is not None and hasattr(made, "_cache"):  # else Python runs it (NUMBA_DISABLE_JIT)
        before, config.CACHE_DIR = config.CACHE_DIR, _KEPT_IN  # read once, here; others have their own place
        with suppress(RuntimeError):  # numba finds no folder that it can write to
            made._cache = _Cache(function)
        config.CACHE_DIR = before
    return cast(F, made)

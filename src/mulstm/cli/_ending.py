"""How a command that writes for long ends when it is told to: with nothing half done left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mulstm import signals


@contextmanager
def ending_tidily(tell: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Inside, SIGTERM and SIGHUP end the program the way Ctrl-C does: what was half written is taken away.

    Gives `tell`, which ends it where a signal came while numba compiled: LLVM calls back into Python, and
    what is raised there gets lost or takes the process down.
    """
    came: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        came.append(number)
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] in ("numba", "llvmlite"):
                return
            frame = frame.f_back
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def tell_or_leave(more: int) -> None:
        if came:
            leave(came[0], None)
        tell(more)

    before = {kind: signal.signal(kind, leave) for kind in signals.kinds()}
    try:
        yield tell_or_leave
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)

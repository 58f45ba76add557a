"""How a command that writes for long ends when it is told to: with nothing half done left behind."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mulstm import signals


@contextmanager
def leaving() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the program as an exception does: what was half written goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        if _is_compiling(frame):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        sys.exit(128 + number)

    mine = [kind for kind in signals.kinds() if signal.getsignal(kind) == signal.SIG_DFL]  # not Ctrl-C
    for kind in mine:
        signal.signal(kind, leave)
    try:
        yield
    finally:
        for kind in mine:
            signal.signal(kind, signal.SIG_DFL)


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether numba is at work: LLVM calls back into Python, and what is raised there is lost, or kills."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("numba", "llvmlite"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def ending_tidily(tell: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Inside, SIGTERM and SIGHUP end the program the way Ctrl-C does: what was half written is taken away.

    Gives `tell`, which ends it where a signal came while numba compiled.
    """
    came: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if _is_compiling(frame):
            return
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

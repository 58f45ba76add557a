"""How a command ends when it is told to: with nothing half done left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mulstm import signals

AGAIN = 0.1  # seconds


@contextmanager
def leaving() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the program as Ctrl-C does, by an exception: what was half written goes.

    While LLVM is at work none may be raised: the signal is sent again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(number)]
        if _is_compiling(frame):
            again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        elif callable(handler):
            handler(number, frame)
        else:
            sys.exit(128 + number)

    found = {kind: signal.getsignal(kind) for kind in signals.kinds()}
    before = {kind: handler for kind, handler in found.items() if handler is not None}  # not C's own
    for kind in before:
        signal.signal(kind, leave)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether LLVM may be at work: it calls back into Python, and what is raised there is lost, or kills."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("numba", "llvmlite"):
            return True
        frame = frame.f_back
    return False

"""How a command ends when it is told to: with nothing half done left behind."""

from __future__ import annotations

import os
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

    def leave(earlier: signals.Earlier, number: int, frame: FrameType | None) -> None:
        if _is_compiling(frame):
            again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        elif callable(earlier):
            earlier(number, frame)
        else:
            sys.exit(128 + number)

    with signals.handled_by(leave):
        yield


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether LLVM may be at work: it calls back into Python, and what is raised there is lost, or kills."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("numba", "llvmlite"):
            return True
        frame = frame.f_back
    return False

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

    While LLVM is at work, or torch is imported, none may be raised: the signal is sent again a moment later.
    """

    def leave(earlier: signals.Earlier, number: int, frame: FrameType | None) -> None:
        if _is_held_back(frame):
            again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        elif callable(earlier):
            earlier(number, frame)
        else:
            sys.exit(128 + number)

    with signals.handled_by(leave):
        yield


def _is_held_back(frame: FrameType | None) -> bool:
    """Whether machine code calls back into Python, where what is raised is lost, or kills.

    LLVM does; and so does torch, which imports NumPy so.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        is_import = frame.f_code.co_name == "<module>"
        if package in ("numba", "llvmlite") or (package in ("torch", "numpy") and is_import):
            return True
        frame = frame.f_back
    return False

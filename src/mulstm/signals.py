"""Signals that end long work: the first is noted and heeded at a good moment, a second acts at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class SignalError(Exception):
    """Ends an evaluation when a signal has come."""


def kinds() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP, where they are known and not ignored.

    Ctrl-C is ignored by a program in the background, SIGHUP under nohup; that stays so.
    """
    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [kind for kind in known if signal.getsignal(kind) != signal.SIG_IGN]


@contextlib.contextmanager
def listening(heard: list[int]) -> Iterator[None]:
    """Inside, the first of these signals is put into `heard`; a second one acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(signum: int, frame: FrameType | None) -> None:
        heard.append(signum)
        signal.signal(signum, before[signal.Signals(signum)])

    before = {kind: signal.getsignal(kind) for kind in kinds()}  # whole before the first can be heard
    for kind in before:
        signal.signal(kind, hear)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def heeding(heard: list[int]) -> Callable[[int, float], None]:
    """For the progress of an evaluation, which may be long: raises SignalError once a signal has come."""

    def check(done: int, bits: float) -> None:
        if heard:
            raise SignalError

    return check

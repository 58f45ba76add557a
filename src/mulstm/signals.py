"""Signals that end long work: the first is noted and heeded at a good moment, a second acts at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class SignalError(Exception):
    """Ends an evaluation when a signal has come."""


@contextlib.contextmanager
def listening(heard: list[int]) -> Iterator[None]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP is put into `heard`; a second one acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(signum: int, frame: FrameType | None) -> None:
        heard.append(signum)
        signal.signal(signum, before[signal.Signals(signum)])

    kinds = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else: nohup
        kinds.append(signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind in kinds:
        signal.signal(kind, hear)
    try:
        yield
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


def heeding(heard: list[int]) -> Callable[[int, float], None]:
    """For the progress of an evaluation, which may be long: raises SignalError once a signal has come."""

    def check(done: int, bits: float) -> None:
        if heard:
            raise SignalError

    return check

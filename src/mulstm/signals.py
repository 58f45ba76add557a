"""Signals that end long work: the first is noted and heeded at a good moment, a second acts at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

Earlier = Callable[[int, FrameType | None], Any] | int | None  # as signal.signal takes it


class SignalError(Exception):
    """Ends an evaluation when a signal has come."""


@contextlib.contextmanager
def handled_by(handler: Callable[[Earlier, int, FrameType | None], None]) -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP go to `handler`; its first argument is what would have handled them.

    One that is ignored stays so, as Ctrl-C by a program in the background and SIGHUP under nohup; and so
    does a handler that Python does not know, since it could not be put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    found = {kind: signal.getsignal(kind) for kind in known}
    before = {kind: earlier for kind, earlier in found.items() if earlier not in (signal.SIG_IGN, None)}
    for kind, earlier in before.items():
        signal.signal(kind, partial(handler, earlier))
    try:
        yield
    finally:
        for kind, earlier in before.items():
            signal.signal(kind, earlier)


@contextlib.contextmanager
def listening(heard: list[int]) -> Iterator[None]:
    """Inside, the first of these signals is put into `heard`; a second one acts at once.

    One that nobody has heeded by the end acts then.
    """

    def hear(earlier: Earlier, signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, earlier)
        if heard:
            signal.raise_signal(signum)
        heard.append(signum)

    with handled_by(hear):
        yield
    if heard:
        signal.raise_signal(heard[0])


def heeding(heard: list[int]) -> Callable[[int, float], None]:
    """For the progress of an evaluation, which may be long: raises SignalError once a signal has come."""

    def check(done: int, bits: float) -> None:
        if heard:
            raise SignalError

    return check

"""Signals: the first is noted, a second acts, what is ignored stays so."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mulstm import files, signals
from mulstm.cli._ending import leaving


@pytest.fixture
def ignored() -> Iterator[signal.Signals]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield signal.SIGINT
    signal.signal(signal.SIGINT, before)


def test_the_first_is_noted_and_a_second_acts() -> None:
    heard: list[int] = []
    with signals.listening(heard):
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert heard.pop() == signal.SIGINT
        assert not heard
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_nobody_heeded_acts_at_the_end() -> None:
    heard: list[int] = []
    with pytest.raises(KeyboardInterrupt), signals.listening(heard):
        signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT]  # only the end of the block let it act
    with pytest.raises(signals.SignalError), signals.listening(heard):
        raise signals.SignalError  # it was heeded


def test_a_handler_that_python_does_not_know_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda kind: None if kind == signal.SIGTERM else known(kind))
    with signals.listening([]), leaving():
        assert known(signal.SIGTERM) == before
        assert known(signal.SIGINT) != signal.default_int_handler


def test_what_is_ignored_stays_so(ignored: signal.Signals) -> None:
    heard: list[int] = []
    with signals.listening(heard):
        signal.raise_signal(ignored)
        assert signal.getsignal(ignored) == signal.SIG_IGN
    assert heard == []
    assert signal.getsignal(ignored) == signal.SIG_IGN


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_takes_away_what_is_half_written(kind: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end, leaving(), files.replacing(tmp_path / "out"):
        signal.raise_signal(kind)
    assert end.value.code == 128 + kind
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(kind) == signal.SIG_DFL


@pytest.mark.parametrize(("kind", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("module", ["llvmlite.x", "torch._C", "numpy"])
def test_an_end_waits_for_what_calls_back(
    kind: signal.Signals, end: type[BaseException], module: str
) -> None:
    before = signal.getsignal(kind)
    with leaving():
        exec("signal.raise_signal(kind)", {"__name__": module, "signal": signal, "kind": kind})
        with pytest.raises(end):  # only now
            time.sleep(30)
    assert signal.getsignal(kind) == before


def test_a_second_of_another_kind_acts_too() -> None:
    def leave(signum: int, frame: object) -> None:
        raise SystemExit(signum)

    before = signal.signal(signal.SIGTERM, leave)
    heard: list[int] = []
    try:
        with signals.listening(heard):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(SystemExit):
                signal.raise_signal(signal.SIGTERM)
            assert heard.pop() == signal.SIGINT
            assert not heard
    finally:
        signal.signal(signal.SIGTERM, before)

"""What a command leaves behind, and commands in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mulstm


class Answer(NamedTuple):
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Call = Callable[..., Answer]
AROUND = ("RANK", "WORLD_SIZE", "NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")


def environment() -> dict[str, str]:
    """One thread, this very package, streams that are buffered, and nothing of a process group around."""
    kept = {k: v for k, v in os.environ.items() if k not in AROUND}
    return {**kept, "PYTHONPATH": str(Path(mulstm.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def start(*arguments: object, module: str = "mulstm", **more: Any) -> subprocess.Popen[str]:
    """Starts a module as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | more.pop("env", {}),
        **more,
    )


def ended(process: subprocess.Popen[str]) -> Answer:
    """Waits for it."""
    out, err = process.communicate(timeout=90)
    return Answer(process.returncode, out, err)


def told(answer: Answer, code: int, *words: str) -> None:
    """The code, nothing on stdout, no traceback, what is wrong and what to do."""
    assert answer.code == code, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err, answer.err
    if code != 2:
        assert answer.err.startswith("error: ")
        assert answer.err.count(". ") + answer.err.count(":\n") >= 1

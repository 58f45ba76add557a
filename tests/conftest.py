"""Small things that many tests share."""

from __future__ import annotations

import os

# Two busy teams of threads on two cores spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from made import TINY, made_text, text_recipe
from mulstm import report
from mulstm.recipe import Recipe


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """SIGINT, which a shell has programs in the background ignore."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["bfloat16", "float64"])
def usual(request: pytest.FixtureRequest) -> AbstractContextManager[None]:
    """Inside what it gives, PyTorch makes tensors of another type than float32."""
    import torch

    @contextmanager
    def other() -> Iterator[None]:
        torch.set_default_dtype(getattr(torch, request.param))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    return other()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of 6,000 characters."""
    path = tmp_path / "made.txt"
    path.write_bytes(made_text(6_000))
    return path


@pytest.fixture
def tiny(text_file: Path) -> Callable[..., Recipe]:
    """Makes a recipe over that text that trains in a blink; overrides come on top."""

    def make(*overrides: str) -> Recipe:
        return text_recipe(text_file, [*TINY, *overrides])

    return make


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (tmp_path / "README.md").write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nThe rest.\n")
    return folder

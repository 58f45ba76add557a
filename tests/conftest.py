"""Small made-up things that many tests share."""

from __future__ import annotations

import os

# Two busy teams of threads on two cores spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mulstm import recipe
from mulstm.recipe import Recipe

TINY = (
    "model.hidden=16",
    "model.embedding=8",
    "train.lanes=4",
    "train.chunk=10",
    "train.updates=12",
    "optimiser.warmup=0",
    "evaluate.every=5",
    "evaluate.symbols=300",
    "evaluate.lanes=5",
    "evaluate.patience=0",
    "evaluate.final_lanes=5",
)


def made_text(size: int, seed: int = 1) -> bytes:
    """Words of no language, a little predictable."""
    rng = np.random.default_rng(seed)
    words = [bytes(rng.choice(list(b"abdeilmnorstu"), size=rng.integers(2, 7)).tolist()) for _ in range(40)]
    ends = [b" ", b" ", b" ", b", ", b".\n"]
    text = b""
    while len(text) < size:
        text += words[min(int(rng.exponential(9)), 39)] + ends[rng.integers(5)]
    return text[:size]


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
        return recipe.for_text(text_file, [*TINY, *overrides])

    return make

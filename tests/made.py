"""Made-up texts and proteins, and a recipe's overrides that make it train in a blink."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mulstm.recipe import DataRecipe, Recipe, load

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
    "evaluate.calibrate=false",
    "evaluate.final_lanes=5",
)


def text_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The default recipe over a file."""
    return load("text", [f"data.corpus={path}", *overrides])


def settings(*overrides: str) -> list[str]:
    """TINY, and more, as options of the command line."""
    return [word for override in (*TINY, *overrides) for word in ("--set", override)]


def repeating_text() -> bytes:
    """40 times the same words, so that learning from one part helps with the next."""
    words = np.random.default_rng(3).integers(97, 103, 40, dtype=np.uint8).tobytes()
    return b" ".join([words] * 40)


def made_text(size: int, seed: int = 1) -> bytes:
    """Words of no language, a little predictable."""
    rng = np.random.default_rng(seed)
    words = [bytes(rng.choice(list(b"abdeilmnorstu"), size=rng.integers(2, 7)).tolist()) for _ in range(40)]
    ends = [b" ", b" ", b" ", b", ", b".\n"]
    text = b""
    while len(text) < size:
        text += words[min(int(rng.exponential(9)), 39)] + ends[rng.integers(5)]
    return text[:size]


def fasta(path: Path, proteins: list[str]) -> DataRecipe:
    path.write_text("".join(f">p{k}\n{p}\n" for k, p in enumerate(proteins)))
    return DataRecipe(corpus=str(path), records="fasta", alphabet="protein", convention="protein")


def proteins(n: int, seed: int = 0, longest: int = 60) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("MKTAYIQRGL"), rng.integers(1, longest))) for _ in range(n)]

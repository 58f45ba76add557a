"""What `mulstm evaluate --dynamic` does beyond plain evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mulstm import console
from mulstm.checkpoint import Checkpoint
from mulstm.cli._text import part_of
from mulstm.data.corpus import Split
from mulstm.data.store import cache_folder
from mulstm.dynamic import Settings, evaluate_dynamic, kept_statistics
from mulstm.evaluate import Evaluation

LANES, BATCHES = 100, 500  # from which the statistics are gathered


def evaluate(
    loaded: Checkpoint, part: Split, settings: Settings, symbols: int, data_dir: Path | None, quiet: bool
) -> Evaluation:
    """One stream of `part`, with a progress line; statistics of the training text are kept in the cache."""
    model = loaded.model.folded(embedding=False).eval() if settings.folded else loaded.model
    R = kept_statistics(
        cache_folder() / "statistics",
        model,
        loaded.alphabet,
        lambda: part_of(loaded, "", "train", data_dir),
        lanes=LANES,
        segment=settings.segment,
        batches=BATCHES,
    )
    if quiet:
        return evaluate_dynamic(model, part, R, settings, symbols=symbols)
    total = min(symbols or part.symbols_count, part.symbols_count)
    with console.Progress(total, label="evaluate") as screen:

        def show(done: int, bits: float) -> None:
            screen.update(done, bits_per_char=bits)

        return evaluate_dynamic(model, part, R, settings, symbols=symbols, progress=show)


def facts(loaded: Checkpoint, settings: Settings) -> dict[str, Any]:
    """For the printed result."""
    model = loaded.model.folded(embedding=False) if settings.folded else loaded.model
    known = {"rate": settings.rate_of(model), "statistics_lanes": LANES, "statistics_batches": BATCHES}
    return {"dynamic": vars(settings) | known}

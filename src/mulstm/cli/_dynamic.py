"""What `mulstm evaluate --dynamic` does beyond plain evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mulstm import checkpoint
from mulstm.checkpoint import Checkpoint
from mulstm.cli._text import part_of
from mulstm.data.corpus import Split
from mulstm.dynamic import Settings, evaluate_dynamic, kept_statistics
from mulstm.evaluate import Evaluation

LANES, BATCHES = 100, 500  # from which the statistics are gathered


def evaluate(
    path: Path, loaded: Checkpoint, part: Split, settings: Settings, symbols: int, data_dir: Path | None
) -> Evaluation:
    """One stream of `part`; the statistics of the training text are kept in a file beside the checkpoint."""
    file = checkpoint.find(path)
    R = kept_statistics(
        file.with_name(f"{file.stem}.statistics.safetensors"),
        loaded.model,
        loaded.alphabet,
        lambda: part_of(loaded, "", "train", data_dir),
        lanes=LANES,
        segment=settings.segment,
        batches=BATCHES,
    )
    return evaluate_dynamic(loaded.model, part, R, settings, symbols=symbols)


def facts(settings: Settings) -> dict[str, Any]:
    """For the printed result."""
    return {"dynamic": vars(settings) | {"statistics_lanes": LANES, "statistics_batches": BATCHES}}

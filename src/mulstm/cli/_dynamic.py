"""What `mulstm evaluate --dynamic` does beyond plain evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mulstm.checkpoint import Checkpoint
from mulstm.cli._text import part_of
from mulstm.data.store import cache_folder
from mulstm.dynamic import Settings, Statistics, kept_statistics
from mulstm.nn.model import LanguageModel

LANES, BATCHES = 100, 500  # from which the statistics are gathered


def prepare(
    loaded: Checkpoint, settings: Settings, data_dir: Path | None
) -> tuple[LanguageModel, Statistics, Settings]:
    """The model that moves, the training text's statistics, kept in the cache, and settings with a rate."""
    model = loaded.model.folded(embedding=False).eval() if settings.folded else loaded.model
    R = kept_statistics(
        cache_folder() / "statistics",
        model,
        loaded.alphabet,
        part_of(loaded, "", "train", data_dir),
        lanes=LANES,
        segment=settings.segment,
        batches=BATCHES,
    )
    return model, R, replace(settings, rate=settings.rate_of(model))


def facts(settings: Settings) -> dict[str, Any]:
    """For the printed result."""
    return {"dynamic": vars(settings) | {"statistics_lanes": LANES, "statistics_batches": BATCHES}}

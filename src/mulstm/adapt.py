"""Dynamic evaluation of a saved model: with the statistics that are kept of it, and for its record."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from mulstm import console
from mulstm.checkpoint import Checkpoint
from mulstm.data.corpus import Split
from mulstm.data.store import cache_folder
from mulstm.dynamic import (
    BATCHES,
    LANES,
    Settings,
    Statistics,
    batches_of,
    kept_statistics,
    moving,
)
from mulstm.errors import CheckpointError
from mulstm.evaluate import Evaluation
from mulstm.job import hardware
from mulstm.machine import commit
from mulstm.nn.model import LanguageModel
from mulstm.report.records import UNROUNDED, read_one


class Moved(NamedTuple):
    """The model that moves, and how."""

    model: LanguageModel
    statistics: Statistics
    settings: Settings  # with a rate
    facts: dict[str, Any]  # for --json and records


def prepare(
    loaded: Checkpoint,
    settings: Settings | None,  # None: those of the model's recipe where it has a rate, else the defaults
    part: Split,  # the training part of the model's own text
    *,
    folded: bool = True,
    quiet: bool = False,
) -> Moved:
    """What dynamic evaluation needs; the statistics of `part` are kept in the cache."""
    if settings is None:
        own = loaded.recipe.dynamic
        settings = Settings(**asdict(own)) if own.rate else Settings()
    model = moving(loaded.model) if folded else loaded.model
    with ExitStack() as stack:
        screen: console.Progress | None = None

        def show(done: int, batches: int) -> None:
            nonlocal screen
            if screen is None:  # only now: where they are kept, there is nothing to show
                screen = stack.enter_context(
                    console.Progress(batches, label="statistics", warm_up=1, unit="batches")
                )
            screen.update(done)

        R = kept_statistics(
            cache_folder() / "statistics",
            model,
            loaded.alphabet,
            part,
            progress=None if quiet else show,
            lanes=LANES,
            segment=settings.segment,
            batches=BATCHES,
        )
    settings = replace(settings, rate=settings.rate_of(model))
    chunks, count = batches_of(part, LANES, settings.segment, BATCHES)
    gathered = {"statistics_lanes": chunks.lanes, "statistics_batches": count}
    return Moved(model, R, settings, vars(settings) | {"folded": folded} | gathered)


def require_record_of(loaded: Checkpoint, part: Split, path: Path) -> None:
    """Raises CheckpointError unless the record at `path` is of this very model, rounded or not, and part."""
    record = read_one(path)
    own = {
        "recipe": loaded.recipe.name,
        "seed": loaded.recipe.train.seed,
        "parameters": loaded.model.parameter_count(),
        "test_symbols": part.symbols_count,
    }
    if record.get("fingerprint") and loaded.meta["storage"] in UNROUNDED:
        own["fingerprint"] = loaded.meta["fingerprint"]
    else:  # rounded since, or an early record: two runs of one recipe still differ in length and time
        metrics, best = loaded.meta["metrics"], loaded.recipe.evaluate.patience > 0
        own["best_valid_update" if best else "updates"] = metrics.get("update")
        if not best:  # which the clock of the record runs past
            own["train_seconds"] = metrics.get("train_seconds")
    wrong = [
        f"{key} {record.get(key)} is not {value}" for key, value in own.items() if record.get(key) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is the record of another model ({'; '.join(wrong)}). "
            "Give the record and the model of one run."
        )


def for_record(found: Evaluation, moved: Moved, loaded: Checkpoint) -> dict[str, Any]:
    """What a record keeps of it."""
    perplexity = found.word_perplexity
    return {
        "test_bits_per_char": found.bits_per_char,
        **({} if perplexity is None else {"test_word_perplexity": perplexity}),
        **moved.facts,
        "precision": loaded.model.precision,
        "storage": loaded.meta["storage"],
        "seconds": found.seconds,
        "hardware": hardware(loaded.model.device),
        "commit": commit(),
    }

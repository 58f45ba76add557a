"""What a run came to: its record, and whether that counts as its recipe's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from mulstm import console, machine
from mulstm import job as jobs
from mulstm import recipe as recipes
from mulstm.calibrate import Calibration, calibrate
from mulstm.data.corpus import Split
from mulstm.evaluate import Evaluation, evaluate, evaluate_together
from mulstm.job import Job
from mulstm.nn.model import LanguageModel
from mulstm.recipe import Recipe
from mulstm.record_corpus import RecordSplit
from mulstm.report.records import CUT, CUT_SHORT
from mulstm.resume import TextChangedError
from mulstm.signals import heeding
from mulstm.words import word_costs


class Outcome(NamedTuple):
    """What the trained model costs, by the part's name, and how it was calibrated where it was."""

    measured: dict[str, Evaluation]
    calibration: Calibration | None

    @property
    def broken(self) -> str:
        """The part whose cost is no longer a number; empty where there is none."""
        return next((name for name, one in self.measured.items() if not math.isfinite(one.nats)), "")


def valid_bits(job: Job, model: LanguageModel) -> float:
    """What the validation part costs, as far as the recipe has it read on the way."""
    asked, split = job.recipe.evaluate, job.corpus.split("valid")
    heed = heeding(job.signals)
    heed(0, 0.0)  # a short part does not look
    found = evaluate(model, split, asked.lanes, symbols=asked.symbols, progress=heed)
    job.valid_symbols = found.symbols
    return found.bits_per_char


def measure(job: Job, model: LanguageModel, calibration: Calibration | None) -> Outcome:
    """Measures a trained model on whole parts; calibrates it first, if it is to be and has not been."""
    splits = [part for name in ("valid", "test") if (part := job.corpus.split(name)).symbols_count]
    is_due = job.recipe.evaluate.calibrate and calibration is None
    if is_due and any(part.name == "valid" for part in splits):
        if _is_enough_to_calibrate(job):
            _note(job, "calibrating on the valid part")
            calibration = calibrate(model, partial(valid_bits, job, model))
        else:
            _note(job, "not calibrated: of the valid part too little is read at a stretch")
    for part in splits:
        _note(job, f"measuring on all {part.symbols_count:,} symbols of the {part.name} part")
    lanes = job.recipe.evaluate.final_lanes
    heed = heeding(job.signals)
    found = evaluate_together(model, splits, lanes, progress=heed)
    heed(0, 0.0)  # short parts do not look
    if jobs.is_another(job.corpus, job.facts):
        raise TextChangedError(job.folder)
    return Outcome(dict(zip((part.name for part in splits), found, strict=True)), calibration)


def _note(job: Job, text: str) -> None:
    if job.screen is not None:
        job.screen.note(text)


def _is_enough_to_calibrate(job: Job) -> bool:
    """A few symbols, or many after few each, would only say how sure to be of the beginnings of texts."""
    asked, part = job.recipe.evaluate, job.corpus.split("valid")
    read = min(part.symbols_count, asked.symbols or part.symbols_count)
    lanes = 1 if isinstance(part, RecordSplit) else asked.lanes
    return read // lanes >= recipes.VALID_LANE


def record(job: Job, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """What a run was and what it came to; `seconds` is how long measuring took."""
    measured = outcome.measured
    recipe, progress = job.recipe, job.progress
    valid, test = measured.get("valid"), measured.get("test")
    is_cut = job.is_cut and progress.update < job.total and not progress.stopped
    epochs = progress.update / job.per_epoch
    reasons = [departures(recipe, job.source)]
    if is_cut:
        done = f"{epochs:.2f} of {job.total / job.per_epoch:.4g} epochs"
        reasons.append(f"{CUT_SHORT} {console.duration(progress.seconds)} of updates, {done}")
    reason = "; ".join(filter(None, reasons))
    found: dict[str, Any] = {
        "recipe": recipe.name,
        "table": recipe.table,
        "row": recipe.row,
        "kind": recipe.kind,
        "seed": recipe.train.seed,
        "parameters": job.update.model.parameter_count(),
        "complete": not reason,
        "reason": reason,
        "valid_bits_per_char": valid.bits_per_char if valid else None,
        "test_bits_per_char": test.bits_per_char if test else None,
        "valid_symbols": valid.symbols if valid else 0,
        "test_symbols": test.symbols if test else 0,
        "evaluate_lanes": recipe.evaluate.final_lanes,
        "epochs": epochs,
        "updates": progress.update,
        "stopped": CUT if is_cut else progress.stopped,
        "best_valid_update": progress.best_update,
        "train_seconds": progress.seconds,
        "valid_seconds": progress.valid_seconds,
        "evaluate_seconds": seconds,
        "setup_seconds": job.setup_seconds,
        "hardware": job.hardware,
        "processes": job.share.count,
        "precision": job.precision,
        "backend": job.backend,
        "commit": machine.commit(),
        "settings": recipes.settings(recipe),
    }
    if outcome.calibration is not None:
        found["calibration"] = outcome.calibration._asdict()
    for name, evaluation in measured.items():
        if evaluation.word_perplexity is not None:
            found[f"{name}_word_perplexity"] = evaluation.word_perplexity
            found[f"{name}_product_word_perplexity"] = _by_products(job.corpus.split(name), evaluation)
    return found


def _by_products(part: Split, evaluation: Evaluation) -> float | None:
    """Perplexity of words by the probabilities of their own bytes, multiplied."""
    if evaluation.losses is None:
        return None
    costs = word_costs(part.raw(), evaluation.losses)
    return None if costs is None else costs.perplexity


def departures(recipe: Recipe, source: dict[str, Any]) -> str:
    """Why a run does not count as its packaged recipe's: what the command line changed, or started from."""
    if not recipe.table or recipe.name not in recipes.names():
        return ""
    told = recipes.departures(recipe)
    told += ["started from a trained model"] if "tuned_from" in source else []
    return f"not the recipe as it stands: {'; '.join(told)}" if told else ""

"""What a run came to: its record, and whether that counts as its recipe's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulstm import console, machine
from mulstm import recipe as recipes
from mulstm.data.corpus import Split
from mulstm.evaluate import Evaluation
from mulstm.job import Job
from mulstm.recipe import Recipe
from mulstm.report.records import CUT, CUT_SHORT
from mulstm.words import word_costs


def record(job: Job, measured: Mapping[str, Evaluation], seconds: float) -> dict[str, Any]:
    """What a run was and what it measured, by the part's name; `seconds` is how long that took."""
    recipe, progress = job.recipe, job.progress
    valid, test = measured.get("valid"), measured.get("test")
    is_cut = job.is_cut and progress.update < job.total and not progress.stopped
    epochs = progress.update / job.epoch
    reasons = [departures(recipe, job.source)]
    if is_cut:
        done = f"{epochs:.2f} of {job.total / job.epoch:.4g} epochs"
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

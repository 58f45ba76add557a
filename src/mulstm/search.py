"""Short runs of a recipe with other settings, compared on the validation part; the test part stays unread."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mulstm import files, machine, parallel, runs
from mulstm import job as jobs
from mulstm import recipe as recipes
from mulstm.data.corpus import Corpus
from mulstm.divergence import DivergedError
from mulstm.errors import RecipeError, RunError, RunInterruptedError
from mulstm.job import Job
from mulstm.recipe import DataRecipe, Recipe
from mulstm.report.trials import Result, read
from mulstm.signals import listening
from mulstm.train import run_updates, screen


@dataclass(frozen=True)
class Trial:
    """One run: the recipe with its changes made, and what they are, as "key=value"."""

    changes: tuple[str, ...]
    recipe: Recipe


def combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Each value of each axis with each of the others; an axis is written key=value,value."""
    every: dict[str, list[str]] = {}
    for axis in axes:
        key, _, values = (part.strip() for part in axis.partition("="))
        tried = [value.strip() for value in values.split(",")]
        if not key or not all(tried):
            raise RecipeError(f"{axis!r} is no list of values. Write it as optimiser.rate=1e-3,2e-3.")
        if key in every:
            raise RecipeError(f"{key} is tried twice. Give all its values in one list: {key}=...,...")
        every[key] = [f"{key}={value}" for value in tried]
    return list(itertools.product(*every.values())) if every else []


def search(
    trials: Sequence[Trial],
    *,
    out: Path,
    data_dir: str | Path | None = None,
    device: str = "auto",
    minutes: float = 0.0,  # after which no further trial is begun; 0: all are run
    note: Callable[[str], None] | None = None,  # None: silent
) -> list[Result]:
    """What each trial found; `out` gets a line for each, and one that is there already is not run again."""
    if not minutes >= 0:
        raise RecipeError(f"minutes={minutes} is no time. Give one above 0, or 0 for all trials.")
    for trial in trials:
        recipes.check(trial.recipe)
        jobs.require_apart(trial.recipe.data.corpus, out)
    known = read(out)
    _append(out)  # a place that cannot be written is told before any work
    tell = note or (lambda _: None)
    found: list[Result] = []
    left: list[str] = []
    started, is_begun = time.monotonic(), False
    with parallel.joined(device) as share:
        if share.count > 1:
            raise RunError("A search runs in one process. Start it without torchrun.")
        texts: dict[DataRecipe, tuple[Corpus, dict[str, Any]]] = {}
        for trial in trials:  # what one of them cannot have is told before any work, too
            if trial.recipe.data not in texts:
                text = jobs.load_corpus(trial.recipe, share, data_dir)
                text.split("valid").require_symbols()  # trials are compared on it
                texts[trial.recipe.data] = text, jobs.corpus_facts(text)
            text, facts = texts[trial.recipe.data]
            if _line_of(known, trial.recipe, facts) is None:
                jobs.backend_of(trial.recipe, share)
                jobs.lanes(trial.recipe, text, 0)
        for n, trial in enumerate(trials, 1):
            what = f"trial {n} of {len(trials)}: {' '.join(trial.changes) or 'as it is'}"
            corpus, facts = texts[trial.recipe.data]
            earlier = _line_of(known, trial.recipe, facts)
            if earlier is not None:
                if earlier["set"] != list(trial.changes):
                    other = " ".join(earlier["set"]) or "the one as it is"
                    tell(f"{what}: these are the settings of {other}")
                found.append({**earlier, "set": list(trial.changes)})
                continue
            # One trial a call, even where reading the text takes all the time: else none would ever be run.
            if minutes and time.monotonic() - started >= 60 * minutes and is_begun:
                left.append(what)
                continue
            tell(what)
            is_begun = True
            result = _run(trial, share, corpus, what, out, note)
            known.append(result)
            found.append(result)
    if left:
        tell(f"The time is over before {left[0]}. The same command goes on with it.")
    return found


def _line_of(known: Sequence[Result], recipe: Recipe, text: dict[str, Any]) -> Result | None:
    """The line of this recipe and, where it tells, of the text as it is now."""
    settings = recipes.settings(recipe)
    for line in known:
        is_same = line.get("recipe") == recipe.name and recipes.completed(line["settings"]) == settings
        if is_same and line.get("corpus", text) == text:
            return line
    return None


def _run(
    trial: Trial,
    share: parallel.Share,
    corpus: Corpus,
    what: str,
    out: Path,
    note: Callable[[str], None] | None,
) -> Result:
    """One trial, in a folder that goes away with it; its line is written before a late signal acts."""
    with tempfile.TemporaryDirectory(prefix="mulstm-") as folder, contextlib.ExitStack() as stack:
        job = jobs.build(
            trial.recipe,
            share,
            stack,
            runs_dir=Path(folder),
            path=None,
            data_dir=None,
            start_from=None,
            corpus=corpus,
        )
        stack.enter_context(listening(job.signals))
        if note is not None:
            if job.no_eight is not None:
                note(job.told_of_eight)
            job.screen = stack.enter_context(screen(job, trial.recipe.name))
        diverged = ""
        try:
            run_updates(job)
        except DivergedError as error:
            diverged = error.what  # the checkpoint that the remedy may name goes away with the folder
        except RunInterruptedError as stop:
            remedy = "The trials before it are kept; the same command goes on with this one."
            raise RunInterruptedError(f"Interrupted in {what}", remedy, stop.signum) from stop
        if jobs.is_another(corpus, job.facts):
            raise RunError(f"The text changed during {what}. Put it back as it was, and search again.")
        result = _result(trial, job, diverged)
        _append(out, result)
        del job
    if share.device.type == "cuda":
        torch.cuda.empty_cache()  # the next one's graph wants a pool of its own
    return result


def _result(trial: Trial, job: Job, diverged: str) -> Result:
    recipe, progress = trial.recipe, job.progress
    lines = runs.read_log(job.folder)
    last = lines[-1] if lines else {}
    # Kernels are loaded in the first, and in a short run each is of one update.
    speeds = [line["symbols_per_second"] for line in lines]
    bits = progress.best_bits if recipe.evaluate.patience else progress.valid_bits
    return {
        "recipe": recipe.name,
        "set": list(trial.changes),
        "seed": recipe.train.seed,
        "parameters": job.update.model.parameter_count(),
        "valid_bits_per_char": None if diverged else bits,
        "train_bits_per_char": None if diverged else last.get("train_bits_per_char"),
        "valid_symbols": job.valid_symbols,
        "evaluate_lanes": recipe.evaluate.lanes,
        "epochs": progress.update / job.per_epoch,
        "updates": progress.update,
        "train_seconds": progress.seconds,
        "symbols_per_second": statistics.median(speeds) if speeds else None,
        "stopped": diverged or progress.stopped,
        "hardware": job.hardware,
        "precision": job.precision,
        "backend": job.backend,
        "commit": machine.commit(),
        "curve": [
            {key: line[key] for key in ("update", "train_bits_per_char", "valid_bits_per_char")}
            for line in lines
            if line.get("valid_bits_per_char") is not None
        ],
        "corpus": job.facts,
        "settings": recipes.settings(recipe),
    }


def _append(path: Path, result: Result | None = None) -> None:
    """One line more, or none, whole or not at all; another search may write into the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.alone_in(path.parent):
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        end = "" if before.endswith("\n") or not before else "\n"
        files.write_atomic(path, before + end + (files.json_line(result) if result else ""))

"""Runs, or goes on with, the recipes of one of the paper's tables, and keeps what their models measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mulstm import adapt, checkpoint, console, parallel, record_corpus, runs
from mulstm import recipe as recipes
from mulstm.divergence import DivergedError
from mulstm.dynamic import Settings, evaluate_dynamic
from mulstm.earlier import finished
from mulstm.errors import MulstmError, RecipeError, RunError, RunInterruptedError
from mulstm.recipe import Recipe
from mulstm.report import RESULTS
from mulstm.report.records import (
    CUT,
    DYNAMIC,
    KINDS,
    Record,
    add_dynamic,
    place,
    publish,
    read_one,
)
from mulstm.train import train


class LeftOutError(RunError):
    """A record is there, and the dynamic evaluation that its recipe asks for is not."""


def rows(table: str, row: str = "", kinds: Sequence[str] = KINDS) -> list[Recipe]:
    """The recipes of a table: all, or those of one row, of these kinds."""
    of_table = [r for r in map(recipes.load, recipes.names()) if r.table == table]
    if not of_table:
        tables = sorted({r.table for r in map(recipes.load, recipes.names()) if r.table})
        raise RecipeError(f"There is no table {table!r}. Choose one of: {', '.join(tables)}.")
    of_row = [r for r in of_table if not row or r.row == row]
    if not of_row:
        known = sorted({r.row for r in of_table})
        raise RecipeError(f"The table {table} has no row {row!r}. Choose one of: {', '.join(known)}.")
    found = [r for r in of_row if r.kind in kinds]
    if not found:
        others = sorted({r.kind for r in of_row})
        raise RecipeError(
            f"The row {row} of {table} has no {' or '.join(kinds)} recipe. Leave --{' and --'.join(kinds)} "
            f"out: it has a {' and a '.join(others)} one."
        )
    return found


def reproduce(
    chosen: Sequence[Recipe],
    *,
    seeds: Sequence[int] = (),  # none: each recipe's own
    results: Path = RESULTS,
    runs_dir: Path = runs.ROOT,
    data_dir: Path | None = None,
    device: str = "auto",
    precision: str = "",  # instead of the recipes' own
    minutes: float = 0.0,  # of updates, after which a run is recorded as it is; 0: as many as it takes
    note: Callable[[str], None] = print,
) -> list[Path]:
    """The records of the runs made now; what has been measured already is left as it is.

    What fails keeps nothing else from being made: DivergedError or LeftOutError comes after the last.
    """
    asked = [
        replace(recipe, train=replace(recipe.train, seed=seed, precision=precision or recipe.train.precision))
        for recipe in chosen
        for seed in seeds or (recipe.train.seed,)
    ]
    # What would be told after hours of training is told before.
    for recipe in asked:
        recipes.check(recipe)
    _require_writable(results)
    made: list[Path] = []
    failed: RunError | None = None
    for recipe in asked:
        what = f"{recipe.name}, seed {recipe.train.seed}"
        path = place(results, recipe.name, recipe.train.seed)
        earlier = _earlier(path)
        if earlier is not None and (earlier["complete"] or _had_its_time(earlier, minutes)):
            how = "" if earlier["precision"] == recipe.train.precision else f", in {earlier['precision']}"
            how += "" if earlier["complete"] else f", cut short after {earlier['epochs']:.3g} epochs"
            note(f"{what}: measured already{how}. With another --results and --runs-dir it is made again.")
        else:
            note(what)
            try:
                folder = _trained(recipe, runs_dir, data_dir, device, minutes)
            except DivergedError as fault:
                note(str(fault))
                failed = failed or fault
                continue
            if earlier is not None and _came_further(earlier, read_one(folder / "metrics.json")):
                note(f"{what}: the earlier record came further ({earlier['epochs']:.3g} epochs) and stays.")
                continue
            made.append(publish(folder, results))
        if _lacks_dynamic(recipe, path):
            try:
                _evaluate_dynamically(recipe, path, runs_dir, data_dir, device, note)
            except MulstmError as fault:
                left_out = LeftOutError(f"{what}: without its dynamic evaluation. {fault}")
                note(str(left_out))
                failed = failed or left_out
    if failed is not None:
        raise failed
    return made


def _trained(recipe: Recipe, runs_dir: Path, data_dir: Path | None, device: str, minutes: float) -> Path:
    """The folder of the recipe's run, which goes on where there is one."""
    try:
        _, folder = train(
            recipe,
            runs_dir=runs_dir,
            data_dir=data_dir,
            device=device,
            resume_from="auto",
            minutes=minutes,
        )
        return folder
    except RunInterruptedError as stop:
        remedy = "Give the same command again: it goes on there."
        raise RunInterruptedError(stop.what, remedy, stop.signum) from stop


def _lacks_dynamic(recipe: Recipe, path: Path) -> bool:
    """Whether a record is still without the dynamic evaluation that its recipe asks for."""
    record = read_one(path)
    asked = asdict(recipe.dynamic)
    is_asked = recipe.dynamic.rate > 0 and record["complete"]
    return is_asked and any(record.get(DYNAMIC + key) != value for key, value in asked.items())


def _evaluate_dynamically(
    recipe: Recipe,
    path: Path,
    runs_dir: Path,
    data_dir: Path | None,
    device: str,
    note: Callable[[str], None],
) -> None:
    """Adds to a record what its model costs when it learns as it reads."""
    what = f"{recipe.name}, seed {recipe.train.seed}, dynamic evaluation"
    folder = _run_of(path, recipe.name, runs_dir)
    if folder is None:
        note(f"{what}: left out, because the record's run is not in {runs_dir}.")
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        note(f"{what}: left out, because it wants one process. The same command without torchrun adds it.")
        return
    note(what)
    loaded = checkpoint.load(checkpoint.find(folder), parallel.pick(device))
    precision = read_one(path)["precision"]
    loaded.model.precision = "bf16" if precision == "fp8" else precision  # 8-bit products are for training
    loaded.model.backend = recipe.train.backend
    corpus = record_corpus.load(recipe.data, data_dir)
    moved = adapt.prepare(loaded, Settings(**asdict(recipe.dynamic)), corpus.split("train"))
    part = corpus.split("test")
    with console.Progress(part.symbols_count, label="evaluate", warm_up=1) as screen:
        found = evaluate_dynamic(
            moved.model,
            part,
            moved.statistics,
            moved.settings,
            progress=lambda done, bits: screen.update(done, bits_per_char=bits),
        )
    add_dynamic(path, adapt.for_record(found, moved, loaded))


def _run_of(path: Path, name: str, runs_dir: Path) -> Path | None:
    """The run that a record is of, if it is still there."""
    fingerprint = read_one(path).get("fingerprint")
    for folder in runs.newest_first(name, root=runs_dir):
        record = finished(folder)
        if fingerprint and record is not None and record.get("fingerprint") == fingerprint:
            return folder
    return None


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"Nothing can be written into {folder} ({error.strerror}). "
            "Choose another place for records and tables with --results."
        ) from None


def _earlier(path: Path) -> Record | None:
    """The record there, if its recipe still stands as it was."""
    try:
        record = read_one(path)
    except RunError:  # none, or a damaged one, which is made again
        return None
    return None if record.changes() else record


def _had_its_time(record: Record, minutes: float) -> bool:
    return bool(record.get("stopped") == CUT and 0 < 60 * minutes <= record["train_seconds"])


def _came_further(earlier: Record, fresh: Record) -> bool:
    """Minutes say nothing about how far a slower machine comes in them."""
    return bool(earlier.is_cut and not fresh["complete"] and earlier["epochs"] >= fresh["epochs"])

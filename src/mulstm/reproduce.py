"""Runs, or goes on with, the recipes of one of the paper's tables, and keeps what they measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mulstm import recipe as recipes
from mulstm import runs
from mulstm.errors import RecipeError, RunError
from mulstm.recipe import Recipe
from mulstm.report import RESULTS
from mulstm.report.records import place, publish, read_one
from mulstm.train import train

KINDS = ("faithful", "fast")


def rows(table: str, row: str = "", kinds: Sequence[str] = KINDS) -> list[Recipe]:
    """The recipes of a table: all, or those of one row, of these kinds."""
    of_table = [r for r in map(recipes.load, recipes.names()) if r.table == table]
    if not of_table:
        tables = sorted({r.table for r in map(recipes.load, recipes.names()) if r.table})
        raise RecipeError(f"There is no table {table!r}. Choose one of: {', '.join(tables)}.")
    found = [r for r in of_table if (not row or r.row == row) and r.kind in kinds]
    if not found:
        known = sorted({r.row for r in of_table})
        raise RecipeError(f"The table {table} has no row {row!r}. Choose one of: {', '.join(known)}.")
    return found


def reproduce(
    chosen: Sequence[Recipe],
    *,
    seeds: Sequence[int] = (),  # none: each recipe's own
    results: Path = RESULTS,
    runs_dir: Path = runs.ROOT,
    data_dir: Path | None = None,
    device: str = "auto",
    note: Callable[[str], None] = print,
) -> list[Path]:
    """The records of the runs made now; what has a complete record already is left as it is."""
    made = []
    for recipe in chosen:
        for seed in seeds or (recipe.train.seed,):
            seeded = replace(recipe, train=replace(recipe.train, seed=seed))
            if _is_measured(results, seeded):
                note(f"{recipe.name}, seed {seed}: measured already.")
                continue
            note(f"{recipe.name}, seed {seed}")
            _, folder = train(seeded, runs_dir=runs_dir, data_dir=data_dir, device=device, resume_from="auto")
            made.append(publish(folder, results))
    return made


def _is_measured(results: Path, recipe: Recipe) -> bool:
    """Whether a complete record of the recipe and its seed is there; a damaged one is made again."""
    try:
        return bool(read_one(place(results, recipe.name, recipe.train.seed))["complete"])
    except RunError:
        return False

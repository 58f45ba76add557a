"""A run that began before: which one goes on, and what of it is still true."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from mulstm import checkpoint, files, resume, runs, tensorfile
from mulstm import recipe as recipes
from mulstm.errors import CheckpointError, RecipeError, RunError
from mulstm.recipe import Recipe
from mulstm.report.records import CUT, read_one
from mulstm.resume import Progress

BETTER = "better.safetensors"  # the best model since the run's state was saved


def run_of(
    recipe: Recipe,
    runs_dir: Path,
    resume_from: str | None,
    start_from: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Path | None:
    """The folder to go on with: the one named, or for "auto" the newest run of this very recipe and start.

    `tell` hears in what the newest run differs where none is found.
    """
    if resume_from is None:
        return None
    start = "" if start_from is None else tensorfile.read_meta(checkpoint.find(start_from)).get("fingerprint")
    if resume_from != "auto":
        _require_same(recipe, Path(resume_from))
        _require_state(Path(resume_from), recipe)
        if start_from is not None and tuned_from(Path(resume_from)) != start:
            raise RunError(
                f"The run in {resume_from} did not start from {start_from}. "
                "Leave --from out to go on with it, or start a new run."
            )
        return Path(resume_from)
    if start_from is not None and Path(start_from).is_dir() and not runs.is_run(Path(start_from)):
        raise RunError(
            f"{start_from} stands for its newest run, which may be the very one to go on with. "
            "Give --from one run, or a checkpoint."
        )
    told = ""
    for folder in runs.newest_first(recipe.name, root=runs_dir):
        with contextlib.suppress(RecipeError):  # of another version
            changed = _changed(_on_its_text(recipe, folder), folder)
            if not changed and tuned_from(folder) == start:
                _require_state(folder, recipe)
                return folder
            what = "; ".join(changed[:4]) or "it did not start from the same weights"
            told = told or f"{folder} differs: {what}"
    if told and tell is not None:
        tell(f"No run of this very recipe to go on with ({told}); starting anew.")
    return None


def tuned_from(folder: Path) -> str:
    """The fingerprint of the model a run started from; empty where it started from none."""
    return str((saved_source(folder) or {}).get("tuned_from", ""))


def saved_source(folder: Path) -> dict[str, Any] | None:
    """What a run's state, or else its last model, says of the origin of that; None before there is one."""
    last, found = folder / "last.safetensors", _saved(folder, "source")
    if found is None and last.is_file():  # the state is damaged, or was taken away from a complete run
        found = tensorfile.read_meta(last).get("source")
    return None if found is None else dict(found)


def _saved(folder: Path, what: str) -> dict[str, Any] | None:
    """A part of what a run's state says of itself; None where there is no state, or a damaged one."""
    found = None
    if (folder / resume.NAME).is_file():
        with contextlib.suppress(CheckpointError):  # it is told of where it is loaded
            found = tensorfile.read_meta(folder / resume.NAME).get(what)
    return found if isinstance(found, dict) else None


def finished(path: Path) -> dict[str, Any] | None:
    """The record of a run that is complete, else None: one that is damaged is measured again.

    A run whose time was over goes on.
    """
    try:
        record = read_one(path / "metrics.json").values
    except RunError:
        return None
    return record if record.get("stopped") != CUT else None


def _changed(recipe: Recipe, folder: Path) -> list[str]:
    """What is not as in the recipe of the run there."""
    now, then = recipes.as_dict(recipe), recipes.as_dict(runs.recipe_of(folder))
    return recipes.differences(recipes.flat(now), recipes.flat(then))


def _require_same(recipe: Recipe, folder: Path) -> None:
    # A text may have moved: that it is the same one is seen from what it holds.
    if changed := _changed(_on(recipe, runs.recipe_of(folder).data.corpus), folder):
        raise RunError(
            f"The run in {folder} was made with another recipe ({'; '.join(changed[:4])}). "
            "Resume it with its own recipe, or start a new run."
        )


def _on(recipe: Recipe, corpus: str) -> Recipe:
    return replace(recipe, data=replace(recipe.data, corpus=corpus))


def _on_its_text(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the run's own name for its text, where both mean the same file."""
    where = runs.recipe_of(folder).data.corpus
    try:
        return _on(recipe, where) if Path(where).samefile(recipe.data.corpus) else recipe
    except (OSError, ValueError):  # a known corpus, or a text that is no longer there
        return recipe


def _require_state(folder: Path, recipe: Recipe) -> None:
    """Raises RunError where a run has models but no state to go on from: it would begin anew over them.

    And where it was killed before the first copy of the model it started from was whole; and where what was
    done so far is not what its recipe says.
    """
    state = folder / resume.NAME
    if tuned_from(folder) and not (folder / "last.safetensors").is_file():
        raise RunError(f"The run in {folder} was ended before it had begun. Start a new run with --from.")
    if finished(folder) is not None:
        return
    kept = [name for name in ("best.safetensors", "last.safetensors") if (folder / name).exists()]
    if kept and not state.is_file():
        raise RunError(
            f"The run in {folder} cannot go on: its {resume.NAME} is missing. "
            f"Start a new run from its model with --from {quote(str(folder / kept[0]))}."
        )
    now = recipes.settings(recipe)
    then = recipes.completed(_saved(folder, "recipe") or now)
    then["data.corpus"] = recipe.data.corpus  # a text may have moved
    if changed := recipes.differences(now, then):
        raise RunError(
            f"The recipe.toml of {folder} was changed after the run began ({'; '.join(changed[:4])}). "
            "Put it back as it was, or start a new run."
        )


def settle_best(folder: Path, progress: Progress) -> None:
    """Makes the better model the best one once the run's saved state knows of it, and takes away any other.

    So a run that was killed does not find a best model from a future that it has not saved.
    """
    better = folder / BETTER
    if not better.is_file():
        return
    try:
        update = tensorfile.read_meta(better)["metrics"]["update"]
    except (CheckpointError, KeyError, TypeError):  # damaged: the run's state knows the best before it
        update = None
    if update == progress.best_update:
        better.replace(folder / "best.safetensors")
    else:
        better.unlink()


def tidy(folder: Path, logged: int) -> None:
    """Takes away what a killed run left half-written, log lines that its last checkpoint lacks, and a record.

    The record is that of a run whose time was over: of what comes now it would say nothing.
    """
    (folder / "metrics.json").unlink(missing_ok=True)
    # Ours end in .tmp; those that safetensors makes on the way begin with it.
    for left in (*folder.glob(".*.tmp"), *folder.glob(".tmp*")):
        left.unlink(missing_ok=True)
    lines = runs.read_log(folder)
    kept = [line for line in lines if line["update"] <= logged]
    if len(kept) < len(lines):
        files.write_atomic(folder / "log.jsonl", "".join(files.json_line(line) for line in kept))

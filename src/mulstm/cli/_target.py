"""What `mulstm train X` means by X: a recipe, a recipe file, a known corpus, or any text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from mulstm import checkpoint, parallel, recipe, record_corpus, runs
from mulstm.cli._text import require_one_meaning, two_meanings
from mulstm.convention import name_of
from mulstm.data.corpus import is_hidden
from mulstm.data.known import KNOWN
from mulstm.errors import CheckpointError, DataError, RecipeError
from mulstm.recipe import DataRecipe, Recipe
from mulstm.record_corpus import RecordSplit
from mulstm.records import kind_of

# What the packaged recipes ask of a validation part, and how to do without.
WANT_VALIDATION = {"evaluate.patience": 0, "evaluate.calibrate": "false"}


class Sizes(NamedTuple):
    """What a recipe is fitted to."""

    train: int  # symbols
    valid: int
    records: int | None  # to train on; None: one text


def recipe_for(
    target: str,
    overrides: Sequence[str],
    data_dir: Path | None,
    start_from: Path | None = None,
    known: dict[DataRecipe, Sizes] | None = None,  # of texts that other recipes were fitted to
) -> Recipe:
    """The recipe of a run; for a text of the user's, the default one, fitted to its length.

    Going on with a model has a default recipe of its own, which takes cell and alphabet from the model.
    """
    is_recipe = target in recipe.names()
    if is_recipe and "/" not in target and Path(target).exists():
        raise two_meanings(target, "recipe")
    require_one_meaning(target)
    if target == "finetune":
        raise RecipeError(
            "This recipe goes on with a model, and a text is to be given with it. "
            'Say "mulstm train TEXT --from MODEL".'
        )
    if is_recipe or target.endswith(".toml"):
        return recipe.load(target, overrides)
    if target not in KNOWN and not Path(target).exists():
        if "." in target or target.startswith("/"):  # as no recipe's name has it
            raise DataError(
                f"There is no file or folder {target}. Give a text, a folder of texts, or a recipe's name."
            )
        return recipe.load(target, overrides)  # which says what is nearest
    found = _for_text(target, overrides, start_from)
    known = {} if known is None else known
    if found.data not in known:
        known[found.data] = _sizes(found.data, data_dir)
    sizes = known[found.data]
    if sizes.records is not None and "train.lanes" not in recipe.overridden(overrides):
        # A lane without a record would only wait.
        lanes = min(found.train.lanes, sizes.records)
        found = replace(found, train=replace(found.train, lanes=lanes))
    fitted = recipe.fit(found, sizes.train, overrides, valid=sizes.valid, processes=parallel.processes())
    recipe.check(fitted)
    return fitted


def _sizes(data: DataRecipe, data_dir: Path | None) -> Sizes:
    _require_lasting(Path(data.corpus))
    _require_no_runs(Path(data.corpus))
    corpus = record_corpus.load(data, data_dir)
    part = corpus.split("train")
    records = part.chosen.size if isinstance(part, RecordSplit) else None
    return Sizes(part.symbols_count, corpus.split("valid").symbols_count, records)


def _require_lasting(text: Path) -> None:
    """A run goes on with its text, and under these names another command finds something else."""
    if text.parts[:3] in (("/", "dev", "stdin"), ("/", "dev", "fd")) or text.parts[:2] == ("/", "proc"):
        raise DataError(f"{text} is no file that a run could go on with. Write the text to a file first.")


def _require_no_runs(text: Path) -> None:
    """Other commands take a folder of runs for its newest; here it would be read as text, weights and all."""
    resume = f'"mulstm train --resume {quote(str(text))}"'
    if runs.is_run(text):
        raise DataError(f"{text} is the folder of a run, not a text. Go on with it by {resume}.")
    if any(not is_hidden(run.relative_to(text)) for run in runs.all_below(text)):
        raise DataError(
            f"{text} has runs in it, which would be read as text. "
            f"Go on with the newest by {resume}, or give the texts a folder of their own."
        )


def _for_text(target: str, overrides: Sequence[str], start_from: Path | None) -> Recipe:
    """The default recipe; files of records are known by their ending, and FASTA holds proteins."""
    kind, given = kind_of(target), recipe.overridden(overrides)
    if "data.corpus" in given:
        raise RecipeError(f"{target} is the text, and data.corpus names another. Give one of the two.")
    if kind != "lines" and "data.records" not in given:
        overrides = [f"data.records={kind}", *overrides]
    found = _load("text" if start_from is None else "finetune", overrides)
    kind = found.data.records or kind
    d = replace(found.data, corpus=target)
    model = found.model
    if start_from is not None:
        start = checkpoint.load(start_from)
        # What is said of the model on the command line stands, and is refused where it does not fit.
        said = [key.partition(".")[2] for key in given if key.startswith("model.")]
        model = replace(start.model.recipe, **{key: getattr(model, key) for key in said})
        name = name_of(start.alphabet)
        convention = str(start.source.get("convention", ""))
        if name == "corpus" and d.records:
            raise CheckpointError(
                f"The model in {start_from} knows {start.alphabet.size} bytes, those of its own text, and "
                "records want a model of all bytes or of proteins. Start from one, or leave --from out."
            )
        if name == "protein" and not d.records:
            d = replace(d, records=kind)  # a protein a line: they are never one text
    else:
        name, convention = ("protein", "protein") if kind == "fasta" else (d.alphabet, d.convention)
    if "data.alphabet" not in given:
        if "data.convention" not in given:
            d = replace(d, convention=convention if d.records else "")
        d = replace(d, alphabet=name)
    # One text can be entered anywhere; records are shuffled instead.
    train = replace(found.train, rotate=found.train.rotate and not d.records)
    found = replace(found, model=model, data=d, train=train)
    recipe.check(found, is_fitted=False)
    return found


def _load(name: str, overrides: Sequence[str]) -> Recipe:
    """The packaged recipe; where a split leaves nothing to validate on, without what wants that."""
    given = recipe.overridden(overrides)
    without = [f"{key}={off}" for key, off in WANT_VALIDATION.items() if key not in given]
    found = recipe.load(name, [*without, *overrides], is_fitted=False)
    shares = recipe.parse_split(found.data.split)
    if shares is not None and shares[1] == 0:
        return found
    return recipe.load(name, overrides, is_fitted=False)

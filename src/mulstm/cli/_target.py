"""What `mulstm train X` means by X: a recipe, a recipe file, a known corpus, or any text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mulstm import data, recipe
from mulstm.data.known import KNOWN
from mulstm.errors import DataError, RunError
from mulstm.recipe import Recipe

LOOKS_LIKE_A_FILE = (".txt", ".md", ".xz", ".gz", ".bz2", ".zip", ".py", ".html", ".xml", ".csv", ".json")


def recipe_for(target: str, overrides: Sequence[str], data_dir: Path | None) -> Recipe:
    """The recipe of a run; for a text of the user's, the default one, fitted to its length."""
    if target in recipe.names() or target.endswith(".toml"):
        return recipe.load(target, overrides)
    if target not in {known.name for known in KNOWN} and not Path(target).exists():
        if target.endswith(LOOKS_LIKE_A_FILE) or target.startswith((".", "/")):
            raise DataError(
                f"There is no file or folder {target}. Give a text, a folder of texts, or a recipe's name."
            )
        return recipe.load(target, overrides)  # which says what is nearest
    found = recipe.for_text(target, overrides)
    d = found.data
    corpus = data.load(d.corpus, data_dir=data_dir, split=d.split, protocol=d.protocol, alphabet=d.alphabet)
    return recipe.fit(found, corpus.split("train").symbols_count, overrides)


def recipe_of_run(folder: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe an earlier run was made with."""
    if not (folder / "recipe.toml").is_file():
        raise RunError(f"{folder} is not a run folder: it has no recipe.toml. Give the folder of a run.")
    return recipe.load(folder / "recipe.toml", overrides)

"""A recipe is the whole of a run: what is not in it, or on the command line, did not happen."""

from mulstm.recipe.compare import changes_since, departures, differences, flat, settings
from mulstm.recipe.reading import as_dict, check, dumps, fit, from_dict, load, names, notes_of, overridden
from mulstm.recipe.rules import RULES, parse_split
from mulstm.recipe.schema import (
    CELLS,
    KEYS,
    SECTIONS,
    UNITS,
    DataRecipe,
    DropoutRecipe,
    DynamicRecipe,
    EvaluateRecipe,
    InitRecipe,
    ModelRecipe,
    OptimiserRecipe,
    Recipe,
    TrainRecipe,
)

__all__ = [
    "CELLS",
    "KEYS",
    "RULES",
    "SECTIONS",
    "UNITS",
    "DataRecipe",
    "DropoutRecipe",
    "DynamicRecipe",
    "EvaluateRecipe",
    "InitRecipe",
    "ModelRecipe",
    "OptimiserRecipe",
    "Recipe",
    "TrainRecipe",
    "as_dict",
    "changes_since",
    "check",
    "departures",
    "differences",
    "dumps",
    "fit",
    "flat",
    "from_dict",
    "load",
    "names",
    "notes_of",
    "overridden",
    "parse_split",
    "settings",
]

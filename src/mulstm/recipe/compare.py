"""In what two recipes differ, and which differences matter to whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulstm.recipe.reading import as_dict, load, names
from mulstm.recipe.schema import KEYS, SECTIONS, Recipe

# Keys that may change between stopping and going on: they do not touch what is learnt.
FREE = ("train.save_every", "train.backend", "title", *(key for key in KEYS if key.startswith("dynamic.")))
# Keys that may differ from a packaged recipe while the run still counts as that recipe's.
INCIDENTAL = ("train.seed", "train.precision")
# Keys that say which row of which table a run is counted for.
PLACE = ("table", "row", "kind")

Flat = dict[str, Any]  # "section.key" -> value


def flat(values: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested tables as one, with dotted keys."""
    found: Flat = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def settings(recipe: Recipe) -> Flat:
    """All that a recipe says of the run itself: not its name, its place in the tables, what comes later."""
    return flat({name: as_dict(recipe)[name] for name in SECTIONS if name != "dynamic"})


def completed(told: Flat) -> Flat:
    """Settings as they were written down once; a key that they lack came later: its default went unsaid."""
    return settings(Recipe()) | told


def differences(now: Flat, then: Flat) -> list[str]:
    """The keys on which two recipes disagree, with both values."""
    keys = sorted(now.keys() | then.keys())
    return [
        f"{key} was {then.get(key)!r}, is {now.get(key)!r}"
        for key in keys
        if now.get(key) != then.get(key) and key not in FREE
    ]


def departures(recipe: Recipe) -> list[str]:
    """What of a recipe, its place in the tables included, is not as in the packaged one of its name."""
    place = {key: getattr(recipe, key) for key in PLACE}
    return differences(*_beside_packaged(place | settings(recipe), recipe.name))


def changes_since(then: Flat, name: str) -> list[str]:
    """What the packaged recipe of that name says differently from the settings it once had."""
    return differences(*reversed(_beside_packaged(then, name)))


def _beside_packaged(asked: Flat, name: str) -> tuple[Flat, Flat]:
    """Both settings, as far as they matter; nothing where there is no such recipe."""
    if name not in names():
        return {}, {}
    asked, packaged = completed(asked), flat(as_dict(load(name)))
    keys = [key for key in asked if key not in INCIDENTAL]
    return {key: asked[key] for key in keys}, {key: packaged.get(key) for key in keys}

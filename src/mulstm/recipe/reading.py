"""Recipes from TOML files and dictionaries, and back; every fault in one is told at once."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mulstm.errors import RecipeError
from mulstm.recipe.rules import faults as faults_of
from mulstm.recipe.rules import quoted, show
from mulstm.recipe.schema import KEYS, SECTIONS, Recipe, Table

# What `fit` aims at for a text of any length.
FEWEST_UPDATES, MOST_UPDATES = 2_000, 50_000
VALID_LANE = 500  # symbols of a validation lane, at least: each starts cold, and its first symbols cost more
LONGEST = 50  # recipes that are `like` one another, one after the other
PACKAGED = Path(__file__).parents[1] / "recipes"
_HEADER = re.compile(r"\[(\w+)\].*")
_NOTED = re.compile(r"""(\w+)\s*=\s*(?:"[^"]*"|'[^']*'|[^#"']*)\s*\#\s*(.+)""")


def names() -> list[str]:
    """The packaged recipes, sorted."""
    return sorted(p.relative_to(PACKAGED).with_suffix("").as_posix() for p in PACKAGED.rglob("*.toml"))


def load(name_or_path: str | Path, overrides: Sequence[str] = (), *, is_fitted: bool = True) -> Recipe:
    """A packaged recipe by its name, or one of the user's by its path, with `section.key=value` on top.

    One that is yet to be fitted to a text is to be checked again afterwards.
    """
    path, name = _find(name_or_path)
    table = _read(path)
    table.setdefault("name", name)
    faults: list[str] = []
    for override in overrides:
        _override(table, override, faults)
    return from_dict(table, source=f"recipe {name_or_path}", faults=faults, is_fitted=is_fitted)


def fit(
    recipe: Recipe, symbols: int, overrides: Sequence[str] = (), *, valid: int = 0, processes: int = 1
) -> Recipe:
    """The recipe made to suit a training text of so many symbols; what `overrides` name stays.

    Where the text is short, fewer lanes, then shorter chunks (a lane holds at least eight, so that carried
    state means something), and more epochs; where it is long, no more updates than a day will do. The rate
    rises for a tenth of the run at most. A validation part of `valid` symbols, where there is one, is read
    in no more lanes than it can fill. Several processes get as many lanes each.
    """
    given = overridden(overrides)
    train = recipe.train
    if "train.chunk" not in given:
        lanes = train.lanes if "train.lanes" in given else 1
        train = replace(train, chunk=max(1, min(train.chunk, symbols // (8 * lanes))))
    if "train.lanes" not in given:
        lanes = min(train.lanes, symbols // (8 * train.chunk))
        train = replace(train, lanes=processes * max(1, lanes // processes))
    epoch = max(1, symbols // (train.lanes * train.chunk))
    if not given & {"train.epochs", "train.updates"}:
        epochs = min(max(train.epochs, FEWEST_UPDATES / epoch), 4 * train.epochs, MOST_UPDATES / epoch)
        train = replace(train, epochs=epochs)
    optimiser = recipe.optimiser
    if "optimiser.warmup" not in given:
        updates = train.updates or int(train.epochs * epoch)
        optimiser = replace(optimiser, warmup=min(optimiser.warmup, updates // 10))
    evaluate = recipe.evaluate
    if valid and "evaluate.lanes" not in given:
        evaluate = replace(evaluate, lanes=lanes_for(min(valid, evaluate.symbols or valid), evaluate.lanes))
    if valid and "evaluate.final_lanes" not in given:
        evaluate = replace(evaluate, final_lanes=lanes_for(valid, evaluate.final_lanes))
    return replace(recipe, train=train, optimiser=optimiser, evaluate=evaluate)


def lanes_for(symbols: int, most: int = 10) -> int:
    """In how many stretches a text is evaluated: those of a short one would be too short."""
    return max(1, min(most, symbols // VALID_LANE))


def overridden(overrides: Sequence[str]) -> set[str]:
    """The keys that overrides name."""
    return {text.partition("=")[0].strip() for text in overrides}


def as_dict(recipe: Recipe) -> Table:
    """Plain nested dictionaries, ready for JSON."""
    return asdict(recipe)


def from_dict(
    table: Table, *, source: str = "recipe", faults: Sequence[str] = (), is_fitted: bool = True
) -> Recipe:
    """The recipe such a dictionary describes; every fault in it is told at once."""
    found = list(faults)
    top: Table = {}
    for key, value in table.items():
        if key in SECTIONS:
            if isinstance(value, dict):
                top[key] = SECTIONS[key](**_section(key, value, found))
            else:
                found.append(f"{key} = {quoted(value)} must be a table: write [{key}] and its keys below")
        elif key in KEYS:
            _take(key, key, value, top, found)
        else:
            found.append(_unknown(key))
    recipe = Recipe(**top)
    _report(source, found + faults_of(recipe, is_fitted))
    return recipe


def check(recipe: Recipe, *, is_fitted: bool = True) -> None:
    """Raises RecipeError, naming every impossible value."""
    _report(f"recipe {recipe.name}".rstrip(), faults_of(recipe, is_fitted))


def dumps(recipe: Recipe, notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """TOML that loads back equal, with a note behind each key that has one."""

    def line(key: str, name: str, value: Any) -> str:
        return f"{name} = {show(value)}" + (f"  # {notes[key]}" if key in notes else "")

    lines: list[str] = []
    for key, value in as_dict(recipe).items():
        if key in SECTIONS:
            lines += ["", f"[{key}]", *(line(f"{key}.{k}", k, v) for k, v in value.items())]
        else:
            lines.append(line(key, key, value))
    return "\n".join(lines) + "\n"


def notes_of(name_or_path: str | Path) -> dict[str, str]:
    """By key, what the recipe's file or that of the one it is like says behind it: where a value is from."""
    found: dict[str, str] = {}
    for path, table in reversed(_chain(_find(name_or_path)[0])):
        for key, value in table.items():  # what is said anew no longer has the old note
            for name in [f"{key}.{k}" for k in value] if isinstance(value, dict) else [key]:
                found.pop(name, None)
        section = ""
        for line in path.read_text(encoding="utf-8-sig").splitlines():
            if header := _HEADER.fullmatch(line.strip()):
                section = f"{header[1]}."
            elif noted := _NOTED.fullmatch(line.strip()):
                found[section + noted[1]] = noted[2]
    return found


def _find(name_or_path: str | Path) -> tuple[Path, str]:
    """The file, and the name the recipe goes by."""
    text = str(name_or_path)
    if text.endswith(".toml"):
        if not Path(text).is_file():
            raise RecipeError(f"There is no recipe file {text}. {_nearest_recipes(text)}")
        return Path(text), Path(text).stem
    if text in names():
        return PACKAGED / f"{text}.toml", text
    raise RecipeError(f'There is no recipe called "{text}", and no such file here. {_nearest_recipes(text)}')


def _nearest_recipes(text: str) -> str:
    near = difflib.get_close_matches(text.removesuffix(".toml"), names(), n=3, cutoff=0.4)
    return (f"Did you mean {' or '.join(near)}? " if near else "") + '"mulstm recipes" lists them all.'


def _read(path: Path) -> Table:
    """The file's table laid over that of the recipe it is `like`."""
    whole: Table = {}
    for _, table in reversed(_chain(path)):
        whole.pop("name", None)
        for key, value in table.items():
            is_section = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = whole[key] | value if is_section else value
    return whole


def _chain(path: Path) -> list[tuple[Path, Table]]:
    """The file and its table, then those of the recipe it is `like`, and so on."""
    chain: list[tuple[Path, Table]] = []
    seen: list[Path] = []
    here: Path | None = path
    while here is not None:
        seen.append(here.resolve())
        if seen[-1] in seen[:-1]:
            names = " -> ".join(p.stem for p in seen)
            raise RecipeError(f"Recipes are like one another in a circle: {names}. Remove a `like` line.")
        if len(seen) > LONGEST:
            raise RecipeError(
                f"{path} is like more than {LONGEST} recipes, one after the other. Write some of them in one."
            )
        table, base = _one(here)
        chain.append((here, table))
        here = base
    return chain


def _one(path: Path) -> tuple[Table, Path | None]:
    """The file's own table, and the file of the recipe it is `like`."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors begin some with a mark
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}). Check the file.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not written in UTF-8 ({error.reason}). Save it so.") from None
    except (ValueError, RecursionError) as error:  # also of numbers too long and brackets too deep
        raise RecipeError(f"{path} is not TOML: {error}. Mend that line.") from None
    like = table.pop("like", None)
    if like is None:
        return table, None
    if not isinstance(like, str):
        raise RecipeError(f'{path}: like = {quoted(like)} must be a recipe\'s name. Write like = "text".')
    beside = path.parent / like
    return table, beside if like.endswith(".toml") and beside.is_file() else _find(like)[0]


def _override(table: Table, override: str, faults: list[str]) -> None:
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals:
        faults.append(f'"{override}" must be of the form section.key=value')
    elif key not in KEYS:
        faults.append(_unknown(key))
    else:
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):
            value = text
            if KEYS[key] is float and re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text):  # TOML has no .5
                value = float(text)
        section, _, name = key.rpartition(".")
        # A corpus may well be called 1984: text keys take the words as they stand.
        value = text if KEYS[key] is str and not isinstance(value, str) else value
        target = table.setdefault(section, {}) if section else table
        if isinstance(target, dict):
            target[name] = value


def _section(section: str, table: Table, faults: list[str]) -> Table:
    taken: Table = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        if key in KEYS:
            _take(key, name, value, taken, faults)
        else:
            faults.append(_unknown(key))
    return taken


def _take(key: str, name: str, value: Any, into: Table, faults: list[str]) -> None:
    """Puts the value where it belongs, or says why not. Whole numbers will do for real ones."""
    kind: Any = KEYS[key]
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 63 else math.inf
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
        faults.append(f"{key} = {quoted(value)} must be {words[kind]}")
    elif kind is float and not math.isfinite(value):
        faults.append(f"{key} = {value} must be a finite number")
    else:
        into[name] = value


def _unknown(key: str) -> str:
    """What to say of a key nobody knows: the nearest one, also when it stands in the wrong section."""
    last = key.rpartition(".")[2]
    near = [k for k in KEYS if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, KEYS, n=1)
    more = f"did you mean {' or '.join(near)}?" if near else '"mulstm recipes show text" has them all'
    return f"unknown key {key}: {more}"


def _report(source: str, faults: list[str]) -> None:
    if faults:
        count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise RecipeError(f'{source} has {count}:\n{listed}\n"mulstm recipes show text" has every key.')

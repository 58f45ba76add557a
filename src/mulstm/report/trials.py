"""What `mulstm search` found: lines of JSON, one a trial, and the tables made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mulstm import console, files
from mulstm import recipe as recipes
from mulstm.errors import RunError
from mulstm.report.records import is_of
from mulstm.report.tables import grid

Result = dict[str, Any]
KEYS = {  # that every trial has, and the kinds of their values
    **dict.fromkeys(("recipe", "hardware", "precision"), "text"),
    **dict.fromkeys(("parameters", "updates", "valid_symbols", "evaluate_lanes"), "count"),
    **dict.fromkeys(("epochs", "train_seconds"), "number"),
    **dict.fromkeys(("valid_bits_per_char", "train_bits_per_char", "symbols_per_second"), "score"),
    "set": "list",
    "settings": "table",
}
_OF_MEASURING = {
    *("data.corpus", "data.alphabet", "data.split", "data.protocol", "data.records", "data.column"),
    *("data.convention", "evaluate.symbols", "evaluate.lanes"),
}
HEADERS = ("settings", "valid bits/char", "train", "parameters", "epochs", "updates", "symbols/s", "time")


def read(path: Path) -> list[Result]:
    """The trials of a file; none where there is none yet."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}). Give another file.") from None
    trials = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = files.json_of(line)
        if isinstance(found, dict) and "settings" not in found:  # about other things
            continue
        if not _is_trial(found):
            raise RunError(
                f"{path} line {number} is no trial of a search. Remove that line, or give another file."
            )
        trials.append(found)
    return trials


def _is_trial(line: Any) -> bool:
    if not isinstance(line, dict) or not line.keys() >= KEYS.keys():
        return False
    return all(is_of(line[key], kind) for key, kind in KEYS.items()) and all(
        isinstance(change, str) for change in line["set"]
    )


def best_first(trials: Sequence[Result]) -> list[Result]:
    """By what validation costs; those that diverged come last."""

    def place(line: Result) -> tuple[bool, float]:
        bits = line["valid_bits_per_char"]
        return bits is None, bits or 0.0

    return sorted(trials, key=place)


def not_measured_alike(trials: Sequence[Result]) -> list[str]:
    """The settings that differ between trials and make their figures those of different texts or lanes."""
    return [key for key in _varied([line["settings"] for line in trials]) if key in _OF_MEASURING]


def rows(trials: Sequence[Result]) -> list[list[str]]:
    """Under HEADERS, best first; of the settings those that are not the same in all trials.

    A trial that has no other to differ from is told by what it was made with.
    """
    varied = _varied([line["settings"] for line in trials])
    return [
        [
            " ".join([f"{key}={line['settings'].get(key)}" for key in varied] or line["set"]) or "as it is",
            "diverged" if line["valid_bits_per_char"] is None else _bits(line["valid_bits_per_char"]),
            _bits(line["train_bits_per_char"]),
            f"{line['parameters']:,}",
            f"{line['epochs']:.3g}",
            f"{line['updates']:,}",
            console.quantity(line["symbols_per_second"] or 0),
            console.duration(line["train_seconds"]),
        ]
        for line in best_first(trials)
    ]


def markdown(results: Path) -> str:
    """A page with a table for each recipe that was searched; empty where none was."""
    parts = []
    for path in sorted((results / "search").glob("*.jsonl")):
        trials = read(path)
        for name in dict.fromkeys(line["recipe"] for line in trials):
            of_recipe = [line for line in trials if line["recipe"] == name]
            parts += [
                f"## {path.stem}: {name}",
                _told(of_recipe, path.name),
                _shared(name, of_recipe),
                grid(HEADERS, [[f"`{changes}`", *others] for changes, *others in rows(of_recipe)]),
            ]
    if not parts:
        return ""
    head = (
        "# Searches\n\nMade from the files in [search](search) by `mulstm report`; do not edit. Short runs, "
        "compared on the validation part; the test part was not read."
    )
    return "\n\n".join([head, *filter(None, parts)]) + "\n"


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]


def _bits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 100 else f"{value:.2g}"


def _told(trials: Sequence[Result], file: str) -> str:
    """How they were measured; a trial that broke down before its first validation was not."""
    measured = [t for t in trials if t["valid_symbols"]] or trials
    how = " and ".join(
        dict.fromkeys(
            f"{t['valid_symbols']:,} symbols of validation in {t['evaluate_lanes']} lanes" for t in measured
        )
    )
    where = " and ".join(dict.fromkeys(f"{t['hardware']}, {t['precision']}" for t in trials))
    return f"`search/{file}`: {how}; {where}."


def _shared(name: str, trials: Sequence[Result]) -> str:
    """What all trials have that the packaged recipe has not, as it stands."""
    if name not in recipes.names():
        return ""
    all_settings = [line["settings"] for line in trials]
    packaged, varied = recipes.settings(recipes.load(name)), _varied(all_settings)
    same = {key: value for key, value in all_settings[0].items() if key not in varied}
    told = [f"{key}={value}" for key, value in same.items() if packaged.get(key) != value]
    return f"All of them with `{' '.join(told)}`." if told else ""

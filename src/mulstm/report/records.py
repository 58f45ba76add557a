"""Result records: one JSON file a run under results/, with its log curve beside it."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from mulstm import files, runs
from mulstm import recipe as recipes
from mulstm.errors import RunError

WHAT: dict[str, tuple[str, tuple[type, ...]]] = {  # a value's kind, and the types it may have
    "text": ("text", (str,)),
    "count": ("a whole number", (int,)),
    "flag": ("true or false", (bool,)),
    "number": ("a number", (int, float)),
    "score": ("a number or null", (int, float, type(None))),
    "table": ("an object", (dict,)),
    "list": ("a list", (list,)),
}
KEYS = {  # that every record has, and the kinds of their values
    "recipe": "text",
    "table": "text",
    "row": "text",
    "kind": "text",
    "seed": "count",
    "parameters": "count",
    "complete": "flag",
    "reason": "text",
    "valid_bits_per_char": "score",
    "test_bits_per_char": "score",
    "test_symbols": "count",
    "evaluate_lanes": "count",
    "epochs": "number",
    "updates": "count",
    "train_seconds": "number",
    "hardware": "text",
    "precision": "text",
    "backend": "text",
    "commit": "text",
    "settings": "table",
}
SCORES = ("_bits_per_char", "_word_perplexity")  # how keys that not every record has may end
FILE = re.compile(r"seed\d+\.json")
AGAIN = "Make it again from its run with mulstm reproduce."
KINDS = ("faithful", "fast")  # of recipes for a row
DYNAMIC = "dynamic_"  # keys of dynamic evaluation begin so
UNROUNDED = ("fp32", "fp64")  # storages of weights that round nothing
CURVE_LINES = 200
LARGEST = 1e300  # JSON has whole numbers that no float holds
CUT = "its time was over"  # how a record says that a run may go on
CUT_SHORT = "cut short after"  # how its reason begins, where there is no other


@dataclass(frozen=True)
class Record:
    """A run's result; `curve` is its log, thinned."""

    values: dict[str, Any]
    curve: tuple[dict[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str) -> Any:
        """The value, or None where the record has none."""
        return self.values.get(key)

    @property
    def kind(self) -> str:
        """faithful or fast."""
        return str(self["kind"])

    @property
    def minutes(self) -> float:
        """Of training updates."""
        return float(self["train_seconds"]) / 60

    @property
    def is_cut(self) -> bool:
        """Whether it follows a packaged recipe in everything but the end."""
        is_all = self.get("stopped") == CUT and str(self["reason"]).startswith(CUT_SHORT)
        return is_all and not self.outdated()

    def outdated(self) -> str:
        """Why it does not stand for a packaged recipe any more; "" where it does."""
        # Under a name that a recipe once had, a run would count beside those of the new name.
        if self["table"] and self["recipe"] not in recipes.names():
            return "no packaged recipe has that name"
        changed = self.changes()
        return f"the recipe has changed since: {'; '.join(changed)}" if changed else ""

    def changes(self) -> list[str]:
        """In what its recipe differs by now."""
        return recipes.changes_since(self["settings"], self["recipe"])

    def validations(self) -> Iterator[tuple[float, float]]:
        """Minutes of training and validation bits/char, wherever it was read."""
        for line in self.curve:
            if line.get("valid_bits_per_char") is not None:
                yield line["seconds"] / 60, line["valid_bits_per_char"]


def read(results: Path) -> list[Record]:
    """Every record under results/<table>/<recipe>/, in the order of their paths; no file of another name."""
    return [_by_now(_in_its_place(results, path)) for path in paths(results)]


def paths(results: Path) -> list[Path]:
    """Where they are."""
    found = sorted(results.rglob("seed*.json"))
    return [path for path in found if FILE.fullmatch(path.name) and path.parent != results]


def _in_its_place(results: Path, path: Path) -> Record:
    """A copy elsewhere would count as a run of its own."""
    record = read_one(path)
    its = place(results, record["recipe"], record["seed"])
    if path != its:
        whose = f"{record['recipe']}, seed {record['seed']}"
        raise RunError(f"{path} is the record of {whose}. Move it to {its}, or remove it.")
    return record


def _by_now(record: Record) -> Record:
    """A run counts as long as its recipe stands as it was."""
    if not record["complete"]:
        return record
    reason = record.outdated()
    return replace(record, values=record.values | {"complete": False, "reason": reason}) if reason else record


def read_one(path: Path) -> Record:
    """The record in a file, with its curve where one is beside it."""
    values = read_object(path, AGAIN)
    missing = [key for key in KEYS if key not in values]
    if missing:
        raise RunError(f"{path} lacks {', '.join(missing)}. {AGAIN}")
    more = {key: "score" for key in values if key.endswith(SCORES)}
    for key, kind in (more | KEYS).items():
        _require(path, key, values[key], kind)
    curve = path.with_suffix(".jsonl")
    lines = tuple(runs.read_log(curve))
    for line in lines:
        _require(curve, "valid_bits_per_char", line.get("valid_bits_per_char"), "score")
        if line.get("valid_bits_per_char") is not None:
            _require(curve, "seconds", line.get("seconds"), "number")
    return Record(values, lines)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}). Give the file of a record.") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is not JSON. {remedy}") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} holds no JSON object. {remedy}")
    return values


def _require(path: Path, key: str, value: Any, kind: str) -> None:
    if not is_of(value, kind):
        raise RunError(f"{path} has {key} {shown(value)}, which is not {WHAT[kind][0]}. {AGAIN}")


def is_of(value: Any, kind: str) -> bool:
    """Whether it is of one of WHAT's kinds, and small enough to be reckoned with."""
    if type(value) not in WHAT[kind][1]:
        return False
    return not isinstance(value, int | float) or abs(value) < LARGEST


def shown(value: Any) -> str:
    """A value as JSON has it, in short."""
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:36]} ..."


def place(results: Path, recipe: str, seed: int) -> Path:
    """Where the record of a recipe's run is kept."""
    return results / recipe / f"seed{seed}.json"


def publish(run: Path, results: Path) -> Path:
    """Puts the record of a finished run, and its thinned log, where `read` finds them."""
    if not (run / "metrics.json").is_file():
        go_on = f"mulstm train --resume {quote(str(run))}"
        raise RunError(f"{run} has no record yet. Let the run finish: {go_on}.")
    values = read_one(run / "metrics.json").values
    path = place(results, values["recipe"], values["seed"])
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = thinned(runs.read_log(run))
    files.write_atomic(path.with_suffix(".jsonl"), "".join(files.json_line(line) for line in lines))
    files.write_atomic(path, files.json_text(values))
    return path


def add_dynamic(path: Path, found: Mapping[str, Any]) -> None:
    """Writes what dynamic evaluation found into a record, in place of what an earlier one did."""
    kept = {k: v for k, v in read_one(path).values.items() if not k.startswith(DYNAMIC)}
    files.write_atomic(path, files.json_text(kept | {DYNAMIC + k: v for k, v in found.items()}))


def thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """About CURVE_LINES of them: the last, those with a validation, and an even choice of the others."""
    step = max(1, len(lines) // CURVE_LINES)
    last = len(lines) - 1
    return [
        line
        for n, line in enumerate(lines)
        if n % step == 0 or n == last or line.get("valid_bits_per_char") is not None
    ]


def all_of_row(records: Sequence[Record], table: str, row: str, kind: str) -> list[Record]:
    """The runs of one row by one kind of recipe, by seed."""
    found = [r for r in records if (r["table"], r["row"], r.kind) == (table, row, kind)]
    return sorted(found, key=lambda r: int(r["seed"]))


def of_row(records: Sequence[Record], table: str, row: str, kind: str) -> list[Record]:
    """The complete ones among them."""
    return [r for r in all_of_row(records, table, row, kind) if r["complete"]]


def shown_of_row(records: Sequence[Record], table: str, row: str, kind: str) -> list[Record]:
    """Those that stand for the row: the complete ones, else the longest measured one that was cut short."""
    every = all_of_row(records, table, row, kind)
    cut = [r for r in every if r.is_cut and r["test_bits_per_char"] is not None]
    longest = [max(cut, key=lambda r: float(r["epochs"]))] if cut else []
    return of_row(records, table, row, kind) or longest


def mean(records: Sequence[Record], key: str) -> float | None:
    """Over the seeds, where all have it."""
    values = [r.get(key) for r in records]
    return statistics.fmean(values) if values and all(v is not None for v in values) else None


def spread(records: Sequence[Record], key: str) -> float | None:
    """Sample standard deviation over the seeds; None for fewer than two."""
    values = [r.get(key) for r in records]
    return statistics.stdev(values) if len(values) > 1 and all(v is not None for v in values) else None

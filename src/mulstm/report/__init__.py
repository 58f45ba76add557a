"""Result records become tables, figures and the front page's table; nobody types a number."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mulstm import files
from mulstm.errors import DataError, RunError
from mulstm.report import bench, figures, paper, records, tables, trials
from mulstm.report.canvas import Figure
from mulstm.report.curve import learning_curve

__all__ = [
    "learning_curve",
    "page_beside",
    "require_folder",
    "require_records",
    "stale",
    "write",
]

RESULTS = Path("results")


MADE_HERE = ": begin (made by mulstm report)"


def _marks(name: str) -> tuple[str, str]:
    """The lines before and behind a table in a page that people write."""
    return f"<!-- {name}{MADE_HERE} -->", f"<!-- {name}: end -->"


BEGIN, END = _marks("results")


def write(results: Path, readme: Path | None) -> list[Path]:
    """Makes everything again; the files that changed."""
    texts, drawn = _stale(results, readme)
    for path, text in texts.items():
        files.write_atomic(path, text)
    return [*texts, *(path for figure in drawn for path in figure.draw(results))]


def stale(results: Path, readme: Path | None) -> list[str]:
    """The files that `write` would change; empty when all is as the records say."""
    texts, drawn = _stale(results, readme)
    return [str(path) for path in (*texts, *(results / f"{figure.name}.svg" for figure in drawn))]


def require_folder(results: Path) -> None:
    """Raises DataError where there is none: tables of no records would take the place of others."""
    if not results.is_dir():
        raise DataError(f"There is no folder {results}. Give the folder of the records with --results.")


def require_records(results: Path) -> None:
    """Raises DataError where there is nothing to make tables of."""
    if not records.paths(results) and not any((results / more).is_dir() for more in ("search", "bench")):
        raise DataError(f"There are no records in {results}. Give the folder that has them with --results.")


def page_beside(results: Path) -> Path | None:
    """The README beside a folder `results`, where it has a place for their table: another's has none.

    Beside a folder of another name, as in a clone that makes records of its own, it shows those of `results`.
    """
    folder = Path(os.path.abspath(results))
    page = (results if results.name else folder).parent / "README.md"
    is_ours = folder.name == RESULTS.name and page.is_file() and BEGIN.encode() in page.read_bytes()
    return page if is_ours else None


def _stale(results: Path, readme: Path | None) -> tuple[dict[Path, str], list[Figure]]:
    """What the files should hold that hold something else, or are missing; and the figures likewise."""
    found, surprise = records.read(results), _surprise(results)
    drawn = figures.all_of(found, surprise) + bench.figures(results)
    speed = bench.markdown(results, {figure.name for figure in drawn})
    page = tables.markdown(found, surprise, {figure.name for figure in drawn})
    texts = {
        results / "tables.md": page + (f"\n{speed}" if speed else ""),
        results / "tables.csv": tables.comma_separated(found),
        results / "tables.json": json.dumps(tables.flat(found), indent=2) + "\n",
    }
    if searched := trials.markdown(results):
        texts[results / "search.md"] = searched
    if readme is not None:
        texts[readme] = _filled(readme, {"results": tables.readme(found)})
        prose = readme.parent / "docs" / "results.md"
        if prose.is_file() and MADE_HERE.encode() in prose.read_bytes():
            texts[prose] = _filled(prose, {t.name: tables.of_paper(t, found) for t in paper.TABLES})
    old = {p: text for p, text in texts.items() if not p.is_file() or p.read_bytes() != text.encode()}
    return old, [figure for figure in drawn if figure.is_stale(results)]


def _filled(page: Path, parts: Mapping[str, str]) -> str:
    """The page with each of the tables between its two marks."""
    try:
        text = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise RunError(f"{page} is not written in UTF-8 ({fault.reason}). Save it so.") from fault
    missing = [mark for name in parts for mark in _marks(name) if mark not in text]
    if missing:
        raise RunError(f"{page} has no place for the results. Put these lines into it: {', '.join(missing)}.")
    for name, table in parts.items():
        begin, end = _marks(name)
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def _surprise(results: Path) -> tables.Surprise | None:
    """What `mulstm surprise --json` printed of the paper's two models, if it has been run."""
    path = results / "hutter" / "surprise.json"
    if not path.is_file():
        return None
    remedy = f'Make it again: "mulstm surprise MLSTM LSTM --json > {path}".'
    found: tables.Surprise = records.read_object(path, remedy)
    asked = {"share": 0.1, "corpus": "enwik8", "split": "test"}
    wrong = [
        f"{key} {records.shown(found[key])}" for key in asked if found.get(key, asked[key]) != asked[key]
    ]
    if not _is_pairs(found.get("by_delay"), len(paper.SURPRISE_MLSTM)):
        wrong.append("by_delay is not five pairs of numbers")
    if wrong:
        raise RunError(f"{path} does not hold what the paper's figure shows ({'; '.join(wrong)}). {remedy}")
    return found


def _is_pairs(value: Any, count: int) -> bool:
    """Whether it is a list of so many pairs of numbers."""
    if not isinstance(value, list) or len(value) != count:
        return False
    flat = [bits for pair in value if isinstance(pair, list) and len(pair) == 2 for bits in pair]
    return len(flat) == 2 * count and all(type(b) in (int, float) and math.isfinite(b) for b in flat)

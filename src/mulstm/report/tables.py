"""Records become tables: Markdown for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from typing import Any

from mulstm import console
from mulstm.recipe import names
from mulstm.report import notes
from mulstm.report.notes import NOTHING, number
from mulstm.report.paper import SURPRISE_LSTM, SURPRISE_MLSTM, TABLES, Line, Table
from mulstm.report.records import DYNAMIC, KINDS, UNROUNDED, Record, mean, of_row, shown_of_row, spread

NOT_RUN = "not run yet"
NOT_COUNTED = "not counted"
HEAD = (
    "architecture",
    "parameters",
    "paper",
    "ours faithful",
    "ours fast",
    "difference",
    "seeds",
    "minutes",
    "hardware",
)
SIZES = ("3m", "5m", "10m", "20m")
Surprise = dict[str, Any]


def markdown(records: Sequence[Record], surprise: Surprise | None, drawn: Collection[str] = ()) -> str:
    """The whole of results/tables.md, with the figures that are drawn."""
    parts = [
        "# Results",
        "Made from the records in this folder by `mulstm report`; do not edit. *Faithful* is the authors' "
        "set-up as far as it is known, *fast* is ours, with what it adds named behind the row. *Difference* "
        "is ours minus the paper's, of the fast recipe where a run of it counts, of the faithful one where "
        "not. *Seeds*, *minutes* (of training updates) and, where it differs, *hardware* with the precision "
        "of products are given as faithful / fast; with several seeds the score is their mean ± standard "
        "deviation. A score with epochs behind it is of a run that was cut short. Lines in plain type are "
        "quoted by the paper. *+emb*: a linear embedding; *+WN*: weight normalisation; *+VD*: variational "
        "dropout.",
    ]
    for table in TABLES:
        parts += [
            f"## {table.title}: {table.unit}",
            *notes.above(table, records),
            grid(HEAD, _body(table, records, HEAD)),
            *_curves(table, records, drawn),
        ]
    parts += [*_sizes(records), picture("size", drawn, "Size against test bits/char")]
    parts += [*_surprise(surprise), picture("surprise", drawn, "Recovery from surprise")]
    parts += _dynamic(records)
    if times := picture("time-to-quality", drawn, "Minutes of training until a validation level is reached"):
        parts += ["## Time to quality", "Lines and rings as in the learning curves.", times]
    return "\n\n".join(filter(None, parts + _incomplete(records))) + "\n"


def picture(name: str, drawn: Collection[str], words: str) -> str:
    """A link to the figure, where it is drawn."""
    return f"![{words}]({name}.png)" if name in drawn else ""


def readme(records: Sequence[Record]) -> str:
    """The front page's table: the rows that matter most, and each last one by dynamic evaluation."""
    body = []
    for table in TABLES:
        rows = []
        for line in table.lines:
            if line.front:
                cells = _cells(table, line, records)
                shown = (cells[key] for key in ("paper", "ours faithful", "ours fast", "minutes"))
                rows.append([line.title, *shown])
        rows += _dynamic_row(table, records)
        name, _, by = table.title.partition(",")
        text = f"**{name}**" + (f", {table.unit}" if table.is_in_words else by and f",{by}")
        if table.name == "ptb" and (counted := notes.symbols(table, records)):
            text += f" ({counted} of them, Mikolov's protocol)"
        body += [[text if k == 0 else "", *row] for k, row in enumerate(rows)]
    head = ("test bits/char", "model", "paper", "faithful", "fast", "minutes (faithful / fast)")
    return grid(head, body)


def of_paper(table: Table, records: Sequence[Record]) -> str:
    """A table as the paper has it, with our scores in columns beside its own."""
    head = ("architecture", "paper", "ours faithful", "ours fast")
    return grid(head, _body(table, records, head))


def _dynamic_row(table: Table, records: Sequence[Record]) -> list[list[str]]:
    """The last line's model by dynamic evaluation, where that has been run."""
    key, line = DYNAMIC + table.measure, table.lines[-1]
    score = mean([r for r in of_row(records, table.name, line.row, "fast") if r.get(key) is not None], key)
    if score is None:
        return []
    published = f"{table.dynamic:.2f}, published later" if table.dynamic else NOTHING
    shown = console.decimal(score, table.digits)
    if table.is_in_words:  # whose other rows say valid / test
        shown = f"{NOTHING} / {shown}"
    return [[f"{line.fast or line.label}, dynamic evaluation", published, NOTHING, shown, ""]]


def flat(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One object for each row of the paper: what tables.csv and tables.json hold."""
    rows = []
    for table in TABLES:
        key = table.measure
        for line in table.lines:
            row: dict[str, Any] = {
                "table": table.name,
                "row": line.row,
                "architecture": line.title,
                "measure": key,
                "paper": line.paper or None,
            }
            for kind in KINDS:
                runs = of_row(records, table.name, line.row, kind) if line.row else []
                row[kind] = mean(runs, key)
                row[f"{kind}_spread"] = spread(runs, key)
                row[f"{kind}_seeds"] = len(runs)
                seconds = mean(runs, "train_seconds")
                row[f"{kind}_minutes"] = None if seconds is None else seconds / 60
                cut = shown_of_row(records, table.name, line.row, kind) if line.row and not runs else []
                row[f"{kind}_cut"] = mean(cut, key)
                row[f"{kind}_cut_epochs"] = mean(cut, "epochs")
            rows.append(row)
    return rows


def comma_separated(records: Sequence[Record]) -> str:
    """`flat` as CSV."""
    rows = flat(records)
    sink = io.StringIO()
    writer = csv.DictWriter(sink, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue()


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def _curves(table: Table, records: Sequence[Record], drawn: Collection[str]) -> list[str]:
    """The figure of a table's runs, and how to read it."""
    shown = picture(f"learning-curves-{table.name}", drawn, f"{table.title}: learning curves")
    if not shown:
        return []
    return [shown, notes.of_curves(table, records)]


def _body(table: Table, records: Sequence[Record], head: Sequence[str]) -> list[list[str]]:
    body = []
    for line in table.lines:
        cells = _cells(table, line, records)
        label = f"**{line.title}**" if line.row else line.title
        body.append([label, *(cells[name] for name in head[1:])])
    return body


def _cells(table: Table, line: Line, records: Sequence[Record]) -> dict[str, str]:
    """The cells of one line, by the heading they stand under."""
    paper = f"{line.valid:.1f} / {line.paper:.1f}" if table.is_in_words else f"{line.paper:.2f}"
    paper = paper if line.paper else NOTHING
    cells = dict.fromkeys(HEAD, "") | {"paper": paper, "parameters": line.parameters}
    if not line.row:
        return cells
    shown = {kind: shown_of_row(records, table.name, line.row, kind) for kind in KINDS}
    for kind, found in shown.items():
        told = _score(found, table) + _cut(found[0]) if found else _absence(table, line, kind, records)
        cells[f"ours {kind}"] = told
    counted = of_row(records, table.name, line.row, "fast") or of_row(
        records, table.name, line.row, "faithful"
    )
    score = mean(counted, table.measure)
    if score is not None and line.paper:
        cells["difference"] = _signed(score - line.paper, table.digits)
    if any(shown.values()):
        counts = dict.fromkeys(found[0]["parameters"] for found in shown.values() if found)
        cells["parameters"] = " / ".join(f"{count:,}" for count in counts)
        cells["seeds"] = " / ".join(str(len(found)) if found else NOTHING for found in shown.values())
        cells["minutes"] = " / ".join(_minutes(found) for found in shown.values())
        used = dict.fromkeys(f"{r['hardware']}, {r['precision']}" for found in shown.values() for r in found)
        cells["hardware"] = " / ".join(used)
    return cells


def _cut(record: Record) -> str:
    """How far a run came that was cut short; early stopping might have ended it before the last epoch."""
    if record["complete"]:
        return ""
    settings = record["settings"]
    most = "at most " if settings.get("evaluate.patience") else ""
    of = "" if settings.get("train.updates") else f" of {most}{settings['train.epochs']:.4g}"
    return f" ({record['epochs']:.1f}{of} epochs)"


def _absence(table: Table, line: Line, kind: str, records: Sequence[Record]) -> str:
    """Why there is no score."""
    recipe = f"{table.name}/{line.row}" + ("-fast" if kind == "fast" else "")
    if recipe not in names():
        return NOTHING
    return NOT_COUNTED if any(r["recipe"] == recipe for r in records) else NOT_RUN


def _score(runs: Sequence[Record], table: Table) -> str:
    keys = ("valid_word_perplexity", table.measure) if table.is_in_words else (table.measure,)
    texts = []
    for key in keys:
        value, deviation = mean(runs, key), spread(runs, key)
        text = number(value, table.digits)
        texts.append(text if deviation is None else f"{text} ± {number(deviation, table.digits)}")
    return " / ".join(texts)


def _minutes(runs: Sequence[Record]) -> str:
    seconds = mean(runs, "train_seconds")
    return NOTHING if seconds is None else f"{seconds / 60:.1f}"


def _signed(value: float, digits: int) -> str:
    text = console.decimal(abs(value), digits)
    return ("+" if value > 0 else "−") + text if float(text) else text


def size_points(records: Sequence[Record]) -> dict[str, dict[str, tuple[int, float]]]:
    """The size figure: set-up -> size -> (parameters, test bits/char), for the sizes that have been run."""
    # The largest of each are the table's own rows: one run serves both. (The stacked LSTM there has 21.3M.)
    setups = {
        "mLSTM, authors' set-up": ("size/mlstm-{}", "mlstm-rmsprop", "faithful"),
        "stacked LSTM, authors' set-up": ("size/lstm-{}", "lstm-stacked-rmsprop", "faithful"),
        "stacked LSTM, matched": ("size/lstm-{}-matched", "lstm-stacked-matched", "faithful"),
        "mLSTM, fast": ("size/mlstm-{}", "mlstm-rmsprop", "fast"),
        "stacked LSTM, fast": ("size/lstm-{}", "lstm-stacked-rmsprop", "fast"),
    }
    points: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in setups}
    for name, (row, largest, kind) in setups.items():
        for size in SIZES:
            runs = of_row(records, "hutter", largest if size == SIZES[-1] else row.format(size), kind)
            score = mean(runs, "test_bits_per_char")
            if score is not None:
                points[name][size] = (int(runs[0]["parameters"]), score)
    return points


def _sizes(records: Sequence[Record]) -> list[str]:
    body = [
        [name, *(_at_size(size, *found[size]) if size in found else NOT_RUN for size in SIZES)]
        for name, found in size_points(records).items()
    ]
    head = ("set-up", *(f"{size.upper()} parameters" for size in SIZES))
    note = (
        "The paper keeps one update length for all sizes. Here the mLSTMs below 20M have shorter ones than "
        "the authors', and the matched LSTMs the same as the mLSTM of their size: "
        "[why](../docs/results.md#size-against-bitschar)."
    )
    return ["## Size against test bits/char (Hutter Prize, 4 epochs on 95M bytes)", note, grid(head, body)]


def _at_size(size: str, parameters: int, bits: float) -> str:
    """The score, with the number of parameters where it is not quite the column's."""
    millions = parameters / 1e6
    is_near = abs(millions / float(size.removesuffix("m")) - 1) < 0.05
    return f"{bits:.3f}" if is_near else f"{bits:.3f} ({millions:.1f}M)"


def _surprise(surprise: Surprise | None) -> list[str]:
    head = ("", "surprising 10 %", "1 step after", "2", "3", "4")

    def row(name: str, values: Sequence[float]) -> list[str]:
        return [name, *(f"{value:.2f}" for value in values)]

    body = [row("mLSTM, paper", SURPRISE_MLSTM), row("stacked LSTM, paper", SURPRISE_LSTM)]
    if surprise:
        ours = list(zip(*surprise["by_delay"], strict=True))
        body += [row("mLSTM, ours", ours[0]), row("stacked LSTM, ours", ours[1])]
    else:
        body.append(["ours", NOT_RUN, "", "", "", ""])
    return ["## Recovery from surprise: mean loss in bits (Hutter Prize test part)", grid(head, body)]


def _dynamic(records: Sequence[Record]) -> list[str]:
    body = []
    for table in TABLES:
        for record in records:
            dynamic = record.get("dynamic_test_bits_per_char")
            if record["table"] == table.name and record["complete"] and dynamic is not None:
                theirs = table.dynamic and record["row"] == table.lines[-1].row
                published = f"{table.dynamic:.2f}" if theirs else NOTHING
                body.append(
                    [
                        f"{record['recipe']}, seed {record['seed']}{_rounding(record)}",
                        number(record["test_bits_per_char"], 3),
                        number(dynamic, 3),
                        number(record.get("test_word_perplexity"), 1),
                        number(record.get("dynamic_test_word_perplexity"), 1),
                        published,
                    ]
                )
    head = ("model", "static", "dynamic", "static perplexity", "dynamic perplexity", "published (dynamic)")
    note = "Test bits/char; one stream, each segment scored before it is learnt from, tuned on validation."
    return ["## Dynamic evaluation", note, grid(head, body) if body else f"*{NOT_RUN}*"]


def _rounding(record: Record) -> str:
    """How the weights were stored that dynamic evaluation began with, where that rounded them."""
    storage = record.get("dynamic_storage")
    return "" if storage in (None, *UNROUNDED) else f", weights in {storage}"


def _incomplete(records: Sequence[Record]) -> list[str]:
    body = [
        [
            str(r["recipe"]),
            str(r["seed"]),
            f"{r['epochs']:.1f}",
            number(r["valid_bits_per_char"], 3),
            number(r["test_bits_per_char"], 3),
            f"{r.minutes:.1f}",
            str(r["hardware"]),
            str(r.get("reason") or ""),
        ]
        for r in records
        if not r["complete"]
    ]
    if not body:
        return []
    head = ("recipe", "seed", "epochs", "valid", "test", "minutes", "hardware", "reason")
    note = (
        "They depart from their recipe as it is now, or were cut short. The tables above leave them out, but "
        "where no run of a row counts they show the longest that was only cut short, with its epochs."
    )
    return ["## Runs that are not counted", note, grid(head, body)]

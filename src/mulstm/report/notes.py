"""What is said beside the tables and figures of results/tables.md, with the figures that records give."""

from __future__ import annotations

from collections.abc import Sequence

from mulstm import console
from mulstm.data.known import recounted
from mulstm.report.paper import Table
from mulstm.report.records import KINDS, Record, mean, shown_of_row

NOTHING = "–"


def above(table: Table, records: Sequence[Record]) -> list[str]:
    """How to read a table."""
    if table.is_in_words:
        return [
            "Perplexity is 2 to the power of bits/byte x bytes/words, with the paper's counts for test "
            "(1,256,449 bytes, 245,569 words) and ours for valid, counted alike (1,121,681 and 217,646)."
            + _in_bytes(table, records)
        ]
    if table.name == "hutter":
        return [
            "The stacked LSTM and the MI-LSTM stand in the paper's text, not in its table. The LSTM with the "
            "mLSTM's optimiser stands under *faithful*, but its start and step are ours. Every model is "
            "measured in ten lanes; the authors' program for the RMS prop rows reads 1,000 short ones, which "
            "costs by estimate 0.01 more."
        ]
    if table.name == "ptb":
        counted = symbols(table, records)
        return [
            "Mikolov's protocol: 50 symbols, outer spaces dropped, one newline a sentence; the paper does "
            f"not say which it used, nor the model's size.{f' Test symbols: {counted}.' if counted else ''}"
            f"{_recounted(table, records)}"
        ]
    return []


def of_curves(table: Table, records: Sequence[Record]) -> str:
    """How to read the figure of a table's runs."""
    note = (
        "Curves show validation as each run measured it on its way: on all of its part or the beginning, in "
        "many lanes that start cold. Rings are the whole part in ten lanes, like the scores above. Dotted "
        "lines are the paper's test figures."
    )
    shown = [
        r for line in table.lines for kind in KINDS for r in shown_of_row(records, table.name, line.row, kind)
    ]
    own = [r for r in shown if r["valid_bits_per_char"] is not None]
    dear = [r for r in own if _is_read_dearly(r)]
    above = [bits - r["valid_bits_per_char"] for r in dear for _, bits in [*r.validations()][-1:]]
    if above:
        note += (
            " Faithful curves of models with variational dropout are read in 500 lanes of 1,000 symbols, as "
            f"the authors did, and end {_span(above)} above their rings."
        )
    more = [r["test_bits_per_char"] - r["valid_bits_per_char"] for r in own if r["test_bits_per_char"]]
    if table.name == "text8" and more:
        note += (
            f" Its test part costs {_span(more)} more than validation: to cross a line is not to reach it."
        )
    return note


def symbols(table: Table, records: Sequence[Record]) -> str:
    """How many symbols a table's records count in the test part."""
    return ", ".join(
        f"{n:,}" for n in sorted({r["test_symbols"] for r in records if r["table"] == table.name})
    )


def _in_bytes(table: Table, records: Sequence[Record]) -> str:
    """The last line's scores as bits/byte, and its perplexity by the bytes of each word instead."""
    line, told, products = table.lines[-1], [], []
    for kind in KINDS:
        runs = shown_of_row(records, table.name, line.row, kind)
        bits = [mean(runs, f"{part}_bits_per_char") for part in ("valid", "test")]
        if runs:
            told.append(f"{' / '.join(number(b, 4) for b in bits)} {kind}")
        product = mean(runs, "test_product_word_perplexity")
        if product is not None:
            products.append(f"{console.decimal(product, table.digits)} {kind}")
    text = f" In bits/byte: {', '.join(told)}; the paper: {line.bits} on test." if told else ""
    if products:
        text += (
            " Multiplying the probabilities of each word's own bytes instead, test: "
            f"{', '.join(products)} ([the difference](../docs/results.md#word-perplexity))."
        )
    return text


def _recounted(table: Table, records: Sequence[Record]) -> str:
    """What the last line's scores are by the other counts in use."""
    texts = []
    for kind in KINDS:
        runs = shown_of_row(records, table.name, table.lines[-1].row, kind)
        score = mean(runs, table.measure)
        counts = recounted(table.name, "test", runs[0]["test_symbols"]) if runs else {}
        if score is not None and counts:
            (_, own), *others = counts.items()
            told = ", ".join(f"{score * own / n:.{table.digits}f} ({name}, {n:,})" for name, n in others)
            texts.append(f" The same cost by other counts, {kind}: {told}.")
    return "".join(texts)


def _is_read_dearly(record: Record) -> bool:
    """Whether validation was read on its way as the authors did: 500,000 symbols in 500 cold lanes."""
    settings = record["settings"]
    how = settings.get("evaluate.lanes"), settings.get("evaluate.symbols"), settings.get("evaluate.patience")
    return how == (500, 500_000, 0)


def _span(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def number(value: float | None, digits: int) -> str:
    """With so many digits behind the point; a dash where there is none."""
    return NOTHING if value is None else console.decimal(value, digits)

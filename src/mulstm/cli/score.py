"""`mulstm score`: how probable a model finds records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Device, Model
from mulstm.cli._output import Force, require_room
from mulstm.cli._records import Column, IdColumn, Input, Kind, Lanes, Upper, read
from mulstm.errors import DataError
from mulstm.files import replacing

if TYPE_CHECKING:
    from mulstm.scoring import Score


def command(
    model: Model,
    source: Input,
    losses: Annotated[bool, typer.Option("--losses", help="With --json: add every symbol's nats.")] = False,
    words: Annotated[
        bool, typer.Option("--words", help="Add every word's nats: its bytes and the one that ends it.")
    ] = False,
    following: Annotated[
        int, typer.Option("--next", min=0, help="Add the so many likeliest symbols after each record.")
    ] = 0,
    page: Annotated[Path | None, typer.Option("--html", help="Write a heat map of surprise.")] = None,
    force: Force = False,
    kind: Kind = "",
    column: Column = "",
    id_column: IdColumn = "",
    upper: Upper = False,
    lanes: Lanes = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Score each record: how probable a model finds it.

    It prints nats and bits; --json prints one object a record, with bits per byte, character and word and
    perplexities. A protein's stop symbol and a text's line end are predicted too.
    """
    from mulstm import checkpoint, parallel
    from mulstm.cli._text import is_protein
    from mulstm.packing import LANES
    from mulstm.scoring import scores, total
    from mulstm.scoring.page import surprise

    if losses and not as_json:
        raise typer.BadParameter("every symbol's nats are printed with --json only", param_hint="--losses")
    require_room(page, force, read=(source, model), endings=(".html",))
    loaded = checkpoint.load(model, parallel.pick(device))
    if words and is_protein(loaded):
        raise DataError("Proteins have no words. Leave --words out.")
    needed = losses or words or page is not None
    found = scores(
        loaded,
        read(source, kind, column, id_column, upper),
        lanes=lanes or LANES,
        losses=needed,
        following=following,
    )
    printed = _printed(found, as_json, losses, words)
    kept = None if page is None else list(printed)
    whole = total(printed if kept is None else kept)
    if page is not None and kept is not None:
        with replacing(page) as temporary, temporary.open("w", encoding="utf-8") as out:
            out.writelines(surprise(f"Surprise of {model.name}", kept))
        console.note(f"wrote {page}")
    if not as_json:
        line = (
            f"{console.counted(whole['records'], 'record')}, {console.counted(whole['symbols'], 'symbol')}: "
            f"{whole['bits_per_symbol']:.4f} bits/symbol, "
            f"perplexity {console.decimal(whole['perplexity'], 3)}"
        )
        if "word_perplexity" in whole:
            line += f", word perplexity {console.decimal(whole['word_perplexity'], 2)}"
        console.note(line)


def _printed(found: Iterator[Score], as_json: bool, losses: bool, words: bool) -> Iterator[Score]:
    """The same scores, each told as it comes."""
    for k, score in enumerate(found):
        if not as_json and k == 0:
            console.result(f"{'symbols':>9} {'nats':>12} {'bits/symbol':>11}  id")
        if as_json:
            console.result_json(_object(score, losses, words), indent=None)
        else:
            _tell(score, words)
        yield score


def _object(score: Score, losses: bool, words: bool) -> dict[str, Any]:
    from mulstm.scoring import words as split

    plain = score.as_dict()
    if not losses:
        plain.pop("losses", None)
    if losses or words:  # of which text they are: it may have been cleaned
        plain["text"] = score.text.decode("utf-8", errors="replace")
    if words:
        plain["word_scores"] = [
            {"word": w.text.decode("utf-8", errors="replace"), "start": w.start, "nats": w.nats}
            for w in split(score)
        ]
    return plain


def _tell(score: Score, words: bool) -> None:
    from mulstm.scoring import words as split

    console.result(
        f"{score.symbols:>9,} {score.nats:>12.4f} {score.bits_per_symbol:>11.4f}  {console.in_line(score.id)}"
    )
    for name, probability in score.following:
        console.result(f"{'':>9} {probability:>12.6f} {'next':>11}  {name!r}")
    if words:
        for word in split(score):
            text = word.text.decode("utf-8", errors="replace")
            console.result(f"{'':>9} {word.nats:>12.4f} {'word':>11}  {text}")

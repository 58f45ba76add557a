"""`mulstm evaluate`: what a text costs under a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mulstm.cli._options import AsJson, DataDir, Device, Quiet


def command(
    model: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run.")],
    text: Annotated[
        str,
        typer.Argument(help="A file, a folder or a known corpus; without it, what the model was trained on."),
    ] = "",
    split: Annotated[
        str,
        typer.Option("--split", help="train, valid, test or all (default: test; all of a text of yours)."),
    ] = "",
    lanes: Annotated[int, typer.Option("--lanes", min=1, help="Stretches the text is read in.")] = 10,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="Symbols read at a time; no effect on the result.")
    ] = 200,
    symbols: Annotated[
        int, typer.Option("--symbols", min=0, help="Only so many from the start; 0: all.")
    ] = 0,
    losses: Annotated[
        Path | None,
        typer.Option("--losses", help="Write each symbol's loss in nats, in text order, to this .npy."),
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16.")] = "fp32",
    backend: Annotated[str, typer.Option("--backend", help='See "mulstm info".')] = "auto",
    device: Device = "auto",
    data_dir: DataDir = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model: bits per character, and word perplexity where the corpus has words."""
    from mulstm import checkpoint, console, parallel
    from mulstm.cli._text import part_of
    from mulstm.evaluate import evaluate

    if precision not in ("fp32", "bf16"):
        raise typer.BadParameter(f"{precision!r} is neither fp32 nor bf16", param_hint="--precision")
    loaded = checkpoint.load(model, parallel.pick(device))
    loaded.model.precision, loaded.model.backend = precision, backend
    part = part_of(loaded, text, split, data_dir)
    total = min(symbols or part.symbols_count, part.symbols_count)
    screen = None if quiet else console.Progress(total, label="evaluate")

    def show(done: int, bits: float) -> None:
        if screen is not None:
            screen.update(done, bits_per_char=bits)

    found = evaluate(loaded.model, part, lanes, chunk, symbols=symbols, losses=losses or False, progress=show)
    result = {
        "model": str(model),
        "fingerprint": loaded.meta["fingerprint"],
        "corpus": part.corpus,
        "split": part.name,
        "bits_per_char": found.bits_per_char,
        "nats": found.nats,
        "symbols": found.symbols,
        "words": found.words,
        "word_perplexity": found.word_perplexity,
        "lanes": min(lanes, found.symbols),
        "precision": precision,
        "seconds": found.seconds,
        "symbols_per_second": found.symbols / found.seconds,
    }
    if as_json:
        console.result_json(result)
        return
    line = f"{found.bits_per_char:.4f} bits/char on {found.symbols:,} symbols of {part.corpus} ({part.name})"
    if found.word_perplexity is not None:
        line += f", word perplexity {found.word_perplexity:.2f} on {found.words:,} words"
    console.result(line)

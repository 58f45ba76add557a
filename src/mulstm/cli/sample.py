"""`mulstm sample`: text from a model, as it is drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Device, Length, Model, Precision, Prompt, Seed


def command(
    model: Model,
    prompt: Prompt = "",
    length: Length = 500,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", min=0, help="Below 1 safer, above 1 wilder, 0 always the likeliest."
        ),
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Only the k likeliest symbols; 0: all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", min=0, max=1, help="Only the likeliest that reach this share (above 0)."),
    ] = 1.0,
    seed: Seed = 1,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Texts to draw at once.")] = 1,
    stop: Annotated[str, typer.Option("--stop", help="End a text after these characters.")] = "",
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Only the bytes drawn, as they are; else what is no UTF-8 becomes \ufffd."
        ),
    ] = False,
    precision: Precision = "fp32",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Draw text from a model."""
    from mulstm import checkpoint, parallel
    from mulstm.cli._terminal import write_bytes, write_drawn
    from mulstm.cli._text import opened
    from mulstm.sample import Sampling, sample

    if raw and (as_json or streams > 1):
        raise typer.BadParameter("bytes as they are need one stream, and no JSON", param_hint="--raw")
    loaded = checkpoint.load(model, parallel.pick(device))
    loaded.require_head()
    loaded.model.precision = precision
    how = Sampling(length, temperature, top_k, top_p, seed, stop.encode(errors="surrogateescape"))
    # A prompt that cannot be read is told of before anything is written.
    pieces = sample(loaded.model, loaded.alphabet, opened(loaded, prompt), how, streams)
    if raw:
        write_bytes(pieces)
        return
    if streams == 1 and not as_json:
        write_drawn(prompt, pieces)
        return
    drawn = [bytearray() for _ in range(streams)]
    try:
        for row in pieces:
            for whole, more in zip(drawn, row, strict=True):
                whole += more
    except KeyboardInterrupt:  # what was drawn until then is not lost
        _tell(prompt, drawn)
        raise
    if as_json:
        texts = [whole.decode("utf-8", errors="replace") for whole in drawn]
        console.result_json({"prompt": prompt, "seed": seed, "temperature": temperature, "texts": texts})
    else:
        _tell(prompt, drawn)


def _tell(prompt: str, drawn: list[bytearray]) -> None:
    from mulstm.cli._terminal import sound

    for i, text in enumerate(drawn, 1):
        console.result(f"--- {i} ---\n{sound(prompt)}{text.decode('utf-8', errors='replace')}")

"""`mulstm sample`: text from a model, as it is drawn."""

from __future__ import annotations

from typing import Annotated

import typer

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
        float, typer.Option("--top-p", min=0, max=1, help="Only the likeliest that reach this share.")
    ] = 1.0,
    seed: Seed = 1,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Texts to draw at once.")] = 1,
    stop: Annotated[str, typer.Option("--stop", help="End a text after these characters.")] = "",
    precision: Precision = "fp32",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Draw text from a model."""
    from mulstm import checkpoint, console, parallel
    from mulstm.cli._terminal import sound, write_drawn
    from mulstm.cli._text import opened
    from mulstm.sample import Sampling, sample

    loaded = checkpoint.load(model, parallel.pick(device))
    loaded.require_head()
    loaded.model.precision = precision
    how = Sampling(length, temperature, top_k, top_p, seed, stop.encode(errors="surrogateescape"))
    # A prompt that cannot be read is told of before anything is written.
    pieces = sample(loaded.model, loaded.alphabet, opened(loaded, prompt), how, streams)
    if streams == 1 and not as_json:
        write_drawn(prompt, pieces)
        return
    drawn = [bytearray() for _ in range(streams)]
    for row in pieces:
        for whole, more in zip(drawn, row, strict=True):
            whole += more
    texts = [whole.decode("utf-8", errors="replace") for whole in drawn]
    if as_json:
        console.result_json({"prompt": prompt, "seed": seed, "temperature": temperature, "texts": texts})
        return
    for i, text in enumerate(texts):
        console.result(f"--- {i + 1} ---\n{sound(prompt) + text}")

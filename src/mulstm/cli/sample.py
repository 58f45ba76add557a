"""`mulstm sample`: text from a model, as it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Device, Length, Model, Precision, Prompt, Seed

WIDEST = 100_000  # texts that a search follows; more is a slip of the hand


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
    streams: Annotated[int, typer.Option("--streams", min=1, max=1 << 62, help="Texts to draw at once.")] = 1,
    width: Annotated[
        int,
        typer.Option(
            "--beam",
            min=0,
            max=WIDEST,
            help="Do not draw, but search for the likeliest: texts followed at once; 0: draw.",
        ),
    ] = 0,
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
    """Draw text from a model.

    With --beam, print the likeliest text that is found, or as many as --streams says, with their nats.
    """
    from mulstm import checkpoint, parallel
    from mulstm.beam import beam
    from mulstm.cli._terminal import write_bytes, write_drawn
    from mulstm.cli._text import opened
    from mulstm.sample import Sampling, sample

    if width and (temperature, top_k, top_p, seed) != (1.0, 0, 1.0, 1):
        raise typer.BadParameter(
            "what is searched for is not drawn: leave temperature, top-k, top-p and seed out",
            param_hint="--beam",
        )
    if 0 < width < streams:
        raise typer.BadParameter(f"{streams} texts need a beam as wide", param_hint="--beam")
    if raw and (as_json or streams > 1):
        raise typer.BadParameter("bytes as they are need one stream, and no JSON", param_hint="--raw")
    loaded = checkpoint.load(model, parallel.pick(device))
    loaded.require_head()
    loaded.model.precision = precision
    end = stop.encode(errors="surrogateescape")
    if width:
        found = beam(
            loaded.model, loaded.alphabet, opened(loaded, prompt), width=width, length=length, stop=end
        )[:streams]
        nats = [one.nats for one in found]
        if raw:
            write_bytes(iter([[found[0].text]]))
        elif len(found) == 1 and not as_json:
            write_drawn(prompt, iter([[found[0].text]]))
            console.note(f"{nats[0]:.4f} nats")
        else:
            heads = [f"{cost:.4f} nats" for cost in nats]
            _tell(prompt, [one.text for one in found], heads, {"nats": nats} if as_json else None)
        return
    how = Sampling(length, temperature, top_k, top_p, seed, end)
    # A prompt that cannot be read is told of before anything is written.
    pieces = sample(loaded.model, loaded.alphabet, opened(loaded, prompt), how, streams)
    if raw:
        write_bytes(pieces)
        return
    if streams == 1 and not as_json:
        write_drawn(prompt, pieces)
        return
    drawn = [bytearray() for _ in range(streams)]
    heads = [str(i) for i in range(1, streams + 1)]
    facts = {"seed": seed, "temperature": temperature} if as_json else None
    try:
        for row in pieces:
            for whole, more in zip(drawn, row, strict=True):
                whole += more
    except (KeyboardInterrupt, SystemExit):  # what was drawn until then is not lost
        _tell(prompt, drawn, heads, facts)
        raise
    _tell(prompt, drawn, heads, facts)


def _tell(
    prompt: str, drawn: Sequence[bytes | bytearray], heads: Sequence[str], facts: dict[str, Any] | None
) -> None:
    """Texts under their heads, or, with facts, one object of JSON."""
    from mulstm.cli._terminal import sound

    texts = [whole.decode("utf-8", errors="replace") for whole in drawn]
    if facts is not None:
        console.result_json({"prompt": sound(prompt), **facts, "texts": texts})
        return
    for head, text in zip(heads, texts, strict=True):
        console.result(f"--- {head} ---\n{sound(prompt)}{text}")

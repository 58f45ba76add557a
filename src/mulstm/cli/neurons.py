"""`mulstm neurons`: follow units, find those that know a label, hold one while sampling."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Device, Length, Model, Prompt, Quiet, Seed
from mulstm.cli._output import Force, require_room
from mulstm.cli._records import Column, IdColumn, Input, Kind, Upper, read

MOST = 1e38  # about what single precision holds

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Look into a model's units."
)
Unit = Annotated[list[int], typer.Option("--unit", "-u", min=0, help="A unit of the last layer; repeatable.")]


@app.command()
def trace(
    model: Model,
    source: Input,
    unit: Unit,
    of: Annotated[str, typer.Option("--of", help="h, the output, or c, the cell.")] = "h",
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the first record (.svg, .png, .pdf).")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Colour the text by the first unit.")] = None,
    force: Force = False,
    kind: Kind = "",
    column: Column = "",
    id_column: IdColumn = "",
    upper: Upper = False,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Print what units do after each symbol of each record."""
    from mulstm import checkpoint, neurons, parallel
    from mulstm.scoring import symbol_name

    require_room(figure, force, read=(source, model), endings=tuple(neurons.UNDATED))
    require_room(page, force, read=(source, model), endings=(".html",))
    loaded = checkpoint.load(model, parallel.pick(device))
    found: list[neurons.Trace] = []  # the first, or all where a page is to show them
    for record in read(source, kind, column, id_column, upper):
        one = neurons.trace(loaded, record, unit, of)
        if not found and not as_json:
            console.result("\t".join(["id", "position", "symbol", *(f"{of}[{u}]" for u in unit)]))
        if not found or page is not None:
            found.append(one)
        names = [symbol_name(loaded.convention, k) for k in loaded.alphabet.encode(one.text).tolist()]
        if as_json:
            values = {str(u): one.values[:, k].tolist() for k, u in enumerate(one.units)}
            console.result_json({"id": one.id, "of": of, "symbols": names, "units": values}, indent=None)
            continue
        for t, (name, row) in enumerate(zip(names, one.values, strict=True), 1):
            cells = [console.in_line(one.id), str(t), repr(name), *(f"{value:.6f}" for value in row)]
            console.result("\t".join(cells))
    if figure is not None:
        neurons.draw(found[0], figure)
        console.note(f"wrote {figure}")
    if page is not None:
        neurons.write_page(found, page)
        console.note(f"wrote {page}")


@app.command()
def find(
    model: Model,
    source: Input,
    label: Annotated[str, typer.Option("--label", help="The field with the label.")] = "label",
    of: Annotated[str, typer.Option("--of", help="h_mean, h_final or c_final (default: by model).")] = "",
    top: Annotated[int, typer.Option("--top", min=1, help="How many units to print.")] = 10,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=(1 << 32) - 1, help="Which records are held out.")
    ] = 1,
    kind: Kind = "",
    column: Column = "",
    upper: Upper = False,
    device: Device = "cpu",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the units that best predict the labels of records.

    It fits an L1 logistic regression to a small CSV or JSONL. It needs mulstm[neurons].
    """
    from mulstm import checkpoint, parallel, probe

    loaded = checkpoint.load(model, parallel.pick(device))
    records = list(read(source, kind, column, "", upper, label))
    found = probe.find(loaded, records, of=of, top=top, seed=seed, tell=None if quiet else console.note)
    if as_json:
        console.result_json(dataclasses.asdict(found))
        return
    console.result(
        f"accuracy {found.accuracy:.3f} on {found.held_out} records held out "
        f"(always the commonest label: {found.majority:.3f}); {found.units_used} units used"
    )
    rows = [
        [str(u.unit), console.in_line(u.label), f"{u.weight:+.4f}", f"{u.separation:.3f}"]
        for u in found.units
    ]
    console.table(["unit", "label", "weight", "separation alone"], rows)


@app.command()
def sample(
    model: Model,
    clamp: Annotated[
        list[str], typer.Option("--clamp", metavar="UNIT=VALUE", help="Hold h of a unit, as in 2388=1.0.")
    ],
    prompt: Prompt = "",
    length: Length = 500,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: always the likeliest.")] = 1.0,
    seed: Seed = 1,
    device: Device = "cpu",
) -> None:
    """Draw text while some units are held at given values."""
    from mulstm import checkpoint, neurons, parallel
    from mulstm.cli._terminal import write_drawn
    from mulstm.cli._text import opened
    from mulstm.sample import Sampling, go_on

    loaded = checkpoint.load(model, parallel.pick(device))
    loaded.require_head()
    held = neurons.Clamped(loaded.model, loaded.alphabet, units=_clamps(clamp))
    how = Sampling(length=length, temperature=temperature, seed=seed)
    write_drawn(prompt, go_on(held, opened(loaded, prompt), how))


def _clamps(given: list[str]) -> dict[int, float]:
    clamps: dict[int, float] = {}
    for text in given:
        unit, _, value = text.partition("=")
        try:
            if int(unit) in clamps:
                raise typer.BadParameter(f"unit {int(unit)} is held twice", param_hint="--clamp")
            clamps[int(unit)] = float(value)
            if not abs(clamps[int(unit)]) < MOST:
                raise ValueError
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not UNIT=VALUE", param_hint="--clamp") from None
    return clamps

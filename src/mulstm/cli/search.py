"""`mulstm search`: which settings are better, by short runs."""

from __future__ import annotations

from pathlib import Path
from shlex import split
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import AsJson, DataDir, Device, Overrides, Quiet, Target

FEW = 100  # updates: after so few, models have hardly begun to differ


def command(
    target: Target,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="KEY=A,B,...",
            help="Values to try; several of these are combined, each value with each.",
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--trial",
            metavar='"KEY=VALUE ..."',
            help='One trial with these changes; "" is the recipe as it is. Repeatable.',
        ),
    ] = None,
    overrides: Overrides = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0, help="Begin no further trial after so long (0: no limit).")
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Lines of JSON, one a trial (default: runs/search/NAME.jsonl)."),
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Try settings in short runs.

    They are compared on the validation part; the test part is not read. --set makes all of them short, as
    in --set train.epochs=0.5. Trials that are in the file already are not run again.
    """
    from mulstm import files, search
    from mulstm.cli._target import Sizes, recipe_for
    from mulstm.recipe import DataRecipe
    from mulstm.report import trials as lines

    try:
        changes = [tuple(split(text)) for text in given or []] + search.combinations(axes or [])
    except ValueError as error:  # of a quotation mark without its other
        raise typer.BadParameter(str(error).lower(), param_hint="--trial") from None
    if not changes:
        raise typer.BadParameter("give --try optimiser.rate=1e-3,2e-3, or --trial")
    sizes: dict[DataRecipe, Sizes] = {}
    trials = [
        search.Trial(made, recipe_for(target, [*(overrides or []), *made], data_dir, known=sizes))
        for made in changes
    ]
    out = out or Path("runs/search") / f"{trials[0].recipe.name}.jsonl"
    found = search.search(
        trials,
        out=out,
        data_dir=data_dir,
        device=device,
        minutes=minutes,
        note=None if quiet else console.note,
    )
    if as_json:
        console.result_json({"trials": lines.best_first(found), "file": str(out)})
        return
    distinct = list({files.json_line(line["settings"]): line for line in found}.values())
    console.table(lines.HEADERS, lines.rows(distinct))
    console.result(f"trials: {out}")
    if not quiet and (fewest := min(line["updates"] for line in distinct)) < FEW:
        console.note(
            f"warning: trials of {fewest} updates say little; give them more by --set train.epochs=..."
        )
    if unequal := lines.not_measured_alike(distinct):
        console.note(f"warning: measured with different {', '.join(unequal)}: do not compare their figures.")

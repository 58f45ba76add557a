"""`mulstm train`: from a text or a recipe to a run."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from mulstm.cli._options import AsJson, DataDir, Device, Minutes, Overrides, Quiet, RunsDir, Target


def command(
    target: Target = "",
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="auto|RUN", help="Go on with the newest such run, or with this one."
        ),
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option("--from", help="A checkpoint whose weights are the starting point.")
    ] = None,
    minutes: Minutes = 0.0,
    device: Device = "auto",
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a text, or run a recipe.

    Several GPUs: torchrun --nproc-per-node=2 -m mulstm train RECIPE
    """
    from mulstm import console, runs, train
    from mulstm.cli import _record, _target
    from mulstm.job import CUT
    from mulstm.parallel import is_first

    if not target and resume in (None, "auto"):
        raise typer.BadParameter("give a text, a recipe, or --resume with a run's folder")
    if target:
        recipe = _target.recipe_for(target, overrides or [], data_dir, start_from)
    else:
        recipe = runs.recipe_of(Path(str(resume)), overrides or [])
    record, folder = train.train(
        recipe,
        runs_dir=runs_dir,
        data_dir=data_dir,
        device=device,
        resume_from=resume,
        start_from=start_from,
        minutes=minutes,
        tensorboard=tensorboard,
        quiet=quiet,
    )
    if not is_first():
        return
    if as_json:
        console.result_json({**record, "folder": str(folder)})
    else:
        told = [*_record.lines(record), f"run folder: {folder}"]
        if record["stopped"] == CUT:
            told.append(f"to go on: mulstm train --resume {quote(str(folder))}")
        for line in told:
            console.result(line)

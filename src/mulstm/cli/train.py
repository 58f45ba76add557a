"""`mulstm train`: from a text or a recipe to a run."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson, DataDir, Device, Minutes, Overrides, Quiet, RunsDir, Target, path


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
        Path | None,
        typer.Option(
            "--from", parser=path, metavar="<path>", help="A checkpoint, run or released model to start from."
        ),
    ] = None,
    minutes: Minutes = 0.0,
    device: Device = "auto",
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events (needs mulstm[tensorboard]).")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a text, or run a recipe.

    Several GPUs: torchrun --nproc-per-node=2 -m mulstm train RECIPE
    """
    from mulstm import runs, train
    from mulstm.cli import _target
    from mulstm.report.records import CUT

    run = None if resume in (None, "auto") else path(resume)
    if not target and run is None:
        raise typer.BadParameter("give a text, a recipe, or --resume with a run's folder")
    if run is not None and not runs.is_run(run):
        run = next(iter(runs.all_below(run)), run)  # a folder of runs is its newest
    is_text = Path(target).exists() and not target.endswith(".toml")
    if run is None or (target and not is_text):
        recipe = _target.recipe_for(target, overrides or [], data_dir, start_from)
    else:  # a run knows its recipe; a text says where that of the run is now
        where = [f"data.corpus={target}"] if target else []
        recipe = runs.recipe_of(run, [*(overrides or []), *where])
    record, folder = train.train(
        recipe,
        runs_dir=runs_dir,
        data_dir=data_dir,
        device=device,
        resume_from=resume if run is None else str(run),
        start_from=start_from,
        minutes=minutes,
        tensorboard=tensorboard,
        quiet=quiet,
    )
    if not console.speaks():
        return
    if as_json:
        console.result_json({**record, "folder": str(folder)})
    else:
        lines = [*summary(record), f"run folder: {folder}"]
        if record["stopped"] == CUT:
            lines.append(f"to go on: mulstm train --resume {quote(str(folder))}")
        for line in lines:
            console.result(line)


def summary(record: dict[str, Any]) -> list[str]:
    """What matters in the record of a run, in a few lines."""
    from mulstm.report.records import CUT

    lines = []
    for part in ("valid", "test"):
        if record.get(f"{part}_bits_per_char") is not None:
            bits, symbols = record[f"{part}_bits_per_char"], record[f"{part}_symbols"]
            line = f"{part:<6} {bits:.4f} bits/char on {console.counted(symbols, 'symbol')}"
            if f"{part}_word_perplexity" in record:
                line += f", word perplexity {console.decimal(record[f'{part}_word_perplexity'], 2)}"
            lines.append(line)
    lines.append(
        f"{console.counted(record['updates'], 'update')} ({record['epochs']:.2f} epochs) "
        f"of {record['parameters']:,} weights, "
        f"{console.duration(record['train_seconds'])} on {record['hardware']}"
    )
    if calibration := record.get("calibration"):
        lines.append(
            "calibrated on the valid part: logits x {logits:.3f}, recurrent products x {recurrent:.3f}, "
            "{before:.4f} to {after:.4f} bits/char".format(**calibration)
        )
    if record.get("stopped") not in ("", None, CUT):  # of a run that was cut short the reason says all
        lines.append(f"stopped early: {record['stopped']}")
    if not record["complete"]:
        lines.append(record["reason"])
    return lines

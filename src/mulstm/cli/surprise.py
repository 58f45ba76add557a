"""`mulstm surprise`: how two models recover from surprises in a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import AsJson, DataDir, Device, Model, PartName
from mulstm.errors import CheckpointError
from mulstm.recipe import lanes_for


def command(
    a: Model,
    b: Annotated[Path, typer.Argument(help="The model to compare it with; of the same alphabet.")],
    text: Annotated[
        str, typer.Argument(help="A file, a folder or a known corpus; without it, what A was trained on.")
    ] = "",
    split: PartName = "",
    share: Annotated[
        float, typer.Option("--share", min=0.001, max=0.5, help="What counts as surprising.")
    ] = 0.1,
    delays: Annotated[
        int, typer.Option("--delays", min=1, max=100, help="How many steps to look after it.")
    ] = 4,
    lanes: Annotated[
        int | None,
        typer.Option(
            "--lanes", min=1, help="Stretches the text is read in (default: 10, fewer for a short text)."
        ),
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models where a text surprises them.

    What counts is their loss at the most surprising symbols and just after them (the paper's Figure 3).
    """
    from mulstm import checkpoint, machine, parallel
    from mulstm.cli._text import is_own, part_of
    from mulstm.evaluate import evaluate
    from mulstm.job import hardware
    from mulstm.surprise import recovery

    pair = [checkpoint.load(path, parallel.pick(device)) for path in (a, b)]
    for one in pair:
        one.require_head()
    if pair[0].alphabet != pair[1].alphabet:
        raise CheckpointError(
            f"{a} and {b} have different alphabets. Compare models trained on one alphabet."
        )
    part = part_of(pair[0], text, is_own(pair[0], text), split, data_dir)
    lanes = lanes or lanes_for(part.symbols_count)
    losses = []
    for one in pair:
        cost = evaluate(one.model, part, lanes, losses=True)
        cost.require_number(one.model.precision)
        losses.append(cost.losses)
    assert losses[0] is not None
    assert losses[1] is not None
    found = recovery(losses[0], losses[1], share, delays)
    if as_json:
        about = {
            "a": str(a),
            "b": str(b),
            "fingerprints": [one.meta["fingerprint"] for one in pair],
            "corpus": part.corpus,
            "split": part.name,
            "lanes": lanes,
            "precision": pair[0].model.precision,
            "hardware": hardware(pair[0].model.device),
            "commit": machine.commit(),
        }
        console.result_json(about | dataclasses.asdict(found))
        return
    rows = [["whole text", *(f"{bits:.3f}" for bits in found.overall)]]
    for delay, bits in enumerate(found.by_delay):
        label = f"the {100 * share:g}% most surprising" if delay == 0 else f"{delay} after"
        rows.append([label, *(f"{value:.3f}" for value in bits)])
    console.table(["bits/char", str(a), str(b)], rows)

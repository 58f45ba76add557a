"""`mulstm quantize`: the integer model of a checkpoint, as compression uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mulstm import console
from mulstm.cli._codec import require_there, sleep_while_waiting
from mulstm.cli._options import AsJson, Model
from mulstm.cli._output import Force, require_room


def command(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write (default: MODEL.integer.safetensors beside it)."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            help="Measure both models on this file (without up to 2 % of it), and what whole numbers cost.",
        ),
    ] = None,
    symbols: Annotated[
        int | None,
        typer.Option(
            "--symbols", min=1, help="With --against: only so many bytes from its start (default: 200,000)."
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint into an integer model, for compression.

    It is smaller and faster, and the same on every machine.
    """
    sleep_while_waiting()
    if symbols is not None and against is None:
        raise typer.BadParameter("goes with --against only", param_hint="--symbols")
    from mulstm import checkpoint
    from mulstm.codec import integer
    from mulstm.codec.source import default_path, is_of, quantize_checkpoint

    file = checkpoint.find(model)
    target = output or default_path(file)
    # Made before, it is made anew; that of another checkpoint is what its archives are read with.
    ours = output is None and is_of(target, file)
    if against is not None:
        require_there(against)
    require_room(target, force or ours, read=(file, against or ""), endings=(".safetensors",))
    loaded = checkpoint.load(file)
    made = quantize_checkpoint(loaded)
    integer.save(target, made)  # before a fault of the text can take it away
    facts: dict[str, Any] = {
        "file": str(target),
        "parent": made.parent,
        "fingerprint": made.fingerprint.hex(),
    }
    if against is not None:
        from mulstm.codec.measure import compare

        facts |= compare(loaded, made, against, symbols or 200_000)
    facts |= {"bytes": target.stat().st_size, "parent_bytes": file.stat().st_size}
    if as_json:
        console.result_json(facts)
        return
    console.result(
        f"{target}: {facts['bytes']:,} bytes (the checkpoint has {facts['parent_bytes']:,}), "
        f"fingerprint {facts['fingerprint'][:16]}"
    )
    if against is not None:
        console.result(
            f"{facts['bits_per_char']:.4f} bits/char on {console.counted(facts['symbols'], 'symbol')}; "
            "the checkpoint "
            f"{facts['parent_bits_per_char']:.4f}, whole numbers cost {facts['cost_bits_per_char']:+.5f}"
        )
        if unknown := facts["unknown_bytes"]:
            console.note(
                f"left out: {console.counted(unknown, 'byte')} of {against}, not among the model's symbols"
            )

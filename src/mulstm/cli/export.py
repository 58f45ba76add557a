"""`mulstm export`: one of our checkpoints in somebody else's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import FOREIGN, Model
from mulstm.cli._output import Force, require_room
from mulstm.errors import CheckpointError

FORMATS = (*FOREIGN, "onnx", "hub")


def command(
    model: Model,
    format_name: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}."),
    ],
    out: Annotated[Path, typer.Argument(help="The file or folder to write.")],
    force: Force = False,
) -> None:
    """Write a model for other software.

    What is written computes the same function.

    onnx is the single step with its state in and out; hub is a folder for the Hugging Face hub.
    """
    from mulstm import checkpoint, interop

    if format_name not in FORMATS:
        raise CheckpointError(f'There is no format "{format_name}". Choose one of: {", ".join(FORMATS)}.')
    found, unsaid = checkpoint.find(model), ""  # once: a folder of runs may soon stand for another
    if format_name == "onnx":
        require_room(out, force, read=(found,), endings=(".onnx",))
    for target in _targets(format_name, out):
        require_room(target, force, read=(found,))
    if format_name == "onnx":
        from mulstm.interop import onnx

        written = onnx.write(checkpoint.load(found), out)
    elif format_name == "hub":
        from mulstm.interop import hub

        written = hub.save_pretrained(checkpoint.load(found), out)
    else:
        unsaid = interop.export_model(format_name, found, out)
        written = [out]
    for path in written:
        console.result(str(path))
    if unsaid:
        console.note(unsaid)


def _targets(format_name: str, out: Path) -> list[Path]:
    """What may be replaced; a hub folder keeps a model card that was changed by hand."""
    from mulstm.interop import hub

    if format_name == "onnx":
        return [out.with_name(out.name + ".data")]
    if format_name not in ("openai", "hub") and (format_name != "unirep" or out.suffix == ".npz"):
        return [out]
    if out.is_file():
        raise CheckpointError(f"{out} is a file, and {format_name} writes a folder. Give another name.")
    if not out.is_dir():
        return [out]
    return [out / hub.MODEL, out / hub.CONFIG] if format_name == "hub" else sorted(out.glob("*.npy"))

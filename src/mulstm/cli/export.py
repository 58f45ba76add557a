"""`mulstm export`: one of our checkpoints in somebody else's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mulstm.cli._options import Model

FORMATS = ("unirep", "openai", "nvidia", "chainer", "tape", "torchrecurrent", "onnx", "hub")


def command(
    model: Model,
    format_name: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}."),
    ],
    out: Annotated[Path, typer.Argument(help="The file or folder to write.")],
) -> None:
    """Write a model for other software: what was imported comes out as it went in.

    onnx is the single step with its state in and out; hub is a folder for the Hugging Face hub.
    """
    from mulstm import checkpoint, console, interop
    from mulstm.cli._records import require_folder
    from mulstm.errors import CheckpointError

    if format_name not in FORMATS:
        raise CheckpointError(f'There is no format "{format_name}". Choose one of: {", ".join(FORMATS)}.')
    require_folder(out)
    if out.is_file() and format_name in ("openai", "hub"):
        raise CheckpointError(f"{out} is a file, and {format_name} writes a folder. Give another name.")
    if format_name == "onnx":
        from mulstm.interop import onnx

        written = onnx.write(checkpoint.load(model), out)
    elif format_name == "hub":
        from mulstm.interop import hub

        written = hub.save_pretrained(checkpoint.load(model), out)
    else:
        interop.export_model(format_name, model, out)
        written = [out]
    for path in written:
        console.result(str(path))

"""`mulstm decompress`: an archive and its model give the file back, or a clear no."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._codec import (
    Coder,
    Model,
    Products,
    Threads,
    files_of,
    network_of,
    path_of,
    require_there,
    tell,
)
from mulstm.cli._options import AsJson, Device, Quiet
from mulstm.cli._output import Force, require_room


def command(
    model: Model,
    file: Annotated[Path, typer.Argument(parser=path_of, help="An archive; - is standard input.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=path_of,
            metavar="<path>",
            help="The file to write (default: without .mul); - is standard output.",
        ),
    ] = None,
    force: Force = False,
    device: Device = "cpu",
    products: Products = "auto",
    coder: Coder = "auto",
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Decompress an archive. Damage, or another model, is told with exit code 4, and no file is written."""
    target = output or _beside(file)
    require_there(file)
    found, beside = files_of(model)  # once: a folder of runs may soon stand for another
    require_room(target, force, read=(file, found, beside))
    from mulstm.codec import archive

    header = archive.peek(file)
    network, _ = network_of(found, device, products, threads, quiet)
    if header is not None:  # told by the file's name: the run that is meant may be an older one
        archive.require_model(header, network, str(found))
    total = (header and header.length) or 0
    with console.moving(total, "decompress", quiet, "bytes") as progress:
        done = archive.decompress_path(file, target, network, coder=coder, progress=progress)
    line = (
        f"{done.archive:,} -> {console.counted(done.content, 'byte')}, "
        f"{done.content / done.seconds / 1e3:,.1f} kB/s, checksums agree"
    )
    tell(target, line, {"file": str(file), "output": str(target), **done.as_dict()}, as_json)


def _beside(archive: Path) -> Path:
    """Where an archive's content goes by itself: its own name without .mul."""
    if str(archive) == "-":
        return archive
    name = archive.name.removesuffix(".mul")
    if name in (archive.name, "", ".", ".."):
        raise typer.BadParameter(
            f"{archive} is not a file's name with .mul behind it, so say where to write",
            param_hint="--output",
        )
    return path_of(os.path.join(archive.parent, name))

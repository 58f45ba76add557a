"""`mulstm decompress`: an archive and its model give the file back, or a clear no."""

from __future__ import annotations

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
    if output is None and str(file) != "-" and file.suffix != ".mul":
        raise typer.BadParameter(f"{file} does not end in .mul, so say where to write", param_hint="--output")
    target = output or (Path("-") if str(file) == "-" else file.with_suffix(""))
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

"""`mulstm compress`: a file becomes as small as the model finds it likely."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    sleep_while_waiting,
    tell,
)
from mulstm.cli._options import AsJson, Device, Quiet
from mulstm.cli._output import Force, require_room
from mulstm.errors import DataError


def command(
    model: Model,
    file: Annotated[Path, typer.Argument(parser=path_of, help="Any file; - is standard input.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=path_of,
            metavar="<path>",
            help="The archive (default: FILE.mul); - is standard output.",
        ),
    ] = None,
    lanes: Annotated[
        int,
        typer.Option(
            "--lanes",
            min=0,
            help="Stretches coded in lock-step: more is faster and a little larger; 0: by size.",
        ),
    ] = 0,
    block: Annotated[int, typer.Option("--block", min=1, help="Bytes held in memory at a time.")] = 1 << 24,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive/--static",
            help="Go on learning from what has been coded: slower, and smaller the longer the file is.",
        ),
    ] = True,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Decode each block again before it is written.")
    ] = True,
    bench: Annotated[
        bool, typer.Option("--bench", help="Write no archive; compare size and speed with other compressors.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", help="With --bench: draw size against speed to this .svg and a .png beside it."
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
    """Compress a file with a model. The archive decodes on any machine, with the same model."""
    if bench and output is not None:
        raise typer.BadParameter("it writes no archive: leave --output out", param_hint="--bench")
    if bench and not (adaptive and verify):
        raise typer.BadParameter(
            "it measures --static and --adaptive and decodes both: leave --static and --no-verify out",
            param_hint="--bench",
        )
    if figure is not None and not bench:
        raise typer.BadParameter("goes with --bench only", param_hint="--figure")
    if file.is_dir():
        raise DataError(f"{file} is a folder. Give a file; tar makes one of a folder.")
    require_there(file)
    target = output or (Path("-") if str(file) == "-" else file.with_name(file.name + ".mul"))
    if not bench:
        model, beside = files_of(model)  # once: a folder of runs may soon stand for another
        require_room(target, force, read=(file, model, beside))
        _warn_of_going_on(model)
    elif figure is not None:
        require_room(figure, force, read=(file,), endings=(".svg",))
        require_room(figure.with_suffix(".png"), force, read=(file,))
    sleep_while_waiting()
    from mulstm.codec import archive

    archive.check_options(lanes or None, block, coder)  # before the work of making an integer model
    network, model_bytes = network_of(model, device, products, threads, quiet)
    how: dict[str, Any] = {"lanes": lanes or None, "block": block, "coder": coder}
    if bench:
        _bench(network, model_bytes, file, how, figure, quiet, as_json)
        return
    how |= {"adaptive": adaptive, "verify": verify}
    total, passes = archive.length_of(file) or 0, 2 if verify else 1  # the way there, and the way back
    with console.moving(total, "compress", quiet, "bytes", passes) as progress:
        done = archive.compress_path(file, target, network, progress=progress, **how)
    line = (
        f"{done.content:,} -> {console.counted(done.archive, 'byte')}, {done.bits_per_byte:.4f} bits/byte, "
        f"{done.content / done.seconds / 1e3:,.1f} kB/s, "
        f"{console.counted(done.lanes, 'lane')}, {'' if verify else 'not '}verified"
    )
    facts = {"file": str(file), "output": str(target), **done.as_dict(), "model_bytes": model_bytes}
    tell(target, line, facts, as_json)


def _warn_of_going_on(model: Path) -> None:
    """Says where an archive would lose the only model that can read it."""
    from mulstm import earlier, runs

    run = model.parent
    if runs.is_run(run) and earlier.finished(run) is None:
        console.note(
            f"warning: the run in {run} has not ended. When it goes on, its model is replaced, and nothing "
            f"else reads the archive: keep a copy of {model.name}."
        )


def _bench(
    network: Any,
    model_bytes: int,
    file: Path,
    how: dict[str, Any],
    figure: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    from mulstm.codec import bench

    size = file.stat().st_size if file.is_file() else 0
    with console.moving(size, "bench", quiet, "bytes", passes=4) as progress:
        rows = bench.compare(network, model_bytes, file, how, progress)
    if figure is not None:
        bench.draw(rows, figure)
    if as_json:
        console.result_json(
            {"file": str(file), "bytes": rows[0].content, "rows": [row.as_dict() for row in rows]}
        )
        return
    console.table(bench.HEADERS, [row.cells() for row in rows])

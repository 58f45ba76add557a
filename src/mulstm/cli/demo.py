"""`mulstm demo`: a page in the browser to type into."""

from __future__ import annotations

from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import Device, Model, Precision
from mulstm.errors import ExtraError


def command(
    model: Model,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free one.")] = 8017,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    precision: Precision = "fp32",
    device: Device = "cpu",
) -> None:
    """Show in the browser how a model reads what you type.

    It also lets the model go on from there. The page is for this machine alone (127.0.0.1), and loads
    nothing from elsewhere. Ctrl-C ends it. It needs mulstm[demo].
    """
    import webbrowser

    from mulstm import checkpoint, parallel

    try:
        from mulstm.demo import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("uvicorn", "starlette"):
            raise
        raise ExtraError("The page needs starlette and uvicorn", "demo") from None
    from mulstm.demo.reading import Reader

    loaded = checkpoint.load(model, parallel.pick(device))
    loaded.model.precision = precision
    reader, about = Reader(loaded), app.facts(loaded, model)
    with app.listening(port) as here:
        address = f"http://{app.ADDRESS}:{here.getsockname()[1]}/"
        console.result(f"{address} (Ctrl-C to end)")
        if show:
            webbrowser.open(address)
        app.serve(here, reader, about)

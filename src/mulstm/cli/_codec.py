"""What compress, decompress and quantize share: options, the network of a MODEL, and the line that moves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from mulstm import console

if TYPE_CHECKING:
    from mulstm.codec.network import Network

Model = Annotated[
    Path,
    typer.Argument(
        help='A checkpoint, the folder of a run or of runs (the newest), or what "mulstm quantize" wrote.'
    ),
]
Products = Annotated[
    str,
    typer.Option("--products", help="How matrices are multiplied: auto, int8, float32, float64. Same bytes."),
]
Coder = Annotated[
    str, typer.Option("--coder", help="The range coder: auto, numba, constriction or python. Same bytes.")
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: all cores. Same bytes.")]


def sleep_while_waiting() -> None:
    """Threads that spin while they wait starve others on a busy machine. Call it before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def network_of(model: Path, device: str, products: str, threads: int, quiet: bool) -> tuple[Network, Path]:
    """The integer network of MODEL on the device, and the file it came from."""
    sleep_while_waiting()
    import torch

    from mulstm import parallel
    from mulstm.codec.network import Network
    from mulstm.codec.source import open_model

    if threads:
        torch.set_num_threads(threads)
    integer, file, made = open_model(model)
    if made and not quiet:
        console.note(f'made the integer model of {file}; "mulstm quantize" keeps it for the next time')
    return Network(integer, parallel.pick(device), products), file


@contextmanager
def ending_tidily(tell: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Inside, SIGTERM ends the program the way Ctrl-C does: what was half written is taken away.

    Gives `tell`, which ends it where a signal came while numba compiled: LLVM calls back into Python, and
    what is raised there gets lost or takes the process down.
    """
    came: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        came.append(number)
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] in ("numba", "llvmlite"):
                return
            frame = frame.f_back
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def tell_or_leave(more: int) -> None:
        if came:
            leave(came[0], None)
        tell(more)

    # What is ignored, as Ctrl-C is by a program in the background, stays so.
    heard = [k for k in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(k) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield tell_or_leave
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def moving(total: int, label: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A function to be told how many more bytes are done."""
    if quiet:
        yield lambda more: None
        return
    done = 0
    with console.Progress(total, label=label) as screen:

        def tell(more: int) -> None:
            nonlocal done
            done += more
            screen.update(done)

        yield tell

"""What compress, decompress and quantize share: options, and the network of a MODEL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mulstm import console
from mulstm.errors import DataError

if TYPE_CHECKING:
    from mulstm.codec.network import Network

Model = Annotated[
    Path,
    typer.Argument(
        readable=False,
        help="A checkpoint, the folder of a run or of runs (the newest), a released model by name, or what "
        '"mulstm quantize" wrote.',
    ),
]
Products = Annotated[
    str,
    typer.Option("--products", help="How matrices are multiplied: auto, int8, float32, float64. Same bytes."),
]
Coder = Annotated[
    str, typer.Option("--coder", help="The range coder: auto, numba, constriction or python. Same bytes.")
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, max=1024, help="CPU threads; 0: all cores. Same bytes.")
]


def path_of(text: str) -> Path:
    """A path as it was typed: "-" is a standard stream, "./-" a file, which Path alone takes for the same."""
    path = Path(text)
    return path.absolute() if str(path) == "-" != text else path


def sleep_while_waiting() -> None:
    """Threads that spin while they wait starve others on a busy machine. Call it before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def files_of(model: Path) -> tuple[Path, Path]:
    """What may be read for MODEL: its checkpoint, and the integer model beside it."""
    sleep_while_waiting()
    from mulstm import checkpoint
    from mulstm.codec.source import default_path

    found = checkpoint.find(model)
    return found, default_path(found)


def require_there(file: Path) -> None:
    """Raises DataError where there is no such input, before anything is said of the output."""
    if str(file) != "-" and not file.exists():
        raise DataError(f"There is no file {file}. Give the path of a file that exists.")


def network_of(model: Path, device: str, products: str, threads: int, quiet: bool) -> tuple[Network, int]:
    """The integer network of MODEL on the device, and the bytes of its file, where it is or would be kept."""
    sleep_while_waiting()
    import torch

    from mulstm import parallel
    from mulstm.codec import integer, kernels
    from mulstm.codec.network import Network
    from mulstm.codec.source import open_model

    if threads:
        torch.set_num_threads(threads)
    chosen = parallel.pick(device)
    found, file, made = open_model(model)
    if made and not quiet:
        console.note(f'made the integer model of {file}; "mulstm quantize" keeps it for the next time')
    if not quiet and kernels.find() is None and chosen.type == "cpu":
        console.note("without numba this takes several times as long: mulstm[codec] has it")
    size = integer.size_of(found) if made else file.stat().st_size
    return Network(found, chosen, products), size


def tell(target: Path, line: str, facts: dict[str, Any], as_json: bool) -> None:
    """What was done; where stdout holds the file itself, as one line on stderr."""
    if str(target) == "-":
        console.note(json.dumps(facts) if as_json else line)
    elif as_json:
        console.result_json(facts)
    else:
        console.result(line)

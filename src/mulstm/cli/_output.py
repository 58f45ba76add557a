"""Files that a command writes where its user says: none is lost that nobody said may go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mulstm.errors import DataError

Force = Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there already.")]


def require_room(
    target: Path | None,
    force: bool,
    *,
    read: Sequence[str | Path] = (),  # what the command reads
    endings: Sequence[str] = (),  # those of the one format that is written
) -> None:
    """Raises DataError, before any work is done, where `target` cannot be written or a file would be lost."""
    if target is None or str(target) == "-":
        return
    if endings and target.suffix not in endings:
        raise DataError(f"{target} does not end in {' or '.join(endings)}. Give a path that does.")
    if not target.parent.is_dir():
        raise DataError(f"The folder {target.parent} does not exist. Make it first.")
    if not os.access(target.parent, os.W_OK):
        raise DataError(f"The folder {target.parent} cannot be written. Choose another place.")
    if target.is_dir():
        raise DataError(f"{target} is a folder. Give the path of a file.")
    if not target.exists():
        return
    if not target.is_file():
        raise DataError(f"{target} is no plain file. Give the path of one.")
    if any(Path(source).exists() and target.samefile(source) for source in read if str(source)):
        raise DataError(f"{target} would replace the file that is read. Give another path.")
    if not force:
        raise DataError(f"{target} exists already. Give another path, or --force to replace it.")

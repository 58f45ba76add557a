"""Files that a command writes where its user says: none is lost that nobody said may go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mulstm.errors import DataError
from mulstm.files import require_free, require_place

Force = Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there already.")]


def require_room(
    target: Path | None,
    force: bool,
    *,
    read: Sequence[str | Path] = (),  # what the command reads
    endings: Sequence[str] = (),  # those of the one format that is written
) -> None:
    """Raises DataError, before any work is done, where `target` cannot be written or a file would be lost."""
    if target is None or (str(target) == "-" and not endings):  # the standard output has no format
        return
    if endings and target.suffix not in endings:
        raise DataError(f"{target} does not end in {' or '.join(endings)}. Give a path that does.")
    require_place(target)
    there = target.exists()
    if there and any(Path(source).exists() and target.samefile(source) for source in read if str(source)):
        raise DataError(f"{target} would replace the file that is read. Give another path.")
    require_free(target, force)

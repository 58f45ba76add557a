"""Times our layers against others', in turn and in one process, each only after it has passed its check."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from mulstm.bench import cpu, cuda
from mulstm.bench.cpu import machine
from mulstm.report import musts

__all__ = ["machine", "run"]


def run(
    device: str = "cpu",
    *,
    repeats: int = 15,
    quick: bool = False,
    parts: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """{"machine": ..., "rows": [...]}: everybody on that device; `quick`: at small sizes.

    On a GPU also what is asked for and met, who was left out and why, the seconds of each part, and with the
    part "losses" two curves of training. `parts`: some only; `keep` is shown what there is after each.
    """
    if torch.device(device).type == "cuda":
        found = cuda.run(device, parts or cuda.PARTS, repeats, quick, say, keep)
        return found | {"musts": musts.table(found["rows"], found.get("losses"))}
    return cpu.run(repeats, quick, say)

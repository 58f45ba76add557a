"""All that is timed on a GPU, in one process: which contenders, at which sizes, in which parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mulstm.bench import losses
from mulstm.bench.layers import layers
from mulstm.bench.streams import evaluation, sampling
from mulstm.bench.timing import Contender, Say, Session
from mulstm.bench.updates import cells, updates
from mulstm.errors import BackendError

WARM = 10.0  # seconds of load before anything is timed
Keep = Callable[[dict[str, Any]], None]
PARTS = ("layer", "update", "cells", "evaluate", "sample", "losses")
DEFINITIONS = {
    "milliseconds": "median of the rounds, with the 10th and 90th percentile; all of a group take turns",
    "error_vs_float64": "layer: the largest relative rms error of h and of any gradient; update: that of the "
    "whole gradient; evaluate: of the nats about their mean; sample: of the logits after a block",
    "percent_of_floor": "100 x the least time that products, memory and barriers of an H200 allow / the time",
    "symbols": "update: random, as frequent as a text's, so that 100 of a lane are about 29 different ones",
    "peak_mib": "of the contender alone",
}


SHORT_RUN = losses.Size()


@dataclass(frozen=True)
class Sizes:
    """(hidden, lanes, chunk, hidden of the LSTM of equal parameters) and the like, for each part."""

    layer: tuple[tuple[int, int, int, int], ...] = ((1900, 128, 200, 2144), (2800, 128, 200, 3152))
    inputs: int = 400
    # The last: whether the plain loop takes part. Without an equal LSTM, ours alone.
    update: tuple[tuple[int, int, int, int, bool], ...] = (
        (1900, 256, 100, 2144, True),
        (2800, 256, 100, 3152, True),
        (450, 128, 200, 520, False),
        (1900, 128, 200, 0, False),
        (2800, 128, 200, 0, False),
    )
    cells: tuple[int, int, int] = (256, 100, 0)  # lanes, chunk, hidden (0: the paper's)
    evaluate: tuple[int, int, int, int] = (2800, 500, 200, 50)
    sample: tuple[tuple[int, int], ...] = ((2800, 1), (2800, 4))  # hidden, streams
    losses: losses.Size = SHORT_RUN


SMALL = Sizes(
    layer=((256, 8, 50, 288),),
    update=((256, 8, 50, 288, True),),
    cells=(8, 50, 256),
    evaluate=(256, 8, 50, 4),
    sample=((256, 1),),
    losses=losses.Size(hidden=256, lanes=16, chunk=50, updates=60),
)


def bench(session: Session, parts: Collection[str], sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Runs the parts; `keep` is shown what there is after each of them, lest a fault lose it."""
    found: dict[str, Any] = {"rows": [], "seconds": {}, "left_out": session.left_out}
    found["definitions"] = DEFINITIONS
    torch.manual_seed(1)
    session.warm_up(WARM)
    for part in (part for part in PARTS if part in parts):
        begin = time.perf_counter()
        if part == "losses":
            found["losses"] = losses.compare(session, sizes.losses)
            session.tidy()
        else:
            for group in _groups(session, part, parts, sizes):
                found["rows"] += session.in_turn(group)
        found["seconds"][part] = round(time.perf_counter() - begin, 1)
        session.say(f"{part}: {found['seconds'][part]} s")
        keep(found)
    return found


def _groups(session: Session, part: str, parts: Collection[str], sizes: Sizes) -> Iterator[list[Contender]]:
    """The contenders of a part, in the groups that take turns."""
    if part == "layer":
        for H, B, T, equal in sizes.layer:
            yield layers(session, H, B, T, equal, sizes.inputs)
    elif part == "update":
        for place, (H, B, T, equal, naive) in enumerate(sizes.update):
            group = updates(session, H, B, T, equal, naive)
            # The other cells are measured by the first, and so take turns with it.
            yield group + (cells(session, *sizes.cells) if place == 0 and "cells" in parts else [])
    elif part == "cells":
        if "update" not in parts:
            H, B, T, *_ = sizes.update[0]
            yield updates(session, H, B, T) + cells(session, *sizes.cells)
    elif part == "evaluate":
        yield [evaluation(session, *sizes.evaluate)]
    else:
        yield [sampling(session, *one) for one in sizes.sample]


def run(
    device: str, parts: Collection[str], repeats: int, small: bool, say: Say, keep: Keep
) -> dict[str, Any]:
    """{"machine": ..., "rows": [...], ...}: everything on a GPU."""
    if not torch.cuda.is_available():
        raise BackendError("There is no CUDA device here. Use --device cpu.")
    about = {"machine": machine(device)}
    begin = time.perf_counter()
    session = Session(device, repeats, say)
    found = about | bench(session, parts, SMALL if small else Sizes(), lambda found: keep(about | found))
    say(f"all: {time.perf_counter() - begin:.0f} s")
    return found


def machine(device: str) -> dict[str, Any]:
    """What the rows were measured on."""
    import triton

    p = torch.cuda.get_device_properties(torch.device(device))
    return {
        "device": p.name,
        "processors": p.multi_processor_count,
        "memory_gib": round(p.total_memory / 2**30),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }

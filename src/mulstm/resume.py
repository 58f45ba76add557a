"""What a run needs to go on as if it had never stopped, in one file that is replaced in one step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from mulstm import optim, tensorfile
from mulstm import recipe as recipes
from mulstm.errors import CheckpointError, RunError
from mulstm.update import Update

NAME = "resume.safetensors"
KIND = "training state"


class TextChangedError(RunError):
    """A run would go on, or has ended, on another text than the one that is there now."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"The text has changed since {folder} was saved. Put it back as it was, or start a new run."
        )


@dataclass
class Progress:
    """Where a run stands."""

    update: int = 0
    seconds: float = 0.0  # of training updates only
    validated: int = 0  # `update` at the last validation
    valid_bits: float | None = None  # found by it
    valid_seconds: float = 0.0
    best_bits: float | None = None  # of the validations so far
    best_update: int = 0
    mark: float | None = None  # the best of the validations that every run of the recipe makes
    stale: int = 0  # of these, how many have come since
    stopped: str = ""  # why the run ended before its last update
    logged: int = 0  # `update` at the last line of the log
    since: float = 0.0  # `seconds` at that line
    nats: float = 0.0  # summed up since then
    symbols: float = 0.0  # that these are the nats of
    norms: float = 0.0


def save(
    path: Path, update: Update, progress: Progress, corpus: dict[str, Any], source: dict[str, Any]
) -> None:
    """Writes everything. All processes must call it: each has its own lanes' states. The first one writes."""
    tensors: dict[str, Tensor] = {"generator": update.generator.get_state()}
    tensors |= {f"model.{name}": tensor for name, tensor in update.model.state_dict().items()}
    if update.averaged is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in update.averaged.state_dict().items()}
    for what, tensor in optim.state_tensors(update.optimiser, update.named).items():
        tensors[f"optimiser.{what}"] = tensor
    for k, state in enumerate(update.state):
        tensors[f"state.{k}.h"] = update.share.whole(state.h)
        tensors[f"state.{k}.c"] = update.share.whole(state.c)
    meta = {
        "kind": KIND,
        "progress": dataclasses.asdict(progress),
        "corpus": corpus,
        "source": source,
        "recipe": recipes.settings(update.recipe),
        "device": update.share.device.type,
    }
    update.share.by_first(lambda: tensorfile.write(path, tensors, meta))


def load(path: Path, update: Update, corpus: dict[str, Any], total: int) -> Progress:
    """Puts everything back in place and returns where the run, of `total` updates, stands."""
    try:
        tensors, meta = tensorfile.read(path, KIND)
        if meta["corpus"] != corpus:
            raise TextChangedError(path.parent)
        progress = _progress(meta["progress"], total)
        _put_back(tensors, update)
        # The two kinds of device number their dice differently; on another kind the masks start a new series.
        if meta["device"] == update.share.device.type:
            update.generator.set_state(tensors["generator"])
        else:
            update.generator.manual_seed(update.recipe.train.seed + progress.update)
    except torch.OutOfMemoryError:  # no fault of the file
        raise
    except (CheckpointError, RuntimeError, *tensorfile.UNREADABLE) as fault:
        what = " ".join(str(fault).split()).partition(". ")[0]
        raise RunError(
            f"The run in {path.parent} cannot go on from its {path.name} ({what}). "
            f"Start a new run with --from {quote(str(path.with_name('last.safetensors')))}."
        ) from fault
    return progress


@torch.no_grad()
def _put_back(tensors: dict[str, Tensor], update: Update) -> None:
    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    update.model.load_state_dict(part("model."))
    if update.averaged is not None:
        update.averaged.load_state_dict(part("average."))
    optim.load_state_tensors(update.optimiser, update.named, part("optimiser."))
    for k, state in enumerate(update.state):
        for what, mine in state._asdict().items():
            whole = tensors[f"state.{k}.{what}"]
            if whole.shape != (update.recipe.train.lanes, *mine.shape[1:]):
                raise ValueError(f"state.{k}.{what} has the shape {tuple(whole.shape)}")
            mine.copy_(whole[update.own])


def _progress(stored: dict[str, Any], total: int) -> Progress:
    """Where the run stood; ValueError where no run of `total` updates can stand."""
    found = Progress(**stored)
    for name, value in vars(found).items():
        start = getattr(Progress, name)
        if isinstance(start, str):
            right = isinstance(value, str)
        elif isinstance(start, int):  # updates and validations
            right = type(value) is int and 0 <= value <= total
        else:
            right = (value is start) or (type(value) in (int, float) and 0 <= value < math.inf)
        if not right:
            raise ValueError(f"{name} is {value!r}")
    if max(found.validated, found.best_update, found.logged) > found.update:
        raise ValueError(f"update is {found.update}")
    return found

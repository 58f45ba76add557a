"""When a run has come to nothing: how that is seen, and what its user is told."""

from __future__ import annotations

import math

from mulstm import console, earlier, resume, runs, units
from mulstm.errors import RunError
from mulstm.job import Job


class DivergedError(RunError):
    """Something that is learnt or measured is no longer a number, or the loss is far above a guess's."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}{remedy}")
        self.what = what


def is_lost(job: Job) -> bool:
    """Whether training text costs twice a guess since the last line, though something had been learnt."""
    progress, guess = job.progress, _guess(job)
    has_learnt = progress.best_bits is not None and progress.best_bits < guess
    return has_learnt and units.bits(progress.nats) > 2 * guess * progress.symbols


def is_ruined(job: Job, valid_bits: float | None) -> bool:
    """Whether other text does so, too: where a text changes its character, it may for a while.

    With patience the run ends by itself, and the best model counts.
    """
    is_bad = valid_bits is not None and valid_bits > 2 * _guess(job)
    return is_bad and is_lost(job) and not job.recipe.evaluate.patience


def require_learnt(job: Job) -> None:
    """Raises DivergedError where a run has ended with a training text that costs twice a guess.

    Not where validation says otherwise of the model that counts, nor where it began with one of another text.
    """
    progress, limit = job.progress, 2 * _guess(job)
    bits = progress.valid_bits if progress.validated == progress.update else None
    if job.recipe.evaluate.patience:
        bits = progress.best_bits
    if "tuned_from" in job.source or (bits is not None and bits <= limit):
        return
    lines = job.share.by_first(lambda: runs.read_log(job.folder)[-1:])
    if lines and lines[0]["train_bits_per_char"] > limit:
        raise ruined(job, lines[0]["train_bits_per_char"])


def ruined(job: Job, bits: float) -> DivergedError:
    """What is told of a training text that costs so much."""
    shown, guess = (console.decimal(value, 1) for value in (bits, _guess(job)))
    return diverged(job, f"The loss is at {shown} bits/char, where a blind guess costs {guess},")


def diverged(job: Job, what: str) -> DivergedError:
    """What is told of the last update, with the models that are left and the next step."""
    kept = f"; the last checkpoint stays in {job.folder}" if (job.folder / resume.NAME).is_file() else ""
    for best in (earlier.BETTER, "best.safetensors"):
        if (job.folder / best).is_file():
            kept += f"; the best model so far is {job.folder / best}"
            break
    return DivergedError(f"{what} at update {job.progress.update:,}", kept + start_again(job))


def start_again(job: Job) -> str:
    """The end of a sentence."""
    return (
        f". Start again with an optimiser.rate below {job.recipe.optimiser.rate:g}, or with "
        "optimiser.clip at a few times the grad_norm in log.jsonl."
    )


def _guess(job: Job) -> float:
    """The bits of a symbol to one who knows the alphabet alone."""
    return math.log2(job.corpus.alphabet.size)

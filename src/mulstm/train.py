"""The training loop, top to bottom: updates, validation, the log, checkpoints, the record at the end."""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from mulstm import (
    checkpoint,
    console,
    divergence,
    earlier,
    files,
    machine,
    optim,
    outcome,
    parallel,
    resume,
    runs,
    tensorfile,
    units,
)
from mulstm import job as jobs
from mulstm import recipe as recipes
from mulstm.calibrate import Calibration
from mulstm.data.lanes import Lanes
from mulstm.errors import RecipeError, RunError, RunInterruptedError
from mulstm.job import Job
from mulstm.nn import packed
from mulstm.nn.model import LanguageModel
from mulstm.ops import modes
from mulstm.outcome import Outcome
from mulstm.recipe import Recipe
from mulstm.record_corpus import RecordChunk, RecordLanes
from mulstm.signals import SignalError, listening
from mulstm.update import GraphedUpdate

# Updates between two looks at the device: a look makes the host wait, which costs a GPU more.
LOOK_EVERY = {"cpu": 1, "cuda": 20}
# Updates in which kernels are compiled and a graph is captured: the speed on the screen leaves them out.
WARM_UP = {"cpu": 1, "cuda": GraphedUpdate.EAGER + 1}


@modes.learning
def train(
    recipe: Recipe,
    *,
    runs_dir: str | Path = runs.ROOT,
    data_dir: str | Path | None = None,
    device: str = "auto",
    resume_from: str | None = None,  # "auto", or the folder of a run
    start_from: str | Path | None = None,  # a checkpoint whose weights are the starting point
    minutes: float = 0.0,  # of updates, after which the run is measured as it is; 0: as many as it takes
    tensorboard: bool = False,
    quiet: bool = False,
) -> tuple[dict[str, Any], Path]:
    """The record of the run, which metrics.json holds too, and its folder."""
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{recipe!r:.60} is no recipe. Give one that load_recipe has read.")
    recipes.check(recipe)
    if not minutes >= 0:  # nor is it when it is no number
        raise RecipeError(f"minutes={minutes} is no time. Give one above 0, or 0 for as long as it takes.")
    if tensorboard:
        jobs.require_board()
    runs_dir = Path(runs_dir)
    started = time.perf_counter()
    with parallel.joined(device) as share, contextlib.ExitStack() as stack:
        tell = console.note if share.first and not quiet else None
        path = earlier.run_of(recipe, runs_dir, resume_from, start_from, tell)
        record = earlier.finished(path) if path is not None else None
        if path is not None and record is not None:
            if share.by_first(partial(jobs.is_of_another_text, path, recipe, data_dir)):
                raise resume.TextChangedError(path)
            if tell is not None:
                tell(f"{path} is complete: nothing is left to do.")
            return record, path
        jobs.require_apart(recipe.data.corpus, path or runs.home(recipe.name, runs_dir))
        job = jobs.build(
            recipe, share, stack, runs_dir=runs_dir, path=path, data_dir=data_dir, start_from=start_from
        )
        share.by_first(partial(_open_books, job, stack, tensorboard=tensorboard))
        stack.enter_context(listening(job.signals))
        job.setup_seconds = time.perf_counter() - started
        job.limit = 60 * minutes or math.inf
        if tell is not None:
            _introduce(job)
            job.screen = stack.enter_context(screen(job, recipe.name))
        # Only checkpoints tell where a run started: killed before its first, it would go on from the seed.
        if start_from is not None and job.progress.update == 0:
            save(job)
        try:
            run_updates(job)
            save(job)
            record = finish(job)
            (signum,) = share.largest(job.signals[0] if job.signals else 0)
            if signum:  # too late for anything to be left undone
                raise RunInterruptedError(
                    f"Interrupted; the run in {job.folder} is complete",
                    f'"mulstm train --resume {quote(str(job.folder))}" shows its figures.',
                    int(signum),
                )
        except files.UnwritableError as fault:
            raise RunError(f"{fault} {_go_on(job)}") from None
        folder = job.folder
        # Nothing that holds tensors may outlive the process group.
        del job
    return record, folder


def _open_books(job: Job, stack: contextlib.ExitStack, *, tensorboard: bool) -> None:
    """What the first process writes besides the model."""
    if job.run is not None:
        job.run.write_json(runs.ENVIRONMENT, machine.environment([job.hardware]))
    if tensorboard:
        job.board = jobs.require_board()(str(job.folder))
        stack.callback(job.board.close)


def screen(job: Job, label: str) -> console.Progress:
    """What the terminal shows: how far by updates, how fast by the symbols in them, as the log does.

    Where records end at different times, lanes run empty, and an update has fewer.
    """
    return console.Progress(
        job.total, label=label, done=job.progress.update, warm_up=WARM_UP[job.share.device.type]
    )


def run_updates(job: Job) -> None:
    """Updates until the last one, an early stop, the end of the time, a signal, or a broken loss."""
    recipe, progress = job.recipe, job.progress
    epoch = -1
    lanes: Lanes | RecordLanes
    if progress.update:  # a run that goes on may have had its time, or owe a validation
        attend(job)
    mark = time.perf_counter()
    while progress.update < job.total and not progress.stopped and not job.is_cut:
        n = progress.update
        k = n % job.per_epoch
        if n // job.per_epoch != epoch:
            epoch = n // job.per_epoch
            lanes = jobs.lanes(recipe, job.corpus, epoch)
        if lanes.fresh(k) or (recipe.train.clear_every and n % recipe.train.clear_every == 0):
            job.update.clear()
        chunk = lanes.chunk_at(k)
        averaging = n >= recipe.train.ema_start * job.total
        job.update(
            chunk.x,
            chunk.y,
            rate=optim.rate_at(recipe.optimiser, n, job.total),
            blend=1 - recipe.train.ema if averaging else 1.0,
            first=chunk.first if isinstance(chunk, RecordChunk) else None,
        )
        progress.update = n + 1
        if _is_due(job):
            look(job)
            progress.seconds += time.perf_counter() - mark
            attend(job)
            mark = time.perf_counter()


def look(job: Job) -> None:
    """Waits for the device and takes in what it has summed up; stops the run if that is no number."""
    progress, totals = job.progress, job.update.totals
    job.share.sum([totals])
    nats, symbols, norms = totals.tolist()
    norms /= job.share.count
    totals.zero_()
    (failed,) = job.share.largest(float(packed.has_failed(totals.device)))
    if failed:
        raise RunError(
            f"A kernel of update {progress.update:,} waited in vain for its neighbours on {job.hardware}. "
            "Resume the run with train.backend=fused."
        )
    if not math.isfinite(nats + norms):
        what = "gradient" if math.isfinite(nats) else "loss"
        raise divergence.diverged(job, f"The {what} is no longer a number")
    progress.nats += nats
    progress.symbols += symbols
    progress.norms += norms
    job.symbols += round(symbols)


def attend(job: Job) -> None:
    """What falls due between two updates: validation, a line of the log, a checkpoint, a signal."""
    progress, n = job.progress, job.progress.update
    if job.limit < math.inf:
        # The first process's clock is the one that is saved: by it a run had its time, or goes on.
        over = job.share.first and progress.seconds >= job.limit
        job.is_cut = bool(job.share.largest(float(over))[0])
    bits = validate(job) if job.is_validation_due else None
    is_lost = divergence.is_lost(job)
    # A validation that a signal ended is made, and logged, when the run goes on.
    if job.is_log_due and not job.is_validation_due:
        log(job, bits)
    elif n > progress.logged:
        _show(job, progress.nats / max(progress.symbols, 1))
    stale = time.monotonic() - job.saved >= job.recipe.train.save_every
    signum, is_save_due = job.share.largest(job.signals[0] if job.signals else 0, float(stale))
    if signum or (is_save_due and not is_lost):
        save(job)
    if signum:
        raise _interrupted(job, f"Interrupted at update {n:,} of {job.total:,}", int(signum))


def validate(job: Job) -> float | None:
    """Bits/char on the validation part; with patience keeps the best model, and stops when nothing is gained.

    None when a signal came meanwhile: the run, once resumed, begins with this validation.
    """
    recipe, progress = job.recipe.evaluate, job.progress
    started = time.perf_counter()

    def measure() -> float | None:
        try:
            return outcome.valid_bits(job, job.model)
        except SignalError:
            return None

    bits = job.share.by_first(measure)
    progress.valid_seconds += time.perf_counter() - started
    if bits is None:
        return None
    if not math.isfinite(bits):
        raise divergence.diverged(job, "The validation loss is no longer a number")
    progress.validated, progress.valid_bits = progress.update, bits
    if progress.best_bits is None or bits < progress.best_bits:
        progress.best_bits, progress.best_update = bits, progress.update
        # Without patience the last model counts: a folder must not stand for another than its record.
        if recipe.patience:
            job.share.by_first(lambda: _write_model(job, earlier.BETTER, job.model, _metrics(job, bits)))
    if job.is_milestone:  # patience does not count where a run was cut: it goes on as one that was not
        if progress.mark is None or bits < progress.mark:
            progress.mark, progress.stale = bits, 0
        else:
            progress.stale += 1
        if recipe.patience and progress.stale >= recipe.patience and progress.update < job.total:
            progress.stopped = f"{progress.stale} validations without a gain"
    return bits


def log(job: Job, valid_bits: float | None) -> None:
    """One line of log.jsonl about the updates since the last; stops a run whose model is ruined."""
    progress, recipe = job.progress, job.recipe
    count = progress.update - progress.logged
    nats = progress.nats / max(progress.symbols, 1)
    speed = progress.symbols / max(progress.seconds - progress.since, 1e-9)
    line = {
        "update": progress.update,
        "epoch": progress.update / job.per_epoch,
        "seconds": progress.seconds,
        "train_bits_per_char": units.bits(nats),
        "valid_bits_per_char": valid_bits,
        "rate": optim.rate_at(recipe.optimiser, progress.update - 1, job.total),
        "grad_norm": progress.norms / count,
        "symbols_per_second": speed,
    }
    job.share.by_first(lambda: _write_line(job, line))
    _show(job, nats, valid_bits)
    if divergence.is_ruined(job, valid_bits):
        raise divergence.ruined(job, units.bits(nats))
    progress.logged, progress.since = progress.update, progress.seconds
    progress.nats = progress.symbols = progress.norms = 0.0


def _write_line(job: Job, line: dict[str, Any]) -> None:
    if job.run is not None:
        job.run.log(line)
    if job.board is not None:
        for name, value in line.items():
            if value is not None and name != "update":
                job.board.add_scalar(name, value, line["update"])
        job.board.flush()


def save(job: Job) -> None:
    """The model for its users, then all of the run's state: each file is whole, whenever the run dies."""
    # A last step too large leaves finite losses behind and weights that are not.
    if not all(bool(torch.isfinite(parameter).all()) for parameter in job.update.parameters):
        raise divergence.diverged(job, "Some weight is no longer a number")
    bits = job.progress.valid_bits if job.progress.validated == job.progress.update else None
    state = job.folder / resume.NAME
    is_first = job.share.by_first(lambda: not state.exists())
    if is_first:  # before any model: a run that has one and no state cannot go on
        resume.save(state, job.update, job.progress, job.facts, job.source)
    job.share.by_first(lambda: _write_model(job, "last.safetensors", job.model, _metrics(job, bits)))
    if not is_first:
        resume.save(state, job.update, job.progress, job.facts, job.source)
    job.share.by_first(lambda: earlier.settle_best(job.folder, job.progress))
    job.saved = time.monotonic()


def finish(job: Job) -> dict[str, Any]:
    """Measures the model on whole splits and writes the record; it comes last, so it marks a complete run."""
    divergence.require_learnt(job)
    try:
        found, seconds, fingerprint = job.share.by_first(partial(_measure, job))
    except SignalError:
        raise _interrupted(job, "Interrupted while measuring the trained model", job.signals[0]) from None
    if found.broken:  # and what was saved last is that model
        what = f"The loss on the {found.broken} part is no longer a number at update {job.progress.update:,}"
        raise divergence.DivergedError(what, divergence.start_again(job))
    record = outcome.record(job, found, seconds) | {"fingerprint": fingerprint}
    if job.run is not None:
        job.run.write_json("metrics.json", record)
    return record


def _measure(job: Job) -> tuple[Outcome, float, str]:
    """What the model that counts comes to, the seconds that took, and its fingerprint.

    A calibrated model takes the place of the one as it was trained; the run's state stays.
    """
    recipe = job.recipe
    model, file, known = job.model, job.folder / "last.safetensors", None
    if recipe.evaluate.patience and job.progress.best_bits is not None:
        file = job.folder / "best.safetensors"
        best = checkpoint.load(file, job.share.device)
        model, known = best.model, best.meta["metrics"].get("calibration")
        model.precision, model.backend = recipe.train.precision, recipe.train.backend
    started = time.perf_counter()
    # Known is that of a run that was ended or cut after it.
    found = outcome.measure(job, model, Calibration(**known) if known else None)
    seconds = time.perf_counter() - started
    made = found.calibration
    if made is not None and not known and not found.broken:
        after = {"valid_bits_per_char": made.after, "calibration": made._asdict()}
        _write_model(job, file.name, model, tensorfile.read_meta(file)["metrics"] | after)
    return found, seconds, checkpoint.fingerprint(model, job.corpus.alphabet)


def _metrics(job: Job, bits: float | None) -> dict[str, Any]:
    """What a model's file says of it."""
    return {
        "update": job.progress.update,
        "valid_bits_per_char": bits,
        "train_seconds": job.progress.seconds,
    }


def _write_model(job: Job, name: str, model: LanguageModel, metrics: dict[str, Any]) -> None:
    checkpoint.save(
        job.folder / name,
        model,
        job.corpus.alphabet,
        recipe=job.recipe,
        metrics=metrics,
        source=job.source,
        corpus=job.facts,
    )


def _is_due(job: Job) -> bool:
    """Whether the loop must stop and look: every so often, and wherever something is to be written."""
    n = job.progress.update
    return n % LOOK_EVERY[job.share.device.type] == 0 or job.is_log_due or job.is_validation_due


def _show(job: Job, nats: float, valid_bits: float | None = None) -> None:
    if job.screen is not None:
        extra = {} if valid_bits is None else {"valid": console.decimal(valid_bits, 3)}
        done = job.progress.update
        job.screen.update(done, counted=job.symbols, bits_per_char=units.bits(nats), **extra)


def _introduce(job: Job) -> None:
    """What is about to happen, in a few words."""
    recipe, model = job.recipe, job.update.model
    train = job.corpus.split("train").symbols_count
    verb = f"Going on at update {job.progress.update:,} in" if job.progress.update else "Training in"
    console.note(f"{verb} {job.folder}")
    console.note(
        f"{recipe.model.cell}, {model.parameter_count():,} parameters; {job.corpus.name}, {train:,} symbols; "
        f"{job.total:,} updates of {recipe.train.lanes} x {recipe.train.chunk} symbols; "
        f"{job.hardware}, {job.precision}, backend {job.backend}"
    )
    if job.no_eight is not None:
        console.note(job.told_of_eight)
    if job.total <= recipe.optimiser.warmup:
        console.note(
            f"warning: the warm-up ({recipe.optimiser.warmup:,} updates) is as long as the run: little will "
            'be learnt. Set optimiser.warmup or train.epochs; "mulstm train TEXT" fits both to the text.'
        )


def _go_on(job: Job) -> str:
    return f'Go on with "mulstm train --resume {quote(str(job.folder))}".'


def _interrupted(job: Job, what: str, signum: int) -> RunInterruptedError:
    return RunInterruptedError(f"{what}; everything is saved", _go_on(job), signum)

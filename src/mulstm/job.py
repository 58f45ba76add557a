"""Everything a training run is made of before its first update: text, model, folder, saved state."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mulstm import (
    checkpoint,
    console,
    data,
    earlier,
    machine,
    ops,
    parallel,
    record_corpus,
    resume,
    runs,
    tensorfile,
)
from mulstm import recipe as recipes
from mulstm import update as updates
from mulstm.checkpoint import Checkpoint
from mulstm.convention import name_of
from mulstm.data.corpus import Corpus
from mulstm.data.known import KNOWN
from mulstm.data.lanes import Lanes
from mulstm.errors import CheckpointError, DataError, ExtraError, RecipeError
from mulstm.nn import packed
from mulstm.nn.model import PRECISIONS, LanguageModel
from mulstm.ops import eight
from mulstm.predict import impossible
from mulstm.recipe import Recipe
from mulstm.record_corpus import RecordLanes, RecordSplit
from mulstm.resume import Progress

LOG_LINES = 500  # in a whole run, about


@dataclass
class Job:
    """What the training loop works on."""

    recipe: Recipe
    share: parallel.Share
    corpus: Corpus
    update: updates.Update
    folder: Path
    run: runs.Run | None  # None in all processes but the first, which alone writes
    progress: Progress
    per_epoch: int  # updates in one pass over the text
    total: int  # updates in the whole run
    facts: dict[str, Any]  # of the text
    source: dict[str, Any]  # where the model came from and how it writes a record, for its checkpoints
    hardware: str
    backend: str
    no_eight: str | None = None  # why a run in fp8 is one in bf16
    setup_seconds: float = 0.0
    saved: float = field(default_factory=time.monotonic)  # when the last checkpoint was written
    signals: list[int] = field(default_factory=list)
    limit: float = math.inf  # seconds of updates
    is_cut: bool = False  # the limit was reached
    symbols: int = 0  # predicted by the updates made here, of all processes
    valid_symbols: int = 0  # read by the last validation, in the process that made it
    screen: console.Progress | None = None
    board: Any = None  # a TensorBoard writer

    @property
    def precision(self) -> str:
        """What computes."""
        return self.recipe.train.precision if self.no_eight is None else "bf16"

    @property
    def told_of_eight(self) -> str:
        """What to say where `no_eight` has a reason."""
        return f"8-bit products are not to be had here ({self.no_eight}): the run is one in bf16"

    @property
    def model(self) -> LanguageModel:
        """The model that counts: the averaged one where there is one."""
        return self.update.averaged or self.update.model

    @property
    def is_milestone(self) -> bool:
        """Whether the update just made is one that every run of this recipe validates."""
        n = self.progress.update
        return n == self.total or n % (self.recipe.evaluate.every or -(-self.total // 10)) == 0

    @property
    def is_validation_due(self) -> bool:
        """Whether the update just made is followed by a validation that has not been made yet.

        With patience that of a run whose time is over is: its last model may be the best.
        """
        is_last = self.is_cut and self.recipe.evaluate.patience
        if self.progress.update == self.progress.validated or not (self.is_milestone or is_last):
            return False
        # Asked last: records are counted one by one.
        return self.corpus.split("valid").symbols_count > 0

    @property
    def is_log_due(self) -> bool:
        """Whether the update just made is followed by a line of the log that has not been written yet."""
        n = self.progress.update
        if n == self.progress.logged:
            return False
        is_last = self.is_cut or n == self.total
        return is_last or n == self.progress.validated or n % max(1, self.total // LOG_LINES) == 0


def build(
    recipe: Recipe,
    share: parallel.Share,
    stack: contextlib.ExitStack,  # keeps the run's folder open, and closes it
    *,
    runs_dir: Path,
    path: Path | None,
    data_dir: str | Path | None,
    start_from: str | Path | None,
    corpus: Corpus | None = None,  # the recipe's text, where it is loaded already
) -> Job:
    """A job at its beginning, or, where `path` is an earlier run, at its last checkpoint."""
    if recipe.train.lanes % share.count:
        raise RecipeError(
            f"{recipe.train.lanes} lanes cannot be shared by {share.count} processes. "
            f"Set train.lanes to a multiple of {share.count}."
        )
    backend = backend_of(recipe, share)
    corpus = load_corpus(recipe, share, data_dir) if corpus is None else corpus
    start = None if start_from is None else checkpoint.load(start_from)
    corpus = _in_symbols_of_start(corpus, recipe, path, start)
    chunks = lanes(recipe, corpus, 0)
    update = _update(recipe, share, corpus, start)
    run: runs.Run | None = None

    def take() -> Path:
        nonlocal run
        run = runs.Run.create(recipe, root=runs_dir) if path is None else runs.Run.open(path)
        return stack.enter_context(run).path

    folder = share.by_first(take)
    job = Job(
        recipe,
        share,
        corpus,
        update,
        folder,
        run,
        Progress(),
        per_epoch=len(chunks),
        total=recipe.train.updates or max(1, round(recipe.train.epochs * len(chunks))),
        facts=corpus_facts(corpus),
        source=_source(recipe, start, folder),
        hardware=hardware(share.device),
        backend=backend,
        no_eight=no_eight(recipe, share),
    )
    if (folder / resume.NAME).exists():
        job.progress = resume.load(folder / resume.NAME, update, job.facts, job.total)

    def put_in_order() -> None:
        earlier.settle_best(folder, job.progress)
        earlier.tidy(folder, job.progress.logged)

    share.by_first(put_in_order)
    return job


def require_apart(corpus: str, written: Path) -> None:
    """Raises DataError where what a command writes would become a part of the folder it reads as its text."""
    text, place = Path(corpus).resolve(), written.resolve()
    if not text.is_dir() or not place.is_relative_to(text):
        return
    if not data.corpus.is_hidden(place.relative_to(text)):
        raise DataError(
            f"{written} lies in the text itself, the folder {corpus}, and would be read with it next time. "
            "Write elsewhere (--runs-dir, or --out of a search), or give the texts a folder of their own."
        )


def load_corpus(recipe: Recipe, share: parallel.Share, data_dir: str | Path | None) -> Corpus:
    """The recipe's text; the first process goes ahead, so that only one unpacks or fetches it."""
    corpus: Corpus | None = None

    def read() -> None:
        nonlocal corpus
        corpus = record_corpus.load(recipe.data, data_dir)

    share.by_first(read)
    return corpus or record_corpus.load(recipe.data, data_dir)


def _in_symbols_of_start(
    corpus: Corpus, recipe: Recipe, path: Path | None, start: Checkpoint | None
) -> Corpus:
    """A text read with the bytes of the model that the run starts from, where that has bytes of its own.

    Those of the text are other ones, unless it is the text that the model was trained on.
    """
    if recipe.data.alphabet != "corpus":
        return corpus
    if start is None and path is not None and earlier.tuned_from(path):
        start = checkpoint.load(path / "last.safetensors")
    if start is None or name_of(start.alphabet) != "corpus":
        return corpus
    return corpus.in_alphabet(start.alphabet)


def lanes(recipe: Recipe, corpus: Corpus, epoch: int) -> Lanes | RecordLanes:
    """The training text's chunks in an epoch; with `rotate` each epoch but the first starts elsewhere."""
    t = recipe.train
    split = corpus.split("train")
    if isinstance(split, RecordSplit):
        return RecordLanes(split, t.lanes, t.chunk, seed=t.seed, epoch=epoch)
    offset = 0
    if t.rotate and epoch:
        offset = int(np.random.default_rng([t.seed, epoch]).integers(split.symbols_count))
    return Lanes(split, t.lanes, t.chunk, trim=True, offset=offset, block=t.block)


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """What must not change about a text while a run over it is interrupted."""
    parts = [corpus.split(name) for name in ("train", "valid", "test")]
    return {
        "symbols": [part.symbols_count for part in parts],
        "alphabet": corpus.alphabet.fingerprint,
        "checksum": corpus.text.checksum(),
    }


def is_another(corpus: Corpus, facts: Mapping[str, Any]) -> bool:
    """Whether a text is not the one of these facts, as far as they go: earlier versions kept fewer."""
    now = corpus_facts(corpus)
    return any(facts.get(key, now[key]) != now[key] for key in ("symbols", "checksum"))


def is_of_another_text(folder: Path, recipe: Recipe, data_dir: str | Path | None) -> bool:
    """Whether a run was made on another text than the recipe's; one that cannot be had says nothing."""
    known = KNOWN.get(recipe.data.corpus)
    if known is not None and known.size:  # its hash is checked wherever it is read
        return False
    with contextlib.suppress(CheckpointError, DataError):
        facts = tensorfile.read_meta(folder / "last.safetensors").get("corpus", {})
        return is_another(record_corpus.load(recipe.data, data_dir), facts)
    return False


def backend_of(recipe: Recipe, share: parallel.Share) -> str:
    """The backend that will run the recurrence, or BackendError if the one asked for cannot."""
    if recipe.model.cell == "tensor-rnn":
        ops.require_plain(recipe.train.backend)
        return "reference"
    B, dtype = recipe.train.lanes // share.count, PRECISIONS[recipe.train.precision]
    zx = torch.zeros(1, 1, 1, dtype=dtype, device=share.device).expand(1, B, 1)
    return ops.chosen(zx, backend=recipe.train.backend)


def no_eight(recipe: Recipe, share: parallel.Share) -> str | None:
    """None, or why a run does not have the 8-bit products that its recipe asks for, and is one in bf16."""
    if recipe.train.precision != "fp8":
        return None
    if recipe.data.records:
        return "records begin inside chunks"
    if recipe.train.backend not in ("auto", "triton"):
        return f"the backend {recipe.train.backend} does not make them"
    dropped = recipe.dropout.hidden
    if dropped > eight.MOST_DROPPED:
        return (
            f"h grows beyond them behind a dropout of {dropped:g} (up to {eight.MOST_DROPPED:g} they serve)"
        )
    lanes, mask = recipe.train.lanes // share.count, dropped > 0
    return packed.no_eight(recipe.model, lanes, mask, share.device)


def hardware(device: torch.device) -> str:
    """The device's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{machine.processor()}, {machine.cores()} cores"


def require_board() -> Any:
    """What makes TensorBoard's writers, or ExtraError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ExtraError("TensorBoard is not installed", "tensorboard", ", or go without") from None
    return SummaryWriter


def _update(
    recipe: Recipe, share: parallel.Share, corpus: Corpus, start: Checkpoint | None
) -> updates.Update:
    model = LanguageModel(recipe.model, corpus.alphabet.size, init=None).float()
    generator = torch.Generator().manual_seed(recipe.train.seed)
    if start is None:
        model.initialise(recipe.init, generator)
    else:
        if start.alphabet != corpus.alphabet:
            raise CheckpointError(
                f"The checkpoint has an alphabet of {start.alphabet.size} symbols, and the corpus "
                f"{corpus.name} another one of {corpus.alphabet.size}. "
                f"Read the text with data.alphabet={name_of(start.alphabet)}, or train a model on it alone."
            )
        if start.model.recipe != recipe.model:
            changed = recipes.differences(vars(recipe.model), vars(start.model.recipe))
            raise CheckpointError(
                f"The model to start from is another one than the recipe's ({'; '.join(changed)}). "
                "Give the recipe it was trained with, or leave --from out."
            )
        _require_predictable(start.model, corpus)
        model.load_state_dict(start.model.state_dict())
    model = model.to(share.device).train()
    model.precision, model.backend = recipe.train.precision, recipe.train.backend
    if share.device.type != "cpu":  # on a CPU masks go on where the weights ended, or they would be alike
        generator = torch.Generator(share.device).manual_seed(recipe.train.seed)
    return updates.make(model, recipe, generator, share)


def _require_predictable(model: LanguageModel, corpus: Corpus) -> None:
    """A symbol that a foreign output layer has no class for cannot be learnt: its loss swamps all others."""
    never, records = impossible(model), corpus.split("all")
    if not never or not isinstance(records, RecordSplit):
        return
    for k, (_, y) in enumerate(records.records(), 1):
        if (bad := y[np.isin(y, never)]).size:
            shown = corpus.alphabet.decode(bad[:1]).decode("ascii", errors="replace")
            raise DataError(
                f"Record {k} of {corpus.name} has {shown!r}, which the model's output layer has no "
                "class for. Take it out of the sequences."
            )


def _source(recipe: Recipe, start: Checkpoint | None, folder: Path) -> dict[str, Any]:
    """What the checkpoints of a run say of their origin: all that was known of the model it starts from."""
    found = earlier.saved_source(folder)
    if found is None:
        found = {} if start is None else {**start.source, "tuned_from": start.meta["fingerprint"]}
        found |= {"convention": recipe.data.convention} if recipe.data.convention else {}
    found.pop("head", None)  # a model imported without one has it from its training
    return found

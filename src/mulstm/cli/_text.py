"""Which text a command reads with a model, in the model's own alphabet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote

from mulstm import data, record_corpus
from mulstm.checkpoint import Checkpoint
from mulstm.data.corpus import Corpus, Split
from mulstm.data.known import KNOWN
from mulstm.errors import CheckpointError, DataError, RecipeError
from mulstm.job import is_another
from mulstm.record_corpus import RecordSplit
from mulstm.records import kind_of


def require_one_meaning(text: str) -> None:
    """Raises DataError where a file or folder here, other than the corpus itself, goes by a corpus's name."""
    path = Path(text)
    if text not in KNOWN or not path.exists():
        return
    if not path.is_file() or path.stat().st_size != KNOWN[text].size:
        raise two_meanings(text, "corpus")


def two_meanings(name: str, kind: str) -> DataError:
    """What to say of a name that stands for two things."""
    return DataError(
        f"{name} is the name of a {kind}, and of a file or folder here. "
        f"Say ./{name} for the latter; for the {kind}, start from another folder."
    )


def is_own(model: Checkpoint, text: str) -> bool:
    """Whether the text that the model was trained on is meant: none is named, or that one by any path.

    Another text of the same name is another text: what is in it decides, where the model knows that. All of
    it is read for that, so it is asked once a command.
    """
    require_one_meaning(text)
    trained = model.recipe.data
    if not text or not KNOWN.keys().isdisjoint({text, trained.corpus}):
        return text in ("", trained.corpus)
    if "checksum" not in model.meta.get("corpus", {}):  # of an earlier version
        return Path(text).resolve() == Path(trained.corpus).resolve()
    try:
        return not _differs(model, _own(model, text, None))
    except (DataError, RecipeError):  # it cannot even be read as that one was
        return False


def part_of(
    model: Checkpoint,
    text: str,
    own: bool,  # what is_own says
    split: str,
    data_dir: Path | None,
    remedy: str = "",  # what to do where the model's own text cannot be had
) -> Split:
    """A part of `text`, or of the text the model was trained on where none is given.

    A user's own text is read whole unless a part is named. Bytes that the model does not know are
    an error when they are met.
    """
    if own:
        trained = model.recipe.data
        if not text:
            _require_origin(model, remedy)
        try:
            corpus = _own(model, text, data_dir)
        except DataError as fault:
            what, _, usual = str(fault).partition(". ")
            told = f"The model's own text cannot be had: {what.rstrip('.')}. {remedy or usual}"
            raise DataError(told.rstrip()) from fault
        if not text:
            _require_same(model, corpus, remedy)
        usual = "valid" if trained.records else "test"
    else:
        _require_one_text(model, text)
        corpus = data.load(text, data_dir=data_dir)
        usual = "test" if text in KNOWN else "all"
    part = corpus.split(split or usual)
    return part if isinstance(part, RecordSplit) else replace(part, alphabet=model.alphabet)


def _own(model: Checkpoint, text: str, data_dir: Path | None) -> Corpus:
    """The text the model was trained on, which may be elsewhere now."""
    trained = model.recipe.data
    trained = replace(trained, corpus=text or trained.corpus)
    # Whatever the alphabet, the model's own is put in place later.
    return record_corpus.load(trained if trained.records else replace(trained, alphabet="bytes"), data_dir)


def opened(model: Checkpoint, prompt: str) -> bytes:
    """A prompt after what a model of records has always read first; one that it cannot read is an error.

    A protein's start symbol is no byte: `sample` puts it there.
    """
    given = prompt.encode(errors="surrogateescape")  # the bytes that were given, UTF-8 or not
    model.convention.encoded(given, "The prompt")
    before, _ = model.convention.around
    return model.alphabet.decode(model.convention.start[:before]) + given


def is_protein(model: Checkpoint) -> bool:
    """Whether its texts are proteins."""
    return bool(model.source.get("convention") == "protein")


def _require_origin(model: Checkpoint, remedy: str) -> None:
    if not model.tells_its_training:
        usual = 'Use "mulstm score".' if is_protein(model) else "Give a text."
        raise CheckpointError(f"This model does not say what it was trained on. {remedy or usual}")


def _require_same(model: Checkpoint, corpus: Corpus, remedy: str) -> None:
    if _differs(model, corpus):
        raise DataError(
            f"{model.recipe.data.corpus} is not the text this model was trained on, or has changed since. "
            f"{remedy or 'Give the text by name to measure all of it.'}"
        )


def _differs(model: Checkpoint, corpus: Corpus) -> bool:
    return is_another(corpus, model.meta.get("corpus", {}))


def _require_one_text(model: Checkpoint, text: str) -> None:
    if is_protein(model) or (model.recipe.data.records and kind_of(text) != "lines"):
        raise DataError(
            f"This model reads records, each for itself, and {text} would be read as one text. "
            f'Use "mulstm score MODEL {quote(text)}".'
        )

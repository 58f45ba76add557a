"""Which text a command reads with a model, in the model's own alphabet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from mulstm import data, record_corpus
from mulstm.data.corpus import Split
from mulstm.data.known import KNOWN

if TYPE_CHECKING:
    from mulstm.checkpoint import Checkpoint


def part_of(model: Checkpoint, text: str, split: str, data_dir: Path | None) -> Split:
    """A part of `text`, or of the text the model was trained on where none is given.

    A user's own text is read whole unless a part is named. Bytes that the model does not know are
    an error when they are met.
    """
    trained = model.recipe.data
    name = text or trained.corpus
    own = bool(text) and text not in {known.name for known in KNOWN} and text != trained.corpus
    if name == trained.corpus and trained.records:
        return record_corpus.load(trained, data_dir).split(split or "valid")
    corpus = data.load(
        name,
        data_dir=data_dir,
        split="" if own else trained.split if name == trained.corpus else "",
        protocol=trained.protocol if name == trained.corpus else "",
    )
    part = corpus.split(split or ("all" if own else "test"))
    return dataclasses.replace(part, alphabet=model.alphabet)

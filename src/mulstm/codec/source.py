"""What MODEL means on the command line of the codec: an integer model, or a checkpoint to make one from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm import checkpoint, tensorfile
from mulstm.checkpoint import Checkpoint
from mulstm.codec import integer
from mulstm.codec.integer import IntegerModel
from mulstm.codec.quantize import quantize
from mulstm.errors import CheckpointError

SUFFIX = ".integer.safetensors"


def open_model(path: Path) -> tuple[IntegerModel, Path, bool]:
    """The integer model, its file, and whether it had to be made; a run's folder stands for its model.

    What `mulstm quantize` left beside a checkpoint is taken if it was made from this very one.
    """
    file = checkpoint.find(path)
    if integer.is_one(file):
        return integer.load(file), file, False
    kept = default_path(file)
    with contextlib.suppress(CheckpointError):  # a damaged copy, or one of another arithmetic, is made again
        if is_of(kept, file):
            return integer.load(kept), kept, False
    return quantize_checkpoint(checkpoint.load(file)), file, True


def quantize_checkpoint(model: Checkpoint | str | os.PathLike[str]) -> IntegerModel:
    """The integer model of a checkpoint, or of the one at a path: the same on every machine."""
    loaded = checkpoint.of(model)
    loaded.require_head()
    weights = {name: _array(tensor) for name, tensor in loaded.model.state_dict().items()}
    # Weights that were changed since they were loaded are no longer those of the file.
    as_stored = checkpoint.storage_of(loaded) is not None
    parent = (
        loaded.meta["fingerprint"] if as_stored else checkpoint.fingerprint(loaded.model, loaded.alphabet)
    )
    return quantize(weights, loaded.model.recipe, loaded.alphabet, str(parent))


def _array(tensor: Tensor) -> NDArray[Any]:
    """As numpy has it, which knows no bfloat16: float32 holds the same numbers."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)


def is_of(kept: Path, file: Path) -> bool:
    """Whether an integer model is there, and was made from this very checkpoint."""
    if not kept.is_file() or not integer.is_one(kept):
        return False
    return bool(tensorfile.read_meta(kept).get("parent") == tensorfile.read_meta(file).get("fingerprint"))


def default_path(file: Path) -> Path:
    """Where `mulstm quantize` puts the integer model of a checkpoint."""
    return file.with_name(file.name.removesuffix(".safetensors") + SUFFIX)

"""One .safetensors file is one model: weights, recipe and alphabet together, checked on the way back in."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mulstm
from mulstm import console, runs, tensorfile
from mulstm import recipe as recipes
from mulstm.convention import Convention
from mulstm.data.alphabet import Alphabet
from mulstm.errors import BackendError, CheckpointError, MulstmError
from mulstm.nn.model import LanguageModel, bare
from mulstm.recipe import ModelRecipe, Recipe

MODELS = "MULSTM_MODELS"  # a folder of models that are found by name
# How matrices are stored; beside bf16 and int8 vectors are fp32, they are small and matter most. (The tensor
# RNN's gains of weight norm, one a symbol and row, are a matrix.)
STORAGES = ("fp32", "fp64", "bf16", "int8")
SCALE = ".scale"  # int8: name + SCALE holds one factor a row
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Checkpoint:
    """A model and what is known of it."""

    model: LanguageModel
    alphabet: Alphabet
    recipe: Recipe
    meta: dict[str, Any]  # metrics, source, corpus, storage, fingerprint, the version that wrote it

    @property
    def source(self) -> dict[str, Any]:
        """Where the model came from and how its texts are written; empty where there is nothing to say."""
        return self.meta.get("source") or {}

    @property
    def convention(self) -> Convention:
        """How its texts are written; a convention of a later version is an error."""
        return Convention.of(self.alphabet, self.source, opens=bool(self.recipe.data.records))

    @property
    def tells_its_training(self) -> bool:
        """An imported model's recipe has no name, and of data and optimiser only the defaults."""
        return bool(self.recipe.name or self.meta.get("corpus"))

    def require_head(self) -> None:
        """Complains about a model that can represent texts, but not predict them."""
        if not self.source.get("head", True):
            raise CheckpointError(
                "This model was imported without its output layer, so it cannot predict. "
                "Import the file of a language model, or use embed."
            )


def save(
    path: str | os.PathLike[str],
    model: LanguageModel,
    alphabet: Alphabet,
    *,
    recipe: Recipe | None = None,
    metrics: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    corpus: Mapping[str, Any] | None = None,  # what tells the text it was trained on from others
    storage: str | None = None,
) -> str:
    """Replaces the file in one step and returns its fingerprint; without `storage` nothing is rounded.

    What `load` would refuse is refused here: a file that may be there already stays as it was.
    """
    model = bare(model)
    alphabet.require_size(model.alphabet_size)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    plain = _shapes(Path(path), model.recipe, model.alphabet_size, len(weights))
    if odd := sorted(plain.keys() ^ weights.keys()):
        raise CheckpointError(
            f"The model has parametrizations or is pruned ({', '.join(odd[:4])}), which no file holds. Make "
            "them part of its weights first: parametrize.remove_parametrizations, prune.remove."
        )
    if storage is None:
        storage = "fp64" if any(tensor.dtype == torch.float64 for tensor in weights.values()) else "fp32"
    tensors = _pack(weights, storage)
    if name := _not_finite(_unpack(tensors, storage)):
        raise CheckpointError(
            f"The weights {name} hold numbers that are not finite in {storage}, and are not written. "
            "Train again from an earlier checkpoint, at a lower rate."
        )
    whole = dataclasses.replace(recipe or Recipe(), model=model.recipe)
    recipes.from_dict(recipes.as_dict(whole), source="the recipe of this model")
    meta: dict[str, Any] = {
        "kind": "model",
        "version": mulstm.__version__,
        "storage": storage,
        "recipe": recipes.as_dict(whole),
        "alphabet": alphabet.to_json(),
        "metrics": dict(metrics or {}),
        "source": dict(source or {}),
        "corpus": dict(corpus or {}),
        "fingerprint": _digest(tensors, model.recipe, alphabet),
    }
    try:
        tensorfile.write(Path(path), tensors, meta)
    except (TypeError, ValueError) as fault:  # of JSON
        raise CheckpointError(
            f"What is to be told of the model cannot be written ({fault}). Give names and finite numbers."
        ) from fault
    return str(meta["fingerprint"])


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Checkpoint:
    """The model on `device`, ready to be used; a run folder stands for the model that its record is of."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"The model is wanted on {device} and there is no GPU here. Load it on the CPU.")
    file = find(path)
    return tensorfile.undisturbed(file, lambda: _load(file, device))


def of(model: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint that is given, or the one at the path: a bare model knows nothing of texts."""
    if isinstance(model, Checkpoint):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(
            f"A {type(model).__name__} does not know how its texts are written. "
            "Give a path, or the Checkpoint that load_checkpoint returns."
        )
    return load(model)


def _load(file: Path, device: str | torch.device) -> Checkpoint:
    meta = tensorfile.read_meta(file)
    if meta.get("kind") == "integer model":
        raise CheckpointError(
            f"{file} is an integer model, which only compress and decompress read. "
            "Give the checkpoint it was made from."
        )
    if meta.get("kind") != "model":
        raise CheckpointError(
            f"{file} holds the training state of a run, not a model. Give last.safetensors beside it."
        )
    try:
        meta = {"metrics": {}, "source": {}} | meta
        recipe = recipes.from_dict(tensorfile.as_object(meta["recipe"]))
        alphabet = Alphabet.from_json(meta["alphabet"])
        storage = str(meta["storage"])
        stated = str(meta["fingerprint"])
    except (*tensorfile.UNREADABLE, MulstmError) as fault:
        raise CheckpointError(
            f"The description inside {file} cannot be read ({fault}). Take another copy, or train again."
        ) from fault
    tensors = tensorfile.load(file)
    _check_tensors(file, tensors, _shapes(file, recipe.model, alphabet.size, len(tensors)), storage)
    with torch.device("cpu"):  # whatever is usual elsewhere
        model = LanguageModel(recipe.model, alphabet.size, init=None)
    model = model.double() if storage == "fp64" else model.float()
    if _digest(tensors, recipe.model, alphabet) != stated:
        raise tensorfile.changed(file, "fingerprint")
    weights = _unpack(tensors, storage)
    if name := _not_finite(weights):
        raise CheckpointError(
            f"The weights {name} in {file} hold numbers that are not finite. Take an earlier checkpoint."
        )
    model.load_state_dict(weights)
    return Checkpoint(model.to(device).eval(), alphabet, recipe, meta)


def find(path: str | os.PathLike[str]) -> Path:
    """The file meant: itself, the model of a run folder that counts, or a released model by name.

    A folder of runs stands for the newest of them that has a model, a hub's folder for the one in it.
    """
    given = Path(path)
    if not os.fspath(path):  # else the current folder
        raise CheckpointError("The model's name is empty. Give a file, the folder of a run, or a name.")
    if given.is_dir():
        if found := _model_in(given) or _newest_below(given):
            return found
        if runs.is_run(given):
            raise CheckpointError(
                f"The run in {given} has kept no model: it has just begun, or ended before its first. "
                "Wait for it, or train again."
            )
        raise CheckpointError(
            f"There is no checkpoint in the folder {given}. Train first, or give a .safetensors file."
        )
    if given.is_file():
        return given
    known = released()
    if str(given) in known:
        return known[str(given)]
    names = (
        ", ".join(known)
        or f"one in the folder that {MODELS} names (none is in {' or '.join(map(str, _folders()))})"
    )
    raise CheckpointError(
        f"There is no checkpoint at {given}. "
        f"Give a .safetensors file, the folder of a run, or a model by name: {names}."
    )


def _newest_below(folder: Path) -> Path | None:
    """The model of the newest run that has one; an older run must not stand for one that has just begun."""
    newest = None
    for run in runs.all_below(folder):
        newest = newest or run
        if found := _model_in(run):
            if run != newest:
                console.note(f"{newest} ended before its first model: {run} is taken instead")
            return found
        if runs.is_held(run):
            raise CheckpointError(
                f"The newest run in {folder}, {run.name}, has just begun and kept no model yet. "
                "Wait for it, or give the folder of another."
            )
    return None


def _model_in(folder: Path) -> Path | None:
    # The best is there where the recipe has patience; else the last counts.
    names = ("best.safetensors", "last.safetensors", "model.safetensors")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def released() -> dict[str, Path]:
    """Models that are found by name: in $MULSTM_MODELS, in ./models, and those that come with the source."""
    found: dict[str, Path] = {}
    for folder in (*_folders(), Path(__file__).resolve().parents[2] / "models"):
        for file in sorted(folder.glob("*.safetensors")):
            found.setdefault(file.stem, file)
    return found


def _folders() -> list[Path]:
    return [Path(folder) for folder in (os.environ.get(MODELS), "models") if folder]


def fingerprint(model: LanguageModel, alphabet: Alphabet) -> str:
    """A hash of everything that decides what the model computes: weights, wiring, alphabet."""
    return _digest(model.state_dict(), model.recipe, alphabet)


def storage_of(loaded: Checkpoint) -> str | None:
    """How its file stores the model, or None where the weights are no longer those of a file."""
    storage = loaded.meta.get("storage")
    if storage not in STORAGES:
        return None
    tensors = _pack(loaded.model.state_dict(), storage)
    stored = _digest(tensors, loaded.model.recipe, loaded.alphabet)
    return storage if stored == loaded.meta.get("fingerprint") else None


def _pack(weights: Mapping[str, Tensor], storage: str) -> dict[str, Tensor]:
    if storage not in STORAGES:
        raise CheckpointError(f"There is no storage {storage!r}. Choose one of: {', '.join(STORAGES)}.")
    packed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        value = tensor.to("cpu")
        if storage in ("fp32", "fp64"):
            packed[name] = value.to(DTYPES[storage])
        elif value.dim() < 2:
            packed[name] = value.float()
        elif storage == "bf16":
            packed[name] = value.to(torch.bfloat16)
        else:
            largest = value.float().abs().amax(dim=-1)
            scale = torch.where(largest == 0, torch.ones_like(largest), largest / 127)  # NaN stays NaN
            packed[name] = torch.round(value.float() / scale.unsqueeze(-1)).to(torch.int8)
            packed[name + SCALE] = scale
    return packed


def _unpack(tensors: Mapping[str, Tensor], storage: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if storage == "int8" and name.endswith(SCALE):
            continue
        if tensor.dtype == torch.int8:
            weights[name] = tensor.float() * tensors[name + SCALE].unsqueeze(-1)
        else:
            weights[name] = tensor if storage == "fp64" else tensor.float()
    return weights


def _shapes(file: Path, model: ModelRecipe, alphabet_size: int, tensors: int) -> dict[str, Tensor]:
    """The tensors a model has, without their memory: a file must not make us take what it does not fill."""
    # Each layer has a tensor at least; sizes that overflow are no tensor's.
    with contextlib.suppress(RuntimeError, TypeError, OverflowError):
        if model.layers <= tensors:
            with torch.device("meta"):
                return LanguageModel(model, alphabet_size, init=None).state_dict()
    raise CheckpointError(
        f"The recipe in {file} (layers = {model.layers}, hidden = {model.hidden}, embedding = "
        f"{model.embedding}) is not that of its {tensors} tensors. Take another copy, or train again."
    )


def _check_tensors(
    file: Path, tensors: Mapping[str, Tensor], model: Mapping[str, Tensor], storage: str
) -> None:
    """Names, shapes and types must be exactly those the recipe inside the file calls for."""
    if storage not in STORAGES:
        raise CheckpointError(
            f"{file} stores its weights as {storage!r}, which is unknown. Install a newer mulstm."
        )
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in model.items():
        matrix = tensor.dim() >= 2
        expected[name] = (
            tuple(tensor.shape),
            DTYPES[storage] if matrix or storage == "fp64" else torch.float32,
        )
        if matrix and storage == "int8":
            expected[name + SCALE] = (tuple(tensor.shape[:-1]), torch.float32)
    faults = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    faults += [f"{name} is not known" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        found = (tuple(tensors[name].shape), tensors[name].dtype)
        if found != expected[name]:
            faults.append(f"{name} is {_spell(*found)} instead of {_spell(*expected[name])}")
    if faults:
        raise CheckpointError(
            f"The weights in {file} do not fit the recipe stored with them: {'; '.join(faults[:4])}. "
            "Take another copy of the file, or train again."
        )


def _not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with a number that is none."""
    for name, tensor in weights.items():
        # Least and most take one pass without memory of its own, and both are NaN where one number is.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            return name
    return None


def _spell(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"


def _digest(tensors: Mapping[str, Tensor], model: ModelRecipe, alphabet: Alphabet) -> str:
    # Only what differs from the defaults: a key added to recipes later must not change old fingerprints.
    plain = dataclasses.asdict(ModelRecipe())
    wiring = {key: value for key, value in dataclasses.asdict(model).items() if value != plain[key]}
    return tensorfile.checksum([wiring, alphabet.to_json()], tensors)

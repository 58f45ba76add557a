"""What every importer and exporter shares: our own parameter names as numpy arrays, and strict checks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mulstm import files
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.ops.reference import GATES
from mulstm.recipe import ModelRecipe

Array = NDArray[np.float32]
AnyArray = NDArray[Any]

BYTES = 256  # symbols of a model of all bytes

# A symbol that a foreign head has no class for keeps its row in W_out; this bias makes its probability
# exactly zero in every precision, and stays finite so that no inf - inf can appear.
NEVER = -1e4


@dataclass(frozen=True)
class Weights:
    """A model outside torch: recipe, parameters under our names, alphabet, and where it came from."""

    recipe: ModelRecipe
    arrays: dict[str, Array]
    alphabet: Alphabet
    source: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrays.update({name: np.ascontiguousarray(array) for name, array in self.arrays.items()})

    def embedding(self) -> Array:
        """(N, E): the embedding, or the identity for one-hot input."""
        if self.recipe.embedding:
            return self.arrays["embedding"]
        return np.eye(self.alphabet.size, dtype=np.float32)

    def split(self, layer: int, name: str) -> tuple[Array, Array]:
        """V and g of a matrix such as "mx"; without weight norm g is the length of each row."""
        V = self.arrays[f"layers.{layer}.W_{name}"]
        if self.recipe.weight_norm:
            return V, self.arrays[f"layers.{layer}.g_{name}"].reshape(-1)
        length = np.linalg.norm(V.astype(np.float64), axis=1).astype(np.float32)
        # A row of zeros has no direction; any V with g = 0 is that row, and none divides by zero.
        return np.where(length[:, None] > 0, V, np.float32(1)), length

    def plain(self, layer: int, name: str) -> Array:
        """The matrix itself, with its weight norm multiplied out."""
        V, g = self.arrays[f"layers.{layer}.W_{name}"], self.arrays.get(f"layers.{layer}.g_{name}")
        if g is None:
            return V
        length = np.linalg.norm(V.astype(np.float64), axis=1)
        return np.asarray(V * (g.reshape(-1) / np.maximum(length, 1e-12))[:, None], dtype=np.float32)

    def head(self) -> tuple[Array, Array]:
        """W_out and b_out (zeros where the model has none)."""
        none = np.zeros(self.alphabet.size, dtype=np.float32)
        return self.arrays["W_out"], self.arrays.get("b_out", none)


def layer_recipe(
    *, hidden: int, embedding: int, layers: int = 1, weight_norm: bool = True, output_bias: bool = True
) -> ModelRecipe:
    """The recipe of a foreign multiplicative LSTM: they all have the paper's unit and plain stacking."""
    return ModelRecipe(
        cell="mlstm",
        unit="standard",
        hidden=hidden,
        layers=layers,
        skip=False,
        embedding=embedding,
        weight_norm=weight_norm,
        output_bias=output_bias,
    )


def require(
    weights: Weights,
    name: str,
    *,
    layers: int | None = None,
    alphabets: Sequence[Alphabet] = (),  # none: the sorted bytes of any text
    headless: bool = False,  # whether the format has a form without an output layer
) -> None:
    """Refuse a model that the format cannot hold, with every reason at once."""
    recipe, faults = weights.recipe, []
    if recipe.cell != "mlstm" or recipe.unit != "standard":
        faults.append(f"its cell is {recipe.cell}/{recipe.unit}, not mlstm/standard")
    if recipe.skip and recipe.layers > 1:
        faults.append("it has skip wiring")
    if layers is not None and recipe.layers != layers:
        faults.append(f"it has {recipe.layers} layers, not {layers}")
    if not headless and not weights.source.get("head", True):
        faults.append("it was imported without its output layer")
    if fault := _foreign_symbols(weights.alphabet, alphabets):
        faults.append(fault)
    if faults:
        raise CheckpointError(
            f"The {name} format cannot hold this model: {'; '.join(faults)}. "
            'Choose another format: "mulstm export --help" lists them.'
        )


def _foreign_symbols(alphabet: Alphabet, known: Sequence[Alphabet]) -> str:
    N = alphabet.size
    if not known:
        is_text = alphabet == Alphabet.distinct(alphabet.symbols)
        return "" if is_text else f"its {N} symbols are not the sorted bytes of a text"
    if alphabet in known:
        return ""
    sizes = [other.size for other in known]
    return f"its alphabet has {N} symbols, " + (
        "but other ones" if N in sizes else f"not {' or '.join(map(str, sizes))}"
    )


def alphabet_of(N: int, given: Alphabet | None, known: Sequence[Alphabet], where: str) -> Alphabet:
    """Of a file that does not say it: the one given, or the known one of its size."""
    found = given or next((one for one in known if one.size == N), None)
    if found is None:
        raise CheckpointError(
            f"{where} has {N} symbols and does not say which bytes they are. Give --vocabulary FILE: the "
            "text it was trained on, or any file of just those bytes; symbols stand in sorted order."
        )
    if found.size != N:
        raise CheckpointError(
            f"{where} has {N} symbols, but the text given has {found.size} distinct bytes. "
            "Give the whole text that the model was trained on."
        )
    return found


def from_order(z: AnyArray, order: Sequence[str], *, interleaved: bool = False) -> AnyArray:
    """Foreign gate blocks along axis 0 in our order."""
    H = z.shape[0] // len(GATES)
    blocks = z.reshape(H, 4, *z.shape[1:]).swapaxes(0, 1) if interleaved else z.reshape(4, H, *z.shape[1:])
    return blocks[[order.index(gate) for gate in GATES]].reshape(z.shape)


def to_order(z: AnyArray, order: Sequence[str], *, interleaved: bool = False) -> AnyArray:
    """Our gate blocks along axis 0 in a foreign order."""
    H = z.shape[0] // len(GATES)
    blocks = z.reshape(4, H, *z.shape[1:])[[GATES.index(gate) for gate in order]]
    return (blocks.swapaxes(0, 1) if interleaved else blocks).reshape(z.shape)


def checked(
    found: Mapping[str, AnyArray], expected: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Array]:
    """The arrays as float32 when keys, shapes, types and values are all as expected; else every fault."""
    faults = [f"{key} {shape} is missing" for key, shape in expected.items() if key not in found]
    faults += [f"{key} {found[key].shape} is not known" for key in found if key not in expected]
    arrays: dict[str, Array] = {}
    for key, shape in expected.items():
        if key not in found:
            continue
        fault = _fault(found[key], shape)
        if fault:
            faults.append(f"{key} {fault}")
        else:
            arrays[key] = np.ascontiguousarray(found[key], dtype=np.float32)
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(f"{where}: {shown}. Check that the file is whole and of the format named.")
    return arrays


def _fault(array: AnyArray, shape: tuple[int, ...]) -> str:
    if array.shape != shape:
        return f"should have shape {shape} but has {array.shape}"
    if array.dtype.kind != "f":
        return f"should be float32 but is {array.dtype}"
    if not np.isfinite(array).all():
        return "holds values that are not finite"
    if array.dtype.itemsize > 4 and not np.array_equal(array.astype(np.float32), array):
        return f"is {array.dtype} with digits that float32 cannot hold"
    return ""


def without_prefix(found: dict[str, AnyArray], prefix: str, where: str) -> dict[str, AnyArray]:
    """The arrays by their names without a prefix that some files have."""
    bare = {key.removeprefix(prefix): array for key, array in found.items()}
    if len(bare) < len(found):
        twice = next(key for key in found if prefix + key in found)
        raise CheckpointError(f"{where} holds {twice} with and without {prefix}. Take one of the two away.")
    return bare


def axis_size(found: Mapping[str, AnyArray], key: str, axis: int, ndim: int, where: str) -> int:
    """One size of a key array, from which the other shapes follow."""
    if key not in found:
        known = ", ".join(sorted(found)[:6]) or "nothing"
        raise CheckpointError(
            f"{where}: {key} is missing (found {known}). Check that the file is of the format named."
        )
    if found[key].ndim != ndim or 0 in found[key].shape:
        raise CheckpointError(
            f"{where}: {key} should have {ndim} axes but has shape {found[key].shape}. "
            "Check that the file is whole and of the format named."
        )
    return int(found[key].shape[axis])


def layer_count(numbers: Mapping[str, str], where: str) -> int:
    """How many layers there are, from the layer's number in each key that has one."""
    for key, digits in numbers.items():
        # Every layer has arrays of its own, so a higher number is a fault, and nobody is to count up to it.
        if len(digits) > 9 or int(digits) >= len(numbers):
            raise CheckpointError(
                f"{where}: {key:.80} is of layer {digits:.20}, but only {len(numbers)} arrays are of layers. "
                "Check that the file is whole and of the format named."
            )
    return 1 + max(map(int, numbers.values()), default=0)


def sha256(path: Path) -> str:
    """Of a file's bytes; of a folder, over its sorted names and their hashes."""
    if path.is_dir():
        lines = [f"{p.name} {sha256(p)}\n" for p in sorted(path.iterdir()) if p.is_file()]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    return files.sha256(plain_file(path))


def existing(path: str | Path, kind: str) -> Path:
    """The path, when a file or a folder is there."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Give the path of {kind}.")
    return path if path.is_dir() else plain_file(path)


def plain_file(path: Path) -> Path:
    """The path of a file that ends; a device or a pipe may not."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no plain file. Give the path of one.")
    return path

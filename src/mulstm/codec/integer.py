"""The integer network as data: what a decoder must be given, in one file with one fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm import tensorfile
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError, MulstmError
from mulstm.recipe import MULTIPLICATIVE

KIND = "integer model"
ARITHMETIC = 1  # changes when the same file would give other tables
CELLS = ("mlstm", "lstm", "milstm", "mrnn", "rnn")
UNITS = ("standard", "initial", "initial-text", "tanh")
WIDEST = 1 << 14  # sums of that many products of int8 numbers leave room for the multiplications after them
SHIFT = 24  # every multiplier R counts 2**-24
MOST_E_M = 16
MOST_RATE = 1 << 20
H_DROP = 7  # bits of h that the learner leaves out, at most
ACT_BITS = 14  # h counts 2**-14
ACT_MOST = (1 << ACT_BITS) - 1
C_BITS = 16  # c counts 2**-16
PX_BITS = 12  # MI-LSTM's factor counts 2**-12
EXACT = 1 << 52  # no sum or product reaches it, so that float64 may hold all of them
PLANES = 129  # the most that a product with planes makes of a weight

Int8 = NDArray[np.int8]
Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class IntegerLayer:
    """One layer; what a cell or a place in the stack does not have is None. Tables have N rows, or one."""

    zx: Int16  # (N or 1, Z)  W_zx x + b, counting 2**-10
    W_zm: Int8  # (Z, H)
    R_zm: Int32  # (Z)         what a sum of W_zm counts, times 2**24
    mx: Int16 | None = None  # (N or 1, H)  the factor of a_t = W_mh h, scaled for each unit
    e_m: NDArray[np.uint8] | None = None  # (H)  left shift of that factor
    W_mh: Int8 | None = None  # (H, H)
    W_ml: Int8 | None = None  # (H, H)      from the layer below
    R_ml: Int32 | None = None  # (H)
    W_zl: Int8 | None = None  # (Z, H)      from the layer below
    R_zl: Int32 | None = None  # (Z)
    px: Int16 | None = None  # (N, Z)       MI-LSTM's factor, counting 2**-12
    b_h: Int32 | None = None  # (H)         inside the last tanh, counting 2**-16


@dataclass(frozen=True)
class IntegerModel:
    """An integer network. Two of the same fingerprint give the same tables, on every machine."""

    cell: str
    unit: str
    hidden: int
    skip: bool  # the output layer sees every layer
    alphabet: Alphabet
    layers: tuple[IntegerLayer, ...]
    W_out: Int8  # (N, H), with skip wiring (N, layers * H)
    R_out: Int32  # (N)
    b_out: Int32  # (N)  counting 2**-10 bits
    h_mean: Int16  # (H or layers * H)  what the learner takes h less of
    # (3 or 4)  how fast it learns: at first, at least, and symbols until half the first; then the bits of h
    # that it leaves out, H_DROP where nothing is said
    rate: Int32
    parent: str  # fingerprint of the checkpoint it was made from

    def tensors(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, as in the file."""
        named: dict[str, NDArray[Any]] = {
            "W_out": self.W_out,
            "R_out": self.R_out,
            "b_out": self.b_out,
            "h_mean": self.h_mean,
            "rate": self.rate,
        }
        for k, layer in enumerate(self.layers):
            for field in fields(layer):
                value = getattr(layer, field.name)
                if value is not None:
                    named[f"layers.{k}.{field.name}"] = value
        return named

    def facts(self) -> dict[str, Any]:
        """What decides the computation beside the arrays."""
        return {
            "arithmetic": ARITHMETIC,
            "cell": self.cell,
            "unit": self.unit,
            "hidden": self.hidden,
            "skip": self.skip,
            "layers": len(self.layers),
            "alphabet": self.alphabet.to_json(),
        }

    @property
    def h_drop(self) -> int:
        """How many bits of h the learner leaves out."""
        return int(self.rate[3]) if len(self.rate) > 3 else H_DROP

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of the facts and the arrays; not of the parent, which computes nothing."""
        digest = hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode())
        named = self.tensors()
        for name in sorted(named):
            array = np.ascontiguousarray(named[name])
            digest.update(f"\n{name} {array.dtype.name} {array.shape}\n".encode())
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.digest()


def save(path: Path, model: IntegerModel) -> None:
    """One safetensors file."""
    tensorfile.write(path, *_parts(model))


def size_of(model: IntegerModel) -> int:
    """The bytes of that file."""
    return tensorfile.size_of(*_parts(model))


def _parts(model: IntegerModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    meta = {
        "kind": KIND,
        "facts": model.facts(),
        "parent": model.parent,
        "fingerprint": model.fingerprint.hex(),
        "more": {},  # of the format: room for notes, which compute nothing
    }
    return {name: torch.from_numpy(np.array(array)) for name, array in model.tensors().items()}, meta


def is_one(path: Path) -> bool:
    """Whether the file says of itself that it is an integer model; `load` tells what else is wrong."""
    try:
        return tensorfile.read_meta(path).get("kind") == KIND
    except CheckpointError:
        return False


def load(path: Path) -> IntegerModel:
    """The model of such a file; every array is checked before it is used."""
    tensors, meta = tensorfile.read(path, KIND)
    try:
        facts = meta["facts"]
        if facts["arithmetic"] != ARITHMETIC:
            raise CheckpointError(
                f"{path} is made for arithmetic {facts['arithmetic']} and this version computes arithmetic "
                f"{ARITHMETIC}. Use the version of mulstm that wrote it, or quantize the checkpoint again."
            )
        model = _assemble(facts, {n: t.numpy() for n, t in tensors.items()}, str(meta["parent"]))
        stated = str(meta["fingerprint"])
    except tensorfile.UNREADABLE as fault:
        raise CheckpointError(
            f"The description inside {path} cannot be read ({fault}). Take another copy, or quantize again."
        ) from fault
    if model.fingerprint.hex() != stated:
        raise CheckpointError(
            f"The contents of {path} do not match their fingerprint: it was changed or damaged. "
            "Take another copy of the file, or quantize the checkpoint again."
        )
    return model


def _assemble(facts: dict[str, Any], named: dict[str, NDArray[Any]], parent: str) -> IntegerModel:
    try:
        alphabet = Alphabet.from_json(facts["alphabet"])
    except MulstmError as fault:
        raise ValueError(str(fault)) from fault
    layers = []
    for k in range(int(facts["layers"])):
        prefix = f"layers.{k}."
        layers.append(
            IntegerLayer(**{n.removeprefix(prefix): a for n, a in named.items() if n.startswith(prefix)})
        )
    model = IntegerModel(
        cell=str(facts["cell"]),
        unit=str(facts["unit"]),
        hidden=int(facts["hidden"]),
        skip=bool(facts["skip"]),
        alphabet=alphabet,
        layers=tuple(layers),
        W_out=named["W_out"],
        R_out=named["R_out"],
        b_out=named["b_out"],
        h_mean=named["h_mean"],
        rate=named["rate"],
        parent=parent,
    )
    if model.tensors().keys() != named.keys():
        raise ValueError(f"unknown arrays {sorted(named.keys() - model.tensors().keys())[:3]}")
    check(model)
    return model


def check(model: IntegerModel) -> None:
    """Raises ValueError unless every array has the shape, type and bounds the arithmetic counts on."""
    H, N, L = model.hidden, model.alphabet.size, len(model.layers)
    if not L:
        raise ValueError("there are no layers")
    if model.cell not in CELLS or model.unit not in UNITS or not 1 <= H * (L if model.skip else 1) <= WIDEST:
        raise ValueError(f"no integer arithmetic for cell {model.cell}, unit {model.unit}, hidden {H}")
    Z = H if model.unit == "tanh" else 4 * H
    _expect("W_out", model.W_out, np.int8, (N, H * (L if model.skip else 1)))
    _expect("R_out", model.R_out, np.int32, (N,))
    _expect("b_out", model.b_out, np.int32, (N,))
    if (
        int((reach(model.W_out, model.R_out) + (np.abs(model.b_out.astype(np.int64)) << SHIFT)).max())
        >= EXACT
    ):
        raise ValueError("sums of W_out go too far")
    _expect("h_mean", model.h_mean, np.int16, model.W_out.shape[1:])
    _expect("rate", model.rate, np.int32, (3,) if model.rate.shape == (3,) else (4,))
    first, least, haste = map(int, model.rate[:3])
    if not 0 <= least <= first <= MOST_RATE or haste < 1 or not 1 <= model.h_drop <= H_DROP:
        raise ValueError(f"rate is {model.rate.tolist()}")
    multiplicative = model.cell in MULTIPLICATIVE
    for k, layer in enumerate(model.layers):
        sees_symbol, sees_layer = k == 0 or model.skip, k > 0
        rows = N if sees_symbol else 1
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
            "zx": (np.int16, (rows, Z)),
            "W_zm": (np.int8, (Z, H)),
            "R_zm": (np.int32, (Z,)),
        }
        if multiplicative:
            wanted |= {"mx": (np.int16, (rows, H)), "e_m": (np.uint8, (H,)), "W_mh": (np.int8, (H, H))}
        if sees_layer:
            wanted |= {"W_zl": (np.int8, (Z, H)), "R_zl": (np.int32, (Z,))}
        if sees_layer and multiplicative:
            wanted |= {"W_ml": (np.int8, (H, H)), "R_ml": (np.int32, (H,))}
        if model.cell == "milstm":
            wanted["px"] = (np.int16, (rows, Z))
        if model.unit == "initial":
            wanted["b_h"] = (np.int32, (H,))
        for field in fields(layer):
            value = getattr(layer, field.name)
            if (value is None) == (field.name in wanted):
                raise ValueError(f"layers.{k}.{field.name} is {'missing' if value is None else 'not known'}")
            if value is not None:
                _expect(f"layers.{k}.{field.name}", value, *wanted[field.name])
        _check_reach(k, layer)
    if model.cell == "milstm" and L > 1:
        raise ValueError("an MI-LSTM of several layers has no integer arithmetic")


def reach(W: Int8, R: NDArray[Any]) -> NDArray[np.int64]:
    """How far each row's sums can go, times what they count."""
    far: NDArray[np.int64] = np.abs(W.astype(np.int64)).sum(axis=1) * PLANES * np.abs(R.astype(np.int64))
    return far


def _check_reach(k: int, layer: IntegerLayer) -> None:
    far = reach(layer.W_zm, layer.R_zm) + (np.abs(layer.zx.astype(np.int64)).max(axis=0) << SHIFT)
    if layer.W_zl is not None and layer.R_zl is not None:
        far = far + reach(layer.W_zl, layer.R_zl)
    fars = {"W_zm": far}
    if layer.W_mh is not None and layer.mx is not None and layer.e_m is not None:
        if int(layer.e_m.max()) > MOST_E_M:
            raise ValueError(f"layers.{k}.e_m is above {MOST_E_M}")
        p = np.abs(layer.mx.astype(np.int64)).max(axis=0)
        if layer.W_ml is not None and layer.R_ml is not None:
            p = np.full_like(p, 32767)
            fars["W_ml"] = reach(layer.W_ml, layer.R_ml)
        fars["W_mh"] = reach(layer.W_mh, p << layer.e_m.astype(np.int64))
    for name, far in fars.items():
        if int(far.max()) >= EXACT - (1 << SHIFT):
            raise ValueError(f"sums of layers.{k}.{name} go too far")


def _expect(name: str, array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype}{array.shape} instead of {np.dtype(dtype)}{shape}")
    # -128 has no opposite: without it the bounds of all sums are symmetric.
    if dtype == np.int8 and array.size and int(array.min()) < -127:
        raise ValueError(f"{name} holds -128")

"""Reading and writing files of torch.save without running any code from them."""

from __future__ import annotations

import argparse
import io
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from mulstm.errors import CheckpointError
from mulstm.files import write_atomic
from mulstm.interop.npz import check_sizes
from mulstm.interop.weights import AnyArray, plain_file
from mulstm.tensorfile import UNREADABLE, tensors_in

BLOCK = 1 << 20


def load(path: Path) -> Any:
    """What the file holds: tensors, numbers, containers and argparse namespaces; anything else is refused."""
    plain_file(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    try:
        _check(path)
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        kind = _named_type(str(error))
        raise CheckpointError(
            f"{path} holds {kind}, which is not read because a pickle can run any code. Open it where "
            "you trust it, keep only the dictionaries of tensors, and save those with torch.save."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # bytes that are no pickle can make its reader stumble over anything
        raise CheckpointError(
            f"{path} is not a readable torch file ({_first_line(error)}). Check that it was copied whole."
        ) from error


def _check(path: Path) -> None:
    """Looks for what torch.load does not see: other files, bit errors, what would fill the memory."""
    with path.open("rb") as file:
        start = file.read(2)
        if start != b"PK":
            if not start.startswith(pickle.PROTO):  # as earlier versions wrote it
                raise CheckpointError(f"{path} is no torch file. Give one that torch.save has written.")
            return
        with zipfile.ZipFile(file) as archive:
            check_sizes(archive.infolist(), path)
            for member in archive.infolist():
                if member.CRC:  # torch can be told to write none
                    with archive.open(member) as stream:
                        while stream.read(BLOCK):  # zipfile complains at the end
                            pass


def _safetensors(path: Path) -> Any:
    try:
        return tensors_in(path)
    except (SafetensorError, OSError, RuntimeError, *UNREADABLE) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({_first_line(error)}). "
            "Check that it was copied whole."
        ) from error


def save(value: Any, path: Path) -> None:
    """Whole or not at all."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomic(path, buffer.getvalue())


def as_arrays(tensors: Mapping[str, Any], where: str) -> dict[str, AnyArray]:
    """A state dict as numpy; half and bfloat16 are widened, which loses nothing."""
    arrays: dict[str, AnyArray] = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{where}: {key} should be a tensor but is {type(tensor).__name__}. "
                "Check that the file is of the format named."
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{where}: {key} is a sparse or quantised tensor. Save a plain one (to_dense, dequantize)."
            )
        try:
            arrays[key] = _array(tensor)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where}: {key} is no plain tensor ({_first_line(error)}). "
                "Save a contiguous one of float32 on the CPU."
            ) from error
    return arrays


def _array(tensor: torch.Tensor) -> AnyArray:
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError("it repeats its numbers")  # and could do so until the memory is full
    small = tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)
    # By force: what conj and neg put off is done.
    array: AnyArray = (tensor.float() if small else tensor).numpy(force=True)
    return array


def as_tensors(arrays: Mapping[str, AnyArray]) -> dict[str, torch.Tensor]:
    """The way back; every tensor owns its memory."""
    return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}


def mapping(value: Any, name: str, where: str) -> Mapping[str, Any]:
    """A nested dictionary, or an error that names it."""
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"{where}: {name} should be a dictionary but is {type(value).__name__}. "
            "Check that the file is of the format named."
        )
    if not all(isinstance(key, str) for key in value):
        raise CheckpointError(
            f"{where}: {name} has keys that are no names. Check that the file is of the format named."
        )
    return value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _named_type(message: str) -> str:
    marker = "GLOBAL "
    if marker in message:
        return "an object of type " + message.split(marker, 1)[1].split()[0]
    return "something other than tensors"

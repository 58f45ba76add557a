"""Tensors with a description in one .safetensors file: replaced in one step, read without trust."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_bytes
from torch import Tensor

from mulstm import files
from mulstm.errors import CheckpointError

# The one metadata key: with two, safetensors writes them in an order that changes from run to run.
KEY = "mulstm"
FORMAT = 1
CHECKSUM = "checksum"  # of files that have no fingerprint
# What it raises to read a description that is not as we write them.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)

Read = TypeVar("Read")


def write(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Replaces `path` in one step: a reader, or a run killed at any moment, sees the old file or the new."""
    plain, metadata = _plain(tensors, meta)
    with files.replacing(path) as temporary:
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as fault:
            raise OSError(None, str(fault)) from fault


def size_of(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    """The bytes of the file that `write` would make."""
    plain, metadata = _plain(tensors, meta)
    return len(save_bytes(plain, metadata=metadata))


def _plain(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    # safetensors refuses shared memory and strides, so each tensor gets memory of its own.
    plain = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    meta = {"format": FORMAT, **meta}
    if "fingerprint" not in meta:
        meta = {**meta, CHECKSUM: checksum([meta], plain)}
    return plain, {KEY: json.dumps(meta, sort_keys=True, allow_nan=False)}


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file written by `write` with this kind; a fingerprint is left to the caller."""
    return undisturbed(path, lambda: _read(path, kind))


def _read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    meta = read_meta(path)
    if meta.get("kind") != kind:
        raise CheckpointError(
            f"{path} is a {meta.get('kind')!r} file, not a {kind!r} file. Give the right one of the two."
        )
    tensors, stated = load(path), meta.pop(CHECKSUM, None)
    if "fingerprint" not in meta and stated != checksum([meta], tensors):
        raise changed(path, CHECKSUM)
    return tensors, meta


def undisturbed(path: Path, reading: Callable[[], Read]) -> Read:
    """What `reading` finds; a file that a run replaces meanwhile is read again, not called damaged."""
    while True:
        before = _stamp(path)
        try:
            return reading()
        except CheckpointError:
            if _stamp(path) == before:
                raise


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Those of any safetensors file; safetensors itself opens none whose name is no UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return dict(load_bytes(path.read_bytes()))
    return dict(load_file(path))


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `read_meta` has found to be ours."""
    try:
        return tensors_in(path)
    except (SafetensorError, *UNREADABLE) as fault:
        raise CheckpointError(
            f"The list of weights in {path} is damaged ({fault}). Take another copy, or train again."
        ) from fault


def _number(text: str) -> int | float:
    """One that can be told and computed with: JSON sets no bounds, and no file of ours has such a one."""
    if not math.isfinite(float(text)):
        _no_number(text)
    return float(text) if set(text) & set(".eE") else int(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is no number")


def read_meta(path: Path) -> dict[str, Any]:
    """Our metadata, read without touching the weights; every way a file can be wrong has its own sentence."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size, 100_000_000):
            raise _damaged_start(path, size, head)
        text = file.read(length)
    try:
        header = json.loads(text)
        beside = as_object(header.pop("__metadata__", None) or {})
        end = max((operator.index(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except UNREADABLE as fault:
        raise _damaged_start(path, size, head) from fault
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path} has {size:,} bytes and should have {8 + length + end:,}: it is cut short or damaged. "
            "Take another copy, or train on with --resume."
        )
    stored = beside.get(KEY)
    if stored is None:
        raise CheckpointError(
            f"{path} is a safetensors file of another program: it has no {KEY!r} entry. "
            'See "mulstm import" for the formats of other projects.'
        )
    try:
        numbers: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _number, "parse_int": _number}
        meta = as_object(json.loads(stored, **numbers))
        for key in ("metrics", "source", "corpus"):
            as_object(meta.get(key, {}))
    except UNREADABLE as fault:
        raise CheckpointError(
            f"The description inside {path} is damaged ({fault}). Take another copy."
        ) from fault
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {meta.get('format')!r}, and this mulstm reads {FORMAT}. Install a newer one."
        )
    return meta


def as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is no object")
    return value


def _damaged_start(path: Path, size: int, head: bytes) -> CheckpointError:
    # Asked last: the length of a sound header may begin with these bytes too.
    if head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return CheckpointError(
            f"{path} is a pickled or zipped file, which can run code when opened. "
            'Give a .safetensors file, or see "mulstm import" for the formats of other projects.'
        )
    return CheckpointError(
        f"{path} is no safetensors file, or its start is damaged ({size:,} bytes). Give another file."
    )


def changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"The contents of {path} do not match their {what}: the file was changed or damaged. "
        "Take another copy of it, or train again."
    )


def checksum(facts: list[Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()

"""`mulstm info`: what a report of a fault should begin with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson
from mulstm.errors import DataError


def command(
    model: Annotated[
        Path | None, typer.Argument(help="A checkpoint, run folder or released model to describe instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell versions, devices and backends, or describe a checkpoint.

    Of a backend that cannot run here it says why. It tells the cache's folder and size, too.
    """
    facts = _machine() if model is None else _model(model)
    if as_json:
        console.result_json(facts)
        return
    for line in _lines(facts):
        console.result(line)


def _machine() -> dict[str, Any]:
    import torch

    from mulstm import machine, ops
    from mulstm.ops import cuda_driver

    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    facts = machine.environment([torch.cuda.get_device_name(d) for d in devices[1:]])
    backends: dict[str, Any] = {}
    for device in devices:
        for precision in ("fp32", "bf16"):
            backends[f"{device} {precision}"] = {
                name: reason or "yes" for name, reason in ops.objections(device, precision).items()
            }
    return {
        **facts,
        "threads": torch.get_num_threads(),
        "backends": backends,
        "products of 8-bit numbers": {d: cuda_driver.why_not(torch.device(d)) or "yes" for d in devices},
        "fused on a CPU": _native(),
        "cache": _cache(),
    }


def _cache() -> dict[str, Any]:
    """Where unpacked texts, indices of records and statistics lie, which only ever grow in number."""
    from mulstm.data.store import cache_folder

    try:
        folder = cache_folder()
    except DataError as fault:
        return {"folder": str(fault)}
    used = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may just have removed it
            used += path.stat().st_size if path.is_file() else 0
    return {"folder": str(folder), "megabytes": round(used / 1e6, 1)}


def _native() -> dict[str, str]:
    """Who does the work of the fused backend on a CPU."""
    import torch

    from mulstm.ops import native

    if (reason := native.unavailable()) is not None:
        return {"all": f"PyTorch's calls: {reason}"}
    found = {"pointwise": "kernels of its own"}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        reason = native.products().why_not(dtype)
        found[f"products {name}"] = f"PyTorch's: {reason}" if reason else "kernels of its own"
    return found


def _model(path: Path) -> dict[str, Any]:
    from mulstm import checkpoint
    from mulstm.codec import integer

    file = checkpoint.find(path)  # once: a folder of runs may soon stand for another
    if integer.is_one(file):
        found = integer.load(file)
        about = {"file": str(file), "integer model": found.fingerprint.hex(), "made from": found.parent}
        return about | found.facts() | {"alphabet": found.alphabet.size}
    loaded = checkpoint.load(file)
    recipe = loaded.meta["recipe"]
    return {
        "file": str(file),
        "parameters": loaded.model.parameter_count(),
        "alphabet": loaded.alphabet.size,
        "fingerprint": loaded.meta["fingerprint"],
        "storage": loaded.meta["storage"],
        "metrics": loaded.meta["metrics"],
        "source": loaded.source,
        "recipe": recipe if loaded.tells_its_training else {"model": recipe["model"]},
    }


def _lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{indent}{console.in_line(name)}:", *_lines(value, indent + "  ")]
        else:
            told = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            lines.append(indent + console.in_line(f"{name}: {told}"))
    return lines
